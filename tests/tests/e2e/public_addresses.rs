//! Public addresses and networks of users, without translation.

use std::{
    fs,
    net::{IpAddr, TcpListener},
    time::Duration,
};

use crate::users::Site;
use mpvpn_tests::{
    eventually,
    ping::{ping, reaches},
    testbed::{Family, Host, MpvpnProcess, Testbed, inet},
};

const SOON: Duration = Duration::from_secs(15);
/// Addresses that are led to the server's machine, and one of the network of its interface.
const PUBLIC4: &str = "203.0.113.7";
const PUBLIC6: &str = "2001:db8:9::7";
const ON_LINK4: &str = "198.51.100.77";
const ON_LINK6: &str = "2001:db8:1::77";
/// A network that is led there, and a host in the LAN of the client.
const NETWORK: &str = "2001:db8:7::/64";
const HOST: &str = "2001:db8:7::2";

fn site() -> Site {
    let testbed = Testbed::two_homes();
    for (net, via) in [(PUBLIC4, "198.51.100.1"), (PUBLIC6, "2001:db8:1::1"), (NETWORK, "2001:db8:1::1")] {
        testbed.run(Host::Inet, &["ip", "route", "add", net, "via", via]);
    }
    let server = Site::start_server(&testbed);
    Site { server, testbed }
}

/// The address from which a TCP connection of this host arrives behind the server.
fn seen_as(testbed: &Testbed, from: Host, family: Family) -> Option<IpAddr> {
    let listener = testbed.in_namespace(Host::Inet, || TcpListener::bind("[::]:0").expect("a free port"));
    listener.set_nonblocking(true).expect("a socket can be nonblocking");
    let (port, host) = (listener.local_addr().expect("a bound socket").port(), inet(family));
    let host = if family == Family::V6 { format!("[{host}]") } else { host };
    let url = format!("http://{host}:{port}/");
    testbed.output_of(from, SOON, &["curl", "-s", "--max-time", "2", &url]);
    listener.accept().ok().map(|(_, peer)| peer.ip().to_canonical())
}

fn is_seen_as(testbed: &Testbed, from: Host, family: Family, address: &str) {
    let wanted: IpAddr = address.parse().expect("an address");
    eventually(SOON, &format!("{from:?} is seen as {address}"), || {
        let seen = seen_as(testbed, from, family);
        if seen == Some(wanted) { Ok(()) } else { Err(format!("{seen:?}")) }
    });
}

fn is_silent(testbed: &Testbed, from: Host, to: &str) {
    assert!(ping(testbed, from, to, 3).answers.is_empty(), "{from:?} reaches {to}");
}

/// The states of a network in the status, in the order of the alphabet.
fn states(process: &MpvpnProcess, network: &str) -> Vec<String> {
    let status = process.status();
    let all = status["announced"].as_array().cloned().unwrap_or_default();
    let own = all.iter().filter(|one| one["network"] == network);
    let mut states: Vec<_> = own.filter_map(|one| one["state"].as_str().map(ToOwned::to_owned)).collect();
    states.sort_unstable();
    states
}

fn wait_for_state(process: &MpvpnProcess, network: &str, wanted: &str) {
    eventually(SOON, &format!("{network} is {wanted}"), || {
        let states = states(process, network);
        if states == [wanted] { Ok(()) } else { Err(format!("{states:?}\n{}", process.log())) }
    });
}

#[test]
fn a_public_address_of_a_user_is_that_of_its_client() {
    let mut site = site();
    let testbed = &site.testbed;
    let anna = site.add("anna", &["--address", PUBLIC4, "--address", PUBLIC6]);
    let bob = site.add("bob", &["--address", ON_LINK4, "--address", ON_LINK6]);
    is_silent(testbed, Host::Inet, PUBLIC4);
    let mut client = site.join_with(Host::Client, &anna, &[]).wait_until_up();
    let mut other = site.join_with(Host::Other, &bob, &[]).wait_until_up();
    assert_eq!(client.address(Family::V4), PUBLIC4);
    assert_eq!(other.address(Family::V4), ON_LINK4);

    // In both directions, each client as itself, and to each other.
    for (host, addresses) in [(Host::Client, [PUBLIC4, PUBLIC6]), (Host::Other, [ON_LINK4, ON_LINK6])] {
        for (family, address) in [Family::V4, Family::V6].into_iter().zip(addresses) {
            eventually(SOON, &format!("{address} is reached"), || {
                match ping(testbed, Host::Inet, address, 2).answers.is_empty() {
                    true => Err(site.server.log()),
                    false => Ok(()),
                }
            });
            is_seen_as(testbed, host, family, address);
        }
    }
    reaches(testbed, Host::Other, PUBLIC4);
    reaches(testbed, Host::Server, PUBLIC4);

    // A server that is started again knows the session, and a client that has forgotten it gets it again.
    assert!(site.server.interrupt().success());
    let left = testbed.run(Host::Server, &["ip", "neighbour", "show", "proxy"]);
    assert_eq!(left.trim(), "", "answers for an address outlived the server");
    site.server = Site::start_server(testbed);
    eventually(SOON, "the session is there again", || {
        match ping(testbed, Host::Inet, PUBLIC4, 2).answers.is_empty() {
            true => Err(client.log()),
            false => Ok(()),
        }
    });
    assert_eq!(client.address(Family::V4), PUBLIC4);
    assert!(client.interrupt().success());
    is_silent(testbed, Host::Inet, PUBLIC4);
    let client = site.join_with(Host::Client, &anna, &[]).wait_until_up();
    assert_eq!(client.address(Family::V4), PUBLIC4);

    // Without its client, nobody answers for an address of the server's network.
    assert!(other.interrupt().success());
    eventually(SOON, "the server answers no more", || {
        let left = testbed.run(Host::Server, &["ip", "neighbour", "show", "proxy"]);
        if left.contains("198.51.100.77") { Err(left) } else { Ok(()) }
    });
}

#[test]
fn addresses_that_no_user_can_have_are_refused_with_the_next_step() {
    let site = site();
    assert!(site.user(&["add", "anna", "--address", NETWORK, "--host", "192.0.2.1"]).status.success());
    for (address, why) in [
        ("192.168.1.1", "is not in the networks of the tunnel, and not public"),
        ("10.0.0.128/25", "overlaps the tunnel's network 10.0.0.0/24"),
        ("2000::/16", "is larger than a /32"),
        ("2001:db8:7::9", "the address 2001:db8:7::9 of `carol` inside 2001:db8:7::/64 of `anna`"),
        ("2001:db8:7::9/64", "2001:db8:7::/64"),
    ] {
        let output = site.user(&["add", "carol", "--address", address, "--host", "192.0.2.1"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{address}: {said}");
    }
    // An address that the server's machine has itself is refused once a client would get it.
    let dave = site.add("dave", &["--address", "198.51.100.0/29"]);
    let _dave = site.join_with(Host::Client, &dave, &[]).wait_until_up();
    wait_for_state(&site.server, "198.51.100.0/29", "refused");
}

#[test]
fn a_network_of_a_user_is_for_the_hosts_behind_its_client_and_is_not_translated() {
    let site = site();
    let testbed = &site.testbed;
    for (host, device, address) in [(Host::Client, "lan0", "2001:db8:7::1/64"), (Host::Lan, "eth0", HOST)] {
        testbed.run(host, &["ip", "address", "add", address, "dev", device, "nodad"]);
    }
    testbed.run(Host::Lan, &["ip", "route", "replace", "::/0", "via", "fd00:77::1", "src", HOST]);
    let office = site.add("office", &["--address", NETWORK]);
    let file = testbed.dir().join("client.toml");
    fs::write(&file, "share = [\"lan0\"]\n").expect("a file to write");
    let mut client = site.join_with(Host::Client, &office, &["--config", "client.toml"]).wait_until_up();
    for process in [&client, &site.server] {
        wait_for_state(process, NETWORK, "in use");
    }

    // Hosts leave with their own addresses, and nobody comes in whom the client does not name.
    is_seen_as(testbed, Host::Lan, Family::V6, HOST);
    is_silent(testbed, Host::Inet, HOST);
    fs::write(&file, "share = [\"lan0\"]\naccept-from = [\"::/0\"]\n").expect("a file to write");
    client.reload();
    reaches(testbed, Host::Inet, HOST);

    // A second client of the user waits; without --share it would not use the network.
    let other = site.join_with(Host::Other, &office, &[]).wait_until_up();
    eventually(SOON, "the second session waits", || {
        let states = states(&site.server, NETWORK);
        if states == ["in use", "standby"] { Ok(()) } else { Err(format!("{states:?}")) }
    });
    assert_eq!(states(&other, NETWORK), [""; 0]);
    assert!(client.interrupt().success());
    wait_for_state(&other, NETWORK, "unused");

    // Taken back, the network is nobody's at once.
    assert!(site.user(&["set", "office", "--address", "none"]).status.success());
    eventually(SOON, "the network is taken back", || {
        let routes = testbed.run(Host::Server, &["ip", "-6", "route"]);
        if routes.contains(NETWORK) { Err(routes) } else { Ok(()) }
    });
    eventually(SOON, "the client learns it", || {
        let states = states(&other, NETWORK);
        if states.is_empty() { Ok(()) } else { Err(format!("{states:?}")) }
    });
    let rules = testbed.run(Host::Client, &["nft", "list", "ruleset"]);
    assert!(!rules.contains("mpvpn"), "{rules}");
}
