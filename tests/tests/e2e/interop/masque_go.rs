//! quic-go/masque-go: CONNECT-UDP, and nothing else.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use mpvpn_tests::{
    foreign::{Foreign, Program},
    stage::{Family, Place, Stage, inet},
};

const LIMIT: Duration = Duration::from_secs(30);
const OURS: &str = "https://192.0.2.1:4433/.well-known/masque/udp/{target_host}/{target_port}/";

/// A host behind the server that sends every datagram back: where it listens.
fn echo(stage: &Stage, family: Family) -> SocketAddr {
    let any = match family {
        Family::V4 => "0.0.0.0:0",
        Family::V6 => "[::]:0",
    };
    let socket = stage.inside(Place::Inet, || UdpSocket::bind(any)).expect("a free port");
    let port = socket.local_addr().expect("a bound socket").port();
    socket.set_read_timeout(Some(LIMIT)).expect("a socket takes a time-out");
    thread::spawn(move || {
        let mut datagram = [0; 65536];
        while let Ok((length, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..length], from);
        }
    });
    SocketAddr::new(inet(family).parse().expect("an address"), port)
}

fn go_client(stage: &Stage, to: &str, more: &[&str]) -> Foreign {
    let words = [&["client", "-template", OURS, "-to", to], more].concat();
    Foreign::start(stage, Place::Client, Program::Masque, &words)
}

#[test]
fn its_client_gets_every_datagram_back() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    for family in [Family::V4, Family::V6] {
        let host = echo(&stage, family).to_string();
        for size in ["1", "1000", "1200"] {
            let said = go_client(&stage, &host, &["-count", "20", "-size", size]).succeed(LIMIT);
            assert!(said.contains("echoed 20"), "{said}");
        }
    }
}

#[test]
fn its_client_learns_why_it_is_refused() {
    let stage = Stage::two_links();
    let _server = stage.server(&["--auth", "token", "--state-dir", "state"]);
    let token = fs::read_to_string(stage.dir().join("state/client-token")).expect("a token");
    let host = echo(&stage, Family::V4).to_string();
    let said = go_client(&stage, &host, &[]).fail(LIMIT);
    assert!(said.contains("refused: 401") || said.contains("refused: 407"), "{said}");
    let said = go_client(&stage, "127.0.0.1:53", &["-token", token.trim()]).fail(LIMIT);
    assert!(said.contains("refused: 403") && said.contains("destination_ip_prohibited"), "{said}");
    go_client(&stage, &host, &["-token", token.trim()]).succeed(LIMIT);
}
