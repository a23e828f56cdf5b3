//! The rigs that measure mpvpn alone.

use std::{
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    http::{Download, MB, TestPages},
    iperf::IperfServer,
    ping::{Ping, ping},
    testbed::{Direction, Family, Host, MpvpnProcess, SERVER, TUNNEL, Testbed, inet},
};

use crate::{
    figure::{Bar, figure},
    options::Options,
    report::Outcome,
};

pub(crate) fn bonding(_: &Options) -> Outcome {
    let testbed = Testbed::two_links();
    let (_server, client) = pair(&testbed);
    await_links(&client, 2);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let mut figures = Vec::new();
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, direction, 10).finish();
        let name = format!("8 TCP flows {direction:?}");
        figures.push(figure("bonding", name, report.megabits(), "Mbit/s", Bar::AtLeast(170.0)));
    }
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.udp(&testbed, Host::Client, TUNNEL, 160, direction, 10).finish();
        let name = format!("loss of UDP, 1200 bytes, 160 Mbit/s {direction:?}");
        figures.push(figure("bonding", name, report.loss_pct, "%", Bar::AtMost(1.0)));
    }
    for direction in [Direction::Up, Direction::Down] {
        let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, direction, 10).finish();
        figures.push(figure(
            "bonding",
            format!("1 TCP flow {direction:?}"),
            report.megabits(),
            "Mbit/s",
            Bar::Higher,
        ));
    }
    figures.into()
}

pub(crate) fn latency(_: &Options) -> Outcome {
    let testbed = Testbed::unlimited();
    let (_server, _client) = pair(&testbed);
    let outside = SERVER.trim_end_matches(":4433");
    let mut added: Vec<f64> = (0..3)
        .map(|_| {
            let through = Ping::dense(&testbed, Host::Client, TUNNEL, 3).finish();
            // Pings to the server's outer address bypass the tunnel only if bound to the link's device.
            let direct = Ping::dense_through(&testbed, Host::Client, "eth1", outside, 3).finish();
            through.median_rtt_ms() - direct.median_rtt_ms()
        })
        .collect();
    added.sort_by(f64::total_cmp);
    vec![figure("latency", "added round trip, median of 3".to_owned(), added[1], "ms", Bar::AtMost(0.3))]
        .into()
}

pub(crate) fn speed(_: &Options) -> Outcome {
    let testbed = Testbed::unlimited();
    let (server, client) = pair(&testbed);
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let mut figures = Vec::new();
    for direction in [Direction::Up, Direction::Down] {
        let before = (client.processor_time(), server.processor_time());
        let report = iperf.tcp(&testbed, Host::Client, TUNNEL, 1, direction, 10).finish();
        let gigabytes = report.rate * 10.0 / 8e9;
        let cost = |process: &MpvpnProcess, before: Duration| {
            (process.processor_time() - before).as_secs_f64() / gigabytes
        };
        let (at_client, at_server) = (cost(&client, before.0), cost(&server, before.1));
        figures.push(figure(
            "speed",
            format!("1 TCP flow {direction:?}"),
            report.rate / 1e9,
            "Gbit/s",
            Bar::AtLeast(2.0),
        ));
        figures.push(figure("speed", format!("client {direction:?}"), at_client, "CPU-s/GB", Bar::Lower));
        figures.push(figure("speed", format!("server {direction:?}"), at_server, "CPU-s/GB", Bar::Lower));
    }
    figures.into()
}

pub(crate) fn download(_: &Options) -> Outcome {
    let mut figures = Vec::new();
    for family in [Family::V4, Family::V6] {
        for across in [false, true] {
            let testbed = Testbed::two_links();
            let (_server, client) = pair(&testbed);
            await_links(&client, 2);
            let site = TestPages::start(&testbed, Host::Inet);
            let began = Instant::now();
            let limit = Duration::from_secs(60);
            let download = Download::start(&testbed, &site, &inet(family), 100 * MB, limit, &[]);
            if across {
                thread::sleep(Duration::from_secs(1));
                testbed.link(1).cut();
                thread::sleep(Duration::from_secs(3));
                testbed.link(1).restore();
            }
            download.finish();
            let name = format!("100 MB over {family:?}{}", if across { ", link 1 gone for 3 s" } else { "" });
            figures.push(figure("download", name, began.elapsed().as_secs_f64(), "s", Bar::Lower));
        }
    }
    figures.into()
}

pub(crate) fn memory(options: &Options) -> Outcome {
    let testbed = Testbed::two_links();
    let (server, client) = pair(&testbed);
    await_links(&client, 2);
    thread::sleep(Duration::from_secs(5));
    let mut figures = Vec::new();
    for (name, process) in [("client", &client), ("server", &server)] {
        figures.push(figure("memory", format!("idle {name}"), megabytes(process), "MB", Bar::AtMost(20.0)));
    }
    let iperf = IperfServer::start(&testbed, Host::Server, 5201);
    let seconds = u32::try_from(options.load.as_secs()).unwrap_or(u32::MAX).max(20);
    let load = iperf.tcp(&testbed, Host::Client, TUNNEL, 8, Direction::Down, seconds);
    // The buffers of a busy tunnel are allocated after 10 s: growth is counted from then on.
    thread::sleep(Duration::from_secs(10));
    let busy = (megabytes(&client), megabytes(&server));
    load.finish();
    for (name, process, before) in [("client", &client, busy.0), ("server", &server, busy.1)] {
        figures.push(figure("memory", format!("busy {name}"), megabytes(process), "MB", Bar::AtMost(64.0)));
        let growth = megabytes(process) - before;
        let name = format!("growth of the {name} in {} s of load", seconds - 10);
        figures.push(figure("memory", name, growth, "MB", Bar::AtMost(2.0)));
    }
    let pings = ping(&testbed, Host::Client, TUNNEL, 10);
    assert_eq!(pings.answers.len(), 10, "the tunnel is idle again");
    figures.into()
}

pub(crate) fn pair(testbed: &Testbed) -> (MpvpnProcess, MpvpnProcess) {
    (testbed.server(&[]), testbed.client(&[]))
}

/// Waits until the first `links` links have active paths.
pub(crate) fn await_links(client: &MpvpnProcess, links: usize) {
    for link in 1..=links {
        client.wait_for_path(&format!("eth{link}"), "active", Duration::from_secs(5));
    }
}

fn megabytes(process: &MpvpnProcess) -> f64 {
    process.memory() as f64 / 1e6
}
