//! The queue in front of the paths of a traffic class, and how classes share a link.
//!
//! In: IP packets, each with the hash of its flow, and the time. Out: the packet that shall be sent
//! next. [`FqCodel`] shares the tunnel fairly among the flows (RFC 8290), lets flows that send little
//! (ping, DNS, a TCP handshake) go first, and keeps the waiting time of the others short by dropping
//! early (RFC 8289). And what stands in front of a link: [`Shaper`] divides what the link carries
//! among the classes that send over it.
//!
//! Always holds:
//! - the packets of one flow leave in the order in which they came;
//! - every packet that came in was handed out, or counted as dropped, or is still counted as waiting;
//! - no more than the configured bytes and packets wait;
//! - an empty queue holds less than 2 KiB of memory, and a busy one allocates only to grow.
#![forbid(unsafe_code)]

mod queue;
mod shaper;

pub use queue::{FqCodel, QueueConfig, Queued};
pub use shaper::{Sample, Seat, Shaper, Share};
