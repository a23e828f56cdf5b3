//! Pipes that a client adds by itself while they bring more. Each trial takes a minute: these begin early, by their name.

use std::time::Duration;

use mpvpn_tests::{
    fallible_iperf::{IperfTarget, Traffic},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed},
};

use crate::pipes::{found, until};

/// How long a client may take for its trials. Each takes 20 s of load that fills the link.
const TRIALS: Duration = Duration::from_secs(200);

#[test]
fn auto_adds_pipes_as_long_as_they_bring_more() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["55mbit,10ms,queue=60ms,session_rate=15mbit"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--pipes", "auto"]);
    let status = until(&client, "eth1", 1);
    assert_eq!(found(&status), (1, "the link was not full for long enough to try a second one".to_owned()));
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let mut rate = |seconds| {
        target.run(Traffic::Tcp { flows: 8 }, Direction::Down, seconds).expect("iperf3 runs").rate / 1e6
    };
    let one = rate(3);
    let iperf = IperfServer::start(&testbed, Host::Server, 5301);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Down, TRIALS.as_secs() as u32);
    // Two trials of 20 s each, if every turn is clear; longer ones, and a pause between, where the machine is busy.
    let status = client.wait_for_status(TRIALS, "three pipes", |status| match found(status) {
        (3.., reason) if reason.contains("brought") => Ok(()),
        (pipes, reason) => Err(format!("{pipes} pipes: {reason}")),
    });
    drop(load);
    let (pipes, reason) = found(&status);
    let more = rate(5);
    println!("{one:.1} Mbit/s with one pipe, {more:.1} with {pipes}: {reason}");
    assert!(pipes >= 3 && reason.contains("brought"), "{pipes} pipes: {reason}");
    assert!(one < 15.0 && more > 25.0, "{one:.1} Mbit/s with one pipe, {more:.1} with {pipes}");
    let api = client.socket().to_str().expect("an ASCII path");
    let shown = testbed.mpvpn(Host::Client, &["link", "show", "--api-socket", api]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let why = shown.lines().find(|line| line.starts_with("eth1: ")).expect("a line about the pipes");
    assert!(why.contains(" pipes: the "), "{shown}");
}

#[test]
fn auto_leaves_a_link_alone_that_nobody_shapes() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["30mbit,10ms,queue=60ms"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--pipes", "auto"]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Up, TRIALS.as_secs() as u32);
    // One trial, if every turn is clear; a longer one where the machine is busy.
    client.wait_for_status(TRIALS, "a trial is over", |status| match found(status) {
        (1, reason) if reason.starts_with("a second one") => Ok(()),
        (pipes, reason) => Err(format!("{pipes} pipes: {reason}")),
    });
    drop(load);
    let (pipes, reason) = found(&until(&client, "eth1", 1));
    println!("{pipes} pipe: {reason}");
    assert!(pipes == 1 && reason.starts_with("a second one brought "), "{pipes} pipes: {reason}");
}
