//! `auto`: the path on which a packet arrives first.

use mpvpn_class::QueuedPacket;

use super::Policy;
use crate::selector::{PathCandidate, Selection, Work, first_to_arrive};
use mpvpn_types::Duration;

/// A path that arrives later than the best one by more than this is not worth its order: what comes over
/// the best path in between would have to be held for it.
const MOST_APART: Duration = Duration::from_millis(60);
/// Estimates of arrival are not better than this.
const NOISE: Duration = Duration::from_millis(1);

/// The path on which the next packet arrives first; another one only if what waits would arrive later if it waited for that
/// (as in ECF: Lim et al., "ECF: An MPTCP Path Scheduler to Manage Heterogeneous Paths", CoNEXT 2017).
#[derive(Debug)]
pub(super) struct Auto;

impl Policy for Auto {
    fn pick(&self, _: &mut Work, offers: &[PathCandidate], backlog: u64) -> Option<Selection> {
        let best = offers.iter().min_by_key(|offer| offer.arrival_delay(0))?;
        let at = first_to_arrive(offers)?;
        if offers[at].id == best.id {
            return Some(Selection::best(at));
        }
        let arrival = offers[at].arrival_delay(0);
        let worth =
            arrival <= best.arrival_delay(backlog) + NOISE && arrival <= best.arrival_delay(0) + MOST_APART;
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
