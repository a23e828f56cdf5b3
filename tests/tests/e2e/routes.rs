//! A server that advertises only some networks, and clients that route only these into the tunnel.

use std::time::Duration;

use mpvpn_tests::{
    ping::{ping, reaches},
    testbed::{Family, Host, LINK, TUNNEL, Testbed},
};

/// Hosts in two networks behind the server, of which one is advertised.
const ADVERTISED: &str = "192.168.9.7";
const OTHER: &str = "203.0.113.7";

/// Number of packets for a host that left the client through interfaces of this kind (`tunnel` or `links`).
fn count_departures(testbed: &Testbed, kind: &str, host: &str) -> u64 {
    testbed.count_nft_packets(Host::Client, &format!("{kind} {host}"))
}

#[test]
fn only_the_advertised_network_is_reached_through_the_tunnel() {
    let testbed = Testbed::new(&[LINK]);
    for host in [ADVERTISED, OTHER] {
        testbed.run(Host::Inet, &["ip", "address", "add", &format!("{host}/32"), "dev", "eth0"]);
        for (kind, device) in [("tunnel", "mpvpn0"), ("links", "eth*")] {
            let rule = format!(
                "add table inet ways; add chain inet ways out {{ type filter hook output priority 0; }}; \
                 add rule inet ways out oifname {device} ip daddr {host} counter comment \"{kind} {host}\""
            );
            testbed.run(Host::Client, &["nft", &rule]);
        }
    }
    // Two are adjacent, and one contains another.
    let routes = ["192.168.8.0/24", "192.168.9.0/24", "192.168.9.64/26"];
    let _server = testbed.server(&routes.map(|net| ["--routes", net]).concat());
    let mut client = testbed.client(&["--routes", "advertised"]);
    reaches(&testbed, Host::Client, ADVERTISED);
    assert!(count_departures(&testbed, "tunnel", ADVERTISED) > 0);
    let table = testbed.run(Host::Client, &["ip", "route", "show", "table", "all", "dev", "mpvpn0"]);
    assert!(table.contains("192.168.8.0/23") && !table.contains("default"), "{table}");

    // Beside the tunnel the packets end at the server's machine without an answer.
    ping(&testbed, Host::Client, OTHER, 3);
    let past = ["tunnel", "links"].map(|kind| count_departures(&testbed, kind, OTHER));
    assert!(past[0] == 0 && past[1] > 0, "{past:?} packets for {OTHER} in the tunnel and past it");
    assert!(!client.log().contains("but all traffic is routed into the tunnel"), "{}", client.log());
    assert!(client.terminate().success());

    let client = testbed.client(&[]);
    reaches(&testbed, Host::Client, ADVERTISED);
    assert!(ping(&testbed, Host::Client, OTHER, 3).answers.is_empty(), "a network that is not advertised");
    assert!(client.log().contains("--routes advertised uses the tunnel for these alone"), "{}", client.log());
}

#[test]
fn a_server_cannot_capture_networks_of_the_client() {
    // The address of a host in the LAN behind the client.
    const LAN_HOST: &str = "192.168.77.2";
    let testbed = Testbed::with_lan(&[LINK]);
    let way = |to: &str| testbed.run(Host::Client, &["ip", "route", "get", to]);
    {
        let _server = testbed.server(&["--subnet", "192.168.77.0/25"]);
        for routes in ["none", "all", "advertised"] {
            let client = testbed.client(&["--routes", routes, "--share", "lan0"]);
            reaches(&testbed, Host::Client, LAN_HOST);
            assert!(way("192.168.77.99").contains("dev lan0"), "{routes}: {}", way("192.168.77.99"));
            let log = client.log();
            assert!(routes == "all" || log.contains("overlaps one that this machine"), "{routes}: {log}");
        }
    }
    let _server = testbed.server(&["--subnet", "45.0.0.0/8"]);
    for routes in ["none", "advertised"] {
        let client = testbed.client(&["--routes", routes]);
        assert!(way("45.0.0.1").contains("dev eth"), "{routes}: {}", way("45.0.0.1"));
        let left_out = client.log().contains("too large, or too many of them, for --routes advertised");
        assert_eq!(left_out, routes == "advertised", "{}", client.log());
    }
    let _client = testbed.client(&[]);
    assert!(way("45.0.0.1").contains("dev mpvpn0"), "{}", way("45.0.0.1"));
}

#[test]
fn an_address_of_another_interface_is_refused() {
    let testbed = Testbed::new(&[LINK]);
    let server = testbed.server(&[]);
    // The server assigns the first address first.
    testbed.run(Host::Client, &["ip", "address", "add", "10.0.0.2/32", "dev", "lo"]);
    let mut client = testbed.client(&[]);
    assert_eq!(client.address(Family::V4), "10.0.0.3");
    assert!(client.log().contains("that this machine has already"), "{}", client.log());
    reaches(&testbed, Host::Client, TUNNEL);
    let way = testbed.run(Host::Client, &["ip", "route", "get", TUNNEL]);
    assert!(way.contains("src 10.0.0.3"), "{way}");
    assert!(client.terminate().success());

    drop(server);
    for number in 3..7 {
        let address = format!("10.0.0.{number}/32");
        testbed.run(Host::Client, &["ip", "address", "add", &address, "dev", "lo"]);
    }
    let _server = testbed.server(&["--subnet", "10.0.0.0/29", "--subnet6", "none"]);
    let mut client = testbed.start_client(&[]);
    assert!(!client.wait(Duration::from_secs(30)).success());
    assert!(client.log().contains("another `--subnet`"), "{}", client.log());
}

#[test]
fn invalid_routes_are_named_with_a_suggestion() {
    let testbed = Testbed::new(&[LINK]);
    for (args, expected) in [
        (&["--routes", "192.168.9.7/24"][..], "did you mean 192.168.9.0/24"),
        (&["--routes", "office"], "`office` is neither a network"),
        (&["--routes", "fd00:7::/64", "--subnet6", "none"], "--subnet6 none clients have no IPv6 addresses"),
    ] {
        let output = testbed.mpvpn(Host::Server, &[&["server"], args].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(expected), "{args:?}: {said}");
    }
}
