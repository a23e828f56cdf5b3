//! The wire formats of MASQUE, without I/O: HTTP/3 framing, QPACK, HTTP Datagrams, capsules, CONNECT-IP,
//! CONNECT-UDP and CONNECT.
//!
//! In: bytes of QUIC streams and DATAGRAM frames, in any pieces, from peers that may be hostile. Out: events,
//! header sections, capsules and requests that obey their RFCs, or an error with the code with which to close
//! the stream or the connection. Always holds: no input makes this crate panic, buffers are bounded (each
//! module says by how much), and it reads no clock and opens no socket.
//!
//! A request passes through [`h3`] → [`headers`] → [`request`] → [`connect_ip`], [`connect_udp`], [`connect`]
//! or [`connect_mpvpn`]; the data of a CONNECT-IP or CONNECT-UDP stream is parsed by [`capsule`]; packets and
//! UDP payloads only pass through [`datagram`].
#![forbid(unsafe_code)]

pub mod capsule;
pub mod connect;
pub mod connect_ip;
pub mod connect_mpvpn;
pub mod connect_udp;
pub mod datagram;
pub mod extensions;
pub mod h3;
pub mod headers;
pub mod qpack;
pub mod request;
pub mod structured;
pub mod template;
pub mod varint;
#[cfg(test)]
#[path = "tests/vectors.rs"]
mod vectors;
