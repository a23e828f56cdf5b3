//! Uses paths with a large path delay difference for long transfers: their bytes arrive later than those of
//! the quickest path, but a long transfer ends earlier if slow paths carry a part of it.
//!
//! In: path candidates with an available window, how long streams have been sending, and since when packets
//! have waited. Out: send quotas for stream data, packets, and how long packets may wait in the queue. Always
//! holds: the peer buffers at most [`MAX_REORDERED_BYTES`] because of this.
//!
//! A flow of packets slows down when its round trips suddenly become longer. So a later path is used once
//! packets wait as long as it is later: then they arrive there no later than if they waited for quicker ones.
//! Later packets wait for these at the peer, whatever path they take, so that the path goes on being used
//! while its packets are under way (docs/design/scheduler.md).

use mpvpn_path::{EligiblePackets, PathCandidate, delay_difference};
use mpvpn_types::{Duration, Instant, PathId, target::SCHEDULER};

use super::pass::Pass;

/// A stream may use a slow path after it has lasted for 8 times the path delay difference: a transfer that is
/// this old loses at most an eighth of its duration if it ends while bytes are on the slow path. Smaller:
/// short transfers end later. Larger: transfers of some seconds do not use the path.
const MIN_AGE_FACTOR: u32 = 8;
/// Bytes that the peer may have to buffer while it waits for a slow path: half of its reassembly buffer for
/// all streams of a connection (8 MiB); losses need the other half. Smaller: satellite links stay unused.
/// Larger: no buffer is left for losses.
const MAX_REORDERED_BYTES: u64 = 4 << 20;
/// A path that is later by no more than this is used once packets wait for as long as they usually may: twice
/// the target of the queue. Smaller: packets wait longer for little; larger: such paths stay unused.
const MAX_QUEUED_DIFFERENCE: Duration = Duration::from_millis(80);
/// Packets that are later than those of the quickest path by more than this might not be waited for: the peer
/// waits for 0.5 s at most. Smaller: late paths cannot be filled; larger: order is lost.
const MAX_LATE: Duration = Duration::from_millis(400);
/// Packets have not always waited if none did for this long: the gap between two bursts of a window. Smaller:
/// such gaps make long transfers look short; larger: pauses between transfers do not count. Chosen.
const MAX_PAUSE: Duration = Duration::from_millis(250);

/// The paths that flows of packets use although they deliver later.
#[derive(Debug, Default)]
pub(super) struct LatePaths {
    /// Since when packets have always waited, and when they did last.
    waiting: Option<(Instant, Instant)>,
    /// The paths in use, and when the last packet left on each.
    used: Vec<(PathId, Instant)>,
}

impl LatePaths {
    /// For how long packets have always waited, if they do.
    fn waiting_for(&mut self, now: Instant, waits: bool) -> Duration {
        let before = self.waiting.filter(|(_, last)| now.saturating_duration_since(*last) <= MAX_PAUSE);
        self.waiting = if waits { Some((before.map_or(now, |(since, _)| since), now)) } else { before };
        self.waiting.map_or(Duration::ZERO, |(since, _)| now.saturating_duration_since(since))
    }

    /// Whether packets are under way on a path that delivers them `late`.
    fn is_used(&mut self, now: Instant, id: PathId, late: Duration) -> bool {
        self.used.retain(|(used, last)| *used != id || now.saturating_duration_since(*last) < late);
        self.used.iter().any(|(used, _)| *used == id)
    }

    fn note_use(&mut self, now: Instant, id: PathId) {
        match self.used.iter_mut().find(|(used, _)| *used == id) {
            Some((_, last)) => *last = now,
            None => self.used.push((id, now)),
        }
    }
}

impl Pass<'_> {
    /// Gives packets of flows that last to paths that deliver them later. Returns whether any were moved.
    pub(super) fn fill_late_paths(&mut self, candidates: &mut [PathCandidate]) -> bool {
        let dispatcher = &self.scheduler.dispatcher;
        let may = candidates.len() > 1 && self.scheduler.kind().uses_late_paths() && dispatcher.is_numbered();
        if !may {
            self.scheduler.set_standing(Duration::ZERO);
            return false;
        }
        let (waits, was_waiting) = (!dispatcher.is_empty(), self.late_paths.waiting.is_some());
        if !waits && !was_waiting {
            return false;
        }
        let waiting_for = self.late_paths.waiting_for(self.now, waits);
        let (mut moved, mut standing) = (false, Duration::ZERO);
        for at in 0..candidates.len() {
            let PathCandidate { id, rate, one_way_delay, .. } = candidates[at];
            let (late, held) = delay_difference(candidates, at);
            if late <= MAX_QUEUED_DIFFERENCE || held > MAX_REORDERED_BYTES {
                continue;
            }
            let others = candidates.iter().filter(|other| other.one_way_delay < one_way_delay);
            let quicker: u64 = others.map(|other| other.rate).sum();
            // A rate that was measured while the path was idle says nothing.
            let rate = rate.max(quicker / 4).max(1);
            // A transfer that takes as long again ends earlier by more than it loses.
            if waiting_for < late.mul_f64((quicker + rate) as f64 / rate as f64) {
                continue;
            }
            standing = standing.max(late);
            let is_used = self.late_paths.is_used(self.now, id, late);
            let least = if is_used { 0 } else { (late.as_secs_f64() * quicker as f64) as usize };
            let limit =
                candidates.iter().map(|other| other.arrival_delay(0)).min().unwrap_or_default() + MAX_LATE;
            let mut gives = false;
            while candidates[at].available_window > 0
                && self.scheduler.dispatcher.bytes() > least
                && candidates[at].arrival_delay(0) <= limit
                && self.give_packets(candidates, at, EligiblePackets::OrderedFlows).moved
            {
                gives = true;
            }
            if gives {
                self.late_paths.note_use(self.now, id);
                moved = true;
                if !is_used {
                    tracing::debug!(
                        target: SCHEDULER,
                        class = self.log.class(),
                        path = id.0,
                        ?late,
                        ?waiting_for,
                        waiting_bytes = least,
                        quicker,
                        rate,
                        "packets wait for as long as a path is later than others: it is used"
                    );
                }
            }
        }
        self.scheduler.set_standing(standing);
        moved
    }

    /// Gives send quotas to slow paths that no other rule uses, if the peer reassembles out of order (DataAck
    /// negotiated). Returns whether any stream data was assigned.
    pub(super) fn fill_high_delay_paths(&mut self, candidates: &mut [PathCandidate]) -> bool {
        if self.recovery.data_acks.is_none()
            || !self.scheduler.kind().uses_late_paths()
            || self.connection.stream_backlog() == 0
        {
            return false;
        }
        let mut granted_any = false;
        for at in 0..candidates.len() {
            let (late, held) = delay_difference(candidates, at);
            if candidates[at].available_window == 0 || late.is_zero() || held > MAX_REORDERED_BYTES {
                continue;
            }
            let Some(since) = self.now.checked_sub(late * MIN_AGE_FACTOR) else { continue };
            let taken = self.connection.grant_quota_to_long_transfers(
                candidates[at].id,
                candidates[at].available_window,
                since,
            );
            candidates[at].assign(taken);
            granted_any |= taken > 0;
        }
        granted_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn packets_have_waited_since_the_last_long_pause() {
        let start = Instant::now();
        let mut late = LatePaths::default();
        assert_eq!(late.waiting_for(start, false), Duration::ZERO);
        late.waiting_for(start, true);
        assert_eq!(late.waiting_for(start + 200 * MS, false), 200 * MS, "a gap between two bursts");
        assert_eq!(late.waiting_for(start + 240 * MS, true), 240 * MS);
        assert_eq!(late.waiting_for(start + 500 * MS, true), Duration::ZERO, "a pause");
        assert_eq!(late.waiting_for(start + 600 * MS, true), 100 * MS);
    }

    #[test]
    fn a_path_is_used_while_its_last_packet_is_under_way() {
        let start = Instant::now();
        let mut late = LatePaths::default();
        late.note_use(start, PathId(1));
        late.note_use(start + 100 * MS, PathId(1));
        assert!(late.is_used(start + 300 * MS, PathId(1), 250 * MS));
        assert!(!late.is_used(start + 300 * MS, PathId(2), 250 * MS));
        assert!(!late.is_used(start + 350 * MS, PathId(1), 250 * MS) && late.used.is_empty());
    }
}
