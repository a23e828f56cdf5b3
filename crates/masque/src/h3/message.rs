//! The messages of one request stream (RFC 9114 §4.1): HEADERS, DATA, trailers.
//!
//! In: bytes of the stream, in any pieces. Out: events, or an error of the stream or of the connection.
//! Always holds: at most one incomplete header section is buffered.

use super::{
    Event, H3Error, Side, code,
    frame::{self, FrameHeader, VarintBuffer},
};
use crate::{
    headers::{Headers, Section},
    qpack::{self, QpackError},
};
use bytes::{Bytes, BytesMut};
use derive_more::From;

/// Maximum number of interim responses (1xx) on one stream: each costs the peer few bytes and this end an
/// event. Servers send one or two; a larger maximum helps an attacker.
const MAX_INTERIM: u8 = 8;

/// Parses the frames of one request or response.
#[derive(Debug)]
pub(super) struct Message {
    side: Side,
    max_section: usize,
    phase: Phase,
    frame: Frame,
    interim: u8,
    /// Remaining bytes of content according to Content-Length.
    content_left: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the request, or before the final response.
    Start,
    /// Content, optionally followed by trailers.
    Content,
    /// After a CONNECT: DATA frames until the end of the stream.
    Tunnel,
    /// After the trailers.
    End,
}

#[derive(Debug)]
enum Frame {
    Header(VarintBuffer),
    Data { left: u64 },
    Section { left: u64, section: BytesMut },
    Skip { left: u64 },
}

/// An error of the stream alone, or of the whole connection.
#[derive(Debug, From)]
pub(super) enum MessageFailure {
    Stream {
        code: u64,
        reason: String,
    },
    #[from]
    Connection(H3Error),
}

impl Message {
    pub(super) fn new(side: Side, max_section: usize) -> Self {
        Self {
            side,
            max_section,
            phase: Phase::Start,
            frame: Frame::Header(VarintBuffer::default()),
            interim: 0,
            content_left: None,
        }
    }

    pub(super) fn buffered(&self) -> usize {
        match &self.frame {
            Frame::Section { section, .. } => section.len(),
            _ => 0,
        }
    }

    /// Takes the next bytes of request stream `stream`.
    pub(super) fn push(
        &mut self,
        stream: u64,
        mut data: Bytes,
        events: &mut impl Extend<Event>,
    ) -> Result<(), MessageFailure> {
        loop {
            match &mut self.frame {
                Frame::Header(pieces) => {
                    let Some(header) = pieces.frame_header(&mut data) else { return Ok(()) };
                    self.frame = self.start(header)?;
                }
                Frame::Data { left } => {
                    let mut data = frame::take(&mut data, left);
                    let (is_whole, bytes) = (*left == 0, data.len());
                    data.truncate(self.count_content(bytes));
                    let is_longer = data.len() < bytes;
                    events.extend((!data.is_empty()).then_some(Event::Data { stream, data }));
                    if is_longer {
                        return Err(malformed("content is longer than its length".to_owned()));
                    }
                    if !is_whole {
                        return Ok(());
                    }
                    self.frame = Frame::Header(VarintBuffer::default());
                }
                Frame::Section { left, section } => {
                    section.extend_from_slice(&frame::take(&mut data, left));
                    if *left > 0 {
                        return Ok(());
                    }
                    let section = std::mem::take(section);
                    self.frame = Frame::Header(VarintBuffer::default());
                    events.extend(Some(self.section(stream, &section)?));
                }
                Frame::Skip { left } => {
                    frame::take(&mut data, left);
                    if *left > 0 {
                        return Ok(());
                    }
                    self.frame = Frame::Header(VarintBuffer::default());
                }
            }
        }
    }

    /// Checks the message at the clean end of its stream.
    pub(super) fn finish(&self) -> Result<(), MessageFailure> {
        // "When a stream terminates cleanly, if the last frame on the stream was truncated, this MUST be
        // treated as a connection error of type H3_FRAME_ERROR" (RFC 9114 §7.1).
        if !matches!(&self.frame, Frame::Header(pieces) if pieces.is_empty()) {
            return Err(H3Error::new(code::FRAME_ERROR, "stream ends inside a frame").into());
        }
        if self.phase == Phase::Start {
            let (code, what) = match self.side {
                Side::Server => (code::REQUEST_INCOMPLETE, "stream ends without a request"),
                Side::Client => (code::MESSAGE_ERROR, "stream ends without a final response"),
            };
            return stream_failure(code, what);
        }
        match self.content_left {
            Some(left) if left > 0 => {
                stream_failure(code::MESSAGE_ERROR, format!("content ends {left} bytes before its length"))
            }
            _ => Ok(()),
        }
    }

    /// "Receipt of an invalid sequence of frames MUST be treated as a connection error of type
    /// H3_FRAME_UNEXPECTED" (RFC 9114 §4.1).
    fn start(&self, FrameHeader { kind, len }: FrameHeader) -> Result<Frame, MessageFailure> {
        let unexpected = |reason: &'static str| Err(H3Error::new(code::FRAME_UNEXPECTED, reason).into());
        match (kind, self.phase) {
            (frame::DATA, Phase::Content | Phase::Tunnel) => Ok(Frame::Data { left: len }),
            (frame::DATA, Phase::Start) => unexpected("DATA before HEADERS"),
            (frame::DATA, Phase::End) => unexpected("DATA after trailers"),
            // "Once the CONNECT method has completed, only DATA frames are permitted" (RFC 9114 §4.4).
            (frame::HEADERS, Phase::Tunnel) => unexpected("HEADERS in a CONNECT tunnel"),
            (frame::HEADERS, Phase::End) => unexpected("HEADERS after trailers"),
            (frame::HEADERS, _) if len > self.max_section as u64 => stream_failure(
                code::EXCESSIVE_LOAD,
                format!("header section of {len} bytes, expected at most {}", self.max_section),
            ),
            (frame::HEADERS, _) => Ok(Frame::Section { left: len, section: BytesMut::new() }),
            (frame::CANCEL_PUSH | frame::SETTINGS | frame::GOAWAY | frame::MAX_PUSH_ID, _) => {
                unexpected("control frame on a request stream")
            }
            (frame::PUSH_PROMISE, _) => match self.side {
                Side::Server => unexpected("PUSH_PROMISE from a client"),
                // "A client MUST treat receipt of a PUSH_PROMISE frame that contains a larger Push ID than
                // the client has advertised as a connection error of H3_ID_ERROR" (RFC 9114 §7.2.5); we
                // advertise none.
                Side::Client => Err(H3Error::new(code::ID_ERROR, "push promised, but none allowed").into()),
            },
            (kind, _) if frame::is_http2_only(kind) => unexpected("HTTP/2 frame on a request stream"),
            _ => Ok(Frame::Skip { left: len }),
        }
    }

    fn section(&mut self, stream: u64, section: &[u8]) -> Result<Event, MessageFailure> {
        let headers = qpack::decode(section, self.max_section).map_err(|error| match error {
            QpackError::TooLarge { .. } => {
                MessageFailure::Stream { code: code::EXCESSIVE_LOAD, reason: error.to_string() }
            }
            error => H3Error::new(code::QPACK_DECOMPRESSION_FAILED, error.to_string()).into(),
        })?;
        let kind = match (self.phase, self.side) {
            (Phase::Start, Side::Server) => Section::Request,
            (Phase::Start, Side::Client) => Section::Response,
            _ => Section::Trailers,
        };
        headers.validate(kind).map_err(|error| malformed(error.to_string()))?;
        match kind {
            Section::Request => self.request(stream, headers),
            Section::Response => self.response(stream, headers),
            Section::Trailers => {
                self.phase = Phase::End;
                Ok(Event::Trailers { stream, headers })
            }
        }
    }

    fn request(&mut self, stream: u64, headers: Headers) -> Result<Event, MessageFailure> {
        if headers.method() == Some("CONNECT") {
            self.phase = Phase::Tunnel;
        } else {
            self.phase = Phase::Content;
            self.content_left = content_length(&headers)?;
        }
        Ok(Event::Headers { stream, headers })
    }

    fn response(&mut self, stream: u64, headers: Headers) -> Result<Event, MessageFailure> {
        let status = headers.status().unwrap_or_default();
        if (100..200).contains(&status) {
            // HTTP/3 has neither the Upgrade mechanism nor its status code 101 (RFC 9114 §4.5).
            if status == 101 {
                return Err(malformed("status 101 does not exist in HTTP/3".to_owned()));
            }
            self.interim += 1;
            if self.interim > MAX_INTERIM {
                return stream_failure(code::EXCESSIVE_LOAD, "too many interim responses");
            }
            return Ok(Event::Informational { stream, headers });
        }
        self.phase = Phase::Content;
        // All requests of this client are CONNECT, whose successful responses have no content, whatever their
        // Content-Length (RFC 9110 §9.3.6). The Content-Length of a 304 is that of the omitted content.
        if !(200..300).contains(&status) && status != 304 {
            self.content_left = content_length(&headers)?;
        }
        Ok(Event::Headers { stream, headers })
    }

    /// Counts so many bytes of content and returns how many of them are within its length, wherever the
    /// stream was cut. With more the message is malformed: "if the value of a Content-Length header field
    /// does not equal the sum of the DATA frame lengths received" (RFC 9114 §4.1.2).
    fn count_content(&mut self, bytes: usize) -> usize {
        let Some(content_left) = &mut self.content_left else { return bytes };
        let within = bytes.min(usize::try_from(*content_left).unwrap_or(usize::MAX));
        *content_left -= within as u64;
        within
    }
}

fn content_length(headers: &Headers) -> Result<Option<u64>, MessageFailure> {
    if headers.value("content-length").is_none() {
        return Ok(None);
    }
    let text = headers.single("content-length").and_then(|value| std::str::from_utf8(value).ok());
    let digits = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits.and_then(|digits| digits.parse().ok()) {
        Some(len) => Ok(Some(len)),
        None => Err(malformed("content-length is not one number".to_owned())),
    }
}

fn malformed(reason: String) -> MessageFailure {
    MessageFailure::Stream { code: code::MESSAGE_ERROR, reason }
}

fn stream_failure<T>(code: u64, reason: impl Into<String>) -> Result<T, MessageFailure> {
    Err(MessageFailure::Stream { code, reason: reason.into() })
}
