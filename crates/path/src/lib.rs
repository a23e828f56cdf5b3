//! The packet scheduler, and the states of paths.
//!
//! In: the state of every path (round-trip time, delivery rate, arrivals, carrier of its link) and the
//! packets of a session. Out: which path carries which packet next, when to send heartbeats, which paths are
//! alive, whether a link uses UDP or TCP, and how many paths it has.
//!
//! Always holds:
//! - A path counts as alive because packets arrive on it, never because its packets are acknowledged:
//!   acknowledgements travel on other paths too ([`Liveness`]).
//! - While there is any path, packets may leave: if every path looks dead, all of them are tried
//!   ([`Dispatcher`]).
//! - Where packets are not numbered, those of a flow that needs order leave on one path, in order.
//! - Time is an argument. Nothing here reads a clock, sleeps or touches a socket.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod dispatch;
mod flows;
mod liveness;
mod pacer;
mod path_count;
mod pause;
mod quota;
mod scheduler;
mod selector;
mod tiers;
mod transport;

pub use dispatch::{Dispatcher, EligiblePackets, PathInfo, Utilization};
pub use liveness::{Liveness, LivenessChange, LivenessConfig, LivenessUpdate, StateReason};
pub use pacer::Pacer;
pub use path_count::{LinkBytes, MIN_BUSY_RATE, PathCount, PathCountController, SessionLimitHint};
pub use pause::{LONG_SILENCE, next_probe_at, pause_after, probe_pause};
pub use quota::{Day, Month};
pub use scheduler::Scheduler;
pub use selector::{
    PathCandidate, PathSelector, Selection, delay_difference, first_to_arrive_if, first_to_arrive_soon,
    set_one_way_delays,
};
pub use tiers::{Placement, TieredPath, Tiers};
pub use transport::{LinkSigns, PathTransport, TcpAction, TransportHealth, TransportSelector};

/// Whether a path carries data; the better state is the smaller one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathState {
    /// Carries data.
    Active,
    /// Works, and carries data only when no active path is left.
    Standby,
    /// Nothing arrives on it.
    Down,
}

impl PathState {
    /// The word for this state in status output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Standby => "standby",
            Self::Down => "down",
        }
    }
}
