//! Parsers of bytes from apps, without sockets, for the fuzzers (`fuzz/`).
//!
//! In: bytes as they come from a TCP connection or a datagram. Out: what the proxies make of them. These are
//! the parsers of a client; only the sockets are missing.

pub use crate::{
    associations::{encode_datagram as encode_socks5_datagram, parse_datagram as socks5_datagram},
    http::step as http_proxy_step,
    socks5::Socks5 as Socks5Dialogue,
};
