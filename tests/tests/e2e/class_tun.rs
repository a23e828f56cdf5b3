//! A class with its own TUN device: traffic enters the class by routes, and by firewall marks and ingress
//! interface. The module `vlan` has the stories of VLANs.

use std::{fs, path::PathBuf, thread, time::Duration};

use mpvpn_tests::{
    eventually,
    http::{Download, MB, TestPages},
    ping::{ping, reaches},
    testbed::{Family, Host, MpvpnProcess, Testbed, inet, inet4},
};
use serde_json::Value;

/// Address of the class's TUN device; the client's own device has the first address for clients.
const CLASS_ADDRESS: &str = "10.0.0.3";
/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a client with this configuration, and waits until its classes carry packets.
pub(super) fn start(testbed: &Testbed, classes: &str, more: &[&str]) -> MpvpnProcess {
    let file: PathBuf = testbed.file("toml", Host::Client);
    fs::write(&file, classes).expect("a file in the lab's directory");
    // Where QUIC over UDP is slow to start, as on a busy machine, paths inside TCP come and go, and their
    // counters with them.
    let mut args = vec!["--config", file.to_str().expect("an ASCII path"), "--transport", "quic"];
    args.extend(more);
    let client = testbed.client(&args);
    // Until a class is up, another class carries its packets.
    let mut tried = vec![("critical", vec!["-I", "cr0"])];
    tried.extend(classes.contains(BULK_PING).then(|| ("bulk", Vec::new())));
    for (class, more) in tried {
        eventually(TIMEOUT, &format!("{class} works"), || {
            let mut args = vec!["ping", "-n", "-c", "1", "-W", "1"];
            args.extend(&more);
            let host = inet4();
            args.push(&host);
            testbed.output_of(Host::Client, TIMEOUT, &args);
            match bytes_of_class(&client, class) {
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
pub(super) fn bytes_of_class(client: &MpvpnProcess, class: &str) -> (u64, u64) {
    let status = client.status();
    let found =
        status["classes"].as_array().and_then(|all| all.iter().find(|one| one["name"] == class).cloned());
    let found = found.unwrap_or_else(|| panic!("no class {class}: {status:#}"));
    let bytes = |key: &str| found[key].as_u64().expect("a counter");
    (bytes("tx_bytes"), bytes("rx_bytes"))
}

/// Checks that the traffic of `run` is carried by `class` in both directions, and not by others.
fn check_carried_by(client: &MpvpnProcess, class: &str, what: &str, run: impl FnOnce()) {
    const MIN_BYTES: u64 = 20 * 1000;
    let others = ["default", "critical", "bulk"].into_iter().filter(|other| *other != class);
    let before: Vec<_> = others.clone().map(|other| bytes_of_class(client, other)).collect();
    let own = bytes_of_class(client, class);
    run();
    let after = bytes_of_class(client, class);
    assert!(
        after.0 - own.0 >= MIN_BYTES && after.1 - own.1 >= MIN_BYTES,
        "{what}: {own:?} became {after:?} of {class}"
    );
    for (other, before) in others.zip(before) {
        let after = bytes_of_class(client, other);
        assert!(
            after.0 - before.0 < MIN_BYTES && after.1 - before.1 < MIN_BYTES,
            "{what}: {before:?} became {after:?} of {other}"
        );
    }
}

/// Checks that `class` receives at least 5 MB during `run`.
fn check_download_by(client: &MpvpnProcess, class: &str, run: impl FnOnce()) {
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

/// Sends 30 pings of 1 kB; at least 27 must be answered.
fn send_pings(testbed: &Testbed, from: Host, more: &[&str], to: &str) {
    let mut args = vec!["ping", "-n", "-i", "0.02", "-c", "30", "-s", "1000", "-w", "8"];
    args.extend(more);
    args.push(to);
    let output = testbed.output_of(from, TIMEOUT, &args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answers = text.lines().filter(|line| line.contains("time=")).count();
    assert!(
        answers >= 27,
        "{args:?}: {answers} of 30 answered\n{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Adds a route to the class's TUN device, as users do, and waits until it counts.
fn route_to_class(testbed: &Testbed, host: &str) {
    testbed.run(Host::Client, &["ip", "route", "add", host, "dev", "cr0"]);
    eventually(TIMEOUT, "the route counts", || {
        let route = testbed.run(Host::Client, &["ip", "route", "get", host]);
        let counts = route.contains("dev cr0") && route.contains(&format!("src {CLASS_ADDRESS}"));
        if counts { Ok(()) } else { Err(route) }
    });
}

/// Configuration that assigns pings to `bulk`.
pub(super) const BULK_PING: &str = "[[class]]\nname = 'bulk'\n[[class.match]]\nprotocol = 'icmp'\n";
/// Configuration of a class with a TUN device.
pub(super) const TUN: &str = "[[class]]\nname = 'critical'\ntun = 'cr0'\n";

#[test]
fn traffic_routed_to_the_tun_of_a_class_belongs_to_the_class_and_has_its_own_address() {
    let testbed = Testbed::two_links();
    let server = testbed.server(&[]);
    // The rules assign pings to another class.
    let client = start(&testbed, &format!("{BULK_PING}{TUN}"), &[]);
    let status = client.status();
    let class =
        status["classes"].as_array().unwrap().iter().find(|class| class["name"] == "critical").unwrap();
    assert_eq!(
        (&class["tun"], &class["addresses"][0]),
        (&"cr0".into(), &format!("{CLASS_ADDRESS}/32").into()),
        "{class:#}"
    );
    assert_eq!(client.address(Family::V4), "10.0.0.2");
    let shown = testbed.mpvpn(Host::Client, &["status", "--api-socket", client.socket().to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("cr0 10.0.0.3/32"), "{shown:?}");
    let known = server.status()["clients"][0]["addresses"].to_string();
    assert!(known.contains("10.0.0.2/24") && known.contains("10.0.0.3/24"), "{known}");

    let host = inet4();
    check_carried_by(&client, "bulk", "what no route says", || {
        send_pings(&testbed, Host::Client, &[], &host)
    });
    check_carried_by(&client, "critical", "what is bound to it", || {
        send_pings(&testbed, Host::Client, &["-I", "cr0"], &host)
    });
    check_carried_by(&client, "critical", "what has its address", || {
        send_pings(&testbed, Host::Client, &["-I", CLASS_ADDRESS], &host)
    });
    let host6 = inet(Family::V6);
    check_carried_by(&client, "critical", "IPv6", || {
        send_pings(&testbed, Host::Client, &["-6", "-I", "cr0"], &host6)
    });

    let own = testbed.interface_bytes(Host::Client, "cr0");
    route_to_class(&testbed, &host);
    check_carried_by(&client, "critical", "what is routed there", || {
        send_pings(&testbed, Host::Client, &[], &host)
    });
    let site = TestPages::start(&testbed, Host::Inet);
    check_download_by(&client, "critical", || {
        Download::start(&testbed, &site, &host, 5 * MB, TIMEOUT, &[]).finish()
    });
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
    route_to_class(&testbed, &host);
    // Until the connections of the class stand in both threads and know their MTU, the default class carries
    // its flows.
    eventually(TIMEOUT, "paths of both threads over both links", || {
        // The kernel chooses the thread by the flow, and each datagram is a flow of its own.
        testbed.send_empty_udp(Host::Client, (&host, 9));
        let status = client.status();
        let paths = status["paths"].as_array().expect("paths is a list").iter();
        let active = paths.filter(|path| path["class"] == "critical" && path["state"] == "active").count();
        if active == 4 { Ok(()) } else { Err(format!("{active} of 4")) }
    });
    thread::sleep(Duration::from_secs(1));
    for _ in 0..6 {
        reaches(&testbed, Host::Client, &host);
    }
    // Each ping is a flow of its own. The kernel of the server chooses the thread that reads the answer by a
    // hash of the addresses, which differs from boot to boot.
    let hosts: Vec<String> = (10..18).map(|number| format!("198.51.100.{number}")).collect();
    for host in &hosts {
        testbed.run(Host::Inet, &["ip", "address", "add", &format!("{host}/24"), "dev", "eth0"]);
    }
    check_carried_by(&client, "critical", "single pings to many hosts", || {
        for host in hosts.iter().cycle().take(3 * hosts.len()) {
            testbed.run(Host::Client, &["ping", "-n", "-c", "1", "-W", "2", "-s", "1000", "-I", "cr0", host]);
        }
    });
    let site = TestPages::start(&testbed, Host::Inet);
    check_download_by(&client, "critical", || {
        for _ in 0..5 {
            Download::start(&testbed, &site, &host, MB, TIMEOUT, &[]).finish();
        }
    });
}

#[test]
fn a_router_steers_by_ingress_and_mark() {
    let testbed = Testbed::with_lan(&["100mbit,5ms", "100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let host = inet4();
    let rule = |key: &str| format!("{BULK_PING}{TUN}[[class.match]]\n{key}\n");
    {
        let client = start(&testbed, &rule("ingress = 'lan0'"), &[]);
        check_carried_by(&client, "critical", "what comes in by the LAN", || {
            send_pings(&testbed, Host::Lan, &[], &host)
        });
        check_carried_by(&client, "bulk", "what the router sends", || {
            send_pings(&testbed, Host::Client, &[], &host)
        });
        let site = TestPages::start(&testbed, Host::Inet);
        let url = site.url(&host, &(5 * MB).to_string());
        check_download_by(&client, "critical", || {
            testbed.run(Host::Lan, &["curl", "-gsS", "--max-time", "10", "-o", "/dev/null", &url]);
        });
    }
    assert!(ping(&testbed, Host::Lan, &host, 3).answers.is_empty(), "steering outlived the client");
    {
        let client = start(&testbed, &rule("mark = '0x10/0xf0'\nprotocol = 'icmp'"), &["--share", "lan0"]);
        let marked = ["-m", "16"];
        check_carried_by(&client, "critical", "what is marked", || {
            send_pings(&testbed, Host::Client, &marked, &host)
        });
        check_carried_by(&client, "bulk", "what is not", || {
            send_pings(&testbed, Host::Client, &["-m", "32"], &host)
        });
        check_carried_by(&client, "bulk", "what comes in by the LAN", || {
            send_pings(&testbed, Host::Lan, &[], &host)
        });
        // As a router's firewall marks forwarded packets.
        let script = "nft add table inet user && nft add chain inet user pre '{ type filter hook prerouting priority \
                      mangle; }' && nft add rule inet user pre iifname lan0 meta mark set 0x15";
        testbed.run(Host::Client, &["sh", "-c", script]);
        check_carried_by(&client, "critical", "what the router marks", || {
            send_pings(&testbed, Host::Lan, &[], &host)
        });
        testbed.run(Host::Client, &["nft", "delete", "table", "inet", "user"]);
    }
}

#[test]
fn traffic_of_a_failed_class_uses_the_default_connection() {
    let testbed = Testbed::two_links();
    let _server = testbed.server(&[]);
    let client = start(&testbed, "[[class]]\nname = 'critical'\ntun = 'cr0'\nexclude = 'eth2'\n", &[]);
    let host = inet4();
    check_carried_by(&client, "critical", "all is well", || {
        send_pings(&testbed, Host::Client, &["-I", "cr0"], &host)
    });
    testbed.link(1).cut();
    client.wait_for_status(Duration::from_secs(40), "the class is lost", |status| {
        match paths_of(status, "critical") {
            0 => Ok(()),
            _ => Err("it has a path".into()),
        }
    });
    eventually(Duration::from_secs(60), "an answer by the default connection", || {
        let args = ["ping", "-n", "-c", "1", "-W", "1", "-I", "cr0", &host];
        match testbed.output_of(Host::Client, TIMEOUT, &args).status.success() {
            true => Ok(()),
            false => Err("nothing comes back".into()),
        }
    });
    check_carried_by(&client, "default", "the class is lost", || {
        send_pings(&testbed, Host::Client, &["-I", "cr0"], &host)
    });
}

/// Starts a client with all settings that change the system, and sends traffic.
fn start_with_traffic(testbed: &Testbed) -> MpvpnProcess {
    let rules = "[[class.match]]\ningress = 'lan0'\n[[class.match]]\nmark = 7\n[[class.match]]\nvlan = 20\n";
    let client = start(testbed, &format!("{TUN}{rules}"), &[]);
    check_carried_by(&client, "critical", "what comes in by the LAN", || {
        send_pings(testbed, Host::Lan, &[], &inet4())
    });
    client
}

#[test]
fn all_changes_are_undone_after_the_end_and_after_a_kill_and_the_next_start() {
    let testbed = Testbed::with_lan(&["100mbit,5ms"]);
    let _server = testbed.server(&[]);
    let state = || testbed.network_state(Host::Client);
    let before = state();
    let mut client = start_with_traffic(&testbed);
    let during = state();
    for change in ["cr0", "mpvpn_mpvpn0_classes", "fwmark 0x2000000/0xf000000", "oif cr0"] {
        assert!(during.contains(change), "{change} is not in\n{during}");
    }
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGTERM");
    let mut client = start_with_traffic(&testbed);
    client.kill();
    assert!(state().contains("mpvpn_mpvpn0_classes"), "who cleans up is not seen");
    // The next client has no such class.
    let mut client = testbed.client(&[]);
    assert!(!state().contains("classes") && !state().contains("0xf000000"), "{}", state());
    assert!(client.terminate().success(), "{}", client.log());
    assert_eq!(state(), before, "after SIGKILL, a second start and its end");
}
