//! Streams over a path that stalls: for a while no packet passes, and none is lost.

use crate::world::{
    MS, TOKEN, World,
    talk::{RelayedConnection, step, streams},
};
use mpvpn_lab::{ChannelParams, LinkSpec};
use mpvpn_path::Scheduler;
use mpvpn_scenarios::Scenario;
use mpvpn_types::{BitRate, CongestionControl, Duration, LinkId};

const S: Duration = Duration::from_secs(1);

/// The impairment of a direction of a link.
type Change = fn(&mut ChannelParams);

fn slow(params: &mut ChannelParams) {
    params.delay += 2 * S;
}

fn none(_: &mut ChannelParams) {}

/// Lets transfers follow each other, each of `down` kB or `up` bytes, over two links, one of which changes
/// after `after` and is as before 2 s later; the longest of them.
fn longest(links: &[(u64, Duration)], (down, up): (u16, u64), after: Duration, change: Change) -> Duration {
    let (mut world, client) = streams(links);
    // Time to find the rates, which is not measured.
    let mut warm = [RelayedConnection::new(4, 4_000_000)];
    run(&mut world, client, &mut warm);
    let start = world.now;
    let mut longest = Duration::ZERO;
    let mut stage = 0;
    while world.now < start + after + 3 * S {
        let began = world.now;
        let mut connections = [RelayedConnection::new(61_000 + down, up)];
        while !is_done(&world, &connections[0]) {
            assert!(world.now < began + 10 * S, "{} bytes down", connections[0].received_bytes);
            if stage == 0 && world.now >= start + after {
                set(&mut world, client, change);
                stage = 1;
            }
            if stage == 1 && world.now >= start + after + 2 * S {
                restore(&mut world, client, links[0]);
                stage = 2;
            }
            step(&mut world, client, &mut connections);
        }
        longest = longest.max(world.now - began);
        world.destinations.clear();
    }
    longest
}

fn is_done(world: &World, connection: &RelayedConnection) -> bool {
    let got = world
        .destinations
        .last()
        .is_some_and(|other| other.ended && other.received_bytes == connection.sends);
    connection.is_over() && got
}

fn run(world: &mut World, client: usize, connections: &mut [RelayedConnection; 1]) {
    let start = world.now;
    while !is_done(world, &connections[0]) {
        assert!(world.now < start + 10 * S);
        step(world, client, connections);
    }
    world.destinations.clear();
}

fn set(world: &mut World, client: usize, change: Change) {
    let now = world.now;
    let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    link.up.adjust(now, change);
    link.down.adjust(now, change);
}

fn restore(world: &mut World, client: usize, (rate, delay): (u64, Duration)) {
    let now = world.now;
    let rate = Some(BitRate::from_bps(rate * 1_000_000));
    let params = ChannelParams { rate, delay, mtu: Some(1500), ..ChannelParams::default() };
    let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    link.up.change(now, &params);
    link.down.change(now, &params);
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_path_that_stalls_costs_transfers_little() {
    let links = [(100, Duration::from_micros(12_500)), (50, 15 * MS)];
    for size in [(1, 2_000), (20, 1_000), (300, 1_000), (1, 1_000_000)] {
        let without = longest(&links, size, S, none);
        for after in [1000, 1007, 1013, 1020] {
            let with = longest(&links, size, after * MS, slow);
            println!("{size:?} at {after}: {with:?}, {without:?} without");
            assert!(with < without + 250 * MS, "{size:?} at {after}: {with:?}, {without:?} without");
        }
    }
}

/// Bytes that were sent again in vain over links as they are described, as a share of 30 MB.
fn repeated(links: &[LinkSpec]) -> f64 {
    let mut world = World::new();
    let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Bbr, links);
    world.up(client);
    world.run(S);
    let mut connections = [RelayedConnection::new(15, 15_000_000)];
    let start = world.now;
    while !is_done(&world, &connections[0]) {
        assert!(world.now < start + 60 * S);
        step(&mut world, client, &mut connections);
    }
    let here = world.machines[client].client.report(world.now).counters.reinjected_bytes;
    let there: u64 =
        world.servers[0].report(world.now).iter().map(|report| report.counters.reinjected_bytes).sum();
    (here + there) as f64 / 30e6
}

#[test]
fn paths_of_different_delays_and_losses_are_none_that_stall() {
    let link = |rate: u64, ms: u32, loss: f64| {
        let rate = Some(BitRate::from_bps(rate * 1_000_000));
        let params =
            ChannelParams { rate, delay: ms * MS / 2, loss, mtu: Some(1500), ..ChannelParams::default() };
        LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() }
    };
    let scenarios = Scenario::all().unwrap();
    let named = |name| scenarios.iter().find(|scenario| scenario.name == name).unwrap().links.clone();
    let far = vec![link(50, 25, 0.0), link(50, 600, 0.0)];
    let lossy = vec![link(50, 20, 0.02), link(50, 30, 0.02)];
    for (name, links) in [("far", far), ("lossy", lossy), ("lte_leo", named("lte_leo"))] {
        let share = repeated(&links);
        println!("{name}: {share:.5}");
        assert!(share < 0.01, "{name}: {share:.4}");
    }
}
