//! CONNECT-IP requests and responses (RFC 9484 §4).
//!
//! In: on the client, a path and credentials, and later the response; on the server, a valid request header
//! section. Out: header sections, credentials, or the reason of a refusal. Always holds: nothing is
//! authorized here; names are not resolved and credentials not verified.

use crate::{
    extensions,
    headers::Headers,
    request::{self, Rejection, RequestKind},
    structured,
    template::Template,
};
use derive_more::Display;
use ipnet::IpNet;
use std::net::IpAddr;

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

/// Checks a request whose header section is valid ([`Headers::validate`]). Returns the value of its field
/// `authorization`, if there is exactly one. What it asks for has to be well formed, and does not limit the
/// tunnel.
///
/// # Errors
/// 501 for another kind of CONNECT, 404 for another path, 405 for another method at that path, 400 for an
/// invalid target or protocol, or for header fields that are forbidden with capsules.
pub fn parse_request(headers: &Headers) -> Result<Option<String>, Rejection> {
    let kind = request::classify(headers)?;
    if matches!(kind, RequestKind::ConnectUdp | RequestKind::ConnectTcp | RequestKind::ConnectMpvpn) {
        return Err(Rejection::new(501, "only CONNECT with :protocol connect-ip is supported"));
    }
    let path = headers.path().unwrap_or_default();
    let [target, ipproto] = Template::CONNECT_IP
        .matches(path)
        .ok_or_else(|| Rejection::new(404, "no such path; expected one of the IP proxying template"))?;
    if kind != RequestKind::ConnectIp {
        return Err(Rejection::new(405, "expected CONNECT with :protocol connect-ip"));
    }
    request::check_no_content_fields(headers)?;
    if !is_target(&target) {
        let reason = format!("target {target:?} is not *, a name, an address or a prefix without host bits");
        return Err(Rejection::new(400, reason));
    }
    if !is_ipproto(&ipproto) {
        return Err(Rejection::new(400, format!("ipproto {ipproto:?} is not * or a number up to 255")));
    }
    Ok(request::single_text(headers, "authorization"))
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

/// The reason of a refusal, sanitized for messages: `details` of the field `proxy-status` (RFC 9209 §2.1.4),
/// else the whole field; may be empty.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq)]
#[display("{}{_0}", if _0.is_empty() { "" } else { ": " })]
pub struct RefusalDetail(String);

impl RefusalDetail {
    /// Maximum length in bytes: a message on one line; a longer text from the server is truncated.
    const MAX: usize = 300;

    /// The details in a response.
    pub fn of(headers: &Headers) -> Self {
        Self::of_field(headers.value("proxy-status").unwrap_or_default())
    }

    /// The details in a `proxy-status` field.
    pub fn of_field(value: &[u8]) -> Self {
        let details = structured::last_string(value, "details");
        let text = details.as_ref().map_or(value, |details| details.as_bytes());
        let printable = text.iter().filter(|byte| (b' '..=b'~').contains(*byte)).take(Self::MAX);
        Self(printable.map(|byte| char::from(*byte)).collect())
    }

    /// The reason alone.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Checks the final response to a CONNECT-IP request. A server that does not announce the Capsule Protocol
/// (RFC 9297 §3.4) uses capsules, too.
///
/// # Errors
/// If the response is not a 2xx that allows capsules.
pub fn check_response(headers: &Headers) -> Result<(), ResponseError> {
    let status = headers.status().unwrap_or_default();
    let detail = RefusalDetail::of(headers);
    match status {
        // "HTTP status codes 204 (No Content), 205 (Reset Content), and 206 (Partial Content) MUST NOT be
        // sent on responses that use the Capsule Protocol" (RFC 9297 §3.2).
        204..=206 => Err(ResponseError::Malformed { reason: format!("status {status} with capsules") }),
        200..=299 => match request::field_forbidden_with_capsules(headers) {
            Some(name) => Err(ResponseError::Malformed { reason: format!("{name} with capsules") }),
            None => Ok(()),
        },
        401 | 407 => Err(ResponseError::Unauthorized { status, detail }),
        403 => Err(ResponseError::Forbidden { detail }),
        404 | 405 | 501 => Err(ResponseError::NotOffered { status, detail }),
        429 | 503 => Err(ResponseError::Busy { status, detail }),
        _ => Err(ResponseError::Refused { status, detail }),
    }
}

/// Whether `text` is `*`, an address, a prefix or a name (RFC 9484 §4.6).
fn is_target(text: &str) -> bool {
    // "the lower bits of the IP address that are not covered by the prefix length MUST all be set to 0".
    let is_prefix = |net: IpNet| net.network() == net.addr();
    match text.contains('/') {
        true => text.parse().is_ok_and(is_prefix),
        false => text == "*" || text.parse::<IpAddr>().is_ok() || request::is_host_name(text),
    }
}

/// Whether `text` is `*` or a number up to 255 (RFC 9484 §4.6).
fn is_ipproto(text: &str) -> bool {
    text == "*" || text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u8>().is_ok()
}

#[cfg(test)]
mod tests;
