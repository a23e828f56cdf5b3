//! HTTP Datagrams on HTTP/3 (RFC 9297 §2.1) with the context ID of CONNECT-IP and CONNECT-UDP
//! (RFC 9484 §6, RFC 9298 §4).
//!
//! In: a request stream and a context, or the payload of a received QUIC DATAGRAM frame. Out: the prefix of
//! each packet, or the offset at which the packet starts. Always holds: packets are never copied here, and a
//! prefix has at most [`MAX_PREFIX`] bytes.

use crate::{h3::code, varint};
use bytes::BufMut;

/// Length in bytes of the longest prefix: two variable-length integers of eight bytes.
pub const MAX_PREFIX: usize = 16;

/// Context ID of whole IP packets (RFC 9484 §6) and of UDP payloads (RFC 9298 §5).
pub const CONTEXT_PAYLOAD: u64 = 0;

/// Stream IDs count in fours, because only client-initiated bidirectional streams carry requests: with
/// stream IDs up to 2^62 − 1, the quarter stream ID goes up to 2^60 − 1 (RFC 9297 §2.1).
const MAX_QUARTER_STREAM_ID: u64 = (1 << 60) - 1;

/// The prefix of each packet in a QUIC DATAGRAM frame: quarter stream ID and context ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPrefix {
    bytes: [u8; MAX_PREFIX],
    len: u8,
}

impl AsRef<[u8]> for DatagramPrefix {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The parsed prefix of a received HTTP Datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpDatagram {
    /// QUIC stream ID of the request stream that the datagram belongs to.
    pub stream_id: u64,
    /// Context ID; in [`CONTEXT_PAYLOAD`] the payload is a whole IP packet.
    pub context_id: u64,
    /// Offset of the payload in bytes.
    pub payload_at: usize,
}

/// Why a received QUIC DATAGRAM frame is not an HTTP Datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DatagramError {
    /// "Receipt of a QUIC DATAGRAM frame whose payload is too short to allow parsing the Quarter Stream ID
    /// field MUST be treated as an HTTP/3 connection error of type H3_DATAGRAM_ERROR" (RFC 9297 §2.1).
    #[error("HTTP Datagram of {len} bytes ends inside the quarter stream ID")]
    NoStreamId {
        /// Bytes received.
        len: usize,
    },
    /// "Receipt of an HTTP/3 Datagram that includes a larger value MUST be treated as an HTTP/3
    /// connection error of type H3_DATAGRAM_ERROR" (RFC 9297 §2.1).
    #[error("HTTP Datagram for quarter stream ID {quarter}, expected at most 2^60-1")]
    StreamIdTooLarge {
        /// The value received.
        quarter: u64,
    },
    /// The request is malformed, the connection is not: abort stream `stream_id`.
    #[error("HTTP Datagram of stream {stream_id} ends inside the context ID")]
    NoContextId {
        /// The request stream the datagram names.
        stream_id: u64,
    },
}

impl DatagramError {
    /// The HTTP/3 error code: of a stream error for [`DatagramError::NoContextId`], else of a connection
    /// error.
    pub fn code(&self) -> u64 {
        code::DATAGRAM_ERROR
    }
}

/// The prefix of every datagram of context `context_id` on request stream `stream_id`.
///
/// # Panics
/// If `stream_id` is not a client-initiated bidirectional stream (a multiple of four), or if either
/// number is above 2^62 − 1.
pub fn prefix(stream_id: u64, context_id: u64) -> DatagramPrefix {
    prefix_with(stream_id, |room| varint::encode(context_id, room))
}

/// The same prefix with a context ID encoded in `more` bytes more than necessary; `None` if there is no such
/// encoding. With it, a data packet gets the length of a repair packet of its FEC group.
///
/// # Panics
/// As [`prefix`].
pub fn long_prefix(stream_id: u64, context_id: u64, more: usize) -> Option<DatagramPrefix> {
    let len = varint::len(context_id) + more;
    let mut fits = false;
    let prefix = prefix_with(stream_id, |room| fits = varint::encode_in(context_id, len, room));
    fits.then_some(prefix)
}

fn prefix_with(stream_id: u64, context: impl FnOnce(&mut &mut [u8])) -> DatagramPrefix {
    assert!(stream_id.is_multiple_of(4), "stream {stream_id} is not a request stream");
    let mut bytes = [0; MAX_PREFIX];
    let mut room = &mut bytes[..];
    varint::encode(stream_id / 4, &mut room);
    context(&mut room);
    let len = (MAX_PREFIX - room.remaining_mut()) as u8;
    DatagramPrefix { bytes, len }
}

/// Parses the prefix in the payload of a QUIC DATAGRAM frame.
///
/// # Errors
/// See [`DatagramError`]. The caller drops datagrams of unknown streams and contexts.
#[inline]
pub fn parse(bytes: &[u8]) -> Result<HttpDatagram, DatagramError> {
    let (quarter, at) = varint::decode(bytes).ok_or(DatagramError::NoStreamId { len: bytes.len() })?;
    if quarter > MAX_QUARTER_STREAM_ID {
        return Err(DatagramError::StreamIdTooLarge { quarter });
    }
    let stream_id = quarter * 4;
    let (context_id, len) = varint::decode(&bytes[at..]).ok_or(DatagramError::NoContextId { stream_id })?;
    Ok(HttpDatagram { stream_id, context_id, payload_at: at + len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::{self, check, hex, number};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn the_common_prefix_is_two_bytes() {
        assert_eq!(prefix(0, 0).as_ref(), [0, 0]);
        assert_eq!(prefix(44, CONTEXT_PAYLOAD).as_ref(), [11, 0]);
    }

    #[test]
    fn a_long_prefix_has_the_same_meaning() {
        assert_eq!(long_prefix(8, 10, 3).unwrap().as_ref(), [2, 0x80, 0, 0, 10]);
        assert_eq!(long_prefix(0, 70, 2).unwrap().as_ref(), [0, 0x80, 0, 0, 70]);
        assert_eq!([long_prefix(0, 10, 2), long_prefix(0, 70, 3), long_prefix(0, 10, 9)], [None; 3]);
        let parsed = parse(long_prefix(8, 10, 7).unwrap().as_ref()).unwrap();
        assert_eq!((parsed.stream_id, parsed.context_id, parsed.payload_at), (8, 10, 9));
    }

    #[test]
    fn quarter_stream_ids_end_at_two_to_the_sixty_minus_one() {
        let mut legal = Vec::new();
        varint::encode(MAX_QUARTER_STREAM_ID, &mut legal);
        legal.push(0);
        assert_eq!(parse(&legal).unwrap().stream_id, varint::MAX - 3);

        let mut illegal = Vec::new();
        varint::encode(MAX_QUARTER_STREAM_ID + 1, &mut illegal);
        illegal.push(0);
        let error = parse(&illegal).unwrap_err();
        assert_eq!(error, DatagramError::StreamIdTooLarge { quarter: 1 << 60 });
        assert_eq!(error.code(), 0x33);
    }

    #[test]
    fn a_short_frame_breaks_the_connection_and_a_missing_context_only_the_stream() {
        assert_eq!(parse(&[]), Err(DatagramError::NoStreamId { len: 0 }));
        assert_eq!(parse(&[0x40]), Err(DatagramError::NoStreamId { len: 1 }));
        assert_eq!(parse(&[2]), Err(DatagramError::NoContextId { stream_id: 8 }));
    }

    #[test]
    fn datagrams_are_those_of_the_vectors() {
        let parse_one = |bytes: &[u8]| match parse(bytes) {
            Ok(HttpDatagram { stream_id, context_id, payload_at }) => {
                let payload = hex(&bytes[payload_at..]);
                Ok(json!({ "stream_id": stream_id, "context_id": context_id, "payload": payload }))
            }
            Err(error @ DatagramError::NoContextId { stream_id }) => {
                Err(json!({ "code": error.code(), "stream_id": stream_id }))
            }
            Err(error) => Err(json!({ "code": error.code() })),
        };
        let encode = |fields: &Value| {
            let prefix = prefix(number(&fields["stream_id"]), number(&fields["context_id"]));
            [prefix.as_ref(), &vectors::bytes(&fields["payload"])].concat()
        };
        check(include_str!("../../../docs/vectors/datagram.json"), parse_one, encode);
    }

    proptest! {
        #[test]
        fn parse_undoes_prefix(quarter in 0..=MAX_QUARTER_STREAM_ID, context in 0..=varint::MAX,
                               shift in 0u32..60, payload in prop::collection::vec(any::<u8>(), 0..40)) {
            let (stream_id, context_id) = ((quarter >> shift) * 4, context >> shift);
            let prefix = prefix(stream_id, context_id);
            let mut bytes = prefix.as_ref().to_vec();
            bytes.extend(&payload);
            let parsed = parse(&bytes).unwrap();
            prop_assert_eq!((parsed.stream_id, parsed.context_id), (stream_id, context_id));
            prop_assert_eq!(&bytes[parsed.payload_at..], &payload[..]);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(parsed) = parse(&bytes) {
                prop_assert!(parsed.payload_at <= bytes.len());
            }
        }
    }
}
