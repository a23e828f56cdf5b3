//! The queues in front of the paths, and the choice which path carries the next packets.
//!
//! In: packets, what is known of the paths in use, what each can take. Out: for a path, the packets that it
//! carries next. Always holds: what waits is bounded by what the paths carry in a short time.

use mpvpn_class::{MAX_COPIES, QueueConfig, QueuedPacket};
use mpvpn_path::{Dispatcher, EligiblePackets, PathCandidate, PathInfo, PathSelector, Scheduler, Selection};
use mpvpn_types::{Duration, Instant, PathId};

/// A flow keeps the others waiting for no longer than this at a time.
const FLOW_TURN: Duration = Duration::from_micros(300);
/// No packet should wait for longer than this: two round trips of most paths. Shorter, and a window that
/// still grows is answered with losses; longer, and the news that it is too large comes late.
const QUEUE_TIME: Duration = Duration::from_millis(150);
/// Bytes that a path is given before it is asked again which path is best.
const TURN_BYTES: u64 = 12 * 1024;

/// Holds packets until a path carries them.
#[derive(Debug)]
pub(super) struct PacketScheduler {
    dispatcher: Dispatcher,
    choice: PathSelector,
}

impl PacketScheduler {
    pub(super) fn new(scheduler: Scheduler) -> Self {
        Self { dispatcher: Dispatcher::new(scheduler, queue()), choice: PathSelector::new() }
    }

    /// Uses another scheduler; no packet may wait yet.
    pub(super) fn set_kind(&mut self, scheduler: Scheduler) {
        self.dispatcher = Dispatcher::new(scheduler, queue());
    }

    #[inline]
    pub(super) fn kind(&self) -> Scheduler {
        self.dispatcher.scheduler()
    }

    /// Sends each numbered packet so often, each time on another link.
    pub(super) fn set_copies(&mut self, copies: u8) {
        self.choice.set_copies(copies.min(MAX_COPIES));
    }

    /// How often each numbered packet is sent, whatever the scheduler.
    pub(super) fn copies(&self) -> u8 {
        self.choice.copies()
    }

    /// Copies of a packet beside the first one, with so many paths in use.
    pub(super) fn extra_copies(&self, paths: usize) -> usize {
        match self.kind().uses_all_paths() {
            true => paths.saturating_sub(1),
            false => usize::from(self.choice.copies()).saturating_sub(1),
        }
    }

    /// Takes a packet in.
    #[inline]
    pub(super) fn push(&mut self, now: Instant, packet: QueuedPacket) {
        self.dispatcher.push(now, packet);
    }

    /// The packet that a path carries next, of those that `want` leaves to it.
    #[inline]
    pub(super) fn pop(&mut self, now: Instant, path: PathId, want: EligiblePackets) -> Option<QueuedPacket> {
        self.dispatcher.pop(now, path, want)
    }

    /// The path that carries the next packets, with so many bytes of streams waiting beside them; `None` if
    /// it is better to wait.
    pub(super) fn pick(
        &mut self,
        now: Instant,
        offers: &[PathCandidate],
        stream_backlog: u64,
    ) -> Option<Selection> {
        let backlog = self.dispatcher.bytes() as u64 + stream_backlog;
        self.choice.pick(now, self.dispatcher.scheduler(), offers, backlog)
    }

    /// Bytes that a path with so much room is given at a time: all it can take where the order of the paths
    /// is fixed, few where every turn goes to the path that is best then.
    #[inline]
    pub(super) fn turn(&self, room: u64) -> u64 {
        if self.kind().fills_paths_in_order() { room } else { room.min(TURN_BYTES) }
    }

    /// The path of an offer was given so many bytes.
    pub(super) fn charge(&mut self, offer: &PathCandidate, bytes: u64) {
        self.choice.charge(self.dispatcher.scheduler(), offer, bytes);
    }

    /// Takes over which paths there are.
    pub(super) fn set_paths(&mut self, now: Instant, paths: &[PathInfo]) {
        self.dispatcher.set_paths(now, paths);
    }

    /// The paths in use carry so many bytes/s together.
    pub(super) fn set_rate(&mut self, rate: u64) {
        self.dispatcher.set_limits(queue_limit(rate), turn_of_a_flow(rate));
    }

    /// Whether packets are numbered, so that a flow may take several paths.
    pub(super) fn set_numbered(&mut self, now: Instant, numbered: bool) {
        self.dispatcher.set_numbered(now, numbered);
    }

    /// The paths in use, best first.
    pub(super) fn order(&self) -> impl Iterator<Item = PathId> + '_ {
        self.dispatcher.paths_by_preference()
    }

    /// Bytes that wait.
    #[inline]
    pub(super) fn backlog(&self) -> usize {
        self.dispatcher.bytes()
    }

    /// Whether nothing waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.dispatcher.is_empty()
    }

    /// Whether a packet waits that this path could carry.
    #[inline]
    pub(super) fn has_for(&self, path: PathId) -> bool {
        self.dispatcher.has_packet_for(path)
    }

    /// Packets dropped in the queues, since the start.
    pub(super) fn drops(&self) -> u64 {
        self.dispatcher.drops()
    }

    /// How long packets wait now.
    pub(super) fn sojourn(&self) -> Duration {
        if self.dispatcher.is_empty() { Duration::ZERO } else { self.dispatcher.sojourn() }
    }

    /// When [`Self::pick`] decides otherwise, whatever happens to the paths.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.choice.poll_timeout(now)
    }

    /// Gives back memory that is not in use.
    pub(super) fn trim(&mut self) {
        self.dispatcher.trim_memory();
    }
}

/// The queues in front of the paths. A flow's own packets may wait longer than RFC 8289 proposes
/// for a bottleneck: other flows do not wait with them, and a congestion window that is still growing
/// must not be answered with losses.
fn queue() -> QueueConfig {
    QueueConfig {
        target: Duration::from_millis(40),
        interval: Duration::from_millis(300),
        limit_bytes: queue_limit(0),
        ..QueueConfig::default()
    }
}

/// Bytes that may wait for paths that carry `rate` bytes/s together: more than this time is of no use to a
/// flow that doubles what it sends each round trip, and only delays the news that it is too much.
fn queue_limit(rate: u64) -> usize {
    let bytes = (u128::from(rate) * QUEUE_TIME.as_nanos() / 1_000_000_000) as usize;
    // The rate is not known at first, and grows.
    if rate == 0 { 1 << 20 } else { bytes.clamp(384 << 10, 8 << 20) }
}

/// Bytes that a flow may send before the next one has its turn: packets of one flow that follow each other
/// cost the far end less, which writes them to its TUN as one.
fn turn_of_a_flow(rate: u64) -> usize {
    let bytes = (u128::from(rate) * FLOW_TURN.as_nanos() / 1_000_000_000) as usize;
    bytes.clamp(QueueConfig::default().quantum, 64 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_hold_150_ms_of_what_the_paths_carry_within_bounds() {
        assert_eq!(queue_limit(0), 1 << 20, "the rate is not known");
        assert_eq!(queue_limit(100_000), 384 << 10);
        assert_eq!(queue_limit(10_000_000), 1_500_000);
        assert_eq!(queue_limit(1 << 40), 8 << 20);
    }

    #[test]
    fn a_turn_of_a_flow_is_what_the_paths_carry_in_a_fraction_of_a_millisecond() {
        assert_eq!(turn_of_a_flow(0), QueueConfig::default().quantum);
        assert_eq!(turn_of_a_flow(100_000_000), 30_000);
        assert_eq!(turn_of_a_flow(1 << 40), 64 << 10);
    }

    #[test]
    fn a_path_gets_all_it_can_take_only_where_the_order_of_the_paths_is_fixed() {
        let turn = |scheduler| PacketScheduler::new(scheduler).turn(50_000);
        for fixed in [Scheduler::MinRtt, Scheduler::Flow, Scheduler::Failover] {
            assert_eq!(turn(fixed), 50_000, "{fixed:?}");
        }
        for other in [Scheduler::Auto, Scheduler::Balanced, Scheduler::Weighted, Scheduler::Redundant] {
            assert_eq!(turn(other), TURN_BYTES, "{other:?}");
        }
    }

    #[test]
    fn copies_are_bounded_but_under_redundant_all_paths_get_one() {
        let mut scheduler = PacketScheduler::new(Scheduler::Auto);
        assert_eq!((scheduler.copies(), scheduler.extra_copies(3)), (1, 0));
        scheduler.set_copies(u8::MAX);
        assert_eq!(scheduler.copies(), MAX_COPIES);
        assert_eq!(PacketScheduler::new(Scheduler::Redundant).extra_copies(3), 2);
    }
}
