//! `--pipes auto`: a client adds pipes as long as they increase the throughput. Trials take long, so the
//! module's name makes these tests start early.

use std::time::Duration;

use mpvpn_tests::{
    fallible_iperf::{IperfTarget, Traffic},
    iperf::IperfServer,
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, TUNNEL, Testbed},
};

use crate::pipes::{pipes_and_reason, wait_for_pipes};

/// Maximum duration of a client's trials. Each takes 20 s with a link at full load.
const TRIALS_TIMEOUT: Duration = Duration::from_secs(200);

#[test]
fn auto_adds_pipes_as_long_as_throughput_increases() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["55mbit,10ms,queue=60ms,session_rate=15mbit"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--pipes", "auto"]);
    let status = wait_for_pipes(&client, "eth1", 1);
    assert_eq!(
        pipes_and_reason(&status),
        (1, "the link was not full for long enough to try a second one".to_owned())
    );
    let mut target = IperfTarget::new(&testbed, TUNNEL, 5201);
    let mut rate = |seconds| {
        target.run(Traffic::Tcp { flows: 8 }, Direction::Down, seconds).expect("iperf3 runs").rate / 1e6
    };
    let one = rate(3);
    let iperf = IperfServer::start(&testbed, Host::Server, 5301);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Down, TRIALS_TIMEOUT.as_secs() as u32);
    // Two trials of 20 s each; on a busy machine they take longer, with a pause in between.
    let status =
        client.wait_for_status(TRIALS_TIMEOUT, "three pipes", |status| match pipes_and_reason(status) {
            (3.., reason) if reason.contains("brought") => Ok(()),
            (pipes, reason) => Err(format!("{pipes} pipes: {reason}")),
        });
    drop(load);
    let (pipes, reason) = pipes_and_reason(&status);
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
fn auto_keeps_one_pipe_on_a_link_without_a_shaper() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["30mbit,10ms,queue=60ms"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--pipes", "auto"]);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Up, TRIALS_TIMEOUT.as_secs() as u32);
    // One trial of 20 s; on a busy machine it takes longer.
    client.wait_for_status(TRIALS_TIMEOUT, "a trial is over", |status| match pipes_and_reason(status) {
        (1, reason) if reason.starts_with("a second one") => Ok(()),
        (pipes, reason) => Err(format!("{pipes} pipes: {reason}")),
    });
    drop(load);
    let (pipes, reason) = pipes_and_reason(&wait_for_pipes(&client, "eth1", 1));
    println!("{pipes} pipe: {reason}");
    assert!(pipes == 1 && reason.starts_with("a second one brought "), "{pipes} pipes: {reason}");
}
