//! Tiers, rate limits, quotas and marks of links, and interfaces that appear and disappear.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    fallible_iperf::{IperfTarget, Traffic},
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Direction, Host, LINK, MpvpnProcess, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a client with this configuration file.
fn client(testbed: &Testbed, links: &str, more: &[&str]) -> MpvpnProcess {
    fs::write(testbed.dir().join("client.toml"), links).expect("a file");
    let args = [&["--config", "client.toml", "--state-dir", "state"], more].concat();
    testbed.client(&args)
}

fn link<'a>(status: &'a Value, name: &str) -> &'a Value {
    let links = status["links"].as_array().expect("links is a list");
    links.iter().find(|link| link["name"] == name).unwrap_or(&Value::Null)
}

/// Waits until the link is in a state for a reason that begins with `reason`.
fn wait_for_link(client: &MpvpnProcess, name: &str, state: &str, reason: &str) -> Value {
    let status = client.wait_for_status(TIMEOUT, &format!("{name} {state}"), |status| {
        let found = link(status, name);
        let why = found["reason"].as_str().unwrap_or("nothing");
        match found["state"] == state && why.starts_with(reason) && (why.is_empty() == reason.is_empty()) {
            true => Ok(()),
            false => Err(format!("{name} is {}, {why}", found["state"])),
        }
    });
    link(&status, name).clone()
}

fn link_set(testbed: &Testbed, client: &MpvpnProcess, args: &[&str]) -> String {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let output = testbed.mpvpn(Host::Client, &[&["link", "set"], args, &["--api-socket", &socket]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Bytes that a link carries in both directions during 200 pings through the tunnel.
fn bytes_during_pings(testbed: &Testbed, interface: &str) -> u64 {
    let count = || {
        let (rx, tx) = testbed.interface_bytes(Host::Client, interface);
        rx + tx
    };
    let before = count();
    testbed.run(Host::Client, &["ping", "-c", "200", "-i", "0.005", "-s", "1200", "-q", TUNNEL]);
    count() - before
}

#[test]
fn tiers_follow_the_configuration_and_can_be_changed_at_run_time() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = client(&testbed, "[[link]]\nname = \"*2\"\ntier = \"backup\"\nmetered = true\n", &[]);
    wait_for_link(&client, "eth1", "up", "");
    let found = wait_for_link(&client, "eth2", "standby", "a better link works");
    assert!(found["tier"] == "backup" && found["metered"] == true, "{found:#}");
    let bytes = bytes_during_pings(&testbed, "eth2");
    // Mostly path MTU discovery on the connection of each class.
    assert!(bytes < 3 * 25_000, "{bytes} bytes over a backup link that nobody needs");

    testbed.link(1).cut();
    wait_for_link(&client, "eth2", "up", "");
    reaches(&testbed, Host::Client, TUNNEL);
    testbed.link(1).restore();
    wait_for_link(&client, "eth1", "up", "");
    wait_for_link(&client, "eth2", "standby", "a better link works");

    assert!(link_set(&testbed, &client, &["eth2", "--tier", "primary"]).contains("primary"));
    wait_for_link(&client, "eth2", "up", "");
    link_set(&testbed, &client, &["eth2", "--tier", "overflow"]);
    wait_for_link(&client, "eth2", "standby", "overflow not needed");
    link_set(&testbed, &client, &["eth1", "--tier", "never"]);
    wait_for_link(&client, "eth1", "never", "as configured");
    wait_for_link(&client, "eth2", "up", "");
    reaches(&testbed, Host::Client, TUNNEL);
    let bytes = bytes_during_pings(&testbed, "eth1");
    assert!(bytes < 2_000, "{bytes} bytes over a link that is never to be used");

    let socket = client.socket().to_str().expect("an ASCII path");
    let args = ["link", "set", "eth7", "--tier", "backup", "--api-socket", socket];
    let output = testbed.mpvpn(Host::Client, &args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("there is no link `eth7`: known are eth1, eth2"), "{stderr}");
}

#[test]
fn a_reload_applies_the_configuration_file() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    let client = client(&testbed, "[[link]]\nname = \"eth2\"\ntier = \"backup\"\n", &[]);
    wait_for_link(&client, "eth2", "standby", "a better link works");
    let write = |text: &str| fs::write(testbed.dir().join("client.toml"), text).expect("a file");
    let reload = |process: &MpvpnProcess| {
        let socket = process.socket().to_str().expect("an ASCII path").to_owned();
        let output = testbed.mpvpn(Host::Client, &["config", "reload", "--api-socket", &socket]);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.code(), format!("{out}{err}"))
    };
    write("scheduler = \"weighted\"\n[[link]]\nname = \"eth2\"\nweight = 3\n");
    let said = "links are used as the file says now\ncounts after a restart: scheduler\n";
    assert_eq!(reload(&client), (Some(0), said.to_owned()));
    assert_eq!(wait_for_link(&client, "eth2", "up", "")["weight"], 3);

    write("[[link]]\nname = \"eth2\"\ntier = \"best\"\n");
    let (code, said) = reload(&client);
    assert!(code == Some(2) && said.contains("line 3") && said.contains("best"), "{code:?}: {said}");
    wait_for_link(&client, "eth2", "up", "");

    write("[[link]]\nname = \"eth2\"\ntier = \"overflow\"\n");
    client.reload();
    wait_for_link(&client, "eth2", "standby", "overflow not needed");
    server.reload();
    assert_eq!(reload(&server), (Some(0), "nothing has changed\n".to_owned()));
    reaches(&testbed, Host::Client, TUNNEL);
    assert_eq!(client.status()["session"]["resumed"], 0, "the session goes on");
}

#[test]
fn a_link_carries_at_most_its_configured_rate() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&[LINK]);
    let _server = testbed.server(&[]);
    let client = client(&testbed, "[[link]]\nname = \"eth1\"\nup = \"8mbit\"\ndown = \"12mbit\"\n", &[]);
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let mut rate = |direction| {
        let arrived = target.run(Traffic::Tcp { flows: 4 }, direction, 5).expect("iperf3 runs");
        arrived.rate / 1e6
    };
    // Headers take 8 % of the rate, and the queue that fills at the start delays data.
    for (direction, cap) in [(Direction::Up, 8.0), (Direction::Down, 12.0)] {
        let rate = rate(direction);
        println!("{direction:?}: {rate:.2} Mbit/s of payload at a cap of {cap}");
        assert!(
            (cap * 0.78..cap).contains(&rate),
            "{direction:?}: {rate} Mbit/s of payload at a cap of {cap}"
        );
    }
    let status = client.status();
    let found = link(&status, "eth1");
    assert!(found["up_cap_bps"] == 8_000_000 && found["down_cap_bps"] == 12_000_000, "{found:#}");
    link_set(&testbed, &client, &["eth1", "--down", "none"]);
    let rate = rate(Direction::Down);
    assert!(rate > 24.0, "{rate} Mbit/s without a cap");
}

#[test]
fn shards_share_the_configured_rate_of_a_link() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&[LINK]);
    let _server = testbed.server(&["--shards", "2"]);
    let client = client(&testbed, "[[link]]\nname = \"eth1\"\ndown = \"12mbit\"\n", &["--shards", "2"]);
    client.wait_for_status(TIMEOUT, "two connections", |status| match paths_of(status, "default").len() {
        2 => Ok(()),
        other => Err(format!("{other} paths")),
    });
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let arrived = target.run(Traffic::Tcp { flows: 16 }, Direction::Down, 5).expect("iperf3 runs");
    let rate = arrived.rate / 1e6;
    println!("{rate:.2} Mbit/s of payload over two connections");
    // Flows may be spread unevenly over the shards, and a shard does not get the unused share of another.
    assert!((4.0..12.0).contains(&rate), "{rate} Mbit/s of payload at a cap of 12");
}

#[test]
fn a_link_with_a_used_up_quota_is_unused_until_the_reset() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let config = "[[link]]\nname = \"eth2\"\nquota = \"2MB\"\n";
    let mut first = client(&testbed, config, &[]);
    wait_for_link(&first, "eth2", "up", "");
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    target.run(Traffic::Tcp { flows: 4 }, Direction::Down, 3).expect("iperf3 runs");
    let found = wait_for_link(&first, "eth2", "never", "the quota of 2 MB is used up until 1 ");
    assert!(found["quota_used_bytes"].as_u64().is_some_and(|used| used >= 2_000_000), "{found:#}");
    reaches(&testbed, Host::Client, TUNNEL);
    assert!(first.interrupt().success());

    let mut second = client(&testbed, config, &[]);
    wait_for_link(&second, "eth2", "never", "the quota of 2 MB is used up until 1 ");
    link_set(&testbed, &second, &["eth2", "--quota-reset"]);
    let found = wait_for_link(&second, "eth2", "up", "");
    assert!(found["quota_used_bytes"].as_u64().is_some_and(|used| used < 500_000), "{found:#}");
    second.kill();

    let file = testbed.dir().join("state/links-mpvpn0.json");
    fs::write(&file, "{ \"links\": ").expect("a damaged file");
    let third = client(&testbed, config, &[]);
    wait_for_link(&third, "eth2", "up", "");
    assert!(third.log().contains("links-mpvpn0.json.bad"), "{}", third.log());
    assert!(file.with_extension("json.bad").exists());
}

#[test]
fn interfaces_that_match_a_pattern_are_used_while_they_exist() {
    let testbed = Testbed::new(&[LINK]);
    let _server = testbed.server(&[]);
    let config = "[[link]]\nname = \"wwan*\"\ntier = \"backup\"\n";
    let client = client(&testbed, config, &["--path", "eth1", "--path", "wwan*"]);
    assert_eq!(link(&client.status(), "wwan0"), &Value::Null);
    for round in 0..2 {
        testbed.add_interface("wwan0", 50);
        let found = wait_for_link(&client, "wwan0", "standby", "a better link works");
        assert_eq!(found["tier"], "backup", "round {round}: {found:#}");
        testbed.link(1).cut();
        wait_for_link(&client, "wwan0", "up", "");
        eventually(TIMEOUT, "an answer over the new link", || {
            let args = ["ping", "-c", "1", "-W", "1", TUNNEL];
            let output = testbed.output_of(Host::Client, Duration::from_secs(2), &args);
            if output.status.success() { Ok(()) } else { Err("no answer".to_owned()) }
        });
        testbed.link(1).restore();
        wait_for_link(&client, "eth1", "up", "");
        testbed.remove_interface("wwan0");
        wait_for_link(&client, "wwan0", "down", "no such interface");
        reaches(&testbed, Host::Client, TUNNEL);
    }
}

/// Adds nftables counters at the client for the tunnel's packets by direction, link and DSCP. No class has
/// AF21 by default.
fn add_mark_counters(testbed: &Testbed) {
    let mut rules = String::from("add table inet marks\n");
    for (hook, device, port) in [("input", "iifname", "sport"), ("output", "oifname", "dport")] {
        rules += &format!("add chain inet marks {hook} {{ type filter hook {hook} priority 0; }}\n");
        for link in ["eth1", "eth2"] {
            for mark in ["af21", "ef", "cs0"] {
                rules += &format!(
                    "add rule inet marks {hook} {device} {link} meta l4proto {{ tcp, udp }} th {port} 4433 \
                     ip dscp {mark} counter comment \"{hook} {link} {mark}\"\n"
                );
            }
        }
    }
    fs::write(testbed.dir().join("marks.nft"), rules).expect("a file");
    testbed.run(Host::Client, &["nft", "-f", "marks.nft"]);
}

#[test]
fn packets_of_a_link_carry_its_mark_in_both_directions() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    for transport in ["quic", "tcp"] {
        let config = format!(
            "[[link]]\nname = 'eth1'\ndscp = 'af21'\ntransport = '{transport}'\n[[class]]\nname = 'critical'\n"
        );
        let mut client = client(&testbed, &config, &[]);
        // Which link's path is the first of the connection, and so its number, is chance.
        client.wait_for_status(TIMEOUT, &format!("{transport} over eth1 and another path"), |status| {
            let all = paths_of(status, "default");
            let active = all.iter().filter(|path| path["state"] == "active");
            let is_wanted = |path: &Value| {
                path["link"] == "eth1" && (path["transport"] == "quic") == (transport == "quic")
            };
            let is_there = active.clone().any(|path| is_wanted(path)) && active.count() == 2;
            if is_there { Ok(()) } else { Err(format!("{all:#?}")) }
        });
        add_mark_counters(&testbed);
        // iperf3 belongs to `default`, which has no mark; pings belong to `critical`, which has one.
        target.run(Traffic::Tcp { flows: 4 }, Direction::Down, 2).expect("iperf3 runs");
        testbed.run(Host::Client, &["ping", "-c", "50", "-i", "0.01", "-q", TUNNEL]);
        let count = |comment: &str| testbed.count_nft_packets(Host::Client, comment);
        for hook in ["input", "output"] {
            let [marked, plain] = ["af21", "cs0"].map(|mark| count(&format!("{hook} eth1 {mark}")));
            assert!(
                marked > 50 && plain * 20 < marked,
                "{transport}, {hook}: {marked} packets of eth1 marked, {plain} not"
            );
        }
        if transport == "quic" {
            for hook in ["input", "output"] {
                let [marked, plain] = ["af21", "cs0"].map(|mark| count(&format!("{hook} eth2 {mark}")));
                assert!(marked == 0 && plain > 50, "{hook}: {marked} packets of eth2 marked, {plain} not");
                let both = ["eth1", "eth2"].map(|link| count(&format!("{hook} {link} ef")));
                assert!(
                    both.iter().sum::<u64>() > 20,
                    "{hook}: {both:?} packets with the mark of their class"
                );
            }
        }
        testbed.run(Host::Client, &["nft", "delete", "table", "inet", "marks"]);
        assert!(client.terminate().success());
    }
}
