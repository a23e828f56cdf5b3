//! Classes of traffic: each has its own connection over the same links and is independent of the others.

use std::{collections::BTreeSet, fs, thread, time::Duration};

use mpvpn_tests::{
    eventually,
    iperf::IperfServer,
    ping::{Ping, Pings},
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
/// TOS byte of DSCP EF, which marks calls, for `ping -Q`.
const CALL_TOS: &str = "0xb8";
/// Assigns pings without a mark to `default`; by default all pings belong to `critical`.
const PINGS_IN_DEFAULT: &str =
    "[[class]]\nname = 'default'\n[[class.match]]\nprotocol = 'icmp'\ndscp = 'cs0'\n";
/// The built-in classes.
const CLASSES: [&str; 3] = ["default", "critical", "bulk"];
/// Those of them that sleep until their first packet.
const SLEEPING: [&str; 2] = ["critical", "bulk"];

/// Starts a client with this configuration, and tables for all classes, which therefore connect with their
/// first packets.
fn client_with_tables(testbed: &Testbed, config: &str) -> MpvpnProcess {
    let mut config = config.to_owned();
    for class in SLEEPING {
        let name = format!("name = '{class}'\n");
        if !config.contains(&name) {
            config += &format!("[[class]]\n{name}");
        }
    }
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    testbed.client(&["--config", "client.toml"])
}

/// The same, and waits until every class is up on `links` links.
fn client(testbed: &Testbed, config: &str, links: usize) -> MpvpnProcess {
    let client = client_with_tables(testbed, config);
    client.wait_for_status(TIMEOUT, "classes that carry their packets themselves", |status| {
        SLEEPING.iter().for_each(|class| testbed.wake_class(class));
        let all = status["classes"].as_array().expect("classes is a list");
        if all.iter().all(|class| class["state"] == "up") { Ok(()) } else { Err(format!("{all:#?}")) }
    });
    CLASSES.iter().for_each(|class| wait_for_active(&client, class, links));
    client
}

fn wait_for_active(client: &MpvpnProcess, class: &str, links: usize) {
    client.wait_for_status(TIMEOUT, &format!("{class} on {links} links"), |status| {
        let active = paths_of(status, class).iter().filter(|path| path["state"] == "active").count();
        if active == links { Ok(()) } else { Err(format!("{active} paths are active")) }
    });
}

/// Bytes that a class has sent and received.
fn bytes(process: &MpvpnProcess, class: &str) -> (u64, u64) {
    let status = process.status();
    let all = status["classes"].as_array().expect("classes is a list");
    let found =
        all.iter().find(|entry| entry["name"] == class).unwrap_or_else(|| panic!("{class}: {all:#?}"));
    (found["tx_bytes"].as_u64().unwrap_or(0), found["rx_bytes"].as_u64().unwrap_or(0))
}

fn ping(testbed: &Testbed, more: &[&str]) -> String {
    testbed.run(Host::Client, &[&["ping", "-q", "-n"], more, &[TUNNEL]].concat())
}

/// Waits until 10 marked pings lose no packet.
fn wait_for_lossless_calls(testbed: &Testbed, how: &str) {
    eventually(TIMEOUT, &format!("calls {how}"), || {
        let output = testbed.output_of(
            Host::Client,
            Duration::from_secs(5),
            &["ping", "-q", "-n", "-c", "10", "-i", "0.05", "-W", "1", "-Q", CALL_TOS, TUNNEL],
        );
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if said.contains(" 0% packet loss") { Ok(()) } else { Err(said) }
    });
}

/// Whether every ping except the last three was answered.
fn has_no_loss(pings: &Pings) -> bool {
    let numbers: BTreeSet<u64> = pings.answers.iter().map(|answer| answer.number).collect();
    pings.sent > 100 && (1..pings.sent - 3).all(|number| numbers.contains(&number))
}

/// The source ports of a class, as a set for nftables.
fn ports(status: &Value, class: &str) -> String {
    let local = paths_of(status, class).into_iter().filter_map(|path| path["local"].as_str());
    let ports: Vec<_> = local.filter_map(|local| local.rsplit(':').next()).collect();
    format!("{{ {} }}", ports.join(", "))
}

#[test]
fn each_class_has_its_own_ports_and_carries_the_traffic_of_its_rules_in_both_directions() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let config = "[[class]]\nname = 'bulk'\n[[class.match]]\nprotocol = 'icmp'\ndscp = 'af41'\n";
    let client = client(&testbed, &format!("{PINGS_IN_DEFAULT}{config}"), 2);
    let status = client.status();
    let all = status["paths"].as_array().expect("a list");
    let mut ports: Vec<_> = all.iter().map(|path| path["local"].to_string()).collect();
    ports.sort();
    ports.dedup();
    assert_eq!((all.len(), ports.len()), (6, 6), "three classes on two links: {status:#}");

    // Traffic of a built-in rule, of a rule in the file, and without a rule.
    let packets = 50 * 84;
    for (mark, class) in [(CALL_TOS, "critical"), ("0x88", "bulk"), ("0", "default")] {
        eventually(TIMEOUT, "the packets in their class alone", || {
            let before = CLASSES.map(|class| bytes(&client, class));
            ping(&testbed, &["-c", "50", "-i", "0.01", "-Q", mark]);
            let now = CLASSES.map(|class| bytes(&client, class));
            let gained = [0, 1, 2].map(|at| (now[at].0 - before[at].0, now[at].1 - before[at].1));
            let expected = CLASSES.map(|other| if other == class { (packets, packets) } else { (0, 0) });
            match gained == expected {
                true => Ok(()),
                false => Err(format!("{mark}, which is {class}, gave {gained:?}")),
            }
        });
    }
}

#[test]
fn an_unused_class_has_no_connection_until_its_first_packet() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let client = client_with_tables(&testbed, "");
    wait_for_active(&client, "default", 2);
    // The client's path becomes active a moment before the server's.
    let at_server = |expected: [usize; 3]| {
        server.wait_for_status(TIMEOUT, "the same paths at the server", |status| {
            let paths = CLASSES.map(|class| paths_of(&status["clients"][0], class).len());
            if paths == expected { Ok(()) } else { Err(format!("{paths:?} instead of {expected:?}")) }
        });
    };
    at_server([2, 0, 0]);
    let status = client.status();
    for class in &status["classes"].as_array().expect("a list")[1..] {
        let said = (&class["state"], &class["reason"]);
        assert_eq!(said, (&"asleep".into(), &"not used yet".into()), "{class:#}");
    }
    for (class, expected) in [("bulk", [2, 0, 2]), ("critical", [2, 2, 2])] {
        testbed.wake_class(class);
        wait_for_active(&client, class, 2);
        at_server(expected);
    }
}

#[test]
fn pings_have_a_connection_of_their_own_while_a_link_is_full_and_none_before() {
    let testbed = Testbed::new(&["20mbit,10ms"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let state = || client.status()["classes"][1]["state"].clone();
    // Pings belong to `critical`.
    let said = ping(&testbed, &["-c", "20", "-i", "0.05"]);
    assert!(said.contains("20 received"), "{said}");
    assert_eq!(state(), "asleep");
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 4, Direction::Down, 5);
    let pings = Ping::dense(&testbed, Host::Client, TUNNEL, 4).finish();
    assert_eq!(state(), "up");
    assert!(has_no_loss(&pings), "{pings:?}");
    load.finish();
}

#[test]
fn packets_between_the_ends_are_marked_by_class() {
    let testbed = Testbed::new(&["100mbit,5ms"]);
    let count = |host, port: &str| {
        let rules = format!(
            "add table inet marks; add chain inet marks in {{ type filter hook input priority 0; }}; \
             add rule inet marks in udp {port} 4433 ip dscp ef counter comment \"critical\"; \
             add rule inet marks in udp {port} 4433 ip dscp cs1 counter comment \"bulk\"; \
             add rule inet marks in udp {port} 4433 ip dscp cs0 counter comment \"default\""
        );
        testbed.run(host, &["nft", &rules]);
    };
    count(Host::Server, "dport");
    count(Host::Client, "sport");
    let _server = testbed.server(&[]);
    let _client = client(&testbed, "", 1);
    ping(&testbed, &["-c", "100", "-i", "0.01", "-Q", CALL_TOS]);
    for host in [Host::Server, Host::Client] {
        let seen = CLASSES.map(|class| testbed.count_nft_packets(host, class));
        let [default, critical, bulk] = seen;
        assert!(critical >= 100 && default > 2 && bulk > 2, "default, critical, bulk: {seen:?}");
        assert!(critical > bulk + 80, "default, critical, bulk: {seen:?}");
    }
}

#[test]
fn a_class_fails_and_recovers_without_affecting_others() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = client(&testbed, PINGS_IN_DEFAULT, 2);
    let calls = ports(&client.status(), "critical");
    testbed.run(
        Host::Server,
        &[
            "nft",
            &format!(
                "add table inet block; add chain inet block in {{ type filter hook input priority 0; }}; \
             add rule inet block in udp sport {calls} drop"
            ),
        ],
    );
    let default = Ping::every(&testbed, Host::Client, Duration::from_millis(20), TUNNEL, 8);
    // A connection that works carries the calls meanwhile.
    wait_for_lossless_calls(&testbed, "over the default class");
    let pings = default.finish();
    assert!(has_no_loss(&pings), "the default class feels it: {pings:?}");
    let events = client.events();
    let dead = |event: &Value| event["event"] == "path_failed" && event["class"] == "critical";
    assert!(events.iter().any(dead), "{events:#?}");

    testbed.run(Host::Server, &["nft", "delete table inet block"]);
    wait_for_active(&client, "critical", 2);
    eventually(TIMEOUT, "calls in their class again", || {
        let before = bytes(&client, "critical");
        ping(&testbed, &["-c", "20", "-i", "0.02", "-Q", CALL_TOS]);
        let now = bytes(&client, "critical");
        let all = now.0 >= before.0 + 20 * 84 && now.1 >= before.1 + 20 * 84;
        if all { Ok(()) } else { Err(format!("{before:?}, then {now:?}")) }
    });
}

#[test]
fn classes_use_only_their_configured_links() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let config = "[[class]]\nname = 'bulk'\nexclude = ['eth2']\n\
                  [[class]]\nname = 'critical'\nprefer = ['eth2']\n";
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let client = testbed.client(&["--config", "client.toml"]);
    wait_for_active(&client, "default", 2);
    let status = client.wait_for_status(TIMEOUT, "critical and bulk where they belong", |status| {
        SLEEPING.iter().for_each(|class| testbed.wake_class(class));
        let state = |class, link| {
            let path = paths_of(status, class).into_iter().find(|path| path["link"] == link);
            path.map_or("none".to_owned(), |path| path["state"].as_str().unwrap_or_default().to_owned())
        };
        let found = [("critical", "eth2"), ("critical", "eth1"), ("bulk", "eth1"), ("bulk", "eth2")]
            .map(|(class, link)| state(class, link));
        match &found.each_ref().map(String::as_str)[..] {
            ["active", "standby", "active", "none"] => Ok(()),
            _ => Err(format!("{found:?}")),
        }
    });
    assert_eq!(status["links"].as_array().map(Vec::len), Some(2), "{status:#}");
    // The preferred link of calls fails: calls continue over the other one.
    testbed.link(2).cut();
    wait_for_lossless_calls(&testbed, "over the other link");
}

#[test]
fn calls_with_copies_lose_nothing_when_a_link_falls_silent() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = client(&testbed, "[[class]]\nname = 'critical'\ncopies = 2\n", 2);
    let calls = Ping::dense_with_tos(&testbed, Host::Client, CALL_TOS, TUNNEL, 4);
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).silence(Direction::Both);
    let pings = calls.finish();
    assert!(has_no_loss(&pings), "{pings:?}");
    testbed.link(1).end_silence();
    wait_for_active(&client, "critical", 2);
    let said = ping(&testbed, &["-c", "100", "-i", "0.01", "-Q", CALL_TOS]);
    assert!(said.contains("100 received") && !said.contains("duplicates"), "{said}");
}
