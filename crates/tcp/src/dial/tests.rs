use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream as Peer},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use mpvpn_config::ViaProxy;
use mpvpn_identity::{identity::Identity, tls, trust::Trust};
use rustls::{ServerConnection, StreamOwned};

use super::*;

/// Longer than any step takes on the loopback.
const STEP: Duration = Duration::from_secs(10);

/// A TLS server with ALPN h2, and how a client verifies it.
struct Server {
    address: SocketAddr,
    trust: Trust,
    _home: tempfile::TempDir,
}

/// The server's ALPN.
#[derive(Clone, Copy, PartialEq)]
enum Speaks {
    Http2,
    NoAlpn,
    Nothing,
}

fn server(speaks: Speaks) -> Server {
    let home = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(home.path()).unwrap();
    let alpn: &[&[u8]] = if speaks == Speaks::Http2 { &[ALPN] } else { &[] };
    let config = Arc::new(tls::server_config(&identity.clone().into(), alpn).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Ends with the process.
    thread::spawn(move || {
        for peer in listener.incoming() {
            let peer = peer.unwrap();
            if speaks == Speaks::Nothing {
                std::mem::forget(peer);
                continue;
            }
            let mut stream = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), peer);
            let mut word = [0; 4];
            // A client that refuses the certificate closes.
            if stream.read_exact(&mut word).is_ok() {
                stream.write_all(&word).unwrap();
            }
        }
    });
    Server { address, trust: Trust::Pin(vec![identity.fingerprint()]), _home: home }
}

fn to(address: SocketAddr, trust: &Trust) -> DialOptions {
    let refusal = LastRefusal::default();
    let tls = tls::client_config_reporting(trust, None, &[ALPN], &refusal).unwrap();
    DialOptions {
        bind_options: BindOptions {
            name: "lo".to_owned(),
            addresses: vec!["127.0.0.1".parse().unwrap()],
            mark: None,
            protect: None,
            is_from_app: false,
        },
        to: vec![address],
        via: None,
        protocol: Protocol::Mptcp,
        tuning: Tuning::default(),
        tls: Arc::new(tls),
        refusal,
        name: ServerName::try_from("vpn.example").unwrap(),
        limit: STEP,
        sockets: 1,
    }
}

fn run<T>(what: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(what)
}

fn failure(what: &DialOptions) -> DialError {
    run(dial(what)).expect_err("no connection")
}

/// A proxy that sends this response to one client, and relays to `server` if it is a success.
fn proxy(answer: &'static str, server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            client.read_exact(&mut byte).unwrap();
            asked.extend(byte);
        }
        client.write_all(answer.as_bytes()).unwrap();
        let mut far = Peer::connect(server).unwrap();
        let (mut from, mut into) = (client.try_clone().unwrap(), far.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut from, &mut into));
        let _ = io::copy(&mut far, &mut client);
    });
    address
}

#[test]
fn a_server_is_reached_and_what_is_written_arrives() {
    let server = server(Speaks::Http2);
    run(async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut connected = dial(&to(server.address, &server.trust)).await.unwrap();
        connected.stream.write_all(b"ping").await.unwrap();
        let mut word = [0; 4];
        connected.stream.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"ping");
        assert_eq!((connected.peer, connected.proxy), (server.address, None));
        assert_eq!(connected.local.ip(), server.address.ip());
        // The listener here does TCP only, whatever the kernel supports.
        assert_ne!(connected.multipath, MptcpState::Active);
        assert!(connected.tls > Duration::ZERO && connected.connect < STEP);
    });
}

#[test]
fn the_next_address_is_tried_where_nobody_listens_at_the_first() {
    let server = server(Speaks::Http2);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = "[2001:db8::1]:443".parse().unwrap();
    let both = DialOptions { to: vec![unreachable, nobody, server.address], ..to(nobody, &server.trust) };
    assert_eq!(run(dial(&both)).unwrap().peer, server.address);
    let error = failure(&to(nobody, &server.trust)).to_string();
    assert!(error.contains(&nobody.to_string()) && error.contains("nobody listens there"), "{error}");
    assert!(matches!(failure(&to(unreachable, &server.trust)), DialError::NoAddress(_)));
}

#[test]
fn a_certificate_that_is_not_trusted_is_the_reason() {
    let server = server(Speaks::Http2);
    let other = Trust::Pin(vec![mpvpn_identity::identity::Fingerprint([7; 32])]);
    let error = failure(&to(server.address, &other));
    assert!(matches!(error, DialError::Refused(CertificateRefusal::OtherFingerprint { .. })), "{error}");
}

#[test]
fn who_does_not_speak_http2_is_told_apart() {
    let server = server(Speaks::NoAlpn);
    assert!(matches!(failure(&to(server.address, &server.trust)), DialError::NoHttp2));
}

#[test]
fn silence_ends_with_the_step_in_which_it_came() {
    let server = server(Speaks::Nothing);
    let impatient = DialOptions { limit: Duration::from_millis(100), ..to(server.address, &server.trust) };
    assert!(matches!(failure(&impatient), DialError::TimedOut { step: DialStep::Tls, .. }));
    let proxy_target = ProxyTarget { server: "vpn.example:443".parse().unwrap(), credentials: None };
    let proxy_target = DialOptions { via: Some(proxy_target), ..impatient };
    assert!(matches!(failure(&proxy_target), DialError::TimedOut { step: DialStep::Proxy, .. }));
}

#[test]
fn a_server_is_reached_through_a_proxy_that_wants_it() {
    let server = server(Speaks::Http2);
    let via: ViaProxy = "http://anna:secret@proxy:3128".parse().unwrap();
    let proxy_target = |answer| {
        let proxy_target = ProxyTarget { server: via.proxy.clone(), credentials: via.credentials.clone() };
        DialOptions { via: Some(proxy_target), ..to(proxy(answer, server.address), &server.trust) }
    };
    let connected = run(dial(&proxy_target("HTTP/1.1 200 Connection established\r\n\r\n"))).unwrap();
    assert!(connected.proxy.is_some());
    let error = failure(&proxy_target("HTTP/1.1 407 No\r\n\r\n"));
    assert!(matches!(error, DialError::Proxy(ProxyError::CredentialsRefused(407))), "{error}");
}

#[test]
fn an_app_that_does_not_protect_the_socket_sees_nothing_sent() {
    let server = server(Speaks::Http2);
    let mut dial = to(server.address, &server.trust);
    dial.bind_options.protect = Some(Arc::new(|_, name| name != "lo"));
    assert!(matches!(failure(&dial), DialError::Unprotected));
}

#[test]
fn what_gets_no_answer_is_tried_by_as_many_sockets_as_are_allowed() {
    let trust = Trust::Pin(vec![mpvpn_identity::identity::Fingerprint([7; 32])]);
    let tried = |sockets| {
        run(async {
            let full = tokio::net::TcpSocket::new_v4().unwrap();
            full.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            // Connections beyond the backlog are not answered.
            let full = full.listen(0).unwrap();
            let address = full.local_addr().unwrap();
            let mut waiting = Vec::new();
            while let Ok(peer) = timeout(PARALLEL_CONNECT_INTERVAL, TcpStream::connect(address)).await {
                waiting.push(peer.unwrap());
            }
            let count = Arc::new(AtomicUsize::new(0));
            let seen = Arc::clone(&count);
            let mut what =
                DialOptions { sockets, limit: 6 * PARALLEL_CONNECT_INTERVAL, ..to(address, &trust) };
            what.bind_options.protect = Some(Arc::new(move |_, _| seen.fetch_add(1, Relaxed) < usize::MAX));
            let error = dial(&what).await.expect_err("no connection");
            assert!(matches!(error, DialError::TimedOut { step: DialStep::Connect, .. }), "{error}");
            count.load(Relaxed)
        })
    };
    assert_eq!((tried(1), tried(4)), (1, 4));
}
