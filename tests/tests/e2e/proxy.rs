//! `mpvpn proxy`: an unprivileged client without a TUN device.

use std::{
    io::{Read, Write},
    net::{SocketAddrV4, TcpStream, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    machine_share::{MachineShare, Share},
    testbed::{Family, Host, MpvpnProcess, SERVER, Testbed, inet},
    user_home::UserHome,
};

/// Limit of a transfer. Longer than on any busy machine; only a failing test takes that long.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);
const SOCKS5: &str = "127.0.0.1:1080";
const HTTP: &str = "127.0.0.1:8080";
/// File name of the API socket.
const SOCKET_FILE: &str = "client-proxy.sock";

/// Starts a proxy of an unprivileged user over both links without waiting.
fn start(testbed: &Testbed, home: &UserHome, more: &[&str]) -> MpvpnProcess {
    // Both links have default routes.
    let mut args = vec!["proxy", "--server", SERVER, "--insecure"];
    args.extend(["--socks5", SOCKS5, "--http", HTTP]);
    args.extend(more);
    testbed.start_as_user(Host::Client, home, &args, &home.file(SOCKET_FILE))
}

fn run_curl(testbed: &Testbed, args: &[&str]) -> (Option<i32>, String) {
    let mut all = vec!["curl", "-gsS", "--max-time", "20"];
    all.extend(args);
    let output = testbed.output_of(Host::Client, Duration::from_secs(30), &all);
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn apps_of_an_unprivileged_user_download_every_byte_over_both_links() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let home = UserHome::new(&testbed);
    let mut proxy = start(&testbed, &home, &[]).wait_until_up();
    proxy.wait_for_path("eth2", "active", Duration::from_secs(10));
    let shown =
        testbed.mpvpn(Host::Client, &["status", "--api-socket", &home.file(SOCKET_FILE).to_string_lossy()]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    println!("{shown}");
    assert!(shown.contains(SERVER) && shown.contains("eth1") && shown.contains("eth2"), "{shown}");
    assert!(!Path::new("/sys/class/net/mpvpn0").exists());
    let site = TestPages::start(&testbed, Host::Inet);
    let socks = ["--socks5-hostname", SOCKS5];
    let (url, tunnel) = (format!("http://{HTTP}"), "--proxytunnel");
    for args in [&socks[..], &["-x", &url], &["-x", &url, tunnel]] {
        for family in [Family::V4, Family::V6] {
            Download::start(&testbed, &site, &inet(family), 10 * MB, TRANSFER_TIMEOUT, args).finish();
        }
    }
    let before = testbed.interface_bytes(Host::Client, "eth2").0;
    Download::start(&testbed, &site, &inet(Family::V4), 20 * MB, TRANSFER_TIMEOUT, &socks).finish();
    let carried = testbed.interface_bytes(Host::Client, "eth2").0 - before;
    assert!(carried > 5 * MB, "the second link carried {carried} bytes");
    assert!(proxy.terminate().success());
    assert!(!home.file(SOCKET_FILE).exists());
}

#[test]
fn a_cut_link_does_not_stop_a_download() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let home = UserHome::new(&testbed);
    let proxy = start(&testbed, &home, &[]).wait_until_up();
    proxy.wait_for_path("eth2", "active", Duration::from_secs(10));
    let site = TestPages::start(&testbed, Host::Inet);
    let args = ["--socks5-hostname", SOCKS5];
    let download = Download::start(&testbed, &site, &inet(Family::V4), 50 * MB, TRANSFER_TIMEOUT, &args);
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).cut();
    let streams = proxy.status()["flows"]["stream"].as_u64();
    assert_eq!(streams, Some(1));
    thread::sleep(Duration::from_secs(3));
    testbed.link(1).restore();
    download.finish();
}

/// Echoes datagrams until `stop` is set, for a minute at most.
fn echo(socket: &UdpSocket, stop: &AtomicBool) {
    let end = Instant::now() + TRANSFER_TIMEOUT;
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) && Instant::now() < end {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..length], from).expect("an answer");
        }
    }
}

/// Sends datagrams to `to` through a SOCKS5 UDP association until one is answered; returns the number of
/// answers to 50 more.
fn count_udp_answers(to: SocketAddrV4) -> usize {
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
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let home = UserHome::new(&testbed);
    let proxy = start(&testbed, &home, &[]).wait_until_up();
    proxy.wait_for_path("eth2", "active", Duration::from_secs(10));
    let target = testbed.in_namespace(Host::Inet, || UdpSocket::bind("0.0.0.0:5353").expect("a socket"));
    let to = SocketAddrV4::new(inet(Family::V4).parse().expect("an address"), 5353);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| echo(&target, &stop));
        let answers = testbed.in_namespace(Host::Client, || count_udp_answers(to));
        stop.store(true, Ordering::Relaxed);
        assert!(answers >= 48, "{answers} of 50");
    });
    let over = |status: &serde_json::Value| match status["flows"]["udp"].as_u64() {
        Some(0) => Ok(()),
        other => Err(format!("{other:?} flows")),
    };
    server.wait_for_status(Duration::from_secs(5), "the end of the flow with the app's connection", over);
}

#[test]
fn an_app_gets_the_reason_of_a_refused_connection_at_once() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let home = UserHome::new(&testbed);
    let _proxy = start(&testbed, &home, &[]).wait_until_up();
    let start = Instant::now();
    let refused = format!("http://{}:9/", inet(Family::V4));
    let (code, said) = run_curl(&testbed, &["--socks5-hostname", SOCKS5, &refused]);
    // CURLE_PROXY.
    assert_eq!(code, Some(97), "{said}");
    let proxy = format!("http://{HTTP}");
    let (code, said) = run_curl(&testbed, &["-x", &proxy, "-w", "%{http_code}", &refused]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("nobody listens there") && said.ends_with("502"), "{said}");
    let (code, said) = run_curl(&testbed, &["-x", &proxy, "-p", &refused]);
    assert!(code != Some(0) && said.contains("502"), "{code:?}: {said}");
    // The server itself is no destination.
    let (code, said) = run_curl(&testbed, &["-x", &proxy, "-w", "%{http_code}", "http://127.0.0.1/"]);
    assert_eq!((code, &said[said.len() - 3..]), (Some(0), "403"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_wrong_token_and_a_missing_listen_address_end_the_proxy_with_a_reason() {
    let testbed = Testbed::two_links();
    let home = UserHome::new(&testbed);
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let mut proxy = start(&testbed, &home, &["--token", "0123456789abcdef0123456789abcdef"]);
    assert_eq!(proxy.wait(Duration::from_secs(15)).code(), Some(1));
    assert!(proxy.log().contains("refuses the token"), "{}", proxy.log());
    let output = testbed.mpvpn(Host::Client, &["proxy", "--server", SERVER, "--insecure"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("no option says at which address the proxy listens"), "{text}");
}
