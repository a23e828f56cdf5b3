//! Error codes of HTTP/3 (RFC 9114 §8.1), QPACK (RFC 9204 §6) and HTTP Datagrams (RFC 9297 §5.2).

/// RFC 9297 §2.1: a datagram that is not an HTTP Datagram.
pub const DATAGRAM_ERROR: u64 = 0x33;
/// Nothing went wrong.
pub const NO_ERROR: u64 = 0x100;
/// A fault of this side.
pub const INTERNAL_ERROR: u64 = 0x102;
/// A stream that must not be opened.
pub const STREAM_CREATION_ERROR: u64 = 0x103;
/// A stream the connection needs was closed.
pub const CLOSED_CRITICAL_STREAM: u64 = 0x104;
/// A frame that is not allowed here.
pub const FRAME_UNEXPECTED: u64 = 0x105;
/// A frame with a wrong layout or size.
pub const FRAME_ERROR: u64 = 0x106;
/// The peer does something that may be an attack.
pub const EXCESSIVE_LOAD: u64 = 0x107;
/// An ID that is out of range or was used before.
pub const ID_ERROR: u64 = 0x108;
/// An error in SETTINGS.
pub const SETTINGS_ERROR: u64 = 0x109;
/// The control stream does not start with SETTINGS.
pub const MISSING_SETTINGS: u64 = 0x10a;
/// A request that was not processed.
pub const REQUEST_REJECTED: u64 = 0x10b;
/// The request or its response is no longer wanted.
pub const REQUEST_CANCELLED: u64 = 0x10c;
/// The client's stream ended before the request was complete.
pub const REQUEST_INCOMPLETE: u64 = 0x10d;
/// A malformed message.
pub const MESSAGE_ERROR: u64 = 0x10e;
/// The TCP connection behind a CONNECT was reset or failed.
pub const CONNECT_ERROR: u64 = 0x10f;
/// A field section cannot be decoded.
pub const QPACK_DECOMPRESSION_FAILED: u64 = 0x200;
/// An illegal instruction on the peer's QPACK encoder stream.
pub const QPACK_ENCODER_STREAM_ERROR: u64 = 0x201;
/// An illegal instruction on the peer's QPACK decoder stream.
pub const QPACK_DECODER_STREAM_ERROR: u64 = 0x202;
