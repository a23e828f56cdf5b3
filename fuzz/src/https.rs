//! The TCP side of a server, inside TLS: a site of any kind, the gateway to the server's own QUIC, and QUIC
//! inside TCP.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    path::Path,
    sync::{Arc, LazyLock, Mutex, Once, PoisonError},
    thread,
};

use bytes::BytesMut;
use mpvpn_config::{AuthMode, ServerConfig, Site, SiteContent};
use mpvpn_https::untrusted::{PlainHttpsServer, PlainProtocol};
use mpvpn_masque::request::Rejection;
use mpvpn_quic::{OwnSockets, ServerSetup, TransportOptions};
use mpvpn_tunnel::{
    Authenticate, AuthenticatedUser, RelayRead, Server, ServerConfig as TunnelConfig, ServerEvent, TunnelMode,
};
use mpvpn_types::{Duration, Instant};
use mpvpn_users::credentials::Credentials;

use crate::{input::Input, users::folder};

/// Texts of files that no visitor sees: a hidden one among the pages, and one above them.
const SECRETS: [&[u8]; 2] = [b"nobody sees this", b"mpvpn-fuzz"];

/// `flags, answer of the upstream, bytes of a client`.
pub fn https_front(data: &[u8]) {
    /// Answers have some hundred bytes for each request of a few dozen.
    const MAX_ANSWER_PER_BYTE: usize = 100;
    /// A client that has ended its side is waited for no longer than this; the machine may be busy.
    const LONGEST: Duration = Duration::from_secs(20);
    /// Answers come within some milliseconds. Longer: fewer inputs a second. Shorter: requests without
    /// answers.
    const QUIET: Duration = Duration::from_millis(5);
    if data.is_empty() {
        // libFuzzer does not look at the first input, which is empty: the servers are made with the next one.
        return;
    }
    // Log lines about an input are formatted, and written nowhere.
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        let log = tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG);
        let _ = log.with_writer(std::io::sink).try_init();
    });
    let mut input = Input(data);
    let flags = input.byte();
    let protocol =
        [PlainProtocol::Http1, PlainProtocol::Http2, PlainProtocol::Drafts][usize::from(flags & 3) % 3];
    let site = usize::from(flags >> 2 & 3) % 3;
    let is_stranger = flags & 0x80 == 0;
    let upstream = if site == UPSTREAM { input.short() } else { &[] };
    let servers = if is_stranger { &SERVERS.0 } else { &SERVERS.1 };
    let max = 4096 + MAX_ANSWER_PER_BYTE * input.0.len() + 64 * upstream.len();
    let preface: &[u8] =
        if protocol == PlainProtocol::Http2 { b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" } else { b"" };
    let sent = [preface, input.0].concat();
    upstream.clone_into(&mut ANSWER.lock().unwrap_or_else(PoisonError::into_inner));
    // With the end of the connection all its requests end that have no answer yet, if it is one of HTTP/2.
    let quiet = if protocol == PlainProtocol::Http1 { Duration::ZERO } else { QUIET };
    let got = servers[site].serve(protocol, &sent, max + 1, quiet, LONGEST).expect("sockets");
    let got = got.expect("a connection ends after its client has ended it");
    assert!(got.len() <= max, "{} bytes of answers to {} bytes", got.len(), sent.len());
    for secret in SECRETS {
        // An upstream or an echo may send what the input has.
        let is_shown = |bytes: &[u8]| bytes.windows(secret.len()).any(|shown| shown == secret);
        assert!(!is_shown(&got) || is_shown(data), "{}", got.escape_ascii());
    }
    match protocol {
        PlainProtocol::Http2 => assert_is_http2(&got),
        _ if is_stranger && site == 0 && !got.is_empty() && !got.starts_with(&[0, 0]) => {
            let status = got.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..)).unwrap_or_default();
            let is_refusal = REFUSALS.iter().any(|refusal| status.starts_with(refusal));
            assert!(is_refusal, "{}", got.escape_ascii());
        }
        _ => {}
    }
}

/// How statuses for somebody without a token begin: also for encodings and versions that are none, as Caddy
/// has them.
const REFUSALS: [&[u8]; 3] = [b"4", b"501", b"505"];

/// Whole frames of RFC 9113 §4.1, none longer than a client allows that said nothing.
fn assert_is_http2(mut got: &[u8]) {
    while let Some((&[a, b, c, kind, ..], _)) = got.split_first_chunk::<9>() {
        let len = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        assert!(kind <= 9 && len <= 1 << 24, "frame of type {kind} with {len} bytes");
        let Some(rest) = got.get(9 + len..) else { return };
        got = rest;
    }
}

/// The number of the site with an upstream.
const UPSTREAM: usize = 2;

/// Three servers ask for tokens, the others accept everybody: without pages, with files, and with an
/// upstream.
static SERVERS: LazyLock<(Vec<PlainHttpsServer>, Vec<PlainHttpsServer>)> = LazyLock::new(|| {
    let upstream = upstream();
    let servers = |auth: AuthMode| -> Vec<PlainHttpsServer> {
        let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("pages");
        [SiteContent::Nothing, SiteContent::Root(pages), SiteContent::Upstream(upstream.to_string())]
            .into_iter()
            .map(|content| server(auth, content))
            .collect()
    };
    (servers(AuthMode::Token), servers(AuthMode::None))
});

fn server(auth: AuthMode, content: SiteContent) -> PlainHttpsServer {
    let home = folder();
    let hide = auth == AuthMode::Token && content != SiteContent::Nothing;
    let config = ServerConfig {
        auth,
        old_clients: true,
        site: Site { content, hide, ..Site::default() },
        state_dir: home.path().into(),
        ..ServerConfig::default()
    };
    let credentials = Credentials::load(&config).expect("credentials in a new folder");
    let tls = credentials.server_tls(&[b"h3"]).expect("a configuration");
    let quic = echo_server(
        ServerSetup::new(Arc::new(tls), &TransportOptions::default(), &[3; 32]).expect("a setup"),
    );
    PlainHttpsServer::new(&config, &credentials, quic).expect("a server")
}

/// The next answer of the upstream.
static ANSWER: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// A web server that reads the head of a request, and answers what the input says.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("a port");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
            let mut head = [0; 4096];
            if stream.read(&mut head).is_ok_and(|count| count > 0) {
                let answer = ANSWER.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let _ = stream.write_all(&answer);
            }
        }
    });
    address
}

/// Accepts everybody, from any socket.
#[derive(Debug)]
struct Everybody;

impl Authenticate for Everybody {
    fn authenticate(&self, _: Option<&str>, _: Option<&[u8]>) -> Result<AuthenticatedUser, Rejection> {
        Ok("user".into())
    }
}

impl OwnSockets for Everybody {
    fn contains(&self, _: SocketAddr) -> bool {
        true
    }
}

/// A server of this project on the loopback whose targets send back what they get.
fn echo_server(setup: ServerSetup) -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = socket.local_addr().expect("a port");
    let config = TunnelConfig {
        setup: setup.with_own_sockets(Arc::new(Everybody)),
        mode: TunnelMode::Packets,
        subnet: "10.0.0.0/24".parse().expect("a subnet"),
        subnet6: None,
        routes: vec!["0.0.0.0/0".parse().expect("a network")],
        offers_streams: true,
        disabled_extensions: &[],
        dns: vec![IpAddr::from([10, 0, 0, 1])],
        dns_domain: None,
        auth: Box::new(Everybody),
        hide_wrong_credentials: false,
        max_clients: 64,
        new_secret: Box::new(|| [9; 16]),
    };
    thread::spawn(move || run_echo_server(&socket, Server::new(config)));
    address
}

fn run_echo_server(socket: &UdpSocket, mut server: Server) {
    let (mut buffer, mut packets) = (vec![0; 65_536], Vec::new());
    loop {
        let before = Instant::now();
        let idle = server.poll_timeout().map_or(Duration::MAX, |at| at.saturating_duration_since(before));
        let wait = idle.clamp(Duration::from_millis(1), Duration::from_secs(1));
        let _ = socket.set_read_timeout(Some(wait));
        let received = socket.recv_from(&mut buffer);
        let now = Instant::now();
        if let Ok((count, from)) = received {
            server.handle_datagram(now, Some(from.ip()), from, 0, BytesMut::from(&buffer[..count]));
        }
        server.handle_batch(now);
        if server.poll_timeout().is_some_and(|at| at <= now) {
            server.handle_timeout(now);
        }
        while let Some(event) = server.poll_event() {
            match event {
                ServerEvent::Connect { relay, .. } => server.relay_opened(relay),
                ServerEvent::ConnectUdp { udp, .. } => server.udp_opened(udp),
                ServerEvent::RelayReadable(relay) => loop {
                    match server.relay_read(now, relay) {
                        RelayRead::Data(data) => server.relay_write(now, relay, data),
                        RelayRead::Finished => break server.relay_finish(relay),
                        RelayRead::Blocked | RelayRead::Broken => break,
                    }
                },
                _ => {}
            }
        }
        while let Some((udp, payload)) = server.poll_udp() {
            server.udp_send(now, udp, &payload);
        }
        while let Some(packet) = server.poll_tun() {
            server.recycle(packet);
        }
        while server.poll_change().is_some() || server.poll_closed_connection().is_some() {}
        while let Some(transmit) = server.poll_transmit(now, &mut packets) {
            for payload in
                packets[..transmit.size].chunks(transmit.segment_size.unwrap_or(transmit.size).max(1))
            {
                let _ = socket.send_to(payload, transmit.remote);
            }
            packets.clear();
        }
    }
}
