//! The lanes: how flows are carried.
//!
//! The stream lane is in [`interposer`], and what takes it in [`rules`]. The datagram lane is how the packets of a flow that travel over several paths
//! come out in order, once.
//!
//! In: packets about to be sent, each with the hash of its flow; packets that arrived, each with its
//! [`Label`]; the time. Out: the label to send with a packet, and arrived packets in the order in which
//! they may be delivered. A packet that no path takes whole travels in parts, which [`Join`] puts together. What paths
//! lose is repaired without asking by [`fec`].
//!
//! Always holds:
//! - a packet is delivered at most once, and exactly once if it arrives within the last few thousand of
//!   its flow;
//! - a packet that is in order is never held, and none longer than its sender asked for;
//! - a packet that comes too late for its place is delivered all the same;
//! - memory is bounded, whatever the peer sends.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod fec;
pub mod interposer;
mod join;
mod label;
mod number;
mod reorder;
pub mod rules;
pub mod udp;

pub use join::Join;
pub use label::{BUCKETS, Label, LabelError, Part};
pub use number::Numbers;
pub use reorder::{Reorder, ReorderStats};
