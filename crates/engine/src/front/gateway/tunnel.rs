//! Bytes both ways between a client's stream and the request that the server has granted.
//!
//! In: the client's side, read and written, and a [`Passage`]. Always holds: nothing is read that the other side has no room
//! for, beyond one piece; what one side ends or breaks off is ended or broken off at the other; datagrams that the client's
//! side cannot take in time are dropped and never delay others for long.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{
    capsule::{CapsuleDemux, CapsulePart, encode_datagram_header},
    datagram::CONTEXT_PAYLOAD,
    h3::code,
    varint,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::line::Passage;

/// Bytes that are read from a client at a time.
const PIECE: usize = 16 << 10;
/// Bytes of datagrams that are handed to the client's side together.
const TOGETHER: usize = 16 << 10;
/// Parts of a tunnel that are moved before others have their turn.
const TURN: usize = 64;

/// What a stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The bytes of a TCP connection.
    Bytes,
    /// Capsules (RFC 9297 §3).
    Capsules,
    /// UDP payloads, each as a chunk of type 0 without a context ID (draft-ietf-masque-connect-udp-03 §5).
    Chunks,
}

/// The client's side of a tunnel.
pub(super) trait ClientSide {
    /// What is read and written.
    type Stream: AsyncRead + AsyncWrite;

    /// The stream.
    fn stream(&mut self) -> Pin<&mut Self::Stream>;

    /// Breaks it off, so that it does not look like an end; `code` is what HTTP/3 would say.
    fn break_off(&mut self, code: u64);

    /// Ready when the client has given it up, also where nothing is read or written now.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
}

/// Carries bytes both ways until both have ended, or something breaks.
pub(super) async fn run(mut client: impl ClientSide, passage: Passage, content: Content) {
    let (mut up, mut down) = (Up::new(content), Down::new(content));
    let result = poll_fn(|cx| {
        if let Poll::Ready(error) = client.poll_gone(cx) {
            return Poll::Ready(Err(Broken::from(error)));
        }
        let up = up.poll(cx, &mut client, &passage)?;
        let down = down.poll(cx, &mut client, &passage)?;
        match content {
            Content::Bytes if up.is_pending() => Poll::Pending,
            // Without a way back there is nobody to send datagrams for.
            _ => down.map(Ok::<_, Broken>),
        }
    });
    match result.await {
        Ok(()) => passage.give_up(code::NO_ERROR),
        Err(broken) => {
            tracing::debug!(reason = %broken.reason, "a request of a client of HTTP/1.1 or HTTP/2 is broken off");
            passage.give_up(broken.code);
            client.break_off(broken.code);
        }
    }
}

/// Why a tunnel ends before its end, with the HTTP/3 code that the server is told.
struct Broken {
    code: u64,
    reason: String,
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self { code: code::REQUEST_CANCELLED, reason: error.to_string() }
    }
}

impl Broken {
    fn malformed(code: u64, reason: impl ToString) -> Self {
        Self { code, reason: reason.to_string() }
    }
}

/// From the client to the server.
struct Up {
    content: Content,
    sieve: CapsuleDemux,
    /// What waits for room.
    waiting: Bytes,
    piece: BytesMut,
    ended: bool,
}

impl Up {
    fn new(content: Content) -> Self {
        let (sieve, waiting) = (CapsuleDemux::new(), Bytes::new());
        Self { content, sieve, waiting, piece: BytesMut::new(), ended: false }
    }

    /// Moves what there is; ready once the client has sent all.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut impl ClientSide,
        passage: &Passage,
    ) -> Poll<Result<(), Broken>> {
        for _ in 0..TURN {
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            while !self.waiting.is_empty() {
                let room = ready!(passage.poll_room(cx))?;
                passage.write(self.waiting.split_to(room.min(self.waiting.len())));
            }
            if self.sift(passage)? {
                continue;
            }
            match ready!(self.read(cx, client))? {
                data if data.is_empty() => {
                    if self.content != Content::Bytes {
                        self.sieve.finish().map_err(|error| Broken::malformed(error.code(), error))?;
                    }
                    self.ended = true;
                    passage.finish();
                }
                data if self.content == Content::Bytes => self.waiting = data,
                data => self.sieve.push(data),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles the next part of what was read; whether there was one.
    fn sift(&mut self, passage: &Passage) -> Result<bool, Broken> {
        let sifted = self.sieve.next().map_err(|error| Broken::malformed(error.code(), error))?;
        match sifted {
            None => return Ok(false),
            Some(CapsulePart::Other(bytes)) if self.content == Content::Capsules => self.waiting = bytes,
            // Chunks of other types mean nothing here.
            Some(CapsulePart::Other(_)) => {}
            Some(CapsulePart::Datagram(value)) => {
                let value = match self.content {
                    Content::Chunks => with_context(&value),
                    _ => value,
                };
                if varint::decode(&value).is_none() {
                    return Err(Broken::malformed(code::DATAGRAM_ERROR, "a datagram without a context ID"));
                }
                if !passage.send_datagram(&value) {
                    self.waiting = capsule_of(&[value]);
                }
            }
        }
        Ok(true)
    }

    /// The next bytes of the client; none at their end.
    fn read(&mut self, cx: &mut Context<'_>, client: &mut impl ClientSide) -> Poll<io::Result<Bytes>> {
        if !self.piece.try_reclaim(PIECE) {
            self.piece = BytesMut::with_capacity(4 * PIECE);
        }
        self.piece.resize(PIECE, 0);
        let mut into = ReadBuf::new(&mut self.piece);
        let read = client.stream().poll_read(cx, &mut into);
        let count = into.filled().len();
        self.piece.truncate(count);
        ready!(read)?;
        Poll::Ready(Ok(self.piece.split().freeze()))
    }
}

/// From the server to the client.
struct Down {
    content: Content,
    /// What the client's side has not taken yet.
    waiting: Bytes,
    /// Tells where capsules end, and others fit between.
    sieve: CapsuleDemux,
    /// Something was written that may wait in a buffer.
    unflushed: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// The server has sent all; the client is to be told.
    Ending,
    Ended,
}

impl Down {
    fn new(content: Content) -> Self {
        let (waiting, sieve) = (Bytes::new(), CapsuleDemux::new());
        Self { content, waiting, sieve, unflushed: false, stage: Stage::Open }
    }

    /// Moves what there is; ready once the client has got all.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut impl ClientSide,
        passage: &Passage,
    ) -> Poll<Result<(), Broken>> {
        for _ in 0..TURN {
            while !self.waiting.is_empty() {
                let count = ready!(client.stream().poll_write(cx, &self.waiting))?;
                if count == 0 {
                    return Poll::Ready(Err(io::Error::from(io::ErrorKind::WriteZero).into()));
                }
                self.waiting.advance(count);
                self.unflushed = true;
            }
            match self.stage {
                Stage::Ended => return Poll::Ready(Ok(())),
                Stage::Ending => {
                    ready!(client.stream().poll_shutdown(cx))?;
                    self.stage = Stage::Ended;
                    continue;
                }
                Stage::Open => {}
            }
            if let Poll::Ready(news) = self.next(cx, passage) {
                news?;
                continue;
            }
            if self.unflushed {
                ready!(client.stream().poll_flush(cx))?;
                self.unflushed = false;
            }
            return Poll::Pending;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes the next thing from the server.
    fn next(&mut self, cx: &mut Context<'_>, passage: &Passage) -> Poll<Result<(), Broken>> {
        if self.content == Content::Bytes {
            match ready!(passage.poll_read(cx))? {
                Some(data) => self.waiting = data,
                None => self.stage = Stage::Ending,
            }
            return Poll::Ready(Ok(()));
        }
        if let Some(sifted) = self.sieve.next().map_err(|error| Broken::malformed(error.code(), error))? {
            self.waiting = match (sifted, self.content) {
                (CapsulePart::Datagram(value), _) => self.framed(&[value]),
                (CapsulePart::Other(bytes), Content::Capsules) => bytes,
                (CapsulePart::Other(_), _) => Bytes::new(),
            };
            return Poll::Ready(Ok(()));
        }
        match passage.poll_read(cx)? {
            Poll::Ready(Some(data)) => {
                self.sieve.push(data);
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(None) => {
                self.stage = Stage::Ending;
                return Poll::Ready(Ok(()));
            }
            Poll::Pending => {}
        }
        if !self.sieve.is_at_boundary() {
            return Poll::Pending;
        }
        let (mut values, mut bytes) = (Vec::new(), 0);
        while bytes < TOGETHER
            && let Some(value) = passage.next_datagram(cx)
        {
            bytes += value.len();
            values.push(value);
        }
        if values.is_empty() {
            return Poll::Pending;
        }
        self.waiting = self.framed(&values);
        Poll::Ready(Ok(()))
    }

    /// Datagrams as the client wants them.
    fn framed(&self, values: &[Bytes]) -> Bytes {
        match self.content {
            Content::Chunks => capsule_of(values.iter().filter_map(payload_of)),
            _ => capsule_of(values),
        }
    }
}

/// DATAGRAM capsules with these values, one after the other.
fn capsule_of(values: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Bytes {
    let mut capsules = BytesMut::new();
    for value in values {
        encode_datagram_header(value.as_ref().len(), &mut capsules);
        capsules.extend_from_slice(value.as_ref());
    }
    capsules.freeze()
}

/// A payload behind the context ID that all payloads have.
fn with_context(payload: &[u8]) -> Bytes {
    let mut value = BytesMut::with_capacity(1 + payload.len());
    varint::encode(CONTEXT_PAYLOAD, &mut value);
    value.extend_from_slice(payload);
    value.freeze()
}

/// The payload behind that context ID; `None` in another context.
fn payload_of(value: &Bytes) -> Option<Bytes> {
    let (context, at) = varint::decode(value)?;
    (context == CONTEXT_PAYLOAD).then(|| value.slice(at..))
}
