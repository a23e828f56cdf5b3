//! Parsers of bytes from strangers, without sockets, for the fuzzers (`fuzz/`).
//!
//! In: bytes as they come from a TCP connection. Out: what the server makes of them. Nothing here is
//! different from what a server does; only the sockets are missing.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll, Waker},
};

pub use crate::plain::{PlainHttpsServer, PlainProtocol};
use crate::proxy_protocol;

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
