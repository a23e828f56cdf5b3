//! Several paths over one link.

#![allow(clippy::disallowed_methods, unreachable_pub)]

mod world;

use std::net::SocketAddr;

use mpvpn_lab::LinkSpec;
use mpvpn_path::Scheduler;
use mpvpn_quic::Cc;
use mpvpn_types::Duration;
use world::{MS, TOKEN, World, tcp::Flow};

#[derive(Debug)]
struct Found {
    mbit: f64,
    ping_ms: Vec<f64>,
}

fn down(pipes: u8, spec: &str, flows: u16, seconds: u64, scheduler: Scheduler) -> Found {
    let mut world = World::new();
    world.pipes = pipes;
    let spec: LinkSpec = spec.parse().unwrap();
    let client = world.add_over(None, TOKEN, scheduler, Cc::Bbr, &[spec]);
    world.up(client);
    world.run(Duration::from_secs(1));
    let mtu = world.machines[client].mtu.unwrap();
    let near = world.address(client, true);
    let mut all: Vec<Flow> = (0..flows)
        .map(|n| {
            Flow::new(SocketAddr::from(([203, 0, 113, 9], 5201)), SocketAddr::new(near, 40_000 + n), mtu)
        })
        .collect();
    let start = world.now + Duration::from_secs(3);
    let mut before = 0;
    let mut counted = false;
    let mut pings: Vec<f64> = Vec::new();
    let mut n = 0u32;
    let mut sent = Vec::new();
    while world.now < start + Duration::from_secs(seconds) {
        let now = world.now;
        let mut back = Vec::new();
        for (at, packet) in std::mem::take(&mut world.machines[client].received) {
            for flow in &mut all {
                if flow.is_mine(&packet).is_some() {
                    back.extend(flow.receive(&packet));
                }
            }
            if packet[9] == 17 {
                let number = u32::from_be_bytes(packet[28..32].try_into().unwrap());
                let from: mpvpn_types::Instant = sent[number as usize];
                if from >= start {
                    pings.push((at - from).as_secs_f64() * 1e3);
                }
            }
        }
        for packet in back {
            world.client_sends(client, packet);
        }
        for (_, packet) in std::mem::take(&mut world.at_server) {
            for flow in &mut all {
                if flow.is_mine(&packet).is_some() {
                    flow.acknowledged(now, &packet);
                }
            }
        }
        let packets: Vec<_> = all.iter_mut().flat_map(|flow| flow.send(now)).collect();
        for packet in packets {
            world.server_sends(packet);
        }
        if n % 10 == 0 {
            let ping = world.inward(client, &[&(sent.len() as u32).to_be_bytes()[..], &[0; 60]].concat());
            sent.push(now);
            world.server_sends(ping);
        }
        n += 1;
        if now >= start && !counted {
            counted = true;
            before = all.iter().map(Flow::delivered).sum();
        }
        world.run(MS);
    }
    let bytes = all.iter().map(Flow::delivered).sum::<u64>() - before;
    pings.sort_by(f64::total_cmp);
    let at = |share: f64| pings[((pings.len() - 1) as f64 * share) as usize];
    Found { mbit: bytes as f64 * 8e-6 / seconds as f64, ping_ms: vec![at(0.1), at(0.5), at(0.9), at(0.99)] }
}

#[test]
fn explore() {
    let spec = std::env::var("SPEC").unwrap_or("100mbit,10ms,queue=60ms".into());
    for flows in [1, 4, 8] {
        for pipes in [1, 2, 4, 8] {
            println!(
                "{spec} flows {flows} pipes {pipes}: {:.1?}",
                down(pipes, &spec, flows, 6, Scheduler::Auto)
            );
        }
    }
}
