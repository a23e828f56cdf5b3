//! Rates of users that change while traffic runs: figures of single seconds.

use std::{
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    iperf::{IperfRun, IperfServer},
    machine_share::{MachineShare, Share},
    ping::reaches,
    testbed::{Direction, Host, inet4},
};
use serde_json::Value;

use crate::{
    limits::{is_the_rate, mean, said},
    users::Site,
};

#[test]
fn a_changed_rate_counts_within_a_second_for_what_runs() {
    let _share = MachineShare::take(Share::Whole);
    let site = Site::new();
    let link = site.add("alice", &["--down", "20mbit"]);
    let alice = site.join_with(Host::Client, &link, &[]).wait_until_up();
    let iperf = IperfServer::start(&site.testbed, Host::Inet, 5201);
    reaches(&site.testbed, Host::Client, &inet4());
    // UDP travels as packets, and TCP to the internet as streams. Neither is late because something before it
    // was lost, as TCP in packets is after a rate was lowered.
    let start_udp = || iperf.udp(&site.testbed, Host::Client, &inet4(), 30, Direction::Down, 10);
    let start_tcp = || iperf.tcp(&site.testbed, Host::Client, &inet4(), 4, Direction::Down, 10);
    let starts: [(&str, &dyn Fn() -> IperfRun, f64, f64); 2] =
        [("UDP", &start_udp, 20.0, 5.0), ("TCP as streams", &start_tcp, 5.0, 20.0)];
    for (what, start, before, after) in starts {
        let run = start();
        let begin = Instant::now();
        thread::sleep(Duration::from_secs(5));
        let rate = format!("{after}mbit");
        let output = site.user(&["set", "alice", "--down", &rate]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(said(&output).contains(&format!("down      {rate}")), "{}", said(&output));
        // iperf3 began a little later.
        let changed = begin.elapsed().as_secs_f64().ceil() as usize + 1;
        let seconds = run.finish().seconds;
        // The first two seconds have windows that grow, and the fifth has some of the change.
        is_the_rate(&format!("{what} before"), mean(&seconds[1..4]), before);
        is_the_rate(&format!("{what} after"), mean(&seconds[changed - 1..]), after);
    }
    let status = site.server.status();
    let users = status["users"].as_array().expect("a list");
    let shown = users.iter().find(|user| user["name"] == "alice").expect("alice");
    assert_eq!(
        (&shown["down_cap_bps"], &shown["up_cap_bps"]),
        (&20_000_000.into(), &Value::Null),
        "{shown:#}"
    );
    assert_eq!(alice.status()["session"]["resumed"], 0);
}
