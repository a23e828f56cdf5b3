use mpvpn_class::{Sample, Shaper, ShaperHandle};
use mpvpn_types::{BitRate, ClassId, Duration, Instant};
use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

use crate::{gate::Shared, random_loss};

/// A path that the shaper held back so long ago may not have noticed yet that others have stopped.
const HELD: Duration = Duration::from_millis(100);
/// Losses up to this share may be those of a full link.
const NOISE: f64 = 0.02;
/// The shaper is told so often what a path delivers.
const REPORT: Duration = Duration::from_millis(5);

/// The seat of one path at the shaper of its link, acknowledgements, heartbeats and headers included.
///
/// It counts what the transport says it has sent, so nothing passes uncounted; but only data waits
/// for it, because a path that may not acknowledge would look dead.
#[derive(Clone, Debug)]
pub(crate) struct Cap {
    seat: ShaperHandle,
    /// The limit of this path and those that carry as one with it, if the shaper is for them alone.
    own: Option<BitRate>,
    /// Bytes of IP and UDP headers in front of every payload.
    header: u64,
    /// UDP payload bytes and datagrams that the shaper knows of.
    counted: (u64, u64),
    /// Bytes/s that it gets while it wants them, as of late.
    allowed: Option<u64>,
    /// When it was asked last, and when the shaper was told last.
    asked: Instant,
    reported: Instant,
    /// Bytes of IP packets since then that had to be acknowledged, those that were, and all that left.
    gated: (u64, u64),
    left: u64,
    /// Since then more waited than could leave: at all times, at any time.
    always: bool,
    ever: bool,
    /// When something waited for the shaper, last.
    held: Option<Instant>,
}

impl Cap {
    /// The place at `seat` of a path that has sent so much before.
    pub(crate) fn new(now: Instant, seat: ShaperHandle, v4: bool, bytes: u64, datagrams: u64) -> Self {
        Self {
            seat,
            own: None,
            header: if v4 { 28 } else { 48 },
            counted: (bytes, datagrams),
            allowed: None,
            asked: now,
            reported: now,
            gated: (0, 0),
            left: 0,
            always: true,
            ever: false,
            held: None,
        }
    }

    /// A limit from now on, on a path that has sent so much before.
    pub(crate) fn limit(now: Instant, rate: BitRate, v4: bool, bytes: u64, datagrams: u64) -> Self {
        let shaper = Arc::new(Mutex::new(Shaper::new(now, Some(rate))));
        let seat = ShaperHandle::new(shaper, ClassId::DEFAULT);
        let allowed = Some(rate.bps() / 8);
        Self { own: Some(rate), allowed, ..Self::new(now, seat, v4, bytes, datagrams) }
    }

    /// Makes the limit of another path that of both, if it is the same.
    pub(crate) fn share(&mut self, other: &Self) {
        if self.own.is_some() && self.own == other.own {
            self.seat = other.seat.clone();
        }
    }

    /// The limit of this path and those that carry as one with it, if there is no more to it.
    pub(crate) fn own(&self) -> Option<BitRate> {
        self.own
    }

    pub(crate) fn seat(&self) -> &ShaperHandle {
        &self.seat
    }

    /// Bytes/s that the path gets while it wants them; `None` if it is not held back.
    pub(crate) fn bytes_per_second(&self) -> Option<u64> {
        self.allowed
    }

    /// Counts what the path has sent in all (UDP payload bytes, datagrams), and tells the shaper what was delivered.
    pub(crate) fn count(&mut self, now: Instant, sent: (u64, u64), gate: &Shared) {
        let payload = sent.0.saturating_sub(self.counted.0);
        let headers = sent.1.saturating_sub(self.counted.1) * self.header;
        if payload + headers > 0 {
            self.seat.shaper().on_sent(self.seat.class(), payload + headers);
            self.left += payload + headers;
            self.counted = sent;
        }
        if now.saturating_duration_since(self.reported) >= REPORT {
            self.report(now, gate);
        }
    }

    /// Bytes that may leave now.
    pub(crate) fn left(&mut self, now: Instant) -> u64 {
        self.asked = now;
        self.seat.shaper().available_bytes(now, self.seat.class())
    }

    /// Tells the shaper what was delivered since the last time.
    fn report(&mut self, now: Instant, gate: &Shared) {
        let (sent, acked) = gate.wire(self.header);
        let gated = sent.saturating_sub(self.gated.0);
        // What is lost however little is sent takes its place on the link, too.
        let lost = (gate.random_loss().unwrap_or_default() - NOISE).clamp(0.0, random_loss::MOST);
        let crossed = acked.saturating_sub(self.gated.1) as f64 / (1.0 - lost);
        // Of what nobody acknowledges nobody knows; it is little, and taken to have arrived.
        let delivered = crossed as u64 + self.left.saturating_sub(gated);
        let sample = Sample {
            delivered: if self.gated == (0, 0) { 0 } else { delivered },
            rtt: gate.take_least_rtt(),
            base_rtt: gate.min_rtt(),
            backlogged: self.ever && self.always,
        };
        let (mut shaper, class) = (self.seat.shaper(), self.seat.class());
        let least = shaper.on_sample(now, class, sample);
        self.allowed = shaper.class_rate(now, class);
        drop(shaper);
        if let Some(least) = least.filter(|_| self.held.is_some_and(|at| now < at + HELD)) {
            gate.at_least.store(least, Relaxed);
        }
        (self.reported, self.gated, self.left) = (now, (sent, acked), 0);
        (self.always, self.ever) = (true, false);
    }

    /// Notes whether more waits than can leave, and whether that is for the shaper.
    pub(crate) fn note(&mut self, limited: bool, held: bool) {
        self.always &= limited;
        self.ever |= limited;
        if held {
            self.held = Some(self.asked);
        }
    }

    /// Tells the shaper whether the class has more to send than it may.
    pub(crate) fn set_wanting(&self, wanting: bool) {
        self.seat.shaper().set_wanting(self.asked, self.seat.class(), wanting);
    }

    /// When there is room again; `None` if there is now.
    pub(crate) fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.seat.shaper().retry_at(now, self.seat.class())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::{GateFactory, shared_of};
    use mpvpn_types::CongestionControl;
    use noq_proto::congestion::ControllerFactory;

    fn gate(now: Instant) -> Arc<Shared> {
        let controller = Arc::new(GateFactory(CongestionControl::Bbr)).build(now, 1200);
        shared_of(controller.as_ref()).expect("a gate")
    }

    fn left(cap: &mut Cap, now: Instant, sent: (u64, u64), gate: &Shared) -> u64 {
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
