//! Links where every UDP session gets only a part of the rate: several paths over one link.

use std::{fs, path::Path, time::Duration};

use mpvpn_tests::{
    iperf::{Target, Traffic},
    machine_share::{MachineShare, Share},
    stage::{Peer, Place, SERVER, Stage, TUNNEL, paths_of},
    tcp::Way,
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
pub(crate) fn until(client: &Peer, link: &str, count: usize) -> Value {
    client.until(SOON, &format!("{count} paths over {link}"), |status| {
        let active = paths(status, link).iter().filter(|path| path["state"] == "active").count();
        match (active, paths(status, link).len()) {
            found if found == (count, count) => Ok(()),
            (active, all) => Err(format!("{active} of {all} paths are active")),
        }
    })
}

fn set(stage: &Stage, client: &Peer, words: &[&str]) -> String {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let output = stage.mpvpn(Place::Client, &[&["link", "set"], words, &["--api-socket", &socket]].concat());
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn four_pipes_carry_what_the_operator_holds_back_from_one() {
    let _share = MachineShare::take(Share::Percent(50));
    let stage = Stage::new(&[SHAPED]);
    let _server = stage.server(&[]);
    let client = stage.client(&[]);
    let status = until(&client, "eth1", 1);
    assert!(paths(&status, "eth1")[0].get("pipe").is_none(), "{status:#}");
    let mut target = Target::new(&stage, TUNNEL, 5201);
    let mut rate = |way| target.run(Traffic::Tcp { flows: 8 }, way, 4).expect("iperf3 runs").rate / 1e6;
    let one = [Way::Down, Way::Up].map(&mut rate);

    assert!(set(&stage, &client, &["eth1", "--pipes", "4"]).contains("eth1"));
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
    let four = [Way::Down, Way::Up].map(&mut rate);
    println!("down and up: {one:.1?} Mbit/s with one pipe, {four:.1?} with four");
    for (one, four) in one.into_iter().zip(four) {
        assert!(one < 20.0 && four >= 3.0 * one, "{one:.1} Mbit/s with one pipe, {four:.1} with four");
    }

    set(&stage, &client, &["eth1", "--pipes", "1"]);
    let status = until(&client, "eth1", 1);
    assert!(status["links"][0].get("pipes").is_none(), "{status:#}");
}

#[test]
fn pipes_come_and_go_with_their_interface() {
    let stage = Stage::new(&[SHAPED]);
    let _server = stage.server(&[]);
    let config = "pipes = 2\n[[link]]\nname = \"wwan*\"\npipes = 4\n";
    fs::write(stage.dir().join("client.toml"), config).expect("a file");
    let client = stage.client(&["--config", "client.toml", "--path", "eth1", "--path", "wwan*"]);
    until(&client, "eth1", 2);
    for round in 0..2 {
        stage.plug("wwan0", 50);
        until(&client, "wwan0", 4);
        stage.unplug("wwan0");
        client.until(SOON, "wwan0 gone", |status| {
            let links = status["links"].as_array().expect("links is a list");
            let found: Vec<_> = links.iter().filter(|link| link["name"] == "wwan0").collect();
            match found[..] {
                [link] if link["state"] == "down" && link["reason"] == "no such interface" => Ok(()),
                _ => Err(format!("round {round}: {found:?}")),
            }
        });
        stage.run(Place::Client, &["ping", "-c", "5", "-i", "0.2", "-q", TUNNEL]);
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
    let stage = Stage::new(&[SHAPED, SHAPED]);
    let _server = stage.server(&[]);
    // As the operator's DNS would name the address that the server sees.
    let (hosts, socket) = (stage.dir().join("hosts"), stage.dir().join("starlink.sock"));
    let name = "customer.lndngbr1.pop.starlinkisp.net";
    fs::write(&hosts, format!("127.0.0.1 localhost\n10.101.0.2 {name}\n")).expect("a file");
    let words =
        ["client", "--server", SERVER, "--insecure", "--path", "eth1", "--path", "eth2", "--pipes", "auto"];
    let words = [&words[..], &["--api-socket", "starlink.sock"]].concat();
    let client = stage.start_with_file(Place::Client, &hosts, Path::new("/etc/hosts"), &words, &socket).up();
    let status = until(&client, "eth1", 2);
    assert_eq!(found(&status), (2, format!("the operator's name is {name}")));
    until(&client, "eth2", 1);
    stage.run(Place::Client, &["ip", "address", "add", "100.64.7.7/32", "dev", "eth2"]);
    let status = until(&client, "eth2", 2);
    let reason = status["links"][1]["pipes_reason"].as_str().expect("a reason");
    assert!(reason.contains("carrier's address translation"), "{reason}");
    stage.run(Place::Client, &["ping", "-c", "20", "-i", "0.05", "-q", TUNNEL]);
}
