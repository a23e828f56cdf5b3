//! A TCP connection that stands, a stream of the tunnel, and the bytes that go between them in both directions.
//!
//! In: readiness of the socket and of the stream. Out: bytes moved from one to the other, and whether the
//! connection has come to an end. Always holds: nothing is read that the other side has no room for, beyond 64 KiB on
//! the way to the socket; each half ends by itself, after its last byte.

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
use mpvpn_tunnel::RelayRead;

/// The streams at the other ends of pipes.
pub(crate) trait ByteStreams {
    /// Names a stream.
    type Id: Copy + Eq + Hash + fmt::Debug;

    /// The next bytes of a stream, which count as taken. After `Blocked`, [`Splice::readable`] is due when there are
    /// more; after `Finished` it is not asked again.
    fn read(&mut self, now: Instant, id: Self::Id) -> StreamRead;

    /// Bytes that may be written to a stream now. After 0, [`Splice::move_to_stream`] is due when there is room again.
    fn writable_bytes(&mut self, id: Self::Id) -> usize;

    /// Bytes of the socket, no more than there is room for.
    fn write(&mut self, now: Instant, id: Self::Id, data: Bytes);

    /// The socket's half has ended.
    fn finish(&mut self, now: Instant, id: Self::Id);
}

/// What a stream has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamRead {
    /// Bytes.
    Data(Bytes),
    /// There will be no more.
    Finished,
    /// Nothing for now.
    Blocked,
}

impl From<RelayRead> for StreamRead {
    fn from(read: RelayRead) -> Self {
        match read {
            RelayRead::Data(data) => Self::Data(data),
            RelayRead::Finished => Self::Finished,
            // The event that it is gone follows.
            RelayRead::Blocked | RelayRead::Broken => Self::Blocked,
        }
    }
}

/// A connection on which nothing moved for so long is given up (RFC 5382 §5: not before 2 hours and 4 minutes).
const IDLE_TIMEOUT: Duration = Duration::from_secs(7440);
/// The same where one half has ended.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes read from a socket in one turn, so that others have theirs.
const MAX_READ_BYTES_PER_EVENT: usize = 256 << 10;
/// Bytes and pieces of one write.
const MAX_WRITE_BYTES: usize = 64 << 10;
const MAX_WRITE_CHUNKS: usize = 64;
/// The memory that is read into.
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Less than this is copied out of that memory: however small the pieces are that wait for a stream, they keep no more
/// than four times as much alive.
const MIN_ZERO_COPY_BYTES: usize = 16 << 10;

/// Memory that the connections of a shard share, because only one moves bytes at a time.
#[derive(Default)]
pub(crate) struct SpliceBuffers {
    /// Empty, with room for what comes next.
    buffer: BytesMut,
    chunks: Vec<Bytes>,
}

/// A connection.
pub(crate) struct Splice {
    socket: TcpSocket,
    token: u64,
    /// What the poller waits for; `None`: it does not know the socket.
    registered: Option<Interest>,
    /// Taken from the stream, and not yet taken by the socket.
    unsent: Bytes,
    /// Taken from the socket before there was a pipe, and not yet given to the stream.
    prefetched: Bytes,
    stream_half: Half,
    socket_half: Half,
    /// The stream had no room, and nobody waits for the socket to be readable.
    read_paused: bool,
    /// The socket has seen the end of both halves, or an error, and the poller would tell it again and again.
    hung_up: bool,
    /// When bytes moved last.
    last_activity: Instant,
    /// Bytes that the socket took, and that were taken from it.
    to_socket: u64,
    from_socket: u64,
}

/// What has become of a connection so far.
pub(crate) struct TransferState {
    /// Bytes that the socket took, and that were taken from it.
    pub(crate) to_socket: u64,
    pub(crate) from_socket: u64,
    /// When bytes moved last.
    pub(crate) last_activity: Instant,
    /// Whether nothing more comes from the stream, and from the socket.
    pub(crate) stream_ended: bool,
    pub(crate) socket_ended: bool,
}

/// One direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Open,
    /// All bytes have been taken from its source.
    SourceEnded,
    /// Its end has been passed on.
    EndForwarded,
}

impl Splice {
    /// For a socket that the poller knows by `token`, with this interest.
    pub(crate) fn new(now: Instant, socket: TcpSocket, token: u64, registered: Interest) -> Self {
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

    /// The same, with bytes that come before all others: those that the socket is to have, and those that were read
    /// from it.
    pub(crate) fn with_prefix(self, to_socket: Bytes, to_stream: Bytes) -> Self {
        Self { unsent: to_socket, prefetched: to_stream, ..self }
    }

    /// Its token.
    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// What has become of it so far.
    pub(crate) fn transfer_state(&self) -> TransferState {
        TransferState {
            to_socket: self.to_socket,
            from_socket: self.from_socket,
            last_activity: self.last_activity,
            stream_ended: self.stream_half != Half::Open,
            socket_ended: self.socket_half != Half::Open,
        }
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> &TcpSocket {
        &self.socket
    }

    /// Whether both halves have ended.
    pub(crate) fn has_ended(&self) -> bool {
        (self.stream_half, self.socket_half) == (Half::EndForwarded, Half::EndForwarded)
    }

    /// When it is given up if nothing moves until then.
    pub(crate) fn expires(&self) -> Instant {
        let is_half = self.stream_half == Half::EndForwarded || self.socket_half == Half::EndForwarded;
        self.last_activity + if is_half { HALF_CLOSED_TIMEOUT } else { IDLE_TIMEOUT }
    }

    /// Breaks the connection.
    pub(crate) fn reset(self) {
        self.socket.reset();
    }

    /// The socket is ready.
    pub(crate) fn on_socket_ready<S: ByteStreams>(
        &mut self,
        now: Instant,
        event: Event,
        streams: &mut S,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        if event.writable && !self.unsent.is_empty() {
            self.move_to_socket(now, streams, id, buffers)?;
        }
        if event.readable && !self.read_paused {
            self.move_to_stream(now, streams, id, buffers)?;
        }
        if event.closed && (self.read_paused || self.socket_half != Half::Open) {
            // Nobody will read the error. Where there is none, the end waits until there is room for what comes before.
            self.hung_up = true;
            self.socket.take_error().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// The stream has something.
    pub(crate) fn on_stream_readable<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        // A socket that is full says when it has room.
        if self.unsent.is_empty() { self.move_to_socket(now, streams, id, buffers) } else { Ok(()) }
    }

    /// Moves what the stream has to the socket, until one has nothing more or the other takes nothing more.
    pub(crate) fn move_to_socket<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
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
                match streams.read(now, id) {
                    StreamRead::Data(data) => {
                        // An empty piece is nothing that came.
                        is_blocked = data.is_empty();
                        bytes += data.len();
                        chunks.extend((!data.is_empty()).then_some(data));
                    }
                    StreamRead::Finished => self.stream_half = Half::SourceEnded,
                    StreamRead::Blocked => is_blocked = true,
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
                self.last_activity = now;
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
            self.last_activity = now;
        }
        Ok(())
    }

    /// Moves what the socket has to the stream, until one has nothing more, the other has no more room, or others are to have their turn.
    pub(crate) fn move_to_stream<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
        id: S::Id,
        buffers: &mut SpliceBuffers,
    ) -> io::Result<()> {
        let buffer = &mut buffers.buffer;
        let mut left = MAX_READ_BYTES_PER_EVENT;
        while self.socket_half == Half::Open {
            let writable = streams.writable_bytes(id);
            if writable == 0 {
                // Where something was read, there may be room again before the poller tells of more.
                self.read_paused |= left == MAX_READ_BYTES_PER_EVENT;
                return Ok(());
            }
            if !self.prefetched.is_empty() {
                let data = self.prefetched.split_to(writable.min(self.prefetched.len()));
                self.from_socket += data.len() as u64;
                streams.write(now, id, data);
                self.last_activity = now;
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
            self.last_activity = now;
            if count == 0 {
                self.socket_half = Half::EndForwarded;
                streams.finish(now, id);
                break;
            }
            let data = match count < MIN_ZERO_COPY_BYTES {
                true => Bytes::copy_from_slice(buffer),
                false => buffer.split().freeze(),
            };
            buffer.clear();
            self.from_socket += count as u64;
            streams.write(now, id, data);
            left -= count;
            if count < limit {
                break;
            }
        }
        self.read_paused = false;
        Ok(())
    }

    /// Lets the poller wait for what is of use now.
    pub(crate) fn update_interest(&mut self, poller: &Poller) -> io::Result<()> {
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

/// What of `pieces` comes after the first `written` bytes, in one piece; takes all of them.
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
        // Small pieces would keep whole buffers of received datagrams alive for as long as the socket is full.
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
