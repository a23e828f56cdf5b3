//! An HTTPS server with a real TLS client. The server's QUIC socket is an echo server.

mod access_ends;
mod access_orders;
mod client_ca;
mod floods;
mod inside_tcp;
mod sites;

use std::net::UdpSocket;

use http::StatusCode;
use mpvpn_config::ServerConfig;
use mpvpn_identity::{cert_files::CertFiles, tls::LastRefusal, trust::Trust};
use mpvpn_masque::{
    capsule::{Capsule, CapsuleReader, MAX_DATAGRAM_LEN, encode_datagram_header},
    connect_udp::path,
};
use mpvpn_tcp::h2_stream::H2Stream;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::*;

/// The longest wait for anything.
const SOON: Duration = Duration::from_secs(20);

/// A running HTTPS server.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) token: String,
    context: Arc<ServerContext>,
    credentials: Credentials,
    _state_dir: tempfile::TempDir,
}

impl TestServer {
    /// Serves at a free port until the test's runtime ends.
    pub(crate) fn start(change: impl FnOnce(&mut ServerConfig)) -> Self {
        // Clients connect from 127.0.0.1, so none of them occupies this TCP port.
        let echo = UdpSocket::bind("127.0.1.1:0").unwrap();
        let address = echo.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((count, from)) = echo.recv_from(&mut buffer) {
                // Ends with the process; until then the peer may be gone.
                let _ = echo.send_to(&buffer[..count], from);
            }
        });
        let home = tempfile::tempdir().unwrap();
        let mut config =
            ServerConfig { listen: vec![address], state_dir: home.path().into(), ..ServerConfig::default() };
        change(&mut config);
        let credentials = Credentials::load(&config).unwrap();
        let front = HttpsServer::bind(
            &config,
            &credentials,
            Site::new(&config.site).unwrap(),
            &LoopbackClients::default(),
            &watch::Sender::new(()),
        )
        .unwrap();
        let context = Arc::clone(&front.listeners[0].1.context);
        tokio::spawn(front.serve());
        let token = credentials.token.as_ref().map_or_else(String::new, |token| token.authorization());
        Self { address, token, context, credentials, _state_dir: home }
    }

    /// A TLS connection with this ALPN.
    pub(super) async fn tls(&self, alpn: &[u8]) -> TlsStream<TcpStream> {
        self.tls_with(None, alpn).await
    }

    /// The same of a client that has a certificate.
    async fn tls_with(&self, own: Option<&CertFiles>, alpn: &[u8]) -> TlsStream<TcpStream> {
        self.tls_over(TcpStream::connect(self.address).await.unwrap(), own, alpn).await
    }

    async fn tls_over(&self, tcp: TcpStream, own: Option<&CertFiles>, alpn: &[u8]) -> TlsStream<TcpStream> {
        let trust = Trust::Pin(vec![self.credentials.identity.fingerprint()]);
        let config =
            mpvpn_identity::tls::client_config_reporting(&trust, own, &[alpn], &LastRefusal::default());
        let config = config.unwrap();
        let name = ServerName::try_from("vpn.example").unwrap();
        let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(alpn));
        tls
    }

    /// An HTTP/2 connection, once the server's SETTINGS have arrived.
    pub(super) async fn http2(&self) -> h2::client::SendRequest<Bytes> {
        Self::http2_over(self.tls(b"h2").await).await
    }

    /// The same for a client that a load balancer announces.
    pub(super) async fn http2_of(&self, client: &str) -> h2::client::SendRequest<Bytes> {
        let mut tcp = TcpStream::connect(self.address).await.unwrap();
        let (ip, port) = client.split_once(':').unwrap();
        tcp.write_all(format!("PROXY TCP4 {ip} 192.0.2.2 {port} 443\r\n").as_bytes()).await.unwrap();
        Self::http2_over(self.tls_over(tcp, None, b"h2").await).await
    }

    async fn http2_over(tls: TlsStream<TcpStream>) -> h2::client::SendRequest<Bytes> {
        let (client, connection) = h2::client::handshake(tls).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let asked = Instant::now();
        while !client.is_extended_connect_protocol_enabled() {
            assert!(asked.elapsed() < SOON, "the server does not offer extended CONNECT");
            sleep(Duration::from_millis(5)).await;
            client = client.ready().await.unwrap();
        }
        client
    }

    /// The path of CONNECT-UDP to the server itself.
    pub(super) fn self_target_path(&self) -> String {
        let target = self.address.to_string().parse().unwrap();
        path(&target)
    }

    /// A CONNECT-UDP request to the server itself.
    pub(super) fn self_target_request(&self, credentials: Option<&str>) -> Request<()> {
        let uri = format!("https://{}{}", self.address, self.self_target_path());
        let mut request = Request::connect(uri).header("capsule-protocol", "?1");
        if let Some(credentials) = credentials {
            request = request.header("authorization", credentials);
        }
        let mut request = request.body(()).unwrap();
        request.extensions_mut().insert(h2::ext::Protocol::from_static("connect-udp"));
        request
    }

    /// Sends an HTTP/1.1 request, and returns the head of the response.
    pub(super) async fn http1(&self, head: &str) -> (String, TlsStream<TcpStream>) {
        Self::http1_over(self.tls(b"http/1.1").await, head).await
    }

    async fn http1_over(mut tls: TlsStream<TcpStream>, head: &str) -> (String, TlsStream<TcpStream>) {
        tls.write_all(format!("{head}\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(timeout(SOON, tls.read_u8()).await.unwrap().unwrap());
        }
        (String::from_utf8(answer).unwrap(), tls)
    }
}

/// Sends datagrams through an accepted request, and reads their echoes.
async fn send_and_receive_echo(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let sizes = [1200, 1, 1452, 1452, 1452, 300];
    let mut out = bytes::BytesMut::new();
    for (number, size) in sizes.into_iter().enumerate() {
        encode_datagram_header(size + 1, &mut out);
        out.extend_from_slice(&[0]);
        out.extend_from_slice(&vec![number as u8; size]);
    }
    stream.write_all(&out).await.unwrap();
    stream.flush().await.unwrap();
    let mut reader = CapsuleReader::datagrams(MAX_DATAGRAM_LEN);
    let mut buffer = vec![0; 65536];
    let mut got = Vec::new();
    while got.len() < sizes.len() {
        let count = timeout(SOON, stream.read(&mut buffer)).await.expect("all come back").unwrap();
        assert_ne!(count, 0, "the stream goes on");
        reader.push(&buffer[..count]);
        while let Some(capsule) = reader.next().unwrap() {
            let Capsule::Datagram(value) = capsule else { panic!("{capsule:?}") };
            assert_eq!(value[0], 0, "the context of payloads");
            assert!(value[1..].iter().all(|byte| usize::from(*byte) == got.len()));
            got.push(value.len() - 1);
        }
    }
    assert_eq!(got, sizes);
}

#[tokio::test]
async fn quic_packets_travel_inside_http2() {
    let server = TestServer::start(|_| {});
    let mut client = server.http2().await;
    let (response, send) =
        client.send_request(server.self_target_request(Some(&server.token)), false).unwrap();
    let response = timeout(SOON, response).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["capsule-protocol"], "?1");
    send_and_receive_echo(H2Stream::new(send, response.into_body())).await;
}

#[tokio::test]
async fn quic_packets_travel_inside_an_upgraded_connection() {
    let server = TestServer::start(|_| {});
    let head = format!(
        "GET {} HTTP/1.1\r\nhost: {}\r\nconnection: Upgrade\r\nupgrade: connect-udp\r\ncapsule-protocol: ?1\r\n\
         authorization: {}",
        server.self_target_path(),
        server.address,
        server.token
    );
    let (answer, tls) = server.http1(&head).await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.contains("\r\nUpgrade: connect-udp\r\n"), "{answer}");
    assert!(answer.contains("\r\nCapsule-Protocol: ?1\r\n"), "{answer}");
    send_and_receive_echo(tls).await;
}

#[tokio::test]
async fn who_shows_nothing_sees_a_site_and_who_shows_something_wrong_sees_why() {
    let server = TestServer::start(|_| {});
    let mut client = server.http2().await;
    let get = Request::get(format!("https://{}/", server.address)).body(()).unwrap();
    let mut statuses = Vec::new();
    for request in [get, server.self_target_request(None), server.self_target_request(Some("Bearer nobody"))]
    {
        let (response, _send) = client.send_request(request, true).unwrap();
        let response = timeout(SOON, response).await.unwrap().unwrap();
        assert!(response.headers().contains_key("date"), "{response:?}");
        assert!(response.headers().contains_key("server"), "{response:?}");
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [404, 405, 401]);

    let (answer, mut tls) = server.http1("GET / HTTP/1.1\r\nhost: x\r\nconnection: close").await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    let mut page = String::new();
    tls.read_to_string(&mut page).await.unwrap();
    assert_eq!(page, "");
    let (answer, _) = server.http1("CONNECT 192.0.2.1:80 HTTP/1.1\r\nhost: 192.0.2.1:80").await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
}

#[tokio::test]
async fn a_taken_port_is_an_error_with_a_way_out() {
    let server = TestServer::start(|_| {});
    let home = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        listen: vec![server.address],
        state_dir: home.path().into(),
        ..ServerConfig::default()
    };
    let credentials = Credentials::load(&config).unwrap();
    let RunError::Control(error) = HttpsServer::bind(
        &config,
        &credentials,
        Site::new(&config.site).unwrap(),
        &LoopbackClients::default(),
        &watch::Sender::new(()),
    )
    .unwrap_err() else {
        panic!("not an error that knows what to do next")
    };
    assert!(error.to_string().starts_with(&format!("cannot listen on TCP {}: ", server.address)), "{error}");
    let port = server.address.port();
    assert!(error.next_step().contains(&format!("`ss -ltnp sport = :{port}`")), "{}", error.next_step());
    assert!(error.next_step().contains("--tcp off"), "{}", error.next_step());
}

#[tokio::test]
async fn a_head_without_end_is_waited_for_only_so_long() {
    let server = TestServer::start(|_| {});
    let mut tls = server.tls(b"http/1.1").await;
    tls.write_all(b"GET / HTTP/1.1\r\nx: ").await.unwrap();
    let endless = vec![b'x'; 1 << 20];
    // The server may stop reading at any time.
    let _ = tls.write_all(&endless).await;
    let mut answer = Vec::new();
    let _ = timeout(SOON, tls.read_to_end(&mut answer)).await.expect("the connection is closed");
    assert!(answer.starts_with(b"HTTP/1.1 431 ") || answer.is_empty(), "{}", answer.escape_ascii());
}
