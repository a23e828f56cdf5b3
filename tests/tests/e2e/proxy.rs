//! An ordinary user has no TUN, but a proxy for apps.

use std::{
    io::{Read, Write},
    net::{SocketAddrV4, TcpStream, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    home::Home,
    http::{Download, MB, Site},
    machine_share::{MachineShare, Share},
    stage::{Family, Peer, Place, SERVER, Stage, inet},
};

const LIMIT: Duration = Duration::from_secs(60);
const SOCKS5: &str = "127.0.0.1:1080";
const HTTP: &str = "127.0.0.1:8080";
/// Of its local API.
const SOCKET: &str = "client-proxy.sock";

/// A proxy of an ordinary user over both links, without waiting for it.
fn start(stage: &Stage, home: &Home, more: &[&str]) -> Peer {
    // Both links have default routes.
    let mut words = vec!["proxy", "--server", SERVER, "--insecure"];
    words.extend(["--socks5", SOCKS5, "--http", HTTP]);
    words.extend(more);
    stage.start_as_user(Place::Client, home, &words, &home.file(SOCKET))
}

fn code_of_curl(stage: &Stage, words: &[&str]) -> (Option<i32>, String) {
    let mut all = vec!["curl", "-gsS", "--max-time", "20"];
    all.extend(words);
    let output = stage.attempt(Place::Client, Duration::from_secs(30), &all);
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn apps_of_an_ordinary_user_fetch_every_byte_over_both_links() {
    let _share = MachineShare::take(Share::Percent(100));
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let home = Home::new(&stage);
    let mut proxy = start(&stage, &home, &[]).up();
    proxy.until_path("eth2", "active", Duration::from_secs(10));
    let shown = stage.mpvpn(Place::Client, &["status", "--api-socket", &home.file(SOCKET).to_string_lossy()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    println!("{shown}");
    assert!(shown.contains(SERVER) && shown.contains("eth1") && shown.contains("eth2"), "{shown}");
    assert!(!Path::new("/sys/class/net/mpvpn0").exists());
    let site = Site::start(&stage, Place::Inet);
    let socks = ["--socks5-hostname", SOCKS5];
    let (url, tunnel) = (format!("http://{HTTP}"), "--proxytunnel");
    for words in [&socks[..], &["-x", &url], &["-x", &url, tunnel]] {
        for family in [Family::V4, Family::V6] {
            Download::start(&stage, &site, &inet(family), 10 * MB, LIMIT, words).finish();
        }
    }
    let before = stage.counters(Place::Client, "eth2").0;
    Download::start(&stage, &site, &inet(Family::V4), 20 * MB, LIMIT, &socks).finish();
    let carried = stage.counters(Place::Client, "eth2").0 - before;
    assert!(carried > 5 * MB, "the second link carried {carried} bytes");
    assert!(proxy.terminate().success());
    assert!(!home.file(SOCKET).exists());
}

#[test]
fn a_cut_link_does_not_stop_a_download() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_slower_links();
    let _server = stage.server(&[]);
    let home = Home::new(&stage);
    let proxy = start(&stage, &home, &[]).up();
    proxy.until_path("eth2", "active", Duration::from_secs(10));
    let site = Site::start(&stage, Place::Inet);
    let words = ["--socks5-hostname", SOCKS5];
    let download = Download::start(&stage, &site, &inet(Family::V4), 50 * MB, LIMIT, &words);
    thread::sleep(Duration::from_secs(1));
    stage.link(1).cut();
    let streams = proxy.status()["flows"]["stream"].as_u64();
    assert_eq!(streams, Some(1));
    thread::sleep(Duration::from_secs(3));
    stage.link(1).restore();
    download.finish();
}

/// Sends back what comes, until told to stop, or for a minute.
fn echo(socket: &UdpSocket, stop: &AtomicBool) {
    let end = Instant::now() + LIMIT;
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) && Instant::now() < end {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..length], from).expect("an answer");
        }
    }
}

/// An app with a SOCKS5 association that asks the IPv4 address of `to` until it gets an answer; how many answers of 50
/// questions it gets then.
fn ask_by_udp(to: SocketAddrV4) -> usize {
    let mut control = TcpStream::connect(SOCKS5).expect("the proxy listens");
    control.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    control.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).expect("a request");
    let mut reply = [0; 12];
    control.read_exact(&mut reply).expect("an answer");
    assert_eq!(reply[..10], [5, 0, 5, 0, 0, 1, 127, 0, 0, 1]);
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(("127.0.0.1", u16::from_be_bytes([reply[10], reply[11]]))).expect("an address");
    socket.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    let mut buffer = [0; 2048];
    let mut ask = |number: u8| {
        let question =
            [&[0, 0, 0, 1][..], &to.ip().octets(), &to.port().to_be_bytes(), &[number; 1000]].concat();
        socket.send(&question).expect("a question");
        let length = socket.recv(&mut buffer).unwrap_or(0);
        assert!(length == 0 || buffer[..length] == question, "another answer");
        length > 0
    };
    assert!((0..20).any(|_| ask(255)), "no answer");
    (0..50).filter(|number| ask(*number)).count()
}

#[test]
fn datagrams_of_an_app_reach_their_target_and_answers_come_back() {
    let stage = Stage::two_links();
    let server = stage.server(&[]);
    let home = Home::new(&stage);
    let proxy = start(&stage, &home, &[]).up();
    proxy.until_path("eth2", "active", Duration::from_secs(10));
    let target = stage.inside(Place::Inet, || UdpSocket::bind("0.0.0.0:5353").expect("a socket"));
    let to = SocketAddrV4::new(inet(Family::V4).parse().expect("an address"), 5353);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| echo(&target, &stop));
        let answers = stage.inside(Place::Client, || ask_by_udp(to));
        stop.store(true, Ordering::Relaxed);
        assert!(answers >= 48, "{answers} of 50");
    });
    let over = |status: &serde_json::Value| match status["flows"]["udp"].as_u64() {
        Some(0) => Ok(()),
        other => Err(format!("{other:?} flows")),
    };
    server.until(Duration::from_secs(5), "the end of the flow with the app's connection", over);
}

#[test]
fn an_app_learns_at_once_why_it_gets_no_connection() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let home = Home::new(&stage);
    let _proxy = start(&stage, &home, &[]).up();
    let start = Instant::now();
    let refused = format!("http://{}:9/", inet(Family::V4));
    let (code, said) = code_of_curl(&stage, &["--socks5-hostname", SOCKS5, &refused]);
    // CURLE_PROXY.
    assert_eq!(code, Some(97), "{said}");
    let proxy = format!("http://{HTTP}");
    let (code, said) = code_of_curl(&stage, &["-x", &proxy, "-w", "%{http_code}", &refused]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("nobody listens there") && said.ends_with("502"), "{said}");
    let (code, said) = code_of_curl(&stage, &["-x", &proxy, "-p", &refused]);
    assert!(code != Some(0) && said.contains("502"), "{code:?}: {said}");
    // The server itself is no destination.
    let (code, said) = code_of_curl(&stage, &["-x", &proxy, "-w", "%{http_code}", "http://127.0.0.1/"]);
    assert_eq!((code, &said[said.len() - 3..]), (Some(0), "403"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_wrong_token_and_a_missing_address_end_it_with_the_reason() {
    let stage = Stage::two_links();
    let home = Home::new(&stage);
    let _server = stage.server(&["--auth", "token", "--state-dir", "state"]);
    let mut proxy = start(&stage, &home, &["--token", "0123456789abcdef0123456789abcdef"]);
    assert_eq!(proxy.wait(Duration::from_secs(15)).code(), Some(1));
    assert!(proxy.log().contains("refuses the token"), "{}", proxy.log());
    let output = stage.mpvpn(Place::Client, &["proxy", "--server", SERVER, "--insecure"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("nothing says where apps find the proxy"), "{text}");
}
