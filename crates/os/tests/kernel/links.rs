//! Attacks of links and of a server on the traffic of a client, against the kernel.

use std::{
    io::Read,
    net::UdpSocket,
    process::{Child, Command, Stdio},
    time::Duration,
};

use mpvpn_os::{
    UndoJournal,
    netlink::Netlink,
    tunnel_net::{ClientNet, ClientNetConfig, InboundNet, Routes},
};

use crate::{
    common::{Folder, in_namespace, ip, run},
    network::{net, outgoing_interface, route_get, squeezed, tun, uplink, wanted},
};

/// A host behind the far end of the link `eth0`, until it is dropped.
struct Neighbour(Child);

impl Neighbour {
    /// It has the address 192.0.2.1, and a route to `network` over this machine.
    fn start(network: &str) -> Self {
        // Its namespace exists once it says so.
        let mut child = Command::new("unshare")
            .args(["-n", "sh", "-c", "echo; exec sleep 60"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let host = Self(child);
        ip(&format!("link set far0 netns {}", host.0.id()));
        for words in ["address add 192.0.2.1/24 dev far0", "link set far0 up"] {
            assert!(host.run(&format!("ip {words}")), "{words}");
        }
        assert!(host.run(&format!("ip route add {network} via 192.0.2.7")));
        host
    }

    fn run(&self, words: &str) -> bool {
        let process = self.0.id().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-t", &process, "-n"]).args(words.split_whitespace());
        command.output().unwrap().status.success()
    }

    fn reaches(&self, address: &str) -> bool {
        self.run(&format!("ping -c 2 -i 0.2 -W 1 {address}"))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn routes_of_a_link_do_not_draw_the_internet_past_the_tunnel() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let (_device, t0) = tun("t0");
        let [eth0, tunnel] = [Netlink::open().unwrap().index_of("eth0").unwrap(), t0.index].map(Some);
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let keep_routes = vec![net("203.0.113.128/25")];
        let config = ClientNetConfig { keep_routes, ..ClientNetConfig::new(t0, 0) };
        let mark = Some(config.mark());
        let mut client = ClientNet::new(config).unwrap();
        for rogue in [
            "0.0.0.0/1",
            "128.0.0.0/1",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "203.0.113.128/25",
            "10.20.0.0/16",
        ] {
            ip(&format!("route add {rogue} via 192.0.2.1"));
        }
        ip("-6 route add 2000::/3 via 2001:db8::1 dev eth0");
        client.apply(&mut undo, &wanted(&["10.9.0.2/24", "fd00:9::2/64"], Routes::All, 1400)).unwrap();
        for into_tunnel in
            ["8.8.8.8", "198.51.100.9", "203.0.113.9", "10.9.0.1", "10.30.0.1", "2001:db8:1::1"]
        {
            assert_eq!(outgoing_interface(into_tunnel, None), tunnel, "{into_tunnel}");
            assert_eq!(
                outgoing_interface(into_tunnel, mark),
                eth0,
                "{into_tunnel}, for the tunnel's own packets"
            );
        }
        for past in ["10.20.0.9", "203.0.113.200", "192.0.2.99", "2001:db8::99"] {
            assert_eq!(outgoing_interface(past, None), eth0, "{past}");
        }

        // The networks of links are found again, unless they are large.
        ip("address add 100.64.7.7/24 dev eth0");
        ip("address add 64.0.0.7/2 dev eth0");
        assert_eq!(outgoing_interface("100.64.7.9", None), tunnel);
        client.refresh(&mut undo).unwrap();
        assert_eq!(
            (outgoing_interface("100.64.7.9", None), outgoing_interface("100.64.8.9", None)),
            (eth0, tunnel)
        );
        ip("address del 100.64.7.7/24 dev eth0");
        client.refresh(&mut undo).unwrap();
        assert_eq!(outgoing_interface("100.64.7.9", None), tunnel);
        assert_eq!(undo.revert_all_steps().len(), 0);
        assert_eq!(outgoing_interface("8.8.8.8", None), eth0);
    });
}

#[test]
fn hosts_on_a_link_do_not_reach_the_addresses_of_the_tunnel() {
    in_namespace(|| {
        uplink();
        let host = Neighbour::start("10.9.0.0/24");
        let folder = Folder::new();
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let mut client = ClientNet::new(ClientNetConfig::new(t0, 0)).unwrap();
        client.apply(&mut undo, &wanted(&["10.9.0.2/24", "fd00:9::2/64"], Routes::All, 1400)).unwrap();
        assert!(host.reaches("192.0.2.7"));
        assert!(!host.reaches("10.9.0.2"), "{}", run("nft", "list ruleset"));
        let here = UdpSocket::bind("10.9.0.2:0").unwrap();
        here.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        here.send_to(b"x", here.local_addr().unwrap()).unwrap();
        here.recv(&mut [0; 9]).expect("this machine reaches its own address");
        client.apply(&mut undo, &wanted(&["10.9.0.3/24"], Routes::All, 1400)).unwrap();
        assert!(!host.reaches("10.9.0.3"), "{}", run("nft", "list ruleset"));
        client.clear(&mut undo).unwrap();
        assert!(run("nft", "list tables").is_empty() && undo.steps().is_empty());
        // Without the rule, the machine answers for every address that it has.
        client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        run("nft", "flush ruleset");
        assert!(host.reaches("10.9.0.2"));
    });
}

#[test]
fn a_server_cannot_capture_the_network_of_a_link() {
    in_namespace(|| {
        uplink();
        ip("address add 192.168.1.7/24 dev eth0");
        let folder = Folder::new();
        let (_device, t0) = tun("t0");
        let eth0 = Some(Netlink::open().unwrap().index_of("eth0").unwrap());
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let mut client = ClientNet::new(ClientNetConfig::new(t0.clone(), 0)).unwrap();
        for routes in [Routes::None, Routes::All, Routes::Advertised(vec![net("192.168.1.0/25")])] {
            client.apply(&mut undo, &wanted(&["192.168.1.5/25"], routes.clone(), 1400)).unwrap();
            for lan in ["192.168.1.1", "192.168.1.99", "192.168.1.127", "192.168.1.200"] {
                assert_eq!(route_get(lan), eth0, "{lan} is captured with {routes:?}");
            }
            let main = ip("route show table main dev t0");
            assert!(main.is_empty(), "routes of the server in the main table: {main}");
        }
        client.apply(&mut undo, &wanted(&["10.9.0.2/24"], Routes::None, 1400)).unwrap();
        assert_eq!(route_get("10.9.0.1"), Some(t0.index));
    });
}

#[test]
fn replies_to_connections_from_outside_have_a_table_for_each_link() {
    in_namespace(|| {
        uplink();
        ip("link add eth1 type veth peer name far1");
        ip("address add 198.51.100.7/24 dev eth1");
        ip("link set far1 up");
        ip("link set eth1 up");
        ip("route add default via 198.51.100.1 dev eth1 metric 200");
        let folder = Folder::new();
        let before = (ip("rule"), ip("route show table all"), run("nft", "list ruleset"));
        let [eth0, eth1] = ["eth0", "eth1"].map(|name| Netlink::open().unwrap().index_of(name).ok());
        let (_device, t0) = tun("t0");
        let mut undo = UndoJournal::open(&folder.0, "t0").unwrap();
        let mut net = InboundNet::new(ClientNetConfig::new(t0, 0)).unwrap();
        net.update(&mut undo, &["t0"]).unwrap();
        let marks = [0x0080_6d70, 0x0081_6d70].map(Some);
        assert_eq!(marks.map(|mark| outgoing_interface("203.0.113.1", mark)), [eth0, eth1]);
        assert_eq!(outgoing_interface("2001:db8:1::1", marks[0]), eth0);
        let shown = run("nft", "list table inet mpvpn_t0_inbound");
        for words in [
            r#"iifname "eth1" ct direction original ct mark & 0x00ff0000 == 0x00000000 ct state"#,
            "ct mark set ct mark & 0xff81ffff | 0x00810000",
            "meta mark set ct mark & 0x00ff6d70 | 0x00006d70",
            "type route hook output",
        ] {
            assert!(squeezed(&shown).contains(words), "{words} in\n{shown}");
        }

        // A link whose routes vanish gets them back, and one that comes later gets a table too. The rules for
        // both are replaced only when a new one comes.
        run("nft", "add chain inet mpvpn_t0_inbound kept");
        let is_kept = || run("nft", "list table inet mpvpn_t0_inbound").contains("chain kept");
        ip("link set eth1 down");
        net.update(&mut undo, &["t0"]).unwrap();
        assert_ne!(outgoing_interface("203.0.113.1", marks[1]), eth1);
        ip("link set eth1 up");
        ip("route add default via 198.51.100.1 dev eth1 metric 200");
        net.update(&mut undo, &["t0"]).unwrap();
        assert_eq!(outgoing_interface("203.0.113.1", marks[1]), eth1);
        assert!(is_kept());
        ip("link add eth2 type veth peer name far2");
        ip("address add 203.0.113.7/24 dev eth2");
        ip("link set far2 up");
        ip("link set eth2 up");
        ip("route add default via 203.0.113.1 dev eth2 metric 300");
        net.update(&mut undo, &["t0"]).unwrap();
        assert!(!is_kept() && run("nft", "list table inet mpvpn_t0_inbound").contains("eth2"));
        drop(undo);
        assert_eq!((ip("rule"), run("nft", "list ruleset")), (before.0, before.2));
        folder.assert_empty();
    });
}
