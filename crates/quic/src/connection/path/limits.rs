//! How many bytes may leave on a path now, and which limit holds data back.
//!
//! In: the congestion window and pacing rate of the path's controller, the configured rate cap or the shaper
//! of the path's link, and whether more data waits than may leave. Out: a budget (bytes), and when it grows.
//! Always holds: data held back by a cap or shaper (`capped`) is distinguished from data held back by the
//! pacer (`paced`), as it says nothing about the path.
//!
//! Paths of a group use the pacer of the first of them; each has a cap of its own, which counts its own
//! bytes.

use mpvpn_class::ShaperHandle;
use mpvpn_path::Pacer;
use mpvpn_types::{BitRate, Duration, Instant};

use crate::{cap::Cap, gate::GateState};

/// The totals of a path, from which bytes with IP and UDP headers follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentTotals {
    /// Whether the path uses IPv4, not IPv6.
    pub(crate) v4: bool,
    /// UDP payload (bytes).
    pub(crate) bytes: u64,
    /// UDP datagrams.
    pub(crate) datagrams: u64,
}

/// The limits of the congestion controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    /// The congestion window less the bytes in flight.
    pub(crate) window: u64,
    /// The pacing rate (bytes/s); `None` for no limit.
    pub(crate) pacing_rate: Option<u64>,
    /// The largest UDP payload (bytes).
    pub(crate) mtu: u16,
    /// Whether packets leave in batches, because each write costs bytes on the wire (inside TCP).
    pub(crate) batching: bool,
}

/// The limits of one path.
#[derive(Debug)]
pub(crate) struct SendLimits {
    pub(crate) pacer: Pacer,
    pub(crate) cap: Option<Cap>,
    /// The configured rate, which applies while the path has no shaper.
    pub(crate) rate: Option<BitRate>,
    /// Whether data waits for the path.
    pub(crate) backlogged: bool,
    /// Whether the cap or shaper limits the path.
    pub(crate) capped: bool,
    /// Whether pacer, cap or shaper limit the path, not the congestion window.
    pub(crate) paced: bool,
    /// Whether the pacer was asked so late that less can leave than its rate allows: this machine was busy,
    /// which says nothing about the path.
    pub(crate) late: bool,
}

impl SendLimits {
    /// The limits of a new path, without a cap.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            pacer: Pacer::new(now, 1200),
            cap: None,
            rate: None,
            backlogged: false,
            capped: false,
            paced: false,
            late: false,
        }
    }

    /// A rate (bytes/s), limited by the cap.
    pub(crate) fn under_cap(&self, rate: u64) -> u64 {
        self.cap.as_ref().and_then(|cap| cap.allowed).map_or(rate, |most| rate.min(most))
    }

    /// The rate (bytes/s) of the link for all classes together, if the path has a shaper and the rate is
    /// known.
    pub(crate) fn link_rate(&self) -> Option<u64> {
        let handle = &self.cap.as_ref().filter(|cap| cap.own.is_none())?.handle;
        Some(handle.shaper().capacity()?.bps() / 8)
    }

    /// When the rate of the link was last measured; `None` if it is configured or unknown.
    pub(crate) fn link_rate_measured(&self) -> Option<Instant> {
        self.cap.as_ref().filter(|cap| cap.own.is_none())?.handle.shaper().capacity_measured()
    }

    /// For how long the class of this path has had more data than it could send over the link, if the path
    /// has a shaper.
    pub(crate) fn backlog_time(&self, now: Instant) -> Option<Duration> {
        let handle = &self.cap.as_ref().filter(|cap| cap.own.is_none())?.handle;
        Some(handle.shaper().backlog_time(now, handle.class()))
    }

    /// Sets the configured rate; returns whether it is to be applied now ([`Self::apply_rate`]).
    pub(crate) fn set_rate(&mut self, rate: Option<BitRate>) -> bool {
        self.rate = rate;
        !self.has_shaper()
    }

    /// Limits the path by the configured rate, if there is one.
    pub(crate) fn apply_rate(&mut self, now: Instant, sent: SentTotals) {
        self.cap = self.rate.map(|rate| Cap::limit(now, rate, sent.v4, sent.bytes, sent.datagrams));
        self.capped &= self.rate.is_some();
    }

    /// Whether the path has a shaper.
    pub(crate) fn has_shaper(&self) -> bool {
        self.cap.as_ref().is_some_and(|cap| cap.own.is_none())
    }

    /// Whether the path has this shaper handle.
    pub(crate) fn has_this_shaper(&self, handle: &ShaperHandle) -> bool {
        self.cap.as_ref().is_some_and(|cap| cap.handle.is_same(handle))
    }

    /// Limits the path by the shaper of its link.
    pub(crate) fn set_shaper(&mut self, now: Instant, handle: ShaperHandle, sent: SentTotals) {
        self.cap = Some(Cap::new(now, handle, sent.v4, sent.bytes, sent.datagrams));
    }

    /// Shares the rate cap of another path, if both have one.
    pub(crate) fn share_cap(&mut self, other: Option<&Cap>) {
        if let (Some(own), Some(other)) = (&mut self.cap, other) {
            own.share(other);
        }
    }

    /// The path joins or leaves a group, as the first of it or not.
    pub(crate) fn on_group_change(&mut self, is_first: bool) {
        self.paced &= is_first;
    }

    /// Counts what the path has ever sent (UDP payload bytes, datagrams).
    pub(crate) fn count(&mut self, now: Instant, sent: (u64, u64), gate: &GateState) {
        if let Some(cap) = &mut self.cap {
            cap.count(now, sent, gate);
        }
    }

    /// Bytes that may leave now, if the cap allows `cap_budget`; records which limit applies.
    pub(crate) fn budget(&mut self, now: Instant, allowed: Allowance, cap_budget: Option<u64>) -> u64 {
        self.pacer.set_batching(allowed.batching);
        let is_cut = self.pacer.refill(now, allowed.pacing_rate, allowed.mtu);
        self.late = is_cut && self.paced && self.backlogged && !self.capped;
        if self.late
            && let Some(cap) = &mut self.cap
        {
            cap.on_late();
        }
        let budget = self.pacer.budget();
        self.capped = cap_budget.is_some_and(|left| left < budget.min(allowed.window));
        let budget = budget.min(cap_budget.unwrap_or(u64::MAX));
        self.paced = budget < allowed.window;
        allowed.window.min(budget)
    }

    /// Sets whether more data waits for the path's group than may leave, and whether the cap of the group's
    /// first path holds it back.
    pub(crate) fn set_backlogged(&mut self, backlogged: bool, capped: bool) {
        self.backlogged = backlogged;
        self.paced &= backlogged;
        if let Some(cap) = &mut self.cap {
            cap.record_backlog(backlogged, backlogged && capped);
        }
    }

    /// When pacer and cap allow sending again; `None` if they do now.
    pub(crate) fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.pacer.wake_at(now).max(self.cap.as_ref().and_then(|cap| cap.wake_at(now)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use mpvpn_class::Shaper;
    use mpvpn_types::ClassId;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const NOTHING_SENT: SentTotals = SentTotals { v4: true, bytes: 0, datagrams: 0 };

    fn allowed(window: u64, pacing_rate: Option<u64>) -> Allowance {
        Allowance { window, pacing_rate, mtu: 1200, batching: false }
    }

    #[test]
    fn the_limit_that_holds_a_path_back_is_known() {
        let start = Instant::now();
        let mut limits = SendLimits::new(start);
        assert_eq!(limits.budget(start, allowed(5000, None), None), 5000);
        assert!(!limits.paced && !limits.capped, "the window");
        // Four packets may leave at once.
        assert_eq!(limits.budget(start, allowed(50_000, Some(1_000_000)), None), 4800);
        assert!(limits.paced && !limits.capped, "the pacer");
        assert_eq!(limits.budget(start, allowed(50_000, Some(1_000_000)), Some(100)), 100);
        assert!(limits.paced && limits.capped, "the cap");
        limits.pacer.spend(4800);
        assert_eq!(limits.budget(start, allowed(50_000, Some(1_000_000)), None), 0);
        assert!(limits.wake_at(start).is_some_and(|at| at > start && at < start + 5 * MS));
        limits.set_backlogged(false, false);
        assert!(!limits.paced, "nothing waits");
    }

    #[test]
    fn a_wake_up_that_is_too_late_to_catch_up_is_known() {
        let start = Instant::now();
        let mut limits = SendLimits::new(start);
        let mut ask = |ms: u32, waits| {
            limits.budget(start + ms * MS, allowed(1 << 20, Some(10_000_000)), None);
            limits.pacer.spend(limits.pacer.budget());
            limits.set_backlogged(waits, false);
            limits.late
        };
        assert_eq!([ask(1, true), ask(2, true), ask(6, true)], [false; 3], "5 ms are caught up on");
        assert!(ask(12, true), "6 ms are not");
        assert_eq!([ask(13, false), ask(33, true), ask(34, true)], [false; 3], "nothing waited");
    }

    #[test]
    fn the_configured_rate_applies_only_without_a_shaper() {
        let start = Instant::now();
        let mut limits = SendLimits::new(start);
        let rate = BitRate::from_bps(8_000_000);
        assert!(limits.set_rate(Some(rate)));
        limits.apply_rate(start, NOTHING_SENT);
        assert_eq!(limits.under_cap(2_000_000), 1_000_000);
        assert!(!limits.has_shaper() && limits.link_rate().is_none());

        let shaper = Arc::new(Mutex::new(Shaper::new(start, Some(BitRate::from_bps(80_000_000)))));
        let handle = ShaperHandle::new(shaper, ClassId::DEFAULT);
        limits.set_shaper(start, handle.clone(), NOTHING_SENT);
        assert!(limits.has_shaper() && limits.has_this_shaper(&handle));
        assert_eq!(limits.link_rate(), Some(10_000_000));
        assert!(!limits.set_rate(None), "the shaper stays");
        limits.apply_rate(start, NOTHING_SENT);
        assert!(limits.cap.is_none() && !limits.has_shaper());
    }

    #[test]
    fn paths_with_the_same_rate_cap_share_it() {
        let start = Instant::now();
        let mut paths = [0, 1].map(|_| {
            let mut limits = SendLimits::new(start);
            limits.set_rate(Some(BitRate::from_bps(8_000_000)));
            limits.apply_rate(start, NOTHING_SENT);
            limits
        });
        let first = paths[0].cap.clone();
        paths[1].share_cap(first.as_ref());
        let handle = paths[0].cap.as_ref().map(|cap| cap.handle.clone()).expect("a cap");
        assert!(paths[1].has_this_shaper(&handle));
    }
}
