//! Targets of the `tracing` events that report decisions: what was decided, from which inputs, and why.
//!
//! Always holds: a target keeps its name and its subject, because people write it into `RUST_LOG`. A change
//! of state is reported at the level DEBUG, a decision about one packet or one turn at TRACE.

/// Which path carries the next packets, which paths may carry any, and when overflow links come into use.
pub const SCHEDULER: &str = "mpvpn::scheduler";
/// How classes of traffic share a link, and what a link is taken to carry.
pub const SHAPER: &str = "mpvpn::shaper";
/// Windows and rates of congestion controllers.
pub const CONGESTION: &str = "mpvpn::congestion";
/// Whether a path works: heartbeats, silence, recovery.
pub const LIVENESS: &str = "mpvpn::liveness";
/// How much repair a path gets (forward error correction), and what was restored.
pub const FEC: &str = "mpvpn::fec";
/// Sequence numbers, reorder timeouts, retransmission and reinjection.
pub const REORDER: &str = "mpvpn::reorder";
/// How many paths a link gets.
pub const PIPES: &str = "mpvpn::pipes";
/// Whether packets travel in UDP or inside TCP, and at which size.
pub const TRANSPORT: &str = "mpvpn::transport";
/// Which class a flow belongs to, and which connection carries it.
pub const CLASSES: &str = "mpvpn::classes";
