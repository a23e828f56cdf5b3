//! Several clients and servers on one machine do not disturb each other, in whatever order and way they end.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, SERVER_ARGS, TUNNEL, Testbed, inet4},
};

use crate::inbound::let_inet_reach_links;

const SOON: Duration = Duration::from_secs(15);
const RESOLV_CONF: &str = "/etc/resolv.conf";
const BEFORE: &str = "nameserver 10.101.0.1\n";

/// A machine with several clients, and one with several servers: client 1 uses server 1, client 2 server 2.
struct Machines {
    /// Ended before the testbed.
    servers: Vec<MpvpnProcess>,
    /// `/etc/resolv.conf` of the clients' machine.
    resolv_conf: PathBuf,
    testbed: Testbed,
}

impl Machines {
    fn new() -> Self {
        let testbed = Testbed::two_links();
        let resolv_conf = testbed.dir().join("resolv.conf");
        fs::write(&resolv_conf, BEFORE).expect("a file in the testbed's directory");
        let mut machines = Self { testbed, resolv_conf, servers: Vec::new() };
        machines.servers = [1, 2].map(|number| machines.start_server(number)).into();
        machines
    }

    fn start_server(&self, number: u8) -> MpvpnProcess {
        let [listen, name, subnet, subnet6] = [
            format!("0.0.0.0:443{number}"),
            format!("srv{number}"),
            format!("10.{number}.0.0/24"),
            format!("fd00:{number}::/64"),
        ];
        let args =
            ["server", "--listen", &listen, "--cert", "server.crt", "--key", "server.key", "--auth", "none"];
        let of_its_own = ["--tun-name", &name, "--subnet", &subnet, "--subnet6", &subnet6];
        self.testbed.start(Host::Server, &[&args[..], &of_its_own].concat()).wait_until_up()
    }

    fn start_client(&self, number: u8, more: &[&str]) -> MpvpnProcess {
        let socket = self.testbed.file("api", Host::Client);
        let [server, name] = [format!("192.0.2.1:443{number}"), device(number)];
        let args = ["client", "--server", &server, "--insecure", "--tun-name", &name];
        let rest = ["--path", "eth1", "--path", "eth2", "--api-socket", socket.to_str().expect("ASCII")];
        let args = [&args[..], &rest, more].concat();
        self.testbed
            .start_with_file(Host::Client, &self.resolv_conf, Path::new(RESOLV_CONF), &args, &socket)
            .wait_until_up()
    }

    fn state(&self) -> String {
        self.testbed.network_state(Host::Client) + &fs::read_to_string(&self.resolv_conf).expect("a file")
    }

    /// Client `number` works: the server's address in its tunnel and the internet answer through it; and
    /// programs that choose nothing use the tunnel of client `uses`.
    #[track_caller]
    fn assert_works(&self, number: u8, uses: u8, when: &str) {
        let testbed = &self.testbed;
        let tunnel = format!("10.{number}.0.1");
        let answers = |more: &[&str]| {
            let args = [&["ping", "-n", "-c", "2", "-i", "0.2", "-W", "2"], more].concat();
            testbed.output_of(Host::Client, SOON, &args).status.success()
        };
        assert!(answers(&[&tunnel]), "{when}: {tunnel} does not answer");
        assert!(answers(&["-I", &device(number), &inet4()]), "{when}: nothing through {}", device(number));
        let received = || testbed.interface_bytes(Host::Client, &device(uses)).0;
        let before = received();
        assert!(answers(&["-s", "1000", &inet4()]), "{when}: the internet does not answer");
        assert!(received() - before > 2000, "{when}: not through {}", device(uses));
    }

    /// The resolver that programs ask is that of the server of this client.
    #[track_caller]
    fn assert_resolver(&self, number: u8, when: &str) {
        let text = fs::read_to_string(&self.resolv_conf).expect("a file");
        assert!(text.contains(&format!("nameserver 10.{number}.0.1\n")), "{when}: {text}");
    }
}

fn device(number: u8) -> String {
    format!("vpn{number}")
}

#[test]
fn each_of_two_clients_ends_and_the_other_goes_on() {
    let machines = Machines::new();
    let before = machines.state();
    for (first_to_end, stays) in [(1, 2), (2, 1)] {
        let mut clients = [1, 2].map(|number| machines.start_client(number, &[]));
        machines.assert_works(1, 1, "both run");
        machines.assert_works(2, 1, "both run");
        machines.assert_resolver(2, "the last that came");
        let when = format!("{first_to_end} has ended");
        let [ended, other] = [first_to_end, stays].map(|number: u8| usize::from(number) - 1);
        assert!(clients[ended].terminate().success(), "{}", clients[ended].log());
        machines.assert_works(stays, stays, &when);
        machines.assert_resolver(stays, &when);
        let state = machines.state();
        assert!(!state.contains(&format!("10.{first_to_end}.0.")), "{when}: {state}");
        assert!(clients[other].interrupt().success(), "{}", clients[other].log());
        assert_eq!(machines.state(), before, "both have ended, {first_to_end} first");
    }
}

#[test]
fn each_of_two_clients_is_killed_and_starts_again_and_the_other_goes_on() {
    let machines = Machines::new();
    let before = machines.state();
    for (killed, stays) in [(1, 2), (2, 1)] {
        let mut clients = [1, 2].map(|number| machines.start_client(number, &[]));
        let [dies, lives] = [killed, stays].map(|number: u8| usize::from(number) - 1);
        clients[dies].kill();
        machines.assert_works(stays, stays, "one was killed");
        let mut again = machines.start_client(killed, &[]);
        machines.assert_resolver(killed, "it is the last that came");
        machines.assert_works(stays, 1, "the killed one runs again");
        let lives = &mut clients[lives];
        assert!(lives.terminate().success(), "{}", lives.log());
        machines.assert_works(killed, killed, "the other has ended");
        machines.assert_resolver(killed, "the other has ended");
        assert!(again.terminate().success(), "{}", again.log());
        assert_eq!(machines.state(), before, "{killed} was killed, and all have ended");
    }
}

#[test]
fn two_servers_with_the_same_networks_give_a_machine_different_addresses() {
    let testbed = Testbed::two_links();
    let_inet_reach_links(&testbed);
    let _near = testbed.server(&[]);
    let socket = testbed.file("api", Host::Inet);
    let usual = ["--subnet", "10.0.0.0/24", "--api-socket", socket.to_str().expect("ASCII")];
    let _far = testbed.start_as_is(Host::Inet, &[&SERVER_ARGS[..], &usual].concat(), &socket).wait_until_up();

    let mut first = testbed.client(&[]);
    let socket = testbed.file("api", Host::Client);
    let server = format!("{}:4433", inet4());
    let args = ["client", "--server", &server, "--insecure", "--tun-name", "vpn2", "--path", "eth1"];
    let args = [&args[..], &["--api-socket", socket.to_str().expect("ASCII")]].concat();
    let mut second = testbed.start_as_is(Host::Client, &args, &socket).wait_until_up();
    let addresses = [&first, &second].map(|client| client.address(Family::V4));
    assert_eq!(addresses, ["10.0.0.2", "10.0.0.3"], "{}", second.log());
    let answers = |device: &str| {
        let args = ["ping", "-n", "-c", "3", "-i", "0.2", "-W", "2", "-I", device, TUNNEL];
        testbed.output_of(Host::Client, SOON, &args).status.success()
    };
    assert_eq!(["mpvpn0", "vpn2"].map(answers), [true, true], "both run");
    assert!(second.terminate().success(), "{}", second.log());
    assert!(answers("mpvpn0"), "the second has ended");
    assert!(first.terminate().success(), "{}", first.log());
}

#[test]
fn a_server_that_ends_leaves_forwarding_to_the_other() {
    let mut machines = Machines::new();
    let _client = machines.start_client(2, &[]);
    let mut ends = machines.servers.remove(0);
    assert!(ends.terminate().success(), "{}", ends.log());
    machines.assert_works(2, 2, "the first server has ended");
}

#[test]
fn networks_of_two_servers_that_overlap_are_said_and_both_clients_work() {
    let machines = Machines::new();
    let testbed = &machines.testbed;
    // A server with a part of the network of the first, on another machine.
    for network in ["10.101.0.0/16", "10.102.0.0/16"] {
        testbed.run(Host::Inet, &["ip", "route", "add", network, "via", "198.51.100.1"]);
    }
    let more = ["--subnet", "10.1.0.128/25", "--subnet6", "none", "--nat", "off", "--dns", "off"];
    let _other = testbed.start(Host::Inet, &[&SERVER_ARGS[..], &more].concat()).wait_until_up();
    let _first = machines.start_client(1, &[]);
    let socket = testbed.file("api", Host::Client);
    let args =
        ["client", "--server", "198.51.100.2:4433", "--insecure", "--tun-name", "other", "--path", "eth1"];
    let more = ["--dns", "off", "--routes", "none", "--api-socket", socket.to_str().expect("ASCII")];
    let second = testbed.start_as_is(Host::Client, &[&args[..], &more].concat(), &socket).wait_until_up();
    assert!(second.log().contains("the network of the tunnel overlaps one"), "{}", second.log());
    // The first client makes room for it when it notices.
    eventually(SOON, "the second server answers", || {
        let args = ["ping", "-n", "-c", "1", "-W", "1", "10.1.0.129"];
        match testbed.output_of(Host::Client, SOON, &args).status.success() {
            true => Ok(()),
            false => Err(testbed.run(Host::Client, &["sh", "-c", "ip rule; ip route show table all"])),
        }
    });
    machines.assert_works(1, 1, "both run");
    drop(second);
    machines.assert_works(1, 1, "the second has ended");
}

#[test]
fn class_marks_are_divided_and_the_error_names_who_holds_them() {
    let testbed = Testbed::unlimited();
    let start = |number: usize| {
        let file = testbed.dir().join(format!("client{number}.toml"));
        let class = format!(
            "[[class]]\nname = 'critical'\ntun = 'class{number}'\n[[class.match]]\nmark = {}\n",
            100 + number
        );
        fs::write(&file, class).expect("a file in the testbed's directory");
        let name = format!("many{number}");
        testbed.start_client(&["--config", file.to_str().expect("ASCII"), "--tun-name", &name])
    };
    let is_set_up = |client: &MpvpnProcess| {
        eventually(SOON, "it connects", || match client.log().contains("connecting") {
            true => Ok(()),
            false => Err(client.log()),
        });
    };
    let mut clients: Vec<MpvpnProcess> = (0..15).map(start).collect();
    clients.iter().for_each(is_set_up);
    let refused = |when: &str| {
        let mut client = start(15);
        assert_eq!(client.wait(SOON).code(), Some(1), "{when}: {}", client.log());
        let log = client.log();
        for words in ["all 15 firewall marks", "many0 (1)", "many14 (1)", "mpvpn reset"] {
            assert!(log.contains(words), "{when}: {words} is not in {log}");
        }
    };
    refused("15 run");
    clients[3].kill();
    refused("what a killed one did is still in force");
    let output = testbed.mpvpn(Host::Client, &["reset"]);
    assert!(output.status.success(), "{output:?}");
    let mut last = start(15);
    is_set_up(&last);
    assert!(last.is_running(), "{}", last.log());
    drop(clients);
    reaches(&testbed, Host::Client, "192.0.2.1");
}
