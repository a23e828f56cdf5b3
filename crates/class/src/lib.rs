//! Traffic classes: the class of a flow, the queue in front of the paths of a class, and how classes share a
//! link.
//!
//! In: the header fields of a flow's first packet, DNS messages that pass through the tunnel, packets with
//! their flow hash and the time, measurements of paths. Out: the class of a flow, the next packet to send,
//! how many bytes a class may send over a link.
//!
//! - [`Rules`] choose the class of a flow. [`DnsSnooper`] knows which addresses DNS returned for the domains
//!   in rules. [`FlowClasses`] remembers the class of each flow.
//! - [`FqCodel`] shares a tunnel fairly among flows (RFC 8290): flows that send little (ping, DNS, a TCP
//!   handshake) go first, and early drops keep the queueing delay of the others short (RFC 8289).
//! - [`Shaper`] divides the capacity of a link among the classes that send over it.
//! - [`RateLimit`] keeps what one user carries in a direction to a rate, over all of the user's connections.
//!
//! Always holds:
//! - the packets of one flow leave in the order in which they came;
//! - every packet that came in was handed out, was counted as dropped, or is still counted as queued;
//! - no more than the configured bytes and packets are queued;
//! - an empty queue holds less than 2 KiB of memory, and a busy one allocates only to grow.
#![forbid(unsafe_code)]

mod dns_snooper;
mod flows;
mod queue;
mod rate_limit;
mod rules;
mod shaper;

/// Maximum number of links over which copies of one packet are sent. Each copy costs the rate of a whole
/// packet; more than four would add less and less, since all have to be lost at the same time. The number is
/// chosen (docs/design/scheduler.md, open questions).
pub const MAX_COPIES: u8 = 4;

pub use dns_snooper::{DnsSnooper, DomainPattern, ParseDomainPatternError, has_plausible_counts};
pub use flows::FlowClasses;
pub use queue::{FqCodel, QueueConfig, QueuedPacket};
pub use rate_limit::{RateLimit, RateLimitMember};
pub use rules::{
    BuiltInRule, Classification, PacketFields, Rule, Rules, UnreachableReason, UnreachableRule,
    builtin::{BUILT_IN_RULES, BULK, CRITICAL},
    has_ports,
};
pub use shaper::{CapacityChange, CapacityReason, Sample, Shaper, ShaperHandle, Share};
