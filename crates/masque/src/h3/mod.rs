//! HTTP/3 (RFC 9114): parses received streams and encodes frames.
//!
//! In: the bytes of every stream that the peer can write to, in any pieces, and resets. Out: [`Event`]s, or
//! an [`H3Error`] with which to close the connection; the `encode_*` functions return frames to send. Always
//! holds: unknown frames, unknown unidirectional streams and grease are skipped without buffering; at most
//! one incomplete header section per stream is buffered, and [`Settings`] bounds each section, their sum and
//! the number of streams. Every violation has the error code of its RFC.
//!
//! Sending order, flow control, and the meaning of requests belong to other modules.

pub mod code;
mod control;
mod frame;
mod message;
mod settings;
#[cfg(test)]
mod tests;

#[cfg(test)]
use frame::encode_goaway;
pub use frame::{DataHeader, encode_data, encode_data_header, encode_headers};
pub use settings::{Datagrams, PeerSettings, Settings};

use crate::{
    headers::Headers,
    qpack::{DecoderStream, EncoderStream},
    varint,
};
use bytes::{BufMut, Bytes, BytesMut};
use control::ControlStream;
use frame::VarintBuffer;
use message::{Message, MessageFailure};
use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
};

/// Unidirectional stream types (RFC 9114 §6.2, RFC 9204 §4.2).
mod stream_type {
    pub(super) const CONTROL: u64 = 0x00;
    pub(super) const PUSH: u64 = 0x01;
    pub(super) const QPACK_ENCODER: u64 = 0x02;
    pub(super) const QPACK_DECODER: u64 = 0x03;
}

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that sends requests.
    Client,
    /// The end that answers requests.
    Server,
}

/// A connection error: close the QUIC connection with this application error code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} (HTTP/3 error {code:#x})")]
pub struct H3Error {
    /// One of [`code`].
    pub code: u64,
    /// The expected and the received value, as a text for users.
    pub reason: Cow<'static, str>,
}

impl H3Error {
    pub(crate) fn new(code: u64, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { code, reason: reason.into() }
    }
}

/// An event on the connection, caused by the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer's SETTINGS; once.
    Settings(PeerSettings),
    /// A request, or a final response. Valid by RFC 9114 §4.3.
    Headers {
        /// QUIC stream ID.
        stream: u64,
        /// The header section.
        headers: Headers,
    },
    /// An interim response (1xx); the final one follows.
    Informational {
        /// QUIC stream ID.
        stream: u64,
        /// The header section.
        headers: Headers,
    },
    /// Content of a message or bytes of a tunnel; never empty.
    Data {
        /// QUIC stream ID.
        stream: u64,
        /// The bytes; the boundaries of DATA frames have no meaning.
        data: Bytes,
    },
    /// Fields after the content.
    Trailers {
        /// QUIC stream ID.
        stream: u64,
        /// The trailer section.
        headers: Headers,
    },
    /// The peer has ended the stream cleanly, after a complete message.
    Finished {
        /// QUIC stream ID.
        stream: u64,
    },
    /// The peer has reset the stream.
    Reset {
        /// QUIC stream ID.
        stream: u64,
        /// The peer's error code.
        code: u64,
    },
    /// The peer will not take requests from `id` on (from a client: pushes).
    GoAway {
        /// Stream ID (from a server) or push ID (from a client).
        id: u64,
    },
    /// The message is malformed or too large: reset the stream, stop reading it, and call
    /// [`H3::forget`]. No more events come from it.
    StreamError {
        /// QUIC stream ID.
        stream: u64,
        /// The code to reset with.
        code: u64,
        /// The expected and the received value, as a text for users.
        reason: String,
    },
}

/// The receiving side of an HTTP/3 connection, and the first bytes of its own streams.
#[derive(Debug)]
pub struct H3 {
    side: Side,
    settings: Settings,
    control: ControlStream,
    decoder: DecoderStream,
    /// Which of the peer's control and QPACK streams have been opened.
    opened: OpenedStreams,
    uni: BTreeMap<u64, UniStream>,
    messages: BTreeMap<u64, RequestStream>,
    /// Bytes of incomplete header sections in `messages`.
    buffered: usize,
    events: VecDeque<Event>,
    failed: Option<H3Error>,
}

/// Which of the peer's unidirectional streams that may exist only once have been opened.
#[derive(Debug, Default)]
struct OpenedStreams {
    control: bool,
    encoder: bool,
    decoder: bool,
}

/// A unidirectional stream of the peer.
#[derive(Debug)]
enum UniStream {
    /// The stream type is not complete.
    New(VarintBuffer),
    Control,
    QpackEncoder,
    QpackDecoder,
    Unknown,
}

/// A request stream.
#[derive(Debug)]
enum RequestStream {
    Open(Box<Message>),
    /// After a stream error: further bytes are discarded.
    Failed,
}

impl H3 {
    /// A new connection.
    pub fn new(side: Side, settings: Settings) -> Self {
        Self {
            side,
            settings,
            control: ControlStream::new(side),
            decoder: DecoderStream::default(),
            opened: OpenedStreams::default(),
            uni: BTreeMap::new(),
            messages: BTreeMap::new(),
            buffered: 0,
            events: VecDeque::new(),
            failed: None,
        }
    }

    /// The first bytes of this end's control stream: stream type and SETTINGS. The stream must stay open.
    pub fn control_preface(&self) -> Bytes {
        let mut preface = BytesMut::new();
        varint::encode(stream_type::CONTROL, &mut preface);
        preface.put(frame::encode_settings(&self.settings));
        preface.freeze()
    }

    /// The only bytes of this end's QPACK encoder and decoder streams: their types. Both must stay open.
    pub fn qpack_prefaces(&self) -> [Bytes; 2] {
        [Bytes::from_static(&[0x02]), Bytes::from_static(&[0x03])]
    }

    /// Takes the next bytes of stream `id`, which the peer can write to. `fin` marks the clean end of the
    /// stream. Take all events by [`poll`](Self::poll) before the next call: they refer to `data`.
    ///
    /// # Errors
    /// The connection must be closed with the error; every later call returns it again.
    pub fn handle_stream(&mut self, id: u64, data: Bytes, fin: bool) -> Result<(), H3Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = match StreamKind::of(id, self.side) {
            StreamKind::Message => self.handle_message(id, data, fin),
            StreamKind::PeerUni => self.handle_uni(id, data, fin),
            // "Clients MUST treat receipt of a server-initiated bidirectional stream as a connection error
            // of type H3_STREAM_CREATION_ERROR" (RFC 9114 §6.1).
            StreamKind::ServerBidi if self.side == Side::Client => {
                Err(H3Error::new(code::STREAM_CREATION_ERROR, "server opened a bidirectional stream"))
            }
            StreamKind::ServerBidi | StreamKind::OwnUni => Err(H3Error::new(
                code::INTERNAL_ERROR,
                format!("bytes of stream {id}, which is never received"),
            )),
        };
        result.inspect_err(|error| self.fail(error))
    }

    /// Takes the peer's reset of stream `id` with `code`.
    ///
    /// # Errors
    /// If the stream is critical for the connection.
    pub fn handle_reset(&mut self, id: u64, code: u64) -> Result<(), H3Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if let Some(UniStream::Control | UniStream::QpackEncoder | UniStream::QpackDecoder) =
            self.uni.remove(&id)
        {
            let error = closed_critical_stream();
            self.fail(&error);
            return Err(error);
        }
        let is_message = StreamKind::of(id, self.side) == StreamKind::Message;
        let failed_before = matches!(self.messages.get(&id), Some(RequestStream::Failed));
        self.forget(id);
        if is_message && !failed_before {
            self.events.push_back(Event::Reset { stream: id, code });
        }
        Ok(())
    }

    /// Drops all state of request stream `id`; no more bytes of it may be passed in.
    pub fn forget(&mut self, id: u64) {
        if let Some(RequestStream::Open(message)) = self.messages.remove(&id) {
            self.buffered -= message.buffered();
        }
    }

    /// The next event.
    pub fn poll(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The peer's SETTINGS, once received.
    pub fn peer_settings(&self) -> Option<&PeerSettings> {
        self.control.settings.as_ref()
    }

    /// Whether HTTP Datagrams may be sent: "QUIC DATAGRAM frames MUST NOT be sent until the
    /// SETTINGS_H3_DATAGRAM setting has been both sent and received with a value of 1" (RFC 9297 §2.1.1).
    pub fn datagrams_allowed(&self) -> bool {
        self.settings.datagrams == Datagrams::Enabled
            && self.peer_settings().is_some_and(|peer| peer.datagrams == Datagrams::Enabled)
    }

    /// Bytes held for incomplete frames.
    pub fn buffered(&self) -> usize {
        self.buffered + self.control.buffered()
    }

    /// Number of peer-writable streams with state.
    pub fn open_streams(&self) -> usize {
        self.uni.len() + self.messages.len()
    }

    fn handle_message(&mut self, id: u64, data: Bytes, fin: bool) -> Result<(), H3Error> {
        self.check_stream_limit(self.messages.contains_key(&id))?;
        let (side, max_section) = (self.side, self.settings.max_field_section_size);
        let request = self
            .messages
            .entry(id)
            .or_insert_with(|| RequestStream::Open(Box::new(Message::new(side, max_section))));
        if let RequestStream::Open(message) = request {
            let before = message.buffered();
            let mut result = message.push(id, data, &mut self.events);
            if result.is_ok() && fin {
                result = message.finish();
            }
            self.buffered = self.buffered - before + message.buffered();
            match result {
                Ok(()) if fin => self.events.push_back(Event::Finished { stream: id }),
                Ok(()) => {}
                Err(MessageFailure::Connection(error)) => return Err(error),
                Err(MessageFailure::Stream { code, reason }) => {
                    self.buffered -= message.buffered();
                    *request = RequestStream::Failed;
                    self.events.push_back(Event::StreamError { stream: id, code, reason });
                }
            }
        }
        if fin {
            self.forget(id);
        }
        if self.buffered > self.settings.max_buffered {
            return Err(H3Error::new(code::EXCESSIVE_LOAD, "too many incomplete header sections"));
        }
        Ok(())
    }

    fn handle_uni(&mut self, id: u64, mut data: Bytes, fin: bool) -> Result<(), H3Error> {
        self.check_stream_limit(self.uni.contains_key(&id))?;
        let stream = self.uni.entry(id).or_insert_with(|| UniStream::New(VarintBuffer::default()));
        if let UniStream::New(pieces) = stream
            && let Some(kind) = pieces.number(&mut data)
        {
            *stream = self.opened.open(kind, self.side)?;
        }
        match stream {
            UniStream::New(_) | UniStream::Unknown => {}
            UniStream::Control => self.control.push(data, &mut self.events)?,
            UniStream::QpackEncoder => EncoderStream
                .push(&data)
                .map_err(|reason| H3Error::new(code::QPACK_ENCODER_STREAM_ERROR, reason))?,
            UniStream::QpackDecoder => self
                .decoder
                .push(&data)
                .map_err(|reason| H3Error::new(code::QPACK_DECODER_STREAM_ERROR, reason))?,
        }
        match stream {
            _ if !fin => Ok(()),
            // "A receiver MUST tolerate unidirectional streams being closed or reset prior to the reception
            // of the unidirectional stream header" (RFC 9114 §6.2).
            UniStream::New(_) | UniStream::Unknown => {
                self.uni.remove(&id);
                Ok(())
            }
            _ => Err(closed_critical_stream()),
        }
    }

    /// Checks the limit of streams with state before a stream is added; a `known` stream is always allowed.
    fn check_stream_limit(&self, known: bool) -> Result<(), H3Error> {
        if known || self.open_streams() < self.settings.max_streams {
            return Ok(());
        }
        let reason = format!("more than {} streams at the same time", self.settings.max_streams);
        Err(H3Error::new(code::EXCESSIVE_LOAD, reason))
    }

    fn fail(&mut self, error: &H3Error) {
        self.failed = Some(error.clone());
        self.messages.clear();
        self.uni.clear();
        self.buffered = 0;
    }
}

impl OpenedStreams {
    /// Registers a new unidirectional stream of type `kind`.
    fn open(&mut self, kind: u64, side: Side) -> Result<UniStream, H3Error> {
        let (seen, stream) = match (kind, side) {
            (stream_type::CONTROL, _) => (&mut self.control, UniStream::Control),
            (stream_type::QPACK_ENCODER, _) => (&mut self.encoder, UniStream::QpackEncoder),
            (stream_type::QPACK_DECODER, _) => (&mut self.decoder, UniStream::QpackDecoder),
            // "Only servers can push; if a server receives a client-initiated push stream, this MUST be
            // treated as a connection error of type H3_STREAM_CREATION_ERROR" (RFC 9114 §6.2.2).
            (stream_type::PUSH, Side::Server) => {
                return Err(H3Error::new(code::STREAM_CREATION_ERROR, "client opened a push stream"));
            }
            // "A client MUST treat receipt of a push stream as a connection error of type H3_ID_ERROR ...
            // when no MAX_PUSH_ID frame has been sent" (RFC 9114 §4.6).
            (stream_type::PUSH, Side::Client) => {
                return Err(H3Error::new(code::ID_ERROR, "server opened a push stream, but none is allowed"));
            }
            _ => return Ok(UniStream::Unknown),
        };
        // "Only one control stream per peer is permitted; receipt of a second stream claiming to be a
        // control stream MUST be treated as a connection error of type H3_STREAM_CREATION_ERROR" (RFC 9114
        // §6.2.1); RFC 9204 §4.2 says the same of the QPACK streams.
        if std::mem::replace(seen, true) {
            let reason = format!("second unidirectional stream of type {kind:#x}");
            return Err(H3Error::new(code::STREAM_CREATION_ERROR, reason));
        }
        Ok(stream)
    }
}

/// The kind of a stream, by the two low bits of its ID (RFC 9000 §2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamKind {
    /// Client-initiated, bidirectional: a request and its response.
    Message,
    /// Server-initiated, bidirectional.
    ServerBidi,
    /// Unidirectional from the peer.
    PeerUni,
    /// Unidirectional from this end.
    OwnUni,
}

impl StreamKind {
    fn of(id: u64, side: Side) -> Self {
        match (id & 3, side) {
            (0, _) => Self::Message,
            (1, _) => Self::ServerBidi,
            (2, Side::Server) | (3, Side::Client) => Self::PeerUni,
            _ => Self::OwnUni,
        }
    }
}

/// "If either control stream is closed at any point, this MUST be treated as a connection error of type
/// H3_CLOSED_CRITICAL_STREAM" (RFC 9114 §6.2.1; RFC 9204 §4.2 for the QPACK streams).
fn closed_critical_stream() -> H3Error {
    H3Error::new(code::CLOSED_CRITICAL_STREAM, "control or QPACK stream closed")
}
