//! Repair without asking and copies, over links that lose packets, in simulated time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::world::{MS, TOKEN, World, tcp::Flow};
use mpvpn_lab::{ChannelParams, LinkSpec};
use mpvpn_packet::protocol;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{FecCounters, LinkPolicy, ResequencingCounters};
use mpvpn_types::{BitRate, CongestionControl, Duration, Fec, Instant, LinkId, Tier};

/// Bytes of payload of the packets.
const PAYLOAD: usize = 600;

/// No two packets of a test are the same.
static NUMBERS: AtomicU32 = AtomicU32::new(0);

/// A client over links of this rate (Mbit/s), one-way delay and loss.
fn world(fec: Fec, copies: u8, links: &[(u64, Duration)], loss: f64) -> (World, usize) {
    let mut world = World::new();
    (world.fec, world.copies) = (fec, copies);
    let client = world.add(TOKEN, Scheduler::Auto, links);
    world.up(client);
    lose(&mut world, client, loss);
    world.run(Duration::from_secs(1));
    (world, client)
}

fn lose(world: &mut World, client: usize, loss: f64) {
    for link in world.machines[client].links.values_mut() {
        (link.up.loss, link.down.loss) = (loss, loss);
    }
}

fn lanes(world: &mut World, client: usize) -> [ResequencingCounters; 2] {
    let now = world.now;
    let own = world.machines[client].client.report(now).resequencing.expect("numbered packets");
    let servers = world.servers[0].report(now);
    [own, servers[0].resequencing.expect("numbered packets")]
}

fn fec(world: &mut World, client: usize) -> [FecCounters; 2] {
    lanes(world, client).map(|lane| lane.fec.expect("groups"))
}

/// The packets of one direction.
#[derive(Default)]
struct Heard {
    sent: usize,
    /// How long each was under way.
    took: Vec<Duration>,
    twice: usize,
    /// All received packets.
    arrived: BTreeSet<u32>,
}

impl Heard {
    fn share(&self) -> f64 {
        self.took.len() as f64 / self.sent as f64
    }

    fn share_within(&self, time: Duration) -> f64 {
        self.took.iter().filter(|took| **took <= time).count() as f64 / self.sent as f64
    }
}

/// Sends `each` numbered packets a millisecond in both directions; returns those received by the server and
/// by the client.
fn talk(world: &mut World, client: usize, time: Duration, each: u32) -> [Heard; 2] {
    let end = world.now + time;
    world.machines[client].received.clear();
    world.received_by_server.clear();
    let mut sent: BTreeMap<u32, Instant> = BTreeMap::new();
    while world.now < end {
        for _ in 0..each {
            let number = NUMBERS.fetch_add(1, Relaxed);
            let payload = [&number.to_be_bytes()[..], &[7; PAYLOAD - 4]].concat();
            sent.insert(number, world.now);
            let (out, back) =
                (world.packet_to_target(client, &payload), world.packet_to_client(client, &payload));
            world.client_sends(client, out);
            world.server_sends(back);
        }
        world.run(MS);
    }
    world.run(Duration::from_secs(1));
    let judge = |arrivals: &[(Instant, Vec<u8>)]| {
        let mut heard = Heard { sent: sent.len(), ..Heard::default() };
        // Without a connection the server answers with ICMP.
        for (at, packet) in arrivals.iter().filter(|(_, packet)| packet[9] == protocol::UDP) {
            // Packets in order arrive as one packet with several payloads.
            for payload in packet[28..].chunks(PAYLOAD) {
                let number = u32::from_be_bytes(*payload.first_chunk().unwrap());
                let fresh = heard.arrived.insert(number);
                heard.twice += usize::from(!fresh);
                heard.took.extend(sent.get(&number).filter(|_| fresh).map(|sent| *at - *sent));
            }
        }
        heard
    };
    [judge(&world.received_by_server), judge(&world.machines[client].received)]
}

#[test]
fn packets_that_a_lossy_link_drops_are_restored_by_repair() {
    let (mut world, client) = world(Fec::Auto, 1, &[(50, 30 * MS)], 0.12);
    talk(&mut world, client, Duration::from_secs(6), 1);
    let before = fec(&mut world, client);
    let heard = talk(&mut world, client, Duration::from_secs(5), 1);
    let after = fec(&mut world, client);
    for (direction, heard) in heard.iter().enumerate() {
        assert!(heard.share() >= 0.995, "{} of the packets came", heard.share());
        assert_eq!(heard.twice, 0);
        // A retransmission takes 90 ms.
        let soon = heard.share_within(60 * MS);
        assert!(soon >= 0.97, "{soon} of the packets came without being sent again");
        let bytes = after[direction].repair_bytes - before[direction].repair_bytes;
        let share = bytes as f64 / (heard.sent * (PAYLOAD + 28)) as f64;
        assert!((0.05..=0.32).contains(&share), "{share} of the data is repair");
        let (here, there) = (after[direction], after[1 - direction]);
        assert!(there.recovered > 400, "{} were restored", there.recovered);
        assert!(
            here.recovered_by_peer > 400 && here.recovered_by_peer <= there.recovered,
            "{here:?} {there:?}"
        );
    }
}

#[test]
fn nothing_more_is_sent_on_links_that_lose_nothing() {
    let (mut world, client) = world(Fec::Auto, 1, &[(50, 15 * MS), (20, 25 * MS)], 0.0);
    let heard = talk(&mut world, client, Duration::from_secs(4), 2);
    for (heard, fec) in heard.iter().zip(fec(&mut world, client)) {
        assert_eq!((heard.share(), heard.twice), (1.0, 0));
        assert_eq!((fec.repair_packets, fec.protected, fec.max_repair_percent), (0, 0, 0));
    }
}

#[test]
fn repair_comes_with_the_loss_and_goes_with_it() {
    let (mut world, client) = world(Fec::Auto, 1, &[(50, 20 * MS)], 0.0);
    talk(&mut world, client, Duration::from_secs(5), 1);
    assert_eq!(fec(&mut world, client).map(|fec| fec.max_repair_percent), [0, 0]);
    lose(&mut world, client, 0.12);
    talk(&mut world, client, Duration::from_secs(4), 1);
    for fec in fec(&mut world, client) {
        assert!(fec.max_repair_percent >= 20, "{} % repair", fec.max_repair_percent);
    }
    lose(&mut world, client, 0.0);
    talk(&mut world, client, Duration::from_secs(10), 1);
    assert_eq!(fec(&mut world, client).map(|fec| fec.max_repair_percent), [0, 0]);
    let before = fec(&mut world, client).map(|fec| fec.repair_packets);
    talk(&mut world, client, Duration::from_secs(2), 1);
    assert_eq!(fec(&mut world, client).map(|fec| fec.repair_packets), before);
}

#[test]
fn without_fec_no_repair_is_sent() {
    let (mut world, client) = world(Fec::Off, 1, &[(50, 20 * MS)], 0.12);
    let heard = talk(&mut world, client, Duration::from_secs(3), 1);
    assert!(heard.iter().all(|heard| heard.share() > 0.99), "lost packets are sent again");
    assert!(lanes(&mut world, client).iter().all(|lane| lane.fec.is_none()));
}

#[test]
fn a_fixed_repair_rate_is_sent_at_any_loss() {
    let (mut world, client) = world(Fec::Fixed { data: 8, repair: 2 }, 1, &[(50, 20 * MS)], 0.0);
    let heard = talk(&mut world, client, Duration::from_secs(2), 4);
    for (heard, fec) in heard.iter().zip(fec(&mut world, client)) {
        assert_eq!((heard.share(), heard.twice, fec.max_repair_percent), (1.0, 0, 25));
        let share = fec.repair_packets as f64 / heard.sent as f64;
        assert!((0.24..0.26).contains(&share), "{share}");
        assert_eq!((fec.recovered, fec.unrecoverable), (0, 0));
    }
}

#[test]
fn groups_stay_on_one_of_several_pipes() {
    let mut world = World::new();
    (world.fec, world.pipes) = (Fec::Fixed { data: 10, repair: 3 }, 4);
    let client = world.add(TOKEN, Scheduler::Auto, &[(100, 10 * MS), (100, 10 * MS)]);
    world.up(client);
    world.run(Duration::from_secs(2));
    lose(&mut world, client, 0.05);
    let heard = talk(&mut world, client, Duration::from_secs(3), 8);
    for (heard, fec) in heard.iter().zip(fec(&mut world, client)) {
        assert!(heard.share() == 1.0 && heard.share_within(40 * MS) > 0.9, "{}", heard.share_within(40 * MS));
        assert_eq!(heard.twice, 0);
        assert!(fec.recovered > 800, "{fec:?}");
    }
}

/// Mbit/s that some TCP flows get through together, after a while.
fn download(world: &mut World, client: usize, flows: u16, warm: Duration, time: Duration) -> f64 {
    let mtu = world.machines[client].mtu.expect("an MTU");
    let far = SocketAddr::from(([203, 0, 113, 9], 5201));
    let near = |flow| SocketAddr::new(world.address(client, true), 40_000 + flow);
    let mut flows: Vec<Flow> = (0..flows).map(|flow| Flow::new(far, near(flow), mtu)).collect();
    let delivered = |flows: &[Flow]| flows.iter().map(Flow::delivered).sum::<u64>();
    let (start, mut counted) = (world.now, None);
    while world.now < start + warm + time {
        for (_, packet) in std::mem::take(&mut world.machines[client].received) {
            let flow = flows.iter_mut().find(|flow| flow.is_mine(&packet).is_some());
            if let Some(answer) = flow.and_then(|flow| flow.receive(&packet)) {
                world.client_sends(client, answer);
            }
        }
        for (_, packet) in std::mem::take(&mut world.received_by_server) {
            if let Some(flow) = flows.iter_mut().find(|flow| flow.is_mine(&packet).is_some()) {
                flow.acknowledged(world.now, &packet);
            }
        }
        for flow in &mut flows {
            for packet in flow.send(world.now) {
                world.server_sends(packet);
            }
        }
        if world.now >= start + warm {
            counted.get_or_insert_with(|| delivered(&flows));
        }
        world.run(MS);
    }
    (delivered(&flows) - counted.unwrap_or(0)) as f64 * 8e-6 / time.as_secs_f64()
}

#[test]
fn tcp_keeps_what_loss_and_repair_leave_of_several_links() {
    let (mut world, client) = world(Fec::Auto, 1, &[(30, 15 * MS), (30, 20 * MS), (30, 25 * MS)], 0.12);
    let mbit = download(&mut world, client, 4, Duration::from_secs(6), Duration::from_secs(6));
    let [_, fec] = fec(&mut world, client);
    assert!(fec.repair_packets > 1000, "{fec:?}");
    // Without the framing.
    let bar = 90.0 * 0.94 * (1.0 - 0.12 - 0.3) * 0.9;
    assert!(mbit >= bar, "{mbit} Mbit/s, expected {bar}");
}

#[test]
#[ignore = "long: ./dev test all plays it"]
fn a_full_path_gets_less_repair_and_keeps_its_mtu() {
    let mut world = World::new();
    (world.fec, world.pipes, world.ecn) = (Fec::Auto, 4, 2);
    let link: LinkSpec = "110mbit,10ms,queue=60ms,session_rate=30mbit,loss=12%".parse().unwrap();
    let client = world.add_over(
        None,
        TOKEN,
        Scheduler::Auto,
        CongestionControl::Bbr,
        &[link.clone(), link.clone(), link],
    );
    world.up(client);
    world.run(Duration::from_secs(3));
    let mtu = world.machines[client].mtu;
    let mbit = download(&mut world, client, 8, Duration::from_secs(5), Duration::from_secs(2));
    let [_, fec] = fec(&mut world, client);
    // 330 without losses and framing is 265.
    assert!(mbit >= 220.0, "{mbit} Mbit/s, {fec:?}");
    assert_eq!(world.machines[client].mtu, mtu);
    let each = |bytes: u64, packets: u64| bytes as f64 / packets as f64;
    // Where the MTU shrinks again and again it is half as long.
    assert!(each(fec.repair_bytes, fec.repair_packets) > 1000.0, "{fec:?}");
    assert!(each(fec.repair_packets, fec.protected) < 0.28, "{fec:?}");
}

#[test]
fn a_full_link_that_loses_nothing_by_itself_is_left_to_the_congestion_controller() {
    let (mut world, client) = world(Fec::Auto, 1, &[(20, 20 * MS)], 0.0);
    let mbit = download(&mut world, client, 1, Duration::from_secs(2), Duration::from_secs(6));
    assert!(mbit > 16.0, "{mbit}");
    for fec in fec(&mut world, client) {
        let share = fec.repair_packets as f64 / fec.protected.max(1) as f64;
        assert!(fec.repair_packets < 100, "{share} {fec:?}");
    }
}

#[test]
fn cubic_is_as_quick_with_repair_as_without() {
    let sent = |policy| {
        let mut world = World::new();
        world.fec = policy;
        let rate = Some(BitRate::from_bps(50_000_000));
        let params =
            ChannelParams { rate, delay: 20 * MS, mtu: Some(1500), loss: 0.05, ..ChannelParams::default() };
        let link = LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() };
        let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Cubic, &[link]);
        world.up(client);
        let mut before = 0;
        for n in 0..12_000 {
            while world.machines[client].client.backlog() < 100_000 {
                let packet = world.packet_to_target(client, &[0; 1300]);
                world.client_sends(client, packet);
            }
            world.run(MS);
            before = if n < 6000 { carried(&world, client)[0] } else { before };
        }
        (carried(&world, client)[0] - before) as f64 * 8e-6 / 6.0
    };
    let (bare, repaired) = (sent(Fec::Off), sent(Fec::Auto));
    println!("{bare:.1} Mbit/s without repair, {repaired:.1} with it");
    assert!(repaired > 40.0 && bare > 40.0, "{repaired} Mbit/s with repair, {bare} without");
}

fn carried(world: &World, client: usize) -> Vec<u64> {
    world.machines[client].links.values().map(|link| link.up.carried).collect()
}

#[test]
fn copies_leave_on_other_links_and_the_first_one_counts() {
    let links = [(20, 15 * MS), (20, 15 * MS), (20, 15 * MS), (20, 20 * MS)];
    for (copies, expected) in [(1, 0.87), (2, 0.98), (3, 0.996)] {
        let mut world = World::new();
        (world.copies, world.pipes) = (copies, 2);
        let client = world.add(TOKEN, Scheduler::Auto, &links);
        world.up(client);
        world.run(Duration::from_secs(2));
        let before = carried(&world, client);
        talk(&mut world, client, Duration::from_secs(1), 1);
        let after = carried(&world, client);
        let bytes: u64 = after.iter().zip(before).map(|(after, before)| after - before).sum();
        let share = bytes as f64 / (1_000 * (PAYLOAD + 28)) as f64 / f64::from(copies);
        assert!((0.95..1.35).contains(&share), "{share} of what {copies} copies take");
        lose(&mut world, client, 0.1);
        let heard = talk(&mut world, client, Duration::from_secs(3), 1);
        for (heard, lane) in heard.iter().zip(lanes(&mut world, client)) {
            assert_eq!(heard.twice, 0, "{copies} copies");
            let first = heard.share_within(35 * MS);
            assert!(first >= expected, "{first} came without being sent again, with {copies} copies");
            assert_eq!(lane.copies > 0, copies > 1);
        }
    }
}

#[test]
fn copies_go_over_a_backup_link_where_there_is_only_one_other() {
    let (mut world, client) = world(Fec::Off, 2, &[(20, 15 * MS), (20, 25 * MS)], 0.0);
    let backup = LinkPolicy { tier: Tier::Backup, ..LinkPolicy::default() };
    let now = world.now;
    world.machines[client].client.set_link(now, LinkId(1), backup);
    world.run(Duration::from_secs(1));
    for first in [true, false] {
        // Both ways at once, without a word.
        let link = world.machines[client].links.get_mut(&LinkId(u16::from(!first))).unwrap();
        (link.up.loss, link.down.loss) = (1.0, 1.0);
        let cut = talk(&mut world, client, Duration::from_secs(2), 1);
        lose(&mut world, client, 0.0);
        let back = talk(&mut world, client, Duration::from_secs(4), 1);
        for heard in cut.iter().chain(&back) {
            assert_eq!(heard.share(), 1.0, "the first link falls silent: {first}");
        }
    }
}

#[test]
fn more_copies_than_links_are_as_many_as_there_are_links() {
    let (mut world, client) = world(Fec::Off, 200, &[(20, 15 * MS), (20, 15 * MS)], 0.0);
    let heard = talk(&mut world, client, Duration::from_secs(1), 1);
    assert!(heard.iter().all(|heard| heard.share() == 1.0 && heard.twice == 0));
    for lane in lanes(&mut world, client) {
        assert!((900..=1100).contains(&lane.copies), "{}", lane.copies);
    }
}

#[test]
fn no_packet_comes_twice_where_a_connection_is_made_anew() {
    let (mut world, client) = world(Fec::Auto, 2, &[(20, 15 * MS), (20, 45 * MS)], 0.05);
    talk(&mut world, client, Duration::from_secs(2), 1);
    let mut arrived = [BTreeSet::new(), BTreeSet::new()];
    let mut hear = |world: &mut World, time| {
        for (arrived, heard) in arrived.iter_mut().zip(talk(world, client, time, 1)) {
            assert_eq!(heard.twice, 0, "within a few seconds");
            let before = arrived.len() + heard.arrived.len();
            arrived.extend(heard.arrived);
            assert_eq!(arrived.len(), before, "what came before came again");
        }
    };
    for _ in 0..4 {
        // Long enough for a new connection beside the old one.
        for link in world.machines[client].links.values_mut() {
            (link.up.held, link.down.held) = (Some(Vec::new()), Some(Vec::new()));
        }
        hear(&mut world, Duration::from_secs(2));
        let now = world.now;
        for link in world.machines[client].links.values_mut() {
            link.up.release_held(now);
            link.down.release_held(now);
        }
        hear(&mut world, Duration::from_secs(3));
    }
    let resumed = world.machines[client].client.report(world.now).resumed;
    assert!(resumed >= 3, "{resumed} times the session was taken up again");
    assert!(arrived.iter().all(|arrived| arrived.len() > 8000));
}
