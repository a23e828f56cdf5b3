//! Packets past the tunnel (`[[bypass]]`, `mpvpn exec`): they leave by the link of their rule and by no
//! other, and under the kill switch nothing else does.

use std::{
    collections::BTreeSet,
    fs,
    net::UdpSocket,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    dns::{ANSWER, NameServer},
    eventually,
    ping::reaches,
    tcpdump::Tcpdump,
    testbed::{Family, Host, MpvpnProcess, SERVER, Testbed, inet, inet4},
};

const SOON: Duration = Duration::from_secs(15);
const TUN: &str = "mpvpn0";
/// The far end of the second link, where a name server is.
const FAR_END: &str = "10.102.0.1";

/// tcpdump at the client's interfaces, and the packets that it sees leave.
struct Exits<'a> {
    testbed: &'a Testbed,
    capture: Tcpdump,
}

impl<'a> Exits<'a> {
    fn new(testbed: &'a Testbed) -> Self {
        Self { testbed, capture: Tcpdump::start(testbed, Host::Client, "udp or icmp or icmp6") }
    }

    /// The interfaces by which packets leave the client that `from` sends to this address and port.
    fn of(&mut self, from: Host, to: &str, port: u16) -> Vec<String> {
        let target = if to.contains(':') { format!("[{to}]:{port}") } else { format!("{to}:{port}") };
        self.testbed.in_namespace(from, || {
            let any = if to.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = UdpSocket::bind(any).expect("a socket");
            for _ in 0..5 {
                // Refused packets are the point.
                let _ = socket.send_to(b"in clear", &target);
                thread::sleep(Duration::from_millis(20));
            }
        });
        self.leaving(&format!("{to}.{port}:"))
    }

    /// The interfaces by which packets left whose line has this text.
    fn leaving(&mut self, text: &str) -> Vec<String> {
        let lines = self.capture.new_lines();
        let out = lines.iter().filter(|line| line.contains(" Out ") && line.contains(text));
        let devices: BTreeSet<&str> = out.filter_map(|line| line.split_whitespace().nth(1)).collect();
        devices.into_iter().filter(|name| *name != "lan0").map(str::to_owned).collect()
    }
}

fn write_rules(testbed: &Testbed, rules: &str) {
    fs::write(testbed.dir().join("client.toml"), rules).expect("a file to write");
}

fn start(testbed: &Testbed, more: &[&str]) -> MpvpnProcess {
    testbed.start_client(&[&["--config", "client.toml"], more].concat())
}

/// The hardware address of the LAN's host, and the client's interface to it.
fn lan_host(testbed: &Testbed) -> (String, String) {
    let shown = testbed.run(Host::Lan, &["ip", "-o", "link", "show", "type", "veth"]);
    let mac = shown.split("link/ether ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let route = testbed.run(Host::Client, &["ip", "route", "get", "192.168.77.2"]);
    let device = route.split("dev ").nth(1).and_then(|rest| rest.split_whitespace().next());
    (mac.expect("a hardware address").to_owned(), device.expect("a device").to_owned())
}

#[test]
fn packets_leave_past_the_tunnel_over_the_link_of_their_rule_and_no_others_do() {
    let testbed = Testbed::two_homes();
    let (mac, lan) = lan_host(&testbed);
    write_rules(
        &testbed,
        &format!(
            "[[bypass]]\nprotocol = 'icmp'\nto = ['{v4}', '{v6}']\nlink = 'eth2'\n\
             [[bypass]]\nports = 9001\nlink = 'eth2'\n\
             [[bypass]]\nports = 9002\nalways = true\n\
             [[bypass]]\nmac = '{mac}'\nports = 9003\nlink = 'eth1'\n\
             [[bypass]]\ningress = '{lan}'\nports = 9004\nlink = 'eth2'\n\
             [[bypass]]\nuid = 0\nports = 9005\nlink = 'eth1'\n",
            v4 = inet4(),
            v6 = inet(Family::V6),
        ),
    );
    let (v4, v6) = (inet4(), inet(Family::V6));
    let mut exits = Exits::new(&testbed);
    let share = ["--kill-switch", "--share", &lan];
    // Nobody answers, and the kill switch blocks.
    let client = start(&testbed, &share);
    eventually(SOON, "the kill switch blocks", || {
        let log = client.log();
        if log.contains("the kill switch blocks") { Ok(()) } else { Err(log) }
    });
    eventually(SOON, "what may always leave does", || {
        let exits = exits.of(Host::Client, &v4, 9002);
        if exits == ["eth1"] || exits == ["eth2"] {
            Ok(())
        } else {
            Err(format!("{exits:?}\n{}", client.log()))
        }
    });
    for (from, port) in [(Host::Client, 9001), (Host::Client, 9005), (Host::Lan, 9003), (Host::Lan, 9004)] {
        assert_eq!(exits.of(from, &v4, port), [""; 0], "{port} leaves while the kill switch blocks");
    }

    let _server = testbed.server(&[]);
    let mut client = client.wait_until_up();
    eventually(SOON, "the rule is in force", || {
        let exits = exits.of(Host::Client, &v4, 9001);
        if exits == ["eth2"] { Ok(()) } else { Err(format!("{exits:?}")) }
    });
    for (from, to, port, way) in [
        (Host::Client, &v6, 9001, "eth2"),
        (Host::Client, &v4, 9005, "eth1"),
        (Host::Client, &v6, 9005, "eth1"),
        (Host::Lan, &v4, 9003, "eth1"),
        (Host::Lan, &v4, 9004, "eth2"),
        (Host::Lan, &v4, 9005, TUN),
        (Host::Client, &v4, 9003, TUN),
        (Host::Client, &v6, 9004, TUN),
        (Host::Client, &v4, 9006, TUN),
    ] {
        assert_eq!(exits.of(from, to, port), [way], "{from:?} to {to} port {port}\n{}", client.log());
    }
    // There and back, for this machine and for a host of the LAN.
    testbed.run(Host::Inet, &["ip", "route", "add", "10.102.0.0/24", "via", "198.51.100.1"]);
    reaches(&testbed, Host::Client, &v4);
    reaches(&testbed, Host::Lan, &v4);
    assert_eq!(exits.leaving("ICMP echo request"), ["eth2"]);
    // The LAN itself is no way past the tunnel.
    reaches(&testbed, Host::Client, "192.168.77.2");

    // A link that is not there: nothing takes another way.
    testbed.link(2).cut();
    client.wait_for_path("eth2", "down", SOON);
    eventually(SOON, "its packets are refused", || {
        let exits = exits.of(Host::Client, &v4, 9001);
        if exits.is_empty() { Ok(()) } else { Err(format!("{exits:?}")) }
    });
    eventually(SOON, "the best link is one that works", || {
        let exits = exits.of(Host::Client, &v4, 9002);
        if exits == ["eth1"] { Ok(()) } else { Err(format!("{exits:?}")) }
    });
    testbed.link(2).restore();
    client.wait_for_path("eth2", "active", SOON);
    eventually(SOON, "they leave again", || {
        let exits = exits.of(Host::Client, &v4, 9001);
        if exits == ["eth2"] { Ok(()) } else { Err(format!("{exits:?}")) }
    });

    // A reload changes the rules.
    write_rules(&testbed, "[[bypass]]\nports = 9006\nlink = 'eth1'\n");
    client.reload();
    eventually(SOON, "the new rule is in force", || {
        let exits = exits.of(Host::Client, &v4, 9006);
        if exits == ["eth1"] { Ok(()) } else { Err(format!("{exits:?}\n{}", client.log())) }
    });
    assert_eq!(exits.of(Host::Client, &v4, 9001), [TUN]);

    // A process that is killed leaves its kill switch behind, and no exceptions.
    client.kill();
    eventually(SOON, "nothing leaves", || {
        let exits = exits.of(Host::Client, &v4, 9006);
        if exits.is_empty() { Ok(()) } else { Err(format!("{exits:?}")) }
    });
    assert!(testbed.mpvpn(Host::Client, &["reset"]).status.success());
    let rules = testbed.run(Host::Client, &["nft", "list", "ruleset"]);
    assert!(!rules.contains("mpvpn"), "{rules}");
    let rules = testbed.run(Host::Client, &["ip", "rule"]);
    assert!(!rules.contains("fwmark"), "{rules}");
}

#[test]
fn names_past_the_tunnel_are_asked_for_over_their_link_before_anything_goes_there() {
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let in_tunnel = NameServer::start(&testbed, Host::Inet);
    let at_link = NameServer::start_at(&testbed, Host::Server, FAR_END.parse().expect("an address"));
    write_rules(
        &testbed,
        &format!("kill-switch = true\n[[bypass]]\ndomain = 'tv.example'\nlink = 'eth2'\ndns = '{FAR_END}'\n"),
    );
    let file = testbed.dir().join("resolv.conf");
    fs::write(&file, "nameserver 10.101.0.1\n").expect("a file to write");
    let socket = testbed.file("api", Host::Client);
    let path = socket.to_str().expect("ASCII");
    let mut args = vec!["client", "--config", "client.toml", "--server", SERVER, "--insecure"];
    let dns = inet4();
    args.extend(["--path", "eth1", "--path", "eth2", "--dns", &dns, "--api-socket", path]);
    let resolv_conf = Path::new("/etc/resolv.conf");
    let client = testbed.start_with_file(Host::Client, &file, resolv_conf, &args, &socket).wait_until_up();
    let resolve = |name: &str| {
        let script =
            format!("mount --bind {} /etc/resolv.conf && exec getent ahostsv4 {name}", file.display());
        testbed.run(Host::Client, &["unshare", "--mount", "sh", "-c", &script])
    };
    let mut exits = Exits::new(&testbed);
    assert!(resolve("other.example").contains(&ANSWER.to_string()));
    assert_eq!(exits.of(Host::Client, &ANSWER.to_string(), 9), [TUN]);
    assert!(at_link.client_addresses().is_empty());
    let asked_in_tunnel = in_tunnel.client_addresses();

    assert!(resolve("live.tv.example").contains(&ANSWER.to_string()), "{}", client.log());
    assert_eq!(exits.of(Host::Client, &ANSWER.to_string(), 9), ["eth2"], "{}", client.log());
    let own: std::net::IpAddr = "10.102.0.2".parse().expect("an address");
    assert_eq!(at_link.client_addresses(), [own], "asked over the link");
    assert_eq!(in_tunnel.client_addresses(), asked_in_tunnel, "and nowhere else");
    // The rule keeps its addresses when the table is installed again.
    testbed.link(1).cut();
    client.wait_for_path("eth1", "down", SOON);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(exits.of(Host::Client, &ANSWER.to_string(), 9), ["eth2"]);
    // Without its link the name is not asked for elsewhere.
    testbed.link(1).restore();
    client.wait_for_path("eth1", "active", SOON);
    testbed.link(2).cut();
    client.wait_for_path("eth2", "down", SOON);
    thread::sleep(Duration::from_secs(2));
    let found = testbed.output_of(
        Host::Client,
        SOON,
        &[
            "unshare",
            "--mount",
            "sh",
            "-c",
            &format!("mount --bind {} /etc/resolv.conf && exec getent ahostsv4 tv.example", file.display()),
        ],
    );
    assert!(!found.status.success(), "{}", String::from_utf8_lossy(&found.stdout));
    assert_eq!(exits.of(Host::Client, &ANSWER.to_string(), 9), [""; 0]);
}

#[test]
fn programs_of_the_groups_leave_past_the_tunnel_or_stay_in_it() {
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    write_rules(&testbed, "[[bypass]]\nports = 9001\nlink = 'eth2'\n");
    let groups = testbed.dir().join("group");
    fs::write(&groups, "root:x:0:\nmpvpn-bypass:x:4711:\nmpvpn-tunnel:x:4712:\n").expect("a file to write");
    let socket = testbed.file("api", Host::Client);
    let path = socket.to_str().expect("ASCII");
    let mut args =
        vec!["client", "--config", "client.toml", "--server", SERVER, "--insecure", "--kill-switch"];
    args.extend(["--path", "eth1", "--path", "eth2", "--api-socket", path]);
    let etc_group = Path::new("/etc/group");
    let _client = testbed.start_with_file(Host::Client, &groups, etc_group, &args, &socket).wait_until_up();
    let mut exits = Exits::new(&testbed);
    let mut send = |way: &str, port: u16| {
        let send = format!("echo in clear > /dev/udp/{}/{port}", inet4());
        let script = format!(
            "mount --bind {} /etc/group && exec {} exec {way} -- bash -c '{send}'",
            groups.display(),
            mpvpn_tests::testbed::binary().display()
        );
        testbed.run(Host::Client, &["unshare", "--mount", "sh", "-c", &script]);
        exits.leaving(&format!("{}.{port}:", inet4()))
    };
    let past = send("--bypass", 9002);
    assert!(past == ["eth1"] || past == ["eth2"], "{past:?}");
    assert_eq!(send("--tunnel", 9001), [TUN]);
    assert_eq!(exits.of(Host::Client, &inet4(), 9001), ["eth2"]);
    // Without the group the command says how it is made.
    let refused = testbed.mpvpn(Host::Client, &["exec", "--bypass", "true"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("groupadd --system mpvpn-bypass"), "{said}");
}

#[test]
fn a_thousand_rules_are_in_force_within_two_seconds() {
    let testbed = Testbed::two_slow_links();
    let _server = testbed.server(&[]);
    let rule = |at: u16| format!("[[bypass]]\nto = '100.64.{}.{}'\nlink = 'eth2'\n", at / 250, at % 250 + 1);
    let rules = |count: u16| (0..count).map(rule).collect::<String>();
    write_rules(&testbed, &rules(1000));
    let before = Instant::now();
    let client = start(&testbed, &[]).wait_until_up();
    let started = before.elapsed();
    let mut exits = Exits::new(&testbed);
    assert_eq!(exits.of(Host::Client, "100.64.3.250", 9), ["eth2"], "{}", client.log());
    write_rules(&testbed, &rules(999));
    let before = Instant::now();
    client.reload();
    eventually(SOON, "the last rule is gone", || {
        let rules =
            testbed.run(Host::Client, &["nft", "list", "chain", "inet", "mpvpn_mpvpn0_bypass", "output"]);
        if rules.contains("100.64.3.250") { Err("it is there".to_owned()) } else { Ok(()) }
    });
    let reloaded = before.elapsed();
    println!("started in {started:?}, reloaded in {reloaded:?}");
    assert!(
        started < Duration::from_secs(4) && reloaded < Duration::from_secs(2),
        "{started:?} {reloaded:?}"
    );
}
