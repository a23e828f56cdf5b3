//! One direction of an emulated link, without clock or socket.
//!
//! ```text
//! push ─▶ size limit ─▶ loss of its port ─▶ rate of its UDP flow ─▶ queue or policer ─▶ rate ─▶ random loss
//! ─▶ delay ± jitter ─▶ pop
//! ```
//!
//! In: packets and the current time, which never runs backwards. Out: each packet once, or a counted drop.
//! Always holds: packets of a UDP flow are delivered in the order of their arrival, and without a rate for
//! flows all packets are; no packet is delivered earlier than the rate and the delay allow; the same seed and
//! the same input give the same output; memory is bounded.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    queue::{Discipline, Queue, Waiting},
    shaper::{FlowShaper, Packet, UdpFlow},
    spec::{ByteCount, ChannelParams},
};

/// The resolution of the delivery history. A longer step hides short gaps of delivery, a shorter one takes
/// more memory.
pub const HISTORY_STEP: Duration = Duration::from_millis(10);
/// Steps in the delivery history: one hour, which takes 2.9 MB. Longer runs lose their beginning; more steps
/// take memory.
const HISTORY_STEPS: usize = 360_000;
/// Packets in one direction, queued and in flight, at most. It bounds the memory, about 400 MB of frames of
/// 1500 bytes; with fewer packets a fast link with a long delay cannot be emulated (`docs/design/lab.md`).
const MAX_PACKETS: usize = 1 << 18;

/// Counters of one direction since its start. Bytes are those of IP packets.
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
    /// Packets that arrived during a cut, or were queued or in flight when it began.
    pub dropped_down: u64,
}

/// The result of [`Channel::push`] for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Queued.
    Accepted,
    /// Dropped: the queue was full.
    QueueFull,
    /// Dropped: larger than the size limit.
    TooLarge,
    /// Dropped at random by the loss of its port.
    Lost,
    /// Dropped: the link is cut.
    Cut,
}

/// Whether a direction carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    Cut,
}

/// A packet behind the bottleneck.
struct InFlightPacket<T> {
    /// When it is delivered.
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
    /// Packets that the rate of their UDP flow holds back.
    shaper: FlowShaper<T>,
    /// The packet that is being transmitted, and when that ends.
    transmitting: Option<Waiting<T>>,
    transmitted_at: Instant,
    /// Packets in front of the bottleneck.
    queue: Queue<T>,
    /// Bytes that a policer lets pass now, and since when.
    tokens: (u64, Instant),
    /// Whether random loss is in a burst.
    is_in_burst: bool,
    /// Packets behind the bottleneck, in the order of their delivery.
    in_flight: VecDeque<InFlightPacket<T>>,
    last_release: Instant,
    discarded: Vec<T>,
    counters: Counters,
    history: VecDeque<u64>,
    history_start: Instant,
}

impl<T> Channel<T> {
    /// An empty direction at `now`. `seed` determines its random draws.
    pub fn new(params: ChannelParams, count: ByteCount, seed: u64, now: Instant) -> Self {
        let queue = Queue::new(params.discipline);
        Self {
            params,
            overhead: count.overhead(),
            state: State::Up,
            rng: Rng(seed),
            shaper: FlowShaper::new(),
            transmitting: None,
            transmitted_at: now,
            queue,
            tokens: (u64::MAX, now),
            is_in_burst: false,
            in_flight: VecDeque::new(),
            last_release: now,
            discarded: Vec::new(),
            counters: Counters::default(),
            history: VecDeque::new(),
            history_start: now,
        }
    }

    /// A packet of `ip_bytes` that belongs to no UDP flow arrives at `now`.
    pub fn push(&mut self, now: Instant, ip_bytes: u32, item: T) -> Verdict {
        self.push_with_flow(now, None, ip_bytes, item)
    }

    /// A packet of `ip_bytes` arrives at `now`. If UDP flows have a rate, an accepted packet may still be
    /// dropped later.
    pub fn push_with_flow(&mut self, now: Instant, flow: Option<UdpFlow>, ip_bytes: u32, item: T) -> Verdict {
        self.advance_to(now);
        let verdict = self.admit(flow, ip_bytes);
        if verdict != Verdict::Accepted {
            return self.drop_packet(verdict, item);
        }
        let Some((flow, rate)) = flow.zip(self.params.session_rate) else {
            return self.enqueue(now, flow, ip_bytes, item);
        };
        let counted_bytes = ip_bytes + self.overhead;
        if !self.shaper.fits(&flow, rate, self.params.queue, counted_bytes) {
            return self.drop_packet(Verdict::QueueFull, item);
        }
        let evicted = self.shaper.push(now, flow, rate, Packet { ip_bytes, counted_bytes, item });
        self.counters.dropped_queue += evicted.len() as u64;
        self.discarded.extend(evicted);
        verdict
    }

    fn drop_packet(&mut self, verdict: Verdict, item: T) -> Verdict {
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

    /// A packet arrives at the bottleneck's queue at the time `at`, to which the state has been advanced.
    fn enqueue(&mut self, at: Instant, flow: Option<UdpFlow>, ip_bytes: u32, item: T) -> Verdict {
        let counted_bytes = ip_bytes + self.overhead;
        let most = self.params.rate.map_or(u64::MAX, |rate| rate.bytes_in(self.params.queue));
        if self.params.discipline == Discipline::Policer {
            let earned = self.params.rate.map_or(u64::MAX, |rate| rate.bytes_in(at - self.tokens.1));
            self.tokens = (self.tokens.0.saturating_add(earned).min(most.max(counted_bytes.into())), at);
            let Some(left) = self.tokens.0.checked_sub(counted_bytes.into()) else {
                return self.drop_packet(Verdict::QueueFull, item);
            };
            self.tokens.0 = left;
            self.depart(at, ip_bytes, item);
            return Verdict::Accepted;
        }
        let packet = Waiting { ip_bytes, counted_bytes, arrived: at, flow, item };
        let Some(first) = &self.transmitting else {
            self.transmitted_at = self.transmitted_at.max(at) + self.transmission_time(counted_bytes);
            self.transmitting = Some(packet);
            return Verdict::Accepted;
        };
        let most = most.saturating_sub(first.counted_bytes.into());
        let mut dropped = Vec::new();
        let refused = self.queue.push(packet, most, &mut dropped);
        self.discard(dropped);
        refused.map_or(Verdict::Accepted, |item| self.drop_packet(Verdict::QueueFull, item))
    }

    /// Drops packets that the queue had taken.
    fn discard(&mut self, dropped: Vec<T>) {
        self.counters.dropped_queue += dropped.len() as u64;
        self.discarded.extend(dropped);
    }

    /// The next packet that is due for delivery by `now`.
    pub fn pop(&mut self, now: Instant) -> Option<T> {
        self.advance_to(now);
        if self.in_flight.front()?.release > now {
            return None;
        }
        let InFlightPacket { release, ip_bytes, item } = self.in_flight.pop_front()?;
        self.counters.packets += 1;
        self.counters.bytes += u64::from(ip_bytes);
        self.record_delivery(release, ip_bytes);
        Some(item)
    }

    /// When [`pop`](Self::pop) has to be called again; `None` if no packet is queued or in flight.
    pub fn next_wake(&self) -> Option<Instant> {
        if let Some(first) = self.in_flight.front() {
            return Some(first.release);
        }
        let departure = if self.transmitting.is_none() { self.shaper.next()? } else { self.transmitted_at };
        let soonest = departure + self.params.delay.saturating_sub(self.params.jitter);
        Some(soonest.max(self.last_release))
    }

    /// Changes the settings at `now`. Packets in flight keep their delivery times; the new settings apply to
    /// queued packets.
    pub fn change(&mut self, now: Instant, change: impl FnOnce(&mut ChannelParams)) {
        self.advance_to(now);
        let old = self.params.rate;
        change(&mut self.params);
        self.queue.set_discipline(self.params.discipline);
        if self.params.rate == old || self.transmitting.is_none() {
            return;
        }
        let left = self.transmitted_at.saturating_duration_since(now);
        self.transmitted_at = match (old, self.params.rate) {
            (Some(old), Some(new)) => now + new.time_for(old.bytes_in(left)),
            _ => now,
        };
    }

    /// The present settings.
    pub fn params(&self) -> &ChannelParams {
        &self.params
    }

    /// Cuts the link: packets queued and in flight are dropped, and all that arrive until
    /// [`restore`](Self::restore).
    pub fn cut(&mut self, now: Instant) {
        self.advance_to(now);
        self.state = State::Cut;
        self.counters.dropped_down += self.packets() as u64;
        self.discarded.extend(self.shaper.clear());
        self.discarded.extend(self.transmitting.take().map(|packet| packet.item));
        self.discarded.extend(self.queue.clear());
        self.discarded.extend(self.in_flight.drain(..).map(|in_flight| in_flight.item));
        self.transmitted_at = now;
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

    /// The counters since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes delivered in each [`HISTORY_STEP`], and when the first of these steps began.
    pub fn history(&self) -> (Instant, Vec<u64>) {
        (self.history_start, self.history.iter().copied().collect())
    }

    fn admit(&mut self, flow: Option<UdpFlow>, ip_bytes: u32) -> Verdict {
        if self.state == State::Cut {
            return Verdict::Cut;
        }
        if self.params.mtu.is_some_and(|mtu| ip_bytes > mtu) {
            return Verdict::TooLarge;
        }
        if self.packets() >= MAX_PACKETS {
            return Verdict::QueueFull;
        }
        let ports = flow.iter().flat_map(UdpFlow::ports);
        let loss = ports.filter_map(|port| self.params.port_loss.get(&port)).fold(0.0, |a: f64, b| a.max(*b));
        if loss > 0.0 && self.rng.uniform() < loss {
            return Verdict::Lost;
        }
        Verdict::Accepted
    }

    /// The packets inside.
    fn packets(&self) -> usize {
        let waiting = usize::from(self.transmitting.is_some()) + self.queue.len();
        self.shaper.len() + waiting + self.in_flight.len()
    }

    /// Advances the state to `now`.
    fn advance_to(&mut self, now: Instant) {
        while let Some((at, Packet { ip_bytes, item, .. })) = self.shaper.pop(now, self.params.session_rate) {
            self.depart_until(at);
            self.enqueue(at, None, ip_bytes, item);
        }
        self.depart_until(now);
    }

    /// Moves packets whose transmission has ended by `now` into flight, or drops them by random loss.
    fn depart_until(&mut self, now: Instant) {
        while self.transmitted_at <= now {
            let Some(packet) = self.transmitting.take() else { return };
            let departure = self.transmitted_at;
            let mut dropped = Vec::new();
            self.transmitting = self.queue.pop(departure, &mut dropped);
            self.discard(dropped);
            if let Some(next) = &self.transmitting {
                self.transmitted_at = departure + self.transmission_time(next.counted_bytes);
            }
            self.depart(departure, packet.ip_bytes, packet.item);
        }
    }

    /// A packet has passed the bottleneck.
    fn depart(&mut self, at: Instant, ip_bytes: u32, item: T) {
        if self.draw_loss() {
            self.counters.dropped_loss += 1;
            self.discarded.push(item);
            return;
        }
        let release = (at + self.draw_delay()).max(self.last_release);
        self.last_release = release;
        self.in_flight.push_back(InFlightPacket { release, ip_bytes, item });
    }

    /// Whether the next packet is lost: by itself, or in bursts of `burst` packets on average (the model of
    /// Gilbert, "Capacity of a burst-noise channel", 1960, with certain loss in a burst).
    fn draw_loss(&mut self) -> bool {
        let ChannelParams { loss, burst, .. } = self.params;
        if loss <= 0.0 {
            return false;
        }
        let share = match self.is_in_burst {
            _ if burst <= 1 => loss,
            true => 1.0 - 1.0 / f64::from(burst),
            false => loss / (f64::from(burst) * (1.0 - loss).max(f64::EPSILON)),
        };
        self.is_in_burst = self.rng.uniform() < share;
        self.is_in_burst
    }

    fn transmission_time(&self, counted_bytes: u32) -> Duration {
        self.params.rate.map_or(Duration::ZERO, |rate| rate.time_for(counted_bytes.into()))
    }

    fn draw_delay(&mut self) -> Duration {
        let ChannelParams { delay, jitter, .. } = self.params;
        if jitter.is_zero() {
            return delay;
        }
        (delay + jitter.mul_f64(2.0 * self.rng.uniform())).saturating_sub(jitter)
    }

    fn record_delivery(&mut self, at: Instant, ip_bytes: u32) {
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
pub struct Rng(pub u64);

impl Rng {
    /// The next number, uniformly distributed in [0, 1).
    pub fn uniform(&mut self) -> f64 {
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
    fn one_packet_a_ms() -> ChannelParams {
        ChannelParams { rate: Some(BitRate::from_bps(8_000_000)), ..ChannelParams::default() }
    }

    /// Runs the channel until it is empty and returns the delivered items, each with its time in ms after
    /// `start`.
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
        let (mut link, start) = channel(ChannelParams { delay: 5 * MS, ..one_packet_a_ms() });
        for n in 0..4 {
            assert_eq!(link.push(start, 1000, n), Verdict::Accepted);
        }
        assert_eq!(drain(&mut link, start), [(0, 6.0), (1, 7.0), (2, 8.0), (3, 9.0)]);
    }

    #[test]
    fn idle_time_gives_no_credit_for_a_burst() {
        let (mut link, start) = channel(one_packet_a_ms());
        let later = start + 1000 * MS;
        link.push(later, 1000, 0);
        link.push(later, 1000, 1);
        assert_eq!(drain(&mut link, start), [(0, 1001.0), (1, 1002.0)]);
    }

    #[test]
    fn the_queue_holds_as_much_as_its_time_at_the_rate() {
        let (mut link, start) = channel(ChannelParams { queue: 10 * MS, ..one_packet_a_ms() });
        let verdicts: Vec<_> = (0..15).map(|n| link.push(start, 1000, n)).collect();
        assert_eq!(verdicts.iter().filter(|v| **v == Verdict::Accepted).count(), 10);
        assert_eq!(verdicts[10], Verdict::QueueFull);
        assert_eq!(link.counters().dropped_queue, 5);
        assert_eq!(link.discarded().count(), 5);
        assert_eq!(link.push(start + 3 * MS, 1000, 99), Verdict::Accepted, "three have left");
    }

    #[test]
    fn a_packet_passes_an_empty_queue_however_short() {
        let (mut link, start) = channel(ChannelParams { queue: Duration::ZERO, ..one_packet_a_ms() });
        assert_eq!(link.push(start, 1000, 0), Verdict::Accepted);
        assert_eq!(link.push(start, 1000, 1), Verdict::QueueFull);
    }

    #[test]
    fn ethernet_counting_makes_packets_longer() {
        let start = Instant::now();
        let mut link = Channel::new(one_packet_a_ms(), ByteCount::Ethernet, 1, start);
        link.push(start, 986, 0u32);
        link.push(start, 986, 1);
        assert_eq!(drain(&mut link, start), [(0, 1.0), (1, 2.0)]);
    }

    #[test]
    fn losses_are_drawn_after_the_bottleneck_and_come_near_their_share() {
        let (mut link, start) = channel(ChannelParams { loss: 0.1, queue: 1000 * MS, ..one_packet_a_ms() });
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
    fn a_loss_of_1_drops_everything() {
        let (mut link, start) = channel(ChannelParams { loss: 1.0, ..one_packet_a_ms() });
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
    fn a_cut_drops_packets_in_flight_and_later_ones() {
        let (mut link, start) = channel(ChannelParams { delay: 5 * MS, ..one_packet_a_ms() });
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
    fn a_new_rate_applies_to_queued_packets() {
        let (mut link, start) = channel(one_packet_a_ms());
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
        let flow =
            |from: u16, to: u16| Some(UdpFlow::new(([10, 0, 0, 1], from).into(), ([10, 0, 0, 2], to).into()));
        for (flow, expected) in
            [(flow(4000, 443), 300), (flow(443, 4000), 300), (flow(4001, 443), 0), (None, 0)]
        {
            let lost =
                (0..1000).filter(|n| link.push_with_flow(start, flow, 100, *n) == Verdict::Lost).count();
            assert!(lost.abs_diff(expected) <= expected / 5, "{lost} of 1000 of {flow:?}");
        }
        assert_eq!(link.counters().dropped_loss, link.discarded().count() as u64);
    }

    #[test]
    fn a_flow_gets_its_rate_and_all_flows_together_that_of_the_link() {
        let (mut link, start) =
            channel(ChannelParams { session_rate: Some(BitRate::from_bps(4_000_000)), ..one_packet_a_ms() });
        let flow = |port: u16| Some(UdpFlow::new(([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 443).into()));
        let carried = |link: &mut Channel<u32>, flows: u16| {
            let before = link.counters().packets;
            let from = start + 1000 * MS * u32::from(flows);
            for n in 0..500 {
                let now = from + n * MS;
                for port in 0..flows {
                    link.push_with_flow(now, flow(port), 1000, 0);
                }
                while link.pop(now).is_some() {}
            }
            let carried = link.counters().packets - before;
            drain(link, start);
            carried
        };
        let carried: Vec<u64> = (1..=4).map(|flows| carried(&mut link, flows)).collect();
        assert!((248..=250).contains(&carried[0]), "half of the link: {carried:?}");
        assert!(
            carried[1..].iter().all(|packets| (490..=500).contains(packets)),
            "the whole link: {carried:?}"
        );
    }

    #[test]
    fn packets_held_back_by_the_rate_of_a_flow_are_delivered_dropped_from_a_full_queue_or_lost_in_a_cut() {
        let rate = Some(BitRate::from_bps(4_000_000));
        let (mut link, start) =
            channel(ChannelParams { session_rate: rate, queue: 10 * MS, delay: 5 * MS, ..one_packet_a_ms() });
        let flow = Some(UdpFlow::new(([10, 0, 0, 1], 1).into(), ([10, 0, 0, 2], 443).into()));
        let verdicts: Vec<_> = (0..8).map(|n| link.push_with_flow(start, flow, 1000, n)).collect();
        assert_eq!(verdicts.iter().filter(|verdict| **verdict == Verdict::Accepted).count(), 5);
        assert_eq!(link.push(start, 1000, 99), Verdict::Accepted, "a packet without a flow passes at once");
        assert_eq!(
            drain(&mut link, start),
            [(99, 6.0), (0, 8.0), (1, 10.0), (2, 12.0), (3, 14.0), (4, 16.0)]
        );
        let later = start + 100 * MS;
        link.push_with_flow(later, flow, 1000, 5);
        link.cut(later);
        assert_eq!((link.next_wake(), link.counters().dropped_down), (None, 1));
    }

    #[test]
    fn the_history_adds_up() {
        let (mut link, start) = channel(one_packet_a_ms());
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
            let (mut link, start) = channel(ChannelParams { loss: 0.3, jitter: 2 * MS, ..one_packet_a_ms() });
            for n in 0..50 {
                link.push(start, 1000, n);
            }
            drain(&mut link, start)
        };
        assert_eq!(run(), run());
    }

    proptest! {
        #[test]
        fn no_packet_overtakes_appears_or_arrives_early(
            arrivals in proptest::collection::vec((0u64..5000, 20u32..1500), 1..200),
            delay_ms in 0u32..50, jitter_ms in 0u32..50, loss in 0.0..0.5f64,
        ) {
            let (mut link, start) = channel(ChannelParams {
                delay: delay_ms * MS, jitter: jitter_ms * MS, loss, ..one_packet_a_ms()
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
