//! Links, addresses, routes, rules, firewall and journal, against the kernel.

use std::{
    net::UdpSocket,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::common::{Folder, assert_becomes, in_namespace, ip, run};
use ipnet::IpNet;
use mpvpn_os::{
    OsError, Tun, TunConfig, UndoJournal,
    firewall::{self, Exit, MarkBits, Masquerade, Origin, PacketMatch, Rules},
    netlink::{Event, Family, Interface, MAIN_TABLE, Monitor, Netlink, Route, RouteKind, Rule},
    poll::{Events, Interest, Poller},
    sysctl,
    tunnel_net::{
        ClassNet, ClassSteering, ClassTun, ClientNet, ClientNetConfig, ClientNetState, DeviceAddresses, Nat,
        PacketAccess, Routes, ServerNet, ServerNetConfig, ShareSource, share_tunnel,
    },
    undo::Step,
};

pub(crate) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

pub(crate) fn tun(name: &str) -> (Tun, Interface) {
    let tun = Tun::open(TunConfig { name: Some(name.into()), ..TunConfig::default() }).unwrap();
    let interface = Interface { index: tun.ifindex(), name: name.into() };
    (tun, interface)
}

/// A link `eth0` with addresses and default routes, as a machine has it.
pub(crate) fn uplink() {
    ip("link add eth0 type veth peer name far0");
    // No link-local addresses, which would appear at some later time.
    for name in ["eth0", "far0"] {
        sysctl::write(&sysctl::interface_key("ipv6", name, "addr_gen_mode"), "1").unwrap();
    }
    ip("address add 192.0.2.7/24 dev eth0");
    ip("-6 address add 2001:db8::7/64 dev eth0 nodad");
    ip("link set far0 up");
    ip("link set eth0 up");
    ip("route add default via 192.0.2.1 metric 100");
    ip("-6 route add default via 2001:db8::1 dev eth0 metric 100");
    // The kernel adds these at some later time as well.
    let end = Instant::now() + Duration::from_secs(5);
    while ["eth0", "far0"]
        .iter()
        .any(|name| !ip("-6 route show table all").contains(&format!("ff00::/8 dev {name}")))
    {
        assert!(Instant::now() < end, "links without multicast routes");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The network configuration that a tunnel may change, as text.
pub(crate) fn state() -> String {
    const FORWARDING: [&str; 3] =
        ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/accept_redirects"];
    let forwarding = FORWARDING.map(|key| sysctl::read(key).unwrap());
    [
        ip("rule"),
        ip("-6 rule"),
        ip("route show table all"),
        ip("-6 route show table all"),
        run("nft", "list tables"),
        forwarding.concat(),
    ]
    .concat()
}

#[test]
fn addresses_routes_and_rules_are_added_listed_and_removed() {
    in_namespace(|| {
        let (_tun, t0) = tun("t0");
        let mut netlink = Netlink::open().unwrap();
        netlink.set_up(t0.index).unwrap();
        netlink.set_mtu(t0.index, 1380).unwrap();
        let link = netlink.link("t0").unwrap();
        assert!(link.up && link.carrier && link.mtu == 1380 && !link.loopback);
        assert_eq!(link.kind.as_deref(), Some("tun"));

        for address in [net("10.9.0.2/24"), net("fd00:9::2/64")] {
            netlink.add_address(t0.index, address).unwrap();
            netlink.add_address(t0.index, address).expect("twice is fine");
            let listed = netlink.addresses().unwrap();
            let found = listed.iter().find(|info| info.address == address).unwrap();
            assert!(found.index == t0.index && found.usable, "{found:?}");
        }
        let mut route = Route::through(net("198.51.100.0/24"), 28_016, t0.index);
        route.metric = Some(7);
        let nowhere = Route::unreachable(net("2001:db8:bad::/48"), 28_016);
        let mut rule = Rule::lookup(Family::V4, 1000, 28_016);
        rule.mark = Some((5, 0xff));
        rule.invert = true;
        rule.suppress_prefix_length = Some(8);
        for route in [&route, &nowhere] {
            netlink.add_route(route).unwrap();
            assert!(
                netlink
                    .routes()
                    .unwrap()
                    .iter()
                    .any(|r| r == route || (r.kind, r.destination) == (route.kind, route.destination))
            );
        }
        netlink.add_rule(&rule).unwrap();
        let shown = ip("rule");
        assert!(
            shown.contains("not from all fwmark 0x5/0xff lookup 28016 suppress_prefixlength 8"),
            "{shown}"
        );

        netlink.del_rule(&rule).unwrap();
        netlink.del_route(&route).unwrap();
        netlink.del_route(&nowhere).unwrap();
        netlink.del_address(t0.index, net("fd00:9::2/64")).unwrap();
        assert!(!ip("rule").contains("lookup 28016"));
        assert!(!netlink.routes().unwrap().iter().any(|route| route.table == 28_016));
        assert!(!netlink.addresses().unwrap().iter().any(|info| info.address == net("fd00:9::2/64")));
    });
}

#[test]
fn errors_name_operation_object_and_reason() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let mut route = Route::through(net("198.51.100.0/24"), MAIN_TABLE, 1);
        route.gateway = "203.0.113.1".parse().ok();
        let text = netlink.add_route(&route).unwrap_err().to_string();
        assert!(text.contains("add the route 198.51.100.0/24") && text.contains("203.0.113.1"), "{text}");
        assert!(text.contains("gateway"), "the kernel's words are missing: {text}");
        assert!(netlink.index_of("nowhere0").unwrap_err().to_string().contains("nowhere0"));
        assert!(netlink.del_rule(&Rule::lookup(Family::V6, 77, 77)).is_err());
    });
}

#[test]
fn links_with_a_default_route_are_found_best_first() {
    in_namespace(|| {
        uplink();
        ip("link add eth1 type veth peer name far1");
        ip("address add 198.51.100.7/24 dev eth1");
        ip("link set far1 up");
        ip("link set eth1 up");
        ip("route add default via 198.51.100.1 metric 50");
        let (_tun, t0) = tun("t0");
        ip("link set t0 up");
        ip("route add default dev t0 table 77");
        let mut netlink = Netlink::open().unwrap();
        assert_eq!(netlink.default_route_interfaces(&["t0"]).unwrap(), ["eth1", "eth0"]);
        assert_eq!(netlink.default_route_interfaces(&[]).unwrap()[0], t0.name);
    });
}

#[test]
fn the_monitor_sees_carrier_addresses_and_routes_come_and_go() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        ip("link set v0 up");
        ip("link set v1 up");
        let mut monitor = Monitor::open().unwrap();
        // Notifications about the interfaces that just came up may still follow.
        while monitor.next().unwrap().is_some() {}
        ip("link set v1 down");
        expect(&mut monitor, |event| {
            let Event::Link { name, up: true, carrier: false, removed: false, .. } = event else {
                return false;
            };
            name == "v0"
        });
        ip("link set v1 up");
        expect(
            &mut monitor,
            |event| matches!(event, Event::Link { name, carrier: true, .. } if name == "v0"),
        );
        ip("address add 10.1.0.1/24 dev v0");
        expect(
            &mut monitor,
            |event| matches!(event, Event::Address { address, removed: false, .. } if *address == net("10.1.0.1/24")),
        );
        ip("route add default via 10.1.0.2");
        expect(&mut monitor, |event| {
            let Event::Route { route, removed: false } = event else { return false };
            route.is_default() && route.gateway.is_some()
        });
        ip("link delete v0");
        expect(
            &mut monitor,
            |event| matches!(event, Event::Link { name, carrier: false, removed: true, .. } if name == "v0"),
        );
    });
}

/// Reads events until one matches, for at most 2 s.
fn expect(monitor: &mut Monitor, wanted: impl Fn(&Event) -> bool) {
    let poller = Poller::new().unwrap();
    poller.add(&*monitor, 0, Interest::Read).unwrap();
    let mut events = Events::with_capacity(1);
    let mut seen = Vec::new();
    for _ in 0..20 {
        while let Some(event) = monitor.next().unwrap() {
            if wanted(&event) {
                return;
            }
            seen.push(event);
        }
        poller.wait(&mut events, Some(Duration::from_millis(100))).unwrap();
    }
    panic!("never came; instead: {seen:#?}");
}

#[test]
fn an_overrun_is_reported_and_events_continue() {
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        ip("link set v0 up");
        ip("link set v1 up");
        let mut monitor = Monitor::open().unwrap();
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.index_of("v0").unwrap();
        for i in 0..6000_u32 {
            let route = Route::through(
                IpNet::new((0x0a00_0000 + i * 256).to_be_bytes().into(), 24).unwrap(),
                77,
                index,
            );
            netlink.add_route(&route).unwrap();
        }
        expect(&mut monitor, |event| *event == Event::Overrun);
        while monitor.next().unwrap().is_some() {}
        ip("link set v1 down");
        expect(&mut monitor, |event| matches!(event, Event::Link { carrier: false, .. }));
    });
}

#[test]
fn a_firewall_table_is_replaced_and_removed_as_a_whole() {
    in_namespace(|| {
        run("nft", "add table inet other");
        let masquerade = |from, exit| Masquerade { from, exit };
        let rules =
            |list: Vec<Masquerade>| Rules { name: "t-0".into(), masquerade: list, ..Rules::default() };
        firewall::install(&rules(vec![
            masquerade(Origin::Network(net("10.9.0.0/24")), Exit::AnyBut("t0".into())),
            masquerade(Origin::Network(net("fd00:9::/64")), Exit::AnyBut("t0".into())),
        ]))
        .unwrap();
        let shown = run("nft", "list table inet mpvpn_t_0");
        assert!(shown.contains("type nat hook postrouting priority srcnat"), "{shown}");
        assert!(shown.contains(r#"ip saddr 10.9.0.0/24 oifname != { "t0", "lo" } masquerade"#), "{shown}");
        assert!(shown.contains(r#"ip6 saddr fd00:9::/64 oifname != { "t0", "lo" } masquerade"#), "{shown}");

        firewall::install(&rules(vec![masquerade(
            Origin::Interface("lan0".into()),
            Exit::Through("t0".into()),
        )]))
        .unwrap();
        let shown = run("nft", "list table inet mpvpn_t_0");
        assert!(
            shown.contains(r#"iifname "lan0" oifname "t0" masquerade"#) && !shown.contains("10.9.0.0"),
            "{shown}"
        );

        firewall::remove("t-0").unwrap();
        firewall::remove("t-0").expect("twice is fine");
        assert_eq!(run("nft", "list tables").trim(), "table inet other");
    });
}

pub(crate) fn wanted(addresses: &[&str], routes: Routes, mtu: u32) -> ClientNetState {
    let addresses = addresses.iter().map(|text| net(text)).collect();
    ClientNetState { addresses, routes, behind: Vec::new(), mtu }
}

/// The outgoing interface that `ip route get` reports for these arguments; `None` if there is no route.
pub(crate) fn route_get(words: &str) -> Option<u32> {
    let output = Command::new("ip").args(["route", "get"]).args(words.split_whitespace()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let name = text.split_whitespace().skip_while(|word| *word != "dev").nth(1)?;
    Some(Netlink::open().unwrap().index_of(name).unwrap())
}

/// The outgoing interface of a packet to `destination`.
pub(crate) fn outgoing_interface(destination: &str, mark: Option<u32>) -> Option<u32> {
    route_get(&mark.map_or(destination.to_owned(), |mark| format!("{destination} mark {mark}")))
}

#[test]
fn a_client_routes_everything_into_the_tunnel_and_reverts_it() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let before = state();
        let eth0 = Netlink::open().unwrap().index_of("eth0").ok();
        let (device, t0) = tun("t0");
        let tunnel = Some(t0.index);
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let config = ClientNetConfig::new(t0, 0);
        let mark = Some(config.mark());
        let mut client = ClientNet::new(config).unwrap();

        client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        assert_eq!(outgoing_interface("203.0.113.1", None), tunnel);
        assert_eq!(outgoing_interface("203.0.113.1", mark), eth0, "the tunnel's own packets loop");
        assert_eq!(outgoing_interface("192.0.2.99", None), eth0, "the LAN is cut off");
        assert_eq!(outgoing_interface("2001:db8:1::1", None), None, "IPv6 leaks beside the tunnel");
        assert_eq!(outgoing_interface("2001:db8:1::1", mark), eth0);

        // The server assigns an IPv6 address too, and another IPv4 address of the same network.
        client.apply(&mut undo, &wanted(&["10.9.0.5/24", "fd00:9::5/64"], Routes::All, 1300)).unwrap();
        assert_eq!(
            (outgoing_interface("203.0.113.1", None), outgoing_interface("2001:db8:1::1", None)),
            (tunnel, tunnel)
        );
        let shown = ip("address show dev t0");
        assert!(shown.contains("10.9.0.5/32") && !shown.contains("10.9.0.2"), "{shown}");
        assert!(shown.contains("mtu 1300") && !shown.contains("fe80::"), "{shown}");

        // An MTU too small for IPv6, and back.
        client.apply(&mut undo, &wanted(&["10.9.0.5/24", "fd00:9::5/64"], Routes::All, 1200)).unwrap();
        assert_eq!(
            (outgoing_interface("203.0.113.1", None), outgoing_interface("2001:db8:1::1", None)),
            (tunnel, None)
        );
        client.apply(&mut undo, &wanted(&["10.9.0.5/24", "fd00:9::5/64"], Routes::All, 1400)).unwrap();
        assert_eq!(outgoing_interface("2001:db8:1::1", None), tunnel);

        let some = Routes::Advertised(vec![net("203.0.113.0/24"), net("192.0.2.0/24")]);
        client.apply(&mut undo, &wanted(&["10.9.0.5/24"], some, 1400)).unwrap();
        assert_eq!(outgoing_interface("203.0.113.1", None), tunnel);
        assert_eq!(outgoing_interface("192.0.2.99", None), eth0, "the server drew the LAN into the tunnel");
        assert_eq!(
            (outgoing_interface("198.51.100.1", None), outgoing_interface("2001:db8:1::1", None)),
            (eth0, eth0)
        );

        client.apply(&mut undo, &wanted(&["10.9.0.5/24"], Routes::None, 1400)).unwrap();
        assert_eq!(
            (outgoing_interface("203.0.113.1", None), outgoing_interface("10.9.0.1", None)),
            (eth0, tunnel)
        );
        client.clear(&mut undo).unwrap();
        assert!(undo.steps().is_empty());

        client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        assert_eq!(undo.revert_all_steps().len(), 0);
        drop(device);
        assert_becomes(&before, state);
    });
}

#[test]
fn a_failed_change_leaves_the_previous_configuration() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let mut client = ClientNet::new(ClientNetConfig::new(t0, 0)).unwrap();
        client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        let (before, steps) = (state(), undo.steps().to_vec());
        let bad = wanted(&["10.9.0.3/24", "ff02::1/64"], Routes::All, 1400);
        let error = client.apply(&mut undo, &bad).unwrap_err();
        assert!(error.to_string().contains("ff02::1/128"), "{error}");
        assert_eq!(state(), before);
        assert_eq!(undo.steps(), steps);
        client.apply(&mut undo, &wanted(&["10.9.0.3/24"], Routes::All, 1400)).unwrap();
        assert!(ip("address show dev t0").contains("10.9.0.3/32"));
    });
}

#[test]
fn strict_reverse_path_checks_are_loosened_and_restored() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let client = ClientNet::new(ClientNetConfig::new(t0, 0)).unwrap();
        let key = sysctl::interface_key("ipv4", "eth0", "rp_filter");
        for (before, after) in [("0", "0"), ("2", "2"), ("1", "2")] {
            sysctl::write("net/ipv4/conf/all/rp_filter", "0").unwrap();
            sysctl::write(&key, before).unwrap();
            client.loosen_reverse_path_filter(&mut undo, "eth0").unwrap();
            assert_eq!(sysctl::read(&key).unwrap(), after);
            assert_eq!(undo.revert_all_steps().len(), 0);
            assert_eq!(sysctl::read(&key).unwrap(), before);
        }
        sysctl::write("net/ipv4/conf/all/rp_filter", "1").unwrap();
        sysctl::write(&key, "0").unwrap();
        client.loosen_reverse_path_filter(&mut undo, "eth0").unwrap();
        assert_eq!(sysctl::read(&key).unwrap(), "2");
        // A change by another program meanwhile stays.
        sysctl::write(&key, "1").unwrap();
        assert_eq!(undo.revert_all_steps().len(), 0);
        assert_eq!(sysctl::read(&key).unwrap(), "1");
    });
}

#[test]
fn a_server_forwards_and_translates_and_reverts_it() {
    in_namespace(|| {
        uplink();
        sysctl::write("net/ipv6/conf/eth0/accept_ra", "1").unwrap();
        // A hardened machine accepts no redirects, and the kernel changes that with forwarding.
        sysctl::write("net/ipv4/conf/all/accept_redirects", "0").unwrap();
        let folder = Folder::new();
        let before = state();
        let (device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let config = ServerNetConfig {
            tun: t0.clone(),
            subnets: vec![net("10.9.0.0/24"), net("fd00:9::/64")],
            mtu: 1400,
            nat: Nat::Masquerade,
            access: PacketAccess::default(),
        };
        let server = ServerNet::configure(&mut undo, &config).unwrap();
        assert_eq!(server.addresses(), [net("10.9.0.1/24"), net("fd00:9::1/64")]);
        assert_eq!(
            (outgoing_interface("10.9.0.77", None), outgoing_interface("fd00:9::77", None)),
            (Some(t0.index), Some(t0.index))
        );
        assert_eq!(sysctl::read("net/ipv4/ip_forward").unwrap(), "1");
        assert_eq!(sysctl::read("net/ipv4/conf/all/accept_redirects").unwrap(), "0");
        assert_eq!(sysctl::read("net/ipv6/conf/all/forwarding").unwrap(), "1");
        assert_eq!(sysctl::read("net/ipv6/conf/eth0/accept_ra").unwrap(), "2");
        assert!(run("nft", "list table inet mpvpn_t0").contains("masquerade"));
        assert!(ip("-6 route show default").contains("2001:db8::1"), "forwarding cost the machine its route");

        drop(undo);
        drop(device);
        assert_becomes(&before, state);
        assert_eq!(sysctl::read("net/ipv6/conf/eth0/accept_ra").unwrap(), "1");
    });
}

#[test]
fn a_server_refuses_a_subnet_that_another_interface_has() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let before = state();
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let config = ServerNetConfig {
            tun: t0,
            subnets: vec![net("192.0.2.0/24")],
            mtu: 1400,
            nat: Nat::Masquerade,
            access: PacketAccess::default(),
        };
        let error = ServerNet::configure(&mut undo, &config).unwrap_err();
        assert!(matches!(&error, OsError::SubnetInUse { interface, .. } if interface == "eth0"), "{error}");
        assert_eq!(state(), before);
    });
}

#[test]
fn a_lan_behind_the_client_is_translated_to_the_tunnel() {
    in_namespace(|| {
        ip("link add lan0 type veth peer name lan1");
        let folder = Folder::new();
        let before = state();
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let missing = [ShareSource::Interface("nowhere0".into())];
        assert!(matches!(share_tunnel(&mut undo, &t0.name, &missing), Err(OsError::NoInterface { .. })));
        let sources = [ShareSource::Interface("lan0".into()), "192.168.7.0/24".parse().unwrap()];
        share_tunnel(&mut undo, &t0.name, &sources).unwrap();
        let shown = run("nft", "list table inet mpvpn_t0");
        assert!(shown.contains(r#"iifname "lan0" oifname "t0" masquerade"#), "{shown}");
        assert!(shown.contains(r#"ip saddr 192.168.7.0/24 oifname "t0" masquerade"#), "{shown}");
        assert_eq!(sysctl::read("net/ipv4/ip_forward").unwrap(), "1");
        drop(undo);
        assert_eq!(state(), before);
    });
}

#[test]
fn the_tun_of_a_class_gets_packets_of_bound_sockets_and_steered_packets() {
    in_namespace(|| {
        uplink();
        ip("link add lan0 type veth peer name lan1");
        sysctl::write("net/ipv4/conf/all/rp_filter", "1").unwrap();
        let folder = Folder::new();
        let before = state();
        let eth0 = Netlink::open().unwrap().index_of("eth0").ok();
        let ((device, t0), (class_device, c0)) = (tun("t0"), tun("c0"));
        let (main, of_class) = (Some(t0.index), Some(c0.index));
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let config = ClientNetConfig::new(t0, 0);
        let mut client = ClientNet::new(config.clone()).unwrap();
        let addresses = &["10.9.0.2/24", "fd00:9::2/64"];
        client.apply(&mut undo, &wanted(addresses, Routes::All, 1400)).unwrap();
        let steering = |vlans: &[u16], packets| ClassSteering { number: 1, packets, vlans: vlans.into() };
        let udp = PacketMatch {
            ingress: vec!["lan0".into()],
            protocols: vec![17],
            to: vec![net("198.51.100.0/24"), net("198.51.100.0/25"), net("2001:db8:7::/48")],
            ports: vec![(5060, 5061), (5061, 5070)],
            dscp: vec![46],
            ..PacketMatch::default()
        };
        let marked = PacketMatch {
            marks: vec![MarkBits { value: 0x10, mask: 0xff }, MarkBits { value: 7, mask: u32::MAX }],
            ..PacketMatch::default()
        };
        let steering =
            vec![steering(&[], udp), steering(&[], marked), steering(&[40], PacketMatch::default())];
        let tuns = vec![ClassTun { interface: c0, number: 1, mark: Some(2), is_pinned: false }];
        let mut classes = ClassNet::new(config.clone(), tuns, steering).unwrap();
        classes.enable_forwarding(&mut undo).unwrap();
        let given = |own| DeviceAddresses { addresses: vec![net("10.9.0.3/32"), net("fd00:9::3/128")], own };
        classes.apply(&mut undo, vec![given(true)], 1400).unwrap();
        assert_eq!(sysctl::read("net/ipv4/conf/c0/rp_filter").unwrap(), "2");

        let mark = Some(2 << 24 | 0x10);
        for (destination, lan) in [("203.0.113.1", "192.0.2.99"), ("2001:db8:1::1", "2001:db8::99")] {
            assert_eq!(
                (outgoing_interface(destination, None), outgoing_interface(destination, mark)),
                (main, of_class)
            );
            assert_eq!(
                outgoing_interface(destination, Some(config.mark())),
                eth0,
                "the tunnel's own packets loop"
            );
            assert_eq!(outgoing_interface(lan, mark), eth0, "the LAN is cut off");
            assert_eq!(route_get(&format!("{destination} oif c0")), of_class);
        }
        let rules = ip("rule");
        assert!(rules.contains("from 10.9.0.3 lookup 28018"), "{rules}");
        let table = || run("nft", "list table inet mpvpn_t0_classes");
        let shown = table();
        for words in [
            r#"oifname "c0" masquerade"#,
            "type route hook output priority",
            "meta mark & 0x0000ffff == 0x00006d70 accept",
            r#"iifname "lan0""#,
            "ip daddr 198.51.100.0/24 ip dscp ef",
            "ip6 daddr 2001:db8:7::/48 ip6 dscp ef",
            "dport 5060-5070",
            "meta mark & 0x000000ff == 0x00000010 meta mark set meta mark & 0xf2ffffff | 0x02000000 accept",
            "meta mark 0x00000007 meta mark set",
        ] {
            assert!(squeezed(&shown).contains(words), "{words} in\n{shown}");
        }
        assert_eq!(shown.matches("meta mark set").count(), 2 + 4 + 4, "a VLAN that is not there: {shown}");
        classes.update_vlan_interfaces(&mut undo).unwrap();
        assert_eq!(table(), shown);

        // Without an address of its own the device gets no packets by source address; below an MTU of 1280 it
        // has no IPv6.
        classes.apply(&mut undo, vec![given(false)], 1279).unwrap();
        assert!(!ip("rule").contains("from 10.9.0.3"));
        assert_eq!(
            (outgoing_interface("203.0.113.1", mark), outgoing_interface("2001:db8:1::1", mark)),
            (of_class, main)
        );
        assert_eq!(undo.revert_all_steps().len(), 0);
        drop((device, class_device));
        assert_becomes(&before, state);
    });
}

#[test]
fn packets_of_a_vlan_are_steered_by_its_interfaces_as_they_are_added_and_removed() {
    in_namespace(|| {
        ip("link add lan0 type veth peer name lan1");
        let add = |words: &str| Command::new("ip").args(words.split(' ')).output().unwrap().status.success();
        if !add("link add link lan0 name lan0.20 type vlan id 20") {
            eprintln!("skipped: this kernel has no VLANs");
            return;
        }
        assert!(add("link add link lan1 name lan1.20 type vlan id 20"));
        let folder = Folder::new();
        let ((_device, t0), (_class_device, c0)) = (tun("t0"), tun("c0"));
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let packets = PacketMatch { ingress: vec!["lan0".into()], ..PacketMatch::default() };
        let steering = vec![ClassSteering { number: 1, packets, vlans: vec![20, 30] }];
        let tuns = vec![ClassTun { interface: c0, number: 1, mark: Some(2), is_pinned: false }];
        let mut classes = ClassNet::new(ClientNetConfig::new(t0, 0), tuns, steering).unwrap();
        let given = DeviceAddresses { addresses: vec![net("10.9.0.3/32")], own: true };
        classes.apply(&mut undo, vec![given], 1400).unwrap();
        let table = || run("nft", "list table inet mpvpn_t0_classes");
        let first = table();
        assert!(first.contains(r#"iifname "lan0.20""#) && !first.contains("lan1.20"), "{first}");
        assert!(add("link add link lan0 name guests type vlan id 30"));
        classes.update_vlan_interfaces(&mut undo).unwrap();
        assert!(table().contains(r#""guests""#), "{}", table());
        ip("link delete guests");
        classes.update_vlan_interfaces(&mut undo).unwrap();
        assert_eq!(table(), first);
    });
}

/// A program that ends with this value, also if the test fails: one that goes on would hold the output of the
/// tests open.
struct Program(std::process::Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// The changes of nftables during `task`, by transaction, as `nft monitor` prints them.
fn nft_transactions(folder: &Folder, task: impl FnOnce()) -> Vec<String> {
    let path = folder.0.join("nft-monitor");
    let file = std::fs::File::create(&path).unwrap();
    let mut monitor = Command::new("nft");
    let monitor = monitor.arg("monitor").stdout(file).stderr(std::process::Stdio::null());
    let monitor = Program(monitor.spawn().unwrap());
    let text = || std::fs::read_to_string(&path).unwrap();
    // A table that is added again and again until the monitor listens, and one at the end.
    let wait_for = |table: &str| {
        let end = Instant::now() + Duration::from_secs(15);
        while !text().contains(&format!("add table inet {table}\n")) {
            assert!(Instant::now() < end, "nft monitor has not printed {table}: {}", text());
            run("nft", &format!("add table inet {table}"));
            run("nft", &format!("delete table inet {table}"));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    wait_for("before");
    task();
    wait_for("after");
    drop(monitor);
    text().split("# new generation").map(str::to_owned).collect()
}

#[test]
fn tables_are_replaced_in_one_transaction() {
    in_namespace(|| {
        let folder = Folder::new();
        let ((_device, t0), (_class_device, c0)) = (tun("t0"), tun("c0"));
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let tuns = vec![ClassTun { interface: c0, number: 1, mark: Some(2), is_pinned: false }];
        let config = ClientNetConfig::new(t0, 0);
        let mut client = ClientNet::new(config.clone()).unwrap();
        let mut classes = ClassNet::new(config, tuns, Vec::new()).unwrap();
        let mut apply = |address: &str| {
            client.apply(&mut undo, &wanted(&[address], Routes::None, 1400)).unwrap();
            let given = DeviceAddresses { addresses: vec![net(address)], own: true };
            classes.apply(&mut undo, vec![given], 1400).unwrap();
        };
        apply("10.9.0.3/32");
        let transactions = nft_transactions(&folder, || apply("10.9.0.4/32"));
        for table in ["mpvpn_t0_addresses", "mpvpn_t0_classes"] {
            let removes = |one: &&String| one.contains(&format!("delete table inet {table}\n"));
            let removed: Vec<&String> = transactions.iter().filter(removes).collect();
            let [replaced] = removed[..] else { panic!("{table} is replaced once: {transactions:#?}") };
            assert!(replaced.contains(&format!("add table inet {table}\n")), "{transactions:#?}");
            assert!(run("nft", &format!("list table inet {table}")).contains("10.9.0.4"));
        }
        assert_eq!(undo.revert_all_steps().len(), 0);
        assert_eq!(run("nft", "list tables"), "");
    });
}

/// Removes the differences between versions of `nft`.
pub(crate) fn squeezed(text: &str) -> String {
    let words = text.replace(['{', '}', '(', ')'], " ");
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The environment variable that names the folder of the journal for the process that is killed on purpose.
const VICTIM: &str = "MPVPN_OS_TEST_VICTIM";

#[test]
fn a_neighbour_resolution_started_without_carrier_is_restarted() {
    in_namespace(|| {
        uplink();
        let away = Elsewhere::new();
        ip(&format!("link set far0 netns {}", away.0));
        let far = |words: &str| ip(&format!("-n {} {words}", away.0));
        far("address add 192.0.2.1/24 dev far0");
        let mut netlink = Netlink::open().unwrap();
        let eth0 = netlink.index_of("eth0").unwrap();
        let unresolved = || ip("neighbour show dev eth0 nud incomplete");
        let send = || UdpSocket::bind("192.0.2.7:0").unwrap().send_to(b"x", "192.0.2.1:9").map(drop);
        assert_becomes(&false, || has_carrier("eth0"));
        send().unwrap();
        assert!(unresolved().contains("192.0.2.1"), "{}", unresolved());
        far("link set far0 up");
        assert_becomes(&true, || has_carrier("eth0"));
        netlink.flush_unresolved_neighbours(eth0).unwrap();
        assert_eq!(unresolved(), "");
        let sent = Instant::now();
        send().unwrap();
        assert_becomes(&true, || ip("neighbour show dev eth0").contains("lladdr"));
        // Half of the kernel's interval between two requests.
        assert!(sent.elapsed() < Duration::from_millis(500), "{:?}", sent.elapsed());
    });
}

/// A second network namespace.
struct Elsewhere(String);

impl Elsewhere {
    fn new() -> Self {
        let name = format!("mpvpn-os-test-{}", std::process::id());
        ip(&format!("netns add {name}"));
        Self(name)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        ip(&format!("netns delete {}", self.0));
    }
}

fn has_carrier(name: &str) -> bool {
    Netlink::open().unwrap().link(name).unwrap().carrier
}

#[test]
fn what_a_killed_process_left_is_cleaned_up_by_the_next() {
    if let Ok(folder) = std::env::var(VICTIM) {
        change_everything_and_die(Path::new(&folder));
    }
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let before = state();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "network::what_a_killed_process_left_is_cleaned_up_by_the_next", "--nocapture"])
            .env(VICTIM, &folder.0)
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
        let left = state();
        assert!(left.contains("mpvpn_t0") && left.contains("0x6d70"), "the victim changed nothing: {left}");

        let undo = UndoJournal::open(&folder.0, "t0").unwrap();
        assert_eq!(state(), before);
        drop(undo);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0, "the journal was left");
    });
}

/// Runs in the network namespace of the process that started this one.
fn change_everything_and_die(folder: &Path) -> ! {
    let (_tun, t0) = tun("t0");
    let mut undo = UndoJournal::open(folder, "t0").unwrap();
    let mut client = ClientNet::new(ClientNetConfig::new(t0, 0)).unwrap();
    client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
    share_tunnel(&mut undo, "t0", &[ShareSource::Interface("eth0".into())]).unwrap();
    let unreachable =
        |step: &Step| matches!(step, Step::Route { route, .. } if route.kind == RouteKind::Unreachable);
    assert!(undo.steps().iter().any(unreachable));
    // SAFETY: ends this process, which exists for that.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("killed");
}
