//! CONNECT-UDP: UDP payloads between a client and one target, in HTTP Datagrams (RFC 9298).
//!
//! In: on the client, the target, and later the response; on the server, a valid request header section. Out:
//! header sections, the target, or the reason of a failure as a proxy error type ([`ProxyError`], RFC 9209).
//! Always holds: nothing is authorized here; names are not resolved and credentials not verified.

use crate::{
    connect::{self, Authority, Connect, Host, ProxyError},
    headers::Headers,
    request::{self, Rejection, RequestKind},
    template::Template,
};
use std::net::IpAddr;

/// The path for `target`; colons of IPv6 addresses are percent-encoded (RFC 9298 §3).
pub fn path(target: &Authority) -> String {
    let host = match &target.host {
        Host::Addr(ip) => ip.to_string(),
        Host::Name(name) => name.clone(),
    };
    Template::CONNECT_UDP.expand([&host, &target.port.to_string()])
}

/// The request for `path` at the proxy `authority`; `credentials` is the value of `authorization`.
pub fn request(authority: &str, path: &str, credentials: Option<&str>) -> Headers {
    let mut headers = request::extended_connect("connect-udp", "https", authority, path);
    if let Some(credentials) = credentials {
        headers.push("authorization", credentials.to_owned());
    }
    headers
}

/// Parses a request whose header section is valid ([`Headers::validate`]), for a server with the default
/// template.
///
/// # Errors
/// 501 for another kind of CONNECT, 405 for another method, 404 for another path, 400 for an invalid host or
/// port, or for header fields that are forbidden with capsules.
pub fn parse_request(headers: &Headers) -> Result<Connect, Rejection> {
    match request::classify(headers)? {
        RequestKind::ConnectUdp => {}
        RequestKind::Other => return Err(Rejection::new(405, "expected CONNECT with :protocol connect-udp")),
        RequestKind::ConnectIp | RequestKind::ConnectTcp | RequestKind::ConnectMpvpn => {
            return Err(Rejection::new(501, "expected CONNECT with :protocol connect-udp"));
        }
    }
    let path = headers.path().unwrap_or_default();
    let [host, port] = Template::CONNECT_UDP
        .matches(path)
        .ok_or_else(|| Rejection::new(404, "no such path; expected one of the UDP proxying template"))?;
    request::check_no_content_fields(headers)?;
    // "any ':' characters in the target_host MUST be percent-encoded" (RFC 9298 §3).
    if path.contains(':') {
        return Err(Rejection::new(400, "a colon in the path is not percent-encoded"));
    }
    let target = Authority { host: parse_host(&host)?, port: parse_port(&port)? };
    Ok(Connect { target, credentials: connect::credentials(headers) })
}

/// "target_host supports using DNS names, IPv6 literals and IPv4 literals. Note that IPv6 scoped addressing
/// zone identifiers are not supported" (RFC 9298 §3).
fn parse_host(text: &str) -> Result<Host, Rejection> {
    match text.parse::<IpAddr>() {
        Ok(ip) => Ok(Host::Addr(ip)),
        Err(_) if request::is_host_name(text) => Ok(Host::Name(text.to_ascii_lowercase())),
        Err(_) => Err(Rejection::new(400, format!("target_host {text:?} is no name and no address"))),
    }
}

/// "The target_port MUST represent an integer between 1 and 65535 inclusive" (RFC 9298 §3).
fn parse_port(text: &str) -> Result<u16, Rejection> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port| is_number && *port > 0);
    port.ok_or_else(|| Rejection::new(400, format!("target_port {text:?} is no number from 1 to 65535")))
}

/// The response that grants a request (RFC 9298 §3.5).
pub fn accept() -> Headers {
    request::accept_with_capsules()
}

/// Checks the final response to a request.
///
/// # Errors
/// If the response is not a 2xx that allows capsules (RFC 9298 §3.5, RFC 9297 §3.2).
pub fn check_response(headers: &Headers) -> Result<(), ProxyError> {
    connect::check_response(headers)?;
    let has_content = matches!(headers.status(), Some(204..=206));
    if has_content || request::field_forbidden_with_capsules(headers).is_some() {
        return Err(ProxyError::Other);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::Section;
    use proptest::prelude::*;

    fn parse(path: &str) -> Result<Connect, Rejection> {
        parse_request(&request("proxy.example", path, None))
    }

    /// RFC 9298 §3, figure 1 and the text after it.
    #[test]
    fn targets_are_read_from_the_path_as_written() {
        for (target, path) in [
            ("192.0.2.6:443", "/.well-known/masque/udp/192.0.2.6/443/"),
            ("[2001:db8::42]:443", "/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/"),
            ("target.example:65535", "/.well-known/masque/udp/target.example/65535/"),
        ] {
            let target: Authority = target.parse().unwrap();
            assert_eq!(super::path(&target), path);
            assert_eq!(parse(path).unwrap().target, target);
        }
    }

    #[test]
    fn a_request_shows_credentials_and_hides_them_from_the_log() {
        let path = path(&"example.com:53".parse().unwrap());
        let headers = request("proxy.example:443", &path, Some("Bearer secret"));
        assert_eq!(headers.validate(Section::Request), Ok(()));
        assert_eq!(headers.text("capsule-protocol"), Some("?1"));
        let parsed = parse_request(&headers).unwrap();
        assert_eq!(parsed.credentials.as_deref(), Some("Bearer secret"));
        assert!(!format!("{parsed:?}").contains("secret"));
    }

    #[test]
    fn invalid_targets_are_malformed() {
        for target in [
            "example.com/0",
            "example.com/65536",
            "example.com/+1",
            "example.com/",
            "/53",
            "1.2.3/53",
            "a b/53",
            "2001:db8::1/53",
            "fe80%3A%3A1%25eth0/53",
            "%5B2001%3Adb8%3A%3A1%5D/53",
            "a%2Fb/53",
        ] {
            let target = target.replace(' ', "%20");
            let error = parse(&format!("/.well-known/masque/udp/{target}/")).unwrap_err();
            assert_eq!(error.status, 400, "{target}");
        }
        assert_eq!(parse("/.well-known/masque/udp/a/1").unwrap_err().status, 404);
        assert_eq!(parse("/.well-known/masque/ip/*/*/").unwrap_err().status, 404);
    }

    #[test]
    fn other_requests_are_refused() {
        let path = "/.well-known/masque/udp/a/1/";
        let mut with_length = request("p", path, None);
        with_length.push("content-length", "0");
        assert_eq!(parse_request(&with_length).unwrap_err().status, 400);
        let tcp = connect::request(&"a:1".parse().unwrap(), None);
        assert_eq!(parse_request(&tcp).unwrap_err().status, 501);
        let paths = crate::connect_mpvpn::request("a:1", None, None);
        assert_eq!(parse_request(&paths).unwrap_err().status, 501);
        let mut get = Headers::new();
        get.push(":method", "GET");
        assert_eq!(parse_request(&get).unwrap_err().status, 405);
    }

    #[test]
    fn only_a_response_that_allows_capsules_grants_the_request() {
        assert_eq!(check_response(&accept()), Ok(()));
        assert_eq!(accept().text("capsule-protocol"), Some("?1"));
        for status in [204, 205, 206] {
            assert_eq!(check_response(&Headers::response(status)), Err(ProxyError::Other));
        }
        let mut typed = accept();
        typed.push("content-type", "text/html");
        assert_eq!(check_response(&typed), Err(ProxyError::Other));
        let refused = ProxyError::Prohibited.rejection("no").headers();
        assert_eq!(check_response(&refused), Err(ProxyError::Prohibited));
    }

    proptest! {
        #[test]
        fn no_path_makes_it_panic(rest in "[a-z0-9:%./?&=A-F\\[\\]]{0,60}") {
            if let Ok(parsed) = parse(&format!("/.well-known/masque/udp/{rest}")) {
                prop_assert!(parsed.target.port > 0);
                prop_assert_eq!(parse(&path(&parsed.target)), Ok(parsed));
            }
        }
    }
}
