//! Packets that are too big, and other uses of ICMP.

use std::{thread, time::Duration};

use mpvpn_tests::{
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Direction, Family, Host, TUNNEL, Testbed, inet, inet4},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The output of ping, whether it succeeds or not.
fn ping_output(testbed: &Testbed, args: &[&str]) -> String {
    let output = testbed.output_of(Host::Client, TIMEOUT, &[&["ping", "-n"], args].concat());
    [output.stdout, output.stderr].iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect()
}

#[test]
fn a_link_that_drops_large_packets_carries_traffic() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["40mbit,5ms,mtu=1300", "40mbit,5ms"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    client.wait_for_path("eth1", "active", TIMEOUT);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, direction, 3).finish();
        assert!(report.megabits() > 24.0, "{direction:?}: {:.0} Mbit/s", report.megabits());
    }
    let status = client.status();
    let mtu = mpvpn_tests::testbed::path_of(&status, "eth1").and_then(|path| path["mtu"].as_u64());
    assert!(mtu.is_some_and(|mtu| (1200..=1272).contains(&mtu)), "path MTU {mtu:?} over a link of 1300");
}

#[test]
fn packets_that_are_too_big_are_answered_with_the_mtu() {
    let testbed = Testbed::new(&["100mbit,5ms,mtu=1420"]);
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    // Wait until path MTU discovery is complete.
    thread::sleep(Duration::from_secs(2));
    let host = inet4();
    let refused = ping_output(&testbed, &["-M", "do", "-c", "3", "-i", "0.2", "-s", "1440", &host]);
    assert!(refused.contains("Frag needed") || refused.contains("too long"), "{refused}");
    let host6 = inet(Family::V6);
    let refused = ping_output(&testbed, &["-6", "-M", "do", "-c", "3", "-i", "0.2", "-s", "1440", &host6]);
    assert!(refused.contains("Packet too big") || refused.contains("too long"), "{refused}");
    // Fragments and smaller packets pass.
    let pieces = ping_output(&testbed, &["-M", "dont", "-c", "3", "-i", "0.2", "-s", "3000", &host]);
    assert!(pieces.contains(" 3 received"), "{pieces}");
    let fits = ping_output(&testbed, &["-M", "do", "-c", "3", "-i", "0.2", "-s", "1200", &host]);
    assert!(fits.contains(" 3 received"), "{fits}");
}

#[test]
fn the_tunnels_mtu_follows_the_path() {
    let testbed = Testbed::new(&["100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let read = || -> u64 {
        let text = testbed.run(Host::Client, &["ip", "-j", "link", "show", "dev", "mpvpn0"]);
        let links: serde_json::Value = serde_json::from_str(&text).expect("ip prints JSON");
        links[0]["mtu"].as_u64().expect("an MTU")
    };
    let found = mpvpn_tests::eventually(TIMEOUT, "the MTU of a link of 1500", || match read() {
        mtu if mtu > 1380 => Ok(mtu),
        mtu => Err(format!("{mtu}")),
    });
    assert!(found < 1472, "{found} cannot fit into a link of 1500");
    reaches(&testbed, Host::Client, TUNNEL);
}

#[test]
fn expired_ttls_and_unreachable_addresses_are_answered() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let _client = testbed.client(&[]);
    let host = inet4();
    let expired = ping_output(&testbed, &["-c", "2", "-i", "0.2", "-W", "2", "-t", "1", &host]);
    assert!(expired.contains("Time to live exceeded"), "{expired}");
    let host6 = inet(Family::V6);
    let expired = ping_output(&testbed, &["-6", "-c", "2", "-i", "0.2", "-W", "2", "-t", "1", &host6]);
    assert!(expired.contains("Hop limit") || expired.contains("Time exceeded"), "{expired}");
    let nobody = ping_output(&testbed, &["-c", "2", "-i", "0.2", "-W", "4", "10.0.0.200"]);
    assert!(nobody.contains("nreachable"), "an address that nobody has: {nobody}");
}
