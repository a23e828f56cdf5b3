//! Links where every UDP session gets only a part of the rate: several paths over one link.

use std::{fs, path::Path, time::Duration};

use mpvpn_tests::{
    fallible_iperf::{IperfTarget, Traffic},
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, MpvpnProcess, SERVER, TUNNEL, Testbed, paths_of},
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(15);
/// A link of 100 Mbit/s whose operator gives each session 20.
const SHAPED: &str = "100mbit,5ms,queue=60ms,session_rate=20mbit";

/// The paths of the default class over a link.
fn paths<'a>(status: &'a Value, link: &str) -> Vec<&'a Value> {
    paths_of(status, "default").into_iter().filter(|path| path["link"] == link).collect()
}

/// Waits until a link has so many paths, all in use.
pub(crate) fn until(client: &MpvpnProcess, link: &str, count: usize) -> Value {
    client.wait_for_status(SOON, &format!("{count} paths over {link}"), |status| {
        let active = paths(status, link).iter().filter(|path| path["state"] == "active").count();
        match (active, paths(status, link).len()) {
            found if found == (count, count) => Ok(()),
            (active, all) => Err(format!("{active} of {all} paths are active")),
        }
    })
}

fn set(testbed: &Testbed, client: &MpvpnProcess, args: &[&str]) -> String {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let output = testbed.mpvpn(Host::Client, &[&["link", "set"], args, &["--api-socket", &socket]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn four_pipes_carry_what_the_operator_holds_back_from_one() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&[SHAPED]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let status = until(&client, "eth1", 1);
    assert!(paths(&status, "eth1")[0].get("pipe").is_none(), "{status:#}");
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let mut rate =
        |direction| target.run(Traffic::Tcp { flows: 8 }, direction, 4).expect("iperf3 runs").rate / 1e6;
    let one = [Direction::Down, Direction::Up].map(&mut rate);

    assert!(set(&testbed, &client, &["eth1", "--pipes", "4"]).contains("eth1"));
    let status = until(&client, "eth1", 4);
    let mut pipes: Vec<u64> =
        paths(&status, "eth1").iter().filter_map(|path| path["pipe"].as_u64()).collect();
    pipes.sort_unstable();
    assert_eq!(pipes, [0, 1, 2, 3]);
    let mut ports: Vec<&Value> = paths(&status, "eth1").iter().map(|path| &path["local"]).collect();
    ports.sort_by_key(|port| port.to_string());
    ports.dedup();
    assert_eq!(ports.len(), 4, "each from a source port of its own: {ports:?}");
    assert_eq!(status["links"][0]["pipes"], 4, "{status:#}");
    let four = [Direction::Down, Direction::Up].map(&mut rate);
    println!("down and up: {one:.1?} Mbit/s with one pipe, {four:.1?} with four");
    for (one, four) in one.into_iter().zip(four) {
        assert!(one < 20.0 && four >= 3.0 * one, "{one:.1} Mbit/s with one pipe, {four:.1} with four");
    }

    set(&testbed, &client, &["eth1", "--pipes", "1"]);
    let status = until(&client, "eth1", 1);
    assert!(status["links"][0].get("pipes").is_none(), "{status:#}");
}

#[test]
fn pipes_come_and_go_with_their_interface() {
    let testbed = Testbed::new(&[SHAPED]);
    let _server = testbed.server(&[]);
    let config = "pipes = 2\n[[link]]\nname = \"wwan*\"\npipes = 4\n";
    fs::write(testbed.dir().join("client.toml"), config).expect("a file");
    let client = testbed.client(&["--config", "client.toml", "--path", "eth1", "--path", "wwan*"]);
    until(&client, "eth1", 2);
    for round in 0..2 {
        testbed.add_interface("wwan0", 50);
        until(&client, "wwan0", 4);
        testbed.remove_interface("wwan0");
        client.wait_for_status(SOON, "wwan0 gone", |status| {
            let links = status["links"].as_array().expect("links is a list");
            let found: Vec<_> = links.iter().filter(|link| link["name"] == "wwan0").collect();
            match found[..] {
                [link] if link["state"] == "down" && link["reason"] == "no such interface" => Ok(()),
                _ => Err(format!("round {round}: {found:?}")),
            }
        });
        testbed.run(Host::Client, &["ping", "-c", "5", "-i", "0.2", "-q", TUNNEL]);
    }
}

/// What the status says about the pipes of the first link: how many, and why.
pub(crate) fn found(status: &Value) -> (u64, String) {
    let link = &status["links"][0];
    let count = link["pipes"].as_u64().unwrap_or_else(|| panic!("no number of pipes: {status:#}"));
    (count, link["pipes_reason"].as_str().expect("a reason").to_owned())
}

#[test]
fn auto_begins_with_two_where_an_address_or_its_name_suggests_a_shaper() {
    let testbed = Testbed::new(&[SHAPED, SHAPED]);
    let _server = testbed.server(&[]);
    // As the operator's DNS would name the address that the server sees.
    let (hosts, socket) = (testbed.dir().join("hosts"), testbed.dir().join("starlink.sock"));
    let name = "customer.lndngbr1.pop.starlinkisp.net";
    fs::write(&hosts, format!("127.0.0.1 localhost\n10.101.0.2 {name}\n")).expect("a file");
    let args =
        ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2", "--pipes", "auto"];
    let args = [&args[..], &["--api-socket", "starlink.sock"]].concat();
    let client = testbed
        .start_with_file(Host::Client, &hosts, Path::new("/etc/hosts"), &args, &socket)
        .wait_until_up();
    let status = until(&client, "eth1", 2);
    assert_eq!(found(&status), (2, format!("the operator's name is {name}")));
    until(&client, "eth2", 1);
    testbed.run(Host::Client, &["ip", "address", "add", "100.64.7.7/32", "dev", "eth2"]);
    let status = until(&client, "eth2", 2);
    let reason = status["links"][1]["pipes_reason"].as_str().expect("a reason");
    assert!(reason.contains("carrier's address translation"), "{reason}");
    testbed.run(Host::Client, &["ping", "-c", "20", "-i", "0.05", "-q", TUNNEL]);
}
