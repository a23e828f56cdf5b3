//! The kind of a request, and the code that CONNECT-IP, CONNECT-UDP and CONNECT share.
//!
//! In: a valid request header section. Out: its [`RequestKind`] by `:method` and `:protocol`, or a
//! [`Rejection`] to answer with. Always holds: every request gets a kind or an answer.

use crate::{headers::Headers, structured::encode_string};
use std::borrow::Cow;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Extended CONNECT with `:protocol` connect-ip (RFC 9484).
    ConnectIp,
    /// Extended CONNECT with `:protocol` connect-udp (RFC 9298).
    ConnectUdp,
    /// CONNECT without `:protocol`: a TCP connection (RFC 9114 §4.4).
    ConnectTcp,
    /// Extended CONNECT with `:protocol` mpvpn (see [`crate::connect_mpvpn`]).
    ConnectMpvpn,
    /// Any other method.
    Other,
}

/// The response to a refused request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} (status {status})")]
pub struct Rejection {
    /// HTTP status code.
    pub status: u16,
    /// The expected and the received value, as a text for users; sent in `proxy-status`.
    pub reason: Cow<'static, str>,
    /// Proxy error type (RFC 9209 §2.3), for example `dns_error`.
    pub error: Option<&'static str>,
}

impl Rejection {
    /// A rejection with `status`.
    pub fn new(status: u16, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { status, reason: reason.into(), error: None }
    }

    /// 401: missing or invalid credentials.
    pub fn unauthorized(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(401, reason)
    }

    /// The header section of the response. The reason is in `proxy-status` (RFC 9209); 401 has
    /// `www-authenticate` (RFC 6750 §3) and 405 has `allow` (RFC 9110 §15.5.6).
    pub fn headers(&self) -> Headers {
        let mut headers = Headers::response(self.status);
        match self.status {
            401 => headers.push("www-authenticate", "Bearer"),
            405 => headers.push("allow", "CONNECT"),
            _ => {}
        }
        let error = self.error.map(|error| format!("; error={error}")).unwrap_or_default();
        headers.push("proxy-status", format!("proxy{error}; details={}", encode_string(&self.reason)));
        headers
    }
}

/// The kind of a request, by `:method` and `:protocol`.
///
/// # Errors
/// 501 for an unknown `:protocol` (RFC 9220 §3).
pub fn classify(headers: &Headers) -> Result<RequestKind, Rejection> {
    if headers.method() != Some("CONNECT") {
        return Ok(RequestKind::Other);
    }
    match headers.value(":protocol") {
        None => Ok(RequestKind::ConnectTcp),
        Some(b"connect-ip") => Ok(RequestKind::ConnectIp),
        Some(b"connect-udp") => Ok(RequestKind::ConnectUdp),
        Some(b"mpvpn") => Ok(RequestKind::ConnectMpvpn),
        Some(other) => {
            let other = other.escape_ascii();
            Err(Rejection::new(501, format!(":protocol {other} is not supported")))
        }
    }
}

/// The common header fields of every extended CONNECT (RFC 9220 §3) whose stream carries capsules.
pub(crate) fn extended_connect(protocol: &'static str, scheme: &str, authority: &str, path: &str) -> Headers {
    let mut headers = Headers::new();
    headers.push(":method", "CONNECT");
    headers.push(":protocol", protocol);
    headers.push(":scheme", scheme.to_owned());
    headers.push(":authority", authority.to_owned());
    headers.push(":path", path.to_owned());
    headers.push("capsule-protocol", "?1");
    headers
}

/// The first field that a message with capsules must not have: "The Capsule Protocol MUST NOT be used with
/// messages that contain Content-Length, Content-Type, or Transfer-Encoding header fields ... MUST treat
/// the HTTP message as malformed" (RFC 9297 §3.2).
pub fn field_forbidden_with_capsules(headers: &Headers) -> Option<&'static str> {
    ["content-length", "content-type", "transfer-encoding"]
        .into_iter()
        .find(|name| headers.value(name).is_some())
}

/// Refuses a request with a field that is forbidden with capsules.
pub(crate) fn check_no_content_fields(headers: &Headers) -> Result<(), Rejection> {
    match field_forbidden_with_capsules(headers) {
        Some(name) => Err(Rejection::new(400, format!("{name} must not be in a request with capsules"))),
        None => Ok(()),
    }
}

/// The response that grants an [`extended_connect`] request.
pub(crate) fn accept_with_capsules() -> Headers {
    let mut headers = Headers::response(200);
    headers.push("capsule-protocol", "?1");
    headers
}

/// The value of a field if it appears exactly once and is text.
pub(crate) fn single_text(headers: &Headers, name: &str) -> Option<String> {
    std::str::from_utf8(headers.single(name)?).ok().map(str::to_owned)
}

/// Whether `text` is a DNS name of letters, digits, hyphens and underscores, with at most 253 bytes and 63
/// bytes per label, whose last label is not a number (which would be a mistyped IPv4 address).
pub(crate) fn is_host_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    let last_is_number =
        name.rsplit('.').next().is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()));
    name.len() <= 253 && !last_is_number && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect(protocol: Option<&'static str>) -> Headers {
        let mut headers = Headers::new();
        headers.push(":method", "CONNECT");
        if let Some(protocol) = protocol {
            headers.push(":protocol", protocol);
        }
        headers
    }

    #[test]
    fn requests_are_classified_by_method_and_protocol() {
        assert_eq!(classify(&connect(Some("connect-ip"))), Ok(RequestKind::ConnectIp));
        assert_eq!(classify(&connect(Some("connect-udp"))), Ok(RequestKind::ConnectUdp));
        assert_eq!(classify(&connect(Some("mpvpn"))), Ok(RequestKind::ConnectMpvpn));
        assert_eq!(classify(&connect(None)), Ok(RequestKind::ConnectTcp));
        let mut get = Headers::new();
        get.push(":method", "GET");
        assert_eq!(classify(&get), Ok(RequestKind::Other));
        assert_eq!(classify(&connect(Some("websocket"))).unwrap_err().status, 501);
    }

    #[test]
    fn rejections_carry_what_their_status_requires() {
        let headers = Rejection::unauthorized("wrong \"token\"\n").headers();
        assert_eq!(headers.text("www-authenticate"), Some("Bearer"));
        assert_eq!(headers.text("proxy-status"), Some(r#"proxy; details="wrong \"token\"""#));
        assert_eq!(headers.validate(crate::headers::Section::Response), Ok(()));
    }
}
