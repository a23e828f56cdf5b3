//! Connections in memory, for the fuzzers (`fuzz/`).
//!
//! In: the bytes of a client that ends its side when it has the answers. Out: the bytes that it gets.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex, split},
    join,
    sync::Notify,
    time::timeout,
};

/// Bytes in flight in each direction. Smaller: more wake-ups. Chosen.
const PIPE_BYTES: usize = 16 << 10;

/// Serves a connection on which the client sends `sent`, and ends its side when nothing has come for `quiet`.
/// Returns what the client gets, at most `max` bytes; `None` if the connection does not end within `time`.
pub async fn exchange<F: Future>(
    serve: impl FnOnce(DuplexStream) -> F,
    sent: &[u8],
    max: usize,
    quiet: Duration,
    time: Duration,
) -> Option<Vec<u8>> {
    let (ours, theirs) = duplex(PIPE_BYTES);
    let (mut reader, mut writer) = split(theirs);
    let (serve, is_quiet) = (serve(ours), &Notify::new());
    // A server may stop reading at any time. Both halves are dropped at their ends, and so is the connection.
    let write = async move {
        let is_sent = writer.write_all(sent).await.is_ok();
        is_quiet.notified().await;
        is_sent && writer.shutdown().await.is_ok()
    };
    let read = async move {
        let (mut got, mut buffer) = (Vec::new(), [0; 4096]);
        while got.len() < max {
            let read = match timeout(quiet, reader.read(&mut buffer)).await {
                Ok(read) => read,
                Err(_) => {
                    is_quiet.notify_one();
                    reader.read(&mut buffer).await
                }
            };
            match read {
                Ok(count @ 1..) => got.extend_from_slice(&buffer[..count]),
                Ok(0) | Err(_) => break,
            }
        }
        is_quiet.notify_one();
        got.truncate(max);
        got
    };
    let all = async { join!(serve, write, read) };
    timeout(time, all).await.ok().map(|(_, _, got)| got)
}
