//! The server's behaviour towards TCP connections without credentials.

use std::{
    fs,
    net::TcpStream,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    machine_share::{MachineShare, Share},
    ping::{Ping, ping},
    testbed::{Host, MpvpnProcess, TUNNEL, Testbed},
};

use crate::confinement::line;

/// URL of the server.
const URL: &str = "https://192.0.2.1:4433";
/// Maximum growth of the server by half-open connections, bytes.
const MAX_GROWTH_BYTES: u64 = 64 << 20;

/// Header section and content of curl's response.
fn curl(testbed: &Testbed, args: &[&str]) -> String {
    let curl = ["curl", "-sSki", "--max-time", "20"];
    testbed.run(Host::Client, &[&curl[..], args].concat())
}

#[test]
fn a_browser_sees_a_site() {
    let testbed = Testbed::two_links();
    let root = testbed.dir().join("www");
    fs::create_dir(&root).expect("a folder");
    fs::write(root.join("index.html"), "<p>nothing special\n").expect("a file");
    let file = testbed.dir().join("server.toml");
    fs::write(&file, format!("[site]\nroot = '{}'\n", root.display())).expect("a file");
    let _server = testbed.server(&["--config", &file.display().to_string()]);
    for version in ["--http1.1", "--http2"] {
        let page = curl(&testbed, &[version, URL]);
        assert!(page.contains(" 200") && page.ends_with("<p>nothing special\n"), "{page}");
        let head = page.to_lowercase();
        assert!(head.contains("\r\nserver: caddy\r\n") && head.contains("\r\ndate: "), "{page}");
        let nothing = curl(&testbed, &[version, &format!("{URL}/../server.toml"), "--path-as-is"]);
        assert!(nothing.contains(" 404"), "{nothing}");
    }
}

/// Opens `count` TCP connections from one host without sending data, `at_once` at a time.
fn open_idle_connections(testbed: &Testbed, count: usize, at_once: usize) {
    let mut open = Vec::new();
    for _ in 0..count.div_ceil(at_once) {
        open.clear();
        testbed.in_namespace(Host::Inet, || {
            for _ in 0..at_once {
                open.extend(TcpStream::connect("198.51.100.1:4433"));
            }
        });
    }
}

fn count_refusal_lines(server: &MpvpnProcess) -> usize {
    server.log().lines().filter(|line| line.contains("refused a client on TCP")).count()
}

#[test]
fn ten_thousand_idle_tcp_connections_do_not_affect_tunnels() {
    let _share = MachineShare::take(Share::Percent(100));
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    ping(&testbed, Host::Client, TUNNEL, 3);
    let memory = server.memory();
    let pinging = Ping::every(&testbed, Host::Client, Duration::from_millis(20), TUNNEL, 8);
    let start = Instant::now();
    open_idle_connections(&testbed, 10_000, 500);
    let took = start.elapsed();
    // Past the tunnel, through which clients do not reach the server's machine.
    assert!(curl(&testbed, &["--interface", "eth1", URL]).contains(" 404"), "after {took:?}");
    let pings = pinging.finish();
    assert!(pings.loss_pct() < 5.0, "{:.1} % lost", pings.loss_pct());
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < MAX_GROWTH_BYTES, "grew by {grown} bytes");
    assert!((1..4).contains(&count_refusal_lines(&server)), "{}", server.log());
}

#[test]
fn a_server_without_free_file_descriptors_waits() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let limit = |files: &str| {
        let id = server.id().to_string();
        // Its user may do that without CAP_SYS_RESOURCE.
        let user = line(server.id(), "Uid:");
        let user = user.split_whitespace().next().expect("a number");
        let as_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"];
        testbed.run(
            Host::Server,
            &[&as_user[..], &["prlimit", "--pid", &id, &format!("--nofile={files}:")]].concat(),
        );
    };
    let is_used = |number: &u32| fs::exists(format!("/proc/{}/fd/{number}", server.id())).expect("a process");
    // The next file descriptor has the lowest free number.
    let free = (0..).find(|number| !is_used(number)).expect("not all are used");
    limit(&free.to_string());
    let open = testbed.in_namespace(Host::Inet, || TcpStream::connect("198.51.100.1:4433"));
    eventually(Duration::from_secs(10), "the server says so", || {
        match server.log().contains("cannot accept TCP connections") {
            true => Ok(()),
            false => Err(server.log()),
        }
    });
    let before = server.processor_time();
    std::thread::sleep(Duration::from_secs(2));
    let busy = server.processor_time() - before;
    assert!(busy < Duration::from_millis(400), "{busy:?} in 2 s of waiting");
    drop(open);
    limit("1024");
    assert!(curl(&testbed, &[URL]).contains(" 404"));
}
