//! The engine's parsers of bytes from strangers, without sockets, for the fuzzers (`fuzz/`).
//!
//! In: bytes as they come from a TCP connection or a datagram. Out: what the engine makes of them. Nothing
//! here is different from what a server or client does; only the sockets are missing.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::connect::Authority;

use crate::{
    dns::message,
    https_server::proxy_protocol,
    proxy::{associations, http, socks5::Socks5},
};
pub use crate::{
    https_server::plain::{PlainHttpsServer, PlainProtocol},
    proxy::RequestStep,
};

/// The client's address in the PROXY protocol header of a connection (`None`: a health check of the load
/// balancer), and the number of bytes that the header takes.
///
/// # Errors
/// If there is no header, or it is incomplete.
pub fn proxy_protocol_header(stream: &[u8]) -> io::Result<(Option<SocketAddr>, usize)> {
    let mut rest = stream;
    let read =
        pin!(proxy_protocol::read_client_address(&mut rest)).poll(&mut Context::from_waker(Waker::noop()));
    match read {
        Poll::Ready(client) => client.map(|client| (client, stream.len() - rest.len())),
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

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

/// The name that a DNS query asks for, as the forwarding resolver reads it; `None` if it gets an error as
/// answer.
pub fn dns_question(query: &[u8]) -> Option<String> {
    message::question(query)
}

/// Whether the forwarding resolver takes `response` for the answer to `query`.
pub fn is_dns_answer(response: &[u8], query: &[u8]) -> bool {
    message::answers(response, query)
}

/// The errors that the forwarding resolver makes for a query: not understood, and not answered.
pub fn dns_errors(query: &[u8]) -> [Option<Vec<u8>>; 2] {
    [message::format_error(query), message::server_failure(query)]
}
