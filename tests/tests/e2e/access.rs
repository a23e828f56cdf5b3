//! Access rights of clients, for packets and for connections that the server opens; reachability of clients;
//! and the limit of sessions of a user.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    eventually,
    ping::reaches,
    testbed::{Family, Host, MpvpnProcess, SERVER, TUNNEL, Testbed, inet, inet4},
};
use rustix::{
    io::Errno,
    net::{
        self, AddressFamily, SocketType,
        sockopt::{self, Timeout},
    },
};

/// Longest wait for a connection. A refusal by ICMP comes sooner; silence takes as long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A refusal has to arrive within this time: far below [`CONNECT_TIMEOUT`].
const REFUSED_WITHIN: Duration = Duration::from_secs(1);
const OFFICE: &str = "172.16.5.9";
const COLLEAGUE: &str = "172.16.5.10";
/// Metadata of Azure and Alibaba, and of AWS by IPv6.
const METADATA: [&str; 3] = ["168.63.129.16", "100.100.100.200", "fd00:ec2::254"];

/// The outcome of a TCP connection.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Connected,
    /// ICMP said that it is not allowed.
    Prohibited,
    /// Nothing came.
    Silence,
}
use Outcome::{Connected, Prohibited, Silence};

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), port)
}

fn connect(testbed: &Testbed, from: Host, ip: &str, port: u16) -> Outcome {
    let (to, began) = (address(ip, port), Instant::now());
    // The call itself has the error of ICMP. Where it is asked for after poll, as by `connect_timeout` of the
    // standard library, it was missing once.
    let attempt = || -> Result<(), Errno> {
        let socket = net::socket(
            if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 },
            SocketType::STREAM,
            None,
        )?;
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_TIMEOUT))?;
        net::connect(&socket, &to)
    };
    match testbed.in_namespace(from, attempt) {
        Ok(()) => Connected,
        // Linux has the first for IPv4, the second for IPv6.
        Err(Errno::HOSTUNREACH | Errno::ACCESS) => {
            assert!(began.elapsed() < REFUSED_WITHIN, "{to}: refused after {:?}", began.elapsed());
            Prohibited
        }
        Err(Errno::INPROGRESS) => Silence,
        Err(error) => panic!("{to}: {error}"),
    }
}

#[track_caller]
fn check(testbed: &Testbed, from: Host, cases: &[(&str, u16, Outcome)]) {
    for (ip, port, expected) in cases {
        assert_eq!(connect(testbed, from, ip, *port), *expected, "{from:?} to {ip} port {port}");
    }
}

/// Adds addresses to a host, and programs that listen there.
fn listeners(testbed: &Testbed, host: Host, addresses: &[&str], ports: &[u16]) -> Vec<TcpListener> {
    for ip in addresses {
        testbed.run(host, &["ip", "address", "add", ip, "dev", "lo"]);
    }
    let listen = |port: &u16| {
        let listener = testbed.in_namespace(host, || TcpListener::bind(("::", *port)));
        listener.unwrap_or_else(|error| panic!("port {port}: {error}"))
    };
    ports.iter().map(listen).collect()
}

/// A server with two users, whose tokens are returned, and these tables in its file.
fn server_with_users(testbed: &Testbed, tables: &str) -> (MpvpnProcess, [&'static str; 2]) {
    let tokens = ["anna-anna-anna-anna-anna", "bob-bob-bob-bob-bob-bob"];
    let users = ["anna", "bob"].iter().zip(tokens).map(|(name, token)| {
        let sum = testbed.run(Host::Server, &["sh", "-c", &format!("printf %s {token} | sha256sum")]);
        let hash = sum.split_whitespace().next().expect("a hash");
        format!("[[user]]\nname = '{name}'\ntoken-sha256 = '{hash}'\n")
    });
    let file = testbed.dir().join("users.toml");
    fs::write(&file, users.collect::<String>()).expect("a file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its owner may");
    fs::write(testbed.dir().join("server.toml"), tables).expect("a file");
    let args =
        ["--auth", "token", "--state-dir", "state", "--users", "users.toml", "--config", "server.toml"];
    (testbed.server(&args), tokens)
}

/// A client on the second host whose TCP connections travel as packets.
fn other_client(testbed: &Testbed, more: &[&str]) -> MpvpnProcess {
    let args = ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--lane", "datagram"];
    testbed.start(Host::Other, &[&args[..], more].concat())
}

#[test]
fn rules_of_users_count_for_packets_as_for_connections() {
    let testbed = Testbed::two_clients();
    let office = ["172.16.5.9/32", "172.16.5.10/32", "fd77::9/128"];
    let _listeners = listeners(&testbed, Host::Inet, &office, &[25, 80]);
    let (server, [anna, bob]) = server_with_users(
        &testbed,
        "[[access]]\nallow = false\nports = '25'\n\
         [[access]]\nallow = true\nusers = 'anna'\nto = '172.16.5.9'\n\
         [[access]]\nallow = false\nto = ['172.16.0.0/12', 'fd77::/16']\n",
    );
    let _anna = testbed.client(&["--token", anna, "--lane", "datagram"]);
    let _bob = other_client(&testbed, &["--token", bob]).wait_until_up();
    let (v4, v6) = (inet4(), inet(Family::V6));
    let for_anna = || {
        check(
            &testbed,
            Host::Client,
            &[
                (OFFICE, 80, Connected),
                (OFFICE, 25, Prohibited),
                (COLLEAGUE, 80, Prohibited),
                ("fd77::9", 80, Prohibited),
                (&v4, 80, Connected),
                (&v4, 25, Prohibited),
                (&v6, 80, Connected),
                (&v6, 25, Prohibited),
            ],
        );
    };
    for_anna();
    check(
        &testbed,
        Host::Other,
        &[(OFFICE, 80, Prohibited), (COLLEAGUE, 80, Prohibited), (&v4, 80, Connected), (&v4, 25, Prohibited)],
    );
    let output =
        testbed.output_of(Host::Other, Duration::from_secs(5), &["ping", "-c", "1", "-W", "2", OFFICE]);
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("From 10.0.0.1") && shown.contains("Packet filtered"), "{shown}");
    // The same by CONNECT.
    let socks = ["proxy", "--server", SERVER, "--insecure", "--token", bob, "--path", "eth1"];
    let socks = [&socks[..], &["--socks5", "127.0.0.1:1080"]].concat();
    let _proxy = testbed.start(Host::Other, &socks).wait_until_up();
    for (to, port) in [(OFFICE, 80), (v4.as_str(), 25)] {
        let url = format!("telnet://{to}:{port}");
        let args = ["curl", "-sS", "-m", "3", "--socks5", "127.0.0.1:1080", &url];
        let output = testbed.output_of(Host::Other, Duration::from_secs(5), &args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("SOCKS5"), "{url}: {error}");
    }
    // Another program removes all rules.
    testbed.run(Host::Server, &["nft", "flush", "ruleset"]);
    eventually(Duration::from_secs(5), "the rules come back", || {
        let log = server.log();
        if log.contains("another program removed the firewall rules") { Ok(()) } else { Err(log) }
    });
    for_anna();
}

#[test]
fn metadata_and_the_servers_machine_are_not_reached_by_packets() {
    let testbed = Testbed::two_links();
    let metadata = METADATA.map(|ip| format!("{ip}/{}", if ip.contains(':') { 128 } else { 32 }));
    let metadata: Vec<&str> = metadata.iter().map(String::as_str).chain(["172.16.5.9/32"]).collect();
    let _metadata = listeners(&testbed, Host::Inet, &metadata, &[80]);
    let _programs = listeners(&testbed, Host::Server, &["203.0.113.7/32", "2001:db8:7::7/128"], &[22]);
    let _server = testbed.server(&[]);
    let _client = testbed.client(&["--lane", "datagram"]);
    for ip in METADATA {
        assert_eq!(connect(&testbed, Host::Client, ip, 80), Prohibited, "{ip}");
    }
    let own = ["203.0.113.7", "2001:db8:7::7", "198.51.100.1", "192.0.2.1", "2001:db8:1::1"];
    for ip in own {
        assert_eq!(connect(&testbed, Host::Client, ip, 22), Prohibited, "{ip}");
    }
    check(
        &testbed,
        Host::Client,
        &[(TUNNEL, 22, Connected), (&inet4(), 80, Connected), (OFFICE, 80, Connected)],
    );
    reaches(&testbed, Host::Client, TUNNEL);
}

/// Whether the SOCKS5 proxy of the second host connects to a target, by CONNECT of its server.
fn connects_by_proxy(testbed: &Testbed, to: &str) -> bool {
    let url = format!("telnet://{to}");
    let args = ["curl", "-sS", "-m", "2", "--socks5-hostname", "127.0.0.1:1080", &url];
    let output = testbed.output_of(Host::Other, Duration::from_secs(5), &args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "no target says anything: {url}");
    !error.contains("SOCKS5")
}

#[test]
fn the_servers_machine_is_reached_only_where_a_table_names_the_address() {
    let testbed = Testbed::two_clients();
    let metadata = METADATA.map(|ip| format!("{ip}/{}", if ip.contains(':') { 128 } else { 32 }));
    let metadata: Vec<&str> = metadata.iter().map(String::as_str).chain(["172.16.5.9/32"]).collect();
    let _metadata = listeners(&testbed, Host::Inet, &metadata, &[80]);
    let own = ["203.0.113.7/32", "203.0.113.8/32", "2001:db8:7::7/128"];
    let _programs = listeners(&testbed, Host::Server, &own, &[22, 80]);
    let (_server, [anna, bob]) = server_with_users(
        &testbed,
        "[[access]]\nallow = true\nports = ['22', '80']\n\
         [[access]]\nallow = true\nto = ['127.0.0.0/8', '203.0.113.0/24', '203.0.113.7']\n\
         [[access]]\nallow = true\n",
    );
    let _client = testbed.client(&["--token", anna, "--lane", "datagram"]);
    for ip in METADATA.iter().chain(&["203.0.113.8", "2001:db8:7::7", "198.51.100.1", "192.0.2.1"]) {
        assert_eq!(connect(&testbed, Host::Client, ip, 80), Prohibited, "{ip}");
    }
    let allowed = [("203.0.113.7", 22), (TUNNEL, 22), (OFFICE, 80)];
    check(&testbed, Host::Client, &allowed.map(|(ip, port)| (ip, port, Connected)));
    let socks = ["proxy", "--server", SERVER, "--insecure", "--token", bob, "--path", "eth1"];
    let socks = [&socks[..], &["--socks5", "127.0.0.1:1080"]].concat();
    let _proxy = testbed.start(Host::Other, &socks).wait_until_up();
    for to in ["127.0.0.1:22", "localhost:22", "0.0.0.0:22", "[::1]:22", "[::ffff:127.0.0.1]:22"]
        .iter()
        .chain(&["203.0.113.8:22", "[2001:db8:7::7]:22", "168.63.129.16:80", "[fd00:ec2::254]:80"])
    {
        assert!(!connects_by_proxy(&testbed, to), "{to}");
    }
    for (ip, port) in allowed {
        assert!(connects_by_proxy(&testbed, &format!("{ip}:{port}")), "{ip}");
    }
}

#[test]
fn isolated_clients_reach_the_server_and_not_each_other() {
    let testbed = Testbed::two_clients();
    let _listeners = listeners(&testbed, Host::Other, &[], &[80]);
    let _server = testbed.server(&["--isolate"]);
    let _client = testbed.client(&["--lane", "datagram"]);
    let other = other_client(&testbed, &[]).wait_until_up();
    for family in [Family::V4, Family::V6] {
        assert_eq!(connect(&testbed, Host::Client, &other.address(family), 80), Prohibited, "{family:?}");
    }
    reaches(&testbed, Host::Client, TUNNEL);
    reaches(&testbed, Host::Other, TUNNEL);
    reaches(&testbed, Host::Other, &inet4());
}

#[test]
fn a_neighbour_of_the_server_opens_connections_to_clients_only_without_address_translation() {
    for (nat, expected) in [("on", Silence), ("off", Connected)] {
        let testbed = Testbed::two_links();
        let _listeners = listeners(&testbed, Host::Client, &[], &[80]);
        let _server = testbed.server(&["--nat", nat]);
        let client = testbed.client(&[]);
        testbed.run(Host::Inet, &["ip", "route", "add", "10.0.0.0/24", "via", "198.51.100.1"]);
        let address = client.address(Family::V4);
        assert_eq!(connect(&testbed, Host::Inet, &address, 80), expected, "--nat {nat}");
        // The server's machine does, as for a backup.
        assert_eq!(connect(&testbed, Host::Server, &address, 80), Connected, "--nat {nat}");
        reaches(&testbed, Host::Client, &inet4());
    }
}

#[test]
fn a_user_has_no_more_sessions_than_allowed_and_the_next_waits() {
    let testbed = Testbed::two_clients();
    let (_server, [anna, bob]) = server_with_users(&testbed, "[[limit]]\nusers = 'anna'\nmax-sessions = 1\n");
    let mut first = testbed.client(&["--token", anna]);
    let second = other_client(&testbed, &["--token", anna]);
    second.wait_for_status(Duration::from_secs(10), "the reason of the refusal", |status| {
        let reason = status["classes"][0]["reason"].as_str().unwrap_or_default();
        let is_told = reason.contains("503") && reason.contains("max-sessions");
        if is_told { Ok(()) } else { Err(format!("{status:#}")) }
    });
    let third = other_client(&testbed, &["--token", bob, "--tun-name", "mpvpn1", "--routes", "none"]);
    let third = third.wait_until_up();
    drop(third);
    assert!(first.interrupt().success());
    let _second = second.wait_until_up();
    reaches(&testbed, Host::Other, TUNNEL);
}
