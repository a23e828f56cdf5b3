#![allow(clippy::disallowed_methods)]

use proptest::prelude::*;

use super::*;

const US: Duration = Duration::from_micros(1);
const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn mbit(number: u64) -> BitRate {
    BitRate::from_bps(number * 1_000_000)
}

fn weight(number: u64) -> Share {
    Share { weight: Weight::new(number).unwrap(), ..Share::default() }
}

/// The traffic of a class.
#[derive(Clone, Copy, Debug)]
enum Demand {
    /// Always backlogged.
    Greedy,
    /// A packet of this many bytes in each period.
    Every(Duration, u64),
    Nothing,
}

/// A class with its packets.
#[derive(Clone, Debug)]
struct Source {
    demand: Demand,
    waiting: std::collections::VecDeque<(Instant, u64)>,
    next: Instant,
    sent: u64,
    longest: Duration,
    wakes: Option<Instant>,
}

/// Classes at a shaper, each asking when it has new data or its wake-up is due.
struct World {
    now: Instant,
    shaper: Shaper,
    sources: Vec<Source>,
    /// Pseudo-random state: which class asks first.
    order: u64,
}

impl World {
    fn new(capacity: u64, classes: &[(Share, Demand)]) -> Self {
        let now = Instant::now();
        let mut shaper = Shaper::new(now, Some(BitRate::from_bps(capacity)));
        let source = |demand: &Demand| Source {
            demand: *demand,
            waiting: Default::default(),
            next: now,
            sent: 0,
            longest: Duration::ZERO,
            wakes: None,
        };
        for (at, (share, _)) in classes.iter().enumerate() {
            shaper.set_share(now, ClassId(at as u8), *share);
        }
        Self { now, shaper, sources: classes.iter().map(|(_, demand)| source(demand)).collect(), order: 0 }
    }

    fn demand(&mut self, class: usize, demand: Demand) {
        (self.sources[class].demand, self.sources[class].next) = (demand, self.now);
        self.sources[class].wakes = None;
        self.sources[class].waiting.clear();
    }

    fn ask(&mut self, at: usize) {
        let (now, class) = (self.now, ClassId(at as u8));
        let source = &mut self.sources[at];
        while let Demand::Every(period, bytes) = source.demand
            && source.next <= now
        {
            source.waiting.push_back((source.next, bytes));
            source.next += period;
        }
        let greedy = matches!(source.demand, Demand::Greedy);
        if source.wakes.is_some_and(|at| now < at) {
            return;
        }
        source.wakes = None;
        let has_more = |source: &Source| greedy || !source.waiting.is_empty();
        while has_more(source) && self.shaper.available_bytes(now, class) > 0 {
            let (since, bytes) = source.waiting.pop_front().unwrap_or((now, 1500));
            self.shaper.on_sent(class, bytes);
            source.sent += bytes;
            source.longest = source.longest.max(now - since);
        }
        let waits = has_more(source);
        self.shaper.set_backlogged(now, class, waits);
        if waits {
            source.wakes = self.shaper.retry_at(now, class);
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.order = self.order.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (count, first) = (self.sources.len(), (self.order >> 33) as usize);
            for step in 0..count {
                let at = if self.order & 1 == 0 { first + step } else { first + count - step };
                self.ask(at % count);
            }
            self.now += 50 * US;
        }
    }

    /// Bits per second that each class sends in a time.
    fn rates(&mut self, time: Duration) -> Vec<f64> {
        let before: Vec<u64> = self.sources.iter().map(|source| source.sent).collect();
        self.run(time);
        let sent = self.sources.iter().zip(before).map(|(source, before)| source.sent - before);
        sent.map(|bytes| bytes as f64 * 8.0 / time.as_secs_f64()).collect()
    }
}

/// A backlogged class sends what it may, at most `most` bytes. Returns the number of bytes.
fn send(shaper: &mut Shaper, now: Instant, class: ClassId, most: u64) -> u64 {
    shaper.set_backlogged(now, class, true);
    let bytes = shaper.available_bytes(now, class).min(most);
    shaper.on_sent(class, bytes);
    bytes
}

fn assert_near(what: f64, expected: f64, share: f64) {
    assert!((what - expected).abs() <= expected * share, "{what} is not {expected} within {share}");
}

#[test]
fn shares_are_those_of_the_weights_and_nothing_is_left_over() {
    let classes = [(weight(1), Demand::Greedy), (weight(2), Demand::Greedy), (weight(7), Demand::Greedy)];
    let mut world = World::new(50_000_000, &classes);
    let rates = world.rates(2 * SECOND);
    for (rate, expected) in rates.iter().zip([5e6, 10e6, 35e6]) {
        assert_near(*rate, expected, 0.02);
    }
    assert_near(rates.iter().sum(), 50e6, 0.01);
}

#[test]
fn a_class_with_first_hardly_waits() {
    let call = Demand::Every(20 * MS, 228);
    let first = Share { first: true, ..Share::default() };
    let classes = [(first, call), (Share::default(), Demand::Greedy), (weight(100), Demand::Greedy)];
    let mut world = World::new(10_000_000, &classes);
    world.run(100 * MS);
    let rates = world.rates(2 * SECOND);
    assert!(world.sources[0].longest <= 50 * US, "{:?}", world.sources[0].longest);
    assert_near(rates[0], 228.0 * 8.0 * 50.0, 0.02);
    assert_near(rates.iter().sum(), 10e6, 0.01);
    // Many packets at once take the link as if they were alone on it, and a packet that is on its way.
    world.demand(0, Demand::Every(100 * MS, 6000));
    world.sources[0].longest = Duration::ZERO;
    world.run(SECOND);
    assert!(world.sources[0].longest <= 2 * MS, "{:?}", world.sources[0].longest);
}

#[test]
fn a_class_with_first_competes_beyond_its_max() {
    let first = Share { first: true, max: Some(Portion::Percent(30)), ..Share::default() };
    let classes = [(first, Demand::Greedy), (Share::default(), Demand::Greedy)];
    let mut world = World::new(100_000_000, &classes);
    let rates = world.rates(2 * SECOND);
    assert_near(rates[0], 65e6, 0.02);
    assert_near(rates[1], 35e6, 0.02);
}

#[test]
fn min_is_guaranteed_and_max_is_not_exceeded() {
    let least = Share { min: Some(Portion::Rate(mbit(20))), ..weight(1) };
    let most = Share { max: Some(Portion::Percent(10)), ..weight(1000) };
    let classes = [(least, Demand::Greedy), (weight(9), Demand::Greedy), (most, Demand::Greedy)];
    let mut world = World::new(50_000_000, &classes);
    let rates = world.rates(2 * SECOND);
    assert_near(rates[2], 5e6, 0.02);
    // 20 that are owed, and a tenth of what is left.
    assert_near(rates[0], 22.5e6, 0.03);
    assert_near(rates.iter().sum(), 50e6, 0.01);
    world.demand(0, Demand::Nothing);
    world.demand(1, Demand::Nothing);
    world.run(100 * MS);
    assert_near(world.rates(SECOND)[2], 5e6, 0.02);
}

#[test]
fn unused_capacity_is_lent_at_once_and_returned_within_5_ms() {
    let classes = [(weight(4), Demand::Greedy), (weight(1), Demand::Greedy)];
    let mut world = World::new(40_000_000, &classes);
    for _ in 0..20 {
        world.run(37 * MS);
        world.demand(0, Demand::Nothing);
        world.run(2 * MS);
        assert_near(world.rates(20 * MS)[1], 40e6, 0.08);
        world.run(500 * MS);
        world.demand(0, Demand::Greedy);
        world.run(5 * MS);
        let rates = world.rates(20 * MS);
        assert_near(rates[0], 32e6, 0.08);
        assert_near(world.rates(100 * MS)[0], 32e6, 0.02);
    }
}

#[test]
fn a_class_with_little_data_sends_it_and_has_no_burst_after_silence() {
    let few = Demand::Every(2 * MS, 1000);
    let classes = [(Share::default(), few), (weight(5), Demand::Greedy)];
    let mut world = World::new(30_000_000, &classes);
    let rates = world.rates(SECOND);
    assert_near(rates[0], 4e6, 0.02);
    assert_near(rates[1], 26e6, 0.02);
    assert!(world.sources[0].longest <= 3 * MS, "{:?}", world.sources[0].longest);
    world.demand(0, Demand::Nothing);
    world.run(5 * SECOND);
    world.demand(0, Demand::Greedy);
    let before = world.sources[0].sent;
    world.ask(0);
    assert!(world.sources[0].sent - before <= 2 * 1500, "{} at once", world.sources[0].sent - before);
}

#[test]
fn a_new_capacity_counts_at_once() {
    let mut world = World::new(10_000_000, &[(weight(1), Demand::Greedy), (weight(3), Demand::Greedy)]);
    world.run(100 * MS);
    for rate in [100_000_000u64, 1_000_000, 25_000_000] {
        world.shaper.set_capacity(world.now, Some(BitRate::from_bps(rate)));
        world.run(50 * MS);
        let rates = world.rates(2 * SECOND);
        assert_near(rates[0], rate as f64 / 4.0, 0.02);
        assert_near(rates.iter().sum(), rate as f64, 0.01);
    }
}

#[test]
fn packets_that_never_wait_are_charged_to_their_class() {
    let mut world = World::new(8_000_000, &[(Share::default(), Demand::Greedy); 2]);
    world.run(100 * MS);
    let before = (world.sources[0].sent, world.sources[1].sent);
    for _ in 0..100 {
        world.shaper.on_sent(ClassId(0), 2000);
        world.run(10 * MS);
    }
    let (own, other) = (world.sources[0].sent - before.0, world.sources[1].sent - before.1);
    assert_near(own as f64, 300_000.0, 0.02);
    assert_near(other as f64, 500_000.0, 0.02);
}

#[test]
fn delayed_acknowledgements_of_little_data_do_not_lower_the_capacity() {
    let start = Instant::now();
    let mut shaper = Shaper::new(start, Some(mbit(50)));
    shaper.set_share(start, ClassId(1), Share { first: true, ..Share::default() });
    for step in 0..2000_u32 {
        let now = start + 5 * step * MS;
        // One packet every 20 ms, whose acknowledgement is held back for up to 15.
        let late = step / 4 % 4;
        assert!(shaper.available_bytes(now, ClassId(1)) > 0);
        shaper.on_sent(ClassId(1), if step % 4 == 0 { 240 } else { 0 });
        let is_back = step % 4 == late;
        let sample = Sample {
            delivered: if is_back { 240 } else { 0 },
            rtt: is_back.then(|| (13 + 5 * late) * MS),
            base_rtt: Some(13 * MS),
            backlogged: false,
        };
        shaper.on_sample(now, ClassId(1), sample);
    }
    assert_eq!(shaper.capacity(), Some(mbit(50)));
}

#[test]
fn an_unknown_base_rtt_does_not_make_the_whole_round_trip_a_queue() {
    let start = Instant::now();
    let known = |unknown: u32| {
        let mut shaper = Shaper::new(start, None);
        for step in 1..20_000u32 {
            let now = start + MS * step;
            for class in [ClassId(0), ClassId(2)] {
                let bytes = send(&mut shaper, now, class, 1250);
                let base_rtt = (step >= unknown).then_some(40 * MS);
                // Now and then there is a queue for a while.
                let rtt = if step / 100 % 10 == 9 { 50 * MS } else { 40 * MS };
                let sample = Sample { delivered: bytes, rtt: Some(rtt), base_rtt, backlogged: true };
                shaper.on_sample(now, class, sample);
            }
        }
        shaper.capacity().map_or(u64::MAX, BitRate::bps)
    };
    assert_eq!(known(10), known(0));
}

#[test]
fn short_outages_do_not_lower_the_capacity_to_nothing() {
    let start = Instant::now();
    let mut shaper = Shaper::new(start, None);
    let sample =
        |delivered, rtt| Sample { delivered, rtt: Some(rtt), base_rtt: Some(25 * MS), backlogged: true };
    let mut now = start;
    let mut play = |shaper: &mut Shaper, time: Duration, bytes: u64, delivered: u64, rtt: Duration| {
        let end = now + time;
        while now < end {
            now += MS;
            for class in [ClassId(0), ClassId(2)] {
                let sent = send(shaper, now, class, bytes);
                shaper.on_sample(now, class, sample(delivered.min(sent), rtt));
            }
        }
        now
    };
    // 20 Mbit/s in two classes, with a queue.
    play(&mut shaper, 3 * SECOND, 1250, 1250, 40 * MS);
    assert!(shaper.capacity().is_some(), "it is full");
    // Repeatedly hardly anything arrives for a moment, and late; then everything does.
    for _ in 0..12 {
        play(&mut shaper, 300 * MS, 1250, 0, 80 * MS);
        play(&mut shaper, 400 * MS, 1250, 1250, 25 * MS);
    }
    let end = play(&mut shaper, 10 * SECOND, 1250, 1250, 25 * MS);
    assert!(shaper.available_bytes(end + 5 * MS, ClassId(0)) > 0);
    let known = shaper.capacity().map_or(u64::MAX, BitRate::bps);
    assert!(known > 15_000_000, "{known} bit/s");
}

#[test]
fn a_measured_capacity_says_when_packets_last_waited_for_the_link() {
    let start = Instant::now();
    let mut shaper = Shaper::new(start, None);
    let play = |shaper: &mut Shaper, steps: std::ops::Range<u32>, backlogged| {
        for now in steps.map(|step| start + step * MS) {
            for class in [ClassId(0), ClassId(2)] {
                let delivered = send(shaper, now, class, 1250);
                let rtt = Some(if backlogged { 40 * MS } else { 25 * MS });
                let sample = Sample { delivered, rtt, base_rtt: Some(25 * MS), backlogged };
                shaper.on_sample(now, class, sample);
            }
        }
    };
    assert_eq!(shaper.capacity_measured(), None);
    play(&mut shaper, 0..3000, true);
    play(&mut shaper, 3000..9000, false);
    let measured = shaper.capacity_measured().expect("the link was full");
    assert!((2900 * MS..3500 * MS).contains(&(measured - start)), "{:?}", measured - start);
    shaper.set_capacity(start + 9 * SECOND, Some(mbit(50)));
    assert_eq!(shaper.capacity_measured(), None, "it is configured");
}

#[test]
fn a_single_class_is_not_limited_while_the_capacity_is_unknown() {
    let now = Instant::now();
    let mut shaper = Shaper::new(now, None);
    assert_eq!((shaper.available_bytes(now, ClassId(1)), shaper.retry_at(now, ClassId(1))), (u64::MAX, None));
    shaper.set_share(now, ClassId(1), Share { max: Some(Portion::Rate(mbit(8))), ..Share::default() });
    let mut sent = 0;
    for step in 0..10_000 {
        while shaper.available_bytes(now + step * 100 * US, ClassId(1)) > 0 {
            shaper.on_sent(ClassId(1), 1000);
            sent += 1000;
        }
    }
    assert_near(sent as f64, 1e6, 0.02);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// For any classes and demands, the whole link is used, no class gets more than the link, and none less
    /// than its share.
    #[test]
    fn any_classes_share_any_link_fairly(
        rate in 200_000u64..2_000_000_000,
        classes in proptest::collection::vec((1u64..50, any::<bool>(), 0u8..25, 0u8..4), 2..8),
    ) {
        let as_class = |(number, first, min, demand): (u64, bool, u8, u8)| {
            let min = (min > 0 && !first).then_some(Portion::Percent(min / 2 + 1));
            let max = first.then_some(Portion::Percent(10));
            let demand = match demand {
                0 => Demand::Nothing,
                1 => Demand::Every(Duration::from_secs_f64(8.0 * 15_000.0 / rate as f64), 1000),
                _ => Demand::Greedy,
            };
            (Share { first, min, max, ..weight(number) }, demand)
        };
        let classes: Vec<_> = classes.into_iter().map(as_class).collect();
        let mut world = World::new(rate, &classes);
        world.run(100 * MS);
        let time = Duration::from_secs_f64((20e6 / rate as f64).clamp(1.0, 20.0));
        let rates = world.rates(time);
        let (all, rate) = (rates.iter().sum::<f64>(), rate as f64);
        prop_assert!(all <= rate * 1.01 + 8.0 * 40_000.0 / time.as_secs_f64(), "{all} of {rate}");
        let greedy = classes.iter().any(|(_, demand)| matches!(demand, Demand::Greedy));
        prop_assert!(!greedy || all >= rate * 0.98, "{all} of {rate}: {rates:?}");
        let weights: f64 = classes.iter().map(|(share, _)| f64::from(share.weight.get())).sum();
        let owed: f64 = classes.iter().map(|(share, _)| match share {
            Share { first: true, .. } => 0.1,
            share => share.min.map_or(0.0, |min| min.of(BitRate::from_bps(1_000_000)).bps() as f64 / 1e6),
        }).sum();
        for ((share, demand), own) in classes.iter().zip(&rates) {
            if !matches!(demand, Demand::Greedy) || owed > 1.0 {
                continue;
            }
            let least = share.min.map_or(0.0, |min| min.of(BitRate::from_bps(1_000_000)).bps() as f64 / 1e6);
            let fair = least + (1.0 - owed) * f64::from(share.weight.get()) / weights;
            prop_assert!(*own >= rate * fair * 0.97 - 8.0 * 3000.0 / time.as_secs_f64(),
                "{own} of {rate}, {fair} is its share: {rates:?} for {classes:?}");
        }
    }

    /// Nothing overflows, and no wake-up is far in the future.
    #[test]
    fn extreme_numbers_do_not_overflow(
        rate in prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>()],
        steps in proptest::collection::vec((any::<u64>(), any::<u64>(), 0u8..=255, any::<bool>()), 1..60),
    ) {
        let mut now = Instant::now();
        let mut shaper = Shaper::new(now, Some(BitRate::from_bps(rate)));
        for (time, bytes, class, on) in steps {
            now += Duration::from_nanos(time >> (time % 50 + 14));
            let portion = Some(
                if on { Portion::Rate(BitRate::from_bps(bytes)) } else { Portion::Percent(class) }
            );
            let id = ClassId(class);
            shaper.set_share(now, id, Share { first: on, min: portion, max: portion, ..Share::default() });
            shaper.available_bytes(now, id);
            shaper.on_sent(id, bytes);
            shaper.set_backlogged(now, id, on);
            let wakes = shaper.retry_at(now, id);
            prop_assert!(wakes.is_none_or(|at| at > now && at <= now + MAX_WAIT));
            shaper.class_rate(now, id);
            let sample = Sample {
                delivered: bytes, rtt: Some(now - (now - MS)), base_rtt: Some(MS), backlogged: on
             };
            shaper.on_sample(now, id, sample);
            if bytes % 7 == 0 {
                shaper.set_capacity(now, on.then_some(BitRate::from_bps(time)));
            }
        }
    }
}

#[test]
fn a_class_is_the_only_active_one_until_another_sends() {
    let now = Instant::now();
    let mut shaper = Shaper::new(now, None);
    assert!(shaper.is_single_class_active(now));
    shaper.on_sent(ClassId(1), 1500);
    assert!(shaper.is_single_class_active(now));
    // Acknowledgements are sent without asking.
    shaper.on_sent(ClassId(2), 60);
    assert!(!shaper.is_single_class_active(now));
    let later = now + 3 * SECOND;
    assert_eq!(shaper.available_bytes(later, ClassId(1)), u64::MAX);
    shaper.on_sent(ClassId(1), 1500);
    assert!(shaper.is_single_class_active(later), "the other was silent for 3 s");
}

#[test]
fn a_class_waits_for_its_own_queue_when_another_class_starts() {
    let start = Instant::now();
    let mut shaper = Shaper::new(start, None);
    let (call, bulk) = (ClassId(1), ClassId(2));
    shaper.set_share(start, call, Share { first: true, ..Share::default() });
    let mut now = start;
    for step in 0..1000_u32 {
        now += MS;
        shaper.set_backlogged(now, bulk, true);
        shaper.on_sent(bulk, 6250);
        let queue = if step < 500 { 0 } else { 20 };
        if step % 5 == 0 {
            shaper.on_clock_report(now, 1, shaper.clock_micros(now), Some(queue * 1000));
        }
        let rtt = Some((13 + queue) * MS);
        shaper.on_sample(
            now,
            bulk,
            Sample { delivered: 6250, rtt, base_rtt: Some(13 * MS), backlogged: true },
        );
    }
    assert_near(shaper.capacity().map_or(0.0, |rate| rate.bps() as f64), 50e6, 0.01);
    assert!(shaper.available_bytes(now, bulk) > 0, "no other class is active");
    assert!(shaper.available_bytes(now, call) > 1000, "the call begins at once");
    let in_hand = shaper.available_bytes(now, bulk);
    assert!(in_hand < 2 * 1500, "{in_hand} bytes");
    shaper.on_sent(bulk, in_hand);
    let waits = (0..200_u32).find(|step| shaper.available_bytes(now + 250 * US * *step, bulk) > 0);
    assert_near(waits.map_or(0.0, |steps| f64::from(steps) / 4.0), 20.0, 0.1);
}

#[test]
fn delayed_acknowledgements_are_not_a_queue_of_the_first_burst() {
    let start = Instant::now();
    let mut shaper = Shaper::new(start, None);
    let (call, bulk) = (ClassId(1), ClassId(2));
    shaper.set_share(start, call, Share { first: true, ..Share::default() });
    for step in 0..700_u32 {
        let now = start + MS * step;
        // A delayed report is the last one for a long time, because little is sent, and acknowledged late.
        if step <= 400 && step % 50 == 0 {
            shaper.on_clock_report(
                now,
                1,
                shaper.clock_micros(now),
                Some(if step == 400 { 8000 } else { 0 }),
            );
        }
        send(&mut shaper, now, call, 60);
        if step == 600 {
            shaper.on_sent(bulk, 40_000);
        }
        let rtt = Some(Duration::from_millis(if step < 400 { 25 } else { 30 }));
        let sample = Sample { delivered: 60, rtt, base_rtt: Some(25 * MS), backlogged: false };
        shaper.on_sample(now, call, sample);
        assert_eq!(shaper.capacity(), None, "after {step} ms");
    }
}

#[test]
fn a_delay_of_less_than_three_packets_at_the_rate_does_not_show_a_rate() {
    let start = Instant::now();
    // A class that only acknowledges, and sends more of that after a while: 0.2 MB/s, of which three full
    // packets are 22 ms.
    let capacity = |delay: Duration| {
        let mut shaper = Shaper::new(start, None);
        shaper.set_share(start, ClassId(1), Share { first: true, ..Share::default() });
        for step in 0..700_u32 {
            let (now, more) = (start + MS * step, step >= 400);
            let (bytes, queue) = if more { (200, delay) } else { (40, Duration::ZERO) };
            if step % 10 == 0 {
                let found = Some(queue.as_micros() as u32);
                shaper.on_clock_report(now, 1, shaper.clock_micros(now), found);
            }
            send(&mut shaper, now, ClassId(1), 10);
            send(&mut shaper, now, ClassId(0), bytes);
            let (rtt, base_rtt) = (Some(MS + queue), Some(MS));
            let sample = Sample { delivered: bytes, rtt, base_rtt, backlogged: false };
            shaper.on_sample(now, ClassId(0), sample);
        }
        shaper.capacity()
    };
    assert_eq!(capacity(Duration::from_micros(1500)), None, "a busy machine delays what it forwards");
    assert!(capacity(30 * MS).is_some(), "a queue");
}

#[test]
fn a_full_link_is_seldom_filled_again() {
    const RATE: f64 = 6.25e6;
    let start = Instant::now();
    let mut shaper = Shaper::new(start, None);
    let (mut backlog, mut delivered, mut waited) = (0.0, 0.0, 0);
    // The peer.s measurements are known here 13 ms later.
    let mut queues = [0.0; 13];
    for step in 0..60_000_u32 {
        let now = start + MS * step;
        for class in [ClassId(0), ClassId(2)] {
            backlog += send(&mut shaper, now, class, 12_000) as f64;
        }
        let carried = f64::min(backlog, RATE / 1000.0);
        backlog = (backlog - carried).min(RATE * 0.06);
        let at = step as usize % queues.len();
        let queue: f64 = std::mem::replace(&mut queues[at], backlog / RATE);
        if step % 10 == 0 {
            shaper.on_clock_report(now, 1, shaper.clock_micros(now), Some((queue * 1e6) as u32));
        }
        let rtt = Some(13 * MS + Duration::from_secs_f64(queue));
        let sample = Sample { delivered: carried as u64 / 2, rtt, base_rtt: Some(13 * MS), backlogged: true };
        shaper.on_sample(now, ClassId(0), sample);
        shaper.on_sample(now, ClassId(2), sample);
        if step >= 10_000 {
            delivered += carried;
            waited += u32::from(backlog / RATE > 0.0005);
        }
    }
    let used = delivered / (50.0 * RATE);
    let waited = f64::from(waited) / 50_000.0;
    assert!(used > 0.98 && waited < 0.09, "{used:.3} of it is used, {waited:.3} of the time packets wait");
}

#[test]
fn the_time_with_a_backlog_counts_until_the_class_asks_no_more() {
    let now = Instant::now();
    let mut shaper = Shaper::new(now, Some(mbit(10)));
    let class = ClassId(1);
    assert_eq!(shaper.backlog_time(now + SECOND, class), Duration::ZERO);
    shaper.available_bytes(now, class);
    shaper.set_backlogged(now, class, true);
    shaper.available_bytes(now + 50 * MS, class);
    assert_eq!(shaper.backlog_time(now + 60 * MS, class), 60 * MS);
    shaper.set_backlogged(now + 70 * MS, class, false);
    assert_eq!(shaper.backlog_time(now + SECOND, class), 70 * MS);
    // A connection that ended with a backlog.
    shaper.available_bytes(now + SECOND, class);
    shaper.set_backlogged(now + SECOND, class, true);
    assert_eq!(shaper.backlog_time(now + 60 * SECOND, class), 70 * MS + DEMAND_TIMEOUT);
    assert_eq!(shaper.backlog_time(now + 60 * SECOND, ClassId(2)), Duration::ZERO);
}
