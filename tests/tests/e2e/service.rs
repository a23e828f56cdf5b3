//! Notifications of servers and clients to a service manager, over the socket that it names in
//! `NOTIFY_SOCKET`.

use std::{
    os::unix::net::UnixDatagram,
    path::PathBuf,
    time::{Duration, Instant},
};

use mpvpn_tests::testbed::{Host, SERVER, Testbed};

/// How long a test waits for an expected line. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);
/// `WATCHDOG_USEC`: a sign of life is due every second.
const WATCHDOG: Duration = Duration::from_secs(3);

/// The end of a service manager.
struct Listener {
    path: PathBuf,
    socket: UnixDatagram,
    lines: Vec<String>,
}

impl Listener {
    fn new(testbed: &Testbed, host: Host) -> Self {
        let path = testbed.file("notify", host);
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        Self { path, socket, lines: Vec::new() }
    }

    /// Waits for a line that begins so, among those after the ones that were waited for before. Returns it.
    fn wait_for(&mut self, start: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(at) = self.lines.iter().position(|line| line.starts_with(start)) {
                let line = self.lines[at].clone();
                self.lines.drain(..=at);
                return line;
            }
            assert!(Instant::now() < deadline, "no {start} came; what came: {:?}", self.lines);
            let mut bytes = [0; 4096];
            if let Ok(length) = self.socket.recv(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                self.lines.extend(text.lines().map(str::to_owned));
            }
        }
    }
}

#[test]
fn a_client_is_ready_without_its_server_and_its_state_is_told() {
    let testbed = Testbed::two_links();
    let mut manager = Listener::new(&testbed, Host::Client);
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2"];
    let began = Instant::now();
    let mut client = testbed.start_as_service(Host::Client, &manager.path, WATCHDOG, &args);
    manager.wait_for("READY=1");
    println!("ready after {:?}", began.elapsed());
    let asked = testbed.mpvpn(Host::Client, &["status", "--api-socket", client.socket().to_str().unwrap()]);
    assert_eq!(asked.status.code(), Some(3), "it answers, and its tunnel does not work");
    let late = ["status", "--wait", "1", "--api-socket", client.socket().to_str().unwrap()];
    assert_eq!(testbed.mpvpn(Host::Client, &late).status.code(), Some(1), "there is no server yet");

    let mut server = testbed.server(&[]);
    let wait = ["status", "--wait", "20", "--api-socket", client.socket().to_str().unwrap()];
    assert!(testbed.mpvpn(Host::Client, &wait).status.success());
    let connected = manager.wait_for("STATUS=connected to ");
    assert!(
        connected.contains(SERVER) && connected.contains(&client.address(mpvpn_tests::testbed::Family::V4)),
        "{connected}"
    );

    client.reload();
    manager.wait_for("RELOADING=1");
    manager.wait_for("MONOTONIC_USEC=");
    manager.wait_for("READY=1");
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    assert!(server.terminate().success());
    manager.wait_for("STATUS=connecting to ");
    assert!(client.terminate().success());
    manager.wait_for("STOPPING=1");
}

#[test]
fn a_server_says_how_many_sessions_it_has_and_a_stopped_one_gives_no_sign_of_life() {
    let testbed = Testbed::two_links();
    let mut manager = Listener::new(&testbed, Host::Server);
    let args =
        ["server", "--listen", "0.0.0.0:4433", "--auth", "none", "--state-dir", "state", "--shards", "2"];
    let server = testbed.start_as_service(Host::Server, &manager.path, WATCHDOG, &args);
    manager.wait_for("READY=1");
    manager.wait_for("STATUS=no session");
    let _client = testbed.client(&[]);
    manager.wait_for("STATUS=1 session");
    manager.wait_for("WATCHDOG=1");
    server.stop();
    while manager.socket.recv(&mut [0; 4096]).is_ok() {}
    std::thread::sleep(WATCHDOG);
    assert!(manager.socket.recv(&mut [0; 4096]).is_err(), "a stopped process gave a sign of life");
    server.go_on();
    manager.wait_for("WATCHDOG=1");
}
