//! TCP connections of apps that travel as streams, in simulated time.

use std::net::SocketAddr;

use crate::world::{MS, SERVER, SharedBottleneck, TOKEN, World, app::App};
use mpvpn_flow::{
    rules::{FlowMode, FlowModeReason, Rules},
    split_tcp::ConnectionState,
};
use mpvpn_lab::Direction;
use mpvpn_masque::connect::ProxyError;
use mpvpn_path::{Scheduler, TransportHealth};
use mpvpn_scenarios::Scenario;
use mpvpn_tunnel::FlowTransport;
use mpvpn_types::{CongestionControl, Duration, LinkId};

fn world(links: &[(u64, Duration)]) -> (World, usize) {
    let mut world = World::new();
    world.flow_rules = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    let client = world.add(TOKEN, Scheduler::Auto, links);
    world.up(client);
    world.run(500 * MS);
    (world, client)
}

/// Connections of a machine to a destination that sends `mb` MB, each of which sends `sends` bytes.
fn apps(world: &World, client: usize, count: u16, mb: u16, sends: u64) -> Vec<App> {
    let from = |number| SocketAddr::new(world.address(client, true), 40_000 + number);
    (0..count).map(|number| App::new(from(number), ([203, 0, 113, 9], mb).into(), sends)).collect()
}

/// Runs apps until all have ended, or for `most`; returns the duration.
fn play(world: &mut World, client: usize, apps: &mut [App], most: Duration) -> Duration {
    let start = world.now;
    while world.now < start + most && !apps.iter().all(App::is_over) {
        step(world, client, apps);
    }
    world.now - start
}

fn step(world: &mut World, client: usize, apps: &mut [App]) {
    loop {
        for (_, packet) in std::mem::take(&mut world.machines[client].received) {
            apps.iter_mut().for_each(|app| app.take(&packet));
        }
        let out: Vec<_> = apps.iter_mut().flat_map(App::packets).collect();
        if out.is_empty() {
            break;
        }
        for packet in out {
            world.client_sends(client, packet);
        }
        world.run(Duration::from_micros(50));
    }
    world.run(MS);
}

fn mbit(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8e-6 / time.as_secs_f64()
}

#[test]
fn one_download_fills_two_links() {
    let (mut world, client) = world(&[(100, 10 * MS), (50, 20 * MS)]);
    let mut apps = apps(&world, client, 1, 100, 0);
    let time = play(&mut world, client, &mut apps, Duration::from_secs(20));
    assert_eq!((apps[0].received_bytes, apps[0].ended, apps[0].reset), (100_000_000, true, false));
    let rate = mbit(100_000_000, time);
    assert!(rate > 0.9 * 150.0, "{rate:.1} Mbit/s");
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_long_transfer_takes_a_satellite_along_and_a_short_one_does_not() {
    for count in [1, 4] {
        let (mut world, client) = world(&[(50, 7 * MS), (20, 150 * MS)]);
        let mut long = apps(&world, client, count, 200, 0);
        play(&mut world, client, &mut long, Duration::from_secs(5));
        let got = |apps: &[App]| apps.iter().map(|app| app.received_bytes).sum::<u64>();
        let before = got(&long);
        play(&mut world, client, &mut long, Duration::from_secs(10));
        let rate = mbit(got(&long) - before, Duration::from_secs(10));
        assert!(rate > 0.92 * 70.0, "{count} at a time: {rate:.1} Mbit/s");
    }
    let time_of = |links: &[(u64, Duration)], mb| {
        let (mut world, client) = world(links);
        let mut short = apps(&world, client, 1, mb, 0);
        let time = play(&mut world, client, &mut short, Duration::from_secs(5));
        assert!(short[0].is_over() && short[0].received_bytes == u64::from(mb) * 1_000_000);
        time
    };
    for mb in [1, 4, 7, 10] {
        let (alone, both) = (time_of(&[(50, 7 * MS)], mb), time_of(&[(50, 7 * MS), (20, 150 * MS)], mb));
        assert!(both < alone + alone / 6, "{mb} MB: {both:?} instead of {alone:?}");
    }
}

#[test]
fn four_uploads_fill_two_links_and_share_them() {
    let (mut world, client) = world(&[(100, 10 * MS), (50, 20 * MS)]);
    let mut apps = apps(&world, client, 4, 1, 20_000_000);
    let start = world.now;
    while world.destinations.iter().filter(|other| other.ended).count() < 4 && world.now < start + 20_000 * MS
    {
        step(&mut world, client, &mut apps);
    }
    let time = world.now - start;
    let got: Vec<_> = world.destinations.iter().map(|other| other.received_bytes).collect();
    assert_eq!(got, [20_000_000; 4]);
    let rate = mbit(80_000_000, time);
    assert!(rate > 0.88 * 150.0, "{rate:.1} Mbit/s");
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_window_full_of_gaps_ends_no_connection_and_no_transfer() {
    let links = [
        "3.7mbit,0.9ms,queue=33ms,discipline=policer",
        "259mbit,8.8ms,jitter=3ms,queue=110ms",
        "85mbit,69ms,jitter=25ms,queue=1.1s,discipline=policer",
    ];
    let mut world = World::new();
    world.flow_rules = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    let shared = "80mbit,0ms,queue=119ms,discipline=policer".parse().unwrap();
    let behind = vec![LinkId(0), LinkId(1)];
    world.bottleneck = Some(SharedBottleneck::new(behind, &shared, 77, world.now));
    let links = links.map(|link| link.parse().unwrap());
    let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Bbr, &links);
    world.up(client);
    world.run(1000 * MS);
    let mut apps = apps(&world, client, 8, 1, 60_000_000_000);
    play(&mut world, client, &mut apps, Duration::from_secs(4));
    let got = |world: &World| world.destinations.iter().map(|other| other.received_bytes).sum::<u64>();
    let before = got(&world);
    play(&mut world, client, &mut apps, Duration::from_secs(4));
    let rate = mbit(got(&world) - before, Duration::from_secs(4));
    let lost = &world.machines[client].down_reasons;
    assert!(lost.is_empty() && rate > 0.8 * 0.95 * (80.0 + 85.0), "{rate:.1} Mbit/s, {lost:?}");
}

#[test]
fn loss_on_both_links_costs_no_byte_and_little_rate() {
    let (mut world, client) = world(&[(50, 10 * MS), (50, 15 * MS)]);
    for id in [LinkId(0), LinkId(1)] {
        let link = world.machines[client].links.get_mut(&id).unwrap();
        (link.up.loss, link.down.loss) = (0.02, 0.02);
    }
    let mut apps = apps(&world, client, 2, 30, 1_000_000);
    let time = play(&mut world, client, &mut apps, Duration::from_secs(20));
    assert!(apps.iter().all(|app| app.received_bytes == 30_000_000 && app.ended));
    assert!(world.destinations.iter().all(|other| other.received_bytes == 1_000_000 && other.ended));
    let rate = mbit(60_000_000, time);
    assert!(rate > 0.8 * 100.0, "{rate:.1} Mbit/s");
}

/// The longest time without a byte for a connection while a link dies without a word.
fn gap_when_a_link_falls_silent(direction: Direction, lost: f64) -> Duration {
    let delay = Duration::from_micros(12_500);
    let (mut world, client) = world(&[(100, delay), (100, delay)]);
    let (down, up) = if direction == Direction::Down { (100, 1000) } else { (1, 100_000_000) };
    let mut apps = apps(&world, client, 1, down, up);
    let moved = |world: &World, apps: &[App]| {
        if direction == Direction::Down {
            apps[0].received_bytes
        } else {
            world.destinations.first().map_or(0, |other| other.received_bytes)
        }
    };
    let (mut last, mut longest) = (world.now, Duration::ZERO);
    let start = world.now;
    let is_over = |world: &World, apps: &[App]| {
        apps[0].is_over() && world.destinations.first().is_some_and(|other| other.ended)
    };
    while !is_over(&world, &apps) && world.now < start + Duration::from_secs(30) {
        let elapsed = world.now - start;
        let silent = (2000 * MS..4000 * MS).contains(&elapsed);
        for (id, link) in &mut world.machines[client].links {
            let loss = if silent && *id == LinkId(0) { 1.0 } else { lost };
            (link.up.loss, link.down.loss) = (loss, loss);
        }
        let before = moved(&world, &apps);
        step(&mut world, client, &mut apps);
        if moved(&world, &apps) > before {
            longest = longest.max(world.now - last);
            last = world.now;
        }
    }
    assert!(is_over(&world, &apps) && !apps[0].reset);
    assert_eq!(moved(&world, &apps), 100_000_000);
    println!("{direction:?}: longest gap {longest:?}, {:?} in all", world.now - start);
    longest
}

#[test]
fn a_link_that_falls_silent_is_hardly_felt() {
    for direction in [Direction::Down, Direction::Up] {
        let gap = gap_when_a_link_falls_silent(direction, 0.0);
        assert!(gap < 250 * MS, "{direction:?}: {gap:?}");
    }
}

/// Bytes that were lost and retransmitted on the dying link are missing until the path is closed.
#[test]
fn a_lossy_link_that_falls_silent_is_felt_for_a_moment() {
    for direction in [Direction::Down, Direction::Up] {
        let gap = gap_when_a_link_falls_silent(direction, 0.05);
        assert!(gap < 700 * MS, "{direction:?}: {gap:?}");
    }
}

/// How long after the links are back bytes come again, if all were silent for so long.
fn pause_after_an_outage(time: Duration) -> Duration {
    let (mut world, client) = world(&[(20, 10 * MS), (20, 15 * MS)]);
    let mut apps = apps(&world, client, 2, 20, 1000);
    let start = world.now;
    let (mut back, mut seen) = (None, None);
    while !apps.iter().all(App::is_over) && world.now < start + time + Duration::from_secs(60) {
        let elapsed = world.now - start;
        let silent = (1000 * MS..1000 * MS + time).contains(&elapsed);
        for link in world.machines[client].links.values_mut() {
            (link.up.loss, link.down.loss) = if silent { (1.0, 1.0) } else { (0.0, 0.0) };
        }
        let before: u64 = apps.iter().map(|app| app.received_bytes).sum();
        if silent {
            back = Some(world.now);
        }
        step(&mut world, client, &mut apps);
        let moved = apps.iter().map(|app| app.received_bytes).sum::<u64>() > before;
        if moved && !silent && back.is_some() {
            seen.get_or_insert(world.now);
        }
    }
    let ends: Vec<_> = apps.iter().map(|app| (app.received_bytes, app.ended, app.reset)).collect();
    assert_eq!(
        ends,
        [(20_000_000, true, false); 2],
        "{time:?}, {} times down",
        world.machines[client].down_count
    );
    seen.unwrap() - back.unwrap()
}

#[test]
fn a_path_inside_tcp_that_is_given_up_counts_as_dead() {
    let (mut world, client) = world(&[(10, 10 * MS), (10, 10 * MS)]);
    let path = LinkId(0).with_path_index(LinkId::TCP_PATH_INDEX);
    let now = world.now;
    let heard = |world: &World| world.machines[client].client.heard_on(path);
    assert_eq!(heard(&world), TransportHealth::Unknown);
    world.machines[client].client.link_up(now, path, SERVER.parse().unwrap());
    assert_eq!(heard(&world), TransportHealth::Answering, "there is no path yet");
    world.run(500 * MS);
    assert_eq!(heard(&world), TransportHealth::Working);
    let mut apps = apps(&world, client, 1, 1, 100_000_000);
    play(&mut world, client, &mut apps, 1000 * MS);
    let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
    (link.up.loss, link.down.loss) = (1.0, 1.0);
    // Closing the path makes QUIC retransmit the bytes that a stream waits for.
    play(&mut world, client, &mut apps, 2500 * MS);
    assert_eq!(heard(&world), TransportHealth::Dead);
}

#[test]
fn connections_survive_when_all_links_are_gone_for_a_while() {
    for seconds in [3, 20, 90] {
        let pause = pause_after_an_outage(Duration::from_secs(seconds));
        println!("{seconds} s of silence: {pause:?}");
        assert!(pause < Duration::from_secs(2), "{pause:?}");
    }
}

/// Time for TCP to find its rate, which is not measured.
const START_UP: Duration = Duration::from_secs(2);
const TIME: Duration = Duration::from_secs(8);

/// Goodput of connections over the links of a scenario, as a share of the links' rates.
fn share(name: &str, count: u16, direction: Direction) -> f64 {
    let scenario = Scenario::all().unwrap().into_iter().find(|scenario| scenario.name == name).expect(name);
    let mut world = World::new();
    let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Bbr, &scenario.links);
    world.up(client);
    world.run(Duration::from_secs(1));
    let (down, up) = if direction == Direction::Down { (60_000, 0) } else { (1, 60_000_000_000) };
    let mut apps = apps(&world, client, count, down, up);
    let moved = |world: &World, apps: &[App]| match direction {
        Direction::Down => apps.iter().map(|app| app.received_bytes).sum::<u64>(),
        _ => world.destinations.iter().map(|other| other.received_bytes).sum(),
    };
    play(&mut world, client, &mut apps, START_UP);
    let before = moved(&world, &apps);
    let time = play(&mut world, client, &mut apps, TIME);
    let rate = mbit(moved(&world, &apps) - before, time);
    let share = rate * 1e6 / scenario.reference_rate(direction).bps() as f64;
    println!("{name}, {count} {direction:?}: {rate:.1} Mbit/s, share {share:.3}");
    share
}

/// Random numbers (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % most
    }
}

/// Connections of all sizes over two lossy links that come and go; some are broken off by the app. Every byte
/// is compared where it arrives.
#[test]
fn connections_over_links_that_come_and_go_bring_every_byte() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (count, seed) = (number("MPVPN_STREAMS").unwrap_or(120), number("MPVPN_STREAMS_SEED").unwrap_or(1));
    let mut random = Random(seed);
    let (mut world, client) = world(&[(80, 8 * MS), (50, 25 * MS)]);
    let mut apps: Vec<App> = Vec::new();
    let (mut begun, mut done, mut broken) = (0u64, 0u64, 0u64);
    let mut silent = [world.now; 2];
    let start = world.now;
    while done + broken < count {
        assert!(world.now < start + Duration::from_secs(3) * count as u32, "{done} of {count} are over");
        if begun < count && apps.len() < 8 {
            let from = SocketAddr::new(world.address(client, true), 20_000 + begun as u16 % 30_000);
            // From nothing to 50 MB, most of them small.
            let (up, down) = (4 + random.below(18), random.below(3));
            let (up, megabytes) = match random.below(100) {
                0 => (random.below(50_000_000), 1),
                1 => (0, 1 + random.below(50) as u16),
                _ => (random.below(1 << up), 1 + random.below(1 << down) as u16),
            };
            apps.push(App::new(from, ([203, 0, 113, 9], megabytes).into(), up));
            begun += 1;
        }
        for (at, link) in world.machines[client].links.values_mut().enumerate() {
            if world.now > silent[at] + Duration::from_secs(2) && random.below(1000) == 0 {
                silent[at] = world.now + Duration::from_millis(random.below(2000));
            }
            let loss = if world.now < silent[at] { 1.0 } else { 0.01 };
            (link.up.loss, link.down.loss) = (loss, loss);
        }
        step(&mut world, client, &mut apps);
        if !apps.is_empty() && random.below(2000) == 0 {
            let at = random.below(apps.len() as u64) as usize;
            apps[at].reset_connection();
            step(&mut world, client, &mut apps);
            apps.remove(at);
            broken += 1;
        }
        let up_count = world.machines[client].up_count;
        apps.retain(|app| {
            assert!(!app.reset, "a connection was reset, the tunnel came up {up_count} times");
            let over = app.is_over();
            if over {
                assert_eq!(app.received_bytes % 1_000_000, 0);
                done += 1;
            }
            !over
        });
    }
    assert_eq!(world.machines[client].down_count, 0);
    let all =
        |world: &World| world.destinations.iter().filter(|other| other.ended && !other.closed).count() as u64;
    // The end of the last connection may be under way: an app has its acknowledgement from the client.
    let end = world.now + Duration::from_secs(5);
    while all(&world) < done && world.now < end {
        step(&mut world, client, &mut apps);
    }
    assert!(all(&world) >= done, "{} destinations got all, {done} connections ended well", all(&world));
}

/// One connection each way over the links of a scenario, and the share of what they carry together that it
/// gets at least. Headers take 4 to 5 %.
macro_rules! fills {
    ($($(#[$attribute:meta])* $name:ident $least:literal)*) => {
        $($(#[$attribute])*
        #[test]
        fn $name() {
            for direction in [Direction::Down, Direction::Up] {
                let share = share(stringify!($name), 1, direction);
                assert!(share > $least, "{direction:?}: {share:.3}");
            }
        })*
    };
}

fills! {
    #[ignore = "long: ./dev test all plays it"] fast_slow 1.02
    #[ignore = "long: ./dev test all plays it"] two_100_far 1.01
    #[ignore = "long: ./dev test all plays it"] lte_leo 0.90
    #[ignore = "long: ./dev test all plays it"] loss_10 0.92
    asym_jitter 0.91
    lossy 0.92
    dual_lte 0.90
}

/// The transport of each flow of a machine and the reason, by port.
fn transports(world: &World, client: usize) -> Vec<(u16, FlowTransport, FlowModeReason, u64, u64)> {
    let flows = world.machines[client].client.flows(world.now);
    let mut transports: Vec<_> = flows
        .iter()
        .map(|flow| (flow.key.src_port, flow.transport, flow.why, flow.up_bytes, flow.down_bytes))
        .collect();
    transports.sort_by_key(|flow| flow.0);
    transports
}

#[test]
fn a_client_knows_of_each_flow_how_it_travels_and_why() {
    let (mut world, client) = world(&[(100, 10 * MS)]);
    assert_eq!(transports(&world, client), []);
    let refused = SocketAddr::from(([203, 0, 113, 9], 7));
    world.refused_targets = vec![(refused.into(), ProxyError::Prohibited)];
    let mut apps = apps(&world, client, 1, 2, 1000);
    apps.push(App::new(SocketAddr::new(world.address(client, true), 50_000), refused, 0));
    for _ in 0..120 {
        step(&mut world, client, &mut apps);
    }
    let all = transports(&world, client);
    let [
        (
            40_000,
            FlowTransport::Stream(ConnectionState::AppEnded),
            FlowModeReason::Translated,
            1000,
            down @ 1..,
        ),
    ] = all[..]
    else {
        panic!("{all:?}")
    };
    assert!(down < 2_000_000, "{down}");
    // The app asks again, and now as packets.
    apps[1] = App::new(SocketAddr::new(world.address(client, true), 50_000), refused, 0);
    step(&mut world, client, &mut apps);
    let asks = world.packet_to_target(client, &[0; 72]);
    world.client_sends(client, asks);
    let answers = world.packet_to_client(client, &[0; 172]);
    world.server_sends(answers);
    world.run(100 * MS);
    let all = transports(&world, client);
    assert_eq!(all[0], (4000, FlowTransport::Packets, FlowModeReason::NotTcp, 100, 200));
    assert!(
        matches!(all[2], (50_000, FlowTransport::Packets, FlowModeReason::ServerRefused, 40.., 0)),
        "{all:?}"
    );
    assert_eq!(all.len(), 3);
}
