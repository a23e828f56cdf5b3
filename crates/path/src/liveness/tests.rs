use super::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Two ends of a path with 12 ms each way, driven in steps of 1 ms.
struct Pair {
    now: Instant,
    ends: [Liveness; 2],
    /// When a packet arrives, at which end, and whether that end has to acknowledge it.
    wire: Vec<(Instant, usize, bool)>,
    /// Whether packets are acknowledged over this path, as it is the only one.
    only: bool,
    /// Whether packets of end `i` arrive.
    open: [bool; 2],
    beats: [u32; 2],
    changes: Vec<(Instant, usize, LivenessChange)>,
}

impl Pair {
    fn new() -> Self {
        let now = Instant::now();
        let end = Liveness::new(LivenessConfig::default(), now);
        let mut ends = [end.clone(), end];
        for end in &mut ends {
            end.set_measurements(24 * MS, MS, 0.0);
        }
        let (wire, changes) = (Vec::new(), Vec::new());
        Self { now, ends, wire, only: false, open: [true; 2], beats: [0; 2], changes }
    }

    /// A path that is the only one of its connection.
    fn only() -> Self {
        let mut pair = Self { only: true, ..Self::new() };
        pair.ends.iter_mut().for_each(|end| end.set_only_path(pair.now, true));
        pair
    }

    /// Packets arrive again, and both ends find that out within 300 ms.
    fn must_be_back_soon(&mut self) {
        self.must_be_back_within(300 * MS);
    }

    /// The same within `limit`.
    fn must_be_back_within(&mut self, limit: Duration) {
        let restored = self.now;
        self.open = [true; 2];
        self.run(limit + Duration::from_secs(1), true);
        let back = self.changes.iter().map(|(at, ..)| *at - restored).max();
        assert!(self.changes.len() == 2 && back.is_some_and(|back| back <= limit), "{:?}", self.changes);
    }

    /// The end `from` sends a packet.
    fn send(&mut self, from: usize, eliciting: bool) {
        if eliciting {
            self.ends[from].on_sent(self.now);
        }
        if self.open[from] {
            self.wire.push((self.now + 12 * MS, 1 - from, eliciting && self.only));
        }
    }

    fn run(&mut self, time: Duration, busy: bool) {
        let end = self.now + time;
        while self.now < end {
            self.now += MS;
            let now = self.now;
            let arrived: Vec<_> = self.wire.extract_if(.., |(at, ..)| *at <= now).collect();
            for (_, to, eliciting) in arrived {
                self.ends[to].on_received(now);
                if eliciting {
                    self.send(to, false);
                }
            }
            for i in 0..2 {
                if busy {
                    self.ends[i].on_traffic(now);
                }
                let verdict = self.ends[i].poll(now);
                if let Some(change) = verdict.change {
                    self.changes.push((now, i, change));
                }
                if verdict.send_heartbeat {
                    self.beats[i] += 1;
                    self.send(i, true);
                }
            }
        }
    }
}

#[test]
fn inside_tcp_a_silence_of_a_timeout_is_no_death_and_a_longer_one_is() {
    let start = Instant::now();
    let mut path = Liveness::new(LivenessConfig::default().inside_tcp(), start);
    path.set_measurements(24 * MS, MS, 0.0);
    let mut died = None;
    for ms in 0..3000u32 {
        let now = start + ms * MS;
        path.on_traffic(now);
        if ms % 25 == 0 && !(300..900).contains(&ms) && ms < 2000 {
            path.on_received(now);
        }
        if path.poll(now).change == Some(LivenessChange::Dead) {
            died = died.or(Some(ms));
        }
    }
    assert!(died.is_some_and(|ms| (2600..2800).contains(&ms)), "{died:?}");
}

#[test]
fn a_silent_path_is_dead_within_100_ms_and_back_within_300() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    assert_eq!(pair.changes, [], "a path that works was called dead");
    let cut = pair.now;
    pair.open = [false; 2];
    pair.run(Duration::from_secs(1), true);
    assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
    for (at, end, change) in pair.changes.drain(..) {
        assert_eq!(change, LivenessChange::Dead);
        assert!(at - cut <= 100 * MS, "end {end} took {:?}", at - cut);
    }
    let restored = pair.now;
    pair.open = [true; 2];
    pair.run(Duration::from_secs(1), true);
    assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
    for (at, end, change) in &pair.changes {
        assert_eq!(*change, LivenessChange::Alive);
        assert!(*at - restored <= 300 * MS, "end {end} took {:?}", *at - restored);
    }
}

#[test]
fn heartbeats_of_idle_paths_leave_together() {
    let start = Instant::now();
    let mut paths = [0, 4, 9].map(|second| {
        let mut path = Liveness::new(LivenessConfig::default(), start);
        path.poll(start + second * 1000 * MS);
        path
    });
    let (mut times, mut heartbeats) = (0, 0);
    for second in 10..130 {
        let now = start + second * 1000 * MS;
        let mut due: Vec<bool> = paths.iter_mut().map(|path| path.poll(now).send_heartbeat).collect();
        if due.contains(&true) {
            for (path, due) in paths.iter_mut().zip(&mut due) {
                *due |= path.take_early_heartbeat(now);
            }
            times += 1;
            heartbeats += due.iter().filter(|due| **due).count();
        }
    }
    assert!(times <= 9 && heartbeats <= 27, "{heartbeats} heartbeats at {times} times in two minutes");
    let busy = start + 130_000 * MS;
    paths[0].on_traffic(busy);
    assert!(!paths[0].take_early_heartbeat(busy), "dense ones are sent when they are due");
}

#[test]
fn the_only_path_has_a_heartbeat_a_second_while_data_moves() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(10), true);
    assert!(pair.beats.iter().all(|beats| *beats <= 11), "{:?} heartbeats in 10 s", pair.beats);
    pair.run(Duration::from_secs(60), false);
    pair.run(Duration::from_secs(5), true);
    assert_eq!(pair.changes, [], "a path that works was called dead");
}

#[test]
fn data_that_is_answered_needs_no_heartbeats_on_the_only_path() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(2), true);
    pair.beats = [0; 2];
    for _ in 0..30 {
        pair.send(0, true);
        pair.run(Duration::from_secs(1), true);
    }
    assert_eq!(pair.beats[0], 0, "of the end that sends a packet a second");
    assert!((24..=30).contains(&pair.beats[1]), "{} in 30 s of the one that sends nothing", pair.beats[1]);
    assert_eq!(pair.changes, []);
}

#[test]
fn the_only_path_is_dead_soon_after_data_that_is_not_answered_and_back_within_300_ms() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(3), true);
    let cut = pair.now;
    pair.open = [false; 2];
    pair.send(0, true);
    pair.run(Duration::from_secs(2), true);
    let died: Vec<_> = pair.changes.drain(..).map(|(at, end, change)| (end, change, at - cut)).collect();
    let [(0, LivenessChange::Dead, asked), (1, LivenessChange::Dead, silent)] = died[..] else {
        panic!("{died:?}");
    };
    assert!(asked <= 160 * MS, "the end that sends data took {asked:?}");
    let most = awaited_ack::ACKED_HEARTBEAT_INTERVAL + 160 * MS;
    assert!(silent <= most, "the other one, which asks with a heartbeat now and then, took {silent:?}");
    pair.must_be_back_soon();
}

#[test]
fn both_ends_ask_ever_less_often_on_the_only_path_while_it_is_dead() {
    let mut pair = Pair::only();
    pair.ends[1].set_config(pair.now, LivenessConfig::default().of_server());
    pair.run(Duration::from_secs(3), true);
    pair.open = [false; 2];
    pair.run(Duration::from_secs(2), true);
    pair.beats = [0; 2];
    pair.run(Duration::from_secs(10), true);
    let [client, server] = pair.beats;
    // With pauses of a sixteenth of a silence that grows from 2 to 12 s: 16 · ln(12 / 2).
    assert!((20..=30).contains(&client), "{client} heartbeats of the client in 10 s");
    assert!((4..=7).contains(&server), "{server} of the server");
    pair.changes.clear();
    pair.must_be_back_within(12 * SECOND / 16 + 300 * MS);
}

#[test]
fn a_late_answer_is_asked_for_as_often_as_the_verdict_needs() {
    let mut pair = Pair::only();
    pair.ends.iter_mut().for_each(|end| end.set_measurements(400 * MS, 100 * MS, 0.0));
    pair.run(Duration::from_secs(3), true);
    pair.open = [false; 2];
    pair.beats = [0; 2];
    pair.send(0, true);
    while pair.ends[0].is_alive() {
        pair.run(MS, true);
    }
    assert!(pair.beats[0] <= 3, "{} heartbeats until the path is dead", pair.beats[0]);
}

#[test]
fn a_dead_only_path_is_asked_once_a_round_trip_at_most() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(3), true);
    pair.open = [false; 2];
    pair.run(Duration::from_secs(2), true);
    pair.ends.iter_mut().for_each(|end| end.set_measurements(400 * MS, MS, 0.0));
    pair.beats = [0; 2];
    pair.run(Duration::from_secs(4), true);
    assert!(pair.beats.iter().all(|beats| *beats <= 11), "{:?} heartbeats in ten round trips", pair.beats);
}

#[test]
fn a_lost_packet_is_no_death_of_the_only_path() {
    for rtt_ms in [24, 600] {
        let mut pair = Pair::only();
        pair.ends.iter_mut().for_each(|end| end.set_measurements(rtt_ms * MS, MS, 0.0));
        pair.run(Duration::from_secs(3), true);
        pair.open[0] = false;
        pair.send(0, true);
        pair.open[0] = true;
        pair.run(Duration::from_secs(3), true);
        assert_eq!(pair.changes, [], "with {rtt_ms} ms");
    }
}

#[test]
fn a_second_path_makes_heartbeats_dense_and_is_no_death_of_the_first() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(3), true);
    // One end learns of it before the other one does.
    pair.ends[0].set_only_path(pair.now, false);
    pair.run(12 * MS, true);
    pair.ends[1].set_only_path(pair.now, false);
    pair.only = false;
    pair.beats = [0; 2];
    pair.run(Duration::from_secs(1), true);
    assert!(pair.beats.iter().all(|beats| *beats >= 30), "{:?} heartbeats in a second", pair.beats);
    assert_eq!(pair.changes, []);
}

#[test]
fn a_flapping_path_is_alive_later_each_time_but_never_given_up() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    // A second without any packet, then how long both ends take to trust the path again.
    let flap = |pair: &mut Pair| {
        pair.open = [false; 2];
        pair.run(Duration::from_secs(1), true);
        pair.changes.clear();
        let restored = pair.now;
        pair.open = [true; 2];
        pair.run(Duration::from_secs(1), true);
        pair.changes.iter().map(|(at, ..)| *at - restored).max().expect("back within a second")
    };
    let back: Vec<Duration> = (0..5).map(|_| flap(&mut pair)).collect();
    assert!(back[0] < back[1] && back[1] < back[2] && back[4] <= 400 * MS, "{back:?}");
    pair.run(Duration::from_secs(6), true);
    let later = flap(&mut pair);
    // Heartbeats of the silence come every sixteenth of it.
    assert!(later <= back[0] + SECOND / 16, "it was steady meanwhile: {later:?}, {back:?}");
}

#[test]
fn the_only_path_is_back_as_soon_however_often_it_flaps() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(3), true);
    for phase in 0..20 {
        pair.open = [false; 2];
        pair.run((1500 + 13 * phase) * MS, true);
        pair.changes.clear();
        // A pause between questions, a sixteenth of the silence, and two heartbeats with their answers.
        pair.must_be_back_within(200 * MS);
    }
}

#[test]
fn traffic_at_the_peer_makes_heartbeats_dense_while_it_reports_it() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(20), false);
    pair.beats = [0; 2];
    for _ in 0..10 {
        let now = pair.now;
        for end in &mut pair.ends {
            end.on_peer_traffic(now, now + 300 * MS);
        }
        pair.run(100 * MS, false);
    }
    assert!((35..=45).contains(&pair.beats[0]), "{} heartbeats in a second", pair.beats[0]);
    pair.run(300 * MS, false);
    pair.beats = [0; 2];
    pair.run(Duration::from_secs(10), false);
    assert!(pair.beats[0] <= 1, "{} heartbeats after it was over", pair.beats[0]);
    assert_eq!(pair.changes, []);
}

#[test]
fn the_end_that_receives_nothing_notices_the_loss_of_one_direction() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    pair.open = [false, true];
    pair.run(Duration::from_secs(1), true);
    let seen: Vec<_> = pair.changes.iter().map(|(_, end, change)| (*end, *change)).collect();
    assert_eq!(seen, [(1, LivenessChange::Dead)]);
}

#[test]
fn a_dead_path_is_asked_ever_less_often_while_data_moves() {
    let mut pair = Pair::new();
    pair.ends[1].set_config(pair.now, LivenessConfig::default().of_server());
    pair.run(3 * SECOND, true);
    for open in [[false; 2], [true, false]] {
        pair.open = open;
        pair.run(60 * SECOND, true);
        pair.beats = [0; 2];
        pair.run(60 * SECOND, true);
        // The client asks every 2 s; the server seldom, or as often as it is asked.
        let [client, server] = pair.beats;
        assert!((25..=35).contains(&client), "{open:?}: {client} heartbeats of the client in a minute");
        let most = if open[0] { 100 } else { 5 };
        assert!(server <= most, "{open:?}: {server} of the server");
    }
    pair.changes.clear();
    pair.must_be_back_within(3 * SECOND);
}

#[test]
fn heartbeats_are_dense_only_while_data_moves() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(10), true);
    let busy = pair.beats[0];
    assert!((300..=400).contains(&busy), "{busy} heartbeats in 10 s of traffic");
    pair.run(Duration::from_secs(3), false);
    pair.beats = [0; 2];
    pair.run(Duration::from_secs(60), false);
    assert!(pair.beats[0] <= 5, "{} heartbeats in an idle minute", pair.beats[0]);
    assert_eq!(pair.changes, [], "idleness was taken for death");
}

#[test]
fn traffic_after_a_long_idle_time_is_no_death() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(40), false);
    pair.run(Duration::from_secs(1), true);
    assert_eq!(pair.changes, []);
}

#[test]
fn carrier_loss_is_death_at_once_and_sends_nothing() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    let now = pair.now;
    pair.ends[0].on_carrier(now, false);
    assert!(!pair.ends[0].is_alive());
    assert_eq!(pair.ends[0].reason().to_string(), "no carrier");
    pair.beats = [0; 2];
    pair.run(500 * MS, true);
    assert_eq!(pair.beats[0], 0);
    let now = pair.now;
    pair.ends[0].on_carrier(now, true);
    pair.run(300 * MS, true);
    assert!(pair.ends.iter().all(Liveness::is_alive), "not back 300 ms after the carrier");
}

#[test]
fn a_lossy_path_may_miss_more_heartbeats() {
    let now = Instant::now();
    let mut path = Liveness::new(LivenessConfig::default(), now);
    path.set_measurements(25 * MS, MS, 0.0);
    assert_eq!(path.required_misses(), 3);
    path.set_measurements(25 * MS, MS, 0.1);
    assert_eq!(path.required_misses(), 5);
    path.set_measurements(25 * MS, MS, 0.3);
    assert_eq!(path.required_misses(), 10);
    path.set_measurements(25 * MS, MS, 1.0);
    assert_eq!(path.required_misses(), MAX_MISSED);
}

#[test]
fn a_burst_is_one_arrival() {
    let now = Instant::now();
    let mut path = Liveness::new(LivenessConfig::default(), now);
    path.on_carrier(now, false);
    path.on_carrier(now, true);
    for _ in 0..50 {
        path.on_received(now + MS);
    }
    assert_eq!(path.poll(now + MS).change, None);
    path.on_received(now + 20 * MS);
    assert_eq!(path.poll(now + 20 * MS).change, Some(LivenessChange::Alive));
}

#[test]
fn metered_paths_have_fewer_heartbeats_and_are_judged_by_them() {
    let mut pair = Pair::new();
    let now = pair.now;
    for end in &mut pair.ends {
        end.set_config(now, LivenessConfig::metered());
    }
    pair.run(Duration::from_secs(10), true);
    assert!((150..=205).contains(&pair.beats[0]), "{} heartbeats in 10 s of traffic", pair.beats[0]);
    pair.beats = [0; 2];
    pair.ends.iter_mut().for_each(Liveness::end_dense_heartbeats);
    pair.run(Duration::from_secs(100), false);
    assert!(pair.beats[0] <= 4, "{} heartbeats in 100 idle seconds", pair.beats[0]);
    pair.run(Duration::from_secs(3), true);
    assert_eq!(pair.changes, [], "a path that works was called dead");
    let cut = pair.now;
    pair.open = [false; 2];
    pair.run(Duration::from_secs(1), true);
    assert_eq!(pair.changes.len(), 2, "{:?}", pair.changes);
    for (at, end, _) in pair.changes {
        assert!(at - cut <= 300 * MS, "end {end} took {:?}", at - cut);
    }
}

#[test]
fn one_end_may_learn_later_that_a_path_is_metered() {
    for first in 0..2 {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        for end in [first, 1 - first] {
            let now = pair.now;
            pair.ends[end].set_config(now, LivenessConfig::metered());
            pair.run(200 * MS, true);
        }
        for end in [first, 1 - first] {
            let now = pair.now;
            pair.ends[end].set_config(now, LivenessConfig::default());
            pair.run(200 * MS, true);
        }
        assert_eq!(pair.changes, [], "a path that works was called dead");
    }
}

#[test]
fn silence_during_a_local_stall_proves_nothing() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    let later = pair.now + 500 * MS;
    pair.ends[0].on_traffic(later);
    pair.ends[0].on_local_stall(later);
    assert_eq!(pair.ends[0].poll(later).change, None);
}

#[test]
fn silence_is_reported_a_heartbeat_before_it_means_death_and_denied_at_the_next_arrival() {
    let mut pair = Pair::new();
    pair.run(Duration::from_secs(3), true);
    let mut end = pair.ends[0].clone();
    let last = end.last_received();
    let mut reported = None;
    let mut now = pair.now;
    while end.is_alive() {
        now += MS;
        end.on_traffic(now);
        let update = end.poll(now);
        if update.report && reported.is_none() {
            assert!(end.is_alive() && !end.is_heard(now));
            reported = Some(now - last);
            // An end that hears again says so at once.
            let mut other = end.clone();
            other.on_received(now + MS);
            assert_eq!(other.poll_timeout(now + MS), Some(now + MS));
            assert!(other.poll(now + MS).report && other.is_heard(now + MS));
        }
    }
    let (reported, dead) = (reported.expect("a report"), now - last);
    assert!(reported <= 2 * 25 * MS + 2 * MS, "{reported:?}");
    assert!((24 * MS..=27 * MS).contains(&(dead - reported)), "dead {dead:?}, reported {reported:?}");
}

#[test]
fn a_path_that_was_dead_a_moment_ago_is_reported_as_soon_as_any() {
    for since_return in [200, 500, 800, 1200] {
        let mut pair = Pair::new();
        pair.run(Duration::from_secs(3), true);
        pair.open = [false; 2];
        pair.run(Duration::from_secs(1), true);
        pair.open = [true; 2];
        pair.run(since_return * MS, true);
        let end = &pair.ends[0];
        assert!(end.is_alive(), "{since_return}");
        let reported =
            (1..500).map(|ms| ms * MS).find(|silence| !end.is_heard(end.last_received() + *silence));
        assert!(reported.is_some_and(|silence| silence <= 52 * MS), "{since_return}: {reported:?}");
    }
}

#[test]
fn the_only_path_is_not_reported_before_it_is_dead() {
    let mut pair = Pair::only();
    pair.run(Duration::from_secs(3), true);
    pair.open = [false; 2];
    pair.send(0, true);
    while pair.ends[0].is_alive() {
        assert!(pair.ends[0].is_heard(pair.now));
        pair.run(MS, true);
    }
    assert!(!pair.ends[0].is_heard(pair.now));
}

#[test]
fn a_path_that_is_often_silent_for_a_while_is_reported_later() {
    let limit = |pause: u32| {
        let mut end = Pair::new().ends[0].clone();
        let mut now = end.last_received();
        for _ in 0..400 {
            now += pause * MS;
            end.on_traffic(now);
            end.on_received(now);
            assert!(!end.poll(now).report && end.is_alive(), "no arrival changes what is known");
        }
        (1..500).map(|ms| ms * MS).find(|silence| !end.is_heard(now + *silence))
    };
    assert_eq!([5, 24, 35, 45].map(limit), [51, 51, 60, 70].map(|ms| Some(ms * MS)));
}

/// Counts the heartbeats of an end that hears nothing; `each` runs after each of its turns, 10 ms apart.
fn heartbeats(
    end: &mut Liveness,
    now: &mut Instant,
    seconds: u64,
    busy: bool,
    each: impl Fn(&mut Liveness, Instant),
) -> u32 {
    let mut count = 0;
    for _ in 0..seconds * 100 {
        *now += 10 * MS;
        if busy {
            end.on_traffic(*now);
        }
        count += u32::from(end.poll(*now).send_heartbeat);
        each(end, *now);
    }
    count
}

#[test]
fn an_end_that_hears_nothing_on_any_path_asks_rarely_until_it_has_a_reason() {
    let mut now = Instant::now();
    let mut end = Liveness::new(LivenessConfig::default(), now);
    let mut beats = |end: &mut Liveness, seconds, busy| {
        heartbeats(end, &mut now, seconds, busy, |end, now| end.set_alone(now, !end.is_alive()))
    };
    beats(&mut end, 60, true);
    let minute = beats(&mut end, 60, true);
    assert!(minute <= 4, "{minute} heartbeats in the second minute, though data is to be sent");
    assert!(beats(&mut end, 60, false) <= 3);
    let again = beats(&mut end, 2, true);
    assert!(again >= 10, "{again} heartbeats after a pause of the traffic");
    assert!(beats(&mut end, 60, false) <= 60);
}

#[test]
fn a_path_that_another_connection_asks_on_is_probed_only_for_data_and_at_once_afterwards() {
    let start = Instant::now();
    let (mut now, mut end) = (start, Liveness::new(LivenessConfig::metered(), start));
    let mut beats = |end: &mut Liveness, seconds, busy| heartbeats(end, &mut now, seconds, busy, |_, _| ());
    beats(&mut end, 120, true);
    assert!(!end.is_alive());
    assert!(end.set_probed(false) && !end.set_probed(false), "a change once");
    assert!((5..=7).contains(&beats(&mut end, 60, true)), "data could use the path when it is back");
    beats(&mut end, 3, false);
    assert_eq!(beats(&mut end, 600, false), 0);
    end.set_probed(true);
    assert_eq!(beats(&mut end, 1, false), 1);
    assert!((4..=5).contains(&beats(&mut end, 120, false)), "the binding of a NAT lives on");
    end.set_alone(start, true);
    beats(&mut end, 120, false);
    assert!(beats(&mut end, 240, false) <= 2, "packets of full size ask as well");
}
