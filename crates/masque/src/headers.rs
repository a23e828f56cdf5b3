//! Header sections of HTTP/3 messages: an ordered list of fields, and the rules they obey.
//!
//! In: fields from QPACK, or from code that builds a message. Out: the same fields, with access by name,
//! after [`Headers::validate`] has checked the rules of RFC 9114 §4.2, §4.3 and §4.4. Always holds: values
//! may be any bytes; [`Headers::text`] returns only valid UTF-8.

use bytes::Bytes;
use std::fmt;

/// One field line.
#[derive(Clone, PartialEq, Eq)]
pub struct Field {
    /// Lowercase name; pseudo-headers start with a colon.
    pub name: Bytes,
    /// Value: any bytes, after validation without control characters.
    pub value: Bytes,
}

impl Field {
    /// Whether the value must stay out of logs and of any peer's compression state.
    pub fn is_secret(&self) -> bool {
        const SECRETS: [&[u8]; 5] = [
            b"authorization",
            b"proxy-authorization",
            b"cookie",
            b"set-cookie",
            crate::extensions::FIELD.as_bytes(),
        ];
        SECRETS.contains(&&self.name[..])
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.escape_ascii();
        if self.is_secret() {
            return write!(f, "{name}: (hidden)");
        }
        write!(f, "{name}: {}", self.value.escape_ascii())
    }
}

/// The fields of one header or trailer section, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    fields: Vec<Field>,
}

/// The kind of a section, for which the rules differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Header section of a request.
    Request,
    /// Header section of a response.
    Response,
    /// Trailer section of a request or response.
    Trailers,
}

/// Why a header section is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadersError {
    /// "A request or response containing uppercase characters in field names MUST be treated as
    /// malformed" (RFC 9114 §4.2); other characters are limited to tokens (RFC 9110 §5.6.2).
    #[error("field name {name:?} is not a lowercase token")]
    Name {
        /// The name, escaped.
        name: String,
    },
    /// NUL, CR, LF and other controls, or space around the value (RFC 9110 §5.5).
    #[error("value of field {name:?} holds characters that fields must not hold")]
    Value {
        /// Name of the field, escaped.
        name: String,
    },
    /// "All pseudo-header fields MUST appear in the header section before regular header fields"
    /// (RFC 9114 §4.3).
    #[error("pseudo-header {name} after a regular field")]
    PseudoAfterRegular {
        /// The pseudo-header.
        name: String,
    },
    /// "Endpoints MUST treat a request or response that contains undefined or invalid pseudo-header
    /// fields as malformed" (RFC 9114 §4.3).
    #[error("pseudo-header {name} does not belong in a {section:?} section")]
    UnknownPseudo {
        /// The pseudo-header.
        name: String,
        /// Where it was.
        section: Section,
    },
    /// Each pseudo-header appears once (RFC 9114 §4.3.1).
    #[error("pseudo-header {name} appears twice")]
    RepeatedPseudo {
        /// The pseudo-header.
        name: String,
    },
    /// A pseudo-header that this kind of message requires is missing or empty.
    #[error("pseudo-header {name} is missing or empty")]
    MissingPseudo {
        /// The pseudo-header.
        name: &'static str,
    },
    /// A pseudo-header that this kind of message must not have.
    #[error("pseudo-header {name} is not allowed in this kind of message")]
    ForbiddenPseudo {
        /// The pseudo-header.
        name: &'static str,
    },
    /// "An endpoint MUST NOT generate an HTTP/3 field section containing connection-specific fields"
    /// (RFC 9114 §4.2).
    #[error("connection-specific field {name}")]
    ConnectionSpecific {
        /// The field.
        name: String,
    },
    /// `host` and `:authority` disagree (RFC 9114 §4.3.1).
    #[error("host field and :authority differ")]
    HostMismatch,
    /// `:authority` with user information, which is deprecated (RFC 9114 §4.3.1).
    #[error(":authority holds user information")]
    UserInfo,
    /// `:path` that neither starts with a slash nor is `*`.
    #[error(":path does not start with a slash")]
    Path,
    /// `:method` is not a token.
    #[error(":method is not a token")]
    Method,
    /// `:status` that is not three digits from 100 to 599.
    #[error(":status is not a number from 100 to 599")]
    Status,
}

impl Headers {
    /// No fields yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A response with `:status` and nothing else.
    pub fn response(status: u16) -> Self {
        let mut headers = Self::new();
        headers.push(":status", status.to_string());
        headers
    }

    /// Appends a field.
    pub fn push(&mut self, name: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.fields.push(Field { name: name.into(), value: value.into() });
    }

    /// All fields in order.
    pub fn iter(&self) -> impl Iterator<Item = &Field> {
        self.fields.iter()
    }

    /// The first value of field `name` (lowercase; pseudo-headers with their colon).
    pub fn value(&self, name: &str) -> Option<&[u8]> {
        self.values(name).next()
    }

    /// All values of field `name`, in order.
    pub fn values<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |field| field.name == name.as_bytes()).map(|field| &field.value[..])
    }

    /// The first value of field `name` if it is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.value(name)?).ok()
    }

    /// The value of field `name` if it appears exactly once. Fields that hold one structured item or
    /// one credential mean nothing when repeated.
    pub fn single(&self, name: &str) -> Option<&[u8]> {
        let mut values = self.values(name);
        let first = values.next()?;
        values.next().is_none().then_some(first)
    }

    /// `:method`.
    pub fn method(&self) -> Option<&str> {
        self.text(":method")
    }

    /// `:authority`, or `host` where a request has only that.
    pub fn authority(&self) -> Option<&str> {
        self.text(":authority").or_else(|| self.text("host"))
    }

    /// `:path`.
    pub fn path(&self) -> Option<&str> {
        self.text(":path")
    }

    /// `:status` of a response, if it is three digits.
    pub fn status(&self) -> Option<u16> {
        let text = self.text(":status")?;
        if text.len() != 3 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        text.parse().ok()
    }

    /// Size as RFC 9114 §4.2.2 counts it: name, value and 32 bytes a field.
    pub fn section_size(&self) -> usize {
        self.fields.iter().map(|field| field.name.len() + field.value.len() + 32).sum()
    }

    /// Checks the rules of RFC 9114 §4.2 to §4.4 (and RFC 9220 §3) for `section`.
    ///
    /// # Errors
    /// The first violated rule; the message is malformed.
    pub fn validate(&self, section: Section) -> Result<(), HeadersError> {
        self.validate_fields(section)?;
        match section {
            Section::Request => self.validate_request(),
            Section::Response => {
                self.status().filter(|status| (100..600).contains(status)).ok_or(HeadersError::Status)?;
                Ok(())
            }
            Section::Trailers => Ok(()),
        }
    }

    fn validate_fields(&self, section: Section) -> Result<(), HeadersError> {
        let mut seen_regular = false;
        for (at, field) in self.fields.iter().enumerate() {
            let is_pseudo = field.name.first() == Some(&b':');
            if is_pseudo {
                check_pseudo(&field.name, section, seen_regular)?;
                if self.fields[..at].iter().any(|earlier| earlier.name == field.name) {
                    return Err(HeadersError::RepeatedPseudo { name: escape(&field.name) });
                }
            } else {
                check_regular(field)?;
            }
            if !field.value.iter().all(|byte| is_value_byte(*byte)) || is_padded(&field.value) {
                return Err(HeadersError::Value { name: escape(&field.name) });
            }
            seen_regular |= !is_pseudo;
        }
        Ok(())
    }

    fn validate_request(&self) -> Result<(), HeadersError> {
        let method = self.value(":method").ok_or(HeadersError::MissingPseudo { name: ":method" })?;
        if !is_token(method) {
            return Err(HeadersError::Method);
        }
        self.validate_authority()?;
        match (method == b"CONNECT", self.value(":protocol").is_some()) {
            (true, false) => self.validate_plain_connect(),
            // ":protocol" makes it an extended CONNECT, which has :scheme and :path (RFC 8441 §4).
            (true, true) => self.validate_target(AuthorityRule::PseudoHeader),
            (false, true) => Err(HeadersError::ForbiddenPseudo { name: ":protocol" }),
            (false, false) => self.validate_target(AuthorityRule::Either),
        }
    }

    /// A plain CONNECT has `:authority`, and neither `:scheme` nor `:path` (RFC 9114 §4.4).
    fn validate_plain_connect(&self) -> Result<(), HeadersError> {
        for name in [":scheme", ":path"] {
            if self.value(name).is_some() {
                return Err(HeadersError::ForbiddenPseudo { name });
            }
        }
        self.required(":authority")?;
        Ok(())
    }

    fn validate_target(&self, rule: AuthorityRule) -> Result<(), HeadersError> {
        let scheme = self.required(":scheme")?;
        let path = self.required(":path")?;
        if path[0] != b'/' && path != b"*" {
            return Err(HeadersError::Path);
        }
        let is_http = scheme.eq_ignore_ascii_case(b"http") || scheme.eq_ignore_ascii_case(b"https");
        match rule {
            AuthorityRule::PseudoHeader => self.required(":authority").map(|_| ()),
            AuthorityRule::Either if is_http && self.value("host").is_none() => {
                self.required(":authority").map(|_| ())
            }
            AuthorityRule::Either => Ok(()),
        }
    }

    fn validate_authority(&self) -> Result<(), HeadersError> {
        // "If these fields are present, they MUST NOT be empty. If both fields are present, they MUST contain
        // the same value" (RFC 9114 §4.3.1).
        let Some(authority) = self.value(":authority").or_else(|| self.value("host")) else { return Ok(()) };
        if self.values("host").any(|host| host != authority) {
            return Err(HeadersError::HostMismatch);
        }
        if authority.is_empty() {
            return Err(HeadersError::MissingPseudo { name: ":authority" });
        }
        if authority.contains(&b'@') {
            return Err(HeadersError::UserInfo);
        }
        Ok(())
    }

    fn required(&self, name: &'static str) -> Result<&[u8], HeadersError> {
        self.value(name).filter(|value| !value.is_empty()).ok_or(HeadersError::MissingPseudo { name })
    }
}

impl FromIterator<Field> for Headers {
    fn from_iter<I: IntoIterator<Item = Field>>(fields: I) -> Self {
        Self { fields: fields.into_iter().collect() }
    }
}

/// Which field must contain the host of a request: `:authority`, or `:authority` or `host`.
#[derive(Clone, Copy)]
enum AuthorityRule {
    PseudoHeader,
    Either,
}

fn check_pseudo(name: &[u8], section: Section, seen_regular: bool) -> Result<(), HeadersError> {
    const REQUEST: [&[u8]; 5] = [b":method", b":scheme", b":authority", b":path", b":protocol"];
    let known = match section {
        Section::Request => REQUEST.contains(&name),
        Section::Response => name == b":status",
        Section::Trailers => false,
    };
    if !known {
        return Err(HeadersError::UnknownPseudo { name: escape(name), section });
    }
    if seen_regular {
        return Err(HeadersError::PseudoAfterRegular { name: escape(name) });
    }
    Ok(())
}

fn check_regular(field: &Field) -> Result<(), HeadersError> {
    const CONNECTION: [&[u8]; 5] =
        [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"];
    if !is_token(&field.name) || field.name.iter().any(u8::is_ascii_uppercase) {
        return Err(HeadersError::Name { name: escape(&field.name) });
    }
    // The only exception is `te`, with no value but "trailers" (RFC 9114 §4.2).
    let bad_te = field.name == b"te"[..] && !field.value.eq_ignore_ascii_case(b"trailers");
    if bad_te || CONNECTION.contains(&&field.name[..]) {
        return Err(HeadersError::ConnectionSpecific { name: escape(&field.name) });
    }
    Ok(())
}

/// Whether `bytes` is a token (RFC 9110 §5.6.2).
pub(crate) fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// Whether a field value may contain `byte`: visible characters, space, tab and bytes above ASCII (RFC 9110
/// §5.5).
fn is_value_byte(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

/// Whether a value starts or ends with white space, which RFC 9110 §5.5 forbids.
fn is_padded(value: &[u8]) -> bool {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    is_space(value.first()) || is_space(value.last())
}

fn escape(name: &[u8]) -> String {
    name.iter().take(64).flat_map(|byte| byte.escape_ascii()).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> Headers {
        let field = |(name, value): &(&'static str, &'static str)| Field {
            name: Bytes::from_static(name.as_bytes()),
            value: Bytes::from_static(value.as_bytes()),
        };
        fields.iter().map(field).collect()
    }

    const CONNECT_IP: [(&str, &str); 5] = [
        (":method", "CONNECT"),
        (":protocol", "connect-ip"),
        (":scheme", "https"),
        (":authority", "vpn.example"),
        (":path", "/.well-known/masque/ip/*/*/"),
    ];

    fn request_with(extra: (&'static str, &'static str)) -> Result<(), HeadersError> {
        let mut fields = CONNECT_IP.to_vec();
        fields.push(extra);
        headers(&fields).validate(Section::Request)
    }

    #[test]
    fn requests_of_each_kind_pass() {
        assert_eq!(headers(&CONNECT_IP).validate(Section::Request), Ok(()));
        let plain = headers(&[(":method", "CONNECT"), (":authority", "host:443")]);
        assert_eq!(plain.validate(Section::Request), Ok(()));
        let get = headers(&[(":method", "GET"), (":scheme", "https"), (":path", "/"), ("host", "a")]);
        assert_eq!(get.validate(Section::Request), Ok(()));
        assert_eq!(get.authority(), Some("a"));
    }

    #[test]
    fn pseudo_headers_come_first_once_and_only_known_ones() {
        let late = headers(&[(":method", "GET"), ("accept", "*/*"), (":path", "/")]);
        assert!(matches!(late.validate(Section::Request), Err(HeadersError::PseudoAfterRegular { .. })));
        let twice = headers(&[(":method", "GET"), (":method", "GET")]);
        assert!(matches!(twice.validate(Section::Request), Err(HeadersError::RepeatedPseudo { .. })));
        let status = headers(&[(":status", "200"), (":path", "/")]);
        assert!(matches!(status.validate(Section::Response), Err(HeadersError::UnknownPseudo { .. })));
        let trailers = headers(&[(":status", "200")]);
        assert!(matches!(trailers.validate(Section::Trailers), Err(HeadersError::UnknownPseudo { .. })));
    }

    #[test]
    fn each_missing_or_surplus_pseudo_header_is_named() {
        for missing in [":scheme", ":authority", ":path", ":method"] {
            let left: Vec<_> = CONNECT_IP.iter().filter(|(name, _)| *name != missing).copied().collect();
            let error = headers(&left).validate(Section::Request).unwrap_err();
            assert_eq!(error, HeadersError::MissingPseudo { name: missing });
        }
        let plain = headers(&[(":method", "CONNECT"), (":authority", "a:1"), (":path", "/")]);
        let error = plain.validate(Section::Request).unwrap_err();
        assert_eq!(error, HeadersError::ForbiddenPseudo { name: ":path" });
        let get = headers(&[(":method", "GET"), (":protocol", "connect-ip")]);
        let error = get.validate(Section::Request).unwrap_err();
        assert_eq!(error, HeadersError::ForbiddenPseudo { name: ":protocol" });
    }

    #[test]
    fn names_are_lowercase_tokens_and_values_hold_no_controls() {
        for name in ["Accept", "a b", "", "a:b", "é"] {
            assert!(matches!(request_with((name, "x")), Err(HeadersError::Name { .. })), "{name}");
        }
        for value in ["a\r\nb", "a\0", " a", "a\t", "\x7f"] {
            assert!(matches!(request_with(("x", value)), Err(HeadersError::Value { .. })), "{value:?}");
        }
        assert_eq!(request_with(("x", "a b\tc é")), Ok(()));
    }

    #[test]
    fn connection_specific_fields_are_malformed_but_te_trailers_is_not() {
        for name in ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"] {
            let result = request_with((name, "x"));
            assert!(matches!(result, Err(HeadersError::ConnectionSpecific { .. })), "{name}");
        }
        assert!(matches!(request_with(("te", "gzip")), Err(HeadersError::ConnectionSpecific { .. })));
        assert_eq!(request_with(("te", "trailers")), Ok(()));
    }

    #[test]
    fn authorities_agree_and_hold_no_user() {
        assert_eq!(request_with(("host", "other")), Err(HeadersError::HostMismatch));
        assert_eq!(request_with(("host", "vpn.example")), Ok(()));
        let user = headers(&[(":method", "CONNECT"), (":authority", "user@host:443")]);
        assert_eq!(user.validate(Section::Request), Err(HeadersError::UserInfo));
        let empty = headers(&[(":method", "GET"), (":scheme", "https"), (":path", "/"), ("host", "")]);
        assert!(matches!(empty.validate(Section::Request), Err(HeadersError::MissingPseudo { .. })));
    }

    #[test]
    fn a_status_is_three_digits() {
        for status in ["20", "2000", "+20", "abc", "099", "600", ""] {
            let error = headers(&[(":status", status)]).validate(Section::Response);
            assert_eq!(error, Err(HeadersError::Status), "{status}");
        }
        assert_eq!(Headers::response(200).validate(Section::Response), Ok(()));
        assert_eq!(Headers::response(401).status(), Some(401));
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        let mut headers = Headers::new();
        headers.push("authorization", "Bearer hunter2");
        assert!(!format!("{headers:?}").contains("hunter2"));
    }
}
