//! CONNECT-IP requests and responses (RFC 9484 §4).
//!
//! In: on the client, what to ask for, and later the response; on the server, a valid request header
//! section. Out: header sections, the request's scope, or why it is refused. Always holds: nothing is
//! granted here; names are not resolved and credentials not compared.

use crate::{
    credentials::session_header,
    headers::Headers,
    request::{self, CapsuleProtocol, Rejection, RequestKind},
    template::{Template, TemplateError},
};
use ipnet::IpNet;
use std::{fmt, net::IpAddr};

/// Path of the template that servers use unless configured otherwise (RFC 9484 §3).
pub const DEFAULT_TEMPLATE: &str = "/.well-known/masque/ip/{target}/{ipproto}/";

/// Checks `text`, an absolute URI template or the path of one, for CONNECT-IP.
///
/// # Errors
/// If RFC 9484 §3 forbids it.
pub fn template(text: &str) -> Result<Template, TemplateError> {
    Template::parse(text)
}

/// What a tunnel may reach (RFC 9484 §4.6).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Anything: `*`.
    #[default]
    Any,
    /// An address or prefix.
    Net(IpNet),
    /// A name; to be resolved before the request is answered.
    Host(String),
}

impl Target {
    /// Reads the `target` variable, after percent-decoding; `None` if it is none of the three.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Any);
        }
        if let Ok(addr) = text.parse::<IpAddr>() {
            return Some(Self::Net(addr.into()));
        }
        if text.contains('/') {
            let net: IpNet = text.parse().ok()?;
            // "the lower bits of the IP address that are not covered by the prefix length MUST all be set
            // to 0" (RFC 9484 §4.6).
            return (net.network() == net.addr()).then_some(Self::Net(net));
        }
        request::is_host_name(text).then(|| Self::Host(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Net(net) if net.prefix_len() == net.max_prefix_len() => net.addr().fmt(f),
            Self::Net(net) => net.fmt(f),
            Self::Host(name) => f.write_str(name),
        }
    }
}

/// A request to send.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectIpRequest {
    /// `https`.
    pub scheme: String,
    /// Host, and port unless it is the scheme's own.
    pub authority: String,
    /// Path and query; see [`path`].
    pub path: String,
    /// Value of the `authorization` field, for example `Bearer …`.
    pub authorization: Option<String>,
    /// Secret of the session to take up again; see [`session_header`].
    pub session: Option<Vec<u8>>,
    /// More fields, lowercase names first.
    pub extra: Vec<(String, String)>,
}

impl fmt::Debug for ConnectIpRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headers().fmt(f)
    }
}

impl ConnectIpRequest {
    /// A request for `path` at `authority`, over https and without credentials.
    #[must_use]
    pub fn new(authority: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            scheme: "https".to_owned(),
            authority: authority.into(),
            path: path.into(),
            authorization: None,
            session: None,
            extra: Vec::new(),
        }
    }

    /// The header section (RFC 9484 §4.5). A session secret of illegal length is left out.
    #[must_use]
    pub fn headers(&self) -> Headers {
        let mut headers = request::extended("connect-ip", &self.scheme, &self.authority, &self.path);
        if let Some(authorization) = &self.authorization {
            headers.push("authorization", authorization.clone());
        }
        if let Some(session) = self.session.as_deref().and_then(session_header::encode) {
            headers.push(session_header::NAME, session);
        }
        for (name, value) in &self.extra {
            headers.push(name.clone(), value.clone());
        }
        headers
    }
}

/// The path that `template` gives for `target` and `ipproto` (`None` is all protocols).
#[must_use]
pub fn path(template: &Template, target: &Target, ipproto: Option<u8>) -> String {
    let ipproto = ipproto.map_or_else(|| "*".to_owned(), |ipproto| ipproto.to_string());
    template.expand(&[("target", &target.to_string()), ("ipproto", &ipproto)])
}

/// A received request that is well formed; whether it is granted is for the server to say.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectIp {
    /// What the client wants to reach.
    pub target: Target,
    /// The one IP protocol it wants to use; `None` is all. ICMP is always allowed (RFC 9484 §4.6).
    pub ipproto: Option<u8>,
    /// Host and port that the client believes it talks to.
    pub authority: String,
    /// Path as received.
    pub path: String,
    /// Value of the `authorization` field if there is exactly one.
    pub authorization: Option<String>,
    /// Secret of the session to take up again, if the field is well formed.
    pub session: Option<Vec<u8>>,
    /// Whether the client announced capsules. Some leave the field out; their streams carry capsules
    /// nevertheless, because connect-ip always does (RFC 9484 §4.7).
    pub capsule_protocol: CapsuleProtocol,
}

impl fmt::Debug for ConnectIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectIp")
            .field("target", &self.target)
            .field("ipproto", &self.ipproto)
            .field("authority", &self.authority)
            .field("path", &self.path)
            .field("authorization", &self.authorization.as_ref().map(|_| "(hidden)"))
            .field("session", &self.session.as_ref().map(|_| "(hidden)"))
            .field("capsule_protocol", &self.capsule_protocol)
            .finish()
    }
}

/// Reads a request whose header section is valid ([`Headers::validate`]), for a server with `template`.
///
/// # Errors
/// 501 for another kind of CONNECT, 404 for another path, 405 for another method at that path, 400 for
/// a bad target or protocol, or for fields that cannot stand beside capsules.
pub fn parse_request(headers: &Headers, template: &Template) -> Result<ConnectIp, Rejection> {
    let kind = request::classify(headers)?;
    if matches!(kind, RequestKind::ConnectUdp | RequestKind::ConnectTcp | RequestKind::ConnectMpvpn) {
        return Err(Rejection::new(501, "only CONNECT with :protocol connect-ip is supported"));
    }
    let path = headers.path().unwrap_or_default();
    let variables = template
        .matches(path)
        .ok_or_else(|| Rejection::new(404, "no such path; expected one of the IP proxying template"))?;
    if kind != RequestKind::ConnectIp {
        return Err(Rejection::new(405, "expected CONNECT with :protocol connect-ip"));
    }
    request::may_have_capsules(headers)?;
    let variable = |name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| &value[..]);
    Ok(ConnectIp {
        target: parse_target(variable("target"))?,
        ipproto: parse_ipproto(variable("ipproto"))?,
        authority: headers.authority().unwrap_or_default().to_owned(),
        path: path.to_owned(),
        authorization: request::single_text(headers, "authorization"),
        session: headers.single(session_header::NAME).and_then(session_header::parse),
        capsule_protocol: request::capsule_protocol(headers),
    })
}

/// The response that grants a request; `session` is the secret to come back with.
#[must_use]
pub fn accept(session: Option<&[u8]>) -> Headers {
    let mut headers = request::granted();
    if let Some(session) = session.and_then(session_header::encode) {
        headers.push(session_header::NAME, session);
    }
    headers
}

/// What a server's 2xx response says beyond yes.
#[derive(Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Secret of the session, if the server keeps sessions.
    pub session: Option<Vec<u8>>,
    /// Whether the server announced capsules; it speaks them either way.
    pub capsule_protocol: CapsuleProtocol,
}

impl fmt::Debug for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accepted")
            .field("session", &self.session.as_ref().map(|_| "(hidden)"))
            .field("capsule_protocol", &self.capsule_protocol)
            .finish()
    }
}

/// Why there is no tunnel. Texts from the server are cut and free of controls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// 401 or 407.
    #[error("the server refuses the token or wants one (status {status}){detail}")]
    Unauthorized {
        /// Status code.
        status: u16,
        /// What the server adds.
        detail: Detail,
    },
    /// 403.
    #[error("the server forbids this request (status 403){detail}")]
    Forbidden {
        /// What the server adds.
        detail: Detail,
    },
    /// 404, 405 or 501.
    #[error("the server offers no CONNECT-IP at this path (status {status}){detail}")]
    NotOffered {
        /// Status code.
        status: u16,
        /// What the server adds.
        detail: Detail,
    },
    /// 429 or 503: worth another try later.
    #[error("the server is busy (status {status}){detail}")]
    Busy {
        /// Status code.
        status: u16,
        /// Seconds to wait, if the server says.
        retry_after_s: Option<u32>,
        /// What the server adds.
        detail: Detail,
    },
    /// Any other status that is not 2xx.
    #[error("the server refuses the tunnel (status {status}){detail}")]
    Refused {
        /// Status code.
        status: u16,
        /// What the server adds.
        detail: Detail,
    },
    /// A 2xx response that cannot carry capsules (RFC 9297 §3.2).
    #[error("malformed response: {reason}")]
    Malformed {
        /// What is wrong.
        reason: String,
    },
}

/// The `proxy-status` of a refusal, fit to be printed after a sentence; may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detail(String);

impl Detail {
    const MAX: usize = 300;

    fn of(headers: &Headers) -> Self {
        let value = headers.value("proxy-status").unwrap_or_default();
        let printable = value.iter().filter(|byte| (b' '..=b'~').contains(*byte)).take(Self::MAX);
        Self(printable.map(|byte| char::from(*byte)).collect())
    }

    /// The text alone.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

/// Reads the final response to a CONNECT-IP request.
///
/// # Errors
/// Everything but a 2xx that can carry capsules.
pub fn check_response(headers: &Headers) -> Result<Accepted, ResponseError> {
    let status = headers.status().unwrap_or_default();
    let detail = Detail::of(headers);
    match status {
        // "HTTP status codes 204 (No Content), 205 (Reset Content), and 206 (Partial Content) MUST NOT be
        // sent on responses that use the Capsule Protocol" (RFC 9297 §3.2).
        204..=206 => Err(ResponseError::Malformed { reason: format!("status {status} with capsules") }),
        200..=299 => match request::forbidden_with_capsules(headers) {
            Some(name) => Err(ResponseError::Malformed { reason: format!("{name} with capsules") }),
            None => Ok(Accepted {
                session: headers.single(session_header::NAME).and_then(session_header::parse),
                capsule_protocol: request::capsule_protocol(headers),
            }),
        },
        401 | 407 => Err(ResponseError::Unauthorized { status, detail }),
        403 => Err(ResponseError::Forbidden { detail }),
        404 | 405 | 501 => Err(ResponseError::NotOffered { status, detail }),
        429 | 503 => {
            let retry_after_s = headers.text("retry-after").and_then(|text| text.parse().ok());
            Err(ResponseError::Busy { status, retry_after_s, detail })
        }
        _ => Err(ResponseError::Refused { status, detail }),
    }
}

/// A template without the variable asks for everything.
fn parse_target(text: Option<&str>) -> Result<Target, Rejection> {
    let Some(text) = text else { return Ok(Target::Any) };
    Target::parse(text).ok_or_else(|| {
        Rejection::new(
            400,
            format!("target {text:?} is not *, a name, an address or a prefix without host bits"),
        )
    })
}

fn parse_ipproto(text: Option<&str>) -> Result<Option<u8>, Rejection> {
    let Some(text) = text.filter(|text| *text != "*") else { return Ok(None) };
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(ipproto) if is_number => Ok(Some(ipproto)),
        _ => Err(Rejection::new(400, format!("ipproto {text:?} is not * or a number up to 255"))),
    }
}

#[cfg(test)]
mod tests;
