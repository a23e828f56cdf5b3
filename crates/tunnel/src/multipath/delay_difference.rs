//! Uses paths with a large path delay difference for long transfers: their bytes arrive later than those of
//! the quickest path, but a long transfer ends earlier if slow paths carry a part of it.
//!
//! In: path candidates with an available window, and how long streams have been sending. Out: send quotas for
//! stream data. Always holds: the peer buffers at most [`MAX_REORDERED_BYTES`] because of this.

use mpvpn_path::{PathCandidate, delay_difference};

use super::pass::Pass;

/// A stream may use a slow path after it has lasted for 8 times the path delay difference: a transfer that is
/// this old loses at most an eighth of its duration if it ends while bytes are on the slow path. Smaller:
/// short transfers end later. Larger: transfers of some seconds do not use the path.
const MIN_AGE_FACTOR: u32 = 8;
/// Bytes that the peer may have to buffer while it waits for a slow path: half of its reassembly buffer for
/// all streams of a connection (8 MiB); losses need the other half. Smaller: satellite links stay unused.
/// Larger: no buffer is left for losses.
const MAX_REORDERED_BYTES: u64 = 4 << 20;

impl Pass<'_> {
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
