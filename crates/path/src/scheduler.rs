//! How the packets of a session are spread over its paths: one file a scheduler, and the table of them.
//!
//! In: the paths that may be used and what each can take ([`Offer`]). Out: the path that carries the next packets, and the
//! rules that follow from the scheduler: whether a flow stays on its path, whether one link carries everything, how much a
//! path is given at a time. Always holds: a scheduler is a file of this folder, a module and a line of the table below, and
//! nothing else in the program names it.

mod auto;
mod balanced;
mod failover;
mod flow;
mod min_rtt;
mod redundant;
mod weighted;

use std::fmt::Debug;

use mpvpn_class::QueuedPacket;
use mpvpn_types::word_enum;

use crate::selector::{MOST_SAVED, PathCandidate, Selection, Work};

/// What distinguishes one scheduler from another.
pub(crate) trait Policy: Debug + Sync {
    /// The path that carries the next packets, with `backlog` bytes waiting; `None` if it is better to wait. `offers` are in
    /// the order of preference of the scheduler.
    fn pick(&self, work: &mut Work, offers: &[PathCandidate], backlog: u64) -> Option<Selection>;

    /// What the work of a path is divided by before paths are compared: its rate (bytes/s).
    fn share(&self, offer: &PathCandidate) -> f64 {
        offer.rate.max(1) as f64
    }

    /// How much a path may save up, in the unit of its work, while others carry everything.
    fn most_saved(&self, _offer: &PathCandidate) -> f64 {
        MOST_SAVED
    }

    /// Whether every packet leaves on all paths.
    fn uses_all_paths(&self) -> bool {
        false
    }

    /// Whether only the first link that works carries data.
    fn uses_one_link(&self) -> bool {
        false
    }

    /// Whether the order of the paths is fixed, so that a path is given all that it can take at a time.
    fn fills_paths_in_order(&self) -> bool {
        false
    }

    /// Whether every flow stays on its path.
    fn keeps_flows_on_paths(&self) -> bool {
        false
    }

    /// Whether the flow of this packet stays on its path. `numbered`: the far end restores the order of numbered packets.
    fn pins(&self, _packet: &QueuedPacket, _numbered: bool) -> bool {
        self.keeps_flows_on_paths()
    }

    /// Whether flows that stay on a path move from one that is full to one that has room to spare.
    fn moves_flows_off_full_paths(&self) -> bool {
        false
    }

    /// Whether streams that last may also use paths that are much slower than others.
    fn uses_late_paths(&self) -> bool {
        false
    }
}

word_enum! {
    /// How the packets of a session are spread over its paths.
    #[derive(Hash)]
    pub enum Scheduler {
        /// Every packet takes the path on which it is expected to arrive first. At a peer that does not restore the
        /// order of packets, flows that need it stay on a path.
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
        /// Every flow stays on its path while that works; a new flow takes the path with the fewest flows for its rate.
        Flow = "flow",
        /// The first link that works carries everything.
        Failover = "failover",
    }
}

impl Scheduler {
    pub(crate) fn policy(self) -> &'static dyn Policy {
        match self {
            Self::Auto => &auto::Auto,
            Self::MinRtt => &min_rtt::MinRtt,
            Self::Balanced => &balanced::Balanced,
            Self::Weighted => &weighted::Weighted,
            Self::Redundant => &redundant::Redundant,
            Self::Flow => &flow::Flow,
            Self::Failover => &failover::Failover,
        }
    }

    /// Whether every packet leaves on all paths.
    pub fn uses_all_paths(self) -> bool {
        self.policy().uses_all_paths()
    }

    /// Whether the order of the paths is fixed, so that a path is given all that it can take at a time.
    pub fn fills_paths_in_order(self) -> bool {
        self.policy().fills_paths_in_order()
    }

    /// Whether every flow stays on its path.
    pub fn keeps_flows_on_paths(self) -> bool {
        self.policy().keeps_flows_on_paths()
    }

    /// Whether streams that last may also use paths that are much slower than others.
    pub fn uses_late_paths(self) -> bool {
        self.policy().uses_late_paths()
    }
}
