//! Parses requests to an HTTP proxy (RFC 9110 §7.2, RFC 9112 §3.2), and makes its responses.
//!
//! In: the bytes received so far. Out: what to do ([`RequestStep`]). CONNECT makes a tunnel. Other requests,
//! with a target in absolute form, are sent to the origin in origin form, with `Connection: close`, because a
//! second request on the connection could be for another origin. Always holds: bytes after the head stay
//! unchanged.

use bytes::{Buf, Bytes, BytesMut};
use httparse::Status;
use mpvpn_masque::connect::{Authority, ProxyError};

use super::RequestStep;

/// The largest number of fields of a request.
const MAX_FIELDS: usize = 128;

/// The response when the target of a CONNECT is connected.
pub(super) const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// Connection-specific fields, not for the origin (RFC 9110 §7.6.1). `Transfer-Encoding` is not among them,
/// because the content is forwarded as it is.
const CONNECTION_FIELDS: &[&str] =
    &["connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade"];
/// Fields that a `Connection` field cannot remove, because they frame the content.
const FRAMING_FIELDS: &[&str] = &["content-length", "transfer-encoding"];

/// Parses what was received so far, and consumes a complete head.
pub fn step(bytes: &mut BytesMut) -> RequestStep {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let length = match request.parse(bytes) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return RequestStep::Incomplete,
        Err(httparse::Error::TooManyHeaders) => return refuse(431, "the request has too many header fields"),
        Err(error) => return refuse(400, &format!("this is no HTTP/1.1 request: {error}")),
    };
    let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
        return refuse(400, "the request line is not whole");
    };
    let read = if method == "CONNECT" {
        target
            .parse::<Authority>()
            .map(|to| (to, BytesMut::new()))
            .map_err(|error| (400, format!("`{}` is nothing to connect to: {error}", printable(target))))
    } else {
        origin_form(method, target, version, request.headers)
    };
    match read {
        Ok((to, early)) => {
            bytes.advance(length);
            RequestStep::Connect { to, early }
        }
        Err((status, why)) => refuse(status, &why),
    }
}

/// The origin and the rewritten head of a request in absolute form.
fn origin_form(
    method: &str,
    target: &str,
    version: u8,
    fields: &[httparse::Header<'_>],
) -> Result<(Authority, BytesMut), (u16, String)> {
    let bad = |why: String| (400, why);
    let Some((scheme, rest)) = target.split_once("://") else {
        let why = "this is a proxy: expected CONNECT HOST:PORT or a target that starts with http://";
        return Err(bad(why.to_owned()));
    };
    if !scheme.eq_ignore_ascii_case("http") {
        return Err(bad(format!("only http:// is forwarded, not {}://: use CONNECT", printable(scheme))));
    }
    let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let path = path.split('#').next().unwrap_or_default();
    let to =
        parse_authority(host).ok_or_else(|| bad(format!("`{}` is no host with a port", printable(host))))?;
    let mut head = BytesMut::with_capacity(target.len() + 1024);
    let mut put = |text: &str| head.extend_from_slice(text.as_bytes());
    put(method);
    put(" ");
    match path {
        // RFC 9112 §3.2.4.
        "" if method == "OPTIONS" => put("*"),
        path if path.starts_with('/') => put(path),
        path => {
            put("/");
            put(path);
        }
    }
    put(&format!(" HTTP/1.{version}\r\nHost: {host}\r\n"));
    let named: Vec<String> = fields
        .iter()
        .filter(|field| field.name.eq_ignore_ascii_case("connection"))
        .flat_map(|field| field.value.split(|byte| *byte == b','))
        .map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase())
        .filter(|name| !FRAMING_FIELDS.contains(&name.as_str()))
        .collect();
    for field in fields {
        let name = field.name.to_ascii_lowercase();
        if name == "host" || CONNECTION_FIELDS.contains(&name.as_str()) || named.contains(&name) {
            continue;
        }
        head.extend_from_slice(field.name.as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(field.value);
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"Connection: close\r\n\r\n");
    Ok((to, head))
}

/// Host and port of a URI; `None` with user information.
fn parse_authority(text: &str) -> Option<Authority> {
    let after_host = text.rfind(']').map_or(0, |at| at + 1);
    match text[after_host..].rfind(':') {
        Some(at) if text.len() == after_host + at + 1 => format!("{text}80").parse().ok(),
        Some(_) => text.parse().ok(),
        None => format!("{text}:80").parse().ok(),
    }
}

fn refuse(status: u16, why: &str) -> RequestStep {
    RequestStep::Refuse { answer: response(status, why), why: why.to_owned() }
}

/// The status code for a failure.
pub(super) fn status_of(failure: ProxyError) -> u16 {
    failure.rejection("").status
}

/// A response of the proxy itself, after which the connection closes.
pub(super) fn response(status: u16, why: &str) -> Bytes {
    let reason = match status {
        400 => "Bad Request",
        403 => "Forbidden",
        408 => "Request Timeout",
        431 => "Request Header Fields Too Large",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Error",
    };
    let text = format!("mpvpn: {why}\n");
    let length = text.len();
    Bytes::from(format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{text}"
    ))
}

/// An app's text, shortened and escaped, for a response.
fn printable(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The origin of a request, and its rewritten head.
    fn parse(request: &str) -> (String, String) {
        let mut bytes = BytesMut::from(request);
        match step(&mut bytes) {
            RequestStep::Connect { to, early } => {
                assert!(bytes.is_empty(), "{bytes:?}");
                (to.to_string(), String::from_utf8(early.to_vec()).unwrap())
            }
            other => panic!("{other:?}"),
        }
    }

    fn refused(request: &str) -> String {
        match step(&mut BytesMut::from(request)) {
            RequestStep::Refuse { answer, .. } => String::from_utf8(answer.to_vec()).unwrap(),
            other => panic!("{request:?}: {other:?}"),
        }
    }

    #[test]
    fn a_tunnel_is_asked_for_a_byte_at_a_time() {
        let request = b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n";
        let mut bytes = BytesMut::new();
        for byte in &request[..request.len() - 1] {
            bytes.extend_from_slice(&[*byte]);
            assert_eq!(step(&mut bytes), RequestStep::Incomplete);
        }
        bytes.extend_from_slice(b"\nearly");
        let wanted = RequestStep::Connect { to: "example.com:443".parse().unwrap(), early: BytesMut::new() };
        assert_eq!(step(&mut bytes), wanted);
        assert_eq!(&bytes[..], b"early");
        assert_eq!(parse("CONNECT [2001:db8::1]:443 HTTP/1.0\r\n\r\n").0, "[2001:db8::1]:443");
    }

    #[test]
    fn the_origin_gets_the_request_without_what_is_for_the_proxy() {
        let (to, head) = parse(
            "POST HTTP://Example.com/a?b#c HTTP/1.1\r\nHost: other.example\r\nProxy-Connection: keep-alive\r\n\
             Proxy-Authorization: Basic eA==\r\nConnection: X-Own, content-length\r\nX-Own: 1\r\n\
             Content-Length: 3\r\nX-Kept:  two words \r\n\r\n",
        );
        assert_eq!(to, "example.com:80");
        let wanted = "POST /a?b HTTP/1.1\r\nHost: Example.com\r\nContent-Length: 3\r\nX-Kept: two words\r\n\
                      Connection: close\r\n\r\n";
        assert_eq!(head, wanted);
    }

    #[test]
    fn targets_are_read_as_uris() {
        for (target, to, path) in [
            ("http://a", "a:80", "/"),
            ("http://a:8080", "a:8080", "/"),
            ("http://a:/x", "a:80", "/x"),
            ("http://a?q", "a:80", "/?q"),
            ("http://192.0.2.1:81/x/y", "192.0.2.1:81", "/x/y"),
            ("http://[2001:db8::1]/", "[2001:db8::1]:80", "/"),
            ("http://[2001:db8::1]:81/", "[2001:db8::1]:81", "/"),
        ] {
            let (got, head) = parse(&format!("GET {target} HTTP/1.1\r\n\r\n"));
            assert_eq!(got, to, "{target}");
            assert!(head.starts_with(&format!("GET {path} HTTP/1.1\r\n")), "{target}: {head}");
        }
        assert!(parse("OPTIONS http://a HTTP/1.1\r\n\r\n").1.starts_with("OPTIONS * HTTP/1.1\r\n"));
    }

    #[test]
    fn everything_else_is_told_what_is_wrong() {
        for (request, status, why) in [
            ("GET / HTTP/1.1\r\n\r\n", 400, "this is a proxy"),
            ("GET https://a/ HTTP/1.1\r\n\r\n", 400, "use CONNECT"),
            ("GET http://user:word@a/ HTTP/1.1\r\n\r\n", 400, "no host with a port"),
            ("GET http:///x HTTP/1.1\r\n\r\n", 400, "no host with a port"),
            ("CONNECT a HTTP/1.1\r\n\r\n", 400, "nothing to connect to"),
            ("CONNECT a:0 HTTP/1.1\r\n\r\n", 400, "nothing to connect to"),
            ("\x05\x01\x00", 400, "no HTTP/1.1 request"),
            ("GET http://a/ HTTP/2.0\r\n\r\n", 400, "no HTTP/1.1 request"),
            ("GET http://a/ HTTP/1.1\r\na b: c\r\n\r\n", 400, "no HTTP/1.1 request"),
        ] {
            let answer = refused(request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
            assert!(answer.contains(why), "{request:?}: {answer}");
        }
        let many = format!("GET http://a/ HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_FIELDS + 1));
        assert!(refused(&many).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn failures_have_the_status_that_says_who_failed() {
        assert_eq!(status_of(ProxyError::Refused), 502);
        assert_eq!(status_of(ProxyError::TimedOut), 504);
        assert_eq!(status_of(ProxyError::Prohibited), 403);
    }
}
