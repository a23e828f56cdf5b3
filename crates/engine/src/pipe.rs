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

    /// The next bytes of a stream, which count as taken. After `Blocked`, [`Pipe::readable`] is due when there are
    /// more; after `Finished` it is not asked again.
    fn read(&mut self, now: Instant, id: Self::Id) -> FromStream;

    /// Bytes that may be written to a stream now. After 0, [`Pipe::fill_stream`] is due when there is room again.
    fn room(&mut self, id: Self::Id) -> usize;

    /// Bytes of the socket, no more than there is room for.
    fn write(&mut self, now: Instant, id: Self::Id, data: Bytes);

    /// The socket's half has ended.
    fn finish(&mut self, now: Instant, id: Self::Id);
}

/// What a stream has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FromStream {
    /// Bytes.
    Data(Bytes),
    /// There will be no more.
    Finished,
    /// Nothing for now.
    Blocked,
}

impl From<RelayRead> for FromStream {
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
const IDLE: Duration = Duration::from_secs(7440);
/// The same where one half has ended.
const HALF_CLOSED: Duration = Duration::from_secs(600);
/// Bytes read from a socket in one turn, so that others have theirs.
const TURN: usize = 256 << 10;
/// Bytes and pieces of one write.
const WRITE: usize = 64 << 10;
const PIECES: usize = 64;
/// The memory that is read into.
const BUFFER: usize = 64 << 10;
/// Less than this is copied out of that memory: however small the pieces are that wait for a stream, they keep no more
/// than four times as much alive.
const SMALL: usize = 16 << 10;

/// Memory that the connections of a shard share, because only one moves bytes at a time.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Empty, with room for what comes next.
    buffer: BytesMut,
    pieces: Vec<Bytes>,
}

/// A connection.
pub(crate) struct Pipe {
    socket: TcpSocket,
    token: u64,
    /// What the poller waits for; `None`: it does not know the socket.
    watched: Option<Interest>,
    /// Taken from the stream, and not yet taken by the socket.
    unsent: Bytes,
    /// Taken from the socket before there was a pipe, and not yet given to the stream.
    early: Bytes,
    stream: Half,
    far: Half,
    /// The stream had no room, and nobody waits for the socket to be readable.
    paused: bool,
    /// The socket has seen the end of both halves, or an error, and the poller would tell it again and again.
    hung_up: bool,
    /// When bytes moved last.
    active: Instant,
    /// Bytes that the socket took, and that were taken from it.
    to_socket: u64,
    from_socket: u64,
}

/// What has become of a connection so far.
pub(crate) struct Moved {
    /// Bytes that the socket took, and that were taken from it.
    pub(crate) to_socket: u64,
    pub(crate) from_socket: u64,
    /// When bytes moved last.
    pub(crate) active: Instant,
    /// Whether nothing more comes from the stream, and from the socket.
    pub(crate) stream_ended: bool,
    pub(crate) socket_ended: bool,
}

/// One direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Open,
    /// All bytes have been taken from its source.
    Read,
    /// Its end has been passed on.
    Ended,
}

impl Pipe {
    /// For a socket that the poller knows by `token`, with this interest.
    pub(crate) fn new(now: Instant, socket: TcpSocket, token: u64, watched: Interest) -> Self {
        Self {
            socket,
            token,
            watched: Some(watched),
            unsent: Bytes::new(),
            early: Bytes::new(),
            stream: Half::Open,
            far: Half::Open,
            paused: false,
            hung_up: false,
            active: now,
            to_socket: 0,
            from_socket: 0,
        }
    }

    /// The same, with bytes that come before all others: those that the socket is to have, and those that were read
    /// from it.
    pub(crate) fn with(self, to_socket: Bytes, to_stream: Bytes) -> Self {
        Self { unsent: to_socket, early: to_stream, ..self }
    }

    /// Its token.
    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// What has become of it so far.
    pub(crate) fn moved(&self) -> Moved {
        Moved {
            to_socket: self.to_socket,
            from_socket: self.from_socket,
            active: self.active,
            stream_ended: self.stream != Half::Open,
            socket_ended: self.far != Half::Open,
        }
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> &TcpSocket {
        &self.socket
    }

    /// Whether both halves have ended.
    pub(crate) fn has_ended(&self) -> bool {
        (self.stream, self.far) == (Half::Ended, Half::Ended)
    }

    /// When it is given up if nothing moves until then.
    pub(crate) fn expires(&self) -> Instant {
        let is_half = self.stream == Half::Ended || self.far == Half::Ended;
        self.active + if is_half { HALF_CLOSED } else { IDLE }
    }

    /// Breaks the connection.
    pub(crate) fn reset(self) {
        self.socket.reset();
    }

    /// The socket is ready.
    pub(crate) fn ready<S: ByteStreams>(
        &mut self,
        now: Instant,
        event: Event,
        streams: &mut S,
        id: S::Id,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        if event.writable && !self.unsent.is_empty() {
            self.fill_socket(now, streams, id, scratch)?;
        }
        if event.readable && !self.paused {
            self.fill_stream(now, streams, id, scratch)?;
        }
        if event.closed && (self.paused || self.far != Half::Open) {
            // Nobody will read the error. Where there is none, the end waits until there is room for what comes before.
            self.hung_up = true;
            self.socket.take_error().map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// The stream has something.
    pub(crate) fn readable<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
        id: S::Id,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        // A socket that is full says when it has room.
        if self.unsent.is_empty() { self.fill_socket(now, streams, id, scratch) } else { Ok(()) }
    }

    /// Moves what the stream has to the socket, until one has nothing more or the other takes nothing more.
    pub(crate) fn fill_socket<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
        id: S::Id,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        let pieces = &mut scratch.pieces;
        loop {
            let mut bytes = self.unsent.len();
            if bytes > 0 {
                pieces.push(std::mem::take(&mut self.unsent));
            }
            let mut is_blocked = false;
            while self.stream == Half::Open && !is_blocked && bytes < WRITE && pieces.len() < PIECES {
                match streams.read(now, id) {
                    FromStream::Data(data) => {
                        // An empty piece is nothing that came.
                        is_blocked = data.is_empty();
                        bytes += data.len();
                        pieces.extend((!data.is_empty()).then_some(data));
                    }
                    FromStream::Finished => self.stream = Half::Read,
                    FromStream::Blocked => is_blocked = true,
                }
            }
            if pieces.is_empty() {
                break;
            }
            let slices: ArrayVec<IoSlice<'_>, PIECES> =
                pieces.iter().map(|piece| IoSlice::new(piece)).collect();
            let result = self.socket.write(&slices);
            drop(slices);
            let written = match result {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => {
                    pieces.clear();
                    return Err(error);
                }
            };
            if written > 0 {
                self.active = now;
                self.to_socket += written as u64;
            }
            if written < bytes {
                self.unsent = rest(pieces, written);
                return Ok(());
            }
            pieces.clear();
            if is_blocked {
                break;
            }
        }
        if self.stream == Half::Read {
            self.socket.finish()?;
            self.stream = Half::Ended;
            self.active = now;
        }
        Ok(())
    }

    /// Moves what the socket has to the stream, until one has nothing more, the other has no more room, or others are to have their turn.
    pub(crate) fn fill_stream<S: ByteStreams>(
        &mut self,
        now: Instant,
        streams: &mut S,
        id: S::Id,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        let buffer = &mut scratch.buffer;
        let mut left = TURN;
        while self.far == Half::Open {
            let room = streams.room(id);
            if room == 0 {
                // Where something was read, there may be room again before the poller tells of more.
                self.paused |= left == TURN;
                return Ok(());
            }
            if !self.early.is_empty() {
                let data = self.early.split_to(room.min(self.early.len()));
                self.from_socket += data.len() as u64;
                streams.write(now, id, data);
                self.active = now;
                continue;
            }
            if left == 0 {
                break;
            }
            if buffer.capacity() < SMALL {
                *buffer = BytesMut::with_capacity(BUFFER);
            }
            let limit = room.min(left).min(buffer.capacity());
            let count = match self.socket.read(buffer, limit) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            self.active = now;
            if count == 0 {
                self.far = Half::Ended;
                streams.finish(now, id);
                break;
            }
            let data = match count < SMALL {
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
        self.paused = false;
        Ok(())
    }

    /// Lets the poller wait for what is of use now.
    pub(crate) fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        let reads = self.far == Half::Open && !self.paused;
        let wanted = match (reads, !self.unsent.is_empty()) {
            (true, true) => Some(Interest::ReadWrite),
            (true, false) => Some(Interest::Read),
            (false, true) => Some(Interest::Write),
            (false, false) => (!self.hung_up).then_some(Interest::Nothing),
        };
        if wanted == self.watched {
            return Ok(());
        }
        match (self.watched, wanted) {
            (Some(_), Some(interest)) => poller.modify(&self.socket, self.token, interest)?,
            (None, Some(interest)) => poller.add(&self.socket, self.token, interest)?,
            (_, None) => poller.remove(&self.socket)?,
        }
        self.watched = wanted;
        Ok(())
    }
}

/// What of `pieces` comes after the first `written` bytes, in one piece; takes all of them.
fn rest(pieces: &mut Vec<Bytes>, mut written: usize) -> Bytes {
    let first = pieces.iter().position(|piece| {
        let is_here = written < piece.len();
        written -= if is_here { 0 } else { piece.len() };
        is_here
    });
    pieces.drain(..first.unwrap_or(pieces.len()));
    let Some(piece) = pieces.first_mut() else { return Bytes::new() };
    piece.advance(written);
    let rest = match &pieces[..] {
        [large] if large.len() >= SMALL => large.clone(),
        // Small pieces would keep whole buffers of received datagrams alive for as long as the socket is full.
        _ => Bytes::from(pieces.concat()),
    };
    pieces.clear();
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_written_is_kept_in_order_and_in_one_piece() {
        let all = b"onetwothree";
        for written in 0..all.len() {
            let mut pieces = [&b"one"[..], b"two", b"three"].map(Bytes::from_static).to_vec();
            assert_eq!(rest(&mut pieces, written), all[written..]);
            assert!(pieces.is_empty());
        }
        let large = Bytes::from(vec![7; SMALL + 1]);
        let kept = rest(&mut vec![Bytes::from_static(b"one"), large.clone()], 4);
        assert_eq!(kept.as_ptr(), large[1..].as_ptr(), "a large piece is not copied");
    }
}
