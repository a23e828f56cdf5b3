//! CONNECT: a TCP connection whose bytes are those of a stream (RFC 9110 §9.3.6, RFC 9114 §4.4).
//!
//! In: on the client, where to connect to, and later the response; on the server, a valid request header section. Out:
//! header sections, the target, or why there is no connection, in words that the other side understands
//! ([`ProxyError`]). Always holds: nothing is granted here; names are not resolved and credentials not compared.

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
    /// A name, in lowercase; for the server to resolve.
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

/// Why a text is no [`Authority`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// "A server MUST reject a CONNECT request that targets an empty or invalid port number" (RFC 9110 §9.3.6).
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
#[must_use]
pub fn request(target: &Authority, credentials: Option<&str>) -> Headers {
    let mut headers = Headers::new();
    headers.push(":method", "CONNECT");
    headers.push(":authority", target.to_string());
    if let Some(credentials) = credentials {
        headers.push("proxy-authorization", credentials.to_owned());
    }
    headers
}

/// The credentials of a request: the value of `proxy-authorization` (RFC 9110 §11.7.2), or else of `authorization`, if
/// there is exactly one.
#[must_use]
pub fn credentials(headers: &Headers) -> Option<String> {
    ["proxy-authorization", "authorization"].into_iter().find_map(|name| request::single_text(headers, name))
}

/// A received request that is well formed; whether it is granted is for the server to say.
#[derive(Clone, PartialEq, Eq)]
pub struct Connect {
    /// Where the client wants to.
    pub target: Authority,
    /// See [`credentials`].
    pub credentials: Option<String>,
}

impl fmt::Debug for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connect")
            .field("target", &self.target)
            .field("credentials", &self.credentials.as_ref().map(|_| "(hidden)"))
            .finish()
    }
}

/// Reads a request whose header section is valid ([`Headers::validate`]).
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

/// Why there is no connection to a target: what the server found and the client tells the app.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyError {
    /// The name has no address.
    Dns,
    /// A rule forbids it.
    Prohibited,
    /// Nobody listens there.
    Refused,
    /// No route leads there, or the host is down.
    Unroutable,
    /// There was no answer.
    TimedOut,
    /// The server cannot open more connections.
    Busy,
    /// Something else.
    Other,
}

impl ProxyError {
    /// Status code and proxy error type (RFC 9209 §2.3) of each.
    const ALL: [(Self, u16, &'static str); 7] = [
        (Self::Dns, 502, "dns_error"),
        (Self::Prohibited, 403, "destination_ip_prohibited"),
        (Self::Refused, 502, "connection_refused"),
        (Self::Unroutable, 502, "destination_ip_unroutable"),
        (Self::TimedOut, 504, "connection_timeout"),
        (Self::Busy, 503, "connection_limit_reached"),
        (Self::Other, 502, "proxy_internal_error"),
    ];

    /// The answer to the client; `reason` is for people.
    #[must_use]
    pub fn rejection(self, reason: impl Into<Cow<'static, str>>) -> Rejection {
        let known = Self::ALL.iter().find(|(failure, ..)| *failure == self);
        let (status, error) = known.map_or((502, None), |(_, status, error)| (*status, Some(*error)));
        Rejection { error, ..Rejection::new(status, reason) }
    }

    /// What a response that is no 2xx means: by its proxy error type if it has one that is known here, else by its
    /// status.
    #[must_use]
    pub fn from_response(headers: &Headers) -> Self {
        let said =
            headers.values("proxy-status").filter_map(|value| structured::last_token(value, "error")).last();
        let said = said.as_deref();
        let by_error =
            Self::ALL.iter().find(|(.., error)| Some(*error) == said).map(|(failure, ..)| *failure);
        by_error.unwrap_or(match (said, headers.status()) {
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

/// The response that grants a request: its stream carries the connection's bytes from here on.
#[must_use]
pub fn accept() -> Headers {
    Headers::response(200)
}

/// Reads the final response to a request.
///
/// # Errors
/// Everything but a 2xx (RFC 9110 §9.3.6).
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
    fn a_request_comes_out_as_it_went_in() {
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
    fn the_client_learns_why_there_is_no_connection() {
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
