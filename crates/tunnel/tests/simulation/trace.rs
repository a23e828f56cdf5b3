//! Worlds that repeat exactly: every datagram has the same time, path and size in every run.
//!
//! In: nothing, each world makes its own links, clients and traffic. Out: with `MPVPN_TRACE=DIR` one file of lines for
//! each world, which `./dev trace` compares with those of another commit; without it each world is played twice and both
//! records must be equal. Always holds: nothing of a world depends on the real clock, on the order of threads or on
//! random bytes of this process. Keys, connection IDs and tokens are random, but only their sizes are recorded.

use std::{env, fs, net::SocketAddr, path::Path};

use mpvpn_class::{Rule, Rules as ClassRules, Share};
use mpvpn_lab::LinkSpec;
use mpvpn_lane::rules::{FlowMode, Rules};
use mpvpn_masque::connect::Authority;
use mpvpn_packet::build::Packet;
use mpvpn_path::Scheduler;
use mpvpn_quic::Cc;
use mpvpn_tunnel::{Carries, ClassProfile, LinkPolicy, Member};
use mpvpn_types::{BitRate, ClassId, Duration, Fec, LinkId, Portion, Tier, Weight};

use crate::world::{
    MS, SERVER, TOKEN, World,
    app::App,
    record::Record,
    talk::{self, Talk},
    tcp::Flow,
};

const SECOND: Duration = Duration::from_secs(1);
/// Two links of unequal rate and delay.
const UNEQUAL: [&str; 2] = ["30mbit,10ms,mtu=1500", "12mbit,25ms,mtu=1500"];

/// Each world is a test of its own, so that the worlds are played side by side.
macro_rules! worlds {
    ($($name:ident)*) => {
        $(#[test] #[ignore = "./dev trace plays it"] fn $name() { check(stringify!($name), worlds::$name); })*
    };
}

worlds! {
    auto minrtt balanced weighted redundant flow failover cubic
    fec_auto fec_fixed copies jitter_and_ecn
    cut_with_carrier_loss cut_without_a_word one_direction_silent address_change
    streams streams_over_a_dead_path relays udp_flows connect_udp_for_packets
    classes classes_of_streams pipes joined_connections many_clients
    inside_tcp mtu_change idle idle_metered server_restart refused_token overflow_and_backup rate_caps
}

/// Records a world: writes it down if that is asked for, else plays it again and compares.
fn check(name: &str, play: fn(&mut World)) {
    let record = played(play);
    assert!(record.datagrams() > 20, "{name}: {} datagrams", record.datagrams());
    match env::var_os("MPVPN_TRACE") {
        Some(directory) => {
            let file = Path::new(&directory).join(format!("{name}.txt"));
            fs::write(&file, record.text()).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
        None => assert_equal(name, &record, &played(play)),
    }
}

fn played(play: fn(&mut World)) -> Record {
    let mut world = World::new();
    world.record = Some(Record::new(world.now));
    play(&mut world);
    world.record.take().expect("a record")
}

fn assert_equal(name: &str, one: &Record, other: &Record) {
    let differs = one.lines.iter().zip(&other.lines).position(|(one, other)| one != other);
    if let Some(at) = differs {
        panic!("{name}: line {at} is `{}`, then `{}`", one.lines[at], other.lines[at]);
    }
    assert_eq!(one.lines.len(), other.lines.len(), "{name}: one record is longer");
}

#[test]
fn a_world_repeats_to_the_microsecond_and_the_byte() {
    for play in [short_bonding, short_streams, short_restart] {
        let first = played(play);
        // A thread of its own: another state of whatever is random for a thread.
        let second = std::thread::spawn(move || played(play)).join().unwrap();
        assert_equal("short", &first, &second);
        assert!(first.datagrams() > 500, "{} datagrams", first.datagrams());
    }
}

fn short_bonding(world: &mut World) {
    world.fec = Fec::Auto;
    let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
    lose(world, client, &[(0, 0.02, 0.02)]);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, SECOND / 2);
}

fn short_streams(world: &mut World) {
    let client = start_with_streams(world, &UNEQUAL);
    apps(world, client, &[(1, 200_000)], SECOND / 2);
}

fn short_restart(world: &mut World) {
    let client = start(world, Scheduler::Redundant, Cc::Bbr, &UNEQUAL);
    world.restart_server();
    world.chat(client, 3 * SECOND);
}

/// A client over links, which is up for a second.
fn start(world: &mut World, scheduler: Scheduler, cc: Cc, links: &[&str]) -> usize {
    let links: Vec<LinkSpec> = links.iter().map(|link| link.parse().unwrap()).collect();
    let member: Option<(usize, Member)> = None;
    let client = world.add_over(member, TOKEN, scheduler, cc, &links);
    world.up(client);
    world.run(SECOND);
    client
}

fn start_with_streams(world: &mut World, links: &[&str]) -> usize {
    world.lane = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    start(world, Scheduler::Auto, Cc::Bbr, links)
}

/// Sets what is lost (0 to 1) up and down on links.
fn lose(world: &mut World, client: usize, losses: &[(u16, f64, f64)]) {
    for (id, up, down) in losses {
        let link = world.machines[client].links.get_mut(&LinkId(*id)).expect("a link");
        (link.up.loss, link.down.loss) = (*up, *down);
    }
}

fn set(world: &mut World, client: usize, link: u16, policy: LinkPolicy) {
    world.machines[client].client.set_link(world.now, LinkId(link), policy);
}

/// UDP packets of `bytes` in several flows, so many Mbit/s up and down.
fn datagrams(world: &mut World, client: usize, [up, down]: [u32; 2], bytes: usize, time: Duration) {
    const FLOWS: u64 = 5;
    let own = world.address(client, true);
    let (start, mut sent) = (world.now, [0u64; 2]);
    while world.now < start + time {
        let elapsed = (world.now - start).as_micros() as u64;
        for (way, rate) in [up, down].into_iter().enumerate() {
            while sent[way] * (bytes as u64 + 28) * 8 < elapsed * u64::from(rate) {
                let near = SocketAddr::new(own, 4000 + (sent[way] % FLOWS) as u16);
                let far = SocketAddr::from(([203, 0, 113, 9], 53));
                let payload = vec![way as u8; bytes];
                match way {
                    0 => world.client_sends(client, Packet::between(near, far).udp(&payload)),
                    _ => world.server_sends(Packet::between(far, near).udp(&payload)),
                }
                sent[way] += 1;
            }
        }
        world.run(MS);
    }
}

/// TCP flows through packets, and which of them go up; those of a client must have other ports than those before.
type Flows = Vec<(bool, Flow)>;

/// So many flows up and down, from the port `from` on.
fn flows(world: &World, client: usize, from: u16, up: u16, down: u16) -> Flows {
    let mtu = world.machines[client].mtu.expect("an MTU");
    let (own, far) = (world.address(client, true), SocketAddr::from(([203, 0, 113, 9], 5201)));
    let flow = |number| {
        let near = SocketAddr::new(own, from + number);
        if number < up { Flow::new(near, far, mtu) } else { Flow::new(far, near, mtu) }
    };
    (0..up + down).map(|number| (number < up, flow(number))).collect()
}

fn tcp(world: &mut World, client: usize, flows: &mut Flows, time: Duration) {
    let end = world.now + time;
    while world.now < end {
        let now = world.now;
        let at_client = std::mem::take(&mut world.machines[client].received);
        for (_, packet) in at_client.into_iter().chain(std::mem::take(&mut world.at_server)) {
            for (is_up, flow) in flows.iter_mut() {
                match flow.is_mine(&packet) {
                    None => continue,
                    Some(false) => flow.acknowledged(now, &packet),
                    Some(true) => match flow.receive(&packet) {
                        None => {}
                        Some(answer) if *is_up => world.server_sends(answer),
                        Some(answer) => world.client_sends(client, answer),
                    },
                }
                break;
            }
        }
        for (is_up, flow) in flows.iter_mut() {
            for packet in flow.send(now) {
                match is_up {
                    true => world.client_sends(client, packet),
                    false => world.server_sends(packet),
                }
            }
        }
        world.run(MS);
    }
}

/// TCP connections of apps that travel as streams: megabytes down and bytes up of each.
fn apps(world: &mut World, client: usize, transfers: &[(u16, u64)], time: Duration) {
    let own = world.address(client, true);
    let end = world.now + time;
    let mut apps: Vec<App> = (40_000 + (world.destinations.len() as u16) * 10..)
        .zip(transfers)
        .map(|(port, (down, up))| App::new(SocketAddr::new(own, port), ([203, 0, 113, 9], *down).into(), *up))
        .collect();
    while world.now < end && !apps.iter().all(App::is_over) {
        for (_, packet) in std::mem::take(&mut world.machines[client].received) {
            apps.iter_mut().for_each(|app| app.take(&packet));
        }
        let out: Vec<_> = apps.iter_mut().flat_map(App::packets).collect();
        let pause = if out.is_empty() { MS } else { MS / 20 };
        for packet in out {
            world.client_sends(client, packet);
        }
        world.run(pause);
    }
}

/// What is played.
mod worlds {
    use super::*;

    fn scheduled(world: &mut World, scheduler: Scheduler) {
        let client = start(world, scheduler, Cc::Bbr, &UNEQUAL);
        for (link, weight) in [(0, 1), (1, 2)] {
            set(
                world,
                client,
                link,
                LinkPolicy { weight: Weight::new(weight).unwrap(), ..LinkPolicy::default() },
            );
        }
        world.chat(client, SECOND / 2);
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
        let client = start(world, Scheduler::Auto, Cc::Cubic, &UNEQUAL);
        let mut all = flows(world, client, 40_000, 2, 2);
        tcp(world, client, &mut all, 3 * SECOND);
    }

    pub fn fec_auto(world: &mut World) {
        world.fec = Fec::Auto;
        let client =
            start(world, Scheduler::Auto, Cc::Bbr, &["20mbit,30ms,mtu=1500", "20mbit,20ms,mtu=1500"]);
        lose(world, client, &[(0, 0.12, 0.12), (1, 0.05, 0.0)]);
        datagrams(world, client, [3, 3], 600, 3 * SECOND);
        let mut all = flows(world, client, 40_000, 1, 2);
        tcp(world, client, &mut all, 4 * SECOND);
        lose(world, client, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
        datagrams(world, client, [2, 2], 600, 6 * SECOND);
    }

    pub fn fec_fixed(world: &mut World) {
        (world.fec, world.pipes) = (Fec::Fixed { data: 8, repair: 2 }, 2);
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        lose(world, client, &[(0, 0.03, 0.03)]);
        datagrams(world, client, [5, 10], 700, 2 * SECOND);
        let mut all = flows(world, client, 40_000, 1, 1);
        tcp(world, client, &mut all, 2 * SECOND);
    }

    pub fn copies(world: &mut World) {
        world.copies = 2;
        let client = start(world, Scheduler::Auto, Cc::Bbr, &["20mbit,15ms", "20mbit,20ms", "10mbit,40ms"]);
        lose(world, client, &[(0, 0.1, 0.1), (1, 0.05, 0.05)]);
        datagrams(world, client, [3, 3], 600, 3 * SECOND);
        let mut all = flows(world, client, 40_000, 1, 1);
        tcp(world, client, &mut all, 2 * SECOND);
    }

    pub fn jitter_and_ecn(world: &mut World) {
        world.ecn = 2;
        let links =
            ["20mbit,20ms,jitter=10ms,loss=1%,mtu=1500", "30mbit,15ms,jitter=5ms,queue=200ms,mtu=1500"];
        let client = start(world, Scheduler::Auto, Cc::Bbr, &links);
        datagrams(world, client, [10, 20], 1200, 2 * SECOND);
        let mut all = flows(world, client, 40_000, 2, 2);
        tcp(world, client, &mut all, 3 * SECOND);
    }

    pub fn cut_with_carrier_loss(world: &mut World) {
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
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
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        let mut all = flows(world, client, 40_000, 1, 1);
        tcp(world, client, &mut all, SECOND);
        lose(world, client, &[(0, 1.0, 1.0)]);
        tcp(world, client, &mut all, 2 * SECOND);
        // Nothing works at all, then both links do.
        lose(world, client, &[(1, 1.0, 1.0)]);
        world.chat(client, 8 * SECOND);
        lose(world, client, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
        world.chat(client, 3 * SECOND);
        tcp(world, client, &mut all, SECOND);
    }

    pub fn one_direction_silent(world: &mut World) {
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        for (up, down) in [(1.0, 0.0), (0.0, 1.0)] {
            world.chat(client, SECOND);
            lose(world, client, &[(0, up, down)]);
            world.chat(client, 2 * SECOND);
            world.run(20 * SECOND);
            lose(world, client, &[(0, 0.0, 0.0)]);
            world.run(8 * SECOND);
        }
    }

    pub fn address_change(world: &mut World) {
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
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
        world.carries = Carries::Streams;
        let client = start_with_streams(world, &UNEQUAL);
        let mut talks = [Talk::new(2, 1000), Talk::new(1, 2_000_000), Talk::new(61_050, 100)];
        talk::play(world, client, &mut talks, 6 * SECOND);
        let mut slow = [Talk::new(20, 100)];
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
        world.carries = Carries::Streams;
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        udp(world, client);
    }

    /// A client with a TUN at a server that carries no packets.
    pub fn connect_udp_for_packets(world: &mut World) {
        world.server_carries = Carries::Streams;
        world.restart_server();
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        datagrams(world, client, [5, 0], 800, 2 * SECOND);
        lose(world, client, &[(0, 0.05, 0.05)]);
        datagrams(world, client, [5, 0], 300, SECOND);
        world.run(40 * SECOND);
    }

    /// A client with the classes `default`, `critical` and `bulk`, told apart by ports.
    fn with_classes(world: &mut World, mode: FlowMode, links: &[&str]) -> usize {
        world.lane = Rules { mode, rules: Vec::new() };
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
            ClassProfile { cc: Some(Cc::Cubic), ..class("bulk", Share::default(), Some(8)) },
        ];
        let rule = |from_ports, class| Rule { from_ports, class, ..Rule::default() };
        world.class_rules = ClassRules::new(vec![
            rule(vec![4000..=4001], ClassId(1)),
            rule(vec![40_001..=40_002, 40_101..=40_102], ClassId(2)),
        ]);
        let client = start(world, Scheduler::Auto, Cc::Bbr, links);
        // The class `bulk` is asked for when it is used first.
        let own = SocketAddr::new(world.address(client, true), 40_001);
        world.client_sends(client, Packet::between(own, ([203, 0, 113, 9], 9).into()).udp(b"wake"));
        world.run(SECOND);
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
                let way = LinkId(link).with_class(ClassId(class));
                let policy = LinkPolicy { up: rate, down: rate, ..LinkPolicy::default() };
                world.machines[client].client.0.set_link(world.now, way, policy);
            }
        }
        apps(world, client, &[(40, 1000), (40, 1000), (1, 20_000_000)], 3 * SECOND);
        datagrams(world, client, [2, 2], 172, SECOND);
        // Classes that nobody uses are put to sleep.
        world.run(700 * SECOND);
        datagrams(world, client, [2, 2], 172, SECOND);
    }

    pub fn pipes(world: &mut World) {
        world.pipes = 4;
        let links = ["60mbit,10ms,session_rate=12mbit,mtu=1500", "20mbit,20ms,mtu=1500"];
        let client = start(world, Scheduler::Auto, Cc::Bbr, &links);
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
        world.more_addresses = 1;
        let first = world.add(TOKEN, Scheduler::Auto, &[(30, 10 * MS), (20, 20 * MS)]);
        let joined = world.add_member(first, 1, &[(30, 10 * MS), (20, 20 * MS)]);
        world.up(first);
        world.up(joined);
        for step in 0..1000_u32 {
            for queue in 0..2 {
                let packet = world.inward(first, &[step as u8; 900]);
                world.server_sends_through(queue, packet);
                let packet = world.outward(first, &[step as u8; 900]);
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
        world.chat(first, SECOND);
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
                let (out, back) = (world.outward(client, &[1; 300]), world.inward(client, &[2; 600]));
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
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        let ways = [0, 1].map(|link| LinkId(link).with_pipe(LinkId::TCP));
        for link in world.machines[client].links.values_mut() {
            (link.up.blocks_udp, link.down.blocks_udp) = (true, true);
        }
        let mut all = flows(world, client, 40_000, 1, 1);
        tcp(world, client, &mut all, SECOND);
        for way in ways {
            world.machines[client].client.link_up(world.now, way, SERVER.parse().unwrap());
        }
        tcp(world, client, &mut all, 3 * SECOND);
        world.run(10 * SECOND);
        for link in world.machines[client].links.values_mut() {
            (link.up.blocks_udp, link.down.blocks_udp) = (false, false);
        }
        tcp(world, client, &mut all, 3 * SECOND);
        for way in ways {
            world.machines[client].client.link_down(world.now, way);
        }
        tcp(world, client, &mut all, SECOND);
    }

    pub fn mtu_change(world: &mut World) {
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
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
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        world.chat(client, SECOND);
        world.run(400 * SECOND);
        lose(world, client, &[(0, 1.0, 1.0)]);
        world.run(100 * SECOND);
        lose(world, client, &[(0, 0.0, 0.0)]);
        world.run(100 * SECOND);
    }

    pub fn idle_metered(world: &mut World) {
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        set(world, client, 0, LinkPolicy { metered: true, ..LinkPolicy::default() });
        let backup = LinkPolicy { metered: true, tier: Tier::Backup, ..LinkPolicy::default() };
        set(world, client, 1, backup);
        world.run(300 * SECOND);
        world.chat(client, 3 * SECOND);
        world.run(100 * SECOND);
    }

    pub fn server_restart(world: &mut World) {
        let client = start_with_streams(world, &UNEQUAL);
        world.more_addresses = 2;
        let other = start(world, Scheduler::Flow, Cc::Bbr, &UNEQUAL[..1]);
        apps(world, client, &[(20, 1000)], SECOND);
        for _ in 0..2 {
            world.restart_server();
            world.chat(client, 3 * SECOND);
            world.chat(other, 2 * SECOND);
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
        world.chat(client, SECOND);
    }

    pub fn refused_token(world: &mut World) {
        for _ in 0..4 {
            let client =
                world.add("a token that nobody knows", Scheduler::Auto, &[(20, 10 * MS), (10, 30 * MS)]);
            world.run(10 * SECOND);
            assert!(world.machines[client].fatal.is_some());
        }
    }

    pub fn overflow_and_backup(world: &mut World) {
        let links = ["10mbit,10ms,mtu=1500", "20mbit,15ms,mtu=1500", "20mbit,15ms,mtu=1500"];
        let client = start(world, Scheduler::Auto, Cc::Bbr, &links);
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
        let client = start(world, Scheduler::Auto, Cc::Bbr, &UNEQUAL);
        let rate = |mbit: u64| Some(BitRate::from_bps(mbit * 1_000_000));
        set(world, client, 0, LinkPolicy { up: rate(4), down: rate(6), ..LinkPolicy::default() });
        datagrams(world, client, [10, 20], 1000, 2 * SECOND);
        let mut all = flows(world, client, 40_000, 1, 1);
        tcp(world, client, &mut all, 2 * SECOND);
        set(world, client, 0, LinkPolicy::default());
        tcp(world, client, &mut all, 2 * SECOND);
    }
}
