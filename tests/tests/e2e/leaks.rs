//! Packets that leave by the links beside the tunnel's own, with the kill switch and without, seen by
//! tcpdump. The table of states and packets is in `table`.

pub(crate) mod table;

use std::{
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    tcpdump::Tcpdump,
    testbed::{Family, Host, MpvpnProcess, SERVER, Testbed, inet},
};

const SOON: Duration = Duration::from_secs(15);
/// How long a state is watched: some dozen packets of each kind of traffic.
const WATCH: Duration = Duration::from_millis(700);
/// The far end of a link, in the private network of that link.
const LAN_HOST: &str = "10.101.0.1:9";
const LAN_RESOLVER: &str = "10.101.0.1:53";

/// Programs of the client's machine that send all the time: to the internet by IPv4 and IPv6, to a host in a
/// link's network, and to a resolver there.
struct Programs {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Programs {
    fn start(testbed: &Testbed) -> Self {
        let [v4, v6] = [Family::V4, Family::V6].map(inet);
        let targets =
            vec![format!("{v4}:9"), format!("[{v6}]:9"), LAN_HOST.to_owned(), LAN_RESOLVER.to_owned()];
        Self::sending(testbed, Host::Client, targets)
    }

    /// Programs of a host that send to these targets.
    fn sending(testbed: &Testbed, host: Host, targets: Vec<String>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let run = move || {
            let sockets = ["0.0.0.0:0", "[::]:0"].map(|any| UdpSocket::bind(any).expect("a socket"));
            while !ends.load(Ordering::Relaxed) {
                for target in &targets {
                    let socket = &sockets[usize::from(target.starts_with('['))];
                    // Refused packets are the point.
                    let _ = socket.send_to(b"in clear", target);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let thread = testbed.in_namespace(host, || std::thread::spawn(run));
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// tcpdump at all interfaces of the client.
struct Capture(Tcpdump);

impl Capture {
    fn start(testbed: &Testbed) -> Self {
        Self(Tcpdump::start(testbed, Host::Client, "ip or ip6"))
    }

    /// Destinations of packets that leave by links from now on, for [`WATCH`], except the tunnel's own
    /// packets and the discovery of neighbours.
    fn destinations(&mut self) -> Vec<String> {
        let of_links = self.packets().into_iter().filter(|(device, _)| device.starts_with("eth"));
        let mut found: Vec<String> = of_links.map(|(_, to)| to).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Devices and destinations of packets that leave from now on, for [`WATCH`].
    fn packets(&mut self) -> Vec<(String, String)> {
        self.0.new_lines();
        std::thread::sleep(WATCH);
        self.0.new_lines().iter().filter_map(|line| packet(line)).collect()
    }
}

/// Device and destination in a line such as `1700000000.000000 eth1  Out IP 10.101.0.2.5 > 192.0.2.1.9: UDP,
/// length 8`, except of the tunnel's own packets and of the discovery of neighbours.
fn packet(line: &str) -> Option<(String, String)> {
    let (head, rest) = line.split_once(" > ")?;
    let mut words = head.split_whitespace().skip(1);
    let (device, direction) = (words.next()?, words.next()?);
    if direction != "Out" || rest.contains("ICMP6") {
        return None;
    }
    let to = rest.split(": ").next()?;
    (to != dotted(SERVER)).then(|| (device.to_owned(), to.to_owned()))
}

/// Address and port as tcpdump writes them.
fn dotted(address: &str) -> String {
    let (host, port) = address.rsplit_once(':').expect("an address with a port");
    format!("{}.{port}", host.trim_matches(['[', ']']))
}

fn start(testbed: &Testbed, more: &[&str]) -> MpvpnProcess {
    testbed.start_client(&[&["--kill-switch"], more].concat())
}

/// Everything that leaves goes to hosts of the link's network, and not to their resolver.
#[track_caller]
fn assert_closed(capture: &mut Capture, state: &str) {
    let found = capture.destinations();
    assert_eq!(found, [dotted(LAN_HOST)], "{state}");
}

#[track_caller]
fn assert_open(capture: &mut Capture, state: &str) {
    let found = capture.destinations();
    assert!(found.contains(&format!("{}.9", inet(Family::V4))), "{state}: {found:?}");
}

#[test]
fn with_the_kill_switch_nothing_leaves_past_the_tunnel_in_any_state() {
    let testbed = Testbed::two_links();
    let _programs = Programs::start(&testbed);
    let mut capture = Capture::start(&testbed);
    assert_open(&mut capture, "before the client");

    let mut client = start(&testbed, &[]);
    client.wait_for_status(SOON, "blocking", |status| match status["kill_switch"].as_str() {
        Some("blocking") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_closed(&mut capture, "connecting, without a server");

    let mut server = testbed.server(&[]);
    client.wait_until_up_within(Duration::from_secs(30));
    assert_eq!(client.status()["kill_switch"], "armed");
    assert_closed(&mut capture, "up");

    for link in [1, 2] {
        testbed.link(link).cut();
    }
    let found = capture.destinations();
    assert!(found.is_empty(), "all links gone: {found:?}");
    for link in [1, 2] {
        testbed.link(link).restore();
    }
    client.wait_until_up_within(Duration::from_secs(30));
    assert_closed(&mut capture, "links are back");

    server.kill();
    drop(server);
    assert_closed(&mut capture, "server gone");
    let _server = testbed.server(&[]);
    client.wait_until_up_within(Duration::from_secs(60));

    testbed.run(Host::Client, &["nft", "flush", "ruleset"]);
    std::thread::sleep(Duration::from_secs(1));
    assert_closed(&mut capture, "1 s after another program flushed all rules");
    assert!(client.log().contains("another program changed or removed"), "{}", client.log());
    let mut events: Vec<String> = client
        .events()
        .iter()
        .filter_map(|event| event["event"].as_str()?.strip_prefix("kill_switch_").map(str::to_owned))
        .collect();
    events.sort_unstable();
    events.dedup();
    assert_eq!(events, ["armed", "blocking", "restored"]);

    client.kill();
    drop(client);
    assert_closed(&mut capture, "killed");

    let mut client = start(&testbed, &[]).wait_until_up();
    assert_closed(&mut capture, "started again");
    client.kill();
    drop(client);
    let output = testbed.mpvpn(Host::Client, &["reset"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("lifted the kill switch of mpvpn0"), "{output:?}");
    assert_open(&mut capture, "after mpvpn reset");

    let mut client = start(&testbed, &[]).wait_until_up();
    assert_closed(&mut capture, "a third time");
    let output = testbed.mpvpn(Host::Client, &["reset"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("left alone, because it runs: mpvpn0"), "{output:?}");
    assert_closed(&mut capture, "reset spares what runs");
    assert!(client.terminate().success(), "{}", client.log());
    assert_open(&mut capture, "ended by SIGTERM");
    let rules = testbed.run(Host::Client, &["nft", "list", "tables"]);
    assert!(!rules.contains("mpvpn"), "{rules}");
}

#[test]
fn without_the_lan_and_with_a_refused_token_everything_is_blocked() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token"]);
    let _programs = Programs::start(&testbed);
    let mut capture = Capture::start(&testbed);
    let is_refused = |capture: &mut Capture| {
        let mut client = start(&testbed, &["--kill-switch-lan", "false", "--token", "wrong-token-of-nobody"]);
        let status = client.wait(SOON);
        assert_eq!(status.code(), Some(1), "{}", client.log());
        assert!(client.log().contains("the kill switch stays in force"), "{}", client.log());
        let found = capture.destinations();
        assert!(found.is_empty(), "{found:?}");
    };
    is_refused(&mut capture);
    let output = testbed.mpvpn(Host::Client, &["reset"]);
    assert!(output.status.success(), "{output:?}");
    assert_open(&mut capture, "after mpvpn reset");

    // The kill switch is visible while no client runs.
    is_refused(&mut capture);
    let output = testbed.mpvpn(Host::Client, &["status", "--name", "mpvpn0"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_said = said.contains("blocked by the kill switch of mpvpn0") && said.contains("sudo mpvpn reset");
    assert!(output.status.code() == Some(1) && is_said, "{output:?}");
    let output = testbed.mpvpn(Host::Client, &["kill-switch", "release"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said == "mpvpn0: blocks no more\n", "{output:?}");
    assert_open(&mut capture, "after mpvpn kill-switch release");
}

#[test]
fn without_the_kill_switch_routes_of_a_link_draw_nothing_past_the_tunnel() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _programs = Programs::start(&testbed);
    let mut capture = Capture::start(&testbed);
    let mut client = testbed.client(&[]);
    let lan = [LAN_RESOLVER, LAN_HOST].map(dotted);
    assert_eq!(capture.destinations(), lan, "up");

    // As a DHCP client does that is given these by option 121 (CVE-2024-3661), and a host by router
    // advertisements.
    for network in ["0.0.0.0/1", "128.0.0.0/1"] {
        testbed.run(Host::Client, &["ip", "route", "add", network, "via", "10.101.0.1"]);
    }
    testbed.run(Host::Client, &["ip", "-6", "route", "add", "2000::/3", "dev", "eth1"]);
    testbed.run(Host::Client, &["ip", "address", "add", "64.0.0.7/2", "dev", "eth1"]);
    assert_eq!(capture.destinations(), lan, "with routes of the link");
    let line = r#"keep-routes = ["0.0.0.0/1", "64.0.0.0/2", "128.0.0.0/1", "2000::/3"]"#;
    eventually(SOON, "what is ignored is said", || {
        let log = client.log();
        if log.contains(line) { Ok(()) } else { Err(log) }
    });
    assert!(client.terminate().success(), "{}", client.log());

    let host = format!("{}/32", inet(Family::V4));
    testbed.run(Host::Client, &["ip", "route", "add", &host, "via", "10.101.0.1"]);
    let client = testbed.client(&["--keep-routes", &host]);
    let found = capture.destinations();
    assert!(found.contains(&format!("{}.9", inet(Family::V4))), "the user kept it: {found:?}");
    assert!(!found.iter().any(|to| to.starts_with("2001:")), "{found:?}");
    drop(client);
}
