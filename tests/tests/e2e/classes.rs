//! Classes of traffic: each on a connection of its own over the same links, none of them feels another.

use std::{collections::BTreeSet, fs, thread, time::Duration};

use mpvpn_tests::{
    eventually,
    ping::{Ping, Pings},
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(15);
/// What marks a packet as a call, as `ping -Q` takes it: DSCP EF.
const CALL: &str = "0xb8";
/// Pings are of the class of calls by themselves.
const PLAIN: &str = "[[class]]\nname = 'default'\n[[class.match]]\nprotocol = 'icmp'\ndscp = 'cs0'\n";
const CLASSES: [&str; 3] = ["default", "critical", "bulk"];

/// A port of `bulk`, by the rules that every client has.
const BULK: (&str, u16) = (TUNNEL, 6881);

/// A client with this configuration, every class awake and up on as many links.
fn client(testbed: &Testbed, config: &str, links: usize) -> MpvpnProcess {
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let client = testbed.client(&["--config", "client.toml"]);
    client.wait_for_status(SOON, "classes that carry their packets themselves", |status| {
        testbed.send_empty_udp(Host::Client, BULK);
        let all = status["classes"].as_array().expect("classes is a list");
        if all.iter().all(|class| class["state"] == "up") { Ok(()) } else { Err(format!("{all:#?}")) }
    });
    CLASSES.iter().for_each(|class| until_active(&client, class, links));
    client
}

fn until_active(client: &MpvpnProcess, class: &str, links: usize) {
    client.wait_for_status(SOON, &format!("{class} on {links} links"), |status| {
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

/// Waits until calls lose nothing.
fn until_calls_pass(testbed: &Testbed, how: &str) {
    eventually(SOON, &format!("calls {how}"), || {
        let output = testbed.output_of(
            Host::Client,
            Duration::from_secs(5),
            &["ping", "-q", "-n", "-c", "10", "-i", "0.05", "-W", "1", "-Q", CALL, TUNNEL],
        );
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if said.contains(" 0% packet loss") { Ok(()) } else { Err(said) }
    });
}

/// Every ping was answered, but for the last ones, which may still be on their way.
fn is_unbroken(pings: &Pings) -> bool {
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
fn each_class_has_ports_of_its_own_and_carries_what_its_rules_say_both_ways() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let config = "[[class]]\nname = 'bulk'\n[[class.match]]\nprotocol = 'icmp'\ndscp = 'af41'\n";
    let client = client(&testbed, &format!("{PLAIN}{config}"), 2);
    let status = client.status();
    let all = status["paths"].as_array().expect("a list");
    let mut ports: Vec<_> = all.iter().map(|path| path["local"].to_string()).collect();
    ports.sort();
    ports.dedup();
    assert_eq!((all.len(), ports.len()), (6, 6), "three classes on two links: {status:#}");

    // What is marked as a call by the built-in rules, by a rule of the file, and what nothing is said about.
    let packets = 50 * 84;
    for (mark, class) in [(CALL, "critical"), ("0x88", "bulk"), ("0", "default")] {
        eventually(SOON, "the packets in their class alone", || {
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
fn a_class_that_nobody_has_used_costs_no_connection_until_its_first_packet() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let client = testbed.client(&[]);
    ["default", "critical"].iter().for_each(|class| until_active(&client, class, 2));
    // A path is active to the client as soon as it has heard the server, which is a moment before the server counts it.
    let at_server = |expected: [usize; 3]| {
        server.wait_for_status(SOON, "the same paths at the server", |status| {
            let paths = CLASSES.map(|class| paths_of(&status["clients"][0], class).len());
            if paths == expected { Ok(()) } else { Err(format!("{paths:?} instead of {expected:?}")) }
        });
    };
    at_server([2, 2, 0]);
    let status = client.status();
    let bulk = &status["classes"][2];
    assert_eq!((&bulk["state"], &bulk["reason"]), (&"asleep".into(), &"not used yet".into()), "{bulk:#}");
    testbed.send_empty_udp(Host::Client, BULK);
    until_active(&client, "bulk", 2);
    at_server([2, 2, 2]);
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
    ping(&testbed, &["-c", "100", "-i", "0.01", "-Q", CALL]);
    for host in [Host::Server, Host::Client] {
        let seen = CLASSES.map(|class| testbed.count_nft_packets(host, class));
        let [default, critical, bulk] = seen;
        assert!(critical >= 100 && default > 2 && bulk > 2, "default, critical, bulk: {seen:?}");
        assert!(critical > bulk + 80, "default, critical, bulk: {seen:?}");
    }
}

#[test]
fn a_class_dies_and_returns_alone() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = client(&testbed, PLAIN, 2);
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
    // Whoever calls meanwhile is carried by the connection that works.
    until_calls_pass(&testbed, "over the default class");
    let pings = default.finish();
    assert!(is_unbroken(&pings), "the default class feels it: {pings:?}");
    let events = client.events();
    let dead = |event: &Value| event["event"] == "path_failed" && event["class"] == "critical";
    assert!(events.iter().any(dead), "{events:#?}");

    testbed.run(Host::Server, &["nft", "delete table inet block"]);
    until_active(&client, "critical", 2);
    eventually(SOON, "calls in their class again", || {
        let before = bytes(&client, "critical");
        ping(&testbed, &["-c", "20", "-i", "0.02", "-Q", CALL]);
        let now = bytes(&client, "critical");
        let all = now.0 >= before.0 + 20 * 84 && now.1 >= before.1 + 20 * 84;
        if all { Ok(()) } else { Err(format!("{before:?}, then {now:?}")) }
    });
}

#[test]
fn classes_keep_to_the_links_that_they_are_given() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let config = "[[class]]\nname = 'bulk'\nexclude = ['eth2']\n\
                  [[class]]\nname = 'critical'\nprefer = ['eth2']\n";
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let client = testbed.client(&["--config", "client.toml"]);
    until_active(&client, "default", 2);
    let status = client.wait_for_status(SOON, "critical and bulk where they belong", |status| {
        testbed.send_empty_udp(Host::Client, BULK);
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
    // The preferred link of calls dies: they go on over the other one.
    testbed.link(2).cut();
    until_calls_pass(&testbed, "over the other link");
}

#[test]
fn calls_with_copies_lose_nothing_when_a_link_falls_silent() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = client(&testbed, "[[class]]\nname = 'critical'\ncopies = 2\n", 2);
    let calls = Ping::dense_with_tos(&testbed, Host::Client, CALL, TUNNEL, 4);
    thread::sleep(Duration::from_secs(1));
    testbed.link(1).silence(Direction::Both);
    let pings = calls.finish();
    assert!(is_unbroken(&pings), "{pings:?}");
    testbed.link(1).end_silence();
    until_active(&client, "critical", 2);
    let said = ping(&testbed, &["-c", "100", "-i", "0.01", "-Q", CALL]);
    assert!(said.contains("100 received") && !said.contains("duplicates"), "{said}");
}
