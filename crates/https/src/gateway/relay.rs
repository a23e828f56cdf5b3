//! Relays bytes between a client's stream and a request that the server accepted.
//!
//! In: the client's stream, and a [`GatewayRequest`]. Always holds: nothing is read that the other side has
//! no space for, beyond one read; an end on one side is an end on the other, an abort an abort; datagrams
//! that the client does not take in time are dropped and do not delay others for long.

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

/// Bytes of one read from a client. Larger: memory per request. Smaller: system calls. Chosen.
const CLIENT_READ_BYTES: usize = 16 << 10;
/// Bytes of datagrams encoded into one write to the client. Larger: delay behind them. Smaller: system calls.
/// Chosen.
const MAX_DATAGRAM_BATCH_BYTES: usize = 16 << 10;
/// Steps of one direction before other tasks get their turn. Chosen.
const MAX_STEPS_PER_POLL: usize = 64;

/// The content of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The bytes of a TCP connection.
    Bytes,
    /// Capsules (RFC 9297 §3).
    Capsules,
    /// UDP payloads, each as a chunk of type 0 without a context ID (draft-ietf-masque-connect-udp-03 §5).
    Chunks,
}

/// The client's side of a relay.
pub(super) trait ClientSide {
    /// The byte stream.
    type Stream: AsyncRead + AsyncWrite;

    /// The byte stream.
    fn stream(&mut self) -> Pin<&mut Self::Stream>;

    /// Aborts the stream, so that it does not look like an end; `code` is the HTTP/3 error code.
    fn abort(&mut self, code: u64);

    /// Ready when the client has reset the stream, even if nothing is read or written.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
}

/// Relays in both directions until both have ended, or one aborts.
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
            // When the server has ended, nothing receives the client's datagrams any more.
            _ => down.map(Ok::<_, RelayError>),
        }
    });
    match result.await {
        Ok(()) => request.cancel(code::NO_ERROR),
        Err(error) => {
            tracing::debug!(reason = %error.reason, "aborted a request over HTTP/1.1 or HTTP/2");
            request.cancel(error.code);
            client.abort(error.code);
        }
    }
}

/// Why a relay is aborted, with the HTTP/3 error code for the server.
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
    /// Bytes that wait until the server's stream accepts them.
    waiting: Bytes,
    read_buffer: BytesMut,
    ended: bool,
}

impl Upstream {
    fn new(content: Content) -> Self {
        let (sieve, waiting) = (CapsuleDemux::new(), Bytes::new());
        Self { content, sieve, waiting, read_buffer: BytesMut::new(), ended: false }
    }

    /// Moves what it can; ready when the client has sent everything.
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

    /// Handles the next capsule or part of one. Returns whether there was one.
    fn next_capsule(&mut self, request: &GatewayRequest) -> Result<bool, RelayError> {
        let sifted = self.sieve.next().map_err(|error| RelayError::malformed(error.code(), error))?;
        match sifted {
            None => return Ok(false),
            Some(CapsulePart::Other(bytes)) if self.content == Content::Capsules => self.waiting = bytes,
            // Chunks of other types have no meaning here.
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

    /// The next bytes from the client; empty at the end.
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
    /// Bytes that the client's stream has not accepted yet.
    waiting: Bytes,
    /// Finds the ends of capsules, between which datagrams are inserted.
    sieve: CapsuleDemux,
    /// Whether written bytes may wait in a buffer.
    unflushed: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// The server has ended its half; the client's stream is to be shut down.
    Ending,
    Ended,
}

impl Downstream {
    fn new(content: Content) -> Self {
        let (waiting, sieve) = (Bytes::new(), CapsuleDemux::new());
        Self { content, waiting, sieve, unflushed: false, stage: Stage::Open }
    }

    /// Moves what it can; ready when the client has received everything.
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

    /// Takes the next bytes or datagrams from the server.
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

    /// Encodes datagrams as the client expects them.
    fn encode_datagrams(&self, values: &[Bytes]) -> Bytes {
        match self.content {
            Content::Chunks => capsule_of(values.iter().filter_map(payload_of)),
            _ => capsule_of(values),
        }
    }
}

/// Concatenated DATAGRAM capsules with these values.
fn capsule_of(values: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Bytes {
    let mut capsules = BytesMut::new();
    for value in values {
        encode_datagram_header(value.as_ref().len(), &mut capsules);
        capsules.extend_from_slice(value.as_ref());
    }
    capsules.freeze()
}

/// A UDP payload with context ID 0 in front (RFC 9298 §5).
fn with_context(payload: &[u8]) -> Bytes {
    let mut value = BytesMut::with_capacity(1 + payload.len());
    varint::encode(CONTEXT_PAYLOAD, &mut value);
    value.extend_from_slice(payload);
    value.freeze()
}

/// The UDP payload behind context ID 0; `None` for other contexts.
fn payload_of(value: &Bytes) -> Option<Bytes> {
    let (context, at) = varint::decode(value)?;
    (context == CONTEXT_PAYLOAD).then(|| value.slice(at..))
}
