use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const MTU: usize = 1500;
const MS: Duration = Duration::from_millis(1);

fn queue() -> FqCodel {
    FqCodel::new(QueueConfig::default())
}

/// A queue whose CoDel never drops.
fn patient(config: QueueConfig) -> FqCodel {
    FqCodel::new(QueueConfig { target: Duration::from_secs(1 << 30), ..config })
}

/// Any instant will do: only differences matter.
#[allow(clippy::disallowed_methods)]
fn start() -> Instant {
    Instant::now()
}

/// A packet that carries its number, at least 8 bytes long.
fn packet(flow: u32, number: u64, length: usize) -> QueuedPacket {
    let mut data = vec![0; length];
    data[..8].copy_from_slice(&number.to_be_bytes());
    QueuedPacket { data: data.into(), flow, needs_order: false, unnumbered: false }
}

fn number(packet: &QueuedPacket) -> u64 {
    u64::from_be_bytes(packet.data[..8].try_into().unwrap())
}

/// Counts everything again by walking all lists, and compares.
fn audit(queue: &mut FqCodel) {
    let listed = [queue.flows.listed(&queue.new_flows), queue.flows.listed(&queue.old_flows)].concat();
    assert_eq!(listed.len(), queue.flows.len(), "every flow stands in one list");
    let (mut packets, mut bytes) = (0, 0);
    for slot in listed {
        let fifo = &queue.flows.get_mut(slot).fifo;
        assert_eq!(queue.store.walk(fifo), (fifo.packets, fifo.bytes));
        packets += fifo.packets;
        bytes += fifo.bytes;
    }
    assert_eq!(queue.store.used(), packets);
    assert_eq!((queue.packets(), queue.bytes()), (packets, bytes));
    assert_eq!(queue.is_empty(), packets == 0);
}

#[test]
fn a_ping_is_sent_before_the_bulk_flow_that_came_first() {
    let now = start();
    let mut queue = queue();
    for n in 0..200 {
        queue.push(now, packet(1, n, MTU));
    }
    for n in 0..4 {
        queue.pop(now).unwrap();
        queue.push(now, packet(2, n, 84));
        // The bulk flow may finish its turn, one packet of it, and no more.
        let next = [queue.pop(now).unwrap().flow, queue.pop(now).unwrap().flow];
        assert!(next.contains(&2), "ping {n} waited behind {next:?}");
    }
}

#[test]
fn two_bulk_flows_get_the_same_bytes_whatever_their_packet_sizes() {
    let now = start();
    let mut queue = patient(QueueConfig::default());
    for n in 0..300 {
        queue.push(now, packet(1, n, MTU));
    }
    for n in 0..2000 {
        queue.push(now, packet(2, n, 200));
    }
    let mut sent = [0usize; 2];
    for _ in 0..1000 {
        let packet = queue.pop(now).unwrap();
        sent[packet.flow as usize - 1] += packet.data.len();
    }
    assert!(sent[0].abs_diff(sent[1]) <= 3 * 1514, "bytes sent: {sent:?}");
    assert!(sent[0] > 100_000);
}

#[test]
fn a_flow_that_keeps_coming_back_does_not_starve_an_old_one() {
    let now = start();
    let mut queue = queue();
    for n in 0..100 {
        queue.push(now, packet(1, n, MTU));
    }
    let mut old = 0;
    for n in 0..100 {
        queue.push(now, packet(2, n, MTU));
        old += usize::from(queue.pop(now).unwrap().flow == 1);
    }
    assert!(old >= 40, "the old flow got {old} of 100 turns");
}

#[test]
fn a_burst_with_one_time_stamp_comes_out_complete_and_in_order() {
    let mut now = start();
    let mut queue = queue();
    for burst in 0..50 {
        for n in 0..46 {
            assert_eq!(queue.push(now, packet(7, burst * 46 + n, MTU)), 0);
        }
        for n in 0..46 {
            now += MS / 4;
            assert_eq!(number(&queue.pop(now).unwrap()), burst * 46 + n);
        }
        assert!(queue.is_empty());
    }
    assert_eq!(queue.drops(), 0);
}

#[test]
fn nothing_is_dropped_while_packets_wait_less_than_the_target() {
    let mut now = start();
    let mut queue = queue();
    for n in 0..3 {
        queue.push(now, packet(1, n, MTU));
    }
    for n in 3..20_000 {
        queue.push(now, packet(1, n, MTU));
        now += MS;
        queue.pop(now).unwrap();
        assert!(queue.sojourn() < 5 * MS);
    }
    assert_eq!(queue.drops(), 0);
}

#[test]
fn a_slow_path_with_one_remaining_packet_loses_nothing() {
    let mut now = start();
    let mut queue = queue();
    queue.push(now, packet(1, 0, MTU));
    for n in 1..1000 {
        queue.push(now, packet(1, n, MTU));
        now += 24 * MS;
        assert_eq!(number(&queue.pop(now).unwrap()), n - 1);
        assert!(queue.sojourn() >= 24 * MS);
    }
    assert_eq!(queue.drops(), 0);
}

#[test]
fn an_unresponsive_flow_loses_packets_and_its_neighbour_does_not() {
    let mut now = start();
    let mut queue = queue();
    let mut sent = [0; 2];
    for n in 0..20_000 {
        queue.push(now, packet(1, n, MTU));
        queue.push(now, packet(1, n, MTU));
        if n % 4 == 0 {
            queue.push(now, packet(2, n / 4, MTU));
        }
        now += MS;
        let packet = queue.pop(now).unwrap();
        sent[packet.flow as usize - 1] += 1;
    }
    assert!(queue.drops() > 10_000);
    assert!((4990..=5000).contains(&sent[1]), "{} of 5000 packets of the calm flow sent", sent[1]);
}

#[test]
fn a_standing_queue_of_tcp_senders_is_brought_down_to_the_target() {
    for flows in [1, 4] {
        let managed = simulate_tcp(queue(), flows);
        let unmanaged = simulate_tcp(patient(QueueConfig::default()), flows);
        assert!(managed.mean_wait < 10 * MS, "{flows} flows: packets waited {:?}", managed.mean_wait);
        assert!(managed.use_of_link > 0.8, "{flows} flows: link used {:.2}", managed.use_of_link);
        assert!(unmanaged.mean_wait > 100 * MS, "the senders must be able to build a queue at all");
    }
}

#[test]
fn the_limits_hold_and_the_fattest_flow_loses_packets() {
    let now = start();
    let mut queue = patient(QueueConfig { limit_bytes: 100_000, limit_packets: 200, ..Default::default() });
    for n in 0..20 {
        queue.push(now, packet(2, n, 1000));
    }
    let mut dropped = 0;
    for n in 0..500 {
        dropped += queue.push(now, packet(1, n, 1000));
        assert!(queue.bytes() <= 100_000);
        assert!(queue.bytes() >= 96_000 || dropped == 0, "dropped more than needed: {}", queue.bytes());
    }
    assert_eq!(dropped, 520_000 - queue.bytes());
    assert_eq!(queue.drops() as usize, dropped / 1000);
    let rest: Vec<QueuedPacket> = std::iter::from_fn(|| queue.pop(now)).collect();
    assert_eq!(rest.iter().filter(|packet| packet.flow == 2).count(), 20);
    let newest = rest.iter().filter(|packet| packet.flow == 1).map(number).max();
    assert_eq!(newest, Some(499), "the head is dropped, not the tail");

    for n in 0..1000 {
        queue.push(now, packet(3, n, 8));
        assert!(queue.packets() <= 200);
    }
    assert!(queue.packets() >= 195);
}

#[test]
fn packets_that_can_never_fit_are_dropped_at_once() {
    let now = start();
    let mut queue = patient(QueueConfig { limit_bytes: 1000, ..Default::default() });
    assert_eq!(queue.push(now, packet(1, 0, 1001)), 1001);
    assert!(queue.is_empty());
    assert_eq!(queue.pop(now), None);
    let mut none = FqCodel::new(QueueConfig { limit_packets: 0, flows: 0, quantum: 0, ..Default::default() });
    assert_eq!(none.push(now, packet(1, 0, 100)), 100);
    assert_eq!((none.packets(), none.drops()), (0, 1));
}

#[test]
fn an_empty_queue_is_small_also_after_a_burst() {
    let mut now = start();
    let mut queue = queue();
    assert!(queue.memory() < 2048, "new: {} bytes", queue.memory());
    let storm = |queue: &mut FqCodel, now| {
        for n in 0..6000 {
            queue.push(now, packet(n as u32, n, 100));
        }
        assert!(queue.memory() > 100_000);
    };
    storm(&mut queue, now);
    while queue.pop(now).is_some() {
        now += MS / 100;
    }
    queue.trim_memory();
    assert!(queue.memory() < 2048, "popped empty: {} bytes", queue.memory());
    assert_eq!((queue.packets(), queue.bytes(), queue.pop(now)), (0, 0, None));
}

#[test]
fn a_clock_that_steps_back_causes_no_error() {
    let now = start();
    let mut queue = queue();
    queue.push(now + 50 * MS, packet(1, 0, MTU));
    queue.push(now, packet(1, 1, MTU));
    assert_eq!(queue.pop(now).map(|packet| number(&packet)), Some(0));
    assert_eq!(queue.sojourn(), Duration::ZERO);
    assert_eq!(queue.pop(now + 60 * MS).map(|packet| number(&packet)), Some(1));
}

/// Whether a packet supersedes the one before it: those of even numbers do.
fn has_even_number(later: &[u8], _: &[u8]) -> bool {
    later[7].is_multiple_of(2)
}

#[test]
fn a_packet_takes_the_place_of_the_last_one_of_its_flow_if_it_supersedes_it() {
    let now = start();
    let mut queue = queue();
    queue.push(now, packet(1, 0, MTU));
    queue.push(now, packet(2, 1, 60));
    queue.push(now, packet(1, 3, 60));
    assert!(queue.push_superseding(now + MS, packet(1, 4, 60), has_even_number));
    assert!(!queue.push_superseding(now + MS, packet(1, 5, 60), has_even_number), "it does not");
    assert!(!queue.push_superseding(now + MS, packet(1, 6, 61), has_even_number), "another length");
    assert!(!queue.push_superseding(now + MS, packet(3, 8, 60), has_even_number), "the first of its flow");
    audit(&mut queue);
    assert_eq!((queue.drops(), queue.packets()), (0, 6));
    let rest: Vec<QueuedPacket> = std::iter::from_fn(|| queue.pop(now + 2 * MS)).collect();
    let of_flow = |flow| rest.iter().filter(|packet| packet.flow == flow).map(number).collect::<Vec<_>>();
    assert_eq!([of_flow(1), of_flow(2), of_flow(3)], [vec![0, 4, 5, 6], vec![1], vec![8]]);
}

#[test]
fn a_packet_that_supersedes_another_has_waited_since_its_own_push() {
    let now = start();
    let mut queue = queue();
    queue.push(now, packet(1, 0, 60));
    assert!(queue.push_superseding(now + 30 * MS, packet(1, 2, 60), has_even_number));
    assert_eq!(queue.pop(now + 31 * MS).map(|packet| number(&packet)), Some(2));
    assert_eq!((queue.sojourn(), queue.is_empty()), (MS, true));
    assert!(!queue.push_superseding(now + 32 * MS, packet(1, 4, 60), has_even_number), "it left already");
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        flow: u32,
        length: usize,
        count: usize,
    },
    /// Pushes packets of which those with even numbers supersede the one before them.
    Supersede {
        flow: u32,
        count: usize,
    },
    Pop(usize),
    Wait(u64),
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u32..12, 8usize..2000, 1usize..50)
            .prop_map(|(flow, length, count)| Step::Push { flow, length, count }),
        4 => (0u32..12, 1usize..50).prop_map(|(flow, count)| Step::Supersede { flow, count }),
        8 => (1usize..60).prop_map(Step::Pop),
        4 => (0u64..80).prop_map(Step::Wait),
        1 => Just(Step::Drain),
    ]
}

proptest! {
    /// The model keeps what each flow sent: a popped packet must be among it, and all that came before
    /// it in its flow are either popped already or dropped.
    #[test]
    fn flows_keep_their_order_and_every_packet_is_accounted_for(
        steps in prop::collection::vec(step(), 1..150),
        buckets in prop_oneof![Just(1usize), Just(4), Just(1024)],
        codel_drops in any::<bool>(),
    ) {
        let config = QueueConfig {
            limit_bytes: 60_000, limit_packets: 120, flows: buckets, ..Default::default()
         };
        let mut queue = if codel_drops { FqCodel::new(config) } else { patient(config) };
        let mut now = start();
        let mut sent: Vec<VecDeque<(u64, usize)>> = vec![VecDeque::new(); 12];
        let (mut pushed, mut popped, mut bytes, mut superseded) = (0u64, 0u64, 0i64, 0u64);
        for step in steps {
            match step {
                Step::Push { flow, length, count } => for _ in 0..count {
                    sent[flow as usize].push_back((pushed, length));
                    let dropped = queue.push(now, packet(flow, pushed, length));
                    bytes += length as i64 - dropped as i64;
                    pushed += 1;
                },
                Step::Supersede { flow, count } => for _ in 0..count {
                    sent[flow as usize].push_back((pushed, 60));
                    let before = queue.bytes();
                    let replaced = queue.push_superseding(now, packet(flow, pushed, 60), has_even_number);
                    prop_assert!(!replaced || queue.bytes() == before && pushed % 2 == 0);
                    bytes += queue.bytes() as i64 - before as i64;
                    superseded += u64::from(replaced);
                    pushed += 1;
                },
                Step::Pop(count) => for _ in 0..count {
                    now += MS / 2;
                    let waiting = queue.packets();
                    let Some(got) = queue.pop(now) else {
                        prop_assert_eq!(waiting, 0);
                        break;
                    };
                    popped += 1;
                    bytes -= got.data.len() as i64;
                    let of_flow = &mut sent[got.flow as usize];
                    let place = of_flow.iter().position(|&(n, l)| (n, l) == (number(&got), got.data.len()));
                    prop_assert!(place.is_some(), "popped twice, overtaken or changed: {}", number(&got));
                    of_flow.drain(..=place.unwrap());
                },
                Step::Wait(ms) => now += MS * ms as u32,
                Step::Drain => while let Some(got) = queue.pop(now) {
                    popped += 1;
                    bytes -= got.data.len() as i64;
                    let of_flow = &mut sent[got.flow as usize];
                    let place = of_flow.iter().position(|&(n, _)| n == number(&got));
                    of_flow.drain(..=place.expect("it was sent"));
                },
            }
            audit(&mut queue);
            prop_assert_eq!(queue.packets() as u64, pushed - popped - superseded - queue.drops());
            prop_assert!(queue.bytes() <= 60_000 && queue.packets() <= 120);
            if !codel_drops {
                prop_assert_eq!(queue.bytes() as i64, bytes);
            }
            if queue.is_empty() {
                queue.trim_memory();
                prop_assert!(queue.memory() < 2048);
            }
        }
    }
}

struct Outcome {
    mean_wait: Duration,
    /// The used share of the link in the last three quarters of the simulation.
    use_of_link: f64,
}

/// TCP Reno senders behind the queue, which feeds a link of 20 Mbit/s with 40 ms of round-trip time.
fn simulate_tcp(mut queue: FqCodel, flows: usize) -> Outcome {
    const TICKS: u64 = 60_000;
    let tick = Duration::from_micros(600);
    let trip = 67;
    let mut now = start();
    let mut senders: Vec<Reno> = (0..flows).map(|_| Reno::new()).collect();
    let mut on_the_way: VecDeque<(u64, QueuedPacket)> = VecDeque::new();
    let (mut waited, mut sent) = (Duration::ZERO, 0);
    for t in 0..TICKS {
        while on_the_way.front().is_some_and(|(at, _)| *at <= t) {
            let (_, packet) = on_the_way.pop_front().unwrap();
            senders[packet.flow as usize].on_ack(number(&packet));
        }
        for (flow, sender) in senders.iter_mut().enumerate() {
            while let Some(n) = sender.next_to_send() {
                queue.push(now, packet(flow as u32, n, MTU));
            }
        }
        now += tick;
        let Some(packet) = queue.pop(now) else { continue };
        on_the_way.push_back((t + trip, packet));
        if t >= TICKS / 4 {
            waited += queue.sojourn();
            sent += 1;
        }
    }
    Outcome { mean_wait: waited / sent.max(1), use_of_link: f64::from(sent) / (TICKS - TICKS / 4) as f64 }
}

/// A sender with congestion avoidance. Acknowledgements come in order, so a gap is a loss.
struct Reno {
    window: f64,
    threshold: f64,
    next: u64,
    acked: u64,
    /// Losses before this number belong to a round in which the window was already halved.
    recover: u64,
}

impl Reno {
    fn new() -> Self {
        Self { window: 10.0, threshold: f64::MAX, next: 0, acked: 0, recover: 0 }
    }

    fn next_to_send(&mut self) -> Option<u64> {
        if (self.next - self.acked) as f64 >= self.window {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    fn on_ack(&mut self, n: u64) {
        if n > self.acked && self.acked >= self.recover {
            self.window = (self.window / 2.0).max(2.0);
            self.threshold = self.window;
            self.recover = self.next;
        } else if self.window < self.threshold {
            self.window += 1.0;
        } else {
            self.window += 1.0 / self.window;
        }
        self.acked = n + 1;
    }
}

#[test]
fn a_larger_quantum_keeps_packets_of_a_flow_together_and_shares_equally() {
    let now = start();
    let mut queue = patient(QueueConfig { limit_bytes: 1 << 20, ..Default::default() });
    for n in 0..64 {
        for flow in 1..=4 {
            queue.push(now, packet(flow, n, MTU));
        }
    }
    queue.set_quantum(8 * MTU);
    let flows: Vec<u32> = std::iter::from_fn(|| queue.pop(now)).map(|packet| packet.flow).collect();
    let changes = flows.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes <= 4 * 64 / 8 + 4, "{changes} changes");
    for flow in 1..=4 {
        let early = flows[..128].iter().filter(|other| **other == flow).count();
        assert!((24..=40).contains(&early), "{early} of the first 128 packets");
    }
}
