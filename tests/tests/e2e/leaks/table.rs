//! The tables of `docs/security.md` that say what passes in each state, measured cell by cell.

use std::{collections::BTreeMap, fs, net::SocketAddr, net::TcpStream, path::Path, time::Duration};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, TUNNEL as SERVER_IN_TUNNEL, Testbed, inet},
};
use rustix::process::{Pid, Signal, kill_process};

use super::{Capture, LAN_HOST, LAN_RESOLVER, Programs, SOON, dotted};
use crate::inbound::{ADDRESS, PORT, let_inet_reach_links, serve};

/// The packets pass by a link in the clear.
const CLEAR: &str = "in the clear";
/// The packets go into the tunnel.
const TUNNEL: &str = "tunnel";
/// The packets do not leave.
const NOTHING: &str = "–";
/// The tunnel's device.
const DEVICE: &str = "mpvpn0";

/// A row: the state, and what becomes of each kind of traffic.
type Row = Vec<String>;

/// The rows of the table below a line of `docs/security.md` that begins with `intro`, without head and rule.
pub(crate) fn documented(intro: &str) -> Vec<Row> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/security.md");
    let text = fs::read_to_string(&file).expect("the page is in the tree");
    let table =
        text.lines().skip_while(|line| !line.starts_with(intro)).skip_while(|line| !line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    table.take_while(|line| line.starts_with('|')).skip(2).map(cells).collect()
}

/// A machine with two links and a LAN, whose traffic is watched.
struct Machine {
    testbed: Testbed,
    capture: Capture,
    /// The targets of its programs and of the hosts of its LAN, which send all the time, in the order of the
    /// columns.
    targets: [String; 6],
    rows: Vec<Row>,
    _programs: [Programs; 2],
}

impl Machine {
    fn new() -> Self {
        let testbed = Testbed::with_lan(&["100mbit,12.5ms", "100mbit,12.5ms"]);
        let_inet_reach_links(&testbed);
        serve(&testbed, Host::Client);
        // It is the router of its LAN, with mpvpn and without.
        testbed.run(Host::Client, &["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
        let [v4, v6] = [Family::V4, Family::V6].map(inet);
        let targets = [
            format!("{v4}:9"),
            format!("[{v6}]:9"),
            format!("{v4}:53"),
            LAN_RESOLVER.to_owned(),
            LAN_HOST.to_owned(),
            format!("{v4}:19"),
        ];
        let programs = Programs::sending(&testbed, Host::Client, targets[..5].to_vec());
        let lan = Programs::sending(&testbed, Host::Lan, targets[5..].to_vec());
        let capture = Capture::start(&testbed);
        Self { testbed, capture, targets, rows: Vec::new(), _programs: [programs, lan] }
    }

    /// Watches a state, and adds its row.
    fn watch(&mut self, state: &str) {
        let mut seen: BTreeMap<String, &str> = BTreeMap::new();
        for (device, to) in self.capture.packets() {
            if device.starts_with("eth") {
                seen.insert(to, CLEAR);
            } else if device == DEVICE {
                seen.entry(to).or_insert(TUNNEL);
            }
        }
        let sent = self.targets.iter().map(|target| seen.get(&dotted(target)).copied().unwrap_or(NOTHING));
        let sent: Vec<&str> = sent.collect();
        let answered = if self.is_answered() { CLEAR } else { NOTHING };
        let row = [&[state], &sent[..5], &[answered], &sent[5..]].concat();
        self.rows.push(row.into_iter().map(ToOwned::to_owned).collect());
    }

    /// Whether a new connection from outside to the address of the second link is answered.
    fn is_answered(&self) -> bool {
        let to: SocketAddr = format!("{ADDRESS}:{PORT}").parse().expect("an address");
        let wait = Duration::from_secs(2);
        self.testbed.in_namespace(Host::Inet, || TcpStream::connect_timeout(&to, wait)).is_ok()
    }

    fn client(&self, more: &[&str]) -> MpvpnProcess {
        self.testbed.start_client(&[&["--share", "lan0"], more].concat())
    }

    /// Measures all states.
    fn watch_all(&mut self, more: &[&str]) -> Vec<Row> {
        self.watch("before the client starts");
        let mut client = self.client(more);
        eventually(SOON, "it connects", || match client.log().contains("connecting to") {
            true => Ok(()),
            false => Err(client.log()),
        });
        self.watch("connecting");
        let mut server = self.testbed.server(&[]);
        client.wait_until_up_within(Duration::from_secs(30));
        self.watch("up");

        for network in ["0.0.0.0/1", "128.0.0.0/1"] {
            self.testbed.run(Host::Client, &["ip", "route", "add", network, "via", "10.101.0.1"]);
        }
        self.testbed.run(Host::Client, &["ip", "-6", "route", "add", "2000::/3", "dev", "eth1"]);
        self.watch("up, with routes to everything by DHCP and router advertisements");
        for network in ["0.0.0.0/1", "128.0.0.0/1"] {
            self.testbed.run(Host::Client, &["ip", "route", "del", network]);
        }
        self.testbed.run(Host::Client, &["ip", "-6", "route", "del", "2000::/3"]);

        for link in [1, 2] {
            self.testbed.link(link).cut();
        }
        self.watch("all links gone");
        for link in [1, 2] {
            self.testbed.link(link).restore();
        }
        reaches(&self.testbed, Host::Client, SERVER_IN_TUNNEL);
        server.kill();
        drop(server);
        self.watch("the server is gone");
        let mut server = self.testbed.server(&[]);
        reaches(&self.testbed, Host::Client, SERVER_IN_TUNNEL);
        // It says goodbye.
        assert!(server.terminate().success(), "{}", server.log());
        client.wait_for_status(SOON, "it connects again", |status| match status["state"].as_str() {
            Some("reconnecting" | "no-answer") => Ok(()),
            other => Err(format!("{other:?}")),
        });
        self.watch("reconnecting");
        let _server = self.testbed.server(&[]);
        client.wait_until_up_within(Duration::from_secs(60));

        client.kill();
        drop(client);
        self.watch("killed (SIGKILL)");
        let mut client = self.client(more).wait_until_up();
        self.watch("started again");
        // A panic outside of the handling of a peer ends the process in this way.
        let pid = Pid::from_raw(i32::try_from(client.id()).expect("a process")).expect("a process");
        kill_process(pid, Signal::ABORT).expect("it runs");
        assert!(!client.wait(SOON).success());
        drop(client);
        self.watch("crashed (SIGABRT)");
        let mut client = self.client(more).wait_until_up();
        assert!(client.terminate().success(), "{}", client.log());
        self.watch("ended (SIGTERM, Ctrl-C)");
        std::mem::take(&mut self.rows)
    }
}

fn check(intro: &str, more: &[&str]) {
    let measured = Machine::new().watch_all(more);
    let documented = documented(intro);
    for row in &measured {
        println!("| {} |", row.join(" | "));
    }
    assert_eq!(measured, documented, "below `{intro}`");
}

#[test]
fn without_the_kill_switch_each_state_passes_what_the_table_says() {
    check("Without the kill switch:", &[]);
}

#[test]
fn with_the_kill_switch_each_state_passes_what_the_table_says() {
    check("With `--kill-switch`", &["--kill-switch"]);
}
