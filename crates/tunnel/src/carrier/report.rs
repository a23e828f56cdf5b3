//! What is told about a carrier in the status.

use mpvpn_path::{PathState, Place, Reason};
use mpvpn_quic::{Connection, PathView};
use mpvpn_types::{BitRate, Duration, Instant, LinkId};

use super::{Carrier, LaneCounters, Role};

/// Counters of a tunnel (bytes and packets of inner IP).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes taken from the TUN and sent.
    pub tx_bytes: u64,
    /// Bytes received and given to the TUN.
    pub rx_bytes: u64,
    /// Bytes of streams sent again because a path stalled or died.
    pub repeated: u64,
}

/// Rates are those of at least this time.
const PACE: Duration = Duration::from_secs(1);

/// Packets of one path take times that differ by so much for no reason.
const TWITCH: Duration = Duration::from_millis(4);

/// How much moves through a tunnel now (of inner IP), measured over about a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// What is sent.
    pub tx: BitRate,
    /// What is received.
    pub rx: BitRate,
}

/// Makes rates of counters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    since: Instant,
    at: Counters,
    rates: Rates,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, at: Counters::default(), rates: Rates::default() }
    }

    /// Begins anew when the time is over; to be called often while something moves.
    pub(super) fn look(&mut self, now: Instant, counters: &Counters) {
        if now.saturating_duration_since(self.since) >= PACE {
            *self = Self { since: now, at: *counters, rates: self.rates(now, counters) };
        }
    }

    /// The last ones, or if nothing has moved for so long that they are old, those since then.
    fn rates(&self, now: Instant, counters: &Counters) -> Rates {
        let passed = now.saturating_duration_since(self.since);
        if passed < PACE {
            return self.rates;
        }
        let rate = |before: u64, bytes: u64| {
            let bits = u128::from(bytes.saturating_sub(before)) * 8_000_000;
            BitRate::from_bps(u64::try_from(bits / passed.as_micros().max(1)).unwrap_or(u64::MAX))
        };
        Rates { tx: rate(self.at.tx_bytes, counters.tx_bytes), rx: rate(self.at.rx_bytes, counters.rx_bytes) }
    }
}

/// One path as status output shows it.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// What is measured.
    pub view: PathView,
    /// Whether it may be used.
    pub state: PathState,
    /// Why it is in that state; empty if there is nothing to say.
    pub reason: String,
    /// The link, at a client.
    pub link: Option<LinkId>,
}

impl Carrier {
    /// Paths for status output.
    pub(crate) fn report(&self, now: Instant, connection: &mut Connection) -> Vec<PathReport> {
        let mut reports = Vec::with_capacity(self.paths.len());
        for (id, path) in &self.paths {
            let Some(view) = connection.view(now, *id) else { continue };
            let reason = match path.liveness.reason() {
                Reason::Good if path.place != Place::Active => path.place.as_str().to_owned(),
                Reason::Good if path.state == PathState::Down => "the far end hears nothing".to_owned(),
                Reason::Good if path.state == PathState::Standby => "kept for later by the client".to_owned(),
                reason => reason.to_string(),
            };
            let link = (self.role == Role::Client).then_some(path.link);
            reports.push(PathReport { view, state: path.state, reason, link });
        }
        reports
    }

    /// How much moves now.
    pub(crate) fn rates(&self, now: Instant) -> Rates {
        self.pace.rates(now, &self.counters)
    }

    /// Counts on where another carrier of the same connection has ended.
    pub(crate) fn count_on(&mut self, before: &Self) {
        (self.counters, self.pace) = (before.counters, before.pace);
    }

    /// Packets dropped in the queues.
    pub(crate) fn drops(&self) -> u64 {
        self.dispatcher.drops() + self.too_big
    }

    /// What became of numbered packets.
    /// `None` where the two ends agreed on no numbers.
    pub(crate) fn lane(&self) -> Option<LaneCounters> {
        self.sequencer.as_ref().map(|sequencer| sequencer.counters())
    }

    /// When data was last on its way through this tunnel, either way.
    pub(crate) fn moved(&self) -> Option<Instant> {
        self.moved
    }

    /// How long after a packet came here one that takes another connection over the same links may still overtake it.
    pub(crate) fn spread(&self, connection: &Connection) -> Duration {
        let used = self.paths.iter().filter(|(_, path)| path.state == PathState::Active);
        let rtts = || used.clone().filter_map(|(id, _)| connection.rtt(*id));
        let (most, least) = (rtts().max().unwrap_or_default(), rtts().min().unwrap_or_default());
        self.sojourn() + (most - least) + TWITCH
    }

    /// How long packets wait in the queues.
    pub(crate) fn sojourn(&self) -> Duration {
        if self.dispatcher.is_empty() { Duration::ZERO } else { self.dispatcher.sojourn() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_second_and_fade_when_nothing_moves() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let moved = |kb: u64| Counters { tx_bytes: kb * 1000, rx_bytes: kb * 2000, repeated: 0 };
        let mut pace = Pace::new(start);
        for ms in (0..=2000).step_by(20) {
            pace.look(at(ms), &moved(ms));
        }
        let full = Rates { tx: BitRate::from_bps(8_000_000), rx: BitRate::from_bps(16_000_000) };
        assert_eq!(pace.rates(at(2500), &moved(2000)), full);
        assert_eq!(pace.rates(at(6000), &moved(2000)), Rates::default());
        pace.look(at(4000), &moved(2000));
        assert_eq!(pace.rates(at(4500), &moved(2500)), Rates::default());
    }
}
