//! A connection that ends when its reader does not read.

use std::{pin::Pin, time::Duration};

use tokio::io::AsyncWrite;
use tokio_io_timeout::TimeoutWriter;

/// Time for which a write may wait for the reader. Longer: readers that are gone keep their places; shorter:
/// a browser on a bad network connects again and again. Chosen.
pub(crate) const MAX_WRITE_WAIT: Duration = Duration::from_secs(15);

/// A connection whose writes wait at most `max_wait`, as in [`MAX_WRITE_WAIT`].
pub(crate) fn limited<S: AsyncWrite>(stream: S, max_wait: Duration) -> Pin<Box<TimeoutWriter<S>>> {
    let mut writer = TimeoutWriter::new(stream);
    writer.set_timeout(Some(max_wait));
    Box::pin(writer)
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        time::sleep,
    };

    use super::*;

    #[test]
    fn a_reader_that_does_not_read_ends_the_connection_and_a_slow_one_does_not() {
        let max_wait = Duration::from_millis(200);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(async {
            let (near, mut far) = tokio::io::duplex(10);
            let mut writer = limited(near, max_wait);
            let reader = tokio::spawn(async move {
                let mut part = [0; 10];
                for _ in 0..5 {
                    sleep(max_wait / 4).await;
                    far.read_exact(&mut part).await.unwrap();
                }
                far
            });
            writer.write_all(&[7; 50]).await.unwrap();
            let _far = reader.await.unwrap();
            let error = writer.write_all(&[7; 50]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}
