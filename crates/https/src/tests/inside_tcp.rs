//! TCP connections to a real HTTPS server, whose QUIC socket is an echo server.

use std::{net::Ipv4Addr, sync::mpsc};

use mpvpn_config::{AuthMode, ClientConfig};
use mpvpn_identity::trust::Trust;
use mpvpn_input::values::ServerAddr;
use mpvpn_sockets::bind_options::BindOptions;
use mpvpn_tcp::connection::{
    ConnectRequest, ConnectionEvent, EstablishedConnection, LoopbackSockets, RequestError, TcpConnection,
    TcpTransportConfig, send_connect_udp,
};
use mpvpn_users::{LockedUsers, UserSettings, Users};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UdpSocket,
};
use tokio::{runtime::Handle, task::AbortHandle};

use super::*;

/// The longest wait for anything.
const SOON: Duration = Duration::from_secs(20);

/// A client, and the sockets of its data plane.
struct Stage {
    config: Arc<TcpTransportConfig>,
    to: SocketAddr,
    sockets: LoopbackSockets,
    data_plane_sockets: Vec<UdpSocket>,
    tell: mpsc::Sender<ConnectionEvent>,
    news: mpsc::Receiver<ConnectionEvent>,
}

impl Stage {
    /// With this number of classes.
    async fn new(server: &TestServer, token: &str, classes: usize) -> Self {
        let (host, port) = (server.address.ip().to_string(), server.address.port());
        let server_addr = ServerAddr { host, port };
        let config = ClientConfig::new(server_addr, Trust::Insecure);
        let token = token.parse().ok();
        let config =
            Arc::new(TcpTransportConfig::new(&config, token.as_ref(), Handle::current(), None).unwrap());
        let mut data_plane_sockets = Vec::new();
        for _ in 0..classes {
            data_plane_sockets.push(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        }
        let (tell, news) = mpsc::channel();
        Self {
            config,
            to: server.address,
            sockets: LoopbackSockets::default(),
            data_plane_sockets,
            tell,
            news,
        }
    }

    fn start(&self, failures: u32, before: Option<AbortHandle>) -> TcpConnection {
        let bind_options = BindOptions {
            name: "lo".to_owned(),
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            mark: None,
            protect: None,
            is_from_app: false,
        };
        let data_plane_addrs =
            self.data_plane_sockets.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let sockets = Arc::clone(&self.sockets);
        let request =
            ConnectRequest { bind_options, to: vec![self.to], data_plane_addrs, sockets, failures, dscp: 0 };
        let tell = self.tell.clone();
        TcpConnection::start(&self.config, request, before, move |news| drop(tell.send(news)))
    }

    /// The next event.
    async fn next(&self) -> ConnectionEvent {
        let next = async {
            loop {
                match self.news.try_recv() {
                    Ok(news) => return news,
                    Err(_) => sleep(Duration::from_millis(1)).await,
                }
            }
        };
        timeout(SOON, next).await.unwrap()
    }

    async fn stands(&self) -> EstablishedConnection {
        match self.next().await {
            ConnectionEvent::Established(stands) => stands,
            other => panic!("{other:?}"),
        }
    }

    /// Sends from a class's socket, and checks that the same comes back.
    async fn send_and_receive_echo(&self, class: usize, entry: SocketAddr, text: &[u8]) {
        self.data_plane_sockets[class].send_to(text, entry).await.unwrap();
        let mut buffer = [0; 100];
        let (len, from) =
            timeout(SOON, self.data_plane_sockets[class].recv_from(&mut buffer)).await.unwrap().unwrap();
        assert_eq!((&buffer[..len], from), (text, entry));
    }
}

#[tokio::test]
async fn each_class_has_its_stream_and_a_new_connection_takes_over_under_the_same_addresses() {
    let server = TestServer::start(|_| {});
    let stage = Stage::new(&server, server.token.trim_start_matches("Bearer "), 3).await;
    let first = stage.start(0, None);
    let stands = stage.stands().await;
    assert_eq!((stands.remote, stands.loopback_addrs.len()), (server.address, 3));
    for (class, text) in [b"one", b"two", b"six"].into_iter().enumerate() {
        stage.send_and_receive_echo(class, stands.loopback_addrs[class], text).await;
    }
    let _second = stage.start(1, Some(first.abort_handle()));
    let again = stage.stands().await;
    assert_eq!(again.loopback_addrs, stands.loopback_addrs);
    assert!(again.local != stands.local && !again.multipath, "another connection, of TCP alone: {again:?}");
    stage.send_and_receive_echo(2, stands.loopback_addrs[2], b"new").await;
    assert!(stage.news.try_recv().is_err(), "the first one is over, and nobody asks why");
}

#[tokio::test]
async fn what_went_wrong_is_told_in_words() {
    let server = TestServer::start(|_| {});
    let stage = Stage::new(&server, "mpvpn_wrong", 1).await;
    let _carriage = stage.start(0, None);
    let ConnectionEvent::Failed(reason, _) = stage.next().await else { panic!("it failed") };
    let reason = reason.to_string();
    assert!(reason.contains("401") || reason.contains("404"), "{reason}");
    let file = server._state_dir.path().join("users.toml");
    let alice = LockedUsers::open(&file).unwrap().add("alice", &UserSettings::default()).unwrap();
    LockedUsers::open(&file).unwrap().revoke("alice").unwrap();
    server.credentials.authenticator.users().unwrap().replace(Users::load(&file).unwrap());
    let stage = Stage::new(&server, alice.reveal(), 1).await;
    let _carriage = stage.start(0, None);
    let ConnectionEvent::Failed(RequestError::Refused(reason), _) = stage.next().await else {
        panic!("it is refused")
    };
    assert_eq!(reason, "the access of this user was revoked");
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let stage = Stage { to: nobody, ..stage };
    let _carriage = stage.start(0, None);
    let ConnectionEvent::Failed(reason, _) = stage.next().await else { panic!("it failed") };
    let reason = reason.to_string();
    assert!(reason.contains("refused"), "{reason}");
}

#[tokio::test]
async fn the_end_of_a_server_is_told() {
    let server = TestServer::start(|config| config.auth = AuthMode::None);
    let stage = Stage::new(&server, "", 1).await;
    // A relay in between, which is going to disappear.
    let way = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stage = Stage { to: way.local_addr().unwrap(), ..stage };
    let server = server.address;
    let middle = tokio::spawn(async move {
        let (mut near, _) = way.accept().await.unwrap();
        let mut far = TcpStream::connect(server).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    });
    let _carriage = stage.start(0, None);
    let stands = stage.stands().await;
    stage.send_and_receive_echo(0, stands.loopback_addrs[0], b"here").await;
    middle.abort();
    let ConnectionEvent::Closed(reason) = stage.next().await else { panic!("it ended") };
    assert!(!reason.is_empty());
}

/// RFC 7541 §6.2.3: a literal that is never indexed begins with 0001, then the index of its name in the
/// static table (`authorization` is 23), or 0 and the name, here in Huffman code.
#[tokio::test]
async fn the_secrets_of_a_request_are_never_indexed() {
    let server = TestServer::start(|_| {});
    let stage = Stage::new(&server, server.token.trim_start_matches("Bearer "), 1).await;
    let (near, far) = tokio::io::duplex(1 << 16);
    let (mut requests, connection) = h2::client::handshake(near).await.unwrap();
    let connection = tokio::spawn(connection);
    let recorded = tokio::spawn(first_headers(far));
    while !requests.is_extended_connect_protocol_enabled() {
        sleep(Duration::from_millis(1)).await;
    }
    let _pending = send_connect_udp(&mut requests, &stage.config, 46).await.unwrap();
    let seen = timeout(SOON, recorded).await.unwrap().unwrap();
    let has = |bytes: &[u8]| seen.windows(bytes.len()).any(|window| window == bytes);
    assert!(has(&[0x1f, 0x08]), "authorization in {seen:02x?}");
    assert!(has(&[0x10, 0x84, 0xa6, 0xbe, 0xf5, 0xd5]), "mpvpn in {seen:02x?}");
    connection.abort();
}

/// Allows extended CONNECT as a server; returns the payload of the client's first HEADERS frame.
async fn first_headers(mut stream: tokio::io::DuplexStream) -> Vec<u8> {
    // SETTINGS with SETTINGS_ENABLE_CONNECT_PROTOCOL (8) = 1.
    stream.write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1]).await.unwrap();
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
        stream.read_exact(&mut payload).await.unwrap();
        // HEADERS.
        if head[3] == 1 {
            return payload;
        }
    }
}
