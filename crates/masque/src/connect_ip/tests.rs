use super::*;
use crate::{headers::Section, qpack};
use proptest::prelude::*;

fn path(target: &str, ipproto: &str) -> String {
    Template::CONNECT_IP.expand([target, ipproto])
}

fn request(target: &str, ipproto: &str) -> Headers {
    ConnectIpRequest::new("vpn.example:4433", path(target, ipproto)).headers()
}

fn parse(target: &str, ipproto: &str) -> Result<Option<String>, Rejection> {
    parse_request(&request(target, ipproto))
}

fn status(headers: &Headers) -> u16 {
    parse_request(headers).unwrap_err().status
}

#[test]
fn a_request_survives_the_wire_with_all_it_says() {
    let sent = ConnectIpRequest {
        authorization: Some("Bearer s3cret".to_owned()),
        extensions: Some("v=1, session=:MDEyMzQ1Njc4OWFiY2RlZg==:".to_owned()),
        ..ConnectIpRequest::new("vpn.example:4433", path("2001:db8::/32", "17"))
    };
    let headers = qpack::decode(&qpack::encode(&sent.headers()), 4096).unwrap();
    assert_eq!(headers.validate(Section::Request), Ok(()));
    assert_eq!(headers.path(), Some("/.well-known/masque/ip/2001%3Adb8%3A%3A%2F32/17/"));
    assert_eq!(headers.authority(), Some("vpn.example:4433"));
    assert_eq!(parse_request(&headers).unwrap().as_deref(), Some("Bearer s3cret"));
    assert_eq!(headers.text("mpvpn"), sent.extensions.as_deref());
    assert_eq!(headers.text("capsule-protocol"), Some("?1"));
    let printed = format!("{sent:?} {headers:?}");
    assert!(!printed.contains("s3cret") && !printed.contains("MDEyMzQ1"), "{printed}");
}

#[test]
fn a_request_for_everything_uses_the_path_that_deployed_servers_compare() {
    assert_eq!(path("*", "*"), "/.well-known/masque/ip/*/*/");
    assert_eq!(parse("*", "*"), Ok(None));
}

/// RFC 9484 §4.6: target is a prefix, a name or `*`; host bits are zero.
#[test]
fn targets_are_prefixes_names_or_everything() {
    for good in ["192.0.2.0/24", "192.0.2.1", "::1", "2001:db8::/32", "Host.example"] {
        assert_eq!(parse(good, "*"), Ok(None), "{good}");
    }
    let long_label = "a".repeat(64);
    let long_name = "a.".repeat(127) + "a";
    for bad in [
        "192.0.2.1/24",
        "2001:db8::1/32",
        "192.0.2.0/33",
        "::/129",
        "1.2.3",
        "256.1.1.1",
        "",
        "a..b",
        "-a",
        "a b",
        "host/24",
        "*/0",
        "é",
        "fe80::1%eth0",
        &long_label,
        &long_name,
    ] {
        let rejection = parse(bad, "*").unwrap_err();
        assert_eq!(rejection.status, 400, "{bad}: {rejection}");
    }
}

/// RFC 9484 §4.6: "ipproto" MUST represent a decimal integer between 0 and 255 inclusive or the wildcard
/// value "*".
#[test]
fn protocols_are_numbers_up_to_255_or_everything() {
    for good in ["0", "255"] {
        assert_eq!(parse("*", good), Ok(None), "{good}");
    }
    for bad in ["256", "-1", "+1", "", "udp", "1 "] {
        assert_eq!(parse("*", bad).unwrap_err().status, 400, "{bad}");
    }
}

#[test]
fn other_requests_get_the_status_that_names_the_difference() {
    let replaced = |name: &'static str, value: &'static str| {
        let mut headers: Headers =
            request("*", "*").iter().filter(|field| field.name != name.as_bytes()).cloned().collect();
        headers.push(name, value);
        headers
    };
    assert_eq!(status(&replaced(":protocol", "connect-udp")), 501);
    assert_eq!(status(&replaced(":protocol", "websocket")), 501);
    assert_eq!(status(&replaced(":path", "/")), 404);
    assert_eq!(status(&replaced(":path", "/.well-known/masque/ip/a/b/c/")), 404);
    assert_eq!(status(&replaced(":method", "GET")), 405);
    let mut elsewhere = Headers::new();
    elsewhere.push(":method", "GET");
    elsewhere.push(":path", "/");
    assert_eq!(status(&elsewhere), 404);
    let mut tcp = Headers::new();
    tcp.push(":method", "CONNECT");
    tcp.push(":authority", "a:1");
    assert_eq!(status(&tcp), 501);
}

/// RFC 9297 §3.2.
#[test]
fn content_fields_cannot_stand_beside_capsules() {
    for name in ["content-length", "content-type", "transfer-encoding"] {
        let mut headers = request("*", "*");
        headers.push(name, "1");
        assert_eq!(status(&headers), 400, "{name}");
        let mut headers = accept();
        headers.push(name, "1");
        assert!(matches!(check_response(&headers), Err(ResponseError::Malformed { .. })), "{name}");
    }
    for status in 204..=206 {
        let response = check_response(&Headers::response(status));
        assert!(matches!(response, Err(ResponseError::Malformed { .. })), "{status}");
    }
}

#[test]
fn a_client_that_does_not_announce_capsules_is_served() {
    let headers: Headers =
        request("*", "*").iter().filter(|field| field.name != b"capsule-protocol"[..]).cloned().collect();
    assert_eq!(parse_request(&headers), Ok(None));
}

#[test]
fn credentials_given_twice_count_as_none() {
    let mut headers = request("*", "*");
    headers.push("authorization", "Bearer a");
    headers.push("authorization", "Bearer b");
    assert_eq!(parse_request(&headers), Ok(None));
}

#[test]
fn a_server_that_does_not_announce_capsules_is_used() {
    assert_eq!(check_response(&accept()), Ok(()));
    assert_eq!(check_response(&Headers::response(200)), Ok(()));
}

#[test]
fn refusals_are_typed_and_keep_what_the_server_says() {
    let error = |rejection: Rejection| check_response(&rejection.headers()).unwrap_err();
    let refused = error(Rejection::unauthorized("wrong token"));
    assert!(matches!(refused, ResponseError::Unauthorized { status: 401, .. }));
    assert!(refused.to_string().contains("wrong token"), "{refused}");
    assert!(matches!(error(Rejection::new(403, "")), ResponseError::Forbidden { .. }));
    for status in [404, 405, 501] {
        assert!(matches!(error(Rejection::new(status, "")), ResponseError::NotOffered { .. }));
    }
    for status in [429, 503] {
        assert!(matches!(error(Rejection::new(status, "")), ResponseError::Busy { .. }));
    }
    assert!(matches!(error(Rejection::new(302, "")), ResponseError::Refused { status: 302, .. }));
}

#[test]
fn what_the_server_says_is_cut_and_free_of_controls() {
    let mut headers = Headers::response(500);
    headers.push("proxy-status", "\u{1b}[31m".repeat(1000));
    let text = check_response(&headers).unwrap_err().to_string();
    assert!(text.len() < 400 && text.is_ascii() && !text.contains('\u{1b}'), "{text}");
}

proptest! {
    #[test]
    fn no_request_makes_it_panic(path in "(/.well-known/masque/ip/)?[a-z0-9*:/%.-]{0,40}", name in "[a-z-]{1,16}",
                                 value in prop::collection::vec(any::<u8>(), 0..40)) {
        let mut headers = ConnectIpRequest::new("a", path).headers();
        headers.push(name, value);
        if let Err(rejection) = parse_request(&headers) {
            prop_assert!((400..600).contains(&rejection.status), "{}", rejection);
            prop_assert_eq!(rejection.headers().validate(Section::Response), Ok(()));
        }
        prop_assert!(check_response(&headers).is_err(), "a request is no response");
    }

    #[test]
    fn every_prefix_is_a_target(bits in any::<u128>(), len in 0u8..=128, v4 in any::<bool>()) {
        let net = match v4 {
            true => IpNet::new(IpAddr::from((bits as u32).to_be_bytes()), len % 33),
            false => IpNet::new(IpAddr::from(bits.to_be_bytes()), len),
        };
        prop_assert_eq!(parse(&net.unwrap().trunc().to_string(), "*"), Ok(None));
    }
}
