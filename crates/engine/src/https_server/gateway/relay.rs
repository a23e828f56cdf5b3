//! Bytes both tcp_transports between a client's stream and the request that the server has granted.
//!
//! In: the client's side, read and written, and a [`GatewayRequest`]. Always holds: nothing is read that the other side has no room
//! for, beyond one read_buffer; what one side ends or breaks off is ended or broken off at the other; datagrams that the client's
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

use super::connection::GatewayRequest;

/// Bytes that are read from a client at a time.
const CLIENT_READ_BYTES: usize = 16 << 10;
/// Bytes of datagrams that are handed to the client's side together.
const MAX_DATAGRAM_BATCH_BYTES: usize = 16 << 10;
/// Parts of a tunnel that are moved before others have their turn.
const MAX_STEPS_PER_POLL: usize = 64;

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
    fn abort(&mut self, code: u64);

    /// Ready when the client has given it up, also where nothing is read or written now.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
}

/// Carries bytes both tcp_transports until both have ended, or something breaks.
pub(super) async fn run(mut client: impl ClientSide, request: GatewayRequest, content: Content) {
    let (mut up, mut down) = (Upstream::new(content), Downstream::new(content));
    let result = poll_fn(|cx| {
        if let Poll::Ready(error) = client.poll_closed(cx) {
            return Poll::Ready(Err(RelayError::from(error)));
        }
        let up = up.poll(cx, &mut client, &request)?;
        let down = down.poll(cx, &mut client, &request)?;
        match content {
            Content::Bytes if up.is_pending() => Poll::Pending,
            // Without a way back there is nobody to send datagrams for.
            _ => down.map(Ok::<_, RelayError>),
        }
    });
    match result.await {
        Ok(()) => request.cancel(code::NO_ERROR),
        Err(error) => {
            tracing::debug!(reason = %error.reason, "a request of a client of HTTP/1.1 or HTTP/2 is broken off");
            request.cancel(error.code);
            client.abort(error.code);
        }
    }
}

/// Why a tunnel ends before its end, with the HTTP/3 code that the server is told.
struct RelayError {
    code: u64,
    reason: String,
}

impl From<io::Error> for RelayError {
    fn from(error: io::Error) -> Self {
        Self { code: code::REQUEST_CANCELLED, reason: error.to_string() }
    }
}

impl RelayError {
    fn malformed(code: u64, reason: impl ToString) -> Self {
        Self { code, reason: reason.to_string() }
    }
}

/// From the client to the server.
struct Upstream {
    content: Content,
    sieve: CapsuleDemux,
    /// What waits for room.
    waiting: Bytes,
    read_buffer: BytesMut,
    ended: bool,
}

impl Upstream {
    fn new(content: Content) -> Self {
        let (sieve, waiting) = (CapsuleDemux::new(), Bytes::new());
        Self { content, sieve, waiting, read_buffer: BytesMut::new(), ended: false }
    }

    /// Moves what there is; ready once the client has sent all.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut impl ClientSide,
        request: &GatewayRequest,
    ) -> Poll<Result<(), RelayError>> {
        for _ in 0..MAX_STEPS_PER_POLL {
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            while !self.waiting.is_empty() {
                let room = ready!(request.poll_writable_bytes(cx))?;
                request.write(self.waiting.split_to(room.min(self.waiting.len())));
            }
            if self.next_capsule(request)? {
                continue;
            }
            match ready!(self.read(cx, client))? {
                data if data.is_empty() => {
                    if self.content != Content::Bytes {
                        self.sieve.finish().map_err(|error| RelayError::malformed(error.code(), error))?;
                    }
                    self.ended = true;
                    request.finish();
                }
                data if self.content == Content::Bytes => self.waiting = data,
                data => self.sieve.push(data),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles the next part of what was read; whether there was one.
    fn next_capsule(&mut self, request: &GatewayRequest) -> Result<bool, RelayError> {
        let sifted = self.sieve.next().map_err(|error| RelayError::malformed(error.code(), error))?;
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
                    return Err(RelayError::malformed(
                        code::DATAGRAM_ERROR,
                        "a datagram without a context ID",
                    ));
                }
                if !request.send_datagram(&value) {
                    self.waiting = capsule_of(&[value]);
                }
            }
        }
        Ok(true)
    }

    /// The next bytes of the client; none at their end.
    fn read(&mut self, cx: &mut Context<'_>, client: &mut impl ClientSide) -> Poll<io::Result<Bytes>> {
        if !self.read_buffer.try_reclaim(CLIENT_READ_BYTES) {
            self.read_buffer = BytesMut::with_capacity(4 * CLIENT_READ_BYTES);
        }
        self.read_buffer.resize(CLIENT_READ_BYTES, 0);
        let mut into = ReadBuf::new(&mut self.read_buffer);
        let read = client.stream().poll_read(cx, &mut into);
        let count = into.filled().len();
        self.read_buffer.truncate(count);
        ready!(read)?;
        Poll::Ready(Ok(self.read_buffer.split().freeze()))
    }
}

/// From the server to the client.
struct Downstream {
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

impl Downstream {
    fn new(content: Content) -> Self {
        let (waiting, sieve) = (Bytes::new(), CapsuleDemux::new());
        Self { content, waiting, sieve, unflushed: false, stage: Stage::Open }
    }

    /// Moves what there is; ready once the client has got all.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut impl ClientSide,
        request: &GatewayRequest,
    ) -> Poll<Result<(), RelayError>> {
        for _ in 0..MAX_STEPS_PER_POLL {
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
            if let Poll::Ready(result) = self.next(cx, request) {
                result?;
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
    fn next(&mut self, cx: &mut Context<'_>, request: &GatewayRequest) -> Poll<Result<(), RelayError>> {
        if self.content == Content::Bytes {
            match ready!(request.poll_read(cx))? {
                Some(data) => self.waiting = data,
                None => self.stage = Stage::Ending,
            }
            return Poll::Ready(Ok(()));
        }
        if let Some(sifted) = self.sieve.next().map_err(|error| RelayError::malformed(error.code(), error))? {
            self.waiting = match (sifted, self.content) {
                (CapsulePart::Datagram(value), _) => self.encode_datagrams(&[value]),
                (CapsulePart::Other(bytes), Content::Capsules) => bytes,
                (CapsulePart::Other(_), _) => Bytes::new(),
            };
            return Poll::Ready(Ok(()));
        }
        match request.poll_read(cx)? {
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
        while bytes < MAX_DATAGRAM_BATCH_BYTES
            && let Some(value) = request.next_datagram(cx)
        {
            bytes += value.len();
            values.push(value);
        }
        if values.is_empty() {
            return Poll::Pending;
        }
        self.waiting = self.encode_datagrams(&values);
        Poll::Ready(Ok(()))
    }

    /// Datagrams as the client wants them.
    fn encode_datagrams(&self, values: &[Bytes]) -> Bytes {
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
