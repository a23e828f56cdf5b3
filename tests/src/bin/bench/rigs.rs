//! The rigs of mpvpn alone.

use std::{
    thread,
    time::{Duration, Instant},
};

use mpvpn_tests::{
    cut::{Course, Death, survive},
    http::{Download, MB, Site},
    ping::{Ping, ping},
    stage::{Direction, Family, Peer, Place, SERVER, Stage, TUNNEL, inet},
    tcp::{Sink, Way},
};

use crate::{
    figure::{Bar, figure},
    options::Options,
    report::Outcome,
};

pub(crate) fn bonding(_: &Options) -> Outcome {
    let stage = Stage::two_links();
    let (_server, client) = pair(&stage);
    await_links(&client, 2);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let mut figures = Vec::new();
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 8, way, 10).finish();
        let name = format!("8 TCP flows {way:?}");
        figures.push(figure("bonding", name, report.megabits(), "Mbit/s", Bar::AtLeast(170.0)));
    }
    for way in [Way::Up, Way::Down] {
        let report = sink.udp(&stage, Place::Client, TUNNEL, 160, way, 10).finish();
        let name = format!("loss of UDP, 1200 bytes, 160 Mbit/s {way:?}");
        figures.push(figure("bonding", name, report.loss_pct, "%", Bar::AtMost(1.0)));
    }
    for way in [Way::Up, Way::Down] {
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 1, way, 10).finish();
        figures.push(figure(
            "bonding",
            format!("1 TCP flow {way:?}"),
            report.megabits(),
            "Mbit/s",
            Bar::Higher,
        ));
    }
    figures.into()
}

pub(crate) fn cut(_: &Options) -> Outcome {
    let mut figures = Vec::new();
    for (death, way, longest) in [
        (Death::Carrier, Way::Up, 100.0),
        (Death::Carrier, Way::Down, 100.0),
        (Death::Silent(Direction::Both), Way::Up, 300.0),
        (Death::Silent(Direction::Both), Way::Down, 300.0),
        (Death::Silent(Direction::Up), Way::Up, 300.0),
        (Death::Silent(Direction::Down), Way::Down, 300.0),
    ] {
        let stage = Stage::two_links();
        let (_server, client) = pair(&stage);
        let outcome = survive(&stage, &client, death, way, Course::LONG);
        let what = format!("{death:?}, 8 flows {way:?}");
        figures.push(figure("cut", format!("gap: {what}"), ms(outcome.gap), "ms", Bar::AtMost(longest)));
        figures.push(figure(
            "cut",
            format!("used again: {what}"),
            ms(outcome.back),
            "ms",
            Bar::AtMost(2000.0),
        ));
    }
    figures.into()
}

pub(crate) fn latency(_: &Options) -> Outcome {
    let stage = Stage::unlimited();
    let (_server, _client) = pair(&stage);
    let outside = SERVER.trim_end_matches(":4433");
    let mut added: Vec<f64> = (0..3)
        .map(|_| {
            let through = Ping::dense(&stage, Place::Client, TUNNEL, 3).finish();
            // The server's outer address goes around the tunnel only from the link's own device.
            let direct = Ping::dense_from(&stage, Place::Client, "eth1", outside, 3).finish();
            through.median_rtt_ms() - direct.median_rtt_ms()
        })
        .collect();
    added.sort_by(f64::total_cmp);
    vec![figure("latency", "added round trip, median of 3".to_owned(), added[1], "ms", Bar::AtMost(0.3))]
        .into()
}

pub(crate) fn speed(_: &Options) -> Outcome {
    let stage = Stage::unlimited();
    let (server, client) = pair(&stage);
    let sink = Sink::start(&stage, Place::Server, 5201);
    let mut figures = Vec::new();
    for way in [Way::Up, Way::Down] {
        let before = (client.processor_time(), server.processor_time());
        let report = sink.tcp(&stage, Place::Client, TUNNEL, 1, way, 10).finish();
        let gigabytes = report.rate * 10.0 / 8e9;
        let cost = |peer: &Peer, before: Duration| (peer.processor_time() - before).as_secs_f64() / gigabytes;
        let (at_client, at_server) = (cost(&client, before.0), cost(&server, before.1));
        figures.push(figure(
            "speed",
            format!("1 TCP flow {way:?}"),
            report.rate / 1e9,
            "Gbit/s",
            Bar::AtLeast(2.0),
        ));
        figures.push(figure("speed", format!("client {way:?}"), at_client, "CPU-s/GB", Bar::Lower));
        figures.push(figure("speed", format!("server {way:?}"), at_server, "CPU-s/GB", Bar::Lower));
    }
    figures.into()
}

pub(crate) fn download(_: &Options) -> Outcome {
    let mut figures = Vec::new();
    for family in [Family::V4, Family::V6] {
        for across in [false, true] {
            let stage = Stage::two_links();
            let (_server, client) = pair(&stage);
            await_links(&client, 2);
            let site = Site::start(&stage, Place::Inet);
            let began = Instant::now();
            let limit = Duration::from_secs(60);
            let download = Download::start(&stage, &site, &inet(family), 100 * MB, limit, &[]);
            if across {
                thread::sleep(Duration::from_secs(1));
                stage.link(1).cut();
                thread::sleep(Duration::from_secs(3));
                stage.link(1).restore();
            }
            download.finish();
            let name = format!("100 MB over {family:?}{}", if across { ", link 1 gone for 3 s" } else { "" });
            figures.push(figure("download", name, began.elapsed().as_secs_f64(), "s", Bar::Lower));
        }
    }
    figures.into()
}

pub(crate) fn memory(options: &Options) -> Outcome {
    let stage = Stage::two_links();
    let (server, client) = pair(&stage);
    await_links(&client, 2);
    thread::sleep(Duration::from_secs(5));
    let mut figures = Vec::new();
    for (name, peer) in [("client", &client), ("server", &server)] {
        figures.push(figure("memory", format!("idle {name}"), megabytes(peer), "MB", Bar::AtMost(20.0)));
    }
    let sink = Sink::start(&stage, Place::Server, 5201);
    let seconds = u32::try_from(options.load.as_secs()).unwrap_or(u32::MAX).max(20);
    let load = sink.tcp(&stage, Place::Client, TUNNEL, 8, Way::Down, seconds);
    // What buffers a busy tunnel needs are there after a while: growth is counted from then on.
    thread::sleep(Duration::from_secs(10));
    let busy = (megabytes(&client), megabytes(&server));
    load.finish();
    for (name, peer, before) in [("client", &client, busy.0), ("server", &server, busy.1)] {
        figures.push(figure("memory", format!("busy {name}"), megabytes(peer), "MB", Bar::AtMost(64.0)));
        let growth = megabytes(peer) - before;
        let name = format!("growth of the {name} in {} s of load", seconds - 10);
        figures.push(figure("memory", name, growth, "MB", Bar::AtMost(2.0)));
    }
    let pings = ping(&stage, Place::Client, TUNNEL, 10);
    assert_eq!(pings.answers.len(), 10, "the tunnel is idle again");
    figures.into()
}

fn pair(stage: &Stage) -> (Peer, Peer) {
    (stage.server(&[]), stage.client(&[]))
}

/// Waits until the first so many links carry something.
pub(crate) fn await_links(client: &Peer, links: usize) {
    for link in 1..=links {
        client.until_path(&format!("eth{link}"), "active", Duration::from_secs(5));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn megabytes(peer: &Peer) -> f64 {
    peer.memory() as f64 / 1e6
}
