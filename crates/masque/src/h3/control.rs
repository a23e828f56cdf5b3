//! The peer's control stream (RFC 9114 §6.2.1).
//!
//! In: bytes of the stream, in any pieces. Out: events, or a connection error. Always holds: at most
//! [`MAX_SETTINGS`] bytes are buffered.

use super::{
    Event, H3Error, PeerSettings, Side, code,
    frame::{self, FrameHeader, VarintBuffer},
};
use bytes::{Bytes, BytesMut};

/// Maximum length of a SETTINGS payload in bytes: more than 250 settings, where peers send about ten. A
/// larger maximum lets a peer use more memory; a smaller one may refuse a peer with many grease settings.
const MAX_SETTINGS: u64 = 4096;

/// Parses the frames of the control stream.
#[derive(Debug)]
pub(super) struct ControlStream {
    side: Side,
    frame: Frame,
    pub(super) settings: Option<PeerSettings>,
    goaway: Option<u64>,
    max_push_id: Option<u64>,
}

#[derive(Debug)]
enum Frame {
    Header(VarintBuffer),
    Payload { kind: u64, left: u64, payload: BytesMut },
    Skip { left: u64 },
}

impl ControlStream {
    pub(super) fn new(side: Side) -> Self {
        Self {
            side,
            frame: Frame::Header(VarintBuffer::default()),
            settings: None,
            goaway: None,
            max_push_id: None,
        }
    }

    pub(super) fn buffered(&self) -> usize {
        match &self.frame {
            Frame::Payload { payload, .. } => payload.len(),
            _ => 0,
        }
    }

    /// Takes the next bytes of the stream; each frame causes at most one event.
    pub(super) fn push(&mut self, mut data: Bytes, events: &mut impl Extend<Event>) -> Result<(), H3Error> {
        loop {
            match &mut self.frame {
                Frame::Header(pieces) => {
                    let Some(header) = pieces.frame_header(&mut data) else { return Ok(()) };
                    self.frame = self.start(header)?;
                }
                Frame::Skip { left } => {
                    frame::take(&mut data, left);
                    if *left > 0 {
                        return Ok(());
                    }
                    self.frame = Frame::Header(VarintBuffer::default());
                }
                Frame::Payload { kind, left, payload } => {
                    payload.extend_from_slice(&frame::take(&mut data, left));
                    if *left > 0 {
                        return Ok(());
                    }
                    let (kind, payload) = (*kind, std::mem::take(payload));
                    self.frame = Frame::Header(VarintBuffer::default());
                    events.extend(self.finish(kind, &payload)?);
                }
            }
        }
    }

    /// Decides whether a frame is allowed here, and whether its payload is buffered or skipped.
    fn start(&self, FrameHeader { kind, len }: FrameHeader) -> Result<Frame, H3Error> {
        // "If the first frame of the control stream is any other frame type, this MUST be treated as a
        // connection error of type H3_MISSING_SETTINGS" (RFC 9114 §6.2.1).
        if self.settings.is_none() && kind != frame::SETTINGS {
            let reason = format!("control stream starts with frame {kind:#x}, expected SETTINGS");
            return Err(H3Error::new(code::MISSING_SETTINGS, reason));
        }
        let unexpected = |reason: &'static str| Err(H3Error::new(code::FRAME_UNEXPECTED, reason));
        match kind {
            // "If an endpoint receives a second SETTINGS frame on the control stream, the endpoint MUST
            // respond with a connection error of type H3_FRAME_UNEXPECTED" (RFC 9114 §7.2.4).
            frame::SETTINGS if self.settings.is_some() => return unexpected("second SETTINGS"),
            frame::SETTINGS if len > MAX_SETTINGS => {
                let reason = format!("SETTINGS of {len} bytes, expected at most {MAX_SETTINGS}");
                return Err(H3Error::new(code::EXCESSIVE_LOAD, reason));
            }
            frame::SETTINGS => {}
            frame::DATA | frame::HEADERS | frame::PUSH_PROMISE => {
                return unexpected("request frame on the control stream");
            }
            // "A client MUST treat the receipt of a MAX_PUSH_ID frame as a connection error of type
            // H3_FRAME_UNEXPECTED" (RFC 9114 §7.2.7).
            frame::MAX_PUSH_ID if self.side == Side::Client => {
                return unexpected("MAX_PUSH_ID from a server");
            }
            frame::GOAWAY | frame::CANCEL_PUSH | frame::MAX_PUSH_ID if len > 8 => {
                return Err(H3Error::new(code::FRAME_ERROR, "frame payload is not exactly one number"));
            }
            frame::GOAWAY | frame::CANCEL_PUSH | frame::MAX_PUSH_ID => {}
            kind if frame::is_http2_only(kind) => return unexpected("HTTP/2 frame on the control stream"),
            _ => return Ok(Frame::Skip { left: len }),
        }
        Ok(Frame::Payload { kind, left: len, payload: BytesMut::new() })
    }

    fn finish(&mut self, kind: u64, payload: &[u8]) -> Result<Option<Event>, H3Error> {
        match kind {
            frame::SETTINGS => {
                let settings = PeerSettings::parse(payload)?;
                self.settings = Some(settings);
                Ok(Some(Event::Settings(settings)))
            }
            frame::GOAWAY => self.go_away(frame::only_number(payload)?),
            frame::MAX_PUSH_ID => self.raise_max_push_id(frame::only_number(payload)?),
            frame::CANCEL_PUSH => {
                // No push was ever allowed or promised (RFC 9114 §7.2.3).
                let id = frame::only_number(payload)?;
                Err(H3Error::new(code::ID_ERROR, format!("CANCEL_PUSH for push {id}, which does not exist")))
            }
            _ => Ok(None),
        }
    }

    fn go_away(&mut self, id: u64) -> Result<Option<Event>, H3Error> {
        // "A client MUST treat receipt of a GOAWAY frame containing a Stream ID of any other type as a
        // connection error of type H3_ID_ERROR" (RFC 9114 §7.2.6).
        if self.side == Side::Client && !id.is_multiple_of(4) {
            return Err(H3Error::new(code::ID_ERROR, format!("GOAWAY for stream {id}, which is no request")));
        }
        // "Receiving a GOAWAY containing a larger identifier than previously received MUST be treated as
        // a connection error of type H3_ID_ERROR" (RFC 9114 §5.2).
        match self.goaway.replace(id) {
            Some(before) if id > before => {
                Err(H3Error::new(code::ID_ERROR, format!("GOAWAY for {id} after one for {before}")))
            }
            Some(before) if id == before => Ok(None),
            _ => Ok(Some(Event::GoAway { id })),
        }
    }

    fn raise_max_push_id(&mut self, id: u64) -> Result<Option<Event>, H3Error> {
        // "A MAX_PUSH_ID frame cannot reduce the maximum Push ID; receipt ... MUST be treated as a
        // connection error of type H3_ID_ERROR" (RFC 9114 §7.2.7).
        match self.max_push_id.replace(id) {
            Some(before) if id < before => {
                Err(H3Error::new(code::ID_ERROR, format!("MAX_PUSH_ID {id} after {before}")))
            }
            _ => Ok(None),
        }
    }
}
