//! Connections of several classes share one link in both directions, each with controllers of its own, behind
//! a shaper at either end.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use mpvpn_class::{Shaper, ShaperHandle, Share};
use mpvpn_lab::{ByteCount, ChannelParams, emulation::Channel};
use mpvpn_quic::{
    ClientSetup, Connection, ConnectionHandle, Endpoint, Event, Handled, LocalAddress, TransportOptions,
};
use mpvpn_types::{BitRate, ClassId, CongestionControl, Duration, Instant, LinkId, PathId, Portion, Weight};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const SERVER: &str = "192.0.2.1:443";
const PATH: PathId = PathId(0);
/// IPv4 and UDP, bytes.
const HEADERS: u32 = 28;

/// The traffic that a class sends in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Demand {
    Nothing,
    /// As much as it can.
    Greedy,
    /// Calls: packets of 200 bytes, 50 a second.
    Calls,
}

/// One direction of a class: from the client (0) or to it (1).
struct Direction {
    demand: Demand,
    next: Instant,
    waiting: VecDeque<Bytes>,
    /// When each packet of calls was made, and how long those that came were on their direction.
    made: Vec<Instant>,
    delays: Vec<Duration>,
    /// Bytes of datagrams that came.
    got: u64,
}

struct Class {
    ids: [Option<ConnectionHandle>; 2],
    directions: [Direction; 2],
}

/// A packet on its direction.
struct Packet {
    class: usize,
    data: Vec<u8>,
    /// The time of the sender's clock, and the queues that it measured in the other direction.
    clock: u32,
    found: Option<u32>,
}

struct World {
    now: Instant,
    ends: [Endpoint; 2],
    setup: ClientSetup,
    /// From the client, and to it.
    wires: [Channel<Packet>; 2],
    carried: [u64; 2],
    shapers: [Arc<Mutex<Shaper>>; 2],
    /// Whether the ends tell each other what their clocks say, and by how much what came was later than
    /// told.
    tells: bool,
    found: [Option<u32>; 2],
    classes: Vec<Class>,
}

fn mbit(number: u64) -> BitRate {
    BitRate::from_bps(number * 1_000_000)
}

fn weight(number: u64) -> Share {
    Share { weight: Weight::new(number).unwrap(), ..Share::default() }
}

const FIRST: fn() -> Share = || Share { first: true, ..Share::default() };

impl World {
    fn new(params: &ChannelParams, capacity: Option<BitRate>, shares: &[Share]) -> Self {
        Self::with(CongestionControl::Bbr, params, capacity, shares)
    }

    fn with(
        cc: CongestionControl,
        params: &ChannelParams,
        capacity: Option<BitRate>,
        shares: &[Share],
    ) -> Self {
        let now = Instant::now();
        let options = TransportOptions { cc, rng_seed: Some([3; 32]), ..TransportOptions::default() };
        let (server, setup) = crate::tls::pair(&options, &options);
        let shaper = || {
            let mut shaper = Shaper::new(now, capacity);
            for (at, share) in shares.iter().enumerate() {
                shaper.set_share(now, ClassId(at as u8), *share);
            }
            Arc::new(Mutex::new(shaper))
        };
        let wire = |seed| Channel::new(params.clone(), ByteCount::default(), seed, now);
        let mut world = Self {
            now,
            ends: [Endpoint::client(&setup), server],
            setup,
            wires: [wire(1), wire(2)],
            carried: [0; 2],
            shapers: [shaper(), shaper()],
            tells: true,
            found: [None; 2],
            classes: Vec::new(),
        };
        for _ in shares {
            world.connect();
        }
        world.run(500 * MS);
        for class in 0..shares.len() {
            for end in 0..2 {
                let id = world.classes[class].ids[end].expect("a connection");
                let seat = ShaperHandle::new(world.shapers[end].clone(), ClassId(class as u8));
                world.ends[end].get(id).unwrap().set_shaper(world.now, PATH, Some(seat));
            }
        }
        world
    }

    fn connect(&mut self) {
        let direction = || Direction {
            demand: Demand::Nothing,
            next: self.now,
            waiting: VecDeque::new(),
            made: Vec::new(),
            delays: Vec::new(),
            got: 0,
        };
        let directions = [direction(), direction()];
        let (local, remote) =
            (LocalAddress::link(LinkId(self.classes.len() as u16)), SERVER.parse().unwrap());
        let id = self.ends[0].connect(self.now, &self.setup, local, remote, "mpvpn").unwrap();
        self.classes.push(Class { ids: [Some(id), None], directions });
    }

    /// From now on a class sends that on the first `directions` directions.
    fn demand(&mut self, class: usize, demand: Demand, directions: usize) {
        for direction in &mut self.classes[class].directions[..directions] {
            (direction.demand, direction.next) = (demand, self.now);
            direction.waiting.clear();
        }
    }

    fn address(class: usize) -> SocketAddr {
        SocketAddr::from(([198, 51, 100, 1], 5000 + class as u16))
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.turn();
            let next = self.next().unwrap_or(end);
            self.now = next
                .clamp(self.now + Duration::from_micros(20), end.max(self.now + Duration::from_micros(20)));
        }
    }

    fn next(&mut self) -> Option<Instant> {
        let mut next = self.wires.iter().filter_map(Channel::next_wake).min();
        for class in &self.classes {
            for (end, direction) in class.directions.iter().enumerate() {
                let Some(connection) = class.ids[end].and_then(|id| self.ends[end].get(id)) else { continue };
                let waits = direction.demand == Demand::Greedy || !direction.waiting.is_empty();
                let pacer = if waits { connection.pacer_timeout(self.now) } else { None };
                let makes = (direction.demand == Demand::Calls).then_some(direction.next);
                next = [next, connection.poll_timeout(), pacer, makes].into_iter().flatten().min();
            }
        }
        next
    }

    fn turn(&mut self) {
        let now = self.now;
        for direction in 0..2 {
            let end = 1 - direction;
            while let Some(Packet { class, data, clock, found }) = self.wires[direction].pop(now) {
                if self.tells {
                    self.found[end] =
                        Some(self.shapers[end].lock().unwrap().on_clock_report(now, 0, clock, found));
                }
                self.carried[direction] += data.len() as u64 + u64::from(HEADERS);
                let (local, remote) = match end {
                    0 => (LocalAddress::link(LinkId(class as u16)), SERVER.parse().unwrap()),
                    _ => {
                        (LocalAddress::from(SERVER.parse::<SocketAddr>().unwrap().ip()), Self::address(class))
                    }
                };
                let data = BytesMut::from(&data[..]);
                if let Handled::New(id) = self.ends[end].handle(now, Some(local), remote, 0, data) {
                    self.classes[class].ids[end] = Some(id);
                }
            }
            drop(self.wires[direction].discarded());
        }
        let mut buf = Vec::new();
        for end in 0..2 {
            let (clock, found) = (self.shapers[end].lock().unwrap().clock_micros(now), self.found[end]);
            for (at, class) in self.classes.iter_mut().enumerate() {
                let Some(id) = class.ids[end] else { continue };
                let connection = self.ends[end].get(id).expect("a connection");
                if connection.poll_timeout().is_some_and(|at| at <= now) {
                    connection.handle_timeout(now);
                }
                while let Some(event) = connection.poll_event(now) {
                    assert!(!matches!(event, Event::Lost(_)), "{event:?}");
                }
                connection.drain_paths_with_arrivals(now, |_| {});
                class.directions[1 - end].receive(now, connection);
                class.directions[end].send(now, connection, &mut buf, |datagram| {
                    let packet = Packet { class: at, data: datagram.to_vec(), clock, found };
                    self.wires[end].push(now, datagram.len() as u32 + HEADERS, packet);
                });
                assert!(self.ends[end].process_endpoint_events(id));
            }
        }
    }

    /// Mbit/s of datagrams of each class, and of IP packets on the link, each direction, in a time from now
    /// on.
    fn rates(&mut self, time: Duration) -> [(Vec<f64>, f64); 2] {
        let got = |world: &Self, direction: usize| -> Vec<u64> {
            world.classes.iter().map(|class| class.directions[direction].got).collect()
        };
        let before = [got(self, 0), got(self, 1)];
        let carried = self.carried;
        self.run(time);
        let rate = |bytes: u64| bytes as f64 * 8e-6 / time.as_secs_f64();
        [0, 1].map(|direction| {
            let after = got(self, direction).into_iter().zip(&before[direction]);
            (
                after.map(|(after, before)| rate(after - before)).collect(),
                rate(self.carried[direction] - carried[direction]),
            )
        })
    }

    /// How many packets of calls were lost on a direction, and the 99th percentile of the others' delays, in
    /// a time from now on.
    fn calls(&mut self, class: usize, time: Duration) -> [(usize, Duration); 2] {
        self.run(SECOND / 10);
        let made = [0, 1].map(|direction| {
            let direction = &mut self.classes[class].directions[direction];
            direction.delays.clear();
            direction.made.len()
        });
        self.run(time);
        [0, 1].map(|direction| {
            let own = &mut self.classes[class].directions[direction];
            own.delays.sort_unstable();
            let count = own.made.len() - made[direction];
            let at = own.delays.len().saturating_sub(1) * 99 / 100;
            let p99 = own.delays.get(at).copied().unwrap_or_default();
            // One or two are on their direction.
            (count.saturating_sub(own.delays.len() + 2), p99)
        })
    }
}

impl Direction {
    fn receive(&mut self, now: Instant, connection: &mut Connection) {
        connection.receive_datagrams(|_, datagram| {
            self.got += datagram.len() as u64;
            if datagram.len() == 200 {
                let number = u32::from_be_bytes(datagram[..4].try_into().unwrap());
                self.delays.push(now - self.made[number as usize]);
            }
        });
    }

    fn send(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        buf: &mut Vec<u8>,
        mut out: impl FnMut(&[u8]),
    ) {
        while self.demand == Demand::Calls && self.next <= now {
            let mut packet = vec![0; 200];
            packet[..4].copy_from_slice(&(self.made.len() as u32).to_be_bytes());
            self.made.push(self.next);
            self.waiting.push_back(packet.into());
            self.next += 20 * MS;
        }
        loop {
            let moved = connection.is_between_passes() && self.assign(now, connection);
            buf.clear();
            if let Some(transmit) = connection.poll_transmit(now, buf) {
                buf.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)).for_each(&mut out);
            } else if !moved && !self.assign(now, connection) {
                return;
            }
        }
    }

    fn assign(&mut self, now: Instant, connection: &mut Connection) -> bool {
        let max = connection.max_datagram_size().unwrap_or(0);
        let greedy = self.demand == Demand::Greedy && max > 0;
        if !greedy && self.waiting.is_empty() {
            connection.set_backlogged(PATH, false);
            return false;
        }
        let mut room = connection.available_window(now, PATH);
        let moved = room > 0;
        while room > 0 {
            let next = self.waiting.pop_front().or_else(|| greedy.then(|| Bytes::from(vec![0; max])));
            let Some(packet) = next else { break };
            room = room.saturating_sub(connection.queue_datagram(PATH, packet));
        }
        let full = connection.available_window(now, PATH) == 0;
        connection.set_backlogged(PATH, full && (greedy || !self.waiting.is_empty()));
        moved
    }
}

fn link(rate: u64, one_way: Duration) -> ChannelParams {
    ChannelParams { rate: Some(mbit(rate)), delay: one_way, mtu: Some(1500), ..ChannelParams::default() }
}

/// Classes as most people have them: what is neither, calls and bulk.
fn three(params: &ChannelParams, capacity: Option<BitRate>) -> World {
    let mut world = World::new(params, capacity, &[weight(3), FIRST(), weight(1)]);
    world.demand(CALLS, Demand::Calls, 2);
    world
}

/// The transmission time of three packets at 1 Mbit/s.
const THREE_PACKETS: Duration = Duration::from_millis(36);
const OTHER: usize = 0;
const CALLS: usize = 1;
const BULK: usize = 2;

/// Calls beside bulk on a link of 50 Mbit/s that is full `directions` directions, then beside two classes;
/// and then bulk again. They take longer than on an idle link by no more than `most`.
fn compete(capacity: Option<BitRate>, tells: bool, directions: usize, least: f64, most: Duration) {
    let what = format!("{capacity:?}, cap reported {tells}, {directions} directions full");
    let mut world = three(&link(50, 6500 * MS / 1000), capacity);
    world.tells = tells;
    let idle = world.calls(CALLS, 2 * SECOND);
    world.demand(BULK, Demand::Greedy, directions);
    world.run(4 * SECOND);
    let felt = |world: &mut World| {
        let beside = world.calls(CALLS, 6 * SECOND);
        [0, 1].map(|direction| {
            let more = beside[direction].1.saturating_sub(idle[direction].1);
            assert_eq!(beside[direction].0, 0, "{what}: lost");
            assert!(more <= most, "{what}: calls take {more:?} longer");
            more
        })
    };
    let more = felt(&mut world);
    let alone = world.rates(3 * SECOND);
    world.demand(OTHER, Demand::Greedy, directions);
    world.run(SECOND);
    println!("{what}: calls take {more:?} longer, and {:?} beside two", felt(&mut world));
    let both = world.rates(3 * SECOND);
    println!("    {alone:.1?}, {both:.1?}");
    for direction in 0..directions {
        assert!(alone[direction].1 >= least * 50.0, "{what}: {alone:?}");
        assert!(both[direction].1 >= least * 50.0, "{what}: {both:?}");
        let share = both[direction].0[OTHER] / both[direction].0[BULK];
        assert!((2.85..=3.15).contains(&share), "{what}: {share} instead of 3");
    }
    world.demand(OTHER, Demand::Nothing, 2);
    world.run(200 * MS);
    let again = world.rates(SECOND);
    assert!((0..directions).all(|direction| again[direction].1 >= least * 50.0), "{what}: {again:?}");
}

#[test]
fn calls_are_not_felt_and_shares_are_kept_on_a_link_of_known_rate() {
    for directions in [1, 2] {
        compete(Some(mbit(50)), true, directions, 0.98, 5 * MS);
    }
}

#[test]
fn calls_are_not_felt_and_shares_are_kept_on_a_link_that_is_measured() {
    for directions in [1, 2] {
        compete(None, true, directions, 0.95, 5 * MS);
    }
}

#[test]
fn calls_are_felt_little_on_a_link_that_is_measured_by_round_trips() {
    compete(None, false, 1, 0.95, 5 * MS);
    // A round trip does not say on which of the two directions a queue is.
    compete(None, false, 2, 0.75, 15 * MS);
}

#[test]
fn a_class_that_had_little_for_long_gets_the_link_at_once() {
    for capacity in [Some(mbit(10)), None] {
        for share in [1, 20] {
            let mut world = World::new(&link(10, 10 * MS), capacity, &[weight(20), weight(21 - share)]);
            world.demand(0, Demand::Greedy, 1);
            world.demand(1, Demand::Greedy, 1);
            world.run(60 * SECOND);
            world.demand(0, Demand::Nothing, 1);
            world.run(200 * MS);
            let (rates, all) = &world.rates(500 * MS)[0];
            println!("{capacity:?}, {share}: {rates:.2?}");
            assert!(*all >= 9.4, "{capacity:?}: {all} of 10 Mbit/s, {rates:?}");
        }
    }
}

/// A full packet takes 1.2 ms there: two that leave together are no queue.
#[test]
fn a_slow_link_is_used_beside_calls_at_once() {
    for rate in [5, 10, 20] {
        let mut world = three(&link(rate, 10 * MS), None);
        let idle = world.calls(CALLS, 2 * SECOND);
        world.demand(BULK, Demand::Greedy, 1);
        world.run(2 * SECOND);
        let all: Vec<f64> = (0..4).map(|_| world.rates(2 * SECOND)[0].1 / rate as f64).collect();
        let more = world.calls(CALLS, 6 * SECOND)[0].1.saturating_sub(idle[0].1);
        println!("{rate} Mbit/s: {all:.3?}, calls take {more:?} longer");
        assert!(all.iter().all(|used| *used >= 0.93), "{rate} Mbit/s: {all:.3?}");
        assert!(more <= 5 * MS + THREE_PACKETS / rate as u32, "{rate} Mbit/s: {more:?}");
    }
}

#[test]
fn delay_that_varies_is_no_queue() {
    let params = ChannelParams { jitter: 5 * MS, ..link(50, 10 * MS) };
    let mut world = three(&params, None);
    world.demand(BULK, Demand::Greedy, 1);
    world.run(4 * SECOND);
    world.demand(OTHER, Demand::Greedy, 1);
    for _ in 0..3 {
        world.run(4 * SECOND);
        let all = world.rates(2 * SECOND)[0].1;
        assert!(all >= 45.0, "{all} of 50 Mbit/s");
    }
}

/// As where a machine is busy, and comes to everything later for a while, again and again.
#[test]
fn a_machine_that_is_late_at_times_is_no_queue() {
    // It takes some seconds to learn what the link carries, with most seeds of the delays.
    for (most, seed, learned) in [
        (1, 1, 1),
        (2, 1, 1),
        (3, 1, 1),
        (1, 2, 4),
        (2, 3, 4),
        (2, 7, 4),
        (2, 8, 4),
        (3, 9, 4),
        (3, 10, 4),
        (3, 11, 4),
    ] {
        let link = link(50, 12_500 * MS / 1000);
        let mut world = three(&link, None);
        world.demand(CALLS, Demand::Calls, 2);
        world.run(2 * SECOND);
        world.demand(BULK, Demand::Greedy, 1);
        let mut dice: u64 = seed;
        let mut rates = Vec::new();
        for _ in 0..8 {
            let before = world.carried[0];
            for _ in 0..20 {
                for wire in &mut world.wires {
                    dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let late = most * MS * (dice >> 40) as u32 / (1 << 24);
                    wire.change(world.now, |params| params.delay = link.delay + late);
                }
                world.run(50 * MS);
            }
            rates.push((world.carried[0] - before) as f64 * 8e-6);
        }
        println!("{most} ms: {rates:.1?}");
        assert!(
            rates[learned..].iter().all(|rate| *rate >= 45.0),
            "up to {most} ms late: {rates:.1?} of 50 Mbit/s, begun with {seed}"
        );
    }
}

#[test]
fn a_measured_link_that_changes_is_followed() {
    let mut world = three(&link(20, 10 * MS), None);
    world.demand(BULK, Demand::Greedy, 1);
    world.demand(OTHER, Demand::Greedy, 1);
    world.run(4 * SECOND);
    for (rate, time) in [(8, 4 * SECOND), (30, 10 * SECOND)] {
        world.wires[0].change(world.now, |params| params.rate = Some(mbit(rate)));
        world.run(time);
        let (lost, p99) = world.calls(CALLS, 4 * SECOND)[0];
        let all = world.rates(2 * SECOND)[0].1;
        println!("{rate} Mbit/s: {all:.1}, calls {p99:?}");
        assert!(all >= 0.9 * rate as f64, "{all} of {rate} Mbit/s");
        assert!(lost == 0 && p99 <= 20 * MS, "{rate} Mbit/s: {lost} lost, {p99:?}");
    }
}

#[test]
fn what_a_class_may_have_at_most_is_not_taken_for_what_the_link_carries() {
    let most = Share { max: Some(Portion::Percent(30)), ..weight(5) };
    let mut world = World::new(&link(20, 10 * MS), None, &[most, weight(1)]);
    world.demand(1, Demand::Greedy, 1);
    world.run(2 * SECOND);
    world.demand(0, Demand::Greedy, 1);
    world.run(4 * SECOND);
    let both = world.rates(2 * SECOND)[0].0.clone();
    world.demand(1, Demand::Nothing, 1);
    world.run(10 * SECOND);
    let alone = world.rates(2 * SECOND)[0].0[0];
    println!("{both:.1?}, {alone:.1} alone");
    assert!((5.0..6.3).contains(&both[0]) && both[1] > 12.0, "{both:?}");
    assert!((5.0..6.3).contains(&alone), "{alone} of 6 Mbit/s");
}

#[test]
fn a_path_without_its_seat_keeps_to_its_own_cap() {
    let mut world = World::new(&link(20, 10 * MS), Some(mbit(5)), &[weight(1)]);
    let (id, now) = (world.classes[0].ids[0].unwrap(), world.now);
    world.ends[0].get(id).unwrap().set_rate_cap(now, PATH, Some(mbit(8)));
    world.demand(0, Demand::Greedy, 1);
    let rate = |world: &mut World, change: fn(&mut Connection, Instant)| {
        let now = world.now;
        change(world.ends[0].get(id).unwrap(), now);
        world.run(2 * SECOND);
        world.rates(2 * SECOND)[0].1
    };
    let rates = [
        rate(&mut world, |_, _| {}),
        rate(&mut world, |connection, now| connection.set_shaper(now, PATH, None)),
        rate(&mut world, |connection, now| connection.set_rate_cap(now, PATH, None)),
    ];
    for (rate, expected) in rates.iter().zip([5.0, 8.0, 20.0]) {
        assert!((0.95 * expected..1.02 * expected).contains(rate), "{rates:?} Mbit/s");
    }
}

#[test]
fn cubic_shares_a_link_as_well() {
    let mut world =
        World::with(CongestionControl::Cubic, &link(20, 10 * MS), None, &[weight(3), FIRST(), weight(1)]);
    world.demand(CALLS, Demand::Calls, 1);
    world.demand(BULK, Demand::Greedy, 1);
    world.demand(OTHER, Demand::Greedy, 1);
    world.run(6 * SECOND);
    let (lost, p99) = world.calls(CALLS, 5 * SECOND)[0];
    let (rates, all) = &world.rates(5 * SECOND)[0];
    println!("{rates:.1?}, {all:.1} Mbit/s, calls {p99:?}");
    assert!(*all >= 18.5 && (2.8..=3.2).contains(&(rates[OTHER] / rates[BULK])), "{rates:?}, {all}");
    assert!(lost == 0 && p99 <= 17 * MS, "{lost} lost, {p99:?}");
}
