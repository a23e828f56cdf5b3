//! The packet filter for clients of a server, against the kernel.

use std::{
    io::{ErrorKind, IoSlice},
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use crate::common::{Folder, in_namespace, ip, run};
use ipnet::IpNet;
use mpvpn_os::{
    Tun, TunConfig, UndoJournal,
    firewall::{ClientFilter, FilterRule, SessionProfiles},
    netlink::Interface,
    sysctl,
    tun::{READ_BUFFER_LEN, VNET_HEADER_LEN},
    tunnel_net::{Nat, PacketAccess, ServerNet, ServerNetConfig},
};
use mpvpn_packets::Packet;

/// The outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It left by the interface to the internet.
    Forwarded,
    /// It left by the TUN device, for another client.
    ToClient,
    /// A program of the server's machine received it.
    Taken,
    /// It was answered with ICMP "administratively prohibited".
    Prohibited,
    /// None of these, within [`WAIT`].
    Dropped,
}
use Outcome::{Dropped, Forwarded, Prohibited, Taken, ToClient};

/// How long a packet may take inside one machine.
const WAIT: Duration = Duration::from_millis(150);
const CLIENT: &str = "10.9.0.2";
const CLIENT6: &str = "fd00:9::2";
/// Loopback and link-local addresses, and metadata services of clouds.
const BLOCKED: [&str; 9] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "168.63.129.16/32",
    "100.100.100.200/32",
    "::/32",
    "fe80::/10",
    "fd00:ec2::254/128",
    "64:ff9b::a9fe:0/112",
];

/// A server's machine: a TUN device for clients, another one that stands for the internet.
struct Machine {
    clients: Tun,
    internet: Tun,
    /// At all addresses, port 7.
    program: UdpSocket,
    net: ServerNet,
    _undo: UndoJournal,
    _folder: Folder,
}

impl Machine {
    fn new(nat: Nat, access: PacketAccess) -> Self {
        let internet = tun("net0");
        for address in ["192.0.2.1/24", "2001:db8::1/64", "203.0.113.7/32", "2001:db8:7::7/128"] {
            ip(&format!("address add {address} dev net0 nodad"));
        }
        ip("link set net0 up");
        ip("route add default dev net0");
        ip("-6 route add default dev net0");
        let (clients, folder) = (tun("t0"), Folder::new());
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let subnets = vec!["10.9.0.0/24".parse().unwrap(), "fd00:9::/64".parse().unwrap()];
        let tun = Interface { name: "t0".into(), index: clients.ifindex() };
        let config = ServerNetConfig { tun, subnets, mtu: 1400, nat, access };
        let net = ServerNet::configure(&mut undo, &config).unwrap();
        // The test provokes more errors in a second than a kernel sends to one host.
        sysctl::write("net/ipv4/icmp_ratelimit", "0").unwrap();
        sysctl::write("net/ipv6/icmp/ratelimit", "0").unwrap();
        let program = UdpSocket::bind("[::]:7").unwrap();
        program.set_nonblocking(true).unwrap();
        Self { clients, internet, program, net, _undo: undo, _folder: folder }
    }

    /// The outcome of a UDP datagram of a client.
    fn udp(&self, from: &str, to: &str) -> Outcome {
        let from = SocketAddr::new(from.parse().unwrap(), 4000);
        self.outcome(&self.clients, &Packet::between(from, to.parse().unwrap()).udp(b"x"))
    }

    /// The same from the client that most tests use, over the family of the destination.
    fn datagram_to(&self, to: &str) -> Outcome {
        self.udp(if to.starts_with('[') { CLIENT6 } else { CLIENT }, to)
    }

    fn tcp(&self, to: &str) -> Outcome {
        let from = SocketAddr::new(CLIENT.parse().unwrap(), 4000);
        let syn = mpvpn_packets::Tcp { flags: 2, ..mpvpn_packets::Tcp::default() };
        self.outcome(&self.clients, &Packet::between(from, to.parse().unwrap()).tcp_with(&syn, b""))
    }

    fn outcome(&self, by: &Tun, packet: &[u8]) -> Outcome {
        let header = [0; VNET_HEADER_LEN];
        by.write_vectored(&[IoSlice::new(&header), IoSlice::new(packet)]).unwrap();
        self.outcome_of_next()
    }

    /// The outcome of the packet in flight.
    fn outcome_of_next(&self) -> Outcome {
        let end = Instant::now() + WAIT;
        let mut buffer = vec![0; READ_BUFFER_LEN];
        while Instant::now() < end {
            if self.program.recv(&mut buffer).is_ok() {
                return Taken;
            }
            for (tun, other) in [(&self.internet, Forwarded), (&self.clients, ToClient)] {
                match tun.read(&mut buffer) {
                    Ok(length) => match &buffer[VNET_HEADER_LEN..length] {
                        packet if is_prohibition(packet) => return Prohibited,
                        // The machine's own chatter, as listener reports.
                        [first, ..] if first >> 4 == 6 && buffer[VNET_HEADER_LEN + 6] != 17 => {}
                        _ => return other,
                    },
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Dropped
    }
}

/// Whether a packet is ICMP "communication administratively prohibited".
fn is_prohibition(packet: &[u8]) -> bool {
    match packet[0] >> 4 {
        4 => packet[9] == 1 && packet[20..22] == [3, 13],
        _ => packet[6] == 58 && packet[40..42] == [1, 1],
    }
}

fn tun(name: &str) -> Tun {
    Tun::open(TunConfig { name: Some(name.into()), ..TunConfig::default() }).unwrap()
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

fn rule(allow: bool, to: &[&str], ports: &[(u16, u16)]) -> FilterRule {
    FilterRule { allow, to: nets(to), ports: ports.to_vec() }
}

fn access(profiles: &[&[FilterRule]]) -> PacketAccess {
    let profiles = profiles.iter().map(|profile| profile.to_vec()).collect();
    PacketAccess { blocked: nets(&BLOCKED), profiles, ..PacketAccess::default() }
}

#[track_caller]
fn check(machine: &Machine, cases: &[(&str, Outcome)]) {
    for (to, outcome) in cases {
        assert_eq!(machine.datagram_to(to), *outcome, "{to}: {}", table());
    }
}

fn table() -> String {
    run("nft", "list table inet mpvpn_t0_clients")
}

#[test]
fn without_rules_everything_is_reached_but_metadata_and_the_machine() {
    in_namespace(|| {
        let machine = Machine::new(Nat::Masquerade, access(&[]));
        check(
            &machine,
            &[
                ("198.51.100.9:25", Forwarded),
                ("[2001:db8:1::9]:25", Forwarded),
                ("172.16.5.9:80", Forwarded),
                ("[fd77::9]:80", Forwarded),
                ("10.9.0.1:7", Taken),
                ("[fd00:9::1]:7", Taken),
                ("10.9.0.3:7", ToClient),
                ("[fd00:9::3]:7", ToClient),
                ("192.0.2.1:7", Prohibited),
                ("203.0.113.7:7", Prohibited),
                ("[2001:db8::1]:7", Prohibited),
                ("[2001:db8:7::7]:7", Prohibited),
                ("168.63.129.16:80", Prohibited),
                ("100.100.100.200:80", Prohibited),
                ("[fd00:ec2::254]:80", Prohibited),
                ("192.0.2.255:7", Dropped),
                ("10.9.0.255:7", Dropped),
            ],
        );
        assert_eq!(machine.tcp("203.0.113.7:22"), Prohibited, "a SYN");
        assert_eq!(machine.tcp("198.51.100.9:22"), Forwarded);
    });
}

/// Docker publishes ports in this way: without a look at the address before translation they would be
/// reached.
#[test]
fn an_address_of_the_machine_is_not_reached_through_its_own_translation() {
    in_namespace(|| {
        let machine = Machine::new(Nat::Masquerade, access(&[]));
        run("nft", "add table ip docker");
        run("nft", "add chain ip docker prerouting { type nat hook prerouting priority dstnat ; }");
        run("nft", "add rule ip docker prerouting ip daddr 203.0.113.7 udp dport 8080 dnat to 172.17.0.2:80");
        assert_eq!(machine.datagram_to("203.0.113.7:8080"), Prohibited, "{}", table());
    });
}

#[test]
fn the_first_rule_that_fits_decides_and_a_session_has_its_own() {
    in_namespace(|| {
        let mail = rule(false, &[], &[(25, 25), (465, 587)]);
        let office = rule(false, &["172.16.0.0/12", "fd77::/16"], &[]);
        let own: &[FilterRule] =
            &[rule(true, &["172.16.5.9/32", "203.0.113.7/32"], &[]), mail.clone(), office];
        let only_web = [rule(true, &[], &[(443, 443)]), rule(false, &[], &[])];
        let machine = Machine::new(Nat::Masquerade, access(&[&[mail], own, &only_web]));
        let plain = [
            ("198.51.100.9:25", Prohibited),
            ("[2001:db8:1::9]:25", Prohibited),
            ("198.51.100.9:500", Prohibited),
            ("198.51.100.9:588", Forwarded),
            ("172.16.5.8:80", Forwarded),
            ("203.0.113.7:7", Prohibited),
        ];
        check(&machine, &plain);
        assert_eq!(machine.tcp("198.51.100.9:25"), Prohibited);
        let mut sessions = machine.net.session_profiles();
        let addresses = [CLIENT, CLIENT6].map(|ip| ip.parse::<IpAddr>().unwrap());
        sessions.change(addresses.map(|ip| (ip, 1))).unwrap();
        let office = [
            ("198.51.100.9:25", Prohibited),
            ("[2001:db8:1::9]:25", Prohibited),
            ("172.16.5.9:25", Forwarded),
            ("172.16.5.8:80", Prohibited),
            ("[fd77::9]:80", Prohibited),
            ("203.0.113.7:7", Taken),
            ("198.51.100.9:588", Forwarded),
        ];
        check(&machine, &office);
        assert_eq!(machine.udp("10.9.0.3", "172.16.5.8:80"), Forwarded, "another session");
        // Another user gets the addresses.
        sessions.change(addresses.map(|ip| (ip, 2))).unwrap();
        let web =
            [("198.51.100.9:443", Forwarded), ("198.51.100.9:80", Prohibited), ("10.9.0.1:7", Prohibited)];
        check(&machine, &web);
        // Tables that others flush come back with the sessions.
        assert!(!sessions.repair().unwrap());
        run("nft", "flush ruleset");
        assert_eq!(machine.datagram_to("198.51.100.9:80"), Forwarded);
        assert!(sessions.repair().unwrap());
        check(&machine, &web);
        sessions.change(addresses.map(|ip| (ip, 0))).unwrap();
        check(&machine, &plain);
    });
}

#[test]
fn the_machine_and_metadata_are_reached_only_where_a_rule_names_the_address() {
    let guarded = [
        ("127.0.0.1:7", "127.0.0.0/8", "127.0.0.1/32"),
        ("0.0.0.0:7", "0.0.0.0/8", "0.0.0.0/32"),
        ("[::1]:7", "::/127", "::1/128"),
        ("[::ffff:127.0.0.1]:7", "::/32", "::ffff:7f00:1/128"),
        ("169.254.7.7:7", "169.254.0.0/16", "169.254.7.7/32"),
        ("[64:ff9b::169.254.169.254]:80", "64:ff9b::/96", "64:ff9b::a9fe:a9fe/128"),
        ("168.63.129.16:80", "168.63.0.0/16", "168.63.129.16/32"),
        ("[fd00:ec2::254]:80", "fd00::/8", "fd00:ec2::254/128"),
        ("203.0.113.7:7", "203.0.113.0/24", "203.0.113.7/32"),
        ("[2001:db8:7::7]:7", "2001:db8:7::/64", "2001:db8:7::7/128"),
    ];
    in_namespace(move || {
        let careless = |network: &str| {
            [
                rule(true, &[], &[]),
                rule(true, &[], &[(7, 7), (80, 80)]),
                rule(true, &["0.0.0.0/0", "::/0"], &[]),
                rule(true, &[network], &[(1, 65535)]),
            ]
        };
        let machine = Machine::new(Nat::Masquerade, access(&[&[]]));
        let mut sessions = machine.net.session_profiles();
        let mut set = |profile: &[FilterRule]| {
            let filter = ClientFilter { profiles: vec![profile.to_vec()], ..sessions.filter().clone() };
            sessions.replace_rules(filter, [], []).unwrap();
        };
        for (to, network, address) in guarded {
            let named = rule(true, &[address], &[]);
            for broad in careless(network) {
                set(std::slice::from_ref(&broad));
                let outcome = machine.datagram_to(to);
                assert!(matches!(outcome, Prohibited | Dropped), "{to}, {broad:?}: {outcome:?} {}", table());
                check(&machine, &[("10.9.0.1:7", Taken), ("198.51.100.9:80", Forwarded)]);
                // Later rules count.
                set(&[broad, named.clone()]);
                let outcome = machine.datagram_to(to);
                assert_ne!(outcome, Prohibited, "{to}: {}", table());
            }
            set(&[named, rule(false, &[], &[])]);
            assert_ne!(machine.datagram_to(to), Prohibited, "{to}: {}", table());
        }
        // Clients of the server, and its own addresses in the tunnel, are others.
        for broad in careless("10.9.0.0/24") {
            set(&[broad, rule(false, &[], &[])]);
            check(&machine, &[("10.9.0.3:7", ToClient), ("10.9.0.1:7", Taken)]);
        }
    });
}

#[test]
fn isolated_clients_do_not_reach_each_other_whatever_the_rules_say() {
    in_namespace(|| {
        let all = [rule(true, &[], &[])];
        let access = PacketAccess { is_isolated: true, ..access(&[&all]) };
        let machine = Machine::new(Nat::Masquerade, access);
        check(
            &machine,
            &[
                ("10.9.0.3:7", Prohibited),
                ("[fd00:9::3]:7", Prohibited),
                ("10.9.0.1:7", Taken),
                ("[fd00:9::1]:7", Taken),
                ("198.51.100.9:80", Forwarded),
            ],
        );
    });
}

#[test]
fn neighbours_open_no_connection_to_clients_unless_these_keep_their_addresses() {
    let cases = [("192.0.2.9", CLIENT), ("2001:db8::9", CLIENT6)];
    let from_outside = |machine: &Machine, (from, to): (&str, &str), ports: (u16, u16)| {
        let address = |ip: &str, port| SocketAddr::new(ip.parse().unwrap(), port);
        let packet = Packet::between(address(from, ports.0), address(to, ports.1));
        machine.outcome(&machine.internet, &packet.udp(b"x"))
    };
    in_namespace(move || {
        let machine = Machine::new(Nat::Masquerade, access(&[]));
        for case in cases {
            assert_eq!(from_outside(&machine, case, (9, 4000)), Dropped, "{}", table());
        }
        // The server's own programs do.
        let program = UdpSocket::bind("10.9.0.1:0").unwrap();
        program.send_to(b"x", (CLIENT, 9)).unwrap();
        assert_eq!(machine.outcome_of_next(), ToClient);
    });
    in_namespace(move || {
        let machine = Machine::new(Nat::None, access(&[&[rule(false, &[], &[])]]));
        for (from, to) in cases {
            assert_eq!(from_outside(&machine, (from, to), (9, 4000)), ToClient, "{}", table());
            // Replies pass even where a rule forbids new packets.
            let there = SocketAddr::new(from.parse().unwrap(), 9);
            assert_eq!(machine.udp(to, &there.to_string()), Forwarded, "{}", table());
            let other = SocketAddr::new(from.parse().unwrap(), 10);
            assert_eq!(machine.udp(to, &other.to_string()), Prohibited, "{}", table());
        }
    });
}

#[test]
fn a_thousand_sessions_get_their_profiles_in_a_few_transactions() {
    in_namespace(|| {
        let machine = Machine::new(Nat::Masquerade, access(&[&[], &[rule(false, &["172.16.0.0/12"], &[])]]));
        let address = |number: u32| IpAddr::V4((0x0a09_0000 + 2 + number).into());
        let time = |sessions: &mut SessionProfiles, changes: &[(IpAddr, usize)]| {
            let began = Instant::now();
            sessions.change(changes.iter().copied()).unwrap();
            began.elapsed()
        };
        let mut sessions = machine.net.session_profiles();
        let all: Vec<_> = (0..1000).map(|number| (address(number), 1)).collect();
        let batched = time(&mut sessions, &all);
        let single = time(&mut sessions, &[(address(1001), 1)]);
        // The quickest of ten: one measurement beside other tests is that of the machine's scheduler.
        let unchanged = (0..10).map(|_| time(&mut sessions, &all)).min().unwrap();
        println!("1,000 at once {batched:?}; one more {single:?}; no difference {unchanged:?}");
        assert_eq!(machine.datagram_to("172.16.5.9:80"), Prohibited, "{}", table());
        assert!(batched < Duration::from_secs(1), "1,000 elements took {batched:?}");
        assert!(unchanged < Duration::from_millis(2), "nothing to do took {unchanged:?}");
    });
}
