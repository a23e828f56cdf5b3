//! The controller against simulated paths.

use std::collections::VecDeque;

use super::*;
use crate::delivery::Acked;

const MS: Duration = Duration::from_millis(1);

fn window(rate: u64) -> Window {
    Window { rate, shortest: 25 * MS, longest: 25 * MS, lost: 0.0, full: true, overflows: false }
}

#[test]
fn startup_ends_when_the_rate_stops_growing_and_not_because_little_is_asked() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.on_rtt(now, 25 * MS);
    for _ in 0..20 {
        bbr.on_round(now, Window { full: false, ..window(100_000) }, 100_000, 3_000);
    }
    assert!(matches!(bbr.phase, Phase::Startup { .. }), "{:?}", bbr.phase);
    let mut overflows = bbr.clone();
    for rate in [1_000_000, 3_000_000, 9_000_000, 12_500_000, 12_500_000, 12_500_000, 12_500_000] {
        bbr.on_round(now, window(rate), rate, 900_000);
        let gaps = Window { full: false, overflows: true, ..window(rate) };
        overflows.on_round(now, gaps, rate, 900_000);
    }
    assert!(matches!((bbr.phase, overflows.phase), (Phase::Drain, Phase::Startup { .. })));
    let queue = Window { full: false, overflows: true, shortest: 60 * MS, ..window(12_500_000) };
    overflows.on_round(now, queue, 12_500_000, 900_000);
    assert_eq!(overflows.phase, Phase::Drain);
    bbr.on_round(now, window(12_500_000), 12_500_000, 300_000);
    assert!(matches!(bbr.phase, Phase::Cruise { .. }));
    let product = 312_500;
    assert!((2 * product..3 * product).contains(&bbr.window(12_500_000, Duration::ZERO)));
    // Acknowledgements that waited here for 100 ms do not hold back other packets.
    assert!(bbr.window(12_500_000, 100 * MS) > 12_500_000 / 10 + product);
}

#[test]
fn a_rate_that_was_measured_too_low_is_put_right_quickly() {
    for (measured, most) in [(6_000_000, 12), (200_000, 20)] {
        let now = Instant::now();
        let mut bbr = Bbr::new(38_400, 1472);
        bbr.on_rtt(now, 25 * MS);
        bbr.phase = Phase::Cruise { phase: 7, since: now, before: 0, found: 0 };
        let (capacity, mut rate) = (12_500_000.0, measured);
        let mut rounds = 0;
        while rate < 12_000_000 {
            rounds += 1;
            // Bytes sent in this round arrive in the next one.
            let paced = bbr.pacing_rate(rate, 25 * MS).unwrap();
            rate = rate.max(f64::min(capacity, paced as f64) as u64);
            bbr.on_round(now + rounds * 26 * MS, window(rate), rate, 0);
            assert!(rounds < most, "{rate} after {rounds} rounds, from {measured}");
        }
    }
}

#[test]
fn an_old_shortest_round_trip_gives_way() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.on_rtt(now, 25 * MS);
    for ms in 0..30_000 {
        bbr.on_rtt(now + ms * MS, 60 * MS);
    }
    assert_eq!(bbr.min_rtt.map(|(rtt, _)| rtt), Some(60 * MS));
}

#[test]
fn the_drain_ends_on_a_path_shorter_than_its_acknowledgements_take() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.phase = Phase::Drain;
    bbr.on_rtt(now, MS / 5);
    bbr.on_round(now, window(12_500_000), 12_500_000, 14_720);
    assert!(matches!(bbr.phase, Phase::Cruise { .. }));
}

#[test]
fn a_queue_that_never_ends_is_no_base() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
    bbr.on_rtt(now, 10 * MS);
    for _ in 0..40 {
        let window = Window { shortest: 35 * MS, longest: 40 * MS, ..window(10_000_000) };
        bbr.on_round(now, window, 10_000_000, 0);
    }
    assert_eq!(bbr.base_rtt(), Some(10 * MS));
    assert!(bbr.has_queue(10_000_000));
}

#[test]
fn the_base_is_what_a_stream_sees_where_delay_varies() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
    bbr.on_rtt(now, 14 * MS);
    assert_eq!(bbr.base_rtt(), Some(14 * MS));
    for _ in 0..3 {
        let window = Window { shortest: 20 * MS, longest: 60 * MS, full: false, ..window(10_000) };
        bbr.on_round(now, window, 10_000_000, 0);
    }
    for n in 0..40 {
        let shortest = if n % 8 == 0 { 40 * MS } else { 55 * MS };
        bbr.on_round(now, Window { shortest, longest: shortest, ..window(10_000_000) }, 10_000_000, 0);
    }
    assert_eq!(bbr.base_rtt(), Some(40 * MS));
    bbr.on_round(
        now + 5000 * MS,
        Window { shortest: 20 * MS, longest: 30 * MS, ..window(10_000_000) },
        10_000_000,
        0,
    );
    assert_eq!(bbr.base_rtt(), Some(20 * MS), "not what it was before a pause");
}

#[test]
fn delay_that_is_no_queue_does_not_wear_the_rate_down() {
    let start = Instant::now();
    let (mut bbr, mut delivery) = (Bbr::new(38_400, 1472), Delivery::new(start));
    bbr.phase = Phase::Cruise { phase: 3, since: start, before: 0, found: 0 };
    delivery.raise(6_000_000);
    bbr.on_rtt(start, 10 * MS);
    // Every packet arrives 40 ms late at any rate; the path carries all of them.
    for ms in 1..8000 {
        let now = start + ms * MS;
        let rate = delivery.rate;
        let pace = bbr.pacing_rate(rate, 50 * MS).unwrap();
        let sent = pace.min(bbr.window(rate, Duration::ZERO) * 20).min(6_000_000);
        bbr.on_rtt(now, 50 * MS);
        arrive(&mut bbr, &mut delivery, now, (now - 50 * MS, sent / 1000), rate, sent / 20);
        assert!(delivery.rate > 5_500_000, "{} after {ms} ms", delivery.rate);
    }
}

#[test]
fn packets_that_are_larger_make_no_longer_queue() {
    let now = Instant::now();
    let [small, large] = [1472, 4096].map(|mtu| {
        let mut bbr = Bbr::new(38_400, mtu);
        bbr.on_rtt(now, 20 * MS);
        bbr.phase = Phase::Cruise { phase: 3, since: now, before: 0, found: 0 };
        [125_000, 1_250_000].map(|rate| bbr.window(rate, Duration::ZERO))
    });
    assert_eq!(small, large);
}

/// Acknowledges `bytes` that left at `sent`, with `in_flight` still in flight.
fn arrive(
    bbr: &mut Bbr,
    delivery: &mut Delivery,
    now: Instant,
    (sent, bytes): (Instant, u64),
    rate: u64,
    in_flight: u64,
) {
    let acked = Acked {
        bytes,
        sent,
        rtt: now - sent,
        random_loss: 0.0,
        base: bbr.base_rtt().unwrap(),
        idle: bbr.is_draining(),
        paced: bbr.paced_share(rate),
        queued: bbr.is_queued(now),
        in_order: bbr.inside_tcp,
    };
    if let Some(window) = delivery.on_ack(now, acked) {
        bbr.on_round(now, window, delivery.rate, in_flight);
    }
}

/// A path with a round trip of 20 ms and a bottleneck with an endless queue.
struct SimulatedPath {
    /// Bytes/s.
    capacity: u64,
    mtu: u16,
    inside_tcp: bool,
    /// The bottleneck marks packets that have waited for so long.
    marks_after: Option<Duration>,
    /// The round trip in the second half of the time.
    later: Duration,
}

/// The utilisation and the queue of a path in the measured part of the time.
struct Seen {
    /// The used share of its capacity.
    used: f64,
    /// How long packets waited in its queue.
    mean_queue: Duration,
    longest_queue: Duration,
}

impl SimulatedPath {
    /// Runs for `seconds`, of which all but the first `uncounted` count.
    fn run(&self, seconds: u64, uncounted: u64) -> Seen {
        let start = Instant::now();
        let (mut bbr, mut delivery) = (Bbr::new(38_400, self.mtu), Delivery::new(start));
        bbr.set_inside_tcp(self.inside_tcp);
        let (mut waiting, mut on_its_way) = (VecDeque::new(), VecDeque::new());
        let (mut tokens, mut in_flight, mut queued) = (38_400, 0, 0);
        let (mut used, mut sum, mut longest) = (0, 0, 0);
        for ms in 1..seconds * 1000 {
            let now = start + Duration::from_millis(ms);
            let way = if ms < seconds * 500 { 20 * MS } else { self.later };
            let rate = delivery.rate;
            tokens += bbr.pacing_rate(rate, 20 * MS).unwrap_or(1_000_000) / 1000;
            let sent = tokens.min(bbr.window(rate, Duration::ZERO).saturating_sub(in_flight));
            tokens = (tokens - sent).min(10_000);
            (in_flight, queued) = (in_flight + sent, queued + sent);
            waiting.push_back((now, sent));
            let mut room = self.capacity / 1000;
            while let Some((at, bytes)) = waiting.front_mut() {
                let taken = (*bytes).min(room);
                (*bytes, room, queued) = (*bytes - taken, room - taken, queued - taken);
                let is_marked = self.marks_after.is_some_and(|limit| now - *at >= limit);
                on_its_way.push_back((now + way, *at, taken, is_marked));
                if *bytes > 0 {
                    break;
                }
                waiting.pop_front();
            }
            if ms > uncounted * 1000 {
                (used, sum, longest) =
                    (used + self.capacity / 1000 - room, sum + queued, longest.max(queued));
            }
            while let Some((_, at, bytes, is_marked)) =
                on_its_way.pop_front_if(|(arrives, ..)| *arrives <= now)
            {
                in_flight -= bytes;
                if is_marked {
                    bbr.on_marked();
                }
                bbr.on_rtt(now, now - at);
                arrive(&mut bbr, &mut delivery, now, (at, bytes), rate, in_flight);
            }
        }
        let counted = (seconds - uncounted) as f64;
        let capacity = self.capacity as f64;
        Seen {
            used: used as f64 / (capacity * counted),
            mean_queue: Duration::from_secs_f64(sum as f64 / (1000.0 * counted) / capacity),
            longest_queue: Duration::from_secs_f64(longest as f64 / capacity),
        }
    }
}

/// Runs in front of a TCP for a minute; returns the used share of the capacity and the longest queue of the
/// second half.
fn in_front_of_tcp(capacity: u64, mtu: u16, later: Duration) -> (f64, Duration) {
    let path = SimulatedPath { capacity, mtu, inside_tcp: true, marks_after: None, later };
    let seen = path.run(60, 30);
    (seen.used, seen.longest_queue)
}

/// Runs in front of a bottleneck of 5 MB/s that marks packets which have waited for 3 ms, if `marks`; returns
/// the used share and the mean queue.
fn at_a_bottleneck(marks: bool) -> (f64, Duration) {
    let marks_after = marks.then_some(3 * MS);
    let path =
        SimulatedPath { capacity: 5_000_000, mtu: 1472, inside_tcp: false, marks_after, later: 20 * MS };
    let seen = path.run(20, 5);
    (seen.used, seen.mean_queue)
}

#[test]
fn where_the_bottleneck_marks_packets_its_queue_is_shorter_and_the_path_is_full() {
    let ((used, queue), (unmarked_used, unmarked_queue)) = (at_a_bottleneck(true), at_a_bottleneck(false));
    println!("{used} {queue:?}, without marks {unmarked_used} {unmarked_queue:?}");
    assert!(used > 0.95, "{used} is used, and {unmarked_used} without marks");
    assert!(queue < unmarked_queue / 2, "{queue:?}, and {unmarked_queue:?} without marks");
}

#[test]
fn marks_end_startup_and_a_probe_at_once() {
    let now = Instant::now();
    let mut bbr = Bbr::new(38_400, 1472);
    bbr.on_rtt(now, 25 * MS);
    bbr.on_round(now, window(1_000_000), 1_000_000, 100_000);
    bbr.on_marked();
    bbr.on_round(now + 25 * MS, window(2_000_000), 2_000_000, 400_000);
    assert_eq!(bbr.phase, Phase::Drain);
    bbr.phase = Phase::Cruise { phase: 0, since: now, before: 2_000_000, found: 0 };
    bbr.on_marked();
    bbr.on_round(now + 2 * MS, window(2_000_000), 2_000_000, 400_000);
    assert!(matches!(bbr.phase, Phase::Cruise { phase: 1, .. }), "{:?}", bbr.phase);
    bbr.phase = Phase::Cruise { phase: 4, since: now, before: 2_000_000, found: 0 };
    assert!(bbr.pacing_rate(2_000_000, 25 * MS).unwrap() < 2_000_000, "the round had a queue");
    bbr.on_round(now + 27 * MS, window(2_000_000), 2_000_000, 40_000);
    assert!(bbr.pacing_rate(2_000_000, 25 * MS).unwrap() > 2_000_000, "this one had none");
}

#[test]
fn in_front_of_tcp_the_queue_is_short_and_never_empty() {
    for capacity in [250_000, 1_250_000, 12_500_000] {
        for mtu in [1472, 4096] {
            let (used, queue) = in_front_of_tcp(capacity, mtu, 20 * MS);
            let what = format!("{used} of {capacity} bytes/s, {queue:?}, in packets of {mtu}");
            assert!(used > 0.985 && queue < 30 * MS, "{what}");
        }
    }
}

#[test]
fn in_front_of_tcp_a_path_that_became_longer_is_still_used() {
    for later in [40, 70, 220] {
        let (used, queue) = in_front_of_tcp(1_250_000, 4096, later * MS);
        assert!(
            used > 0.85 && queue < 120 * MS,
            "{used} is used, {queue:?}, when a round trip is {later} ms"
        );
    }
}
