//! Types that all crates share: identifiers, rates, sizes, settings, time, and log targets.
//!
//! In: text to parse. Out: values and their text. Always holds: nothing here does more than parsing, printing
//! and arithmetic, and nothing depends on another crate of the workspace.
#![forbid(unsafe_code)]

mod class_name;
mod congestion_control;
mod domain;
mod fec;
mod flow_mode;
mod port_holder;
mod portion;
mod rate;
mod size;
pub mod target;
mod tier;
mod transport;
mod varint;
mod weight;
mod word_enum;

#[doc(hidden)]
pub use ::serde;
pub use class_name::{ClassName, ParseClassNameError};
pub use congestion_control::CongestionControl;
pub use domain::{Domain, ParseDomainError};
pub use fec::{Fec, ParseFecError};
pub use flow_mode::FlowMode;
pub use port_holder::{PortHolder, PortProtocol};
pub use portion::{ParsePortionError, Portion};
pub use rate::{BitRate, ParseBitRateError, bytes_in};
pub use size::{ByteSize, ParseByteSizeError};
pub use std::time::{Duration, Instant};
pub use tier::Tier;
pub use transport::Transport;
pub use varint::varint_len;
pub use weight::{ParseWeightError, Weight};
pub use word_enum::{UnknownWord, most_similar};

/// Calls `work`; `Err` is the message of a panic in it. What it was changing then may be inconsistent, and
/// must not be used again.
///
/// # Errors
/// If `work` panicked.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    done.map_err(|panic| panic_text(&*panic).to_owned())
}

/// The earlier one of two deadlines.
#[inline]
pub fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The message of a caught panic.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message")
}

/// Where a path leaves the client: an uplink (a network interface with its addresses), the traffic class
/// whose connection the path belongs to, and the index of the path on that uplink. Each has a source port of
/// its own.
///
/// A client numbers uplinks; a link that disappears and returns keeps its number while the process runs.
///
/// ```text
/// bits 12-15  index of the path on the uplink
/// bits 9-11   class
/// bits 0-8    uplink
/// ```
///
/// So numbers below [`LinkId::MAX_UPLINKS`] are the first paths of uplinks for class 0; they also stand for
/// the uplinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u16);

impl LinkId {
    /// Number of uplinks that the 9 bits can distinguish.
    pub const MAX_UPLINKS: u16 = 1 << 9;

    /// Index of the path that carries QUIC packets inside a TCP connection: the highest of 4 bits. UDP paths
    /// have lower ones.
    pub const TCP_PATH_INDEX: u8 = 15;

    /// The path with this index (0 to 15) on the same uplink, for the same class.
    pub const fn with_path_index(self, index: u8) -> Self {
        Self(self.0 & 0xfff | (index as u16) << 12)
    }

    /// Index of the path on its uplink, from 0.
    pub const fn path_index(self) -> u8 {
        (self.0 >> 12) as u8
    }

    /// Whether the path carries QUIC packets inside a TCP connection.
    pub const fn is_tcp(self) -> bool {
        self.path_index() == Self::TCP_PATH_INDEX
    }

    /// The path with the same index on the same uplink, for another class.
    pub const fn with_class(self, class: ClassId) -> Self {
        Self(self.0 & !(7 << 9) | (class.0 as u16 & 7) << 9)
    }

    /// The class whose connection the path belongs to.
    pub const fn class(self) -> ClassId {
        ClassId((self.0 >> 9 & 7) as u8)
    }

    /// The uplink alone: its first path for class 0.
    pub const fn uplink(self) -> Self {
        Self(self.0 & (Self::MAX_UPLINKS - 1))
    }
}

/// A QUIC path within one connection (draft-ietf-quic-multipath-21, path ID).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

/// A traffic class of a session: a number below [`ClassId::MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u8);

impl ClassId {
    /// The class of flows that match no rule. Its connection creates the session.
    pub const DEFAULT: Self = Self(0);
    /// Number of classes that a session can have: 3 bits of a [`LinkId`].
    pub const MAX: u8 = 8;
}

/// One client at one server, numbered by the server while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

#[cfg(test)]
mod tests {
    use super::{ClassId, LinkId};

    #[test]
    fn paths_of_an_uplink_are_distinct_and_share_the_uplink() {
        let second = LinkId(7).with_path_index(1);
        assert_eq!((second.path_index(), second.uplink()), (1, LinkId(7)));
        assert_eq!(second.with_path_index(0), LinkId(7));
        assert!(LinkId(LinkId::MAX_UPLINKS - 1) < second, "the first paths of all uplinks come first");
        assert!(
            LinkId(7).with_class(ClassId(3)).with_path_index(LinkId::TCP_PATH_INDEX).is_tcp()
                && !second.is_tcp()
        );
    }

    #[test]
    fn each_class_has_paths_of_its_own() {
        let link = LinkId(7).with_class(ClassId(5)).with_path_index(2);
        assert_eq!((link.class(), link.path_index(), link.uplink()), (ClassId(5), 2, LinkId(7)));
        assert_eq!(link.with_class(ClassId::DEFAULT), LinkId(7).with_path_index(2));
        assert!(
            LinkId(LinkId::MAX_UPLINKS - 1) < LinkId(0).with_class(ClassId(1)),
            "those of class 0 come first"
        );
    }
}
