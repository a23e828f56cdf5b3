//! VLANs (IEEE 802.1Q): their interfaces as links of a client, and as sources of the packets of a class, or
//! of those past the tunnel.
//!
//! Where the kernel has no VLANs, these stories say so and prove nothing. `./dev test machines vlan` runs
//! them with Debian's kernel.

use std::{
    thread,
    time::{Duration, SystemTime},
};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::{Ping, reaches},
    testbed::{Direction, Family, Host, MpvpnProcess, SLOW_LINK, TUNNEL, Testbed, inet4, path_of},
};

use super::class_tun::{BULK_PING, TUN, bytes_of_class, start};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The rate of each VLAN that is a link, in each direction. Higher: an emulated processor is the limit, not a
/// link, and one link could carry all.
const RATE: &str = "1mbit";
/// The longest time without an answer while one of two links fails.
const MAX_GAP: Duration = Duration::from_secs(5);
/// Bytes of [`send_pings`], less a tenth.
const BURST: u64 = 27_000;
/// Bytes that an interface may carry besides, as of neighbour discovery and of heartbeats.
const MAX_OTHER: u64 = 10_000;
/// How often pings are sent until all are carried as they should be. On a machine that is so busy that paths
/// fail for a moment, others carry some.
const ATTEMPTS: u32 = 8;

/// Whether the kernel has VLANs.
fn has_vlans(testbed: &Testbed) -> bool {
    const TRY: &str = "ip link add try type veth && ip link add link try name try.1 type vlan id 1; code=$?
        ip link delete try; exit $code";
    let has = testbed.output_of(Host::Inet, TIMEOUT, &["sh", "-c", TRY]).status.success();
    if !has {
        eprintln!("skipped: this kernel has no VLANs");
    }
    has
}

/// A VLAN above the interface `parent` of a host, with the address `address`/24.
fn add_vlan(testbed: &Testbed, host: Host, parent: &str, name: &str, id: u16, address: &str) {
    let id = id.to_string();
    testbed.run(host, &["ip", "link", "add", "link", parent, "name", name, "type", "vlan", "id", &id]);
    testbed.run(host, &["ip", "address", "add", &format!("{address}/24"), "dev", name]);
    testbed.run(host, &["ip", "link", "set", name, "up"]);
}

/// A VLAN of the client's `eth1` that leads to the server, with a default route and the rate [`RATE`].
fn add_link(testbed: &Testbed, id: u8) {
    let (near, far) = (format!("eth1.{id}"), format!("up1.{id}"));
    add_vlan(testbed, Host::Client, "eth1", &near, id.into(), &format!("10.{id}.0.2"));
    add_vlan(testbed, Host::Server, "up1", &far, id.into(), &format!("10.{id}.0.1"));
    for (host, device) in [(Host::Client, &near), (Host::Server, &far)] {
        let limit = ["tbf", "rate", RATE, "burst", "8kb", "latency", "200ms"];
        testbed.run(host, &[&["tc", "qdisc", "add", "dev", device, "root"], &limit[..]].concat());
    }
    add_default_route(testbed, id);
}

fn add_default_route(testbed: &Testbed, id: u8) {
    let (router, device, metric) = (format!("10.{id}.0.1"), format!("eth1.{id}"), id.to_string());
    let route = ["ip", "route", "add", "default", "via", &router, "dev", &device, "metric", &metric];
    testbed.run(Host::Client, &route);
}

/// Bytes that an interface of the client has received and sent; nothing if there is no such interface.
fn bytes_of(testbed: &Testbed, interface: &str) -> Option<u64> {
    let folder = format!("/sys/class/net/{interface}/statistics");
    let files = ["rx_bytes", "tx_bytes"].map(|file| format!("{folder}/{file}"));
    let output = testbed.output_of(Host::Client, TIMEOUT, &["cat", &files[0], &files[1]]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let counts: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    (counts.len() == files.len()).then(|| counts.iter().sum())
}

/// Sends 30 pings of 1 kB, and waits for the answers.
fn send_pings(testbed: &Testbed, from: Host, more: &[&str], to: &str) {
    let pings = ["ping", "-n", "-q", "-i", "0.05", "-c", "30", "-s", "1000", "-W", "2"];
    testbed.output_of(from, TIMEOUT, &[&pings[..], more, &[to]].concat());
}

/// Runs `attempt` until it succeeds. Panics with its last error after [`ATTEMPTS`].
fn one_of_several(what: &str, mut attempt: impl FnMut() -> Result<(), String>) {
    let mut errors = (0..ATTEMPTS).map_while(|_| attempt().err());
    if let Some(error) = errors.nth(ATTEMPTS as usize - 1) {
        panic!("{what}: not in one of {ATTEMPTS} attempts: {error}");
    }
}

/// Runs `cut` under pings, and checks that these go on over the links that are left, whichever of them is
/// chosen, while nothing is sent over `lost`.
fn check_goes_on(testbed: &Testbed, client: &MpvpnProcess, lost: &str, left: &[&str], cut: impl FnOnce()) {
    let pings = Ping::every(testbed, Host::Client, Duration::from_millis(50), TUNNEL, 60);
    thread::sleep(Duration::from_secs(1));
    let began = SystemTime::now();
    cut();
    eventually(TIMEOUT, &format!("{lost} is out of use"), || {
        let status = client.status();
        match path_of(&status, lost).map(|path| &path["state"]) {
            Some(state) if state == "active" => Err(format!("{status:#}")),
            _ => Ok(()),
        }
    });
    one_of_several(lost, || {
        let sum = |links: &[&str]| links.iter().filter_map(|link| bytes_of(testbed, link)).sum::<u64>();
        let count = || [&[lost][..], left].map(sum);
        let before = count();
        send_pings(testbed, Host::Client, &[], TUNNEL);
        let after = count();
        let [by_lost, by_left] = [after[0] - before[0], after[1] - before[1]];
        assert!(by_lost < MAX_OTHER, "{by_lost} bytes over {lost}, which is cut");
        // Both directions of the pings.
        if by_left > 2 * BURST { Ok(()) } else { Err(format!("{by_left} bytes over {left:?}")) }
    });
    let gap = pings.stop().longest_gap(began, SystemTime::now());
    println!("the longest time without an answer after {lost} was cut: {gap:?}");
    assert!(gap < MAX_GAP, "no answer for {gap:?} after {lost} was cut");
}

#[test]
fn vlans_of_one_interface_are_links_that_are_bonded_and_cut() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::unlimited();
    if !has_vlans(&testbed) {
        return;
    }
    // The interface itself leads nowhere.
    for family in ["-4", "-6"] {
        testbed.run(Host::Client, &["ip", family, "route", "flush", "dev", "eth1"]);
        testbed.run(Host::Client, &["ip", family, "address", "flush", "dev", "eth1"]);
    }
    add_link(&testbed, 10);
    add_link(&testbed, 20);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--path", "auto", "--transport", "quic"]);
    let both = ["eth1.10", "eth1.20"];
    for link in both {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    let links = client.status()["links"].as_array().map_or(0, Vec::len);
    assert_eq!(links, 2, "an interface without a default route is no link: {:#}", client.status());

    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    for direction in [Direction::Down, Direction::Up] {
        let count = || both.map(|link| bytes_of(&testbed, link).expect("the interface exists"));
        let before = count();
        let rate = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, direction, 8).finish().megabits();
        let after = count();
        let used = [after[0] - before[0], after[1] - before[1]];
        println!("{direction:?}: {rate:.2} Mbit/s over two VLANs of {RATE}; bytes by link: {used:?}");
        assert!(used.iter().all(|bytes| bytes * 4 > used.iter().sum()), "not both carried: {used:?}");
    }

    // The far side of a VLAN fails without a sign.
    check_goes_on(&testbed, &client, "eth1.10", &["eth1.20"], || {
        testbed.run(Host::Server, &["ip", "link", "set", "up1.10", "down"]);
    });
    testbed.run(Host::Server, &["ip", "link", "set", "up1.10", "up"]);
    client.wait_for_path("eth1.10", "active", TIMEOUT);

    // The VLAN's interface is set down; the kernel removes its routes.
    check_goes_on(&testbed, &client, "eth1.20", &["eth1.10"], || {
        testbed.run(Host::Client, &["ip", "link", "set", "eth1.20", "down"]);
    });
    testbed.run(Host::Client, &["ip", "link", "set", "eth1.20", "up"]);
    add_default_route(&testbed, 20);
    client.wait_for_path("eth1.20", "active", TIMEOUT);

    // A VLAN that is added later is a link as long as it exists.
    add_link(&testbed, 30);
    client.wait_for_path("eth1.30", "active", TIMEOUT);
    check_goes_on(&testbed, &client, "eth1.30", &both, || {
        testbed.run(Host::Client, &["ip", "link", "delete", "eth1.30"]);
    });

    // The interface below all of them loses its carrier, and gets it back.
    let address = client.address(Family::V4);
    testbed.link(1).cut();
    thread::sleep(Duration::from_secs(2));
    testbed.link(1).restore();
    for link in both {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    reaches(&testbed, Host::Client, TUNNEL);
    assert_eq!(client.address(Family::V4), address, "the session does not go on");
}

/// A VLAN between the client, as a router, and the host in its LAN, with the network 192.168.ID.0/24 and a
/// route to the host behind the server. Returns the interface of the host in the LAN.
fn add_lan_vlan(testbed: &Testbed, parent: &str, id: u8) -> String {
    let (near, far) = (format!("{parent}.{id}"), format!("eth0.{id}"));
    let router = format!("192.168.{id}.1");
    add_vlan(testbed, Host::Client, parent, &near, id.into(), &router);
    add_vlan(testbed, Host::Lan, "eth0", &far, id.into(), &format!("192.168.{id}.2"));
    let (host, metric) = (inet4(), id.to_string());
    testbed.run(Host::Lan, &["ip", "route", "add", &host, "via", &router, "dev", &far, "metric", &metric]);
    far
}

/// Checks that pings of a host by this interface are carried by `class`, and that the kernel gives them to
/// the device of the class `critical` if, and only if, it is that class.
fn check_class(testbed: &Testbed, client: &MpvpnProcess, from: Host, interface: &str, class: &str) {
    one_of_several(interface, || {
        let device = || testbed.interface_bytes(Host::Client, "cr0").1;
        let carried = || ["critical", "bulk", "default"].map(|class| bytes_of_class(client, class));
        let (sent, before) = (device(), carried());
        send_pings(testbed, from, &["-I", interface], &inet4());
        let (sent, after) = (device() - sent, carried());
        let is_right = if class == "critical" { sent >= BURST } else { sent < MAX_OTHER };
        assert!(is_right, "{sent} bytes into the device of the class, from {interface} for {class}");
        let mut grown = ["critical", "bulk", "default"].iter().zip(before.iter().zip(&after));
        let as_expected = grown.all(|(name, (before, after))| {
            let (up, down) = (after.0 - before.0, after.1 - before.1);
            if *name == class { up.min(down) >= BURST } else { up.max(down) < MAX_OTHER }
        });
        if as_expected { Ok(()) } else { Err(format!("{before:?} became {after:?}")) }
    });
}

/// Waits until the kernel steers, or no longer steers, the packets of an interface into the class.
fn wait_until_steered(testbed: &Testbed, interface: &str, wanted: bool) {
    eventually(TIMEOUT, &format!("{interface} is steered: {wanted}"), || {
        let listing = ["nft", "list", "table", "inet", "mpvpn_mpvpn0_classes"];
        let listing = testbed.output_of(Host::Client, TIMEOUT, &listing);
        let table = String::from_utf8_lossy(&listing.stdout).into_owned();
        let is_steered = table.contains(&format!("\"{interface}\""));
        if is_steered == wanted { Ok(()) } else { Err(table) }
    });
}

#[test]
fn a_class_takes_the_packets_of_its_vlans_and_of_no_other() {
    let testbed = Testbed::with_lan(&[SLOW_LINK, SLOW_LINK]);
    if !has_vlans(&testbed) {
        return;
    }
    let _server = testbed.server(&[]);
    let [of_class, of_none] = [30, 40].map(|id| add_lan_vlan(&testbed, "lan0", id));
    let rules = format!("{BULK_PING}{TUN}[[class.match]]\nvlan = [30, 50]\n");
    let shared = ["--share", "lan0", "--share", "lan0.30", "--share", "lan0.40"];
    let client = start(&testbed, &rules, &shared);
    check_class(&testbed, &client, Host::Lan, &of_class, "critical");
    check_class(&testbed, &client, Host::Lan, &of_none, "bulk");
    check_class(&testbed, &client, Host::Lan, "eth0", "bulk");
    // Packets of the router itself come in by no interface.
    check_class(&testbed, &client, Host::Client, "mpvpn0", "bulk");

    // VLANs come and go while the client runs.
    let later = add_lan_vlan(&testbed, "lan0", 50);
    wait_until_steered(&testbed, "lan0.50", true);
    check_class(&testbed, &client, Host::Lan, &later, "critical");
    testbed.run(Host::Client, &["ip", "link", "delete", "lan0.30"]);
    wait_until_steered(&testbed, "lan0.30", false);
    check_class(&testbed, &client, Host::Lan, &later, "critical");
    check_class(&testbed, &client, Host::Lan, &of_none, "bulk");
    add_vlan(&testbed, Host::Client, "lan0", "guests", 30, "192.168.30.1");
    wait_until_steered(&testbed, "guests", true);
    check_class(&testbed, &client, Host::Lan, &of_class, "critical");
}

#[test]
fn with_an_ingress_a_class_takes_the_packets_of_vlans_above_that_interface() {
    let testbed = Testbed::with_lan(&[SLOW_LINK, SLOW_LINK]);
    if !has_vlans(&testbed) {
        return;
    }
    let _server = testbed.server(&[]);
    // The LAN is behind a bridge, as in most routers.
    let bridge = "ip link add br-lan type bridge forward_delay 0 && ip link set lan0 master br-lan
        ip link set br-lan up && ip link add spare type veth && ip link set spare up";
    testbed.run(Host::Client, &["sh", "-c", bridge]);
    add_vlan(&testbed, Host::Client, "spare", "spare.30", 30, "192.168.31.1");
    let of_bridge = add_lan_vlan(&testbed, "br-lan", 30);
    let rules = format!("{BULK_PING}{TUN}[[class.match]]\nvlan = 30\ningress = 'br-lan'\n");
    let client = start(&testbed, &rules, &[]);
    wait_until_steered(&testbed, "br-lan.30", true);
    wait_until_steered(&testbed, "spare.30", false);
    check_class(&testbed, &client, Host::Lan, &of_bridge, "critical");
}

#[test]
fn packets_of_a_vlan_leave_past_the_tunnel_by_another() {
    let testbed = Testbed::with_lan(&[SLOW_LINK, SLOW_LINK]);
    if !has_vlans(&testbed) {
        return;
    }
    let _server = testbed.server(&[]);
    add_link(&testbed, 20);
    let [past, inside] = [30, 40].map(|id| add_lan_vlan(&testbed, "lan0", id));
    let file = testbed.file("toml", Host::Client);
    std::fs::write(&file, "[[bypass]]\nvlan = 30\nlink = 'eth1.20'\n").expect("a file to write");
    let shared = ["--share", "lan0.30", "--share", "lan0.40"];
    let args = ["--config", file.to_str().expect("ASCII"), "--kill-switch"];
    let _client = testbed.client(&[&args[..], &shared].concat());
    for (interface, [by_link, by_tunnel]) in [(&past, [true, false]), (&inside, [false, true])] {
        one_of_several(interface, || {
            let count =
                || ["eth1.20", "mpvpn0"].map(|device| testbed.interface_bytes(Host::Client, device).1);
            let before = count();
            send_pings(&testbed, Host::Lan, &["-I", interface], &inet4());
            let after = count();
            let sent = [after[0] - before[0], after[1] - before[1]];
            let is_right =
                |(sent, wanted): (&u64, bool)| if wanted { *sent >= BURST } else { *sent < MAX_OTHER };
            let as_expected = sent.iter().zip([by_link, by_tunnel]).all(is_right);
            if as_expected { Ok(()) } else { Err(format!("{sent:?} bytes by eth1.20 and mpvpn0")) }
        });
    }
}
