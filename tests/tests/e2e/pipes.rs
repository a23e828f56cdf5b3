//! Links that shape each UDP session: several paths (pipes) over one link.

use std::{fs, path::Path, thread, time::Duration};

use mpvpn_tests::{
    dns::NameServer,
    fallible_iperf::{IperfTarget, Traffic},
    testbed::{Direction, Host, MpvpnProcess, SERVER, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(15);
/// A link of 100 Mbit/s that limits each UDP session to 20 Mbit/s.
pub(crate) const SHAPED_LINK: &str = "100mbit,5ms,queue=60ms,session_rate=20mbit";

/// The paths of the default class over a link.
pub(crate) fn paths<'a>(status: &'a Value, link: &str) -> Vec<&'a Value> {
    paths_of(status, "default").into_iter().filter(|path| path["link"] == link).collect()
}

/// Waits until a link has `count` paths, all active.
pub(crate) fn wait_for_pipes(client: &MpvpnProcess, link: &str, count: usize) -> Value {
    client.wait_for_status(TIMEOUT, &format!("{count} paths over {link}"), |status| {
        let active = paths(status, link).iter().filter(|path| path["state"] == "active").count();
        match (active, paths(status, link).len()) {
            pipes_and_reason if pipes_and_reason == (count, count) => Ok(()),
            (active, all) => Err(format!("{active} of {all} paths are active")),
        }
    })
}

#[test]
fn pipes_come_and_go_with_their_interface() {
    let testbed = Testbed::new(&[SHAPED_LINK]);
    let _server = testbed.server(&[]);
    let config = "pipes = 2\n[[link]]\nname = \"wwan*\"\npipes = 4\n";
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let client = testbed.client(&["--config", "client.toml", "--path", "eth1", "--path", "wwan*"]);
    wait_for_pipes(&client, "eth1", 2);
    for round in 0..2 {
        testbed.add_interface("wwan0", 50);
        wait_for_pipes(&client, "wwan0", 4);
        testbed.remove_interface("wwan0");
        client.wait_for_status(TIMEOUT, "wwan0 gone", |status| {
            let links = status["links"].as_array().expect("links is a list");
            let pipes_and_reason: Vec<_> = links.iter().filter(|link| link["name"] == "wwan0").collect();
            match pipes_and_reason[..] {
                [link] if link["state"] == "down" && link["reason"] == "no such interface" => Ok(()),
                _ => Err(format!("round {round}: {pipes_and_reason:?}")),
            }
        });
        testbed.run(Host::Client, &["ping", "-c", "5", "-i", "0.2", "-q", TUNNEL]);
    }
}

/// Number of pipes of the first link, and its reason, in the status.
pub(crate) fn pipes_and_reason(status: &Value) -> (u64, String) {
    let link = &status["links"][0];
    let count = link["pipes"].as_u64().unwrap_or_else(|| panic!("no number of pipes: {status:#}"));
    (count, link["pipes_reason"].as_str().expect("a reason").to_owned())
}

#[test]
fn auto_starts_with_two_pipes_if_the_address_or_its_name_suggests_a_shaper() {
    let testbed = Testbed::new(&[SHAPED_LINK, SHAPED_LINK]);
    let _server = testbed.server(&[]);
    // The reverse DNS name of the client's address as Starlink has it.
    let (hosts, socket) = (testbed.dir().join("hosts"), testbed.dir().join("starlink.sock"));
    let name = "customer.lndngbr1.pop.starlinkisp.net";
    fs::write(&hosts, format!("127.0.0.1 localhost\n10.101.0.2 {name}\n")).expect("a file");
    let args =
        ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2", "--pipes", "auto"];
    let args = [&args[..], &["--api-socket", "starlink.sock"]].concat();
    let client = testbed
        .start_with_file(Host::Client, &hosts, Path::new("/etc/hosts"), &args, &socket)
        .wait_until_up();
    let status = wait_for_pipes(&client, "eth1", 2);
    assert_eq!(pipes_and_reason(&status), (2, format!("the operator's name is {name}")));
    wait_for_pipes(&client, "eth2", 1);
    testbed.run(Host::Client, &["ip", "address", "add", "100.64.7.7/32", "dev", "eth2"]);
    let status = wait_for_pipes(&client, "eth2", 2);
    let reason = status["links"][1]["pipes_reason"].as_str().expect("a reason");
    assert!(reason.contains("carrier's address translation"), "{reason}");
    testbed.run(Host::Client, &["ping", "-c", "20", "-i", "0.05", "-q", TUNNEL]);
}

#[test]
fn a_starlink_link_has_automatic_pipes_by_default_and_its_name_is_asked_for_in_the_tunnel_only() {
    let testbed = Testbed::new(&[SHAPED_LINK, SHAPED_LINK]);
    let name = "customer.lndngbr1.pop.starlinkisp.net";
    // The server sees the links at their own addresses.
    let names = [([10, 101, 0, 2].into(), name), ([10, 102, 0, 2].into(), "host.example.net")];
    let resolver = NameServer::start_with_names(&testbed, Host::Inet, &names);
    let _server = testbed.server(&["--dns", "198.51.100.2"]);
    let client = testbed.client(&[]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", TIMEOUT);
    }
    // The name of an idle link is of no use.
    thread::sleep(Duration::from_secs(3));
    assert!(resolver.client_addresses().is_empty() && client.status()["links"][0].get("pipes").is_none());
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    target.run(Traffic::Tcp { flows: 8 }, Direction::Down, 3).expect("iperf3 runs");
    let status = wait_for_pipes(&client, "eth1", 2);
    let reason = format!("the operator's name is {name}, so `pipes` is `auto` by default");
    assert_eq!(pipes_and_reason(&status), (2, reason));
    assert!(status["links"][1].get("pipes").is_none(), "{status:#}");
    let text = String::from_utf8(
        testbed
            .mpvpn(Host::Client, &["status", "--api-socket", &client.socket().display().to_string()])
            .stdout,
    )
    .expect("UTF-8");
    assert!(text.contains("eth1: 2 pipes: the operator's name is"), "{text}");
    // The server's address towards the internet: no query came over a link.
    let asked: Vec<_> = resolver.client_addresses().iter().map(ToString::to_string).collect();
    assert_eq!(asked, ["198.51.100.1"]);
    // FEC stays off.
    assert!(paths(&status, "eth1").iter().all(|path| path.get("fec").is_none()), "{status:#}");

    // A number that is configured counts.
    testbed.mpvpn(
        Host::Client,
        &["link", "set", "eth1", "--pipes", "1", "--api-socket", &client.socket().display().to_string()],
    );
    let status = wait_for_pipes(&client, "eth1", 1);
    assert!(status["links"][0].get("pipes").is_none(), "{status:#}");
    testbed.run(Host::Client, &["ping", "-c", "5", "-i", "0.1", "-q", TUNNEL]);
}
