//! The wire of MASQUE, without any I/O: HTTP/3 framing, QPACK, HTTP Datagrams, capsules, CONNECT-IP, CONNECT-UDP and
//! CONNECT.
//!
//! In: bytes of QUIC streams and DATAGRAM frames, in any pieces, from peers that may be hostile. Out:
//! events, header sections, capsules and requests that obey their RFCs, or an error with the code to
//! close the stream or the connection with. Always holds: no input makes this crate panic, what it
//! buffers is bounded (each module says by how much), and it keeps no clock and opens no socket.
//!
//! A request goes [`h3`] → [`headers`] → [`request`] → [`connect_ip`], [`connect_udp`], [`connect`] or [`connect_mpvpn`]; the data
//! of a CONNECT-IP or CONNECT-UDP stream then goes through [`capsule`], and packets and payloads go past all of it through
//! [`datagram`].
#![forbid(unsafe_code)]

pub mod capsule;
pub mod connect;
pub mod connect_ip;
pub mod connect_mpvpn;
pub mod connect_udp;
pub mod credentials;
pub mod datagram;
pub mod h3;
pub mod headers;
pub mod qpack;
pub mod request;
pub mod structured;
pub mod template;
pub mod varint;
#[cfg(test)]
mod vectors;

pub use credentials::session_header;
