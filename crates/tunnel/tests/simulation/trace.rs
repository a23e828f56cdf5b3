//! Worlds that repeat exactly: every datagram has the same time, path and size in every run.
//!
//! In: nothing, each world makes its own links, clients and traffic. Out: with `MPVPN_TRACE=DIR` one file of
//! lines for each world, which `./dev trace` compares with those of another commit; without it each world is
//! played twice and both records must be equal. Always holds: nothing of a record depends on the real clock,
//! on the order of threads or on random bytes of this process.
//!
//! All randomness that changes times, paths and sizes is seeded: the QUIC library by
//! `TransportOptions::rng_seed` (packet numbers that are skipped, the length of a reserved transport
//! parameter, key phases, resets), links by their numbers, session secrets by a counter. Values that cannot
//! be seeded have a fixed length: TLS randoms and key shares (aws-lc), signatures (Ed25519, where those of
//! ECDSA vary in length), connection IDs and the keys of tokens (thread-local generators of the library). The
//! library iterates over no map whose order is random. `ln` and `cbrt` come from the C library of the
//! machine, so records of machines with different ones may differ; both sides of a comparison run on one
//! machine.

pub(crate) mod worlds;

use std::{env, fs, net::SocketAddr, path::Path};

use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_lab::LinkSpec;
use mpvpn_packets::Packet;
use mpvpn_path::Scheduler;
use mpvpn_tunnel::{ConnectionNumber, LinkPolicy};
use mpvpn_types::{CongestionControl, Duration, Fec, LinkId};

use crate::world::{MS, TOKEN, World, app::App, record::Record, tcp::Flow};

const SECOND: Duration = Duration::from_secs(1);
/// Two links of unequal rate and delay.
const UNEQUAL: [&str; 2] = ["30mbit,10ms,mtu=1500", "12mbit,25ms,mtu=1500"];

/// Each world is a test of its own, so that the worlds are played side by side.
macro_rules! each_is_a_test {
    ($($name:ident)*) => {
        $(#[test] #[ignore = "./dev trace plays it"] fn $name() { check(stringify!($name), worlds::$name); })*
    };
}

each_is_a_test! {
    auto minrtt balanced weighted redundant flow failover cubic
    fec_auto fec_fixed copies jitter_and_ecn
    cut_with_carrier_loss cut_without_a_word one_direction_silent address_change
    streams streams_over_a_dead_path relays udp_flows connect_udp_for_packets
    classes classes_of_streams pipes joined_connections many_clients
    harmed_at_random harmed_at_random_with_repair harmed_at_random_by_flows
    packets_of_all_kinds classes_come_and_go reconfigured stalled_path_and_stalled_end
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
        // A separate thread has another state of thread-local random numbers.
        let second = std::thread::spawn(move || played(play)).join().unwrap();
        assert_equal("short", &first, &second);
        assert!(first.datagrams() > 500, "{} datagrams", first.datagrams());
    }
}

fn short_bonding(world: &mut World) {
    world.fec = Fec::Auto;
    let client = start(world, Scheduler::Auto, CongestionControl::Bbr, &UNEQUAL);
    lose(world, client, &[(0, 0.02, 0.02)]);
    let mut all = flows(world, client, 40_000, 1, 1);
    tcp(world, client, &mut all, SECOND / 2);
}

fn short_streams(world: &mut World) {
    let client = start_with_streams(world, &UNEQUAL);
    apps(world, client, &[(1, 200_000)], SECOND / 2);
}

fn short_restart(world: &mut World) {
    let client = start(world, Scheduler::Redundant, CongestionControl::Bbr, &UNEQUAL);
    world.restart_server();
    world.send_both_ways(client, 3 * SECOND);
}

/// A client over links, which is up for a second.
fn start(world: &mut World, scheduler: Scheduler, cc: CongestionControl, links: &[&str]) -> usize {
    let links: Vec<LinkSpec> = links.iter().map(|link| link.parse().unwrap()).collect();
    let member: Option<(usize, ConnectionNumber)> = None;
    let client = world.add_over(member, TOKEN, scheduler, cc, &links);
    world.up(client);
    world.run(SECOND);
    client
}

fn start_with_streams(world: &mut World, links: &[&str]) -> usize {
    world.flow_rules = Rules { mode: FlowMode::Auto, rules: Vec::new() };
    start(world, Scheduler::Auto, CongestionControl::Bbr, links)
}

/// Sets the loss (0 to 1) up and down of links.
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
        for (direction, rate) in [up, down].into_iter().enumerate() {
            while sent[direction] * (bytes as u64 + 28) * 8 < elapsed * u64::from(rate) {
                let near = SocketAddr::new(own, 4000 + (sent[direction] % FLOWS) as u16);
                let far = SocketAddr::from(([203, 0, 113, 9], 53));
                let payload = vec![direction as u8; bytes];
                match direction {
                    0 => world.client_sends(client, Packet::between(near, far).udp(&payload)),
                    _ => world.server_sends(Packet::between(far, near).udp(&payload)),
                }
                sent[direction] += 1;
            }
        }
        world.run(MS);
    }
}

/// TCP flows through packets, and which of them go up; those of a client must have other ports than those
/// before.
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
        for (_, packet) in at_client.into_iter().chain(std::mem::take(&mut world.received_by_server)) {
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
