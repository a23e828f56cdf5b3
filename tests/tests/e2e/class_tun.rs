//! A class with a TUN device of its own: a router steers into it by routes, and by what packets show only to the kernel.

use std::{fs, path::PathBuf, time::Duration};

use mpvpn_tests::{
    eventually,
    http::{Download, MB, TestPages},
    ping::{ping, reaches},
    testbed::{Family, Host, MpvpnProcess, Testbed, inet, inet4},
};
use serde_json::Value;

/// The first address for clients is that of the client's own device.
const OWN: &str = "10.0.0.3";
const LONG: Duration = Duration::from_secs(10);

fn start(testbed: &Testbed, classes: &str, more: &[&str]) -> MpvpnProcess {
    let file: PathBuf = testbed.file("toml", Host::Client);
    fs::write(&file, classes).expect("a file in the lab's directory");
    let mut args = vec!["--config", file.to_str().expect("an ASCII path")];
    args.extend(more);
    let client = testbed.client(&args);
    // Until a class works, its packets go by another.
    let mut tried = vec![("critical", vec!["-I", "cr0"])];
    tried.extend(classes.contains(BULK_PING).then(|| ("bulk", Vec::new())));
    for (class, more) in tried {
        eventually(LONG, &format!("{class} works"), || {
            let mut args = vec!["ping", "-n", "-c", "1", "-W", "1"];
            args.extend(&more);
            let host = inet4();
            args.push(&host);
            testbed.output_of(Host::Client, LONG, &args);
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
fn carried(client: &MpvpnProcess, class: &str) -> (u64, u64) {
    let status = client.status();
    let found =
        status["classes"].as_array().and_then(|all| all.iter().find(|one| one["name"] == class).cloned());
    let found = found.unwrap_or_else(|| panic!("no class {class}: {status:#}"));
    let bytes = |key: &str| found[key].as_u64().expect("a counter");
    (bytes("tx_bytes"), bytes("rx_bytes"))
}

/// Bulk of `what` goes by the class, both ways, and not by others.
fn goes_by(client: &MpvpnProcess, class: &str, what: &str, run: impl FnOnce()) {
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
fn downloads_by(client: &MpvpnProcess, class: &str, run: impl FnOnce()) {
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
fn pings(testbed: &Testbed, from: Host, more: &[&str], to: &str) {
    let mut args = vec!["ping", "-n", "-i", "0.02", "-c", "30", "-s", "1000", "-w", "8"];
    args.extend(more);
    args.push(to);
    let output = testbed.output_of(from, LONG, &args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answers = text.lines().filter(|line| line.contains("time=")).count();
    assert!(
        answers >= 27,
        "{args:?}: {answers} of 30 answered\n{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

const BULK_PING: &str = "[[class]]\nname = 'bulk'\n[[class.match]]\nprotocol = 'icmp'\n";
const TUN: &str = "[[class]]\nname = 'critical'\ntun = 'cr0'\n";

#[test]
fn what_is_routed_to_the_tun_of_a_class_is_of_that_class_with_an_address_of_its_own() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    // By the rules, ping would be something else.
    let client = start(&testbed, &format!("{BULK_PING}{TUN}"), &[]);
    let status = client.status();
    let class =
        status["classes"].as_array().unwrap().iter().find(|class| class["name"] == "critical").unwrap();
    assert_eq!(
        (&class["tun"], &class["addresses"][0]),
        (&"cr0".into(), &format!("{OWN}/32").into()),
        "{class:#}"
    );
    assert_eq!(client.address(Family::V4), "10.0.0.2");
    let shown = testbed.mpvpn(Host::Client, &["status", "--api-socket", client.socket().to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("cr0 10.0.0.3/32"), "{shown:?}");
    let known = server.status()["clients"][0]["addresses"].to_string();
    assert!(known.contains("10.0.0.2/24") && known.contains("10.0.0.3/24"), "{known}");

    let host = inet4();
    goes_by(&client, "bulk", "what no route says", || pings(&testbed, Host::Client, &[], &host));
    goes_by(&client, "critical", "what is bound to it", || {
        pings(&testbed, Host::Client, &["-I", "cr0"], &host)
    });
    goes_by(&client, "critical", "what has its address", || {
        pings(&testbed, Host::Client, &["-I", OWN], &host)
    });
    let host6 = inet(Family::V6);
    goes_by(&client, "critical", "IPv6", || pings(&testbed, Host::Client, &["-6", "-I", "cr0"], &host6));

    let own = testbed.interface_bytes(Host::Client, "cr0");
    testbed.run(Host::Client, &["ip", "route", "add", &host, "dev", "cr0"]);
    let route = testbed.run(Host::Client, &["ip", "route", "get", &host]);
    assert!(route.contains("dev cr0") && route.contains(&format!("src {OWN}")), "{route}");
    goes_by(&client, "critical", "what is routed there", || pings(&testbed, Host::Client, &[], &host));
    let site = TestPages::start(&testbed, Host::Inet);
    downloads_by(&client, "critical", || Download::start(&testbed, &site, &host, 5 * MB, LONG, &[]).finish());
    let now = testbed.interface_bytes(Host::Client, "cr0");
    assert!(now.0 - own.0 > 4 * MB && now.1 > own.1, "answers did not come by cr0: {own:?} became {now:?}");
    let mtu = |device: &str| testbed.run(Host::Client, &["cat", &format!("/sys/class/net/{device}/mtu")]);
    assert_eq!(mtu("cr0"), mtu("mpvpn0"));
}

#[test]
fn several_threads_share_the_tun_of_a_class() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&["--shards", "2"]);
    let client = start(&testbed, TUN, &["--shards", "2"]);
    let host = inet4();
    testbed.run(Host::Client, &["ip", "route", "add", &host, "dev", "cr0"]);
    for _ in 0..6 {
        reaches(&testbed, Host::Client, &host);
    }
    let site = TestPages::start(&testbed, Host::Inet);
    downloads_by(&client, "critical", || {
        for _ in 0..5 {
            Download::start(&testbed, &site, &host, MB, LONG, &[]).finish();
        }
    });
}

/// Gives the LAN a VLAN, too; whether this kernel has such.
fn tag(testbed: &Testbed) -> bool {
    let ends = [(Host::Client, "lan0", "192.168.20.1/24"), (Host::Lan, "eth0", "192.168.20.2/24")];
    for (host, parent, address) in ends {
        let script = format!(
            "ip link add link {parent} name v20 type vlan id 20 && ip address add {address} dev v20 && ip link set v20 up"
        );
        if !testbed.output_of(host, LONG, &["sh", "-c", &script]).status.success() {
            eprintln!("skipped: this kernel has no VLANs");
            return false;
        }
    }
    true
}

#[test]
fn a_router_steers_by_ingress_mark_and_vlan() {
    let testbed = Testbed::with_lan(&["100mbit,5ms", "100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let host = inet4();
    let rule = |key: &str| format!("{BULK_PING}{TUN}[[class.match]]\n{key}\n");
    {
        let client = start(&testbed, &rule("ingress = 'lan0'"), &[]);
        goes_by(&client, "critical", "what comes in by the LAN", || pings(&testbed, Host::Lan, &[], &host));
        goes_by(&client, "bulk", "what the router sends", || pings(&testbed, Host::Client, &[], &host));
        let site = TestPages::start(&testbed, Host::Inet);
        let url = site.url(&host, &(5 * MB).to_string());
        downloads_by(&client, "critical", || {
            testbed.run(Host::Lan, &["curl", "-gsS", "--max-time", "10", "-o", "/dev/null", &url]);
        });
    }
    assert!(ping(&testbed, Host::Lan, &host, 3).answers.is_empty(), "steering outlived the client");
    {
        let client = start(&testbed, &rule("mark = '0x10/0xf0'\nprotocol = 'icmp'"), &["--share", "lan0"]);
        let marked = ["-m", "16"];
        goes_by(&client, "critical", "what is marked", || pings(&testbed, Host::Client, &marked, &host));
        goes_by(&client, "bulk", "what is not", || pings(&testbed, Host::Client, &["-m", "32"], &host));
        goes_by(&client, "bulk", "what comes in by the LAN", || pings(&testbed, Host::Lan, &[], &host));
        // As the firewall of a router marks what it forwards.
        let script = "nft add table inet user && nft add chain inet user pre '{ type filter hook prerouting priority \
                      mangle; }' && nft add rule inet user pre iifname lan0 meta mark set 0x15";
        testbed.run(Host::Client, &["sh", "-c", script]);
        goes_by(&client, "critical", "what the router marks", || pings(&testbed, Host::Lan, &[], &host));
        testbed.run(Host::Client, &["nft", "delete", "table", "inet", "user"]);
    }
    let client = start(&testbed, &rule("vlan = 20"), &["--share", "lan0"]);
    goes_by(&client, "bulk", "what has no tag", || pings(&testbed, Host::Lan, &[], &host));
    // The interface of the VLAN comes when the client runs already.
    if !tag(&testbed) {
        return;
    }
    reaches(&testbed, Host::Lan, "192.168.20.1");
    let through = ["-I", "v20"];
    testbed.run(Host::Lan, &["ip", "route", "add", &host, "via", "192.168.20.1", "dev", "v20"]);
    client.wait_for_status(LONG, "the VLAN is found", |_| {
        match ping(&testbed, Host::Lan, &host, 1).answers.is_empty() {
            true => Err("no answer".into()),
            false => Ok(()),
        }
    });
    goes_by(&client, "critical", "what has the tag", || pings(&testbed, Host::Lan, &through, &host));
}

#[test]
fn what_cannot_go_by_the_class_goes_by_the_default_connection() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = start(&testbed, "[[class]]\nname = 'critical'\ntun = 'cr0'\nexclude = 'eth2'\n", &[]);
    let host = inet4();
    goes_by(&client, "critical", "all is well", || pings(&testbed, Host::Client, &["-I", "cr0"], &host));
    testbed.link(1).cut();
    client.wait_for_status(Duration::from_secs(40), "the class is lost", |status| {
        match paths_of(status, "critical") {
            0 => Ok(()),
            _ => Err("it has a path".into()),
        }
    });
    eventually(Duration::from_secs(60), "an answer by the default connection", || {
        let args = ["ping", "-n", "-c", "1", "-W", "1", "-I", "cr0", &host];
        match testbed.output_of(Host::Client, LONG, &args).status.success() {
            true => Ok(()),
            false => Err("nothing comes back".into()),
        }
    });
    goes_by(&client, "default", "the class is lost", || pings(&testbed, Host::Client, &["-I", "cr0"], &host));
}

/// All that a client with the TUN of a class changes, and traffic has passed.
fn at_work(testbed: &Testbed) -> MpvpnProcess {
    let rules = "[[class.match]]\ningress = 'lan0'\n[[class.match]]\nmark = 7\n[[class.match]]\nvlan = 20\n";
    let client = start(testbed, &format!("{TUN}{rules}"), &[]);
    goes_by(&client, "critical", "what comes in by the LAN", || pings(testbed, Host::Lan, &[], &inet4()));
    client
}

#[test]
fn nothing_of_it_is_left_after_the_end_nor_after_a_kill_and_the_next_start() {
    let testbed = Testbed::with_lan(&["100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let state = || testbed.network_state(Host::Client);
    let before = state();
    let mut client = at_work(&testbed);
    let during = state();
    for change in ["cr0", "mpvpn_mpvpn0_classes", "fwmark 0x2000000/0xf000000", "oif cr0"] {
        assert!(during.contains(change), "{change} is not in\n{during}");
    }
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGTERM");
    let mut client = at_work(&testbed);
    client.kill();
    assert!(state().contains("mpvpn_mpvpn0_classes"), "who cleans up is not seen");
    // The next client has no such class.
    let mut client = testbed.client(&[]);
    assert!(!state().contains("classes") && !state().contains("0xf000000"), "{}", state());
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGKILL, a second start and its end");
}
