//! The scenarios of the lab in simulated time: the same links, the same events, a model of TCP for the load.
//!
//! The bars are `sim_min_share` and `sim_max_gap_ms` of each scenario: the model is coarser than a kernel's
//! TCP, so they are wider than those of `./dev bench paths`.

use std::net::SocketAddr;

use crate::world::{MS, TOKEN, World, tcp::Flow};
use mpvpn_lab::Direction;
use mpvpn_packet::tcp_flags;
use mpvpn_packets::{Packet, Tcp};
use mpvpn_path::Scheduler;
use mpvpn_scenarios::{Change, Scenario};
use mpvpn_types::{CongestionControl, Duration, LinkId};

/// Time for TCP to find its rate, which is not measured.
const START_UP: Duration = Duration::from_secs(2);

/// How long goodput is counted where nothing happens to the links.
const TIME: Duration = Duration::from_secs(8);

/// How often a SYN is sent: as often as by Linux.
const MAX_SYNS: u32 = 7;

/// Bytes of headers that an MSS does not count.
const MSS_HEADERS: usize = 40;

/// How many of the random cuts are played.
const CUTS: u32 = 8;

/// The host behind the server.
const FAR: ([u8; 4], u16) = ([203, 0, 113, 9], 5201);

/// The result of a run, or of several.
#[derive(Debug)]
struct Found {
    mbit: f64,
    gap: Duration,
}

/// Seeds of the runs over links that lose packets at random: TCP may end its slow start early by chance.
const SEEDS: [u64; 3] = [0, 7919, 2 * 7919];

/// The median rate of several runs, and the longest gap of all.
fn summary(mut runs: Vec<Found>) -> Found {
    runs.sort_by(|a, b| a.mbit.total_cmp(&b.mbit));
    let gap = runs.iter().map(|run| run.gap).max().unwrap_or_default();
    Found { mbit: runs[runs.len() / 2].mbit, gap }
}

fn play(scenario: &Scenario, flows: u32, direction: Direction, time: Duration, seed: u64) -> Found {
    let mut world = World::new();
    world.seed = seed;
    world.pipes = scenario.client.pipes.map_or(1, |pipes| pipes as u8);
    let scheduler =
        scenario.client.scheduler.as_deref().map_or(Scheduler::Auto, |name| name.parse().unwrap());
    let cc = scenario.client.cc.as_deref().map_or(CongestionControl::Bbr, |name| {
        if name == "cubic" { CongestionControl::Cubic } else { CongestionControl::Bbr }
    });
    let client = world.add_over(None, TOKEN, scheduler, cc, &scenario.links);
    world.up(client);
    world.run(Duration::from_secs(1));
    let near = world.address(client, true);
    let mtu = negotiated_mtu(&mut world, client, [SocketAddr::new(near, 39_999), SocketAddr::from(FAR)]);
    let mut all: Vec<Flow> = (0..flows as u16)
        .map(|number| {
            let (near, far) = (SocketAddr::new(near, 40_000 + number), SocketAddr::from(FAR));
            if direction == Direction::Up { Flow::new(near, far, mtu) } else { Flow::new(far, near, mtu) }
        })
        .collect();
    let start = world.now + START_UP;
    let (mut counted, mut last, mut gap) = (None, None, Duration::ZERO);
    let mut events = scenario.event.iter().peekable();
    while world.now < start + time {
        while let Some(event) = events.next_if(|event| world.now >= start + event.at()) {
            impair(&mut world, client, scenario, event.link - 1, &event.change);
        }
        let moved = exchange(&mut world, client, &mut all, direction);
        if world.now >= start {
            counted.get_or_insert_with(|| all.iter().map(Flow::delivered).sum::<u64>());
            if moved {
                gap = gap.max(world.now - last.replace(world.now).unwrap_or(world.now));
            }
        }
        world.run(MS);
    }
    let bytes = all.iter().map(Flow::delivered).sum::<u64>() - counted.unwrap_or(0);
    let gap = gap.max(world.now - last.unwrap_or(start));
    Found { mbit: bytes as f64 * 8e-6 / time.as_secs_f64(), gap }
}

/// The size of the packets (bytes) that the hosts `near` and `far` agree on, by the MSS of a SYN that both
/// ends of the tunnel have clamped. With losses they find different MTUs.
pub(crate) fn negotiated_mtu(world: &mut World, client: usize, [near, far]: [SocketAddr; 2]) -> usize {
    let tcp = Tcp { flags: tcp_flags::SYN, options: vec![2, 4, 0x05, 0xb4], ..Tcp::default() };
    let syn = Packet::between(far, near).tcp_with(&tcp, &[]);
    for _ in 0..MAX_SYNS {
        world.server_sends(syn.clone());
        world.run(Duration::from_secs(1));
        if let [(_, packet), ..] = &*std::mem::take(&mut world.machines[client].received) {
            return usize::from(u16::from_be_bytes([packet[42], packet[43]])) + MSS_HEADERS;
        }
    }
    panic!("no SYN of {MAX_SYNS} arrives");
}

/// Delivers received packets and sends new ones; returns whether data arrived.
pub(crate) fn exchange(world: &mut World, client: usize, flows: &mut [Flow], direction: Direction) -> bool {
    let now = world.now;
    let at_client = std::mem::take(&mut world.machines[client].received);
    let received_by_server = std::mem::take(&mut world.received_by_server);
    let mut moved = false;
    for (_, packet) in at_client.into_iter().chain(received_by_server) {
        let Some((flow, data)) =
            flows.iter_mut().find_map(|flow| flow.is_mine(&packet).map(|data| (flow, data)))
        else {
            continue;
        };
        if !data {
            flow.acknowledged(now, &packet);
        } else if let Some(answer) = flow.receive(&packet) {
            moved = true;
            match direction {
                Direction::Up => world.server_sends(answer),
                _ => world.client_sends(client, answer),
            }
        }
    }
    for flow in flows {
        for packet in flow.send(now) {
            match direction {
                Direction::Up => world.client_sends(client, packet),
                _ => world.server_sends(packet),
            }
        }
    }
    moved
}

fn impair(world: &mut World, client: usize, scenario: &Scenario, index: usize, change: &Change) {
    let (now, id) = (world.now, LinkId(index as u16));
    let mut spec = scenario.links[index].clone();
    let machine = &mut world.machines[client];
    match change {
        Change::Cut => {
            machine.link_down(now, id);
            (spec.up.loss, spec.down.loss) = (1.0, 1.0);
        }
        Change::Silent(direction) => {
            spec.up.loss = if *direction == Direction::Down { spec.up.loss } else { 1.0 };
            spec.down.loss = if *direction == Direction::Up { spec.down.loss } else { 1.0 };
        }
        Change::Restore => machine.link_up(now, id),
        Change::Set(settings) => spec.change(settings).unwrap(),
    }
    let link = machine.links.get_mut(&id).expect("a link that exists");
    link.up.change(now, &spec.up);
    link.down.change(now, &spec.down);
}

/// Plays a scenario in every direction and with every number of flows up to 4, or with its first one if all
/// are more, and holds it to its bars.
fn hold(name: &str) {
    let mut scenario =
        Scenario::all().unwrap().into_iter().find(|scenario| scenario.name == name).expect(name);
    if scenario.random_cuts.is_some() {
        scenario = scenario.with_cuts(CUTS);
    }
    if scenario.client.scheduler.as_deref().is_some_and(|name| name.parse::<Scheduler>().is_err()) {
        panic!("{name}: there is no such scheduler");
    }
    let time = if scenario.event.is_empty() { TIME } else { Duration::from_secs(scenario.seconds.into()) };
    let loses = scenario.links.iter().any(|link| link.up.loss + link.down.loss > 0.0);
    let mut missed = Vec::new();
    for &direction in &scenario.directions {
        let played =
            |index: usize, flows: u32| flows <= 4 || index == 0 && scenario.flows.iter().all(|n| *n > 4);
        for (index, &flows) in scenario.flows.iter().enumerate().filter(|(index, n)| played(*index, **n)) {
            let least = scenario.bars.sim_min_share.get(index).copied().unwrap_or(0.0);
            let share_of = |found: &Found| found.mbit * 1e6 / scenario.reference_rate(direction).bps() as f64;
            let seeds = if loses { &SEEDS[..] } else { &SEEDS[..1] };
            let run = |seed: &u64| play(&scenario, flows, direction, time, *seed);
            let found = summary(seeds.iter().map(run).collect());
            let share = share_of(&found);
            let row = format!(
                "{name}, {flows} TCP {direction:?}: {:.1} Mbit/s, share {share:.2}, gap {:?}",
                found.mbit, found.gap
            );
            println!("{row}");
            let most = scenario.bars.sim_max_gap_ms.unwrap_or(f64::INFINITY);
            if share < least || found.gap.as_secs_f64() * 1e3 > most {
                missed.push(format!("{row}; asked: at least {least}, at most {most} ms"));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

macro_rules! scenarios {
    ($($(#[$attribute:meta])* $name:ident)*) => {
        $($(#[$attribute])* #[test] fn $name() { hold(stringify!($name)); })*

        #[test]
        fn every_scenario_is_played() {
            let played = [$(stringify!($name)),*];
            let missing: Vec<_> =
                Scenario::names().filter(|name| !played.contains(name)).collect();
            assert!(missing.is_empty(), "not played: {missing:?}");
        }
    };
}

scenarios! {
    #[ignore = "long: ./dev test all plays it"] two_100_far
    #[ignore = "long: ./dev test all plays it"] fast_slow
    #[ignore = "long: ./dev test all plays it"] pipes_shaped
    #[ignore = "long: ./dev test all plays it"] pipes_unshaped
    #[ignore = "long: ./dev test all plays it"] two_100
    #[ignore = "long: ./dev test all plays it"] asym_bw
    #[ignore = "long: ./dev test all plays it"] wifi_leo
    #[ignore = "long: ./dev test all plays it"] high_orbit
    #[ignore = "long: ./dev test all plays it"] loss_10
    #[ignore = "long: ./dev test all plays it"] loss_30
    #[ignore = "long: ./dev test all plays it"] dual_lte
    #[ignore = "long: ./dev test all plays it"] dual_leo
    #[ignore = "long: ./dev test all plays it"] lte_geo
    #[ignore = "long: ./dev test all plays it"] wifi_lte
    #[ignore = "long: ./dev test all plays it"] lte_leo
    #[ignore = "long: ./dev test all plays it"] equal
    #[ignore = "long: ./dev test all plays it"] lossy
    #[ignore = "long: ./dev test all plays it"] asym_jitter
    two_10 jitter
    cut_carrier cut_silent redundant_cut random_cuts
}
