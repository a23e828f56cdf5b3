//! Links of several tiers, limited and metered ones, in simulated time.

use crate::world::{MS, SERVER, TOKEN, World};
use mpvpn_class::{CRITICAL, Rule, Rules, Share};
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::{ClassProfile, ClientState, LinkPolicy, TunnelMode};
use mpvpn_types::{BitRate, CongestionControl, Duration, LinkId, Tier, Weight};

const SECOND: Duration = Duration::from_secs(1);

/// The direction of the load.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    Up,
    Down,
}

fn tier(tier: Tier) -> LinkPolicy {
    LinkPolicy { tier, ..LinkPolicy::default() }
}

/// A client with a link of 20 Mbit/s and others of 50 with these policies, whose tunnel is up.
fn with_links(scheduler: Scheduler, policies: &[LinkPolicy]) -> (World, usize) {
    let mut world = World::new();
    let mut links = vec![(50, 15 * MS); policies.len()];
    links[0] = (20, 10 * MS);
    let client = world.add(TOKEN, scheduler, &links);
    for (id, policy) in policies.iter().enumerate() {
        set(&mut world, client, id as u16, *policy);
    }
    world.up(client);
    world.run(2 * SECOND);
    (world, client)
}

fn set(world: &mut World, client: usize, link: u16, policy: LinkPolicy) {
    let now = world.now;
    world.machines[client].client.set_link(now, LinkId(link), policy);
}

/// Offers `mbps` of large UDP packets in one direction; returns the rate of each link in it (Mbit/s of IP
/// packets).
fn flood(world: &mut World, client: usize, direction: Direction, mbps: f64, time: Duration) -> Vec<f64> {
    let carried = |world: &World| -> Vec<u64> {
        let wire = |link: &crate::world::Link| {
            if direction == Direction::Up { link.up.carried } else { link.down.carried }
        };
        world.machines[client].links.values().map(wire).collect()
    };
    let before = carried(world);
    let (payload, end) = ([7; 1072], world.now + time);
    let (start, mut sent) = (world.now, 0.0);
    while world.now < end {
        while sent < mbps * (world.now - start).as_secs_f64() * 1e6 / 8.0 {
            match direction {
                Direction::Up => {
                    let packet = world.packet_to_target(client, &payload);
                    world.client_sends(client, packet);
                }
                Direction::Down => {
                    let packet = world.packet_to_client(client, &payload);
                    world.server_sends(packet);
                }
            }
            sent += 1100.0;
        }
        world.run(MS);
    }
    let rate = |(after, before): (u64, &u64)| (after - before) as f64 * 8.0 / 1e6 / time.as_secs_f64();
    carried(world).into_iter().zip(&before).map(rate).collect()
}

fn states(world: &mut World, client: usize) -> Vec<(u16, PathState, String)> {
    let now = world.now;
    let report = world.machines[client].client.report(now);
    let mut states: Vec<_> = report
        .paths
        .into_iter()
        .map(|path| (path.link.expect("a link").0, path.state, path.reason))
        .collect();
    states.sort_by_key(|(link, ..)| *link);
    states
}

/// Acknowledgements and heartbeats, no data.
const QUIET: f64 = 0.2;

#[test]
fn overflow_is_used_while_the_primary_link_is_full_and_given_back() {
    for direction in [Direction::Up, Direction::Down] {
        let policies = [tier(Tier::Primary), tier(Tier::Overflow), tier(Tier::Backup)];
        let (mut world, client) = with_links(Scheduler::Auto, &policies);
        let rates = flood(&mut world, client, direction, 10.0, 3 * SECOND);
        assert!(rates[1] < QUIET && rates[2] < QUIET, "{direction:?}: {rates:?} where the primary is enough");
        assert_eq!(
            states(&mut world, client)[1..],
            [
                (1, PathState::Standby, "overflow not needed".to_owned()),
                (2, PathState::Standby, "a better link works".to_owned())
            ]
        );
        flood(&mut world, client, direction, 40.0, 3 * SECOND);
        let rates = flood(&mut world, client, direction, 40.0, 2 * SECOND);
        assert!(rates[0] > 17.0, "{direction:?}: {rates:?}: the primary is not filled first");
        assert!((17.0..27.0).contains(&rates[1]), "{direction:?}: {rates:?}: what is too much overflows");
        assert!(rates[2] < QUIET, "{direction:?}: {rates:?}: no backup while a better link works");
        flood(&mut world, client, direction, 10.0, 9 * SECOND);
        let rates = flood(&mut world, client, direction, 10.0, 2 * SECOND);
        assert!(rates[1] < QUIET, "{direction:?}: {rates:?}: not given back");
        assert_eq!(states(&mut world, client)[1].1, PathState::Standby);
    }
}

#[test]
fn an_idle_tunnel_gives_overflow_back_too() {
    let (mut world, client) = with_links(Scheduler::Auto, &[tier(Tier::Primary), tier(Tier::Overflow)]);
    flood(&mut world, client, Direction::Up, 40.0, 2 * SECOND);
    assert_eq!(states(&mut world, client)[1].1, PathState::Active);
    world.run(10 * SECOND);
    assert_eq!(states(&mut world, client)[1].1, PathState::Standby);
}

#[test]
fn backup_is_used_only_while_nothing_better_works() {
    for metered in [false, true] {
        let backup = LinkPolicy { tier: Tier::Backup, metered, ..LinkPolicy::default() };
        let (mut world, client) = with_links(Scheduler::Auto, &[tier(Tier::Primary), backup]);
        for direction in [Direction::Up, Direction::Down] {
            let rates = flood(&mut world, client, direction, 40.0, 3 * SECOND);
            assert!(rates[1] < QUIET, "{direction:?}: {rates:?} with a primary that is full, but works");
        }
        // Queues that the load left make round trips long, and patience with them.
        world.send_both_ways(client, 3 * SECOND);
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        let (a, b) = world.send_both_ways(client, 3 * SECOND);
        assert!(a.max(b) <= 300 * MS, "gaps of {a:?} and {b:?}, metered: {metered}");
        for direction in [Direction::Up, Direction::Down] {
            let rates = flood(&mut world, client, direction, 10.0, 2 * SECOND);
            assert!(rates[1] > 9.0, "{direction:?}: {rates:?} without the primary");
        }
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.loss, link.down.loss) = (0.0, 0.0);
        world.send_both_ways(client, 2 * SECOND);
        for direction in [Direction::Up, Direction::Down] {
            let rates = flood(&mut world, client, direction, 10.0, 2 * SECOND);
            assert!(rates[1] < QUIET, "{direction:?}: {rates:?} with the primary back");
        }
        assert_eq!(world.machines[client].down_count, 0);
    }
}

#[test]
fn never_carries_nothing_and_may_become_another_tier() {
    let (mut world, client) = with_links(Scheduler::Auto, &[tier(Tier::Primary), tier(Tier::Never)]);
    let packets = |world: &World, link: u16| {
        let link = &world.machines[client].links[&LinkId(link)];
        link.up.passed + link.down.passed
    };
    // The world switches links on before the test sets their policies.
    let before = packets(&world, 1);
    assert!(before <= 2, "{before} packets at the start");
    flood(&mut world, client, Direction::Up, 40.0, 2 * SECOND);
    assert_eq!(packets(&world, 1), before, "not even a question on a link that is never to be used");

    set(&mut world, client, 1, tier(Tier::Primary));
    world.run(2 * SECOND);
    let rates = flood(&mut world, client, Direction::Up, 40.0, 2 * SECOND);
    assert!(rates[1] > 10.0, "{rates:?}");

    set(&mut world, client, 1, tier(Tier::Never));
    world.run(SECOND);
    let before = packets(&world, 1);
    let rates = flood(&mut world, client, Direction::Down, 40.0, 2 * SECOND);
    assert_eq!((packets(&world, 1), world.machines[client].down_count), (before, 0), "{rates:?}");
    assert_eq!(states(&mut world, client).len(), 1);

    // The first path of the connection too, and back again.
    set(&mut world, client, 1, tier(Tier::Primary));
    world.run(2 * SECOND);
    set(&mut world, client, 0, tier(Tier::Never));
    let (a, b) = world.send_both_ways(client, SECOND);
    assert!(a.max(b) <= 100 * MS, "{a:?} {b:?}");
    let before = packets(&world, 0);
    flood(&mut world, client, Direction::Down, 40.0, SECOND);
    assert_eq!((packets(&world, 0), world.machines[client].down_count), (before, 0));
    set(&mut world, client, 0, tier(Tier::Primary));
    world.run(3 * SECOND);
    assert_eq!(states(&mut world, client).len(), 2);
}

#[test]
fn the_only_link_is_left_when_it_is_never_to_be_used() {
    let (mut world, client) = with_links(Scheduler::Auto, &[tier(Tier::Primary)]);
    let address = world.address(client, true);
    set(&mut world, client, 0, tier(Tier::Never));
    world.run(SECOND);
    let link = &world.machines[client].links[&LinkId(0)];
    let before = link.up.passed;
    world.run(30 * SECOND);
    assert_eq!(world.machines[client].links[&LinkId(0)].up.passed, before);
    assert_eq!(world.machines[client].down_count, 1);
    set(&mut world, client, 0, tier(Tier::Primary));
    world.up(client);
    assert_eq!(world.address(client, true), address);
}

#[test]
fn a_cap_is_kept_to_and_can_be_lifted() {
    let mbit = |n: u64| Some(BitRate::from_bps(n * 1_000_000));
    let capped = LinkPolicy { up: mbit(6), down: mbit(8), ..LinkPolicy::default() };
    let (mut world, client) = with_links(Scheduler::Auto, &[capped]);
    for (direction, cap) in [(Direction::Up, 6.0), (Direction::Down, 8.0), (Direction::Up, 6.0)] {
        flood(&mut world, client, direction, 30.0, SECOND);
        let rates = flood(&mut world, client, direction, 30.0, 4 * SECOND);
        assert!((cap * 0.95..=cap * 1.02).contains(&rates[0]), "{direction:?}: {rates:?} at a cap of {cap}");
    }
    let states = states(&mut world, client);
    assert_eq!(states[0].1, PathState::Active);
    set(&mut world, client, 0, LinkPolicy::default());
    for direction in [Direction::Up, Direction::Down] {
        flood(&mut world, client, direction, 30.0, 2 * SECOND);
        let rates = flood(&mut world, client, direction, 30.0, 2 * SECOND);
        assert!(rates[0] > 18.0, "{direction:?}: {rates:?} without the cap");
    }
    set(&mut world, client, 0, LinkPolicy { up: mbit(2), down: mbit(100), ..LinkPolicy::default() });
    for (direction, rate) in [(Direction::Up, 1.9..2.04), (Direction::Down, 18.0..20.1)] {
        flood(&mut world, client, direction, 30.0, SECOND);
        let rates = flood(&mut world, client, direction, 30.0, 4 * SECOND);
        assert!(rate.contains(&rates[0]), "{direction:?}: {rates:?}, expected {rate:?}");
    }
}

#[test]
fn packets_beyond_the_cap_of_a_link_use_other_links() {
    let cap = BitRate::from_bps(5_000_000);
    let capped = LinkPolicy { up: Some(cap), ..LinkPolicy::default() };
    let (mut world, client) = with_links(Scheduler::Auto, &[capped, tier(Tier::Overflow)]);
    flood(&mut world, client, Direction::Up, 20.0, SECOND);
    let rates = flood(&mut world, client, Direction::Up, 20.0, 4 * SECOND);
    assert!((4.7..=5.1).contains(&rates[0]) && (14.0..=17.0).contains(&rates[1]), "{rates:?}");
}

#[test]
fn both_ends_send_over_links_by_weight() {
    let weighs = |weight| LinkPolicy { weight: Weight::new(weight).unwrap(), ..LinkPolicy::default() };
    let (mut world, client) = with_links(Scheduler::Weighted, &[weighs(3), weighs(1)]);
    for (weights, expected) in [([3, 1], 3.0), ([1, 2], 0.5)] {
        for (link, weight) in (0..).zip(weights) {
            set(&mut world, client, link, weighs(weight));
        }
        for direction in [Direction::Up, Direction::Down] {
            flood(&mut world, client, direction, 8.0, SECOND);
            let rates = flood(&mut world, client, direction, 8.0, 4 * SECOND);
            let ratio = rates[0] / rates[1];
            assert!(
                (expected * 0.85..expected * 1.15).contains(&ratio),
                "{direction:?}, {weights:?}: {rates:?}"
            );
        }
    }
}

#[test]
fn an_idle_metered_link_carries_few_packets() {
    let metered = LinkPolicy { metered: true, ..LinkPolicy::default() };
    let (mut world, client) = with_links(Scheduler::Auto, &[metered]);
    world.run(60 * SECOND);
    let passed = |world: &World| {
        let link = &world.machines[client].links[&LinkId(0)];
        (link.up.passed, link.down.passed)
    };
    let before = passed(&world);
    world.run(100 * SECOND);
    let after = passed(&world);
    let (up, down) = (after.0 - before.0, after.1 - before.1);
    assert!((4..=12).contains(&up) && (4..=12).contains(&down), "{up} up, {down} down in 100 idle seconds");
    let (a, b) = world.send_both_ways(client, 3 * SECOND);
    assert!(a.max(b) < 50 * MS, "{a:?} {b:?} after the rest");
    let now = world.now;
    assert_eq!(world.machines[client].client.report(now).state, ClientState::Up);
    assert_eq!(world.machines[client].down_count, 0);
}

#[test]
fn a_metered_backup_is_left_alone_while_the_primary_is_busy() {
    let backup = LinkPolicy { tier: Tier::Backup, metered: true, ..LinkPolicy::default() };
    let (mut world, client) = with_links(Scheduler::Auto, &[tier(Tier::Primary), backup]);
    world.run(5 * SECOND);
    let carried = |world: &World| {
        let link = &world.machines[client].links[&LinkId(1)];
        link.up.carried + link.down.carried
    };
    let before = carried(&world);
    world.send_both_ways(client, 60 * SECOND);
    let bytes = carried(&world) - before;
    assert!(bytes < 4000, "{bytes} bytes in a minute on a link that nobody needs");
    assert_eq!(states(&mut world, client)[1].1, PathState::Standby);
}

#[test]
fn failover_goes_through_the_tiers() {
    let policies = [tier(Tier::Backup), tier(Tier::Primary), tier(Tier::Primary)];
    let (mut world, client) = with_links(Scheduler::Failover, &policies);
    let used = |world: &mut World| {
        world.send_both_ways(client, SECOND);
        let states = states(world, client);
        let active: Vec<_> = states
            .iter()
            .filter(|(_, state, _)| *state == PathState::Active)
            .map(|(link, ..)| *link)
            .collect();
        active
    };
    assert_eq!(used(&mut world), [1]);
    for (down, next) in [(1, 2), (2, 0)] {
        let now = world.now;
        let machine = &mut world.machines[client];
        machine.client.link_down(now, LinkId(down));
        let link = machine.links.get_mut(&LinkId(down)).unwrap();
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        assert_eq!(used(&mut world), [next]);
    }
    let now = world.now;
    let machine = &mut world.machines[client];
    for id in [1, 2] {
        let link = machine.links.get_mut(&LinkId(id)).unwrap();
        (link.up.loss, link.down.loss) = (0.0, 0.0);
        machine.client.link_up(now, LinkId(id), SERVER.parse().unwrap());
    }
    world.run(SECOND);
    assert_eq!(used(&mut world), [1]);
}

/// The congestion controllers of the server's paths to its clients, one entry for each path.
fn controllers_of_the_server(world: &mut World) -> Vec<CongestionControl> {
    let now = world.now;
    let reports = world.servers[0].report(now);
    let controllers = reports.iter().flat_map(|report| report.paths.iter().map(|path| path.view.cc));
    controllers.collect()
}

#[test]
fn a_path_that_is_validated_after_its_link_lost_its_carrier_is_down() {
    // The carrier is lost at each moment of the opening of the path; packets that have left the server before
    // still arrive.
    let mut validated_later = 0;
    for ms in 0..200 {
        let mut world = World::new();
        let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS), (50, 15 * MS)]);
        world.run(ms * MS);
        let is_open = |(link, ..): &(u16, PathState, String)| *link == 1;
        let before = states(&mut world, client).iter().any(is_open);
        let (now, machine) = (world.now, &mut world.machines[client]);
        machine.link_down(now, LinkId(1));
        let link = machine.links.get_mut(&LinkId(1)).expect("a link");
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        world.run(20 * SECOND);
        let paths: Vec<_> = states(&mut world, client).into_iter().filter(is_open).collect();
        validated_later += u32::from(!before && !paths.is_empty());
        let is_down = |(_, state, reason): &(u16, PathState, String)| {
            *state == PathState::Down && reason == "no carrier"
        };
        assert!(paths.iter().all(is_down), "lost after {ms} ms: {paths:?}");
    }
    assert!(validated_later > 0, "no path was validated after the carrier was lost");
}

#[test]
fn a_connection_that_is_made_while_a_link_has_no_carrier_gets_its_path_when_the_link_is_back() {
    let (mut world, client) = with_links(Scheduler::Auto, &[LinkPolicy::default(); 2]);
    let working = |world: &mut World| -> Vec<(u16, PathState)> {
        states(world, client).into_iter().map(|(link, state, _)| (link, state)).collect()
    };
    let set_loss = |world: &mut World, loss: f64| {
        let link = world.machines[client].links.get_mut(&LinkId(1)).expect("a link");
        (link.up.loss, link.down.loss) = (loss, loss);
    };
    world.restart_server();
    world.run(500 * MS);
    let now = world.now;
    let state = world.machines[client].client.report(now).state;
    assert_eq!(state, ClientState::Up, "nothing has been missed on the connection to the server before");
    world.machines[client].link_down(now, LinkId(1));
    set_loss(&mut world, 1.0);
    world.send_both_ways(client, 5 * SECOND);
    assert_eq!(world.machines[client].up_count, 2, "there is a new connection");
    assert_eq!(working(&mut world), [(0, PathState::Active)], "no path is made over the other link");
    set_loss(&mut world, 0.0);
    let now = world.now;
    world.machines[client].link_up(now, LinkId(1));
    world.run(SECOND);
    assert_eq!(working(&mut world), [(0, PathState::Active), (1, PathState::Active)]);
}

#[test]
fn the_server_uses_the_congestion_controller_that_the_client_asks_for() {
    let class = |name: &str| ClassProfile { name: name.to_owned(), ..ClassProfile::default() };
    let critical = || ClassProfile { share: Share { first: true, ..Share::default() }, ..class("critical") };
    for (cc, mode, classes) in [
        (CongestionControl::Cubic, TunnelMode::Packets, vec![]),
        (CongestionControl::Bbr, TunnelMode::Packets, vec![]),
        (CongestionControl::Cubic, TunnelMode::Packets, vec![class("default"), critical()]),
        (CongestionControl::Cubic, TunnelMode::RelaysOnly, vec![]),
    ] {
        let mut world = World::new();
        let connections = classes.len().max(1);
        (world.mode, world.classes) = (mode, classes);
        world.class_rules =
            Rules::new(vec![Rule { ports: vec![5060..=5060], class: CRITICAL, ..Rule::default() }]);
        let links = ["50mbit,10ms", "20mbit,30ms"].map(|link| link.parse().unwrap());
        let client = world.add_over(None, TOKEN, Scheduler::Auto, cc, &links);
        world.up(client);
        if connections > 1 {
            world.wake_classes(client, &[(4000, 5060)], SECOND);
        }
        world.run(2 * SECOND);
        let case = format!("{cc} as {mode:?} in {connections} connections");
        assert_eq!(controllers_of_the_server(&mut world), vec![cc; 2 * connections], "{case}");
        let report = world.machines[client].client.report(world.now);
        assert_eq!(report.peer_cc, Some(cc), "{case}");
        assert!(report.paths.iter().all(|path| path.view.cc == cc), "{case}");
    }
}

#[test]
fn the_server_marks_its_packets_as_the_link_says_and_those_of_a_class_as_that_says() {
    let class = |dscp| ClassProfile { name: "default".to_owned(), dscp, ..ClassProfile::default() };
    let (expedited, low_effort) = (46, 1);
    for (classes, [marked, unmarked]) in [
        (vec![], [expedited, 0]),
        (vec![class(None)], [expedited, 0]),
        (vec![class(Some(low_effort))], [low_effort; 2]),
        (vec![class(Some(0))], [0; 2]),
    ] {
        let mut world = World::new();
        world.classes = classes;
        let client = world.add(TOKEN, Scheduler::Balanced, &[(50, 10 * MS); 2]);
        set(&mut world, client, 0, LinkPolicy { dscp: expedited, ..LinkPolicy::default() });
        world.up(client);
        world.run(SECOND);
        let marks = |world: &mut World| {
            for link in world.machines[client].links.values_mut() {
                link.down.marks.clear();
            }
            flood(world, client, Direction::Down, 20.0, SECOND);
            let links = world.machines[client].links.values();
            links.map(|link| link.down.marks.keys().copied().collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let case = format!("class {:?}", world.classes.first().map(|class| class.dscp));
        assert_eq!(marks(&mut world), [vec![marked], vec![unmarked]], "{case}");
        set(&mut world, client, 0, LinkPolicy::default());
        world.run(SECOND);
        assert_eq!(marks(&mut world), [vec![unmarked], vec![unmarked]], "{case}, changed later");
    }
}
