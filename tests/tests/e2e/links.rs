//! Links as people have them: tiers, limits, quotas, marks, and interfaces that come and go.

use std::{fs, time::Duration};

use mpvpn_tests::{
    eventually,
    iperf::{Target, Traffic},
    machine_share::{MachineShare, Share},
    ping::reaches,
    stage::{LINK, Peer, Place, Stage, TUNNEL, paths_of},
    tcp::Way,
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

/// A client with this configuration file and a state folder in the lab's.
fn client(stage: &Stage, links: &str, more: &[&str]) -> Peer {
    fs::write(stage.dir().join("client.toml"), links).expect("a file");
    let words = [&["--config", "client.toml", "--state-dir", "state"], more].concat();
    stage.client(&words)
}

fn link<'a>(status: &'a Value, name: &str) -> &'a Value {
    let links = status["links"].as_array().expect("links is a list");
    links.iter().find(|link| link["name"] == name).unwrap_or(&Value::Null)
}

/// Waits until the link is in a state for a reason that begins like this.
fn until(client: &Peer, name: &str, state: &str, reason: &str) -> Value {
    let status = client.until(SOON, &format!("{name} {state}"), |status| {
        let found = link(status, name);
        let why = found["reason"].as_str().unwrap_or("nothing");
        match found["state"] == state && why.starts_with(reason) && (why.is_empty() == reason.is_empty()) {
            true => Ok(()),
            false => Err(format!("{name} is {}, {why}", found["state"])),
        }
    });
    link(&status, name).clone()
}

fn set(stage: &Stage, client: &Peer, words: &[&str]) -> String {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let output = stage.mpvpn(Place::Client, &[&["link", "set"], words, &["--api-socket", &socket]].concat());
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Bytes of data that a link carried in both directions while the tunnel was busy.
fn busy(stage: &Stage, interface: &str) -> u64 {
    let count = || {
        let (rx, tx) = stage.counters(Place::Client, interface);
        rx + tx
    };
    let before = count();
    stage.run(Place::Client, &["ping", "-c", "200", "-i", "0.005", "-s", "1200", "-q", TUNNEL]);
    count() - before
}

#[test]
fn tiers_follow_the_configuration_and_can_be_changed_at_run_time() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = client(&stage, "[[link]]\nname = \"*2\"\ntier = \"backup\"\nmetered = true\n", &[]);
    until(&client, "eth1", "up", "");
    let found = until(&client, "eth2", "standby", "a better link works");
    assert!(found["tier"] == "backup" && found["metered"] == true, "{found:#}");
    let bytes = busy(&stage, "eth2");
    // Mostly what finding the path MTU costs, on the connection of each class.
    assert!(bytes < 3 * 25_000, "{bytes} bytes over a backup link that nobody needs");

    stage.link(1).cut();
    until(&client, "eth2", "up", "");
    reaches(&stage, Place::Client, TUNNEL);
    stage.link(1).restore();
    until(&client, "eth1", "up", "");
    until(&client, "eth2", "standby", "a better link works");

    assert!(set(&stage, &client, &["eth2", "--tier", "primary"]).contains("primary"));
    until(&client, "eth2", "up", "");
    set(&stage, &client, &["eth2", "--tier", "overflow"]);
    until(&client, "eth2", "standby", "overflow not needed");
    set(&stage, &client, &["eth1", "--tier", "never"]);
    until(&client, "eth1", "never", "as configured");
    until(&client, "eth2", "up", "");
    reaches(&stage, Place::Client, TUNNEL);
    let bytes = busy(&stage, "eth1");
    assert!(bytes < 2_000, "{bytes} bytes over a link that is never to be used");

    let socket = client.socket().to_str().expect("an ASCII path");
    let words = ["link", "set", "eth7", "--tier", "backup", "--api-socket", socket];
    let output = stage.mpvpn(Place::Client, &words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("there is no link `eth7`: known are eth1, eth2"), "{stderr}");
}

#[test]
fn the_file_counts_when_it_is_read_again() {
    let stage = Stage::two_links();
    let server = stage.server(&[]);
    let client = client(&stage, "[[link]]\nname = \"eth2\"\ntier = \"backup\"\n", &[]);
    until(&client, "eth2", "standby", "a better link works");
    let write = |text: &str| fs::write(stage.dir().join("client.toml"), text).expect("a file");
    let reload = |peer: &Peer| {
        let socket = peer.socket().to_str().expect("an ASCII path").to_owned();
        let output = stage.mpvpn(Place::Client, &["config", "reload", "--api-socket", &socket]);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.code(), format!("{out}{err}"))
    };
    write("scheduler = \"weighted\"\n[[link]]\nname = \"eth2\"\nweight = 3\n");
    let said = "links are used as the file says now\ncounts after a restart: scheduler\n";
    assert_eq!(reload(&client), (Some(0), said.to_owned()));
    assert_eq!(until(&client, "eth2", "up", "")["weight"], 3);

    write("[[link]]\nname = \"eth2\"\ntier = \"best\"\n");
    let (code, said) = reload(&client);
    assert!(code == Some(2) && said.contains("line 3") && said.contains("best"), "{code:?}: {said}");
    until(&client, "eth2", "up", "");

    write("[[link]]\nname = \"eth2\"\ntier = \"overflow\"\n");
    client.hang_up();
    until(&client, "eth2", "standby", "overflow not needed");
    server.hang_up();
    assert_eq!(reload(&server), (Some(0), "nothing has changed\n".to_owned()));
    reaches(&stage, Place::Client, TUNNEL);
    assert_eq!(client.status()["session"]["resumed"], 0, "the session goes on");
}

#[test]
fn a_link_carries_no_more_than_its_caps() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::new(&[LINK]);
    let _server = stage.server(&[]);
    let client = client(&stage, "[[link]]\nname = \"eth1\"\nup = \"8mbit\"\ndown = \"12mbit\"\n", &[]);
    let mut target = Target::new(&stage, TUNNEL, 5201);
    let mut rate = |way| {
        let arrived = target.run(Traffic::Tcp { flows: 4 }, way, 5).expect("iperf3 runs");
        arrived.rate / 1e6
    };
    // What TCP gets of it is 8 % less for headers, and the queue that it fills at first comes later.
    for (way, cap) in [(Way::Up, 8.0), (Way::Down, 12.0)] {
        let rate = rate(way);
        println!("{way:?}: {rate:.2} Mbit/s of payload at a cap of {cap}");
        assert!((cap * 0.78..cap).contains(&rate), "{way:?}: {rate} Mbit/s of payload at a cap of {cap}");
    }
    let status = client.status();
    let found = link(&status, "eth1");
    assert!(found["up_cap_bps"] == 8_000_000 && found["down_cap_bps"] == 12_000_000, "{found:#}");
    set(&stage, &client, &["eth1", "--down", "none"]);
    let rate = rate(Way::Down);
    assert!(rate > 24.0, "{rate} Mbit/s without a cap");
}

#[test]
fn shards_share_the_caps_of_a_link() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::new(&[LINK]);
    let _server = stage.server(&["--shards", "2"]);
    let client = client(&stage, "[[link]]\nname = \"eth1\"\ndown = \"12mbit\"\n", &["--shards", "2"]);
    client.until(SOON, "two connections", |status| match paths_of(status, "default").len() {
        2 => Ok(()),
        other => Err(format!("{other} paths")),
    });
    let mut target = Target::new(&stage, TUNNEL, 5201);
    let arrived = target.run(Traffic::Tcp { flows: 16 }, Way::Down, 5).expect("iperf3 runs");
    let rate = arrived.rate / 1e6;
    println!("{rate:.2} Mbit/s of payload over two connections");
    // Flows may be spread unevenly over the shards, and a share that is not used is not given away.
    assert!((4.0..12.0).contains(&rate), "{rate} Mbit/s of payload at a cap of 12");
}

#[test]
fn a_used_up_quota_rests_the_link_until_it_is_reset() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let config = "[[link]]\nname = \"eth2\"\nquota = \"2MB\"\n";
    let mut first = client(&stage, config, &[]);
    until(&first, "eth2", "up", "");
    let mut target = Target::new(&stage, TUNNEL, 5201);
    target.run(Traffic::Tcp { flows: 4 }, Way::Down, 3).expect("iperf3 runs");
    let found = until(&first, "eth2", "never", "the quota of 2 MB is used up until 1 ");
    assert!(found["quota_used_bytes"].as_u64().is_some_and(|used| used >= 2_000_000), "{found:#}");
    reaches(&stage, Place::Client, TUNNEL);
    assert!(first.interrupt().success());

    let mut second = client(&stage, config, &[]);
    until(&second, "eth2", "never", "the quota of 2 MB is used up until 1 ");
    set(&stage, &second, &["eth2", "--quota-reset"]);
    let found = until(&second, "eth2", "up", "");
    assert!(found["quota_used_bytes"].as_u64().is_some_and(|used| used < 500_000), "{found:#}");
    second.kill();

    let file = stage.dir().join("state/links-mpvpn0.json");
    fs::write(&file, "{ \"links\": ").expect("a damaged file");
    let third = client(&stage, config, &[]);
    until(&third, "eth2", "up", "");
    assert!(third.log().contains("links-mpvpn0.json.bad"), "{}", third.log());
    assert!(file.with_extension("json.bad").exists());
}

#[test]
fn interfaces_that_fit_a_pattern_are_used_as_they_come_and_go() {
    let stage = Stage::new(&[LINK]);
    let _server = stage.server(&[]);
    let config = "[[link]]\nname = \"wwan*\"\ntier = \"backup\"\n";
    let client = client(&stage, config, &["--path", "eth1", "--path", "wwan*"]);
    assert_eq!(link(&client.status(), "wwan0"), &Value::Null);
    for round in 0..2 {
        stage.plug("wwan0", 50);
        let found = until(&client, "wwan0", "standby", "a better link works");
        assert_eq!(found["tier"], "backup", "round {round}: {found:#}");
        stage.link(1).cut();
        until(&client, "wwan0", "up", "");
        eventually(SOON, "an answer over the new link", || {
            let words = ["ping", "-c", "1", "-W", "1", TUNNEL];
            let output = stage.attempt(Place::Client, Duration::from_secs(2), &words);
            if output.status.success() { Ok(()) } else { Err("no answer".to_owned()) }
        });
        stage.link(1).restore();
        until(&client, "eth1", "up", "");
        stage.unplug("wwan0");
        until(&client, "wwan0", "down", "no such interface");
        reaches(&stage, Place::Client, TUNNEL);
    }
}

/// Has the client count the tunnel's packets by direction, link and mark. The mark is one that no class has by itself.
fn count_marks(stage: &Stage) {
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
    fs::write(stage.dir().join("marks.nft"), rules).expect("a file");
    stage.run(Place::Client, &["nft", "-f", "marks.nft"]);
}

#[test]
fn packets_of_a_link_carry_its_mark_in_both_directions() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let mut target = Target::new(&stage, TUNNEL, 5201);
    for (transport, path) in [("quic", "default/eth1/0"), ("tcp", "default/eth1/tcp")] {
        let config = format!("[[link]]\nname = 'eth1'\ndscp = 'af21'\ntransport = '{transport}'\n");
        let mut client = client(&stage, &config, &[]);
        client.until(SOON, &format!("{path} and another path"), |status| {
            let all = paths_of(status, "default");
            let active = all.iter().filter(|found| found["state"] == "active");
            let is_there = active.clone().any(|found| found["id"] == path) && active.count() == 2;
            if is_there { Ok(()) } else { Err(format!("{all:#?}")) }
        });
        count_marks(&stage);
        // Of the class `default`, which has no mark. Pings are of `critical`, which has one.
        target.run(Traffic::Tcp { flows: 4 }, Way::Down, 2).expect("iperf3 runs");
        stage.run(Place::Client, &["ping", "-c", "50", "-i", "0.01", "-q", TUNNEL]);
        let count = |words: &str| stage.counted(Place::Client, words);
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
        stage.run(Place::Client, &["nft", "delete", "table", "inet", "marks"]);
        assert!(client.terminate().success());
    }
}
