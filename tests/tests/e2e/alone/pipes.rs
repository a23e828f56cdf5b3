//! Throughput over several pipes of a link that shapes each of them.

use mpvpn_tests::{
    fallible_iperf::{IperfTarget, Traffic},
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, MpvpnProcess, TUNNEL, Testbed},
};
use serde_json::Value;

use crate::pipes::{SHAPED_LINK, paths, wait_for_pipes};

fn link_set(testbed: &Testbed, client: &MpvpnProcess, args: &[&str]) -> String {
    let socket = client.socket().to_str().expect("an ASCII path").to_owned();
    let output = testbed.mpvpn(Host::Client, &[&["link", "set"], args, &["--api-socket", &socket]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn four_pipes_have_at_least_three_times_the_rate_of_one() {
    let _share = MachineShare::take(Share::Whole);
    let testbed = Testbed::new(&[SHAPED_LINK]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&[]);
    let status = wait_for_pipes(&client, "eth1", 1);
    assert!(paths(&status, "eth1")[0].get("pipe").is_none(), "{status:#}");
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let mut rate =
        |direction| target.run(Traffic::Tcp { flows: 8 }, direction, 4).expect("iperf3 runs").rate / 1e6;
    let one = [Direction::Down, Direction::Up].map(&mut rate);

    assert!(link_set(&testbed, &client, &["eth1", "--pipes", "4"]).contains("eth1"));
    let status = wait_for_pipes(&client, "eth1", 4);
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

    link_set(&testbed, &client, &["eth1", "--pipes", "1"]);
    let status = wait_for_pipes(&client, "eth1", 1);
    assert!(status["links"][0].get("pipes").is_none(), "{status:#}");
}
