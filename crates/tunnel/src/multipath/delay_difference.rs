//! Paths that are much slower than others, for streams that last: what is put there arrives late, but a long
//! transfer is over earlier if they carry their part.

use mpvpn_path::{PathCandidate, delay_difference};

use super::pass::Pass;

/// A transfer that has lasted for so many times the delay difference of a path is expected to last for longer
/// than that: what it may lose at its end is a small part of it. More, and transfers of some seconds do
/// without the path; less, and short ones end later.
const LASTS: u32 = 8;
/// Bytes that the far end is asked to hold for what comes late: half of what it holds for all streams
/// together, as it needs some for what is lost.
const MOST_HELD: u64 = 4 << 20;

impl Pass<'_> {
    /// Grants paths what no other rule gives them, where the far end holds as much as this one would. Returns
    /// whether there was something.
    pub(super) fn fill_late(&mut self, offers: &mut [PathCandidate]) -> bool {
        if self.recovery.data_acks.is_none()
            || !self.scheduler.kind().uses_late_paths()
            || self.connection.stream_backlog() == 0
        {
            return false;
        }
        let mut moved = false;
        for at in 0..offers.len() {
            let (late, held) = delay_difference(offers, at);
            if offers[at].available_window == 0 || late.is_zero() || held > MOST_HELD {
                continue;
            }
            let Some(since) = self.now.checked_sub(late * LASTS) else { continue };
            let taken = self.connection.grant_quota_to_long_transfers(
                offers[at].id,
                offers[at].available_window,
                since,
            );
            offers[at].assign(taken);
            moved |= taken > 0;
        }
        moved
    }
}
