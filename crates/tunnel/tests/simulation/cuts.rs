//! Links that fail again and again while data moves: how long an application waits.
//!
//! In: a seed. Out: the gap of each cut, as `./dev bench cut` counts it: the longest time between replies to
//! pings sent every 10 ms, from just before the cut to the restore. The links have 4 to 12 Mbit/s and round
//! trips of 2 to 30 ms without the queues that the load fills.

use std::net::SocketAddr;

use crate::{
    decisions::Log,
    liveness::active,
    paths::exchange,
    trace::worlds::Random,
    world::{MS, TOKEN, World, tcp::Flow},
};
use mpvpn_lab::{ChannelParams, Direction, LinkSpec};
use mpvpn_packet::ip;
use mpvpn_path::Scheduler;
use mpvpn_types::{BitRate, CongestionControl, Duration, Instant, LinkId};

const SECOND: Duration = Duration::from_secs(1);
/// Between two pings.
const PING_INTERVAL: Duration = Duration::from_millis(10);
/// Gaps are counted from this long before a cut, so that a reply that is under way does not shorten them.
const BEFORE_CUT: Duration = Duration::from_millis(100);
/// Both links carry data again within this time after the restore.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(4);
/// The 99th percentile of gaps, of any failure.
const MAX_P99: Duration = Duration::from_millis(200);
const SEGMENT_BYTES: usize = 1300;
/// The payload of a numbered packet (bytes).
const PAYLOAD_BYTES: usize = 400;
/// The host behind the server.
const FAR: ([u8; 4], u16) = ([203, 0, 113, 9], 5201);

/// How a link fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The client's interface loses its carrier.
    Carrier,
    /// All packets in that direction are lost; the carrier stays on.
    Silent(Direction),
}

impl Failure {
    fn max_median(self) -> Duration {
        Duration::from_millis(if self == Self::Carrier { 50 } else { 100 })
    }

    fn apply(self, world: &mut World, client: usize, id: LinkId) {
        let (now, machine) = (world.now, &mut world.machines[client]);
        if self == Self::Carrier {
            machine.link_down(now, id);
        }
        let link = machine.links.get_mut(&id).expect("a link");
        link.up.loss = if self == Self::Silent(Direction::Down) { 0.0 } else { 1.0 };
        link.down.loss = if self == Self::Silent(Direction::Up) { 0.0 } else { 1.0 };
    }

    fn undo(self, world: &mut World, client: usize, id: LinkId) {
        let (now, machine) = (world.now, &mut world.machines[client]);
        let link = machine.links.get_mut(&id).expect("a link");
        (link.up.loss, link.down.loss) = (0.0, 0.0);
        if self == Self::Carrier {
            machine.link_up(now, id);
        }
    }
}

/// A client with two links, a TCP flow that fills them, and pings.
struct Cuts {
    random: Random,
    world: World,
    client: usize,
    flow: [Flow; 1],
    direction: Direction,
    links: String,
    next_ping: Instant,
    replies: Vec<Instant>,
}

impl Cuts {
    fn new(direction: Direction, seed: u64) -> Self {
        let mut world = World::new();
        world.seed = seed * 10;
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let specs = [(); 2].map(|()| {
            let rate = Some(BitRate::from_bps(1_000_000 * (4 + random.below(9))));
            let delay = Duration::from_micros(1000 + random.below(14_000));
            let params = ChannelParams { rate, delay, mtu: Some(1500), ..ChannelParams::default() };
            LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() }
        });
        let client = world.add_over(None, TOKEN, Scheduler::Auto, CongestionControl::Bbr, &specs);
        world.up(client);
        world.run(500 * MS);
        let near = world.address(client, true);
        let (near, far) = (SocketAddr::new(near, 40_000), SocketAddr::from(FAR));
        let (from, to) = if direction == Direction::Up { (near, far) } else { (far, near) };
        let flow = [Flow::new(from, to, SEGMENT_BYTES)];
        let links = specs.map(|link| format!("{:?}, {:?}", link.up.rate, link.up.delay)).join("; ");
        let (next_ping, replies) = (world.now, Vec::new());
        let mut cuts = Self { random, world, client, flow, direction, links, next_ping, replies };
        cuts.run(SECOND);
        cuts
    }

    /// Sends pings and TCP segments for `time`.
    fn run(&mut self, time: Duration) {
        let (client, end) = (self.client, self.world.now + time);
        while self.world.now < end {
            if self.world.now >= self.next_ping {
                let ping = self.world.packet_to_target(client, b"ping");
                self.world.client_sends(client, ping);
                self.next_ping += PING_INTERVAL;
            }
            let received = &mut self.world.machines[client].received;
            self.replies.extend(received.extract_if(.., |(_, packet)| is_udp(packet)).map(|(at, _)| at));
            let pings = self.world.received_by_server.extract_if(.., |(_, packet)| is_udp(packet)).count();
            for _ in 0..pings {
                let reply = self.world.packet_to_client(client, b"pong");
                self.world.server_sends(reply);
            }
            exchange(&mut self.world, client, &mut self.flow, self.direction);
            self.world.run(MS);
        }
    }

    /// Cuts one of the links, restores it, and waits until both carry data; returns the gap.
    fn cut(&mut self, failure: Failure) -> Duration {
        let pause = 100 + self.random.below(800);
        self.run(MS * pause as u32);
        let id = LinkId(self.random.below(2) as u16);
        let outage = 300 + self.random.below(300);
        let cut_at = self.world.now;
        failure.apply(&mut self.world, self.client, id);
        self.run(MS * outage as u32);
        let restored_at = self.world.now;
        failure.undo(&mut self.world, self.client, id);
        while active(&mut self.world, self.client) != [2; 2] {
            assert!(self.world.now < restored_at + RECOVERY_TIMEOUT, "{id:?} is not used again");
            self.run(PING_INTERVAL);
        }
        let replies = std::mem::take(&mut self.replies);
        let from = cut_at - BEFORE_CUT;
        let counted = replies.into_iter().filter(|at| (from..restored_at).contains(at));
        let (mut last, mut gap) = (from, Duration::ZERO);
        for at in counted.chain([restored_at]) {
            gap = gap.max(at - last);
            last = at;
        }
        gap
    }
}

fn is_udp(packet: &[u8]) -> bool {
    ip::parse(packet).is_ok_and(|view| view.protocol() == 17)
}

/// The longest time that a packet took, of those that are sent in both directions while a link fails; `None`
/// if one did not arrive.
fn longest_way_while_a_link_fails(failure: Failure) -> Option<Duration> {
    let mut world = World::new();
    let client = world.add(TOKEN, Scheduler::Auto, &[(50, 10 * MS), (50, 12 * MS)]);
    world.up(client);
    world.run(SECOND);
    world.received_by_server.clear();
    world.machines[client].received.clear();
    let mut sent = Vec::new();
    for number in 0..2000_u32 {
        if number == 1000 {
            failure.apply(&mut world, client, LinkId(0));
        }
        let payload = [&number.to_be_bytes()[..], &[7; PAYLOAD_BYTES - 4]].concat();
        let (out, back) =
            (world.packet_to_target(client, &payload), world.packet_to_client(client, &payload));
        world.client_sends(client, out);
        world.server_sends(back);
        sent.push(world.now);
        world.run(MS);
    }
    world.run(SECOND);
    let ways = [&world.received_by_server, &world.machines[client].received].map(|arrivals| {
        let mut ways = vec![None; sent.len()];
        for (at, packet) in arrivals.iter().filter(|(_, packet)| is_udp(packet)) {
            // Packets in order arrive as one packet with several payloads.
            for payload in packet[28..].chunks(PAYLOAD_BYTES) {
                let number = u32::from_be_bytes(*payload.first_chunk().expect("a number")) as usize;
                ways[number].get_or_insert(*at - sent[number]);
            }
        }
        ways
    });
    ways.concat().into_iter().try_fold(Duration::ZERO, |longest, way| Some(longest.max(way?)))
}

#[test]
fn packets_in_flight_on_a_link_that_fails_arrive_over_the_other_one() {
    for failure in [Failure::Carrier, Failure::Silent(Direction::Both)] {
        let longest = longest_way_while_a_link_fails(failure);
        println!("{failure:?}: {longest:?}");
        assert!(longest.is_some_and(|longest| longest <= MAX_P99), "{failure:?}: {longest:?}");
    }
}

/// Cuts links `count` times in each of `seeds` worlds with each direction of the load, and holds the gaps to
/// the bars.
fn hold(failure: Failure, seeds: u64, count: u32) {
    let mut gaps = Vec::new();
    let mut long = String::new();
    for direction in [Direction::Up, Direction::Down] {
        for seed in 1..=seeds {
            let mut cuts = Cuts::new(direction, seed);
            for number in 0..count {
                let mut gap = Duration::ZERO;
                let log = Log::of("mpvpn::liveness=debug,mpvpn::scheduler=debug", || gap = cuts.cut(failure));
                gaps.push(gap);
                if gap > MAX_P99 {
                    let links = &cuts.links;
                    long += &format!("{gap:?}: load {direction:?}, seed {seed} ({links}), cut {number}:\n");
                    long += &log.join("\n");
                }
            }
        }
    }
    gaps.sort();
    let at = |share: f64| gaps[((gaps.len() as f64 * share).ceil() as usize).max(1) - 1];
    let [min, median, p90, p99, max] = [0.0, 0.5, 0.9, 0.99, 1.0].map(at);
    let row = format!(
        "{failure:?}, {} cuts: {min:?}, median {median:?}, p90 {p90:?}, p99 {p99:?}, max {max:?}",
        gaps.len()
    );
    println!("{row}\n{long}");
    assert!(median <= failure.max_median() && p99 <= MAX_P99, "{row}\n{long}");
}

macro_rules! cuts {
    ($($name:ident $long:ident: $failure:expr;)*) => {
        $(
            #[test]
            fn $name() {
                hold($failure, 5, 5);
            }

            #[test]
            #[ignore = "long: ./dev test all plays it"]
            fn $long() {
                hold($failure, 40, 10);
            }
        )*
    };
}

cuts! {
    a_carrier_loss_is_hardly_noticed carrier_losses_of_many_worlds: Failure::Carrier;
    a_silent_link_is_left_quickly silent_links_of_many_worlds: Failure::Silent(Direction::Both);
    a_link_that_loses_what_is_sent_is_left_quickly links_of_many_worlds_that_lose_what_is_sent:
        Failure::Silent(Direction::Up);
    a_link_that_loses_what_is_received_is_left_quickly links_of_many_worlds_that_lose_what_is_received:
        Failure::Silent(Direction::Down);
}
