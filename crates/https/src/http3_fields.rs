//! Translates requests of HTTP/1.1 and HTTP/2 to header sections of HTTP/3, on which all decisions are made,
//! and responses back.
//!
//! Extended CONNECT is the same in HTTP/2 (RFC 8441) and HTTP/3 (RFC 9220). In HTTP/1.1 a request is upgraded
//! instead (RFC 9298 §3.2, RFC 9484 §4.2): its method is GET, and the upgrade token is the protocol.

use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, HOST, TE, UPGRADE},
};
use mpvpn_masque::headers::Headers;

/// The supported upgrade tokens; a request for any other is answered as if it did not ask for an upgrade (RFC
/// 9110 §7.8).
const UPGRADE_TOKENS: [&str; 2] = ["connect-udp", "connect-ip"];

/// The header section of a CONNECT of any kind; `None` for all other requests.
pub(super) fn connect_headers<B>(request: &Request<B>) -> Option<Headers> {
    let uri = request.uri();
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = Headers::new();
    headers.push(":method", "CONNECT");
    let token = requested_upgrade(request);
    if request.method() == Method::CONNECT {
        if let Some(protocol) = request.extensions().get::<h2::ext::Protocol>() {
            headers.push(":protocol", protocol.as_str().to_owned());
            headers.push(":scheme", uri.scheme_str().unwrap_or("https").to_owned());
            headers.push(":path", path.to_owned());
        }
    } else {
        headers.push(":protocol", token?);
        headers.push(":scheme", "https");
        headers.push(":path", path.to_owned());
    }
    let host = request.headers().get(HOST).map(HeaderValue::as_bytes);
    let authority = match uri.authority() {
        Some(authority) => authority.as_str().as_bytes().to_vec(),
        None => host.unwrap_or_default().to_vec(),
    };
    headers.push(":authority", authority);
    for (name, value) in request.headers() {
        if !is_replaced_or_per_connection(name) {
            headers.push(name.as_str().to_owned(), value.as_bytes().to_vec());
        }
    }
    Some(headers)
}

/// Whether a field concerns the connection only, or is replaced by a pseudo-header.
fn is_replaced_or_per_connection(name: &HeaderName) -> bool {
    [CONNECTION, UPGRADE, HOST, TE].contains(name)
        || ["keep-alive", "proxy-connection"].contains(&name.as_str())
}

/// The protocol to which an HTTP/1.1 request asks to switch, if it is supported.
fn requested_upgrade<B>(request: &Request<B>) -> Option<&'static str> {
    if request.version() != Version::HTTP_11 || request.method() != Method::GET {
        return None;
    }
    let connection = request.headers().get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    if !connection.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
    {
        return None;
    }
    let wanted = request.headers().get(UPGRADE)?.to_str().ok()?;
    UPGRADE_TOKENS.into_iter().find(|token| wanted.eq_ignore_ascii_case(token))
}

/// A response without content. Fields that HTTP/1.1 and HTTP/2 do not allow are left out.
pub(super) fn response_from(headers: &Headers) -> Response<()> {
    let mut response = Response::new(());
    let status = headers.status().and_then(|status| StatusCode::from_u16(status).ok());
    *response.status_mut() = status.unwrap_or(StatusCode::BAD_GATEWAY);
    for field in headers.iter().filter(|field| !field.name.starts_with(b":")) {
        let name = HeaderName::from_bytes(&field.name);
        if let (Ok(name), Ok(mut value)) = (name, HeaderValue::from_bytes(&field.value)) {
            value.set_sensitive(field.is_secret());
            response.headers_mut().append(name, value);
        }
    }
    response
}

/// The HTTP/1.1 response that accepts a request: 101 with the new protocol (RFC 9298 §3.3), or for CONNECT
/// the same as in HTTP/2.
pub(super) fn http1_acceptance<B>(request: &Request<B>, granted: &Headers) -> Response<()> {
    let mut response = response_from(granted);
    if let Some(token) = requested_upgrade(request) {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        response.headers_mut().insert(UPGRADE, HeaderValue::from_static(token));
    }
    response
}

#[cfg(test)]
mod tests {
    use mpvpn_masque::{
        connect_udp,
        headers::Section,
        request::{RequestKind, classify},
    };

    use super::*;

    fn request(head: http::request::Builder) -> Request<()> {
        head.body(()).unwrap()
    }

    #[test]
    fn an_upgrade_reads_as_the_extended_connect_that_it_stands_for() {
        let upgrade = request(
            Request::get("/.well-known/masque/udp/192.0.2.1/443/")
                .header("host", "vpn.example:4433")
                .header("connection", "keep-alive, Upgrade")
                .header("upgrade", "connect-udp")
                .header("capsule-protocol", "?1")
                .header("authorization", "Bearer x"),
        );
        let headers = connect_headers(&upgrade).unwrap();
        assert_eq!(headers.validate(Section::Request), Ok(()));
        let parsed = connect_udp::parse_request(&headers).unwrap();
        assert_eq!(parsed.target.port, 443);
        assert_eq!(parsed.credentials.as_deref(), Some("Bearer x"));
        let answer = http1_acceptance(&upgrade, &connect_udp::accept());
        assert_eq!(answer.status(), 101);
        assert_eq!(
            (&answer.headers()["upgrade"], &answer.headers()["capsule-protocol"]),
            (&HeaderValue::from_static("connect-udp"), &HeaderValue::from_static("?1"))
        );
    }

    /// RFC 7541 §7.1.3: HPACK encodes a sensitive value as a never-indexed literal.
    #[test]
    fn the_secrets_of_a_response_are_sensitive() {
        let mut headers = connect_udp::accept();
        headers.push("mpvpn", "v=1, session=:MDEyMzQ1Njc4OWFiY2RlZg==:");
        let response = response_from(&headers);
        assert!(response.headers()["mpvpn"].is_sensitive());
        assert!(!response.headers()["capsule-protocol"].is_sensitive());
    }

    #[test]
    fn plain_connect_has_no_protocol_and_other_requests_are_none() {
        let connect = request(Request::connect("192.0.2.1:80").header("proxy-connection", "keep-alive"));
        let headers = connect_headers(&connect).unwrap();
        assert_eq!(headers.validate(Section::Request), Ok(()));
        assert_eq!(classify(&headers), Ok(RequestKind::ConnectTcp));
        assert_eq!(http1_acceptance(&connect, &Headers::response(200)).status(), 200);
        assert!(connect_headers(&request(Request::get("/"))).is_none());
        let websocket = Request::get("/").header("connection", "upgrade").header("upgrade", "websocket");
        assert!(connect_headers(&request(websocket)).is_none());
        let unconnected = Request::get("/").header("upgrade", "connect-udp");
        assert!(connect_headers(&request(unconnected)).is_none());
    }
}
