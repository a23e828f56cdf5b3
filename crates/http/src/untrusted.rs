//! Connections in memory, for the fuzzers (`fuzz/`).
//!
//! In: the bytes of a client that ends its side after them. Out: the bytes that it gets.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split},
    join,
    time::timeout,
};

/// Bytes in flight in each direction. Smaller: more wake-ups. Chosen.
const PIPE_BYTES: usize = 16 << 10;

/// Serves a connection on which the client sends `sent` and then ends its side. Returns what the client gets,
/// at most `max` bytes; `None` if the connection does not end within `time`.
pub async fn exchange<F: Future>(
    serve: impl FnOnce(DuplexStream) -> F,
    sent: &[u8],
    max: u64,
    time: Duration,
) -> Option<Vec<u8>> {
    let (ours, theirs) = duplex(PIPE_BYTES);
    let (reader, mut writer) = split(theirs);
    let serve = serve(ours);
    // A server may stop reading at any time. Both halves are dropped at their ends, and so is the connection.
    let write = async move { writer.write_all(sent).await.is_ok() && writer.shutdown().await.is_ok() };
    let read = async move {
        let mut got = Vec::new();
        let _ = reader.take(max).read_to_end(&mut got).await;
        got
    };
    let all = async { join!(serve, write, read) };
    timeout(time, all).await.ok().map(|(_, _, got)| got)
}
