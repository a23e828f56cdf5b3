//! Seeds of connections to the TCP side of a server.

use mpvpn_masque::capsule::Capsule;

use super::{Seed, short};

/// Bits of the first byte: the version of HTTP, the kind of site, and whether the client is a user.
const HTTP2: u8 = 1;
const DRAFTS: u8 = 2;
const FILES: u8 = 1 << 2;
const UPSTREAM: u8 = 2 << 2;
const USER: u8 = 0x80;

pub(super) fn all() -> Vec<Seed> {
    let at = |host: &str, path: &str, more: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{more}\r\n").into_bytes()
    };
    let get = |path: &str, more: &str| at("x", path, more);
    let upgrade = |host: &str, path: &str, protocol: &str, content: &[u8]| {
        let more = format!("connection: Upgrade\r\nupgrade: {protocol}\r\ncapsule-protocol: ?1\r\n");
        [&at(host, path, &more)[..], content].concat()
    };
    let datagram = Capsule::Datagram(b"\0payload"[..].into()).to_bytes();
    let udp = "/.well-known/masque/udp/192.0.2.7/53/";
    let ip = "/.well-known/masque/ip/*/*/";
    let connect = b"CONNECT 192.0.2.1:80 HTTP/1.1\r\nhost: 192.0.2.1:80\r\n\r\nhello".to_vec();
    let answered = |answer: &[u8], request: Vec<u8>| [short(answer), request].concat();
    let page = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\nkeep-alive: x\r\n\r\nok";
    let head = b"HEAD /a/b.txt HTTP/1.1\r\nhost: x\r\n\r\n".to_vec();
    let options = b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n".to_vec();
    let own = "/.well-known/masque/udp/127.0.0.1/443/";
    let chunked =
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".to_vec();
    let draft =
        b"CONNECT-UDP masque://192.0.2.7:53/ HTTP/1.1\r\nauthorization: Bearer x\r\n\r\n\0\0\x03abc".to_vec();
    let requests = [
        ("get", 0, [get("/a?b", ""), get("/", "connection: close\r\n")].concat()),
        ("chunked", 0, chunked.clone()),
        (
            "page",
            FILES,
            [get("/a", ""), get("/a/b.txt", "range: bytes=2-4\r\n"), get("/.hidden", "")].concat(),
        ),
        ("half", FILES, get("/a/b.txt", "if-range: x\r\nrange: bytes=2-4\r\n")),
        ("above", FILES, get("/../Cargo.toml", "")),
        ("unchanged", FILES, get("/", "if-modified-since: Sat, 28 Nov 2099 10:00:00 GMT\r\n")),
        ("tags", FILES, get("/", "if-none-match: W/\"d7vdhg3b8e69d2g-4z\", x\r\n")),
        ("range", FILES, get("/a/b.txt", "range: bytes=9999-\r\n")),
        (
            "folder",
            FILES,
            [get("/a?b", ""), get("/a/b.txt/", ""), get("/a/./", ""), get("/%00", "")].concat(),
        ),
        ("head", FILES, [head, chunked.clone()].concat()),
        ("options", UPSTREAM, answered(page, options)),
        ("upstream", UPSTREAM, answered(page, get("/x?y", "forwarded: for=1.2.3.4\r\n"))),
        ("upload", UPSTREAM, answered(page, chunked)),
        ("nothing", UPSTREAM, answered(b"", get("/", ""))),
        ("own_quic", USER, upgrade("127.0.0.1:443", own, "connect-udp", &datagram)),
        ("upgrade", USER, upgrade("x", udp, "connect-udp", &datagram)),
        ("packets", USER, upgrade("x", ip, "connect-ip", &datagram)),
        ("no_context", USER, upgrade("x", udp, "connect-udp", &[0, 0])),
        ("another_capsule", USER, upgrade("x", udp, "connect-udp", &[&[0x21, 1, 7], &datagram[..]].concat())),
        ("connect", USER, connect.clone()),
        ("refused", 0, get("/", "authorization: Bearer x\r\n")),
        ("wrong", FILES, connect),
        ("draft", DRAFTS + USER, draft.clone()),
        ("draft_refused", DRAFTS, draft.clone()),
        ("draft_http1", DRAFTS, get("/", "")),
        ("draft_http2", DRAFTS, [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &http2()].concat()),
        ("http2", HTTP2, http2()),
        ("http2_user", HTTP2 + USER, http2()),
        ("http2_page", HTTP2 + FILES, http2()),
        ("http2_upload", HTTP2 + UPSTREAM, answered(page, http2())),
        ("http2_connect", HTTP2 + USER, http2_connect(&[(":authority", "192.0.2.1:80")], b"hello")),
        ("http2_udp", HTTP2 + USER, http2_connect(&extended("connect-udp", "x", udp), &datagram)),
        ("http2_packets", HTTP2 + USER, http2_connect(&extended("connect-ip", "x", ip), &datagram)),
        (
            "http2_own_quic",
            HTTP2 + USER,
            http2_connect(
                &[&extended("connect-udp", "127.0.0.1:443", own)[..], &[("mpvpn", "v=1, dscp=46")]].concat(),
                &datagram,
            ),
        ),
        ("http2_no_context", HTTP2 + USER, http2_connect(&extended("connect-udp", "x", udp), &[0, 0])),
        (
            "http2_reset",
            HTTP2 + USER,
            [http2_connect(&extended("connect-udp", "x", udp), &datagram), frame(3, 0, 1, &[0, 0, 0, 8])]
                .concat(),
        ),
        (
            "http2_refused",
            HTTP2,
            http2_connect(&[(":authority", "192.0.2.1:80"), ("authorization", "Bearer x")], b""),
        ),
    ];
    requests
        .into_iter()
        .map(|(name, kind, bytes)| ("https_front", name, [&[kind], &bytes[..]].concat()))
        .collect()
}

/// SETTINGS, HEADERS of `GET https://x/` by the static table of HPACK, PING, WINDOW_UPDATE, a POST with DATA,
/// RST_STREAM, GOAWAY.
fn http2() -> Vec<u8> {
    let head: &[u8] = &[0x82, 0x87, 0x84, 0x41, 1, b'x'];
    let upload: &[u8] = &[0x83, 0x87, 0x84, 0x41, 1, b'x'];
    [
        frame(4, 0, 0, &[]),
        frame(1, 5, 1, head),
        frame(6, 0, 0, &[1, 2, 3, 4, 5, 6, 7, 8]),
        frame(8, 0, 0, &[0, 0, 1, 0]),
        frame(1, 4, 3, upload),
        frame(0, 1, 3, &[1, 2, 3]),
        frame(1, 4, 5, upload),
        frame(3, 0, 5, &[0, 0, 0, 8]),
        frame(7, 0, 0, &[0; 8]),
    ]
    .concat()
}

/// The fields of an extended CONNECT (RFC 8441).
fn extended<'a>(protocol: &'a str, authority: &'a str, path: &'a str) -> [(&'a str, &'a str); 5] {
    [
        (":protocol", protocol),
        (":scheme", "https"),
        (":path", path),
        (":authority", authority),
        ("capsule-protocol", "?1"),
    ]
}

/// A CONNECT with these fields, and content.
fn http2_connect(fields: &[(&str, &str)], content: &[u8]) -> Vec<u8> {
    let field =
        |(name, value): &(&str, &str)| [&[0], &short(name.as_bytes())[..], &short(value.as_bytes())].concat();
    let fields: Vec<u8> = [(":method", "CONNECT")].iter().chain(fields).flat_map(field).collect();
    [frame(4, 0, 0, &[]), frame(1, 4, 1, &fields), frame(0, 0, 1, content), frame(0, 1, 1, &[])].concat()
}

/// A frame of HTTP/2 (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}
