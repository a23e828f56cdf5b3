//! The worlds. A world asserts nothing about what should come out of it: it only makes as many parts of the
//! program as possible send and deliver something. [`super`] compares the records.

use std::net::SocketAddr;

use mpvpn_class::{Rule, Rules as ClassRules, Share};
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_masque::connect::Authority;
use mpvpn_packet::{VnetHdr, tcp_flags};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ClassProfile, ClassSetup, ClientConfig, LinkPolicy, TunnelMode};
use mpvpn_types::{BitRate, ClassId, CongestionControl, Duration, Fec, LinkId, Portion, Tier, Weight};

use super::{SECOND, UNEQUAL, apps, datagrams, flows, lose, set, start, start_with_streams, tcp};
use crate::world::{
    MS, SERVER, TOKEN, World,
    record::Record,
    talk::{self, RelayedConnection},
};

fn scheduled(world: &mut World, scheduler: Scheduler) {
    let client = start(world, scheduler, CongestionControl::Bbr, &UNEQUAL);
    for (link, weight) in [(0, 1), (1, 2)] {
        set(
            world,
            client,
            link,
            LinkPolicy { weight: Weight::new(weight).unwrap(), ..LinkPolicy::default() },
        );
    }
    world.send_both_ways(client, SECOND / 2);
    datagrams(world, client, [8, 16], 1000, SECOND);
    let mut all = flows(world, client, 40_000, 2, 2);
    tcp(world, client, &mut all, 3 * SECOND);
    datagrams(world, client, [60, 60], 1200, SECOND / 2);
    world.run(2 * SECOND);
}

pub fn auto(world: &mut World) {
    scheduled(world, Scheduler::Auto);
}

pub fn minrtt(world: &mut World) {
    scheduled(world, Scheduler::MinRtt);
}

pub fn balanced(world: &mut World) {
    scheduled(world, Scheduler::Balanced);
}

pub fn weighted(world: &mut World) {
    scheduled(world, Scheduler::Weighted);
}

pub fn redundant(world: &mut World) {
    scheduled(world, Scheduler::Redundant);
}

pub fn flow(world: &mut World) {
    scheduled(world, Scheduler::Flow);
}

pub fn failover(world: &mut World) {
    scheduled(world, Scheduler::Failover);
}

pub fn cubic(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Cubic, &UNEQUAL);
    let mut all = flows(world, client, 40_000, 2, 2);
    tcp(world, client, &mut all, 3 * SECOND);
}

pub fn fec_auto(world: &mut World) {
    world.fec = Fec::Auto;
    let client = start(
        world,
        Scheduler::Auto,
        CongestionControl::Bbr,
        &["20mbit,30ms,mtu=1500", "20mbit,20ms,mtu=1500"],
    );
    lose(world, client, &[(0, 0.12, 0.12), (1, 0.05, 0.0)]);
    datagrams(world, client, [3, 3], 600, 3 * SECOND);
    let mut all = flows(world, client, 40_000, 1, 2);
    tcp(world, client, &mut all, 4 * SECOND);
    lose(world, client, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
    datagrams(world, client, [2, 2], 600, 6 * SECOND);
}

pub fn fec_fixed(world: &mut World) {
    (world.fec, world.pipes) = (Fec::Fixed { data: 8, repair: 2 }, 2);
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    lose(world, client, &[(0, 0.03, 0.03)]);
    datagrams(world, client, [5, 10], 700, 2 * SECOND);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, 2 * SECOND);
}

pub fn copies(world: &mut World) {
    world.copies = 2;
    let client =
        start(world, Scheduler::Auto, CongestionControl::Bbr, &["20mbit,15ms", "20mbit,20ms", "10mbit,40ms"]);
    lose(world, client, &[(0, 0.1, 0.1), (1, 0.05, 0.05)]);
    datagrams(world, client, [3, 3], 600, 3 * SECOND);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, 2 * SECOND);
}

pub fn jitter_and_ecn(world: &mut World) {
    world.ecn = 2;
    let links = ["20mbit,20ms,jitter=10ms,loss=1%,mtu=1500", "30mbit,15ms,jitter=5ms,queue=200ms,mtu=1500"];
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &links);
    datagrams(world, client, [10, 20], 1200, 2 * SECOND);
    let mut all = flows(world, client, 40_000, 2, 2);
    tcp(world, client, &mut all, 3 * SECOND);
}

pub fn cut_with_carrier_loss(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, SECOND);
    let now = world.now;
    world.machines[client].link_down(now, LinkId(0));
    lose(world, client, &[(0, 1.0, 1.0)]);
    tcp(world, client, &mut all, 2 * SECOND);
    let now = world.now;
    lose(world, client, &[(0, 0.0, 0.0)]);
    world.machines[client].link_up(now, LinkId(0));
    tcp(world, client, &mut all, 2 * SECOND);
}

pub fn cut_without_a_word(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, SECOND);
    lose(world, client, &[(0, 1.0, 1.0)]);
    tcp(world, client, &mut all, 2 * SECOND);
    // Nothing works at all, then both links do.
    lose(world, client, &[(1, 1.0, 1.0)]);
    world.send_both_ways(client, 8 * SECOND);
    lose(world, client, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
    world.send_both_ways(client, 3 * SECOND);
    tcp(world, client, &mut all, SECOND);
}

pub fn one_direction_silent(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    for (up, down) in [(1.0, 0.0), (0.0, 1.0)] {
        world.send_both_ways(client, SECOND);
        lose(world, client, &[(0, up, down)]);
        world.send_both_ways(client, 2 * SECOND);
        world.run(20 * SECOND);
        lose(world, client, &[(0, 0.0, 0.0)]);
        world.run(8 * SECOND);
    }
}

pub fn address_change(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    for change in 0..2 {
        datagrams(world, client, [2, 10], 1000, SECOND);
        let link = world.machines[client].links.get_mut(&LinkId(0)).expect("a link");
        link.address.set_port(6000 + change);
        if change == 1 {
            link.address.set_ip([203, 0, 113, 77].into());
        }
        datagrams(world, client, [2, 10], 1000, 2 * SECOND);
    }
}

pub fn streams(world: &mut World) {
    let client = start_with_streams(world, &UNEQUAL);
    lose(world, client, &[(1, 0.01, 0.01)]);
    apps(world, client, &[(4, 1000), (4, 1000), (1, 3_000_000)], 5 * SECOND);
    // Many short ones.
    for _ in 0..5 {
        apps(world, client, &[(61_020, 500), (61_005, 20_000), (61_001, 100)], SECOND);
    }
    apps(world, client, &[(1, 4_000_000), (1, 4_000_000)], 5 * SECOND);
}

pub fn streams_over_a_dead_path(world: &mut World) {
    let client = start_with_streams(world, &["40mbit,12ms,mtu=1500", "40mbit,12ms,mtu=1500"]);
    apps(world, client, &[(40, 1000), (1, 20_000_000)], SECOND);
    lose(world, client, &[(0, 1.0, 1.0)]);
    apps(world, client, &[(10, 1000), (1, 2_000_000)], 2 * SECOND);
    lose(world, client, &[(0, 0.0, 0.0)]);
    apps(world, client, &[(10, 1000), (1, 2_000_000)], 3 * SECOND);
}

pub fn relays(world: &mut World) {
    world.mode = TunnelMode::RelaysOnly;
    let client = start_with_streams(world, &UNEQUAL);
    let mut talks = [
        RelayedConnection::new(2, 1000),
        RelayedConnection::new(1, 2_000_000),
        RelayedConnection::new(61_050, 100),
    ];
    talk::play(world, client, &mut talks, 6 * SECOND);
    let mut slow = [RelayedConnection::new(20, 100)];
    slow[0].reads = false;
    talk::play(world, client, &mut slow, 2 * SECOND);
    slow[0].reads = true;
    talk::play(world, client, &mut slow, 2 * SECOND);
    world.run(40 * SECOND);
}

fn udp(world: &mut World, client: usize) {
    let target = |port: u16| -> Authority { format!("target.example:{port}").parse().unwrap() };
    let flows: Vec<_> = (50..54)
        .filter_map(|port| world.machines[client].client.udp_open(world.now, &target(port)))
        .collect();
    for step in 0..1500 {
        for (number, flow) in flows.iter().enumerate().filter(|(number, _)| step % (number + 1) == 0) {
            let payload = vec![7; 100 + 250 * number];
            world.machines[client].client.udp_send(world.now, *flow, &payload);
        }
        if step == 500 {
            lose(world, client, &[(0, 1.0, 1.0)]);
        }
        if step == 1000 {
            lose(world, client, &[(0, 0.0, 0.0)]);
        }
        world.run(2 * MS);
    }
    for flow in flows {
        world.machines[client].client.udp_close(flow);
    }
    world.run(SECOND);
}

pub fn udp_flows(world: &mut World) {
    world.mode = TunnelMode::RelaysOnly;
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    udp(world, client);
}

/// A client with a TUN at a server that carries no packets.
pub fn connect_udp_for_packets(world: &mut World) {
    world.server_mode = TunnelMode::RelaysOnly;
    world.restart_server();
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    datagrams(world, client, [5, 0], 800, 2 * SECOND);
    lose(world, client, &[(0, 0.05, 0.05)]);
    datagrams(world, client, [5, 0], 300, SECOND);
    world.run(40 * SECOND);
}

/// A client with the classes `default`, `critical` and `bulk`, distinguished by ports.
fn with_classes(world: &mut World, mode: FlowMode, links: &[&str]) -> usize {
    world.flow_rules = Rules { mode, rules: Vec::new() };
    let class = |name: &str, share, dscp| ClassProfile {
        name: name.to_owned(),
        share,
        dscp,
        ..ClassProfile::default()
    };
    let weight = |number| Weight::new(number).unwrap();
    let half = Some(Portion::Percent(50));
    world.classes = vec![
        class("default", Share { weight: weight(4), ..Share::default() }, None),
        class("critical", Share { first: true, max: half, ..Share::default() }, Some(46)),
        class("bulk", Share::default(), Some(8)),
    ];
    world.class_cc.insert("bulk", CongestionControl::Cubic);
    let rule = |from_ports, class| Rule { from_ports, class, ..Rule::default() };
    world.class_rules = ClassRules::new(vec![
        rule(vec![4000..=4001], ClassId(1)),
        rule(vec![40_001..=40_002, 40_101..=40_102], ClassId(2)),
    ]);
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, links);
    world.wake_classes(client, &[(4000, 9), (40_001, 9)], SECOND);
    client
}

pub fn classes(world: &mut World) {
    let client = with_classes(world, FlowMode::Datagram, &["40mbit,8ms,mtu=1500"]);
    datagrams(world, client, [1, 1], 172, SECOND);
    let mut all = flows(world, client, 40_000, 3, 0);
    tcp(world, client, &mut all, 3 * SECOND);
    let mut all = flows(world, client, 40_100, 0, 3);
    tcp(world, client, &mut all, 3 * SECOND);
    datagrams(world, client, [50, 50], 1100, SECOND / 2);
    world.run(SECOND);
}

pub fn classes_of_streams(world: &mut World) {
    let client = with_classes(world, FlowMode::Auto, &UNEQUAL);
    for link in 0..2 {
        let rate = Some(BitRate::from_bps(10_000_000));
        for class in 0..3 {
            let path = LinkId(link).with_class(ClassId(class));
            let policy = LinkPolicy { up: rate, down: rate, ..LinkPolicy::default() };
            world.machines[client].client.0.set_link(world.now, path, policy);
        }
    }
    apps(world, client, &[(40, 1000), (40, 1000), (1, 20_000_000)], 3 * SECOND);
    datagrams(world, client, [2, 2], 172, SECOND);
    // Classes without traffic are put to sleep.
    world.run(700 * SECOND);
    datagrams(world, client, [2, 2], 172, SECOND);
}

pub fn pipes(world: &mut World) {
    world.pipes = 4;
    let links = ["60mbit,10ms,session_rate=12mbit,mtu=1500", "20mbit,20ms,mtu=1500"];
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &links);
    let mut all = flows(world, client, 40_000, 0, 4);
    tcp(world, client, &mut all, 4 * SECOND);
    let mut all = flows(world, client, 40_100, 2, 0);
    tcp(world, client, &mut all, 2 * SECOND);
    world.run(20 * SECOND);
    datagrams(world, client, [10, 10], 1000, SECOND);
}

pub fn joined_connections(world: &mut World) {
    let record = world.record.take();
    *world = World::with_shards(2);
    world.record = record.map(|_| Record::new(world.now));
    world.additional_addresses = 1;
    let first = world.add(TOKEN, Scheduler::Auto, &[(30, 10 * MS), (20, 20 * MS)]);
    let joined = world.add_joined(first, 1, &[(30, 10 * MS), (20, 20 * MS)]);
    world.up(first);
    world.up(joined);
    for step in 0..1000_u32 {
        for queue in 0..2 {
            let packet = world.packet_to_client(first, &[step as u8; 900]);
            world.server_sends_through(queue, packet);
            let packet = world.packet_to_target(first, &[step as u8; 900]);
            world.client_sends([first, joined][queue], packet);
        }
        world.run(MS);
    }
    for machine in [first, joined] {
        lose(world, machine, &[(0, 1.0, 1.0), (1, 1.0, 1.0)]);
    }
    world.run(5 * SECOND);
    world.restart_server();
    for machine in [first, joined] {
        lose(world, machine, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
    }
    world.run(10 * SECOND);
    world.send_both_ways(first, SECOND);
}

pub fn many_clients(world: &mut World) {
    for _ in 0..12 {
        world.add(TOKEN, Scheduler::Auto, &[(10, 10 * MS), (5, 30 * MS)]);
    }
    for client in 0..12 {
        world.up(client);
    }
    for _ in 0..200 {
        for client in 0..12 {
            let (out, back) =
                (world.packet_to_target(client, &[1; 300]), world.packet_to_client(client, &[2; 600]));
            world.client_sends(client, out);
            world.server_sends(back);
        }
        world.run(5 * MS);
    }
    world.restart_server();
    world.run(20 * SECOND);
}

/// UDP is blocked, and let through again later.
pub fn inside_tcp(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    let paths = [0, 1].map(|link| LinkId(link).with_path_index(LinkId::TCP_PATH_INDEX));
    for link in world.machines[client].links.values_mut() {
        (link.up.blocks_udp, link.down.blocks_udp) = (true, true);
    }
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, SECOND);
    for path in paths {
        world.machines[client].client.link_up(world.now, path, SERVER.parse().unwrap());
    }
    tcp(world, client, &mut all, 3 * SECOND);
    world.run(10 * SECOND);
    for link in world.machines[client].links.values_mut() {
        (link.up.blocks_udp, link.down.blocks_udp) = (false, false);
    }
    tcp(world, client, &mut all, 3 * SECOND);
    for path in paths {
        world.machines[client].client.link_down(world.now, path);
    }
    tcp(world, client, &mut all, SECOND);
}

pub fn mtu_change(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    for (from, mtu) in [(40_000, 1400), (40_100, 1360), (40_200, 9000)] {
        let now = world.now;
        for link in world.machines[client].links.values_mut() {
            link.up.limit_mtu(now, mtu);
            link.down.limit_mtu(now, mtu);
        }
        let mut all = flows(world, client, from, 1, 1);
        tcp(world, client, &mut all, 2 * SECOND);
    }
    world.run(700 * SECOND);
}

pub fn idle(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    world.send_both_ways(client, SECOND);
    world.run(400 * SECOND);
    lose(world, client, &[(0, 1.0, 1.0)]);
    world.run(100 * SECOND);
    lose(world, client, &[(0, 0.0, 0.0)]);
    world.run(100 * SECOND);
}

pub fn idle_metered(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    set(world, client, 0, LinkPolicy { metered: true, ..LinkPolicy::default() });
    let backup = LinkPolicy { metered: true, tier: Tier::Backup, ..LinkPolicy::default() };
    set(world, client, 1, backup);
    world.run(300 * SECOND);
    world.send_both_ways(client, 3 * SECOND);
    world.run(100 * SECOND);
}

pub fn server_restart(world: &mut World) {
    let client = start_with_streams(world, &UNEQUAL);
    world.additional_addresses = 2;
    let other = start(world, Scheduler::Flow, CongestionControl::Bbr, &UNEQUAL[..1]);
    apps(world, client, &[(20, 1000)], SECOND);
    for _ in 0..2 {
        world.restart_server();
        world.send_both_ways(client, 3 * SECOND);
        world.send_both_ways(other, 2 * SECOND);
        world.run(3 * SECOND);
    }
    // No server for longer than a connection lasts.
    for machine in [client, other] {
        let links = world.machines[machine].links.len() as u16;
        lose(world, machine, &(0..links).map(|link| (link, 1.0, 1.0)).collect::<Vec<_>>());
    }
    world.run(240 * SECOND);
    for machine in [client, other] {
        let links = world.machines[machine].links.len() as u16;
        lose(world, machine, &(0..links).map(|link| (link, 0.0, 0.0)).collect::<Vec<_>>());
    }
    world.run(60 * SECOND);
    world.send_both_ways(client, SECOND);
}

pub fn refused_token(world: &mut World) {
    for _ in 0..4 {
        let client = world.add("a token that nobody knows", Scheduler::Auto, &[(20, 10 * MS), (10, 30 * MS)]);
        world.run(10 * SECOND);
        assert!(world.machines[client].fatal.is_some());
    }
}

pub fn overflow_and_backup(world: &mut World) {
    let links = ["10mbit,10ms,mtu=1500", "20mbit,15ms,mtu=1500", "20mbit,15ms,mtu=1500"];
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &links);
    let tier = |tier| LinkPolicy { tier, ..LinkPolicy::default() };
    for (link, tier) in (0..).zip([Tier::Primary, Tier::Overflow, Tier::Backup].map(tier)) {
        set(world, client, link, tier);
    }
    datagrams(world, client, [5, 5], 1072, SECOND);
    datagrams(world, client, [20, 20], 1072, 3 * SECOND);
    datagrams(world, client, [3, 3], 1072, 8 * SECOND);
    lose(world, client, &[(0, 1.0, 1.0), (1, 1.0, 1.0)]);
    datagrams(world, client, [5, 5], 1072, 2 * SECOND);
    lose(world, client, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
    datagrams(world, client, [5, 5], 1072, 2 * SECOND);
    set(world, client, 0, tier(Tier::Never));
    datagrams(world, client, [5, 5], 1072, SECOND);
    set(world, client, 0, tier(Tier::Primary));
    datagrams(world, client, [5, 5], 1072, SECOND);
}

pub fn rate_caps(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    let rate = |mbit: u64| Some(BitRate::from_bps(mbit * 1_000_000));
    set(world, client, 0, LinkPolicy { up: rate(4), down: rate(6), dscp: 10, ..LinkPolicy::default() });
    datagrams(world, client, [10, 20], 1000, 2 * SECOND);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, 2 * SECOND);
    set(world, client, 0, LinkPolicy::default());
    tcp(world, client, &mut all, 2 * SECOND);
}

/// Random numbers that a seed determines (xorshift).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

fn harmed(world: &mut World, seed: u64, scheduler: Scheduler) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let links = ["20mbit,10ms,mtu=1500", "10mbit,25ms,mtu=1500", "30mbit,5ms,mtu=1500"];
    let client = start(world, scheduler, CongestionControl::Bbr, &links);
    for step in 0..60 {
        let (id, now) = (LinkId(random.below(3) as u16), world.now);
        let machine = &mut world.machines[client];
        match random.below(7) {
            0 => machine.link_down(now, id),
            1 | 2 => machine.link_up(now, id),
            choice => {
                let link = machine.links.get_mut(&id).expect("a link");
                let loss = [0.0, 0.0, 0.05, 1.0][random.below(4) as usize];
                let delay = Duration::from_millis(5 + random.below(100));
                match choice {
                    3 => (link.up.loss, link.down.loss) = (loss, loss),
                    4 => (link.up.loss, link.down.loss) = (0.0, loss),
                    5 => link.up.adjust(now, |up| up.delay = delay),
                    _ => link.address.set_port(6000 + step),
                }
            }
        }
        let time = Duration::from_millis(random.below(2000));
        match random.below(4) {
            0 => world.run(4 * time),
            1 => datagrams(world, client, [10, 10], 1000, time / 4),
            _ => {
                world.send_both_ways(client, time);
            }
        }
    }
}

pub fn harmed_at_random(world: &mut World) {
    harmed(world, 1, Scheduler::Auto);
}

pub fn harmed_at_random_with_repair(world: &mut World) {
    (world.fec, world.copies) = (Fec::Auto, 2);
    harmed(world, 2, Scheduler::Auto);
}

pub fn harmed_at_random_by_flows(world: &mut World) {
    world.pipes = 2;
    harmed(world, 3, Scheduler::Flow);
}

/// Packets that are too large, super-packets, echoes and IPv6, in both directions.
pub fn packets_of_all_kinds(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    for v4 in [true, false] {
        let near = SocketAddr::new(world.address(client, v4), 4000);
        let far: SocketAddr = if v4 { "203.0.113.9:53" } else { "[2001:db8::9]:53" }.parse().unwrap();
        let (out, back) = (Packet::between(near, far), Packet::between(far, near));
        for size in [0, 1, 500, 1200, 1300, 1400, 1472, 4000] {
            for packet in
                [out.udp(&vec![1; size]), out.echo(7, 1, &vec![2; size]), out.other(50, &vec![3; size])]
            {
                world.client_sends(client, packet);
            }
            for packet in
                [back.udp(&vec![1; size]), back.echo(7, 1, &vec![2; size]), back.other(50, &vec![3; size])]
            {
                world.server_sends(packet);
            }
            world.run(20 * MS);
        }
        let segment = |seq| Tcp { seq, ack: 1, flags: tcp_flags::ACK, window: 512, options: Vec::new() };
        for step in 0..100 {
            let seq = step * 20_000;
            let supers = |packet: &Packet, size| {
                [
                    packet.tcp_super_packet(&segment(seq), &[4; 20_000], size),
                    packet.udp_super_packet(&[5; 5000], size),
                ]
            };
            for size in [1000, 1200] {
                for (header, mut packet) in supers(&out, size) {
                    world.machines[client].client.0.handle_tun(world.now, None, header, &mut packet);
                }
                for (header, mut packet) in supers(&back, size) {
                    let _ = world.servers[0].handle_tun(world.now, header, &mut packet);
                }
            }
            world.run(20 * MS);
        }
        // To an address without a client, and with a foreign source address.
        let stranger =
            SocketAddr::new(if v4 { [10, 0, 0, 77].into() } else { "fd00::77".parse().unwrap() }, 1);
        world.client_sends(client, Packet::between(stranger, far).udp(b"not mine"));
        world.server_sends(Packet::between(far, stranger).udp(b"nobody's"));
        world.client_sends(client, vec![0x45; 10]);
        world.run(100 * MS);
    }
    let server = SocketAddr::new([10, 0, 0, 1].into(), 1);
    let near = SocketAddr::new(world.address(client, true), 1);
    world.client_sends(client, Packet::between(near, server).echo(1, 1, b"the server itself"));
    world.machines[client].client.0.handle_tun(world.now, None, VnetHdr::NONE, &mut []);
    world.run(100 * MS);
}

/// Classes are added, changed and removed while others carry data.
pub fn classes_come_and_go(world: &mut World) {
    let client = with_classes(world, FlowMode::Datagram, &UNEQUAL);
    let setup = |world: &World, id, name: &str, scheduler| {
        let config = world.client_config(TOKEN, scheduler, CongestionControl::Bbr);
        let class = Some(ClassProfile { name: name.to_owned(), ..ClassProfile::default() });
        ClassSetup {
            id: ClassId(id),
            priority: false,
            connects_at_once: true,
            config: ClientConfig { class, ..config },
        }
    };
    let talk = |world: &mut World| datagrams(world, client, [4, 4], 500, SECOND);
    talk(world);
    for (id, name, scheduler) in
        [(3, "cams", Scheduler::Auto), (2, "bulk", Scheduler::Redundant), (0, "default", Scheduler::MinRtt)]
    {
        let (class, now) = (setup(world, id, name, scheduler), world.now);
        let all = &mut world.machines[client].client.0;
        all.set_class(now, class);
        for link in 0..2 {
            all.link_up(now, LinkId(link).with_class(ClassId(id)), SERVER.parse().unwrap());
        }
        talk(world);
    }
    let rule = Rule { from_ports: vec![4002..=4003], class: ClassId(3), ..Rule::default() };
    world.machines[client].client.0.set_rules(ClassRules::new(vec![rule]));
    talk(world);
    let now = world.now;
    world.machines[client].client.0.remove_class(now, ClassId(1));
    talk(world);
    world.run(700 * SECOND);
    talk(world);
}

/// A client takes another configuration while it is up, and is closed at the end.
pub fn reconfigured(world: &mut World) {
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    for (scheduler, fec, cc) in [
        (Scheduler::Balanced, Fec::Off, CongestionControl::Cubic),
        (Scheduler::Auto, Fec::Fixed { data: 10, repair: 3 }, CongestionControl::Bbr),
        (Scheduler::Failover, Fec::Auto, CongestionControl::Bbr),
    ] {
        datagrams(world, client, [5, 5], 900, SECOND);
        world.fec = fec;
        let (config, now) = (world.client_config(TOKEN, scheduler, cc), world.now);
        world.machines[client].client.reconfigure(now, config);
        world.send_both_ways(client, SECOND);
    }
    let now = world.now;
    world.machines[client].client.0.close(now, "at the end");
    world.run(5 * SECOND);
}

/// Nothing arrives for two seconds, and nothing is lost; then one end does not run for half a second.
pub fn stalled_path_and_stalled_end(world: &mut World) {
    let client = start_with_streams(world, &UNEQUAL);
    apps(world, client, &[(20, 1000)], SECOND);
    let now = world.now;
    for delay in [2010 * MS, 10 * MS] {
        let link = world.machines[client].links.get_mut(&LinkId(0)).expect("a link");
        link.up.adjust(now, |up| up.delay = delay);
        link.down.adjust(now, |down| down.delay = delay);
        apps(world, client, &[(5, 1000), (1, 1_000_000)], 2 * SECOND);
    }
    world.now += 500 * MS;
    let now = world.now;
    world.servers[0].on_local_stall(now);
    world.machines[client].client.on_local_stall(now);
    world.send_both_ways(client, SECOND);
    let now = world.now;
    world.servers[0].close(now, "the server ends");
    world.run(10 * SECOND);
}
