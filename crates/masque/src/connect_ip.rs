//! CONNECT-IP requests and responses (RFC 9484 §4).
//!
//! In: on the client, the scope to request, and later the response; on the server, a valid request header
//! section. Out: header sections, the scope of the request, or the reason of a refusal. Always holds: nothing
//! is authorized here; names are not resolved and credentials not verified.

use crate::{
    extensions,
    headers::Headers,
    request::{self, CapsuleProtocol, Rejection, RequestKind},
    template::{Template, TemplateError},
};
use derive_more::Display;
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

/// The targets that a tunnel may reach (RFC 9484 §4.6).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Anything: `*`.
    #[default]
    Any,
    /// An address or prefix.
    Net(IpNet),
    /// A name, which the server resolves before it answers the request.
    Host(String),
}

impl Target {
    /// Parses the percent-decoded `target` variable; `None` if it is none of the three.
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
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
#[debug("{:?}", self.headers())]
pub struct ConnectIpRequest {
    /// `https`.
    pub scheme: String,
    /// Host, and port unless it is the scheme's own.
    pub authority: String,
    /// Path and query, expanded from the template.
    pub path: String,
    /// Value of the `authorization` field, for example `Bearer …`.
    pub authorization: Option<String>,
    /// Value of the field `mpvpn`; see [`extensions`].
    pub extensions: Option<String>,
}

impl ConnectIpRequest {
    /// A request for `path` at `authority`, over https and without credentials.
    pub fn new(authority: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            scheme: "https".to_owned(),
            authority: authority.into(),
            path: path.into(),
            authorization: None,
            extensions: None,
        }
    }

    /// The header section (RFC 9484 §4.5).
    pub fn headers(&self) -> Headers {
        let mut headers = request::extended_connect("connect-ip", &self.scheme, &self.authority, &self.path);
        if let Some(authorization) = &self.authorization {
            headers.push("authorization", authorization.clone());
        }
        if let Some(extensions) = &self.extensions {
            headers.push(extensions::FIELD, extensions.clone());
        }
        headers
    }
}

/// A well-formed request; the server decides whether to grant it.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
pub struct ConnectIp {
    /// The destinations that the client wants to reach.
    pub target: Target,
    /// The only IP protocol that the client wants to use; `None` means all. ICMP is always allowed (RFC 9484
    /// §4.6).
    pub ipproto: Option<u8>,
    /// Host and port of the server, as the client addressed it.
    pub authority: String,
    /// Path as received.
    pub path: String,
    /// Value of the `authorization` field if there is exactly one.
    #[debug("{:?}", authorization.as_ref().map(|_| "(hidden)"))]
    pub authorization: Option<String>,
    /// Whether the client announced the Capsule Protocol. Some clients omit the field; their streams carry
    /// capsules anyway, because connect-ip always does (RFC 9484 §4.7).
    pub capsule_protocol: CapsuleProtocol,
}

/// Parses a request whose header section is valid ([`Headers::validate`]), for a server with `template`.
///
/// # Errors
/// 501 for another kind of CONNECT, 404 for another path, 405 for another method at that path, 400 for an
/// invalid target or protocol, or for header fields that are forbidden with capsules.
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
    request::check_no_content_fields(headers)?;
    let variable = |name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| &value[..]);
    Ok(ConnectIp {
        target: parse_target(variable("target"))?,
        ipproto: parse_ipproto(variable("ipproto"))?,
        authority: headers.authority().unwrap_or_default().to_owned(),
        path: path.to_owned(),
        authorization: request::single_text(headers, "authorization"),
        capsule_protocol: request::capsule_protocol(headers),
    })
}

/// The response that grants a request.
pub fn accept() -> Headers {
    request::accept_with_capsules()
}

/// Why the server refused the tunnel. Texts from the server are truncated and contain only printable
/// characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// 401 or 407.
    #[error("the server refuses the token or wants one (status {status}){detail}")]
    Unauthorized {
        /// Status code.
        status: u16,
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// 403.
    #[error("the server forbids this request (status 403){detail}")]
    Forbidden {
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// 404, 405 or 501.
    #[error("the server offers no CONNECT-IP at this path (status {status}){detail}")]
    NotOffered {
        /// Status code.
        status: u16,
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// 429 or 503: the client may try again later.
    #[error("the server is busy (status {status}){detail}")]
    Busy {
        /// Status code.
        status: u16,
        /// Seconds to wait, from the `retry-after` field.
        retry_after_s: Option<u32>,
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// Any other status that is not 2xx.
    #[error("the server refuses the tunnel (status {status}){detail}")]
    Refused {
        /// Status code.
        status: u16,
        /// Details from the server.
        detail: RefusalDetail,
    },
    /// A 2xx response that cannot carry capsules (RFC 9297 §3.2).
    #[error("malformed response: {reason}")]
    Malformed {
        /// The reason why the value is malformed.
        reason: String,
    },
}

/// The `proxy-status` field of a refusal, sanitized for messages; may be empty.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq)]
#[display("{}{_0}", if _0.is_empty() { "" } else { ": " })]
pub struct RefusalDetail(String);

impl RefusalDetail {
    /// Maximum length in bytes: a message on one line; a longer text from the server is truncated.
    const MAX: usize = 300;

    /// The details in a response.
    pub fn of(headers: &Headers) -> Self {
        let value = headers.value("proxy-status").unwrap_or_default();
        let printable = value.iter().filter(|byte| (b' '..=b'~').contains(*byte)).take(Self::MAX);
        Self(printable.map(|byte| char::from(*byte)).collect())
    }
}

/// Parses the final response to a CONNECT-IP request. Returns whether the server announced the Capsule
/// Protocol; it uses capsules either way.
///
/// # Errors
/// If the response is not a 2xx that allows capsules.
pub fn check_response(headers: &Headers) -> Result<CapsuleProtocol, ResponseError> {
    let status = headers.status().unwrap_or_default();
    let detail = RefusalDetail::of(headers);
    match status {
        // "HTTP status codes 204 (No Content), 205 (Reset Content), and 206 (Partial Content) MUST NOT be
        // sent on responses that use the Capsule Protocol" (RFC 9297 §3.2).
        204..=206 => Err(ResponseError::Malformed { reason: format!("status {status} with capsules") }),
        200..=299 => match request::field_forbidden_with_capsules(headers) {
            Some(name) => Err(ResponseError::Malformed { reason: format!("{name} with capsules") }),
            None => Ok(request::capsule_protocol(headers)),
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

/// Parses the `target` variable. A template without it requests all destinations.
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
