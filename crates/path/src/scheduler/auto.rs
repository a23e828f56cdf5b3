//! `auto`: the path on which a packet arrives first.

use mpvpn_class::QueuedPacket;

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_to_arrive};
use mpvpn_types::Duration;

/// Packets do not take a path that delivers later than the best one by more than this, because the peer would
/// have to hold what the best path delivers in between. Smaller: slower paths stay unused sooner; larger: the
/// peer holds more. Chosen (docs/design/scheduler.md).
const MAX_DELAY_DIFFERENCE: Duration = Duration::from_millis(60);
/// The accuracy of arrival estimates. Smaller: paths alternate on noise; larger: packets leave on a slower
/// path.
const ARRIVAL_ACCURACY: Duration = Duration::from_millis(1);

/// The path on which the next packet arrives first. A slower path is used only if waiting for the best one
/// would take longer (ECF: Lim et al., "ECF: An MPTCP Path Scheduler to Manage Heterogeneous Paths", CoNEXT
/// 2017).
#[derive(Debug)]
pub(super) struct Auto;

impl Policy for Auto {
    fn pick(&self, _: &mut Work, candidates: &[PathCandidate], backlog: u64) -> Option<Selection> {
        let (first, best) =
            candidates.iter().enumerate().min_by_key(|(_, candidate)| candidate.arrival_delay(0))?;
        if best.available_window > 0 {
            return Some(Selection::best(first));
        }
        let at = first_to_arrive(candidates)?;
        let arrival = candidates[at].arrival_delay(0);
        let worth = arrival <= best.arrival_delay(backlog) + ARRIVAL_ACCURACY
            && arrival <= best.arrival_delay(0) + MAX_DELAY_DIFFERENCE;
        worth.then_some(Selection { index: at, arrives_first: false })
    }

    fn pins(&self, packet: &QueuedPacket, numbered: bool) -> bool {
        packet.needs_order && (packet.unnumbered || !numbered)
    }

    fn moves_flows_off_full_paths(&self) -> bool {
        true
    }

    fn uses_late_paths(&self) -> bool {
        true
    }
}
