//! A class with a TUN device of its own: a router steers into it by routes, and by what packets show only to the kernel.

use std::{fs, path::PathBuf, time::Duration};

use mpvpn_tests::{
    eventually,
    http::{Download, MB, Site},
    ping::{ping, reaches},
    stage::{Family, Peer, Place, Stage, inet, inet4},
};
use serde_json::Value;

/// The first address for clients is that of the client's own device.
const OWN: &str = "10.0.0.3";
const LONG: Duration = Duration::from_secs(10);

fn start(stage: &Stage, classes: &str, more: &[&str]) -> Peer {
    let file: PathBuf = stage.file("toml", Place::Client);
    fs::write(&file, classes).expect("a file in the lab's directory");
    let mut words = vec!["--config", file.to_str().expect("an ASCII path")];
    words.extend(more);
    let client = stage.client(&words);
    // Until a class works, its packets go by another.
    let mut tried = vec![("critical", vec!["-I", "cr0"])];
    tried.extend(classes.contains(BULK_PING).then(|| ("bulk", Vec::new())));
    for (class, more) in tried {
        eventually(LONG, &format!("{class} works"), || {
            let mut words = vec!["ping", "-n", "-c", "1", "-W", "1"];
            words.extend(&more);
            let host = inet4();
            words.push(&host);
            stage.attempt(Place::Client, LONG, &words);
            match carried(&client, class) {
                (_, 0) => Err("nothing came back by it".into()),
                _ => Ok(()),
            }
        });
    }
    client
}

fn paths_of(status: &Value, class: &str) -> usize {
    let active = |path: &&Value| path["class"] == class && path["state"] == "active";
    status["paths"].as_array().map_or(0, |paths| paths.iter().filter(active).count())
}

/// Bytes of inner packets that a class has sent and received.
fn carried(client: &Peer, class: &str) -> (u64, u64) {
    let status = client.status();
    let found =
        status["classes"].as_array().and_then(|all| all.iter().find(|one| one["name"] == class).cloned());
    let found = found.unwrap_or_else(|| panic!("no class {class}: {status:#}"));
    let bytes = |key: &str| found[key].as_u64().expect("a counter");
    (bytes("tx_bytes"), bytes("rx_bytes"))
}

/// Bulk of `what` goes by the class, both ways, and not by others.
fn goes_by(client: &Peer, class: &str, what: &str, run: impl FnOnce()) {
    const LEAST: u64 = 20 * 1000;
    let others = ["default", "critical", "bulk"].into_iter().filter(|other| *other != class);
    let before: Vec<_> = others.clone().map(|other| carried(client, other)).collect();
    let own = carried(client, class);
    run();
    let after = carried(client, class);
    assert!(
        after.0 - own.0 >= LEAST && after.1 - own.1 >= LEAST,
        "{what}: {own:?} became {after:?} of {class}"
    );
    for (other, before) in others.zip(before) {
        let after = carried(client, other);
        assert!(
            after.0 - before.0 < LEAST && after.1 - before.1 < LEAST,
            "{what}: {before:?} became {after:?} of {other}"
        );
    }
}

/// Five megabytes come down by the class.
fn downloads_by(client: &Peer, class: &str, run: impl FnOnce()) {
    let received = || {
        let status = client.status();
        let paths = status["paths"].as_array().expect("paths is a list").iter();
        paths.filter(|path| path["class"] == class).filter_map(|path| path["rx_bytes"].as_u64()).sum::<u64>()
    };
    let before = received();
    run();
    let after = received();
    assert!(after - before >= 5 * MB, "{before} bytes became {after} of {class}");
}

/// Thirty pings of a kilobyte, all answered but a few.
fn pings(stage: &Stage, from: Place, more: &[&str], to: &str) {
    let mut words = vec!["ping", "-n", "-i", "0.02", "-c", "30", "-s", "1000", "-w", "8"];
    words.extend(more);
    words.push(to);
    let output = stage.attempt(from, LONG, &words);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answers = text.lines().filter(|line| line.contains("time=")).count();
    assert!(
        answers >= 27,
        "{words:?}: {answers} of 30 answered\n{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

const BULK_PING: &str = "[[class]]\nname = 'bulk'\n[[class.match]]\nprotocol = 'icmp'\n";
const TUN: &str = "[[class]]\nname = 'critical'\ntun = 'cr0'\n";

#[test]
fn what_is_routed_to_the_tun_of_a_class_is_of_that_class_with_an_address_of_its_own() {
    let stage = Stage::two_links();
    let server = stage.server(&[]);
    // By the rules, ping would be something else.
    let client = start(&stage, &format!("{BULK_PING}{TUN}"), &[]);
    let status = client.status();
    let class =
        status["classes"].as_array().unwrap().iter().find(|class| class["name"] == "critical").unwrap();
    assert_eq!(
        (&class["tun"], &class["addresses"][0]),
        (&"cr0".into(), &format!("{OWN}/32").into()),
        "{class:#}"
    );
    assert_eq!(client.address(Family::V4), "10.0.0.2");
    let shown = stage.mpvpn(Place::Client, &["status", "--api-socket", client.socket().to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("cr0 10.0.0.3/32"), "{shown:?}");
    let known = server.status()["clients"][0]["addresses"].to_string();
    assert!(known.contains("10.0.0.2/24") && known.contains("10.0.0.3/24"), "{known}");

    let host = inet4();
    goes_by(&client, "bulk", "what no route says", || pings(&stage, Place::Client, &[], &host));
    goes_by(&client, "critical", "what is bound to it", || {
        pings(&stage, Place::Client, &["-I", "cr0"], &host)
    });
    goes_by(&client, "critical", "what has its address", || {
        pings(&stage, Place::Client, &["-I", OWN], &host)
    });
    let host6 = inet(Family::V6);
    goes_by(&client, "critical", "IPv6", || pings(&stage, Place::Client, &["-6", "-I", "cr0"], &host6));

    let own = stage.counters(Place::Client, "cr0");
    stage.run(Place::Client, &["ip", "route", "add", &host, "dev", "cr0"]);
    let route = stage.run(Place::Client, &["ip", "route", "get", &host]);
    assert!(route.contains("dev cr0") && route.contains(&format!("src {OWN}")), "{route}");
    goes_by(&client, "critical", "what is routed there", || pings(&stage, Place::Client, &[], &host));
    let site = Site::start(&stage, Place::Inet);
    downloads_by(&client, "critical", || Download::start(&stage, &site, &host, 5 * MB, LONG, &[]).finish());
    let now = stage.counters(Place::Client, "cr0");
    assert!(now.0 - own.0 > 4 * MB && now.1 > own.1, "answers did not come by cr0: {own:?} became {now:?}");
    let mtu = |device: &str| stage.run(Place::Client, &["cat", &format!("/sys/class/net/{device}/mtu")]);
    assert_eq!(mtu("cr0"), mtu("mpvpn0"));
}

#[test]
fn several_threads_share_the_tun_of_a_class() {
    let stage = Stage::two_links();
    let _server = stage.server(&["--shards", "2"]);
    let client = start(&stage, TUN, &["--shards", "2"]);
    let host = inet4();
    stage.run(Place::Client, &["ip", "route", "add", &host, "dev", "cr0"]);
    for _ in 0..6 {
        reaches(&stage, Place::Client, &host);
    }
    let site = Site::start(&stage, Place::Inet);
    downloads_by(&client, "critical", || {
        for _ in 0..5 {
            Download::start(&stage, &site, &host, MB, LONG, &[]).finish();
        }
    });
}

/// Gives the LAN a VLAN, too; whether this kernel has such.
fn tag(stage: &Stage) -> bool {
    let ends = [(Place::Client, "lan0", "192.168.20.1/24"), (Place::Lan, "eth0", "192.168.20.2/24")];
    for (place, parent, address) in ends {
        let script = format!(
            "ip link add link {parent} name v20 type vlan id 20 && ip address add {address} dev v20 && ip link set v20 up"
        );
        if !stage.attempt(place, LONG, &["sh", "-c", &script]).status.success() {
            eprintln!("skipped: this kernel has no VLANs");
            return false;
        }
    }
    true
}

#[test]
fn a_router_steers_by_ingress_mark_and_vlan() {
    let stage = Stage::with_lan(&["100mbit,5ms", "100mbit,5ms"]);
    let _server = stage.server(&[]);
    let host = inet4();
    let rule = |key: &str| format!("{BULK_PING}{TUN}[[class.match]]\n{key}\n");
    {
        let client = start(&stage, &rule("ingress = 'lan0'"), &[]);
        goes_by(&client, "critical", "what comes in by the LAN", || pings(&stage, Place::Lan, &[], &host));
        goes_by(&client, "bulk", "what the router sends", || pings(&stage, Place::Client, &[], &host));
        let site = Site::start(&stage, Place::Inet);
        let url = site.url(&host, &(5 * MB).to_string());
        downloads_by(&client, "critical", || {
            stage.run(Place::Lan, &["curl", "-gsS", "--max-time", "10", "-o", "/dev/null", &url]);
        });
    }
    assert!(ping(&stage, Place::Lan, &host, 3).answers.is_empty(), "steering outlived the client");
    {
        let client = start(&stage, &rule("mark = '0x10/0xf0'\nprotocol = 'icmp'"), &["--share", "lan0"]);
        let marked = ["-m", "16"];
        goes_by(&client, "critical", "what is marked", || pings(&stage, Place::Client, &marked, &host));
        goes_by(&client, "bulk", "what is not", || pings(&stage, Place::Client, &["-m", "32"], &host));
        goes_by(&client, "bulk", "what comes in by the LAN", || pings(&stage, Place::Lan, &[], &host));
        // As the firewall of a router marks what it forwards.
        let script = "nft add table inet user && nft add chain inet user pre '{ type filter hook prerouting priority \
                      mangle; }' && nft add rule inet user pre iifname lan0 meta mark set 0x15";
        stage.run(Place::Client, &["sh", "-c", script]);
        goes_by(&client, "critical", "what the router marks", || pings(&stage, Place::Lan, &[], &host));
        stage.run(Place::Client, &["nft", "delete", "table", "inet", "user"]);
    }
    let client = start(&stage, &rule("vlan = 20"), &["--share", "lan0"]);
    goes_by(&client, "bulk", "what has no tag", || pings(&stage, Place::Lan, &[], &host));
    // The interface of the VLAN comes when the client runs already.
    if !tag(&stage) {
        return;
    }
    reaches(&stage, Place::Lan, "192.168.20.1");
    let through = ["-I", "v20"];
    stage.run(Place::Lan, &["ip", "route", "add", &host, "via", "192.168.20.1", "dev", "v20"]);
    client.until(LONG, "the VLAN is found", |_| {
        match ping(&stage, Place::Lan, &host, 1).answers.is_empty() {
            true => Err("no answer".into()),
            false => Ok(()),
        }
    });
    goes_by(&client, "critical", "what has the tag", || pings(&stage, Place::Lan, &through, &host));
}

#[test]
fn what_cannot_go_by_the_class_goes_by_the_default_connection() {
    let stage = Stage::two_links();
    let _server = stage.server(&[]);
    let client = start(&stage, "[[class]]\nname = 'critical'\ntun = 'cr0'\nexclude = 'eth2'\n", &[]);
    let host = inet4();
    goes_by(&client, "critical", "all is well", || pings(&stage, Place::Client, &["-I", "cr0"], &host));
    stage.link(1).cut();
    client.until(Duration::from_secs(40), "the class is lost", |status| match paths_of(status, "critical") {
        0 => Ok(()),
        _ => Err("it has a path".into()),
    });
    eventually(Duration::from_secs(60), "an answer by the default connection", || {
        let words = ["ping", "-n", "-c", "1", "-W", "1", "-I", "cr0", &host];
        match stage.attempt(Place::Client, LONG, &words).status.success() {
            true => Ok(()),
            false => Err("nothing comes back".into()),
        }
    });
    goes_by(&client, "default", "the class is lost", || pings(&stage, Place::Client, &["-I", "cr0"], &host));
}

/// All that a client with the TUN of a class changes, and traffic has passed.
fn at_work(stage: &Stage) -> Peer {
    let rules = "[[class.match]]\ningress = 'lan0'\n[[class.match]]\nmark = 7\n[[class.match]]\nvlan = 20\n";
    let client = start(stage, &format!("{TUN}{rules}"), &[]);
    goes_by(&client, "critical", "what comes in by the LAN", || pings(stage, Place::Lan, &[], &inet4()));
    client
}

#[test]
fn nothing_of_it_is_left_after_the_end_nor_after_a_kill_and_the_next_start() {
    let stage = Stage::with_lan(&["100mbit,5ms"]);
    let _server = stage.server(&[]);
    let state = || stage.network_state(Place::Client);
    let before = state();
    let mut client = at_work(&stage);
    let during = state();
    for change in ["cr0", "mpvpn_mpvpn0_classes", "fwmark 0x2000000/0xf000000", "oif cr0"] {
        assert!(during.contains(change), "{change} is not in\n{during}");
    }
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGTERM");
    let mut client = at_work(&stage);
    client.kill();
    assert!(state().contains("mpvpn_mpvpn0_classes"), "who cleans up is not seen");
    // The next client has no such class.
    let mut client = stage.client(&[]);
    assert!(!state().contains("classes") && !state().contains("0xf000000"), "{}", state());
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGKILL, a second start and its end");
}
