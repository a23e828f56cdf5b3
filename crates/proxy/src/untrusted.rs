//! Parsers of bytes from apps, without sockets, for the fuzzers (`fuzz/`).
//!
//! In: bytes as they come from a TCP connection or a datagram. Out: what the proxies make of them. Nothing
//! here is different from what a client does; only the sockets are missing.

use bytes::{Bytes, BytesMut};
use mpvpn_masque::connect::Authority;

use crate::{RequestStep, associations, http, socks5::Socks5};

/// A dialogue with an app at a SOCKS5 proxy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Socks5Dialogue(Socks5);

impl Socks5Dialogue {
    /// Parses what was received so far, and consumes complete messages.
    pub fn step(&mut self, bytes: &mut BytesMut) -> RequestStep {
        self.0.step(bytes)
    }
}

/// Parses what an app sent to an HTTP proxy so far, and consumes a complete head.
pub fn http_proxy_step(bytes: &mut BytesMut) -> RequestStep {
    http::step(bytes)
}

/// The target and the payload of an app's datagram to a SOCKS5 proxy; `None` for fragments and malformed
/// datagrams.
pub fn socks5_datagram(datagram: &[u8]) -> Option<(Authority, &[u8])> {
    associations::parse_datagram(datagram)
}

/// A datagram of a SOCKS5 proxy to an app, with its source in front.
pub fn encode_socks5_datagram(from: &Authority, payload: &[u8]) -> Bytes {
    associations::encode_datagram(from, payload)
}
