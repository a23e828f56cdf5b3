//! The queues in front of the paths, and the choice of the path for the next packets.
//!
//! In: packets, information about the paths in use, their available windows. Out: the path to fill next, and
//! the packets for it. Always holds: the queues hold at most what the paths carry in [`MAX_QUEUE_DURATION`],
//! within 384 KiB to 8 MiB.

use mpvpn_class::{MAX_COPIES, QueueConfig, QueuedPacket};
use mpvpn_path::{Dispatcher, PathCandidate, PathSelector, Scheduler, Selection};
use mpvpn_types::{Duration, Instant, bytes_in};

/// Time for which a flow may use the paths before the next flow has its turn (times the rate, at most 64
/// KiB). Smaller: more switches between flows, which the receiver joins less well. Larger: other flows wait
/// for longer.
const FLOW_TURN_DURATION: Duration = Duration::from_micros(300);
/// Maximum queueing time of packets: two round trips of most paths. Smaller: a congestion window of an inner
/// flow that still grows meets losses. Larger: the inner flow learns late that its window is too large.
const MAX_QUEUE_DURATION: Duration = Duration::from_millis(150);
/// Bytes that a path gets before the best path is chosen again: one segmented send (GSO) of eight packets.
/// Smaller: more decisions, shorter segmented sends. Larger: a wrong decision costs more.
const MAX_PATH_TURN_BYTES: u64 = 12 * 1024;

/// CoDel's target: how long packets wait without losses. Larger than RFC 8289 (§4.3) proposes for a
/// bottleneck (5 ms): packets of other flows do not wait behind those of a flow, and a congestion window that
/// still grows must not meet losses. Chosen.
const QUEUE_TARGET: Duration = Duration::from_millis(40);

/// Queues packets, and chooses the path for the next ones.
#[derive(Debug)]
pub(crate) struct PacketScheduler {
    pub(crate) dispatcher: Dispatcher,
    pub(super) choice: PathSelector,
    /// How much longer packets may wait, so that a path with a longer delay is used.
    standing: Duration,
}

impl PacketScheduler {
    pub(super) fn new(scheduler: Scheduler) -> Self {
        let dispatcher = Dispatcher::new(scheduler, queue_config());
        Self { dispatcher, choice: PathSelector::new(), standing: Duration::ZERO }
    }

    /// Sets another scheduler; the queues must be empty.
    pub(super) fn set_kind(&mut self, scheduler: Scheduler) {
        self.dispatcher = Dispatcher::new(scheduler, queue_config());
        self.standing = Duration::ZERO;
    }

    #[inline]
    pub(super) fn kind(&self) -> Scheduler {
        self.dispatcher.scheduler()
    }

    /// Sets how often each numbered packet is sent, each time on another link.
    pub(super) fn set_copies(&mut self, copies: u8) {
        self.choice.set_copies(copies.min(MAX_COPIES));
    }

    /// Returns the number of copies of a packet beside the first one, with `paths` paths in use.
    pub(super) fn extra_copies(&self, paths: usize) -> usize {
        match self.kind().uses_all_paths() {
            true => paths.saturating_sub(1),
            false => usize::from(self.choice.copies()).saturating_sub(1),
        }
    }

    /// Queues a packet, before all others if it is `urgent`.
    #[inline]
    pub(super) fn push(&mut self, now: Instant, packet: QueuedPacket, urgent: bool) {
        if urgent {
            self.dispatcher.push_first(now, packet);
        } else {
            self.dispatcher.push(now, packet);
        }
    }

    /// Chooses the path for the next packets; `stream_backlog` is the number of stream bytes that wait as
    /// well. Returns `None` if waiting is better than any path.
    pub(super) fn pick(
        &mut self,
        now: Instant,
        candidates: &[PathCandidate],
        stream_backlog: u64,
    ) -> Option<Selection> {
        let backlog = self.dispatcher.bytes() as u64 + stream_backlog;
        self.choice.pick(now, self.dispatcher.scheduler(), candidates, backlog)
    }

    /// Returns the bytes that a path with an available window of `window` gets per turn: all of it if the
    /// scheduler fills paths in a fixed order, else at most [`MAX_PATH_TURN_BYTES`].
    #[inline]
    pub(super) fn path_turn_bytes(&self, window: u64) -> u64 {
        if self.kind().fills_paths_in_order() { window } else { window.min(MAX_PATH_TURN_BYTES) }
    }

    /// Counts bytes that the path of a candidate was given, for schedulers that keep shares.
    pub(super) fn charge(&mut self, candidate: &PathCandidate, bytes: u64) {
        self.choice.charge(self.dispatcher.scheduler(), candidate, bytes);
    }

    /// Sets the total rate of the paths in use (bytes/s), from which the queue limits follow.
    pub(super) fn set_rate(&mut self, rate: u64) {
        self.dispatcher.set_limits(queue_limit_bytes(rate, self.standing), flow_turn_bytes(rate));
    }

    /// Lets packets wait for this much longer than usual without losses.
    pub(super) fn set_standing(&mut self, standing: Duration) {
        if self.standing != standing {
            self.standing = standing;
            self.dispatcher.set_target(QUEUE_TARGET + standing);
        }
    }

    /// Returns the current queueing time of packets (sojourn time, RFC 8289).
    pub(crate) fn sojourn(&self) -> Duration {
        if self.dispatcher.is_empty() { Duration::ZERO } else { self.dispatcher.sojourn() }
    }
}

/// The configuration of the FQ-CoDel queues. The interval is larger than RFC 8289 (§4.4) proposes for a
/// bottleneck (100 ms), as is the target. Chosen.
fn queue_config() -> QueueConfig {
    QueueConfig {
        target: QUEUE_TARGET,
        interval: Duration::from_millis(300),
        limit_bytes: queue_limit_bytes(0, Duration::ZERO),
        ..QueueConfig::default()
    }
}

/// Returns the limit of the queues in bytes: [`MAX_QUEUE_DURATION`] and `standing` at `rate` bytes/s, at
/// least 384 KiB and at most 8 MiB.
fn queue_limit_bytes(rate: u64, standing: Duration) -> usize {
    let time = MAX_QUEUE_DURATION + standing;
    let bytes = bytes_in(rate, time) as usize;
    // 1 MiB while the rate is not known.
    if rate == 0 { 1 << 20 } else { bytes.clamp(384 << 10, 8 << 20) }
}

/// Returns the bytes that a flow may send before the next flow has its turn. The receiver joins consecutive
/// packets of a flow into one write to its TUN device, so longer turns cost it less.
fn flow_turn_bytes(rate: u64) -> usize {
    let bytes = bytes_in(rate, FLOW_TURN_DURATION) as usize;
    bytes.clamp(QueueConfig::default().quantum, 64 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_hold_150_ms_of_what_the_paths_carry_within_bounds() {
        assert_eq!(queue_limit_bytes(0, Duration::ZERO), 1 << 20, "the rate is not known");
        assert_eq!(queue_limit_bytes(100_000, Duration::ZERO), 384 << 10);
        assert_eq!(queue_limit_bytes(10_000_000, Duration::ZERO), 1_500_000);
        assert_eq!(queue_limit_bytes(1 << 40, Duration::ZERO), 8 << 20);
    }

    #[test]
    fn a_turn_of_a_flow_is_what_the_paths_carry_in_a_fraction_of_a_millisecond() {
        assert_eq!(flow_turn_bytes(0), QueueConfig::default().quantum);
        assert_eq!(flow_turn_bytes(100_000_000), 30_000);
        assert_eq!(flow_turn_bytes(1 << 40), 64 << 10);
    }

    #[test]
    fn a_path_gets_all_it_can_take_only_where_the_order_of_the_paths_is_fixed() {
        let turn = |scheduler| PacketScheduler::new(scheduler).path_turn_bytes(50_000);
        for fixed in [Scheduler::MinRtt, Scheduler::Flow, Scheduler::Failover] {
            assert_eq!(turn(fixed), 50_000, "{fixed:?}");
        }
        for other in [Scheduler::Auto, Scheduler::Balanced, Scheduler::Weighted, Scheduler::Redundant] {
            assert_eq!(turn(other), MAX_PATH_TURN_BYTES, "{other:?}");
        }
    }

    #[test]
    fn copies_are_bounded_but_under_redundant_all_paths_get_one() {
        let mut scheduler = PacketScheduler::new(Scheduler::Auto);
        assert_eq!((scheduler.choice.copies(), scheduler.extra_copies(3)), (1, 0));
        scheduler.set_copies(u8::MAX);
        assert_eq!(scheduler.choice.copies(), MAX_COPIES);
        assert_eq!(PacketScheduler::new(Scheduler::Redundant).extra_copies(3), 2);
    }
}
