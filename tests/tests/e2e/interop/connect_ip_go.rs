//! quic-go/connect-ip-go: CONNECT-IP on one path, without mpvpn's extensions.

use std::{fs, time::Duration};

use mpvpn_tests::{
    http::{Download, MB, TestPages, upload},
    interop_peer::{InteropPeer, Program},
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Family, Host, SERVER, TUNNEL, Testbed, inet, inet4},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Address of the Go server, and its addresses inside the tunnel.
const GO_SERVER: &str = "192.0.2.1:4434";
const GO_SERVER_TUNNEL: &str = "10.9.0.1";
const GO_SERVER_TUNNEL6: &str = "fd09::1";

/// Starts a Go client that routes the tunnel's networks and those behind the server into the tunnel.
fn go_client(testbed: &Testbed, more: &[&str]) -> InteropPeer {
    let mut args = vec!["client", "-server", SERVER];
    for network in ["10.0.0.0/24", "198.51.100.0/24", "2001:db8:1::/64"] {
        args.extend(["-route", network]);
    }
    args.extend(more);
    InteropPeer::start(testbed, Host::Client, Program::ConnectIp, &args)
}

/// Starts a Go server with NAT towards the host behind it.
fn go_server(testbed: &Testbed, more: &[&str]) -> InteropPeer {
    const ROUTER: &str = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 && nft add table inet interop && \
        nft add chain inet interop after '{ type nat hook postrouting priority srcnat; }' && \
        nft add rule inet interop after oifname inet0 masquerade";
    testbed.run(Host::Server, &["sh", "-c", ROUTER]);
    restart_go_server(testbed, more)
}

fn restart_go_server(testbed: &Testbed, more: &[&str]) -> InteropPeer {
    let mut args = vec!["server", "-listen", GO_SERVER, "-cert", "server.crt", "-key", "server.key"];
    args.extend(["-address", "10.9.0.1/24", "-assign", "10.9.0.2/32", "-advertise", "0.0.0.0/0"]);
    args.extend(["-address", "fd09::1/64", "-assign", "fd09::2/128", "-advertise", "::/0"]);
    args.extend(more);
    let mut server = InteropPeer::start(testbed, Host::Server, Program::ConnectIp, &args);
    server.wait_for_line("up");
    server
}

#[test]
fn the_go_client_gets_addresses_of_both_families_and_reaches_the_network_behind_the_server() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let site = TestPages::start(&testbed, Host::Inet);
    for asks in ["-ask=true", "-ask=false"] {
        let mut client = go_client(&testbed, &[asks]);
        let output = client.wait_for_line("up");
        assert!(output.contains("address=10.0.0.") && output.contains("address=fd00:6d70:766e:"), "{output}");
        assert!(output.contains("route=0.0.0.0-255.255.255.255/0"), "{output}");
        reaches(&testbed, Host::Client, TUNNEL);
        for family in [Family::V4, Family::V6] {
            reaches(&testbed, Host::Client, &inet(family));
            Download::start(&testbed, &site, &inet(family), 10 * MB, TIMEOUT, &[]).finish();
        }
        upload(&testbed, &site, &inet4(), 10 * MB, TIMEOUT);
        assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
        client.terminate();
        server.wait_for_status(
            Duration::from_secs(5),
            "the client is gone",
            |status| match status["clients"].as_array() {
                Some(clients) if clients.is_empty() => Ok(()),
                clients => Err(format!("{clients:?}")),
            },
        );
    }
}

#[test]
fn the_go_client_needs_a_token() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--auth", "token", "--state-dir", "state"]);
    let refused =
        go_client(&testbed, &["-token", "0123456789abcdef0123456789abcdef"]).wait_for_failure(TIMEOUT);
    assert!(refused.contains("refused: 401"), "{refused}");
    let token = fs::read_to_string(testbed.dir().join("state/client-token")).expect("a token");
    let mut client = go_client(&testbed, &["-token", token.trim()]);
    client.wait_for_line("up");
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn our_client_uses_one_path_with_the_go_server() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let site = TestPages::start(&testbed, Host::Inet);
    for unasked in ["-unasked=false", "-unasked=true"] {
        let _server = match unasked {
            "-unasked=false" => go_server(&testbed, &[unasked]),
            _ => restart_go_server(&testbed, &[unasked]),
        };
        let mut client = testbed.client(&["--server", GO_SERVER]);
        assert_eq!(client.address(Family::V4), "10.9.0.2");
        assert_eq!(client.address(Family::V6), "fd09::2");
        for host in [GO_SERVER_TUNNEL, GO_SERVER_TUNNEL6, &inet4(), &inet(Family::V6)] {
            reaches(&testbed, Host::Client, host);
        }
        for family in [Family::V4, Family::V6] {
            Download::start(&testbed, &site, &inet(family), 10 * MB, TIMEOUT, &[]).finish();
        }
        upload(&testbed, &site, &inet4(), 10 * MB, TIMEOUT);
        let status = client.status();
        let active = status["paths"]
            .as_array()
            .map(|paths| paths.iter().filter(|path| path["state"] == "active").count());
        assert_eq!(active, Some(1), "{status:#}");
        assert!(client.interrupt().success(), "{}", client.log());
    }
}

#[test]
fn our_client_reconnects_over_the_other_link_and_after_a_restart_of_the_go_server() {
    let testbed = Testbed::two_links();
    let server = go_server(&testbed, &[]);
    let client = testbed.client(&["--server", GO_SERVER]);
    reaches(&testbed, Host::Client, GO_SERVER_TUNNEL);
    let status = client.status();
    let used =
        status["paths"].as_array().and_then(|paths| paths.iter().find(|path| path["state"] == "active"));
    let (used, other) = match used.and_then(|path| path["link"].as_str()) {
        Some("eth1") => (1, "eth2"),
        _ => (2, "eth1"),
    };
    testbed.link(used).cut();
    client.wait_for_path(other, "active", TIMEOUT);
    reaches(&testbed, Host::Client, GO_SERVER_TUNNEL);
    drop(server);
    let _again = restart_go_server(&testbed, &[]);
    mpvpn_tests::eventually(TIMEOUT, "the tunnel works again", || {
        let pings = mpvpn_tests::ping::ping(&testbed, Host::Client, GO_SERVER_TUNNEL, 1);
        if pings.answers.is_empty() { Err("no answer".to_owned()) } else { Ok(()) }
    });
}
