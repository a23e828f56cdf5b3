//! A splice: an established TCP connection, a stream of the tunnel, and the bytes that move between them in
//! both directions.
//!
//! In: readiness of the socket and of the stream. Out: bytes moved from one to the other, and whether both
//! directions have ended. Always holds: nothing is read that the other side has no space for, beyond 64 KiB
//! on the way to the socket; each half closes by itself, after its last byte.

use std::{
    fmt,
    hash::Hash,
    io::{self, IoSlice},
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use bytes::{Buf, Bytes, BytesMut};
use mpvpn_os::{
    TcpSocket,
    poll::{Event, Interest, Poller},
};
pub use mpvpn_tunnel::RelayRead;

/// The streams of the tunnel that splices are connected to.
pub trait ByteStreams {
    /// Identifies a stream.
    type Id: Copy + Eq + Hash + fmt::Debug;

    /// Takes the next bytes of a stream. After `Blocked`, [`Splice::on_stream_readable`] must be called when
    /// there are more; after `Finished` it is not called again.
    fn read(&mut self, now: Instant, id: Self::Id) -> RelayRead;

    /// The number of bytes that the stream accepts now. After 0, [`Splice::move_to_stream`] must be called
    /// when it accepts more.
    fn writable_bytes(&mut self, now: Instant, id: Self::Id) -> usize;

    /// Writes bytes of the socket, at most as many as [`Self::writable_bytes`] returned.
    fn write(&mut self, now: Instant, id: Self::Id, data: Bytes);

    /// Closes the socket's half of the stream.
    fn finish(&mut self, now: Instant, id: Self::Id);
}

/// The parts of an event-loop iteration that connections need.
pub struct Context<'a, S> {
    /// When the iteration began.
    pub now: Instant,
    /// Watches the sockets.
    pub poller: &'a Poller,
    /// The streams of the tunnel.
    pub streams: &'a mut S,
}

/// A connection on which no byte moved for this long is reset (RFC 5382 §5 asks for at least 2 hours and 4
/// minutes). Shorter: quiet connections break. Longer: dead connections keep their sockets.
const IDLE_TIMEOUT: Duration = Duration::from_secs(7440);
/// The same after one half has closed. Chosen; shorter than the kernel's limits for orphaned connections
/// would break slow answers.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes read from one socket for one event, so that other sockets get their turn. Larger: longer iterations.
/// Smaller: more iterations. Chosen.
const MAX_READ_BYTES_PER_EVENT: usize = 256 << 10;
/// Bytes and chunks of one `writev` to a socket. Larger: memory of what is taken out of the stream. Smaller:
/// system calls. Chosen.
const MAX_WRITE_BYTES: usize = 64 << 10;
const MAX_WRITE_CHUNKS: usize = 64;
/// The size of the shared read buffer.
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Smaller reads are copied out of the read buffer. However small they are, bytes that wait for a stream
/// therefore keep at most four times their size in memory.
const MIN_ZERO_COPY_BYTES: usize = 16 << 10;

/// Buffers shared by all connections of a shard, because only one moves bytes at a time.
#[derive(Default)]
pub struct SpliceBuffers {
    /// Empty, with capacity for the next read.
    buffer: BytesMut,
    chunks: Vec<Bytes>,
}

/// A spliced connection.
pub struct Splice {
    socket: TcpSocket,
    token: u64,
    /// The poller's interest in the socket; `None` if the socket is not registered.
    registered: Option<Interest>,
    /// Taken from the stream, and not yet written to the socket.
    unsent: Bytes,
    /// Read from the socket before the splice existed, and not yet written to the stream.
    prefetched: Bytes,
    stream_half: Half,
    socket_half: Half,
    /// The stream is full, so the poller does not wait for the socket to be readable.
    read_paused: bool,
    /// The socket reported a hang-up or an error, which a level-triggered poller would report again and
    /// again.
    hung_up: bool,
    /// When bytes last moved.
    last_activity: Instant,
    /// Bytes written to the socket, and read from it.
    to_socket: u64,
    from_socket: u64,
}

/// Counters and state of a splice.
pub struct TransferState {
    /// Bytes written to the socket.
    pub to_socket: u64,
    /// Bytes read from it.
    pub from_socket: u64,
    /// When bytes last moved.
    pub last_activity: Instant,
    /// Whether the stream's half has ended.
    pub stream_ended: bool,
    /// Whether the socket's half has ended.
    pub socket_ended: bool,
}

/// The state of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Open,
    /// All bytes have been read from the source.
    SourceEnded,
    /// The end has been forwarded to the other side.
    EndForwarded,
}

impl Splice {
    /// Splices a socket that the poller knows by `token` with this interest.
    pub fn new(now: Instant, socket: TcpSocket, token: u64, registered: Interest) -> Self {
        Self {
            socket,
            token,
            registered: Some(registered),
            unsent: Bytes::new(),
            prefetched: Bytes::new(),
            stream_half: Half::Open,
            socket_half: Half::Open,
            read_paused: false,
            hung_up: false,
            last_activity: now,
            to_socket: 0,
            from_socket: 0,
        }
    }

    /// The same, with bytes that precede all others: bytes for the socket, and bytes that were already read
    /// from the socket.
    pub fn with_prefix(self, to_socket: Bytes, to_stream: Bytes) -> Self {
        Self { unsent: to_socket, prefetched: to_stream, ..self }
    }

    /// The socket's poller token.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// The present counters and state.
    pub fn transfer_state(&self) -> TransferState {
        TransferState {
            to_socket: self.to_socket,
            from_socket: self.from_socket,
            last_activity: self.last_activity,
            stream_ended: self.stream_half != Half::Open,
            socket_ended: self.socket_half != Half::Open,
        }
    }

    /// The socket.
    pub fn socket(&self) -> &TcpSocket {
        &self.socket
    }

    /// Whether bytes of either direction wait, which may be in the socket.
    pub fn waits(&self) -> bool {
        self.read_paused || !self.unsent.is_empty()
    }

    /// Whether both directions have ended.
    pub fn has_ended(&self) -> bool {
        (self.stream_half, self.socket_half) == (Half::EndForwarded, Half::EndForwarded)
    }

    /// When the connection is reset if nothing moves until then.
    pub fn expires(&self) -> Instant {
        let is_half = self.stream_half == Half::EndForwarded || self.socket_half == Half::EndForwarded;
        self.last_activity + if is_half { HALF_CLOSED_TIMEOUT } else { IDLE_TIMEOUT }
    }

    /// Resets the connection (RST).
    pub fn reset(self) {
        self.socket.reset();
    }

    /// Handles an event of the socket.
    pub fn on_socket_ready<S: ByteStreams>(
        &mut self,
        cx: &mut Context<'_, S>,
        event: Event,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        if event.writable && !self.unsent.is_empty() {
            self.move_to_socket(cx, id, buffers)?;
        }
        if event.readable && !self.read_paused {
            self.move_to_stream(cx, id, buffers)?;
        }
        if event.closed && (self.read_paused || self.socket_half != Half::Open) {
            // Nothing reads the socket now, so look for its error. Without an error, the end is read once the
            // stream accepts the bytes before it.
            self.hung_up = true;
            self.socket.take_error().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// The stream has bytes, or has ended.
    pub fn on_stream_readable<S: ByteStreams>(
        &mut self,
        cx: &mut Context<'_, S>,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        // If bytes wait for a full socket, its writable event continues.
        if self.unsent.is_empty() { self.move_to_socket(cx, id, buffers) } else { Ok(()) }
    }

    /// Moves bytes from the stream to the socket, until the stream has no more or the socket accepts no more.
    pub fn move_to_socket<S: ByteStreams>(
        &mut self,
        cx: &mut Context<'_, S>,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        let chunks = &mut buffers.chunks;
        loop {
            let mut bytes = self.unsent.len();
            if bytes > 0 {
                chunks.push(std::mem::take(&mut self.unsent));
            }
            let mut is_blocked = false;
            while self.stream_half == Half::Open
                && !is_blocked
                && bytes < MAX_WRITE_BYTES
                && chunks.len() < MAX_WRITE_CHUNKS
            {
                match cx.streams.read(cx.now, id) {
                    RelayRead::Data(data) => {
                        // An empty chunk counts as no bytes.
                        is_blocked = data.is_empty();
                        bytes += data.len();
                        chunks.extend((!data.is_empty()).then_some(data));
                    }
                    RelayRead::Finished => self.stream_half = Half::SourceEnded,
                    // An event that reports a broken stream follows.
                    RelayRead::Blocked | RelayRead::Broken => is_blocked = true,
                }
            }
            if chunks.is_empty() {
                break;
            }
            let slices: ArrayVec<IoSlice<'_>, MAX_WRITE_CHUNKS> =
                chunks.iter().map(|chunk| IoSlice::new(chunk)).collect();
            let result = self.socket.write(&slices);
            drop(slices);
            let written = match result {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => {
                    chunks.clear();
                    return Err(error);
                }
            };
            if written > 0 {
                self.last_activity = cx.now;
                self.to_socket += written as u64;
            }
            if written < bytes {
                self.unsent = unwritten(chunks, written);
                return Ok(());
            }
            chunks.clear();
            if is_blocked {
                break;
            }
        }
        if self.stream_half == Half::SourceEnded {
            self.socket.finish()?;
            self.stream_half = Half::EndForwarded;
            self.last_activity = cx.now;
        }
        Ok(())
    }

    /// Moves bytes from the socket to the stream, until the socket has no more, the stream accepts no more,
    /// or `MAX_READ_BYTES_PER_EVENT` are read.
    pub fn move_to_stream<S: ByteStreams>(
        &mut self,
        cx: &mut Context<'_, S>,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        let buffer = &mut buffers.buffer;
        let mut left = MAX_READ_BYTES_PER_EVENT;
        while self.socket_half == Half::Open {
            let writable = cx.streams.writable_bytes(cx.now, id);
            if writable == 0 {
                // If something was read, the stream may accept more before the poller reports the socket
                // again.
                self.read_paused |= left == MAX_READ_BYTES_PER_EVENT;
                return Ok(());
            }
            if !self.prefetched.is_empty() {
                let data = self.prefetched.split_to(writable.min(self.prefetched.len()));
                self.from_socket += data.len() as u64;
                cx.streams.write(cx.now, id, data);
                self.last_activity = cx.now;
                continue;
            }
            if left == 0 {
                break;
            }
            if buffer.capacity() < MIN_ZERO_COPY_BYTES {
                *buffer = BytesMut::with_capacity(READ_BUFFER_BYTES);
            }
            let limit = writable.min(left).min(buffer.capacity());
            let count = match self.socket.read(buffer, limit) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            self.last_activity = cx.now;
            if count == 0 {
                self.socket_half = Half::EndForwarded;
                cx.streams.finish(cx.now, id);
                break;
            }
            let data = match count < MIN_ZERO_COPY_BYTES {
                true => Bytes::copy_from_slice(buffer),
                false => buffer.split().freeze(),
            };
            buffer.clear();
            self.from_socket += count as u64;
            cx.streams.write(cx.now, id, data);
            left -= count;
            if count < limit {
                break;
            }
        }
        self.read_paused = false;
        Ok(())
    }

    /// Sets the poller's interest to what can make progress now.
    pub fn update_interest(&mut self, poller: &Poller) -> io::Result<()> {
        let reads = self.socket_half == Half::Open && !self.read_paused;
        let wanted = match (reads, !self.unsent.is_empty()) {
            (true, true) => Some(Interest::ReadWrite),
            (true, false) => Some(Interest::Read),
            (false, true) => Some(Interest::Write),
            (false, false) => (!self.hung_up).then_some(Interest::Nothing),
        };
        if wanted == self.registered {
            return Ok(());
        }
        match (self.registered, wanted) {
            (Some(_), Some(interest)) => poller.modify(&self.socket, self.token, interest)?,
            (None, Some(interest)) => poller.add(&self.socket, self.token, interest)?,
            (_, None) => poller.remove(&self.socket)?,
        }
        self.registered = wanted;
        Ok(())
    }
}

/// Takes all `chunks` and returns the bytes after the first `written`, as one chunk.
fn unwritten(chunks: &mut Vec<Bytes>, mut written: usize) -> Bytes {
    let first = chunks.iter().position(|chunk| {
        let is_here = written < chunk.len();
        written -= if is_here { 0 } else { chunk.len() };
        is_here
    });
    chunks.drain(..first.unwrap_or(chunks.len()));
    let Some(chunk) = chunks.first_mut() else { return Bytes::new() };
    chunk.advance(written);
    let unwritten = match &chunks[..] {
        [large] if large.len() >= MIN_ZERO_COPY_BYTES => large.clone(),
        // Small chunks would keep whole buffers of received datagrams in memory while the socket is full.
        _ => Bytes::from(chunks.concat()),
    };
    chunks.clear();
    unwritten
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_written_is_kept_in_order_and_in_one_piece() {
        let all = b"onetwothree";
        for written in 0..all.len() {
            let mut chunks = [&b"one"[..], b"two", b"three"].map(Bytes::from_static).to_vec();
            assert_eq!(unwritten(&mut chunks, written), all[written..]);
            assert!(chunks.is_empty());
        }
        let large = Bytes::from(vec![7; MIN_ZERO_COPY_BYTES + 1]);
        let kept = unwritten(&mut vec![Bytes::from_static(b"one"), large.clone()], 4);
        assert_eq!(kept.as_ptr(), large[1..].as_ptr(), "a large chunk is not copied");
    }
}
