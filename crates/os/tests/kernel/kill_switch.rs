//! The kill switch against the kernel: what passes, and that the table stays and comes back.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
};

use mpvpn_os::{
    OsError, UdpOptions, UdpSocket,
    kill_switch::{self, Exceptions, KillSwitch, TABLE, TableMonitor},
};
use rustix::{
    io::Errno,
    net::{AddressFamily, SendFlags, SocketType, ipproto},
};

use crate::common::{Folder, in_namespace, ip, run};

const MARK: u32 = 0x6d70;
const SERVER: &str = "192.0.2.1:4433";
const SERVER_V6: &str = "[2001:db8:1::1]:4433";

/// Two links: one to the internet, one to a LAN, and a device that stands for the tunnel.
fn links() {
    for (name, v4, v6) in [
        ("eth0", "192.0.2.7/24", "2001:db8:1::7/64"),
        ("lan0", "192.168.1.7/24", "fd12::7/64"),
        ("mpvpn0", "10.0.0.2/24", "fd00::2/64"),
    ] {
        ip(&format!("link add {name} type veth peer name far-{name}"));
        ip(&format!("address add {v4} dev {name}"));
        // Without a detection of duplicates the address is of use at once.
        ip(&format!("address add {v6} dev {name} nodad"));
        ip(&format!("link set {name} up"));
        ip(&format!("link set far-{name} up"));
    }
    ip("route add default via 192.0.2.1");
    ip("route add default via 2001:db8:1::1");
}

fn exceptions() -> Exceptions {
    Exceptions {
        devices: vec!["mpvpn0".into()],
        mark: MARK,
        remotes: vec![SERVER.parse().unwrap(), SERVER_V6.parse().unwrap()],
        lan: vec!["192.168.1.0/24".parse().unwrap(), "fd12::/64".parse().unwrap()],
        is_hold: false,
    }
}

/// Whether a datagram to this address leaves, with a mark or without (0).
fn leaves(to: &str, mark: u32) -> bool {
    let to: SocketAddr = to.parse().unwrap();
    let any = if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let mut options = UdpOptions::new((any, 0).into());
    options.mark = (mark != 0).then_some(mark);
    let socket = UdpSocket::bind(&options).unwrap();
    was_sent(rustix::net::sendto(&socket, b"x", SendFlags::empty(), &to), to.ip())
}

/// Whether an ICMP message of the first type of the pair leaves to an IPv4 address, of the second type to an
/// IPv6 address.
fn leaves_icmp(to: &str, (v4, v6): (u8, u8)) -> bool {
    let to: IpAddr = to.parse().unwrap();
    let (family, protocol, kind) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, v4),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, v6),
    };
    let socket = rustix::net::socket(family, SocketType::RAW, Some(protocol)).unwrap();
    let message = [&[kind][..], &[0; 31]].concat();
    was_sent(rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddr::new(to, 0)), to)
}

fn was_sent(sent: rustix::io::Result<usize>, to: IpAddr) -> bool {
    match sent {
        Ok(_) => true,
        Err(Errno::PERM) => false,
        Err(error) => panic!("{to}: {error}"),
    }
}

fn table() -> Option<String> {
    let output = Command::new("nft").args(["list", "table", "inet", TABLE]).output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

#[test]
fn only_the_tunnel_the_server_and_the_lan_are_reached() {
    in_namespace(|| {
        links();
        let folder = Folder::new();
        let mut switch = KillSwitch::arm(&folder.0, "mpvpn0", exceptions()).unwrap();
        let cases = [
            ("198.51.100.9:80", 0, false, "the internet"),
            ("198.51.100.9:80", MARK, false, "another host, with the client's mark"),
            (SERVER, 0, false, "the server, without the mark"),
            (SERVER, MARK, true, "the server"),
            ("192.0.2.1:53", MARK, false, "another port of the server"),
            ("10.0.0.9:80", 0, true, "the tunnel"),
            ("127.0.0.1:80", 0, true, "this machine"),
            ("192.168.1.9:80", 0, true, "the LAN"),
            ("192.168.1.9:53", 0, false, "a resolver in the LAN"),
            ("192.168.1.9:853", 0, false, "an encrypted resolver in the LAN"),
            ("[2001:db8:9::9]:80", 0, false, "the internet over IPv6"),
            ("[2001:db8:9::9]:80", MARK, false, "another host over IPv6, with the client's mark"),
            (SERVER_V6, 0, false, "the server over IPv6, without the mark"),
            (SERVER_V6, MARK, true, "the server over IPv6"),
            ("[2001:db8:1::1]:53", MARK, false, "another port of the server over IPv6"),
            ("[fd00::9]:80", 0, true, "the tunnel over IPv6"),
            ("[::1]:80", 0, true, "this machine over IPv6"),
            ("[fd12::9]:80", 0, true, "the LAN over IPv6"),
            ("[fd12::9]:53", 0, false, "a resolver in the LAN over IPv6"),
            ("[fd12::9]:853", 0, false, "an encrypted resolver in the LAN over IPv6"),
        ];
        for (to, mark, passes, what) in cases {
            assert_eq!(leaves(to, mark), passes, "{what}: {}", table().unwrap());
        }
        let (echo_request, neighbor_solicitation) = ((8, 128), (0, 135));
        for (to, passes) in [
            ("198.51.100.9", false),
            ("2001:db8:9::9", false),
            ("192.168.1.9", true),
            ("fd12::9", true),
            ("10.0.0.9", true),
            ("fd00::9", true),
        ] {
            assert_eq!(leaves_icmp(to, echo_request), passes, "a ping to {to}: {}", table().unwrap());
        }
        assert!(leaves_icmp("2001:db8:1::9", neighbor_solicitation), "without it no link has IPv6");
        let resolver = "192.0.2.1:53".parse().unwrap();
        switch.change(Exceptions { remotes: vec![resolver], lan: Vec::new(), ..exceptions() }).unwrap();
        assert!(leaves("192.0.2.1:53", MARK));
        assert!(!leaves(SERVER, MARK) && !leaves("192.168.1.9:80", 0));
        switch.lift().unwrap();
        assert!(leaves("198.51.100.9:80", 0));
        assert_eq!(table(), None);
        folder.assert_empty();
    });
}

#[test]
fn a_client_that_crashes_leaves_it_standing_and_one_that_ends_leaves_that_of_others() {
    in_namespace(|| {
        links();
        let folder = Folder::new();
        let crashed = KillSwitch::arm(&folder.0, "first", exceptions()).unwrap();
        drop(crashed);
        assert!(!leaves("198.51.100.9:80", 0));
        let other = Exceptions { mark: 7, remotes: vec!["192.0.2.2:443".parse().unwrap()], ..exceptions() };
        let second = KillSwitch::arm(&folder.0, "second", other).unwrap();
        assert!(leaves("192.0.2.2:443", 7) && leaves(SERVER, MARK), "each has its own exceptions");
        assert!(!leaves("192.0.2.2:443", MARK) && !leaves(SERVER, 7));
        // The process of both records is this one, which lives.
        assert!(kill_switch::reset(&folder.0).unwrap().is_empty());
        second.lift().unwrap();
        assert!(!leaves("192.0.2.2:443", 7), "the exceptions of the second are gone");
        assert!(!leaves("198.51.100.9:80", 0), "the first still blocks");
        KillSwitch::arm(&folder.0, "first", exceptions()).unwrap().lift().unwrap();
        assert!(leaves("198.51.100.9:80", 0), "the same instance lifts what it left");
    });
}

#[test]
fn the_block_of_a_client_that_has_ended_is_named_and_released_and_that_of_a_living_one_stays() {
    in_namespace(|| {
        links();
        let folder = Folder::new();
        assert_eq!(kill_switch::blocked(&folder.0).unwrap(), []);
        let living = KillSwitch::arm(&folder.0, "living", exceptions()).unwrap();
        drop(KillSwitch::arm(&folder.0, "ended", exceptions()).unwrap());
        let netns = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
        let record = netns.join("kill-switch/ended.json");
        let mut text: serde_json::Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
        text["start_time"] = 1.into();
        std::fs::write(&record, text.to_string()).unwrap();
        kill_switch::hold(&folder.0, &["held".to_owned()]).unwrap();
        let blocked = kill_switch::blocked(&folder.0).unwrap();
        let said: Vec<_> =
            blocked.iter().map(|block| (&*block.name, block.is_hold, block.since.is_some())).collect();
        assert_eq!(said, [("ended", false, true), ("held", true, true)]);
        assert_eq!(kill_switch::release(&folder.0).unwrap(), ["ended", "held"]);
        assert_eq!(kill_switch::blocked(&folder.0).unwrap(), []);
        assert!(!leaves("198.51.100.9:80", 0), "the living one still blocks");
        living.lift().unwrap();
    });
}

#[test]
fn what_another_program_removes_is_noticed_and_put_back() {
    in_namespace(|| {
        links();
        let folder = Folder::new();
        let switch = KillSwitch::arm(&folder.0, "mpvpn0", exceptions()).unwrap();
        let mut monitor = TableMonitor::open().unwrap();
        assert!(!monitor.take_changed().unwrap());
        assert!(!kill_switch::repair(&folder.0).unwrap(), "it is as it was installed");
        for change in ["flush ruleset", &format!("flush chain inet {TABLE} output")] {
            run("nft", change);
            assert!(monitor.take_changed().unwrap(), "{change}");
            assert!(kill_switch::repair(&folder.0).unwrap(), "{change}");
            assert!(!leaves("198.51.100.9:80", 0), "{change}");
            assert!(leaves(SERVER, MARK), "{change}");
        }
        drop(switch);
        assert!(kill_switch::lift_left_over(&folder.0, "mpvpn0").unwrap());
        assert!(!kill_switch::lift_left_over(&folder.0, "mpvpn0").unwrap());
        assert!(leaves("198.51.100.9:80", 0));
    });
}

#[test]
fn only_private_networks_of_links_are_a_lan() {
    in_namespace(|| {
        links();
        ip("address add 172.20.0.1/16 dev lan0");
        ip("address add 128.0.0.2/1 dev lan0");
        let networks = kill_switch::connected_private_networks(&["mpvpn0".into()]).unwrap();
        let v4: Vec<String> =
            networks.iter().filter(|net| net.addr().is_ipv4()).map(ToString::to_string).collect();
        assert_eq!(v4, ["172.20.0.0/16", "192.168.1.0/24"]);
    });
}

#[test]
fn names_that_nft_cannot_take_change_nothing() {
    in_namespace(|| {
        let folder = Folder::new();
        let bad = Exceptions { devices: vec!["a".repeat(40)], ..exceptions() };
        let error = KillSwitch::arm(&folder.0, "mpvpn0", bad).unwrap_err();
        assert!(matches!(error, OsError::Nft { .. }), "{error}");
        assert_eq!(table(), None);
        assert!(leaves("127.0.0.1:80", 0));
    });
}

#[test]
fn a_hold_blocks_before_the_client_runs_and_after_it_has_ended() {
    in_namespace(|| {
        links();
        let folder = Folder::new();
        kill_switch::hold(&folder.0, &["first".to_owned()]).unwrap();
        assert!(!leaves("198.51.100.9:80", 0) && !leaves(SERVER, MARK), "no client runs");
        let switch = KillSwitch::arm(&folder.0, "first", exceptions()).unwrap();
        assert!(leaves(SERVER, MARK) && leaves("192.168.1.9:80", 0), "the exceptions of the client count");
        assert!(switch.lift().unwrap(), "it says that it is held");
        assert!(!leaves("198.51.100.9:80", 0) && !leaves(SERVER, MARK));
        assert_eq!(kill_switch::release(&folder.0).unwrap(), ["first"]);
        assert!(leaves("198.51.100.9:80", 0));
        folder.assert_empty();

        kill_switch::hold(&folder.0, &["first".to_owned()]).unwrap();
        assert!(kill_switch::lift_left_over(&folder.0, "first").unwrap(), "it starts without a kill switch");
        assert!(leaves("198.51.100.9:80", 0));
        assert!(kill_switch::release(&folder.0).unwrap().is_empty(), "nothing is held");

        kill_switch::hold(&folder.0, &["first".to_owned(), "second".to_owned()]).unwrap();
        kill_switch::hold(&folder.0, &["second".to_owned()]).unwrap();
        assert!(!leaves("198.51.100.9:80", 0), "the second is held on");
        kill_switch::hold(&folder.0, &[]).unwrap();
        assert!(leaves("198.51.100.9:80", 0), "nobody is");
        folder.assert_empty();
    });
}
