//! How the flows of apps travel, by flow mode: as IP packets in datagrams, as bytes of streams, or as UDP
//! payloads.
//!
//! Datagrams: the sender numbers packets ([`SequenceNumbers`], [`Label`]), the receiver puts packets that
//! took several paths back in order ([`ReorderBuffer`]) and joins the parts of packets that no path takes
//! whole ([`PartReassembler`]). [`fec`] adds repair packets, from which the receiver restores lost ones.
//! Streams: [`split_tcp`] terminates TCP connections of apps, and [`rules`] chooses which ones. UDP payloads:
//! [`udp`] knows the UDP flows that have a request of their own.
//!
//! In: packets to send, each with the hash of its flow; received packets, each with its [`Label`]; the time.
//! Out: the label to send with a packet; received packets in the order in which to deliver them.
//!
//! Always holds:
//! - a packet is delivered at most once, and exactly once if it is among the last few thousand packets of its
//!   flow;
//! - a packet that is in order is delivered at once, and no packet is held longer than its sender asked for;
//! - a packet that arrives after the reorder timeout is delivered out of order;
//! - memory is bounded, whatever the peer sends.
#![forbid(unsafe_code)]
// Tests need a moment to count from.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod fec;
mod label;
mod reassembly;
mod reorder;
pub mod rules;
mod sequence_numbers;
pub mod split_tcp;
pub mod udp;

pub use label::{BUCKETS, Label, LabelError, Part};
pub use reassembly::PartReassembler;
pub use reorder::{ReorderBuffer, ReorderStats};
pub use sequence_numbers::SequenceNumbers;
