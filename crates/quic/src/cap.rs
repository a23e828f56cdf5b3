use mpvpn_class::{Sample, Shaper, ShaperHandle};
use mpvpn_types::{BitRate, ClassId, Duration, Instant};
use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

use crate::{gate::GateState, random_loss};

/// How long after the shaper held a path back its controller is told the least rate that the shaper allows:
/// it may not know yet that other classes have stopped. Longer: paths that were not held back start too fast.
const HELD_BACK_FOR: Duration = Duration::from_millis(100);
/// Losses up to this share may be those of a full link, and are not counted as bytes that crossed it. Chosen
/// (docs/design/congestion-control.md).
const MIN_COUNTED_LOSS: f64 = 0.02;
/// How often the shaper gets a sample of a path. Shorter: processor time; longer: the shaper reacts late.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(5);

/// Limits one path by the shaper of its link, or by a rate cap; acknowledgements, heartbeats and headers
/// count, too.
///
/// It counts all bytes that noq has sent, but only data waits for it: a path that may not acknowledge would
/// look dead.
#[derive(Clone, Debug)]
pub(crate) struct Cap {
    pub(crate) handle: ShaperHandle,
    /// The configured rate of this path's group, if the shaper is for this group alone.
    pub(crate) own: Option<BitRate>,
    /// Bytes of IP and UDP headers in front of every payload.
    header: u64,
    /// UDP payload bytes and datagrams that the shaper has counted.
    counted: (u64, u64),
    /// The rate (bytes/s) that the shaper allows the class now.
    pub(crate) allowed: Option<u64>,
    /// When the shaper was last read, and when it last got a sample.
    read: Instant,
    reported: Instant,
    /// Ack-eliciting and acknowledged bytes of IP packets at the last sample, and all bytes that left since.
    gated: (u64, u64),
    left: u64,
    /// Whether more data waited than could leave since the last sample: always, and at any time.
    always_backlogged: bool,
    was_backlogged: bool,
    /// When data last waited for the shaper.
    held: Option<Instant>,
}

impl Cap {
    /// Limits a path by `handle`, after it has sent `bytes` in `datagrams`.
    pub(crate) fn new(now: Instant, handle: ShaperHandle, v4: bool, bytes: u64, datagrams: u64) -> Self {
        Self {
            handle,
            own: None,
            header: if v4 { 28 } else { 48 },
            counted: (bytes, datagrams),
            allowed: None,
            read: now,
            reported: now,
            gated: (0, 0),
            left: 0,
            always_backlogged: true,
            was_backlogged: false,
            held: None,
        }
    }

    /// A rate cap, for a path that has sent `bytes` in `datagrams` before.
    pub(crate) fn limit(now: Instant, rate: BitRate, v4: bool, bytes: u64, datagrams: u64) -> Self {
        let shaper = Arc::new(Mutex::new(Shaper::new(now, Some(rate))));
        let handle = ShaperHandle::new(shaper, ClassId::DEFAULT);
        let allowed = Some(rate.bps() / 8);
        Self { own: Some(rate), allowed, ..Self::new(now, handle, v4, bytes, datagrams) }
    }

    /// Shares the cap of another path, if the rate is the same.
    pub(crate) fn share(&mut self, other: &Self) {
        if self.own.is_some() && self.own == other.own {
            self.handle = other.handle.clone();
        }
    }

    /// Takes the totals of the path (UDP payload bytes, datagrams), and reports to the shaper.
    pub(crate) fn count(&mut self, now: Instant, sent: (u64, u64), gate: &GateState) {
        let payload = sent.0.saturating_sub(self.counted.0);
        let headers = sent.1.saturating_sub(self.counted.1) * self.header;
        if payload + headers > 0 {
            self.handle.shaper().on_sent(self.handle.class(), payload + headers);
            self.left += payload + headers;
            self.counted = sent;
        }
        if now.saturating_duration_since(self.reported) >= SAMPLE_INTERVAL {
            self.report(now, gate);
        }
    }

    /// Bytes that may leave now.
    pub(crate) fn left(&mut self, now: Instant) -> u64 {
        self.read = now;
        self.handle.shaper().available_bytes(now, self.handle.class())
    }

    /// Gives the shaper a sample of the bytes delivered since the last one.
    fn report(&mut self, now: Instant, gate: &GateState) {
        let (sent, acked) = gate.wire_bytes(self.header);
        let gated = sent.saturating_sub(self.gated.0);
        // Packets of random loss have crossed the link, too.
        let lost = (gate.random_loss().unwrap_or_default() - MIN_COUNTED_LOSS)
            .clamp(0.0, random_loss::MAX_COMPENSATED_LOSS);
        let crossed = acked.saturating_sub(self.gated.1) as f64 / (1.0 - lost);
        // Packets that are not ack-eliciting are few, and count as delivered.
        let delivered = crossed as u64 + self.left.saturating_sub(gated);
        let sample = Sample {
            delivered: if self.gated == (0, 0) { 0 } else { delivered },
            rtt: gate.take_least_rtt(),
            base_rtt: gate.min_rtt(),
            backlogged: self.was_backlogged && self.always_backlogged,
        };
        let (mut shaper, class) = (self.handle.shaper(), self.handle.class());
        let least = shaper.on_sample(now, class, sample);
        self.allowed = shaper.class_rate(now, class);
        drop(shaper);
        if let Some(least) = least.filter(|_| self.held.is_some_and(|at| now < at + HELD_BACK_FOR)) {
            gate.least_rate.store(least, Relaxed);
        }
        (self.reported, self.gated, self.left) = (now, (sent, acked), 0);
        (self.always_backlogged, self.was_backlogged) = (true, false);
    }

    /// Records whether more data waits than may leave, and whether the shaper holds it back.
    pub(crate) fn record_backlog(&mut self, limited: bool, held: bool) {
        self.always_backlogged &= limited;
        self.was_backlogged |= limited;
        if held {
            self.held = Some(self.read);
        }
    }

    /// Less has left than could, as this process was late, so the sample says nothing about the link.
    pub(crate) fn on_late(&mut self) {
        self.always_backlogged = false;
    }

    /// Tells the shaper whether the class has more data than it may send.
    pub(crate) fn set_backlogged(&self, wanting: bool) {
        self.handle.shaper().set_backlogged(self.read, self.handle.class(), wanting);
    }

    /// When the shaper allows sending again; `None` if it does now.
    pub(crate) fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.handle.shaper().retry_at(now, self.handle.class())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{GateFactory, gate_state_of};
    use mpvpn_types::CongestionControl;
    use noq_proto::congestion::ControllerFactory;

    fn gate(now: Instant) -> Arc<GateState> {
        let controller = Arc::new(GateFactory(CongestionControl::Bbr)).build(now, 1200);
        gate_state_of(controller.as_ref()).expect("a gate")
    }

    fn left(cap: &mut Cap, now: Instant, sent: (u64, u64), gate: &GateState) -> u64 {
        cap.count(now, sent, gate);
        cap.left(now)
    }

    #[test]
    fn paths_of_a_link_share_its_limit() {
        let start = Instant::now();
        let gate = gate(start);
        let mut first = Cap::limit(start, BitRate::from_bps(8_000_000), true, 0, 0);
        let mut second = Cap::limit(start, BitRate::from_bps(8_000_000), true, 0, 0);
        second.share(&first);
        let (mut one, mut two) = ((0, 0), (0, 0));
        for step in 0..100_000u64 {
            let now = start + Duration::from_micros(step * 10);
            let (own, sent) = if step % 3 == 0 { (&mut first, &mut one) } else { (&mut second, &mut two) };
            while left(own, now, *sent, &gate) > 0 {
                *sent = (sent.0 + 1472, sent.1 + 1);
            }
        }
        let on_the_wire = one.0 + two.0 + 28 * (one.1 + two.1);
        assert!((990_000..=1_015_000).contains(&on_the_wire), "{on_the_wire} bytes in a second of 8 Mbit/s");
    }

    #[test]
    fn headers_count_too() {
        let start = Instant::now();
        let gate = gate(start);
        let mut cap = Cap::limit(start, BitRate::from_bps(8_000_000), true, 5000, 5);
        let (mut bytes, mut datagrams) = (5000, 5);
        for step in 0..100_000u64 {
            let now = start + Duration::from_micros(step * 10);
            while left(&mut cap, now, (bytes, datagrams), &gate) > 0 {
                bytes += 72;
                datagrams += 1;
            }
        }
        let on_the_wire = (bytes - 5000) + 28 * (datagrams - 5);
        assert!((990_000..=1_010_000).contains(&on_the_wire), "{on_the_wire} bytes in a second of 8 Mbit/s");
    }
}
