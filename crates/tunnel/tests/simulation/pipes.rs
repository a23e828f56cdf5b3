//! Several paths over one link: they get past shapers of single flows, and do no harm elsewhere.

use std::net::SocketAddr;

use crate::world::{MS, TOKEN, World, tcp::Flow};
use mpvpn_lab::{Direction, LinkSpec};
use mpvpn_path::{PathState, Scheduler};
use mpvpn_tunnel::LinkPolicy;
use mpvpn_types::{BitRate, CongestionControl, Duration, Instant, LinkId, Tier};

const SECOND: Duration = Duration::from_secs(1);

/// A client whose links have so many pipes, and a second for all of them to open.
fn start(pipes: u8, scheduler: Scheduler, cc: CongestionControl, links: &[&str]) -> (World, usize) {
    let mut world = World::new();
    world.pipes = pipes;
    let links: Vec<LinkSpec> = links.iter().map(|link| link.parse().unwrap()).collect();
    let client = world.add_over(None, TOKEN, scheduler, cc, &links);
    world.up(client);
    world.run(SECOND);
    (world, client)
}

/// The goodput of TCP flows, and the delay of small packets beside them.
pub struct Found {
    pub mbit: f64,
    pub ping: Duration,
}

/// The goodput of TCP flows in one direction in `time`, after the flows have grown.
pub fn carry(world: &mut World, client: usize, flows: u16, direction: Direction, time: Duration) -> Found {
    let mtu = world.machines[client].mtu.unwrap();
    let (near, far) = (world.address(client, true), SocketAddr::from(([203, 0, 113, 9], 5201)));
    let flow = |number| {
        let near = SocketAddr::new(near, 40_000 + number);
        if direction == Direction::Up { Flow::new(near, far, mtu) } else { Flow::new(far, near, mtu) }
    };
    let mut flows: Vec<Flow> = (0..flows).map(flow).collect();
    // Where slow start ends is chance, and a single flow then grows for seconds (RFC 9438, section 4.2).
    let start = world.now + if flows.len() == 1 { 9 * SECOND } else { 2 * SECOND };
    let (mut before, mut sent, mut delays) = (None, Vec::<Instant>::new(), Vec::new());
    for step in 0.. {
        let now = world.now;
        if now >= start + time {
            break;
        }
        let arrived = std::mem::take(&mut world.machines[client].received);
        for (at, packet) in arrived.into_iter().chain(std::mem::take(&mut world.received_by_server)) {
            let flow = flows.iter_mut().find_map(|flow| flow.is_mine(&packet).map(|data| (flow, data)));
            match flow {
                Some((flow, false)) => flow.acknowledged(now, &packet),
                Some((flow, true)) => match (flow.receive(&packet), direction) {
                    (None, _) => {}
                    (Some(answer), Direction::Up) => world.server_sends(answer),
                    (Some(answer), _) => world.client_sends(client, answer),
                },
                None => {
                    let number = u32::from_be_bytes(packet[28..32].try_into().unwrap());
                    delays.push(at - sent[number as usize]);
                }
            }
        }
        let mut packets: Vec<_> = flows.iter_mut().flat_map(|flow| flow.send(now)).collect();
        if step % 10 == 0 {
            let number = (sent.len() as u32).to_be_bytes();
            sent.push(now);
            packets.push(if direction == Direction::Up {
                world.packet_to_target(client, &number)
            } else {
                world.packet_to_client(client, &number)
            });
        }
        for packet in packets {
            match direction {
                Direction::Up => world.client_sends(client, packet),
                _ => world.server_sends(packet),
            }
        }
        if now >= start {
            before.get_or_insert_with(|| flows.iter().map(Flow::delivered).sum::<u64>());
        }
        world.run(MS);
    }
    let bytes = flows.iter().map(Flow::delivered).sum::<u64>() - before.unwrap_or(0);
    delays.sort_unstable();
    // Packets that are still in flight belong to this measurement.
    world.run(SECOND);
    world.machines[client].received.clear();
    world.received_by_server.clear();
    Found { mbit: bytes as f64 * 8e-6 / time.as_secs_f64(), ping: delays[delays.len() / 2] }
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn four_pipes_are_like_one_where_nobody_shapes_sessions() {
    for (cc, flows, direction) in [
        (CongestionControl::Bbr, 1, Direction::Down),
        (CongestionControl::Bbr, 8, Direction::Down),
        (CongestionControl::Bbr, 8, Direction::Up),
        (CongestionControl::Cubic, 8, Direction::Up),
    ] {
        let [one, four] = [1, 4].map(|pipes| {
            let (mut world, client) = start(pipes, Scheduler::Auto, cc, &["100mbit,10ms,queue=60ms"]);
            carry(&mut world, client, flows, direction, 3 * SECOND)
        });
        println!(
            "{cc}, {flows} flows {direction:?}: {:.1} and {:.1} Mbit/s, {:?} and {:?}",
            one.mbit, four.mbit, one.ping, four.ping
        );
        // CUBIC fills a queue until it overflows, and hears of that later where packets are spread over
        // paths: more is lost then and its delay grows, but never beyond the link's queue. A single flow
        // waits in this end's queue on one path, which pings overtake, and in the link's on four.
        let (least, most) = match (cc, flows) {
            (CongestionControl::Bbr, 1) => (0.97, one.ping + 6 * MS),
            (CongestionControl::Bbr, _) => (0.97, one.ping + 4 * MS),
            _ => (0.94, 70 * MS),
        };
        assert!(
            four.mbit >= least * one.mbit,
            "{cc}, {flows}, {direction:?}: {} of {} Mbit/s",
            four.mbit,
            one.mbit
        );
        assert!(four.ping <= most, "{cc}, {flows}, {direction:?}: {:?}, {:?}", four.ping, one.ping);
    }
}

#[test]
fn four_paths_get_past_a_shaper_of_single_flows() {
    let rate = |pipes, direction| {
        let link = ["50mbit,10ms,queue=60ms,session_rate=13mbit"];
        let (mut world, client) = start(pipes, Scheduler::Auto, CongestionControl::Bbr, &link);
        carry(&mut world, client, 8, direction, 3 * SECOND).mbit
    };
    for direction in [Direction::Down, Direction::Up] {
        let (one, four) = (rate(1, direction), rate(4, direction));
        println!("{direction:?}: {one:.1} and {four:.1} Mbit/s");
        assert!(one < 13.0, "{one} Mbit/s");
        assert!(four > 0.9 * 0.92 * 50.0, "{four} Mbit/s {direction:?}");
    }
}

#[test]
fn a_pipe_that_falls_silent_is_hardly_missed() {
    let (mut world, client) = start(4, Scheduler::Auto, CongestionControl::Bbr, &["50mbit,10ms,queue=60ms"]);
    world.send_both_ways(client, SECOND);
    for silent in [0, 2] {
        let link = world.machines[client].links.get_mut(&LinkId(0)).unwrap();
        (link.up.silent, link.down.silent) = (Some(silent), Some(silent));
        let (down, up) = world.send_both_ways(client, 2 * SECOND);
        println!("pipe {silent}: gaps {down:?} and {up:?}");
        assert!(down.max(up) <= 150 * MS, "pipe {silent}: {down:?} and {up:?}");
        let now = world.now;
        let report = world.machines[client].client.report(now);
        let of = |pipe| {
            report.paths.iter().find(|path| path.link == Some(LinkId(0).with_path_index(pipe))).unwrap()
        };
        let works = (0..4).filter(|pipe| of(*pipe).state == PathState::Active).collect::<Vec<_>>();
        assert_eq!(works, (0..4).filter(|pipe| *pipe != silent).collect::<Vec<_>>());
        assert_eq!(world.machines[client].down_count, 0);
    }
}

#[test]
fn schedulers_take_all_pipes_of_a_link_for_one_path() {
    let links = ["20mbit,10ms,queue=60ms", "20mbit,10ms,queue=60ms"];
    let (mut world, client) = start(2, Scheduler::Failover, CongestionControl::Bbr, &links);
    let found = carry(&mut world, client, 4, Direction::Down, SECOND);
    assert!((15.0..20.0).contains(&found.mbit), "{} Mbit/s over one link at a time", found.mbit);
    let now = world.now;
    let report = world.machines[client].client.report(now);
    let active = report.paths.iter().filter(|path| path.state == PathState::Active);
    let active: Vec<LinkId> = active.filter_map(|path| path.link).collect();
    assert_eq!(active, [LinkId(0), LinkId(0).with_path_index(1)]);

    let (mut world, client) = start(4, Scheduler::Redundant, CongestionControl::Bbr, &links[..1]);
    let found = carry(&mut world, client, 4, Direction::Down, SECOND);
    assert!(found.mbit > 15.0, "{} Mbit/s: copies over the same link help nobody", found.mbit);
}

#[test]
fn pipes_share_the_caps_of_their_link_and_go_with_it() {
    let (mut world, client) =
        start(4, Scheduler::Auto, CongestionControl::Bbr, &["50mbit,10ms,queue=60ms", "5mbit,10ms"]);
    let cap = Some(BitRate::from_bps(10_000_000));
    let now = world.now;
    let say = |world: &mut World, link, policy| {
        for pipe in 0..4 {
            world.machines[client].client.set_link(now, LinkId(link).with_path_index(pipe), policy);
        }
    };
    say(&mut world, 1, LinkPolicy { tier: Tier::Backup, ..LinkPolicy::default() });
    say(&mut world, 0, LinkPolicy { up: cap, down: cap, ..LinkPolicy::default() });
    for direction in [Direction::Up, Direction::Down] {
        let found = carry(&mut world, client, 8, direction, 2 * SECOND);
        println!("{direction:?}: {:.2} Mbit/s at a cap of 10", found.mbit);
        assert!((7.8..10.0).contains(&found.mbit), "{direction:?}: {} Mbit/s at a cap of 10", found.mbit);
    }
    say(&mut world, 0, LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() });
    world.send_both_ways(client, SECOND);
    let now = world.now;
    let report = world.machines[client].client.report(now);
    assert!(report.paths.iter().all(|path| path.link.is_some_and(|link| link.uplink() == LinkId(1))));
    assert_eq!((report.paths.len(), world.machines[client].down_count), (4, 0));
}

#[test]
fn each_pipe_learns_where_the_server_sees_it() {
    let (mut world, client) = start(3, Scheduler::Auto, CongestionControl::Bbr, &["50mbit,10ms,queue=60ms"]);
    let now = world.now;
    let paths = world.machines[client].client.report(now).paths;
    let seen: Vec<_> = paths.iter().map(|path| path.view.observed.expect("the server tells")).collect();
    let mut ports: Vec<u16> = seen.iter().map(SocketAddr::port).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!((seen.len(), ports.len()), (3, 3), "{seen:?}");
    assert!(seen.iter().all(|address| address.ip() == seen[0].ip()), "{seen:?}");
}

#[test]
fn a_pipe_is_used_left_unused_and_closed_without_a_loss() {
    let (mut world, client) = start(2, Scheduler::Auto, CongestionControl::Bbr, &["50mbit,10ms,queue=60ms"]);
    let second = LinkId(0).with_path_index(1);
    let mut sent = 0u32;
    for tier in [Tier::Backup, Tier::Primary, Tier::Backup, Tier::Never] {
        let now = world.now;
        let policy = LinkPolicy { tier, ..LinkPolicy::default() };
        world.machines[client].client.set_link(now, second, policy);
        if tier == Tier::Never {
            world.machines[client].client.link_down(now, second);
        }
        for _ in 0..1000 {
            for _ in 0..2 {
                let mut payload = vec![0; 1000];
                payload[..4].copy_from_slice(&sent.to_be_bytes());
                let (up, down) =
                    (world.packet_to_target(client, &payload), world.packet_to_client(client, &payload));
                world.client_sends(client, up);
                world.server_sends(down);
                sent += 1;
            }
            world.run(MS);
        }
        let active = |world: &mut World| {
            let now = world.now;
            let paths = world.machines[client].client.report(now).paths;
            paths.iter().filter(|path| path.state == PathState::Active).count()
        };
        assert_eq!(active(&mut world), if tier == Tier::Primary { 2 } else { 1 }, "{tier}");
    }
    world.run(SECOND);
    let all = |packets: Vec<(Instant, Vec<u8>)>| {
        let number =
            |(_, packet): &(Instant, Vec<u8>)| u32::from_be_bytes(packet[28..32].try_into().unwrap());
        let mut numbers: Vec<u32> = packets.iter().map(number).collect();
        numbers.sort_unstable();
        numbers
    };
    let down = all(std::mem::take(&mut world.machines[client].received));
    let up = all(std::mem::take(&mut world.received_by_server));
    assert!(down == up && up == (0..sent).collect::<Vec<_>>(), "{} and {} of {sent}", down.len(), up.len());
}

#[test]
fn a_second_path_shows_its_gain_within_seconds() {
    let link = ["50mbit,20ms,queue=60ms,session_rate=13mbit"];
    for direction in [Direction::Down, Direction::Up] {
        let (mut world, client) = start(2, Scheduler::Auto, CongestionControl::Bbr, &link);
        let mut rates = Vec::new();
        for tier in [Tier::Backup, Tier::Primary, Tier::Backup, Tier::Primary] {
            let (now, policy) = (world.now, LinkPolicy { tier, ..LinkPolicy::default() });
            world.machines[client].client.set_link(now, LinkId(0).with_path_index(1), policy);
            rates.push(carry(&mut world, client, 8, direction, 3 * SECOND).mbit);
        }
        println!("{direction:?}: {rates:.1?} Mbit/s");
        let ratio = (rates[1] + rates[3]) / (rates[0] + rates[2]);
        assert!(ratio > 1.8, "{direction:?}: {rates:?}");
    }
}
