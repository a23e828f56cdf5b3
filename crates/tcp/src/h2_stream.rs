//! An HTTP/2 stream (RFC 9113) as a byte stream in both directions, as after an accepted CONNECT.
//!
//! In: the send and the receive half of a stream. Out: [`AsyncRead`] and [`AsyncWrite`]. Always holds: unread
//! bytes hold back the peer by its flow-control window; a write waits for the peer's window and for space in
//! the connection's send buffer; a reset by the peer is an error of kind [`io::ErrorKind::ConnectionReset`]
//! and never looks like an end of stream; a stream that is dropped before its end was written is reset.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes handed to the connection in one write. Larger: one stream delays the others. Smaller: more DATA
/// frames. Chosen.
const MAX_WRITE_BYTES: usize = 64 << 10;

/// Both halves of a stream.
#[derive(Debug)]
pub struct H2Stream {
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// Received and not yet read.
    unread: Bytes,
    finished: bool,
}

impl H2Stream {
    /// Joins the two halves.
    pub fn new(send: SendStream<Bytes>, receive: RecvStream) -> Self {
        Self { send, receive, unread: Bytes::new(), finished: false }
    }

    /// Resets the stream with this error code.
    pub fn reset(&mut self, reason: Reason) {
        self.finished = true;
        self.send.send_reset(reason);
    }

    /// Ready when the peer has reset the stream or the connection is closed, even if nobody reads or writes.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        // After the end of our half, h2 does not report resets any more.
        if self.finished {
            return Poll::Pending;
        }
        self.send.poll_reset(cx).map(|reset| reset.map_or_else(io_error, |reason| io_error(reason.into())))
    }
}

impl AsyncRead for H2Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            match ready!(self.receive.poll_data(cx)) {
                Some(Ok(data)) => self.unread = data,
                Some(Err(error)) => return Poll::Ready(Err(io_error(error))),
                None => return Poll::Ready(Ok(())),
            }
        }
        let count = self.unread.len().min(into.remaining());
        into.put_slice(&self.unread[..count]);
        self.unread.advance(count);
        // Fails only if the stream is closed, which the next call reports.
        let _ = self.receive.flow_control().release_capacity(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for H2Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let count = ready!(poll_capacity(&mut self.send, cx, data.len()))?;
        self.send.send_data(Bytes::copy_from_slice(&data[..count]), false).map_err(io_error)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The connection's task writes what was handed to it.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.finished {
            self.finished = true;
            self.send.send_data(Bytes::new(), true).map_err(io_error)?;
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for H2Stream {
    fn drop(&mut self) {
        if !self.finished {
            self.send.send_reset(Reason::CANCEL);
        }
    }
}

/// Waits until the stream accepts at least one byte; returns how many of `requested` bytes it accepts.
///
/// # Errors
/// Why the stream accepts nothing any more.
pub fn poll_capacity(
    send: &mut SendStream<Bytes>,
    cx: &mut Context<'_>,
    requested: usize,
) -> Poll<io::Result<usize>> {
    let requested = requested.min(MAX_WRITE_BYTES);
    send.reserve_capacity(requested);
    loop {
        // `poll_capacity` reports only increases, so look at the present capacity first.
        match send.capacity() {
            0 => {}
            capacity => return Poll::Ready(Ok(capacity.min(requested))),
        }
        match ready!(send.poll_capacity(cx)) {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Poll::Ready(Err(io_error(error))),
            None => return Poll::Ready(Err(close_error(send, cx))),
        }
    }
}

/// Why a stream accepts no more data.
fn close_error(send: &mut SendStream<Bytes>, cx: &mut Context<'_>) -> io::Error {
    match send.poll_reset(cx) {
        Poll::Ready(Ok(reason)) => io_error(reason.into()),
        Poll::Ready(Err(error)) => io_error(error),
        Poll::Pending => io::ErrorKind::BrokenPipe.into(),
    }
}

/// Converts an HTTP/2 error for readers and writers.
fn io_error(error: h2::Error) -> io::Error {
    match error.is_io() {
        true => error.into_io().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()),
        false => io::Error::new(io::ErrorKind::ConnectionReset, error),
    }
}
