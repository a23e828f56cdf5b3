//! quic-go/connect-ip-go: CONNECT-IP on one path, without anything of ours.

use std::{fs, time::Duration};

use mpvpn_tests::{
    foreign::{Foreign, Program},
    http::{Download, MB, Site, upload},
    machine_share::{MachineShare, Share},
    ping::reaches,
    stage::{Family, Place, SERVER, Stage, TUNNEL, inet, inet4},
};

const LIMIT: Duration = Duration::from_secs(30);
/// Where the Go server listens, and what it has inside the tunnel.
const FOREIGN: &str = "192.0.2.1:4434";
const FOREIGN_TUNNEL: &str = "10.9.0.1";
const FOREIGN_TUNNEL6: &str = "fd09::1";

/// A client that sends the tunnel's networks and those behind the server into the tunnel.
fn go_client(stage: &Stage, more: &[&str]) -> Foreign {
    let mut words = vec!["client", "-server", SERVER];
    for network in ["10.0.0.0/24", "198.51.100.0/24", "2001:db8:1::/64"] {
        words.extend(["-route", network]);
    }
    words.extend(more);
    Foreign::start(stage, Place::Client, Program::ConnectIp, &words)
}

/// A server that forwards to the host behind it with its own address.
fn go_server(stage: &Stage, more: &[&str]) -> Foreign {
    const ROUTER: &str = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 && nft add table inet interop && \
        nft add chain inet interop after '{ type nat hook postrouting priority srcnat; }' && \
        nft add rule inet interop after oifname inet0 masquerade";
    stage.run(Place::Server, &["sh", "-c", ROUTER]);
    go_server_again(stage, more)
}

fn go_server_again(stage: &Stage, more: &[&str]) -> Foreign {
    let mut words = vec!["server", "-listen", FOREIGN, "-cert", "server.crt", "-key", "server.key"];
    words.extend(["-address", "10.9.0.1/24", "-assign", "10.9.0.2/32", "-advertise", "0.0.0.0/0"]);
    words.extend(["-address", "fd09::1/64", "-assign", "fd09::2/128", "-advertise", "::/0"]);
    words.extend(more);
    let mut server = Foreign::start(stage, Place::Server, Program::ConnectIp, &words);
    server.says("up");
    server
}

#[test]
fn its_client_gets_addresses_of_both_families_and_reaches_what_is_behind_us() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_links();
    let server = stage.server(&[]);
    let site = Site::start(&stage, Place::Inet);
    for asks in ["-ask=true", "-ask=false"] {
        let mut client = go_client(&stage, &[asks]);
        let said = client.says("up");
        assert!(said.contains("address=10.0.0.") && said.contains("address=fd00:6d70:766e:"), "{said}");
        assert!(said.contains("route=0.0.0.0-255.255.255.255/0"), "{said}");
        reaches(&stage, Place::Client, TUNNEL);
        for family in [Family::V4, Family::V6] {
            reaches(&stage, Place::Client, &inet(family));
            Download::start(&stage, &site, &inet(family), 10 * MB, LIMIT, &[]).finish();
        }
        upload(&stage, &site, &inet4(), 10 * MB, LIMIT);
        assert_eq!(server.status()["clients"].as_array().map(Vec::len), Some(1));
        client.terminate();
        server.until(Duration::from_secs(5), "the client is gone", |status| {
            match status["clients"].as_array() {
                Some(clients) if clients.is_empty() => Ok(()),
                clients => Err(format!("{clients:?}")),
            }
        });
    }
}

#[test]
fn its_client_needs_a_token_where_ours_does() {
    let stage = Stage::two_links();
    let _server = stage.server(&["--auth", "token", "--state-dir", "state"]);
    let refused = go_client(&stage, &["-token", "0123456789abcdef0123456789abcdef"]).fail(LIMIT);
    assert!(refused.contains("refused: 401"), "{refused}");
    let token = fs::read_to_string(stage.dir().join("state/client-token")).expect("a token");
    let mut client = go_client(&stage, &["-token", token.trim()]);
    client.says("up");
    reaches(&stage, Place::Client, TUNNEL);
}

#[test]
fn our_client_works_on_one_path_with_its_server() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_links();
    let site = Site::start(&stage, Place::Inet);
    for unasked in ["-unasked=false", "-unasked=true"] {
        let _server = match unasked {
            "-unasked=false" => go_server(&stage, &[unasked]),
            _ => go_server_again(&stage, &[unasked]),
        };
        let mut client = stage.client(&["--server", FOREIGN]);
        assert_eq!(client.address(Family::V4), "10.9.0.2");
        assert_eq!(client.address(Family::V6), "fd09::2");
        for host in [FOREIGN_TUNNEL, FOREIGN_TUNNEL6, &inet4(), &inet(Family::V6)] {
            reaches(&stage, Place::Client, host);
        }
        for family in [Family::V4, Family::V6] {
            Download::start(&stage, &site, &inet(family), 10 * MB, LIMIT, &[]).finish();
        }
        upload(&stage, &site, &inet4(), 10 * MB, LIMIT);
        let status = client.status();
        let active = status["paths"]
            .as_array()
            .map(|paths| paths.iter().filter(|path| path["state"] == "active").count());
        assert_eq!(active, Some(1), "{status:#}");
        assert!(client.interrupt().success(), "{}", client.log());
    }
}

#[test]
fn our_client_comes_back_over_the_other_link_and_after_a_restart_of_its_server() {
    let stage = Stage::two_links();
    let server = go_server(&stage, &[]);
    let client = stage.client(&["--server", FOREIGN]);
    reaches(&stage, Place::Client, FOREIGN_TUNNEL);
    let status = client.status();
    let used =
        status["paths"].as_array().and_then(|paths| paths.iter().find(|path| path["state"] == "active"));
    let (used, other) = match used.and_then(|path| path["link"].as_str()) {
        Some("eth1") => (1, "eth2"),
        _ => (2, "eth1"),
    };
    stage.link(used).cut();
    client.until_path(other, "active", LIMIT);
    reaches(&stage, Place::Client, FOREIGN_TUNNEL);
    drop(server);
    let _again = go_server_again(&stage, &[]);
    mpvpn_tests::eventually(LIMIT, "the tunnel works again", || {
        let pings = mpvpn_tests::ping::ping(&stage, Place::Client, FOREIGN_TUNNEL, 1);
        if pings.answers.is_empty() { Err("no answer".to_owned()) } else { Ok(()) }
    });
}
