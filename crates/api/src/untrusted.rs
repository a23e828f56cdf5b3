//! The local API without its socket, for the fuzzers (`fuzz/`).
//!
//! In: the bytes of a program. Out: the bytes that it gets. Nothing here is different from what the API does;
//! only the socket is missing.

use std::{io, time::Duration};

use mpvpn_http::{serve_connection, untrusted::exchange};
use mpvpn_status::events::SharedEventLog;
use tokio::runtime::{Builder, Runtime};

use crate::server::{ApiState, RequestHandler, answer};

/// The local API of a process, whose programs are byte strings.
pub struct PlainApi {
    runtime: Runtime,
    state: ApiState,
}

impl PlainApi {
    /// An API that gives its requests to `source`.
    ///
    /// # Errors
    /// If the machine has no descriptors left.
    pub fn new(source: RequestHandler, events: SharedEventLog) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_time().build()?;
        Ok(Self { runtime, state: ApiState::new(source, events) })
    }

    /// The bytes that a program gets that sends `sent` and then ends its side, at most `max` bytes; `None` if
    /// the connection does not end within `time`.
    pub fn serve(&self, sent: &[u8], max: usize, time: Duration) -> Option<Vec<u8>> {
        let answer = |request| answer(request, crate::access::Access::Change, self.state.clone());
        let serve = |stream| serve_connection(stream, answer, || ());
        self.runtime.block_on(async { exchange(serve, sent, max, Duration::ZERO, time).await })
    }
}
