//! CONNECT: a TCP connection relayed over a stream (RFC 9110 §9.3.6, RFC 9114 §4.4).
//!
//! In: on the client, the target, and later the response; on the server, a valid request header section. Out:
//! header sections, the target, or the reason of a failure as a proxy error type ([`ProxyError`], RFC 9209).
//! Always holds: nothing is authorized here; names are not resolved and credentials not verified.

use crate::{
    headers::Headers,
    request::{self, Rejection, RequestKind},
    structured,
};
use std::{
    borrow::Cow,
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// The host of a target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// An address.
    Addr(IpAddr),
    /// A name, in lowercase, that the server resolves.
    Name(String),
}

/// Host and port to connect to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Authority {
    /// The host.
    pub host: Host,
    /// The port, not 0.
    pub port: u16,
}

/// Why a text is not an [`Authority`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// "A server MUST reject a CONNECT request that targets an empty or invalid port number" (RFC 9110
    /// §9.3.6).
    #[error("expected HOST:PORT with a port from 1 to 65535")]
    Port,
    /// Neither a name, nor an IPv4 address, nor an IPv6 address in brackets.
    #[error("expected a name, an IPv4 address or an IPv6 address in brackets before the port")]
    Host,
}

impl FromStr for Authority {
    type Err = AuthorityError;

    fn from_str(text: &str) -> Result<Self, AuthorityError> {
        let (host, port) = text.rsplit_once(':').ok_or(AuthorityError::Port)?;
        let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|port| is_number && *port > 0).ok_or(AuthorityError::Port)?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(v6) => Host::Addr(v6.parse::<Ipv6Addr>().map_err(|_| AuthorityError::Host)?.into()),
            None => match host.parse::<IpAddr>() {
                Ok(IpAddr::V4(v4)) => Host::Addr(v4.into()),
                Ok(IpAddr::V6(_)) => return Err(AuthorityError::Host),
                Err(_) if request::is_host_name(host) => Host::Name(host.to_ascii_lowercase()),
                Err(_) => return Err(AuthorityError::Host),
            },
        };
        Ok(Self { host, port })
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Addr(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl From<SocketAddr> for Authority {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Addr(address.ip()), port: address.port() }
    }
}

/// The request for a connection to `target`; `credentials` is the value of `proxy-authorization`.
pub fn request(target: &Authority, credentials: Option<&str>) -> Headers {
    let mut headers = Headers::new();
    headers.push(":method", "CONNECT");
    headers.push(":authority", target.to_string());
    if let Some(credentials) = credentials {
        headers.push("proxy-authorization", credentials.to_owned());
    }
    headers
}

/// The credentials of a request: the value of `proxy-authorization` (RFC 9110 §11.7.2), or else of
/// `authorization`, if there is exactly one.
pub fn credentials(headers: &Headers) -> Option<String> {
    ["proxy-authorization", "authorization"].into_iter().find_map(|name| request::single_text(headers, name))
}

/// A well-formed request; the server decides whether to grant it.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
pub struct Connect {
    /// The target of the connection, or of the UDP payloads.
    pub target: Authority,
    /// See [`credentials`].
    #[debug("{:?}", credentials.as_ref().map(|_| "(hidden)"))]
    pub credentials: Option<String>,
}

/// Parses a request whose header section is valid ([`Headers::validate`]).
///
/// # Errors
/// 405 for another method, 501 for an extended CONNECT, 400 for a bad target.
pub fn parse_request(headers: &Headers) -> Result<Connect, Rejection> {
    match request::classify(headers)? {
        RequestKind::ConnectTcp => {}
        RequestKind::Other => return Err(Rejection::new(405, "expected CONNECT")),
        RequestKind::ConnectIp | RequestKind::ConnectUdp | RequestKind::ConnectMpvpn => {
            return Err(Rejection::new(501, "expected CONNECT without :protocol"));
        }
    }
    let authority = headers.authority().unwrap_or_default();
    let target = authority.parse().map_err(|error: AuthorityError| Rejection::new(400, error.to_string()))?;
    Ok(Connect { target, credentials: credentials(headers) })
}

/// Why a connection to a target failed, as a proxy error type (RFC 9209 §2.3) from the server to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyError {
    /// The name could not be resolved to an address.
    Dns,
    /// A rule forbids the target.
    Prohibited,
    /// The target refused the connection.
    Refused,
    /// There is no route to the target, or the host is down.
    Unroutable,
    /// The target did not answer in time.
    TimedOut,
    /// The server cannot open more connections.
    Busy,
    /// Any other failure.
    Other,
}

impl ProxyError {
    /// HTTP status code and proxy error type (RFC 9209 §2.3) of each value.
    const ALL: [(Self, u16, &'static str); 7] = [
        (Self::Dns, 502, "dns_error"),
        (Self::Prohibited, 403, "destination_ip_prohibited"),
        (Self::Refused, 502, "connection_refused"),
        (Self::Unroutable, 502, "destination_ip_unroutable"),
        (Self::TimedOut, 504, "connection_timeout"),
        (Self::Busy, 503, "connection_limit_reached"),
        (Self::Other, 502, "proxy_internal_error"),
    ];

    /// The response to the client; `reason` is a text for users.
    pub fn rejection(self, reason: impl Into<Cow<'static, str>>) -> Rejection {
        let known = Self::ALL.iter().find(|(failure, ..)| *failure == self);
        let (status, error) = known.map_or((502, None), |(_, status, error)| (*status, Some(*error)));
        Rejection { error, ..Rejection::new(status, reason) }
    }

    /// The failure in a response without a 2xx status: by its proxy error type if that is known, else by its
    /// status.
    pub fn from_response(headers: &Headers) -> Self {
        let error =
            headers.values("proxy-status").filter_map(|value| structured::last_token(value, "error")).last();
        let received = error.as_deref();
        let by_error =
            Self::ALL.iter().find(|(.., error)| Some(*error) == received).map(|(failure, ..)| *failure);
        by_error.unwrap_or(match (received, headers.status()) {
            (Some("connection_terminated"), _) => Self::Refused,
            (Some("dns_timeout"), _) => Self::Dns,
            (Some("destination_unavailable" | "destination_not_found"), _) => Self::Unroutable,
            (Some("http_request_denied"), _) | (_, Some(403)) => Self::Prohibited,
            (_, Some(429 | 503)) => Self::Busy,
            (_, Some(504)) => Self::TimedOut,
            _ => Self::Other,
        })
    }
}

/// The response that grants a request: the stream then carries the bytes of the connection.
pub fn accept() -> Headers {
    Headers::response(200)
}

/// Checks the final response to a request.
///
/// # Errors
/// If the status is not 2xx (RFC 9110 §9.3.6).
pub fn check_response(headers: &Headers) -> Result<(), ProxyError> {
    match headers.status() {
        Some(200..=299) => Ok(()),
        _ => Err(ProxyError::from_response(headers)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::Section;

    #[test]
    fn targets_are_names_or_addresses_with_a_port() {
        for text in ["example.com:443", "192.0.2.1:80", "[2001:db8::1]:65535"] {
            assert_eq!(text.parse::<Authority>().unwrap().to_string(), text);
        }
        let name = "Example.COM:1".parse::<Authority>().unwrap();
        assert_eq!(name, Authority { host: Host::Name("example.com".to_owned()), port: 1 });
        for text in ["example.com", "example.com:", "a:0", "a:65536", "a:+1", "[2001:db8::1]", ""] {
            assert_eq!(text.parse::<Authority>(), Err(AuthorityError::Port), "{text:?}");
        }
        for text in [":80", "2001:db8::1:80", "[192.0.2.1]:80", "[::1:80", "a b:80", "-a:80", "1.2.3:80"] {
            assert_eq!(text.parse::<Authority>(), Err(AuthorityError::Host), "{text:?}");
        }
    }

    #[test]
    fn a_request_is_parsed_as_written() {
        let target: Authority = "example.com:443".parse().unwrap();
        let headers = request(&target, Some("Bearer secret"));
        assert_eq!(headers.validate(Section::Request), Ok(()));
        let parsed = parse_request(&headers).unwrap();
        assert_eq!((&parsed.target, parsed.credentials.as_deref()), (&target, Some("Bearer secret")));
        assert!(!format!("{parsed:?}").contains("secret"));
        assert_eq!(parse_request(&request(&target, None)).unwrap().credentials, None);
    }

    #[test]
    fn other_requests_are_refused() {
        let mut get = Headers::new();
        get.push(":method", "GET");
        assert_eq!(parse_request(&get).unwrap_err().status, 405);
        let mut extended = request(&"a:1".parse().unwrap(), None);
        extended.push(":protocol", "connect-ip");
        assert_eq!(parse_request(&extended).unwrap_err().status, 501);
        let mut bad = Headers::new();
        bad.push(":method", "CONNECT");
        bad.push(":authority", "example.com");
        assert_eq!(parse_request(&bad).unwrap_err().status, 400);
    }

    #[test]
    fn the_response_contains_the_reason_of_the_failure() {
        for (failure, status, _) in ProxyError::ALL {
            let headers = failure.rejection("details; error=connection_refused").headers();
            assert_eq!(headers.status(), Some(status));
            assert_eq!(check_response(&headers), Err(failure));
        }
        let foreign = |status: u16, proxy: &'static str| {
            let mut headers = Headers::response(status);
            headers.push("proxy-status", proxy);
            check_response(&headers)
        };
        assert_eq!(
            foreign(502, "first; error=dns_error, \"second\"; error=dns_timeout"),
            Err(ProxyError::Dns)
        );
        assert_eq!(foreign(502, "a; error=\"no token\""), Err(ProxyError::Other));
        assert_eq!(foreign(504, "malformed;;"), Err(ProxyError::TimedOut));
        assert_eq!(check_response(&Headers::response(403)), Err(ProxyError::Prohibited));
        assert_eq!(check_response(&accept()), Ok(()));
    }
}
