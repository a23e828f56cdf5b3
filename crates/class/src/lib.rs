//! Traffic classes: which of them a packet belongs to, the queue in front of the paths of each, and how they share a link.
//!
//! [`Rules`] tell the class of a flow from what its first packet shows; [`DnsSnooper`] know which addresses the tunnel's own
//! DNS gave to the domains that rules ask for, and [`FlowClasses`] what was found for each flow.
//!
//! The queue: in come IP packets, each with the hash of its flow, and the time, and out comes the packet that shall be
//! sent next. [`FqCodel`] shares the tunnel fairly among the flows (RFC 8290), lets flows that send little
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

mod dns_snooper;
mod flows;
mod queue;
mod rules;
mod shaper;

/// On how many links a packet travels at once, at most.
pub const MAX_COPIES: u8 = 4;

pub use dns_snooper::{DnsSnooper, DomainPattern, ParseDomainPatternError};
pub use flows::FlowClasses;
pub use queue::{FqCodel, QueueConfig, QueuedPacket};
pub use rules::{
    BuiltInRule, Classification, PacketFields, Rule, Rules, UnreachableReason, UnreachableRule,
    builtin::{BUILT_IN_RULES, BULK, CRITICAL},
    has_ports,
};
pub use shaper::{CapacityChange, CapacityReason, Sample, Shaper, ShaperHandle, Share};
