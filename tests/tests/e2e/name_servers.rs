//! Names are resolved through the tunnel, and `/etc/resolv.conf` is restored afterwards.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_tests::{
    dns::{ANSWER, NameServer},
    testbed::{Host, MpvpnProcess, Testbed, inet4},
};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The far end of a link.
const LINK_NAME_SERVER: &str = "10.101.0.1";
/// The server's address in the network behind it.
const SERVER_BEHIND: &str = "198.51.100.1";
/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A client with its own `/etc/resolv.conf`, as with `ip netns exec`.
struct ClientMachine<'a> {
    testbed: &'a Testbed,
    file: PathBuf,
    before: String,
}

impl<'a> ClientMachine<'a> {
    fn new(testbed: &'a Testbed) -> Self {
        let (file, before) = (
            testbed.dir().join("resolv.conf"),
            format!("nameserver {LINK_NAME_SERVER}\nsearch home.example\n"),
        );
        fs::write(&file, &before).expect("a file in the stage's directory");
        Self { testbed, file, before }
    }

    fn start(&self, more: &[&str]) -> MpvpnProcess {
        let socket = self.testbed.file("api", Host::Client);
        let mut args = vec!["client", "--server", mpvpn_tests::testbed::SERVER, "--insecure"];
        args.extend(["--path", "eth1", "--path", "eth2", "--api-socket", socket.to_str().expect("ASCII")]);
        args.extend(more);
        self.testbed.start_with_file(Host::Client, &self.file, Path::new(RESOLV_CONF), &args, &socket)
    }

    fn current(&self) -> String {
        fs::read_to_string(&self.file).expect("the file is there")
    }

    /// Resolves a name with the client's `/etc/resolv.conf`.
    fn resolve(&self, name: &str) -> String {
        let file = self.file.to_str().expect("ASCII");
        let script = format!("mount --bind {file} {RESOLV_CONF} && exec getent ahostsv4 {name}");
        self.testbed.run(Host::Client, &["unshare", "--mount", "sh", "-c", &script])
    }
}

#[test]
fn names_are_resolved_in_the_tunnel_and_the_file_is_restored_after_sigint_and_sigkill() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let names = NameServer::start(&testbed, Host::Inet);
    let machine = ClientMachine::new(&testbed);
    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    assert!(machine.current().contains(&format!("nameserver {}", inet4())), "{}", machine.current());
    let found = machine.resolve("a.example");
    assert!(found.contains(&ANSWER.to_string()), "{found}");
    assert_eq!(names.client_addresses(), [SERVER_BEHIND.parse::<std::net::IpAddr>().expect("an address")]);
    assert!(client.interrupt().success());
    assert_eq!(machine.current(), machine.before);

    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    client.kill();
    assert_ne!(machine.current(), machine.before);
    let client = machine.start(&["--dns", "off"]).wait_until_up();
    assert_eq!(machine.current(), machine.before, "the next start puts it back");
    assert!(!client.log().contains("past the tunnel"), "{}", client.log());
}

#[test]
fn name_servers_of_the_server_are_used_if_all_traffic_goes_into_the_tunnel() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--dns", &inet4(), "--dns", "2001:db8:1::2"]);
    let machine = ClientMachine::new(&testbed);
    let mut client = machine.start(&[]).wait_until_up();
    let both = format!("nameserver {}\nnameserver 2001:db8:1::2\n", inet4());
    assert!(machine.current().ends_with(&both), "{}", machine.current());
    assert!(client.terminate().success());
    for more in [["--routes", "none"], ["--dns", "off"]] {
        let _client = machine.start(&more).wait_until_up();
        assert_eq!(machine.current(), machine.before, "{more:?}");
    }
}

/// A tunnel that takes some packets takes some names: those below the domain of the server.
#[test]
fn with_advertised_routes_only_names_of_the_server_are_asked_for_in_the_tunnel() {
    let testbed = Testbed::two_links();
    let names = "dns-domain = \"vpn.internal\"\n[[dns-name]]\nname = \"camera\"\naddress = \"10.9.9.9\"\n";
    fs::write(testbed.dir().join("server.toml"), names).expect("a file");
    let _server = testbed.server(&["--config", "server.toml"]);
    let address = LINK_NAME_SERVER.parse().expect("an address");
    let at_link = NameServer::start_at(&testbed, Host::Server, address);
    let machine = ClientMachine::new(&testbed);
    for routes in ["advertised", "none"] {
        let mut client = machine.start(&["--routes", routes]).wait_until_up();
        assert!(machine.current().contains("nameserver 127.109.112."), "{}", machine.current());
        assert!(machine.resolve("camera.vpn.internal").contains("10.9.9.9"));
        assert!(machine.resolve("www.example").contains(&ANSWER.to_string()));
        let asked = at_link.client_addresses();
        assert_eq!(asked, ["10.101.0.2".parse::<std::net::IpAddr>().expect("an address")], "not at the link");
        assert!(client.interrupt().success(), "{}", client.log());
        assert_eq!(machine.current(), machine.before);
    }
    let _client = machine.start(&["--routes", "advertised", "--dns", "off"]).wait_until_up();
    assert_eq!(machine.current(), machine.before);
}

#[test]
fn the_server_resolves_names_for_clients_that_are_told_nothing() {
    let testbed = Testbed::two_links();
    let names = NameServer::start(&testbed, Host::Inet);
    let file = testbed.dir().join("resolv.conf of the server");
    fs::write(&file, format!("nameserver {}\n", inet4())).expect("a file in the testbed's directory");
    let socket = testbed.file("api", Host::Server);
    let mut args = vec!["server", "--listen", "0.0.0.0:4433", "--cert", "server.crt", "--key", "server.key"];
    args.extend([
        "--auth",
        "none",
        "--subnet",
        "10.0.0.0/24",
        "--api-socket",
        socket.to_str().expect("ASCII"),
    ]);
    let _server =
        testbed.start_with_file(Host::Server, &file, Path::new(RESOLV_CONF), &args, &socket).wait_until_up();
    let machine = ClientMachine::new(&testbed);
    let mut client = machine.start(&[]).wait_until_up();
    assert!(machine.current().contains("nameserver 10.0.0.1\n"), "{}", machine.current());
    let found = machine.resolve("a.example");
    assert!(found.contains(&ANSWER.to_string()), "{found}");
    assert_eq!(names.client_addresses().len(), 1, "the server alone asks the resolver");
    assert!(client.interrupt().success());
    assert_eq!(machine.current(), machine.before);
}

#[test]
fn names_of_the_local_network_are_asked_for_there_unless_the_kill_switch_is_on() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--dns", &inet4()]);
    let at_link = NameServer::start(&testbed, Host::Server);
    let behind = NameServer::start(&testbed, Host::Inet);
    let machine = ClientMachine::new(&testbed);
    let mut client = machine.start(&["--dns-local", "lan", "--dns-local", "home.arpa"]).wait_until_up();
    assert!(machine.current().contains("nameserver 127.109.112."), "{}", machine.current());
    assert!(machine.resolve("www.example").contains(&ANSWER.to_string()));
    assert!(at_link.client_addresses().is_empty(), "{:?}", at_link.client_addresses());
    assert_eq!(behind.client_addresses(), [SERVER_BEHIND.parse::<std::net::IpAddr>().expect("an address")]);
    assert!(machine.resolve("printer.lan").contains(&ANSWER.to_string()));
    assert_eq!(at_link.client_addresses(), ["10.101.0.2".parse::<std::net::IpAddr>().expect("an address")]);
    assert!(client.interrupt().success(), "{}", client.log());
    assert_eq!(machine.current(), machine.before);

    let mut client = machine.start(&["--dns-local", "lan", "--kill-switch"]).wait_until_up();
    let failure = "names below lan fail: the kill switch blocks";
    let status = client.wait_for_status(TIMEOUT, "a note", |status| {
        if status["notes"].is_array() { Ok(()) } else { Err("no note".to_owned()) }
    });
    assert!(status["notes"].to_string().contains(failure), "{status:#}");
    assert!(machine.resolve("www.example").contains(&ANSWER.to_string()));
    let script = format!(
        "mount --bind {} {RESOLV_CONF} && exec getent ahostsv4 printer.lan",
        machine.file.to_str().expect("ASCII")
    );
    let output = testbed.output_of(Host::Client, TIMEOUT, &["unshare", "--mount", "sh", "-c", &script]);
    assert!(!output.status.success(), "{output:?}");
    assert!(client.terminate().success(), "{}", client.log());
}

#[test]
fn a_name_server_beside_the_tunnel_is_reported() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--dns", "off"]);
    let machine = ClientMachine::new(&testbed);
    let client = machine.start(&[]).wait_until_up();
    let expected = format!("names are asked past the tunnel, at {LINK_NAME_SERVER}");
    let status = client.wait_for_status(TIMEOUT, "a note", |status| {
        if status["notes"].is_array() { Ok(()) } else { Err("no note".to_owned()) }
    });
    assert!(status["notes"][0].as_str().is_some_and(|note| note.contains(&expected)), "{status:#}");
    assert_eq!(client.log().matches(&expected).count(), 1, "{}", client.log());
    assert_eq!(machine.current(), machine.before);
}

#[test]
fn a_file_that_another_program_changed_meanwhile_is_kept() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let machine = ClientMachine::new(&testbed);
    let mut client = machine.start(&["--dns", &inet4()]).wait_until_up();
    let other = "nameserver 192.0.2.53\n";
    fs::write(&machine.file, other).expect("a file in the stage's directory");
    assert!(client.interrupt().success());
    assert_eq!(machine.current(), other);
    assert!(client.log().contains("another program has changed"), "{}", client.log());
}

#[test]
fn a_client_in_a_namespace_does_not_change_the_file_of_the_machine() {
    let testbed = Testbed::two_links();
    let before = fs::read(RESOLV_CONF).ok();
    let server = testbed.server(&[]);
    let mut client = testbed.start_client(&["--dns", &inet4()]);
    assert_eq!(client.wait(TIMEOUT).code(), Some(1), "{}", client.log());
    assert!(client.log().contains("is the whole machine's"), "{}", client.log());
    assert_eq!(fs::read(RESOLV_CONF).ok(), before);
    drop(server);
    let _server = testbed.server(&["--dns", &inet4()]);
    let client = testbed.client(&[]);
    assert!(client.log().contains("cannot set the resolvers that the server suggests"), "{}", client.log());
    assert_eq!(fs::read(RESOLV_CONF).ok(), before);
}
