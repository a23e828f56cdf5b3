//! Parses requests to a SOCKS5 proxy, and makes its replies (RFC 1928).
//!
//! In: the bytes received so far. Out: what to do ([`RequestStep`]). Always holds: only complete messages are
//! consumed, and no byte after the request.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mpvpn_masque::connect::{Authority, Host, ProxyError};

use super::RequestStep;

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_ACCEPTABLE_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;
const UDP_ASSOCIATE: u8 = 3;

pub(super) const ATYP_V4: u8 = 1;
pub(super) const ATYP_NAME: u8 = 3;
pub(super) const ATYP_V6: u8 = 4;

/// The `REP` field of a reply (§6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Succeeded = 0,
    GeneralFailure = 1,
    NotAllowed = 2,
    HostUnreachable = 4,
    ConnectionRefused = 5,
    TtlExpired = 6,
    CommandNotSupported = 7,
    AddressTypeNotSupported = 8,
}

impl Reply {
    /// The reply for a failure.
    pub(super) fn of(failure: ProxyError) -> Self {
        match failure {
            ProxyError::Dns | ProxyError::Unroutable => Self::HostUnreachable,
            ProxyError::Prohibited => Self::NotAllowed,
            ProxyError::Refused => Self::ConnectionRefused,
            ProxyError::TimedOut => Self::TtlExpired,
            ProxyError::Busy | ProxyError::Other => Self::GeneralFailure,
        }
    }

    /// A reply with an all-zero bound address, because the server does not reveal its own.
    pub(super) fn bytes(self) -> Bytes {
        Bytes::copy_from_slice(&[VERSION, self as u8, 0, ATYP_V4, 0, 0, 0, 0, 0, 0])
    }
}

/// The reply to UDP ASSOCIATE, with the address for the app's datagrams (§6).
pub(super) fn associate_reply(at: SocketAddr) -> Bytes {
    let mut reply = BytesMut::from(&[VERSION, Reply::Succeeded as u8, 0][..]);
    match at.ip() {
        IpAddr::V4(ip) => {
            reply.put_u8(ATYP_V4);
            reply.put(&ip.octets()[..]);
        }
        IpAddr::V6(ip) => {
            reply.put_u8(ATYP_V6);
            reply.put(&ip.octets()[..]);
        }
    }
    reply.put_u16(at.port());
    reply.freeze()
}

/// The state of the dialogue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Socks5 {
    /// The app offers authentication methods.
    #[default]
    Methods,
    /// It says what it wants.
    Request,
}

impl Socks5 {
    /// Parses what was received so far, and consumes complete messages.
    pub fn step(&mut self, bytes: &mut BytesMut) -> RequestStep {
        match self {
            Self::Methods => self.methods(bytes),
            Self::Request => request(bytes),
        }
    }

    fn methods(&mut self, bytes: &mut BytesMut) -> RequestStep {
        let Some(version) = bytes.first() else { return RequestStep::Incomplete };
        if *version != VERSION {
            let why = format!("the first byte is {version}: expected version 5 of SOCKS");
            return RequestStep::Refuse { answer: Bytes::new(), why };
        }
        let Some(count) = bytes.get(1).copied().map(usize::from) else { return RequestStep::Incomplete };
        let Some(methods) = bytes.get(2..2 + count) else { return RequestStep::Incomplete };
        if !methods.contains(&NO_AUTHENTICATION) {
            let answer = Bytes::from_static(&[VERSION, NO_ACCEPTABLE_METHOD]);
            return RequestStep::Refuse {
                answer,
                why: "it offers only authentication methods that are not supported: only 0 (no authentication) is".to_owned(),
            };
        }
        bytes.advance(2 + count);
        *self = Self::Request;
        RequestStep::Send(Bytes::from_static(&[VERSION, NO_AUTHENTICATION]))
    }
}

fn request(bytes: &mut BytesMut) -> RequestStep {
    let refuse = |reply: Reply, why: &str| RequestStep::Refuse { answer: reply.bytes(), why: why.to_owned() };
    let Some(&[version, command, _, kind]) = bytes.first_chunk() else { return RequestStep::Incomplete };
    if version != VERSION {
        return refuse(Reply::GeneralFailure, "its request is not of version 5");
    }
    // Before the rest is parsed, whose format may be unknown.
    if ![CONNECT, UDP_ASSOCIATE].contains(&command) {
        return refuse(Reply::CommandNotSupported, "only CONNECT and UDP ASSOCIATE are supported, not BIND");
    }
    let (host, port) = match parse_address(kind, &bytes[4..]) {
        ParsedAddress::Incomplete => return RequestStep::Incomplete,
        ParsedAddress::UnknownType => {
            return refuse(Reply::AddressTypeNotSupported, "its address is of no type that is known");
        }
        ParsedAddress::Complete { host, port, length } => {
            bytes.advance(4 + length);
            (host, port)
        }
    };
    // The app's announced source address is ignored: most apps send zeros, and behind a NAT it is wrong.
    if command == UDP_ASSOCIATE {
        return RequestStep::Associate;
    }
    match host {
        None => refuse(Reply::HostUnreachable, "it asked for something that is no host name"),
        Some(_) if port == 0 => refuse(Reply::GeneralFailure, "it asked for port 0"),
        Some(host) => RequestStep::Connect { to: Authority { host, port }, early: BytesMut::new() },
    }
}

/// The result of parsing an address with its port (§5).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ParsedAddress {
    /// The address is incomplete.
    Incomplete,
    /// The address type is unknown.
    UnknownType,
    /// The address took `length` bytes; `host` is `None` if it is not valid.
    Complete { host: Option<Host>, port: u16, length: usize },
}

/// Parses an address of type `kind`.
pub(super) fn parse_address(kind: u8, bytes: &[u8]) -> ParsedAddress {
    let (host, length) = match kind {
        ATYP_V4 => match bytes.first_chunk::<4>() {
            Some(octets) => (Some(Host::Addr(IpAddr::V4(Ipv4Addr::from(*octets)))), 4),
            None => return ParsedAddress::Incomplete,
        },
        ATYP_V6 => match bytes.first_chunk::<16>() {
            Some(octets) => (Some(Host::Addr(IpAddr::V6(Ipv6Addr::from(*octets)))), 16),
            None => return ParsedAddress::Incomplete,
        },
        ATYP_NAME => {
            let Some(length) = bytes.first().copied().map(usize::from) else {
                return ParsedAddress::Incomplete;
            };
            let Some(name) = bytes.get(1..1 + length) else { return ParsedAddress::Incomplete };
            (host_of(name), 1 + length)
        }
        _ => return ParsedAddress::UnknownType,
    };
    match bytes[length..].first_chunk() {
        Some(port) => ParsedAddress::Complete { host, port: u16::from_be_bytes(*port), length: length + 2 },
        None => ParsedAddress::Incomplete,
    }
}

/// A host from a domain name; some apps put IP addresses there.
fn host_of(name: &[u8]) -> Option<Host> {
    let name = std::str::from_utf8(name).ok()?;
    if let Ok(ip) = name.parse() {
        return Some(Host::Addr(ip));
    }
    format!("{name}:1").parse::<Authority>().ok().map(|authority| authority.host)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: &[u8] = &[5, 1, 0];

    /// Sends a byte at a time; returns all replies, the last step, and the bytes that are left.
    fn talk(bytes: &[u8]) -> (Vec<u8>, RequestStep, BytesMut) {
        let (mut socks, mut buffer, mut said) = (Socks5::default(), BytesMut::new(), Vec::new());
        for byte in bytes {
            buffer.extend_from_slice(&[*byte]);
            match socks.step(&mut buffer) {
                RequestStep::Incomplete => {}
                RequestStep::Send(words) => said.extend_from_slice(&words),
                step => return (said, step, buffer),
            }
        }
        (said, RequestStep::Incomplete, buffer)
    }

    fn read_request(request: &[u8]) -> RequestStep {
        let (said, step, left) = talk(&[HELLO, request].concat());
        assert_eq!(said, [5, 0]);
        assert!(
            left.is_empty() || matches!(step, RequestStep::Refuse { .. } | RequestStep::Incomplete),
            "{left:?}"
        );
        step
    }

    fn connects(to: &str) -> RequestStep {
        RequestStep::Connect { to: to.parse().unwrap(), early: BytesMut::new() }
    }

    fn refused_with(step: &RequestStep) -> u8 {
        match step {
            RequestStep::Refuse { answer, .. } => answer[1],
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_kinds_of_addresses_are_understood() {
        assert_eq!(read_request(&[5, 1, 0, 1, 192, 0, 2, 1, 0, 80]), connects("192.0.2.1:80"));
        let v6 =
            [&[5, 1, 0, 4][..], &"2001:db8::1".parse::<Ipv6Addr>().unwrap().octets(), &[1, 187]].concat();
        assert_eq!(read_request(&v6), connects("[2001:db8::1]:443"));
        let name = |name: &str| [&[5, 1, 0, 3, name.len() as u8], name.as_bytes(), &[1, 187]].concat();
        assert_eq!(read_request(&name("Example.com")), connects("example.com:443"));
        assert_eq!(read_request(&name("192.0.2.1")), connects("192.0.2.1:443"));
        assert_eq!(read_request(&name("2001:db8::1")), connects("[2001:db8::1]:443"));
    }

    #[test]
    fn what_is_not_supported_gets_its_reply_code() {
        assert_eq!(refused_with(&read_request(&[5, 2, 0, 1])), Reply::CommandNotSupported as u8);
        assert_eq!(read_request(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]), RequestStep::Associate);
        assert_eq!(refused_with(&read_request(&[5, 3, 0, 2])), Reply::AddressTypeNotSupported as u8);
        assert_eq!(refused_with(&read_request(&[5, 1, 0, 2])), Reply::AddressTypeNotSupported as u8);
        assert_eq!(refused_with(&read_request(&[5, 1, 0, 1, 1, 2, 3, 4, 0, 0])), Reply::GeneralFailure as u8);
        for name in [&b""[..], b"a b", b"\xff", b"1.2.3", b"a:1"] {
            let request = [&[5, 1, 0, 3, name.len() as u8], name, &[0, 80]].concat();
            assert_eq!(refused_with(&read_request(&request)), Reply::HostUnreachable as u8, "{name:?}");
        }
    }

    #[test]
    fn other_protocols_are_not_talked_to() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], &[4, 1, 0, 80, 1, 2, 3, 4, 0]] {
            let (said, step, _) = talk(bytes);
            assert!(said.is_empty());
            assert!(matches!(step, RequestStep::Refuse { answer, .. } if answer.is_empty()));
        }
        let (_, step, _) = talk(&[5, 2, 1, 2]);
        assert_eq!(refused_with(&step), NO_ACCEPTABLE_METHOD);
        assert!(matches!(talk(&[5, 0]).1, RequestStep::Refuse { .. }));
    }

    #[test]
    fn an_app_that_does_not_wait_for_answers_loses_nothing() {
        let mut bytes = BytesMut::from(&[HELLO, &[5, 1, 0, 1, 192, 0, 2, 1, 0, 80], b"hello"].concat()[..]);
        let mut socks = Socks5::default();
        assert!(matches!(socks.step(&mut bytes), RequestStep::Send(_)));
        assert_eq!(socks.step(&mut bytes), connects("192.0.2.1:80"));
        assert_eq!(&bytes[..], b"hello");
    }
}
