//! Bytes that load balancers send to a server, apps to a client's proxies, and hosts as DNS messages.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use mpvpn_class::{DnsSnooper, DomainPattern, has_plausible_counts};
use mpvpn_https::untrusted::proxy_protocol_header;
use mpvpn_names::untrusted::{dns_connection, dns_errors, dns_question, is_dns_answer};
use mpvpn_proxy::{
    RequestStep,
    untrusted::{Socks5Dialogue, encode_socks5_datagram, http_proxy_step, socks5_datagram},
};

use crate::input::Input;

/// The PROXY protocol header at the start of a connection.
pub fn proxy_protocol(data: &[u8]) {
    /// The fixed part of version 2 and the largest rest that is read, and the longest line of version 1.
    const LONGEST: usize = 16 + 4096;
    let Ok((client, len)) = proxy_protocol_header(data) else { return };
    assert!((1..=LONGEST).contains(&len) && len <= data.len());
    // The bytes after the header are the client's: they change nothing. Without its last byte there is no
    // header.
    assert_eq!(proxy_protocol_header(&data[..len]).ok(), Some((client, len)));
    assert!(proxy_protocol_header(&data[..len - 1]).is_err());
    if data[0] == b'P' {
        assert!(data[..len].ends_with(b"\r\n") && len <= 107, "a whole line");
    }
}

/// The requests of apps to a client's SOCKS5 and HTTP proxies: `protocol, bytes of pieces, bytes`.
pub fn proxy_heads(data: &[u8]) {
    let mut input = Input(data);
    let (protocol, piece) = (input.below(3), usize::from(input.byte()) + 1);
    match protocol {
        0 => {
            let whole = ask(input.0, usize::MAX, &mut socks5());
            assert_eq!(whole, ask(input.0, piece, &mut socks5()), "pieces of {piece} bytes");
        }
        1 => {
            let whole = ask(input.0, usize::MAX, &mut http_proxy_step);
            let pieces = ask(input.0, piece, &mut http_proxy_step);
            // A bad request may be noticed before all of it has come.
            if !matches!(whole.1, RequestStep::Refuse { .. }) {
                assert_eq!(whole, pieces, "pieces of {piece} bytes");
            }
            if let RequestStep::Connect { early, .. } = whole.1 {
                origin_reads_one_request(&early);
            }
        }
        _ => {
            let Some((to, payload)) = socks5_datagram(input.0) else { return };
            let again = encode_socks5_datagram(&to, payload);
            assert_eq!(socks5_datagram(&again), Some((to, payload)));
        }
    }
}

fn socks5() -> impl FnMut(&mut BytesMut) -> RequestStep {
    let mut dialogue = Socks5Dialogue::default();
    move |bytes| dialogue.step(bytes)
}

/// The bytes that an app gets, the last step, and the bytes that stay for the target.
fn ask(
    request: &[u8],
    piece: usize,
    step: &mut impl FnMut(&mut BytesMut) -> RequestStep,
) -> (Vec<u8>, RequestStep, Vec<u8>) {
    let (mut bytes, mut sent) = (BytesMut::new(), Vec::new());
    let mut pieces = request.chunks(piece);
    while let Some(piece) = pieces.next() {
        bytes.extend_from_slice(piece);
        loop {
            match step(&mut bytes) {
                RequestStep::Incomplete => break,
                RequestStep::Send(words) => sent.extend_from_slice(&words),
                end => {
                    // A refused request is not read any further.
                    let refused = matches!(end, RequestStep::Refuse { .. });
                    let rest = pieces.flatten().copied();
                    let left = if refused { Vec::new() } else { bytes.iter().copied().chain(rest).collect() };
                    return (sent, end, left);
                }
            }
        }
    }
    (sent, RequestStep::Incomplete, bytes.to_vec())
}

/// The head that a proxy makes is one head, and ends the connection after the answer.
fn origin_reads_one_request(head: &[u8]) {
    if head.is_empty() {
        return;
    }
    let text = String::from_utf8_lossy(head);
    assert!(text.ends_with("\r\nConnection: close\r\n\r\n"), "{text:?}");
    assert_eq!(text.matches("\r\n\r\n").count(), 1, "{text:?}");
    assert!(text.split("\r\n").next().is_some_and(|line| line.split(' ').count() == 3), "{text:?}");
    assert_eq!(text.to_ascii_lowercase().matches("\r\nhost:").count(), 1, "{text:?}");
}

/// DNS messages at the snooper and at the forwarding resolver: `(kind, message)…`.
pub fn dns(data: &[u8]) {
    let mut input = Input(data);
    let patterns: Vec<DomainPattern> =
        ["example.com", "*.video.example", "*.b"].map(|text| text.parse().expect("a pattern")).to_vec();
    let mut snooper = DnsSnooper::new(&patterns);
    let mut now = Instant::now();
    let (client, resolver) = (SocketAddr::from(([10, 0, 0, 2], 4000)), SocketAddr::from(([10, 0, 0, 1], 53)));
    let mut query: &[u8] = &[];
    while !input.is_empty() {
        let kind = input.byte();
        let message = if kind & 0x40 == 0 { input.short() } else { input.long() };
        resolver_reads(message, query);
        match kind % 3 {
            0 => {
                snooper.on_query(now, client, resolver, message);
                query = message;
            }
            1 => {
                // The answer to the last query, whatever its ID.
                let mut answer = message.to_vec();
                if kind & 0x80 != 0
                    && let (Some(to), Some(id)) = (answer.get_mut(..2), query.get(..2))
                {
                    to.copy_from_slice(id);
                }
                snooper.on_response(now, resolver, client, &answer);
            }
            _ => now += Duration::from_secs(kind.into()),
        }
    }
    // Nothing is kept for more than an hour.
    now += Duration::from_secs(3600);
    for last in 0..4 {
        let address = [192, 0, 2, last].into();
        assert!(patterns.iter().all(|pattern| !snooper.matches(now, address, pattern)));
    }
}

fn resolver_reads(message: &[u8], query: &[u8]) {
    let _ = is_dns_answer(message, query);
    if let Some(name) = dns_question(message) {
        assert!(has_plausible_counts(message), "memory for counts that cannot be true");
        assert_eq!(name, name.to_ascii_lowercase());
        assert!(!is_dns_answer(message, message), "a query is no answer");
    }
    for (error, code) in dns_errors(message).iter().zip([1, 2]) {
        let Some(error) = error else { continue };
        assert_eq!((error.len(), &error[..2], error[3] & 15), (12, &message[..2], code));
        assert!(error[2] & 0x80 != 0 && dns_question(error).is_none());
    }
}

/// A connection to the forwarding resolver: `answer of its own resolver, bytes of the host`.
pub fn dns_forwarder(data: &[u8]) {
    let mut input = Input(data);
    let answer = input.long();
    let got = dns_connection(input.0, answer).expect("a runtime");
    let (mut queries, mut answers) = (Input(input.0), Input(&got));
    while !answers.is_empty() {
        let (query, given) = (queries.long(), answers.long());
        assert!(dns_question(query).is_some(), "only a query is answered");
        let failed = dns_errors(query)[1].as_deref() == Some(given);
        assert!(failed || is_dns_answer(given, query), "an answer to another query");
    }
}
