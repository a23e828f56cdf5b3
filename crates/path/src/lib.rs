//! Which path a packet takes, and which paths may be taken at all.
//!
//! In: what is known about every path (round-trip time, delivery rate, what was received on it and
//! when, what the kernel says about its link) and the packets of a session. Out: heartbeats to
//! send, verdicts about paths, and for each path the packets that it should carry next.
//!
//! Always holds:
//! - A path is judged by what arrives on it, never by the progress of acknowledgements: those
//!   travel on other paths too ([`Liveness`]).
//! - While any path is left, packets have somewhere to go: if every path looks dead, all of them
//!   are tried ([`Dispatcher`]).
//! - Where the far end does not restore order, the packets of one flow that needs it leave on one path,
//!   in the order they came.
//! - Time is an argument. Nothing here reads a clock, sleeps or touches a socket.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod dispatch;
mod flows;
mod liveness;
mod pacer;
mod path_count;
mod quota;
mod scheduler;
mod selector;
mod tiers;
mod transport;

pub use dispatch::{Dispatcher, EligiblePackets, PathInfo, Utilization};
pub use liveness::{Liveness, LivenessChange, LivenessConfig, LivenessUpdate, StateReason};
pub use pacer::Pacer;
pub use path_count::{LinkBytes, PathCount, PathCountController, SessionLimitHint};
pub use quota::{Day, Month};
pub use scheduler::Scheduler;
pub use selector::{
    PathCandidate, PathSelector, Selection, delay_difference, first_to_arrive, first_to_arrive_if,
};
pub use tiers::{Placement, TieredPath, Tiers};
pub use transport::{LinkSigns, PathTransport, TcpAction, TransportHealth, TransportSelector};

/// How a path may be used for sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathState {
    /// Carries data.
    Active,
    /// Works, and is kept for when no active path is left.
    Standby,
    /// Opened, or heard of again, but not yet trusted with data.
    Probing,
    /// Nothing arrives on it.
    Down,
}

impl PathState {
    /// The word that status output uses for this state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Standby => "standby",
            Self::Probing => "probing",
            Self::Down => "down",
        }
    }
}
