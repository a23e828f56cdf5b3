//! quic-go/masque-go, which implements CONNECT-UDP only.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use mpvpn_tests::{
    interop_peer::{InteropPeer, Program},
    testbed::{Family, Host, Testbed},
};

use super::echo_udp_behind_server;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(30);
const OUR_TEMPLATE: &str = "https://192.0.2.1:4433/.well-known/masque/udp/{target_host}/{target_port}/";
const GO_SERVER: &str = "192.0.2.1:4434";
const GO_TEMPLATE: &str = "https://192.0.2.1:4434/.well-known/masque/udp/{target_host}/{target_port}/";

fn go_client(testbed: &Testbed, to: &str, more: &[&str]) -> InteropPeer {
    let args = [&["client", "-template", OUR_TEMPLATE, "-to", to], more].concat();
    InteropPeer::start(testbed, Host::Client, Program::Masque, &args)
}

#[test]
fn the_go_client_gets_every_datagram_back() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    for family in [Family::V4, Family::V6] {
        let host = echo_udp_behind_server(&testbed, family).to_string();
        for size in ["1", "1000", "1200"] {
            let output =
                go_client(&testbed, &host, &["-count", "20", "-size", size]).wait_for_success(TIMEOUT);
            assert!(output.contains("echoed 20"), "{output}");
        }
    }
}

#[test]
fn the_go_client_gets_the_reason_of_a_refusal() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    let host = echo_udp_behind_server(&testbed, Family::V4).to_string();
    let output = go_client(&testbed, &host, &[]).wait_for_failure(TIMEOUT);
    assert!(output.contains("refused: 405"), "{output}");
    let output = go_client(&testbed, &host, &["-token", "0123456789abcdef"]).wait_for_failure(TIMEOUT);
    assert!(output.contains("refused: 401") || output.contains("refused: 407"), "{output}");
    let output = go_client(&testbed, "127.0.0.1:53", &["-token", token.trim()]).wait_for_failure(TIMEOUT);
    assert!(output.contains("refused: 403") && output.contains("destination_ip_prohibited"), "{output}");
    go_client(&testbed, &host, &["-token", token.trim()]).wait_for_success(TIMEOUT);
}

/// An app's UDP association with a SOCKS5 proxy (RFC 1928 §7), which lasts as long as the TCP connection.
struct Association {
    _connection: TcpStream,
    socket: UdpSocket,
}

impl Association {
    fn new(testbed: &Testbed, proxy: &str) -> Self {
        testbed.in_namespace(Host::Client, || {
            let mut connection = TcpStream::connect(proxy).expect("a proxy");
            connection.set_read_timeout(Some(TIMEOUT)).expect("a socket takes a time-out");
            connection.write_all(&[5, 1, 0]).expect("room for bytes");
            let mut choice = [0; 2];
            connection.read_exact(&mut choice).expect("a choice");
            assert_eq!(choice, [5, 0]);
            connection.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).expect("room for bytes");
            let mut answer = [0; 10];
            connection.read_exact(&mut answer).expect("an answer");
            assert_eq!(answer[..4], [5, 0, 0, 1], "{answer:?}");
            let port = u16::from_be_bytes([answer[8], answer[9]]);
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
            socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket takes a time-out");
            socket.connect(("127.0.0.1", port)).expect("a port to send to");
            Self { _connection: connection, socket }
        })
    }

    /// Sends a datagram, and checks its echo.
    fn exchange(&self, to: SocketAddr, text: &[u8]) {
        let SocketAddr::V4(v4) = to else { panic!("an IPv4 address, not {to}") };
        let head = [&[0, 0, 0, 1][..], &v4.ip().octets(), &v4.port().to_be_bytes()].concat();
        self.socket.send(&[&head[..], text].concat()).expect("a datagram leaves");
        let mut back = [0; 2048];
        let length = self.socket.recv(&mut back).expect("an answer");
        assert_eq!(back[..length], [&head[..], text].concat());
    }
}

/// Starts masque-go's proxy, which carries UDP only.
fn go_proxy(testbed: &Testbed) -> InteropPeer {
    let args = [
        "proxy",
        "-listen",
        GO_SERVER,
        "-cert",
        "server.crt",
        "-key",
        "server.key",
        "-template",
        GO_TEMPLATE,
    ];
    let mut server = InteropPeer::start(testbed, Host::Server, Program::Masque, &args);
    server.wait_for_line("up");
    server
}

#[test]
fn udp_of_a_client_with_tun_travels_over_the_go_proxy() {
    let testbed = Testbed::two_links();
    let _server = go_proxy(&testbed);
    let client = testbed.client(&["--server", GO_SERVER, "--lane", "stream"]);
    let host = echo_udp_behind_server(&testbed, Family::V4);
    let app = testbed.in_namespace(Host::Client, || UdpSocket::bind("0.0.0.0:0")).expect("a free port");
    app.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket takes a time-out");
    for text in [&b"a question"[..], b"another", &[7; 1000]] {
        app.send_to(text, host).expect("a datagram leaves");
        let mut back = [0; 2048];
        let (length, from) = app.recv_from(&mut back).expect("an answer to the first question");
        assert_eq!((&back[..length], from), (text, host));
    }
    let list = testbed
        .mpvpn(Host::Client, &["status", "--flows", "--api-socket", &client.socket().to_string_lossy()]);
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(list.contains(&host.to_string()) && list.contains("the server carries no packets"), "{list}");
}

#[test]
fn udp_of_an_app_travels_over_the_go_proxy() {
    const SOCKS5: &str = "127.0.0.1:1080";
    let testbed = Testbed::two_links();
    let _server = go_proxy(&testbed);
    let args = ["proxy", "--server", GO_SERVER, "--insecure", "--socks5", SOCKS5];
    let _proxy = testbed.start(Host::Client, &args).wait_until_up();
    let host = echo_udp_behind_server(&testbed, Family::V4);
    let app = Association::new(&testbed, SOCKS5);
    for text in [&b"a question"[..], b"another", &[7; 1000]] {
        app.exchange(host, text);
    }
}
