//! One direction of a link, without clock or socket: packets go in with a time and come out with a time.
//!
//! ```text
//! push ─▶ size limit ─▶ its port's loss ─▶ its session's shaper ─▶ queue, tail drop ─▶ rate ─▶ random loss ─▶ delay ± jitter ─▶ pop
//! ```
//!
//! In: packets and the current time, which never runs backwards. Out: each packet once, or a counted drop.
//! Always holds: packets of a session leave in the order in which they came, and so do all where no session has a
//! rate of its own; none leaves earlier than the rate and the delay allow;
//! the same seed and the same input give the same output; memory is bounded.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    shaper::{Packet, Shaper, UdpFlow},
    spec::{ByteCount, ChannelParams},
};

/// The grain of the delivery history.
pub const HISTORY_STEP: Duration = Duration::from_millis(10);
/// The history keeps one hour; older steps are forgotten.
const HISTORY_STEPS: usize = 360_000;
/// No more packets than this are held, whatever rate and delay would allow.
const MAX_PACKETS: usize = 1 << 18;

/// What one direction did so far. Bytes are those of IP packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Packets delivered.
    pub packets: u64,
    /// Bytes delivered.
    pub bytes: u64,
    /// Packets dropped because the queue was full.
    pub dropped_queue: u64,
    /// Packets lost at random.
    pub dropped_loss: u64,
    /// Packets dropped because they were larger than the size limit.
    pub dropped_mtu: u64,
    /// Packets that came, waited or flew while the link was cut.
    pub dropped_down: u64,
}

/// What became of a packet on arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is on its way.
    Accepted,
    /// It is gone: the queue was full.
    QueueFull,
    /// It is gone: it was larger than the size limit.
    TooLarge,
    /// It is gone: lost at random, as packets of its port are.
    Lost,
    /// It is gone: the link is cut.
    Cut,
}

/// Whether a direction carries anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    Cut,
}

struct Waiting<T> {
    ip_bytes: u32,
    item: T,
}

struct Flying<T> {
    release: Instant,
    ip_bytes: u32,
    item: T,
}

/// One direction of a link that carries packets of type `T`.
pub struct Channel<T> {
    params: ChannelParams,
    overhead: u32,
    state: State,
    rng: Rng,
    /// Packets that their sessions' rate holds back.
    shaper: Shaper<T>,
    /// Packets before the bottleneck; the first of them is being sent.
    queue: VecDeque<Waiting<T>>,
    /// Bytes in `queue`, counted as the rate counts them.
    queued_bytes: u64,
    /// When the first packet of `queue` has left the bottleneck.
    head_done: Instant,
    /// Packets behind the bottleneck, ordered by release time.
    flying: VecDeque<Flying<T>>,
    last_release: Instant,
    discarded: Vec<T>,
    counters: Counters,
    history: VecDeque<u64>,
    history_start: Instant,
}

impl<T> Channel<T> {
    /// A direction that starts empty at `now`; its random draws follow from `seed`.
    pub fn new(params: ChannelParams, count: ByteCount, seed: u64, now: Instant) -> Self {
        Self {
            params,
            overhead: count.overhead(),
            state: State::Up,
            rng: Rng(seed),
            shaper: Shaper::new(),
            queue: VecDeque::new(),
            queued_bytes: 0,
            head_done: now,
            flying: VecDeque::new(),
            last_release: now,
            discarded: Vec::new(),
            counters: Counters::default(),
            history: VecDeque::new(),
            history_start: now,
        }
    }

    /// A packet of `ip_bytes` arrives at `now` that belongs to no session.
    pub fn push(&mut self, now: Instant, ip_bytes: u32, item: T) -> Verdict {
        self.push_with_flow(now, None, ip_bytes, item)
    }

    /// A packet of `ip_bytes` arrives at `now`; where sessions have a rate, it may be dropped later, too.
    pub fn push_with_flow(
        &mut self,
        now: Instant,
        session: Option<UdpFlow>,
        ip_bytes: u32,
        item: T,
    ) -> Verdict {
        self.advance(now);
        let verdict = self.judge(session, ip_bytes);
        if verdict != Verdict::Accepted {
            return self.refuse(verdict, item);
        }
        let Some((session, rate)) = session.zip(self.params.session_rate) else {
            return self.enter(now, ip_bytes, item);
        };
        let counted = ip_bytes + self.overhead;
        if !self.shaper.has_room(&session, rate, self.params.queue, counted) {
            return self.refuse(Verdict::QueueFull, item);
        }
        let gone = self.shaper.push(now, session, rate, Packet { ip_bytes, counted, item });
        self.counters.dropped_queue += gone.len() as u64;
        self.discarded.extend(gone);
        verdict
    }

    fn refuse(&mut self, verdict: Verdict, item: T) -> Verdict {
        match verdict {
            Verdict::Accepted => {}
            Verdict::QueueFull => self.counters.dropped_queue += 1,
            Verdict::TooLarge => self.counters.dropped_mtu += 1,
            Verdict::Lost => self.counters.dropped_loss += 1,
            Verdict::Cut => self.counters.dropped_down += 1,
        }
        self.discarded.push(item);
        verdict
    }

    /// A packet comes to the bottleneck's queue, up to which everything has happened that was due by `at`.
    fn enter(&mut self, at: Instant, ip_bytes: u32, item: T) -> Verdict {
        let wanted = self.queued_bytes + u64::from(ip_bytes + self.overhead);
        if let Some(rate) = self.params.rate
            && !self.queue.is_empty()
            && wanted > rate.bytes_in(self.params.queue)
        {
            return self.refuse(Verdict::QueueFull, item);
        }
        if self.queue.is_empty() {
            self.head_done = self.head_done.max(at) + self.sending_time(ip_bytes);
        }
        self.queued_bytes = wanted;
        self.queue.push_back(Waiting { ip_bytes, item });
        Verdict::Accepted
    }

    /// The next packet whose time has come.
    pub fn pop(&mut self, now: Instant) -> Option<T> {
        self.advance(now);
        if self.flying.front()?.release > now {
            return None;
        }
        let Flying { release, ip_bytes, item } = self.flying.pop_front()?;
        self.counters.packets += 1;
        self.counters.bytes += u64::from(ip_bytes);
        self.remember(release, ip_bytes);
        Some(item)
    }

    /// When [`pop`](Self::pop) has to be called again, if anything is under way.
    pub fn next_wake(&self) -> Option<Instant> {
        if let Some(first) = self.flying.front() {
            return Some(first.release);
        }
        let departure = if self.queue.is_empty() { self.shaper.next()? } else { self.head_done };
        let soonest = departure + self.params.delay.saturating_sub(self.params.jitter);
        Some(soonest.max(self.last_release))
    }

    /// Changes the settings at `now`. Packets in flight keep their times; those that wait see the new ones.
    pub fn change(&mut self, now: Instant, change: impl FnOnce(&mut ChannelParams)) {
        self.advance(now);
        let old = self.params.rate;
        change(&mut self.params);
        if self.params.rate == old || self.queue.is_empty() {
            return;
        }
        let left = self.head_done.saturating_duration_since(now);
        self.head_done = match (old, self.params.rate) {
            (Some(old), Some(new)) => now + new.time_for(old.bytes_in(left)),
            _ => now,
        };
    }

    /// The settings as they are.
    pub fn params(&self) -> &ChannelParams {
        &self.params
    }

    /// Cuts the link: what waits or flies is lost, and so is all that comes until [`restore`](Self::restore).
    pub fn cut(&mut self, now: Instant) {
        self.advance(now);
        self.state = State::Cut;
        self.counters.dropped_down += (self.shaper.len() + self.queue.len() + self.flying.len()) as u64;
        self.discarded.extend(self.shaper.clear());
        self.discarded.extend(self.queue.drain(..).map(|waiting| waiting.item));
        self.discarded.extend(self.flying.drain(..).map(|flying| flying.item));
        self.queued_bytes = 0;
        self.head_done = now;
        self.last_release = now;
    }

    /// Ends a cut.
    pub fn restore(&mut self) {
        self.state = State::Up;
    }

    /// Whether the link is cut in this direction.
    pub fn is_cut(&self) -> bool {
        self.state == State::Cut
    }

    /// The packets that were dropped since the last call, so that their buffers can be used again.
    pub fn discarded(&mut self) -> std::vec::Drain<'_, T> {
        self.discarded.drain(..)
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes delivered in each [`HISTORY_STEP`], and when the first of these steps began.
    pub fn history(&self) -> (Instant, Vec<u64>) {
        (self.history_start, self.history.iter().copied().collect())
    }

    fn judge(&mut self, session: Option<UdpFlow>, ip_bytes: u32) -> Verdict {
        if self.state == State::Cut {
            return Verdict::Cut;
        }
        if self.params.mtu.is_some_and(|mtu| ip_bytes > mtu) {
            return Verdict::TooLarge;
        }
        if self.shaper.len() + self.queue.len() + self.flying.len() >= MAX_PACKETS {
            return Verdict::QueueFull;
        }
        let ports = session.iter().flat_map(UdpFlow::ports);
        let loss = ports.filter_map(|port| self.params.port_loss.get(&port)).fold(0.0, |a: f64, b| a.max(*b));
        if loss > 0.0 && self.rng.share() < loss {
            return Verdict::Lost;
        }
        Verdict::Accepted
    }

    /// Lets everything happen that was due by `now`.
    fn advance(&mut self, now: Instant) {
        while let Some((at, Packet { ip_bytes, item, .. })) = self.shaper.pop(now, self.params.session_rate) {
            self.depart(at);
            self.enter(at, ip_bytes, item);
        }
        self.depart(now);
    }

    /// Moves every packet that has left the bottleneck by `now` on to its flight, or loses it.
    fn depart(&mut self, now: Instant) {
        while self.head_done <= now {
            let Some(Waiting { ip_bytes, item }) = self.queue.pop_front() else { return };
            let departure = self.head_done;
            self.queued_bytes -= u64::from(ip_bytes + self.overhead);
            if let Some(next) = self.queue.front() {
                self.head_done = departure + self.sending_time(next.ip_bytes);
            }
            if self.params.loss > 0.0 && self.rng.share() < self.params.loss {
                self.counters.dropped_loss += 1;
                self.discarded.push(item);
                continue;
            }
            let release = (departure + self.draw_delay()).max(self.last_release);
            self.last_release = release;
            self.flying.push_back(Flying { release, ip_bytes, item });
        }
    }

    fn sending_time(&self, ip_bytes: u32) -> Duration {
        self.params.rate.map_or(Duration::ZERO, |rate| rate.time_for(u64::from(ip_bytes + self.overhead)))
    }

    fn draw_delay(&mut self) -> Duration {
        let ChannelParams { delay, jitter, .. } = self.params;
        if jitter.is_zero() {
            return delay;
        }
        (delay + jitter.mul_f64(2.0 * self.rng.share())).saturating_sub(jitter)
    }

    fn remember(&mut self, at: Instant, ip_bytes: u32) {
        let since = at.saturating_duration_since(self.history_start);
        let mut step = (since.as_nanos() / HISTORY_STEP.as_nanos()) as usize;
        if step >= HISTORY_STEPS {
            let surplus = step + 1 - HISTORY_STEPS;
            self.history.drain(..surplus.min(self.history.len()));
            self.history_start += HISTORY_STEP * u32::try_from(surplus).unwrap_or(u32::MAX);
            step = HISTORY_STEPS - 1;
        }
        if self.history.len() <= step {
            self.history.resize(step + 1, 0);
        }
        self.history[step] += u64::from(ip_bytes);
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): small, fast, and good enough to draw losses.
struct Rng(u64);

impl Rng {
    /// Evenly distributed in [0, 1).
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::BitRate;
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn channel(params: ChannelParams) -> (Channel<u32>, Instant) {
        let start = Instant::now();
        (Channel::new(params, ByteCount::Ip, 7, start), start)
    }

    /// 1000-byte packets leave 1 ms apart at this rate.
    fn packet_a_ms() -> ChannelParams {
        ChannelParams { rate: Some(BitRate::from_bps(8_000_000)), ..ChannelParams::default() }
    }

    /// Runs the channel until it is empty; what came out, with the ms after `start`.
    fn drain(channel: &mut Channel<u32>, start: Instant) -> Vec<(u32, f64)> {
        let mut out = Vec::new();
        while let Some(at) = channel.next_wake() {
            while let Some(item) = channel.pop(at) {
                out.push((item, (at - start).as_nanos() as f64 / 1e6));
            }
        }
        out
    }

    #[test]
    fn a_burst_leaves_at_exactly_the_rate() {
        let (mut link, start) = channel(ChannelParams { delay: 5 * MS, ..packet_a_ms() });
        for n in 0..4 {
            assert_eq!(link.push(start, 1000, n), Verdict::Accepted);
        }
        assert_eq!(drain(&mut link, start), [(0, 6.0), (1, 7.0), (2, 8.0), (3, 9.0)]);
    }

    #[test]
    fn idle_time_is_not_saved_up_for_a_burst() {
        let (mut link, start) = channel(packet_a_ms());
        let later = start + 1000 * MS;
        link.push(later, 1000, 0);
        link.push(later, 1000, 1);
        assert_eq!(drain(&mut link, start), [(0, 1001.0), (1, 1002.0)]);
    }

    #[test]
    fn the_queue_holds_its_time_at_the_rate_and_no_more() {
        let (mut link, start) = channel(ChannelParams { queue: 10 * MS, ..packet_a_ms() });
        let verdicts: Vec<_> = (0..15).map(|n| link.push(start, 1000, n)).collect();
        assert_eq!(verdicts.iter().filter(|v| **v == Verdict::Accepted).count(), 10);
        assert_eq!(verdicts[10], Verdict::QueueFull);
        assert_eq!(link.counters().dropped_queue, 5);
        assert_eq!(link.discarded().count(), 5);
        assert_eq!(link.push(start + 3 * MS, 1000, 99), Verdict::Accepted, "three have left");
    }

    #[test]
    fn a_packet_passes_an_empty_queue_however_short() {
        let (mut link, start) = channel(ChannelParams { queue: Duration::ZERO, ..packet_a_ms() });
        assert_eq!(link.push(start, 1000, 0), Verdict::Accepted);
        assert_eq!(link.push(start, 1000, 1), Verdict::QueueFull);
    }

    #[test]
    fn ethernet_counting_makes_packets_longer() {
        let start = Instant::now();
        let mut link = Channel::new(packet_a_ms(), ByteCount::Ethernet, 1, start);
        link.push(start, 986, 0u32);
        link.push(start, 986, 1);
        assert_eq!(drain(&mut link, start), [(0, 1.0), (1, 2.0)]);
    }

    #[test]
    fn losses_are_drawn_after_the_bottleneck_and_come_near_their_share() {
        let (mut link, start) = channel(ChannelParams { loss: 0.1, queue: 1000 * MS, ..packet_a_ms() });
        let mut arrived = 0;
        for n in 0..20_000 {
            let now = start + n * MS;
            assert_eq!(link.push(now, 1000, n), Verdict::Accepted);
            arrived += usize::from(link.pop(now).is_some());
        }
        arrived += drain(&mut link, start).len();
        let counters = link.counters();
        assert_eq!(arrived as u64, counters.packets);
        assert_eq!(counters.packets + counters.dropped_loss, 20_000);
        assert!((1800..2200).contains(&counters.dropped_loss), "{counters:?}");
    }

    #[test]
    fn silent_loss_lets_nothing_through() {
        let (mut link, start) = channel(ChannelParams { loss: 1.0, ..packet_a_ms() });
        for n in 0..20 {
            link.push(start, 1000, n);
        }
        assert_eq!(drain(&mut link, start), []);
        assert_eq!(link.counters().dropped_loss, 20);
    }

    #[test]
    fn large_packets_vanish_in_a_black_hole() {
        let (mut link, start) = channel(ChannelParams { mtu: Some(1400), ..ChannelParams::default() });
        assert_eq!(link.push(start, 1401, 0), Verdict::TooLarge);
        assert_eq!(link.push(start, 1400, 1), Verdict::Accepted);
        assert_eq!(link.counters().dropped_mtu, 1);
    }

    #[test]
    fn a_cut_loses_what_is_under_way_and_what_comes() {
        let (mut link, start) = channel(ChannelParams { delay: 5 * MS, ..packet_a_ms() });
        for n in 0..5 {
            link.push(start, 1000, n);
        }
        link.cut(start + 2 * MS);
        assert_eq!(link.push(start + 3 * MS, 1000, 5), Verdict::Cut);
        assert_eq!(link.next_wake(), None);
        assert_eq!((link.counters().dropped_down, link.discarded().count()), (6, 6));
        link.restore();
        link.push(start + 10 * MS, 1000, 6);
        assert_eq!(drain(&mut link, start), [(6, 16.0)]);
    }

    #[test]
    fn a_new_rate_holds_for_what_waits() {
        let (mut link, start) = channel(packet_a_ms());
        for n in 0..3 {
            link.push(start, 1000, n);
        }
        link.change(start + MS / 2, |p| p.rate = Some(BitRate::from_bps(4_000_000)));
        assert_eq!(drain(&mut link, start), [(0, 1.5), (1, 3.5), (2, 5.5)]);
    }

    #[test]
    fn the_loss_of_a_port_harms_nobody_else() {
        let (mut link, start) =
            channel(ChannelParams { port_loss: [(4000, 0.3)].into(), ..ChannelParams::default() });
        let session =
            |from: u16, to: u16| Some(UdpFlow::new(([10, 0, 0, 1], from).into(), ([10, 0, 0, 2], to).into()));
        for (session, expected) in
            [(session(4000, 443), 300), (session(443, 4000), 300), (session(4001, 443), 0), (None, 0)]
        {
            let lost =
                (0..1000).filter(|n| link.push_with_flow(start, session, 100, *n) == Verdict::Lost).count();
            assert!(lost.abs_diff(expected) <= expected / 5, "{lost} of 1000 of {session:?}");
        }
        assert_eq!(link.counters().dropped_loss, link.discarded().count() as u64);
    }

    #[test]
    fn a_session_gets_its_rate_and_all_together_get_the_links() {
        let (mut link, start) =
            channel(ChannelParams { session_rate: Some(BitRate::from_bps(4_000_000)), ..packet_a_ms() });
        let session =
            |port: u16| Some(UdpFlow::new(([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 443).into()));
        let carried = |link: &mut Channel<u32>, sessions: u16| {
            let before = link.counters().packets;
            let from = start + 1000 * MS * u32::from(sessions);
            for n in 0..500 {
                let now = from + n * MS;
                for port in 0..sessions {
                    link.push_with_flow(now, session(port), 1000, 0);
                }
                while link.pop(now).is_some() {}
            }
            let carried = link.counters().packets - before;
            drain(link, start);
            carried
        };
        let carried: Vec<u64> = (1..=4).map(|sessions| carried(&mut link, sessions)).collect();
        assert!((248..=250).contains(&carried[0]), "half of the link: {carried:?}");
        assert!(
            carried[1..].iter().all(|packets| (490..=500).contains(packets)),
            "the whole link: {carried:?}"
        );
    }

    #[test]
    fn what_a_session_holds_back_is_woken_for_dropped_when_too_much_and_lost_in_a_cut() {
        let rate = Some(BitRate::from_bps(4_000_000));
        let (mut link, start) =
            channel(ChannelParams { session_rate: rate, queue: 10 * MS, delay: 5 * MS, ..packet_a_ms() });
        let session = Some(UdpFlow::new(([10, 0, 0, 1], 1).into(), ([10, 0, 0, 2], 443).into()));
        let verdicts: Vec<_> = (0..8).map(|n| link.push_with_flow(start, session, 1000, n)).collect();
        assert_eq!(verdicts.iter().filter(|verdict| **verdict == Verdict::Accepted).count(), 5);
        assert_eq!(link.push(start, 1000, 99), Verdict::Accepted, "what is no session passes at once");
        assert_eq!(
            drain(&mut link, start),
            [(99, 6.0), (0, 8.0), (1, 10.0), (2, 12.0), (3, 14.0), (4, 16.0)]
        );
        let later = start + 100 * MS;
        link.push_with_flow(later, session, 1000, 5);
        link.cut(later);
        assert_eq!((link.next_wake(), link.counters().dropped_down), (None, 1));
    }

    #[test]
    fn the_history_adds_up() {
        let (mut link, start) = channel(packet_a_ms());
        for n in 0..50 {
            link.push(start, 1000, n);
        }
        drain(&mut link, start);
        let (since, steps) = link.history();
        assert_eq!(since, start);
        assert_eq!(steps, [9000, 10_000, 10_000, 10_000, 10_000, 1000]);
    }

    #[test]
    fn the_same_seed_gives_the_same_link() {
        let run = || {
            let (mut link, start) = channel(ChannelParams { loss: 0.3, jitter: 2 * MS, ..packet_a_ms() });
            for n in 0..50 {
                link.push(start, 1000, n);
            }
            drain(&mut link, start)
        };
        assert_eq!(run(), run());
    }

    proptest! {
        #[test]
        fn nothing_overtakes_appears_or_comes_early(
            arrivals in proptest::collection::vec((0u64..5000, 20u32..1500), 1..200),
            delay_ms in 0u32..50, jitter_ms in 0u32..50, loss in 0.0..0.5f64,
        ) {
            let (mut link, start) = channel(ChannelParams {
                delay: delay_ms * MS, jitter: jitter_ms * MS, loss, ..packet_a_ms()
            });
            let (mut now, mut out) = (start, Vec::new());
            for (n, (wait_us, bytes)) in arrivals.iter().enumerate() {
                now += Duration::from_micros(*wait_us);
                link.push(now, *bytes, n as u32);
                let earliest = delay_ms.saturating_sub(jitter_ms);
                while let Some(item) = link.pop(now) {
                    prop_assert!(now >= start + earliest * MS);
                    out.push(item);
                }
            }
            out.extend(drain(&mut link, start).into_iter().map(|(item, _)| item));
            prop_assert!(out.is_sorted_by(|a, b| a < b), "{:?}", out);
            let c = link.counters();
            prop_assert_eq!(out.len() as u64, c.packets);
            prop_assert_eq!(c.packets + c.dropped_queue + c.dropped_loss, arrivals.len() as u64);
        }
    }
}
