//! HTTP/3 frames (RFC 9114 §7): types, headers, and encoders.
//!
//! In: bytes of a stream, in any pieces, or contents of a frame. Out: frame headers, or encoded frames.
//! Always holds: at most 16 bytes of an incomplete frame header are buffered.

use super::{H3Error, Settings, code};
use crate::{headers::Headers, qpack, varint};
use bytes::{Buf, BufMut, Bytes, BytesMut};

pub(super) const DATA: u64 = 0x00;
pub(super) const HEADERS: u64 = 0x01;
pub(super) const CANCEL_PUSH: u64 = 0x03;
pub(super) const SETTINGS: u64 = 0x04;
pub(super) const PUSH_PROMISE: u64 = 0x05;
pub(super) const GOAWAY: u64 = 0x07;
pub(super) const MAX_PUSH_ID: u64 = 0x0d;

/// Whether a frame type is reserved because HTTP/2 used it: "their receipt MUST be treated as a connection
/// error of type H3_FRAME_UNEXPECTED" (RFC 9114 §7.2.8).
pub(super) fn is_http2_only(kind: u64) -> bool {
    matches!(kind, 0x02 | 0x06 | 0x08 | 0x09)
}

/// Type and length of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) kind: u64,
    /// Payload length in bytes.
    pub(super) len: u64,
}

/// Collects the bytes of variable-length integers that arrive in pieces: a stream type, or a frame header.
#[derive(Clone, Debug, Default)]
pub(super) struct VarintBuffer {
    bytes: [u8; 16],
    len: u8,
}

impl VarintBuffer {
    /// Whether no byte has arrived yet.
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes bytes from `data` until a frame header is complete; then the buffer is empty again.
    pub(super) fn frame_header(&mut self, data: &mut Bytes) -> Option<FrameHeader> {
        self.collect(data, |bytes| {
            let (kind, at) = varint::decode(bytes)?;
            let (len, _) = varint::decode(&bytes[at..])?;
            Some(FrameHeader { kind, len })
        })
    }

    /// Takes bytes from `data` until one number is complete; then the buffer is empty again.
    pub(super) fn number(&mut self, data: &mut Bytes) -> Option<u64> {
        self.collect(data, |bytes| varint::decode(bytes).map(|(value, _)| value))
    }

    fn collect<T>(&mut self, data: &mut Bytes, complete: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        while data.has_remaining() {
            // Two numbers are at most 16 bytes, so a full array is always complete.
            *self.bytes.get_mut(usize::from(self.len))? = data.get_u8();
            self.len += 1;
            if let Some(value) = complete(&self.bytes[..usize::from(self.len)]) {
                self.len = 0;
                return Some(value);
            }
        }
        None
    }
}

/// Takes at most `left` bytes from `data` and subtracts their number from `left`.
pub(super) fn take(data: &mut Bytes, left: &mut u64) -> Bytes {
    let len = (*left).min(data.len() as u64);
    *left -= len;
    data.split_to(len as usize)
}

/// The one number that is the whole payload of GOAWAY, CANCEL_PUSH and MAX_PUSH_ID. "A frame payload
/// that contains additional bytes after the identified fields or ... terminates before the end of the
/// identified fields MUST be treated as a connection error of type H3_FRAME_ERROR" (RFC 9114 §7.1).
pub(super) fn only_number(payload: &[u8]) -> Result<u64, H3Error> {
    match varint::decode(payload) {
        Some((value, len)) if len == payload.len() => Ok(value),
        _ => Err(H3Error::new(code::FRAME_ERROR, "frame payload is not exactly one number")),
    }
}

/// The frame header before a DATA payload, kept inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    bytes: [u8; 9],
    len: u8,
}

impl AsRef<[u8]> for DataHeader {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// A HEADERS frame with `headers`, which should be valid.
pub fn encode_headers(headers: &Headers) -> Bytes {
    encode_frame(HEADERS, &qpack::encode(headers))
}

/// The header of a DATA frame with `len` bytes, for senders that write the data separately.
pub fn encode_data_header(len: usize) -> DataHeader {
    let mut bytes = [DATA as u8; 9];
    let mut room = &mut bytes[1..];
    varint::encode(len as u64, &mut room);
    let len = 9 - room.remaining_mut() as u8;
    DataHeader { bytes, len }
}

/// A DATA frame with a copy of `data`.
pub fn encode_data(data: &[u8]) -> Bytes {
    encode_frame(DATA, data)
}

#[cfg(test)]
/// A GOAWAY frame for the control stream. From a server, `id` is the first request stream it will not
/// handle; from a client, the first push ID it will not take (RFC 9114 §5.2).
///
/// # Panics
/// If `id` is above 2^62 − 1.
pub(super) fn encode_goaway(id: u64) -> Bytes {
    let mut payload = BytesMut::new();
    varint::encode(id, &mut payload);
    encode_frame(GOAWAY, &payload)
}

/// The SETTINGS frame.
pub(super) fn encode_settings(settings: &Settings) -> Bytes {
    encode_frame(SETTINGS, &settings.payload())
}

fn encode_frame(kind: u64, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(payload.len() + 9);
    varint::encode(kind, &mut frame);
    varint::encode(payload.len() as u64, &mut frame);
    frame.put_slice(payload);
    frame.freeze()
}
