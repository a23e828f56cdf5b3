//! Targets of the `tracing` events that report decisions of control loops: the decision, its inputs, and the
//! reason.
//!
//! Always holds: a target keeps its name and its subject, because users write it into `RUST_LOG`. A change of
//! state is logged at level DEBUG, a decision about one packet or one event-loop iteration at TRACE.

/// Which path carries the next packets, which paths may carry data, and when overflow links are used.
pub const SCHEDULER: &str = "mpvpn::scheduler";
/// How traffic classes share a link, and the measured capacity of the link.
pub const SHAPER: &str = "mpvpn::shaper";
/// Congestion windows and pacing rates.
pub const CONGESTION: &str = "mpvpn::congestion";
/// Whether a path works: heartbeats, silence, recovery of dead paths.
pub const LIVENESS: &str = "mpvpn::liveness";
/// Forward error correction: how many repair packets a path gets, and which packets were restored.
pub const FEC: &str = "mpvpn::fec";
/// Sequence numbers, reorder timeouts, retransmission and reinjection.
pub const REORDER: &str = "mpvpn::reorder";
/// How many paths a link gets.
pub const PIPES: &str = "mpvpn::pipes";
/// Whether QUIC packets travel in UDP or inside TCP, and their size (path MTU).
pub const TRANSPORT: &str = "mpvpn::transport";
/// Which class a flow belongs to, and which connection carries it.
pub const CLASSES: &str = "mpvpn::classes";
/// Which packets leave past the tunnel, and by which link.
pub const BYPASS: &str = "mpvpn::bypass";
/// Whose received packets a server handles next, and which it drops.
pub const TURNS: &str = "mpvpn::turns";
