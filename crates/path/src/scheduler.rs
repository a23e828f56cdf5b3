//! The packet schedulers: one file each, and the table of them.
//!
//! In: the paths that may carry data, with their available windows ([`PathCandidate`]). Out: the path that
//! carries the next packets, and properties of the scheduler: whether flows are pinned to paths, whether one
//! link carries everything, how much a path gets at a time. Always holds: a scheduler is a file of this
//! folder, a module and a line of the table below; nothing else in the program names it.

mod auto;
mod balanced;
mod flow;
mod min_rtt;
mod redundant;
mod weighted;

use std::fmt::Debug;

use mpvpn_class::QueuedPacket;
use mpvpn_types::word_enum;

use crate::selector::{MAX_WORK_DEFICIT_SECS, PathCandidate, Selection, Work};

/// The behaviour of a scheduler.
pub(crate) trait Policy: Debug + Sync {
    /// The path that carries the next packets while `backlog` bytes wait; `None` to wait for a better path.
    /// `candidates` are in the scheduler's order of preference.
    fn pick(&self, work: &mut Work, candidates: &[PathCandidate], backlog: u64) -> Option<Selection>;

    /// The divisor of a path's carried bytes before paths are compared: its rate (bytes/s), unless
    /// overridden.
    fn share(&self, candidate: &PathCandidate) -> f64 {
        candidate.rate.max(1) as f64
    }

    /// How far a path may fall behind the others and still catch up, in the unit of its work.
    fn max_deficit(&self, _candidate: &PathCandidate) -> f64 {
        MAX_WORK_DEFICIT_SECS
    }

    /// Whether the order of the paths is fixed, so that a path gets its whole available window at a time.
    fn fills_paths_in_order(&self) -> bool {
        false
    }

    /// Whether every flow is pinned to a path.
    fn keeps_flows_on_paths(&self) -> bool {
        false
    }

    /// Whether this packet's flow is pinned to a path. `numbered`: the peer restores the order of numbered
    /// packets.
    fn pins(&self, _packet: &QueuedPacket, _numbered: bool) -> bool {
        self.keeps_flows_on_paths()
    }

    /// Whether pinned flows move from full paths to ones with spare capacity.
    fn moves_flows_off_full_paths(&self) -> bool {
        false
    }

    /// Whether long transfers may also use paths with a large delay difference.
    fn uses_late_paths(&self) -> bool {
        false
    }
}

word_enum! {
    /// How the packets of a session are spread over its paths.
    #[derive(Hash)]
    pub enum Scheduler {
        /// Every packet takes the path on which it is expected to arrive first. At a peer that does not
        /// restore the order of packets, flows that need it stay on a path.
        #[default]
        Auto = "auto",
        /// Every packet takes the path with the lowest round-trip time whose congestion window has space.
        MinRtt = "minrtt",
        /// Every path carries a share in proportion to its measured rate.
        Balanced = "balanced",
        /// Every path carries a share in proportion to the `weight` of its link.
        Weighted = "weighted",
        /// Every packet takes all paths, and the first copy to arrive wins.
        Redundant = "redundant",
        /// Every flow stays on its path while that works; a new flow takes the path with the fewest flows for
        /// its rate.
        Flow = "flow",
        /// The first link that works carries everything.
        Failover = "failover",
    }
}

impl Scheduler {
    pub(crate) fn policy(self) -> &'static dyn Policy {
        match self {
            Self::Auto => &auto::Auto,
            Self::MinRtt | Self::Failover => &min_rtt::MinRtt,
            Self::Balanced => &balanced::Balanced,
            Self::Weighted => &weighted::Weighted,
            Self::Redundant => &redundant::Redundant,
            Self::Flow => &flow::Flow,
        }
    }

    /// Whether every packet leaves on all paths.
    pub fn uses_all_paths(self) -> bool {
        self == Self::Redundant
    }

    /// Whether only the first link that works carries data.
    pub(crate) fn uses_one_link(self) -> bool {
        self == Self::Failover
    }

    /// Whether the order of the paths is fixed, so that a path gets its whole available window at a time.
    pub fn fills_paths_in_order(self) -> bool {
        self.policy().fills_paths_in_order()
    }

    /// Whether every flow is pinned to a path.
    pub fn keeps_flows_on_paths(self) -> bool {
        self.policy().keeps_flows_on_paths()
    }

    /// Whether long transfers may also use paths with a large delay difference.
    pub fn uses_late_paths(self) -> bool {
        self.policy().uses_late_paths()
    }
}
