//! Names that every crate shares.
//!
//! In: nothing. Out: identifiers, rates and the clock type. Always holds: no behaviour beyond
//! parsing and printing lives here, and nothing here depends on another crate of the workspace.
#![forbid(unsafe_code)]

mod class_name;
mod congestion_control;
mod fec;
mod flow_mode;
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
pub use fec::{Fec, ParseFecError};
pub use flow_mode::FlowMode;
pub use portion::{ParsePortionError, Portion};
pub use rate::{BitRate, ParseBitRateError};
pub use size::{ByteSize, ParseByteSizeError};
pub use std::time::{Duration, Instant};
pub use tier::Tier;
pub use transport::Transport;
pub use varint::varint_len;
pub use weight::{ParseWeightError, Weight};
pub use word_enum::{UnknownWord, alternatives, alternatives_len};

/// What a panic that was caught says.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason was told")
}

/// A way out of this machine: an uplink (an interface with its addresses), numbered by the engine, or one of
/// several pipes of an uplink, for the connection of one class; each with a source port of its own.
///
/// Stable while the process runs: a link that disappears and returns keeps its number. Numbers below
/// [`LinkId::MAX_UPLINKS`] are the first pipes of uplinks for the class 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u16);

impl LinkId {
    /// How many uplinks can be told apart.
    pub const MAX_UPLINKS: u16 = 1 << 9;

    /// The pipe of an uplink whose packets travel inside a TCP connection; those of UDP have lower numbers.
    pub const TCP_PATH_INDEX: u8 = 15;

    /// A pipe (counted from 0, below 16) of the uplink that this one belongs to, for the same class.
    pub const fn with_path_index(self, pipe: u8) -> Self {
        Self(self.0 & 0xfff | (pipe as u16) << 12)
    }

    /// Which pipe of its uplink it is, counted from 0.
    pub const fn path_index(self) -> u8 {
        (self.0 >> 12) as u8
    }

    /// Whether its packets travel inside a TCP connection.
    pub const fn is_tcp(self) -> bool {
        self.path_index() == Self::TCP_PATH_INDEX
    }

    /// The same pipe of the same uplink for the connection of a class.
    pub const fn with_class(self, class: ClassId) -> Self {
        Self(self.0 & !(7 << 9) | (class.0 as u16 & 7) << 9)
    }

    /// Whose connection it is for.
    pub const fn class(self) -> ClassId {
        ClassId((self.0 >> 9 & 7) as u8)
    }

    /// The first pipe of the same uplink for the class 0, which stands for all of them.
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
    /// The class of what no rule puts into another one, and the one whose connection makes the session.
    pub const DEFAULT: Self = Self(0);
    /// How many classes a session can have.
    pub const MAX: u8 = 8;
}

/// One client at one server, numbered by the server while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

#[cfg(test)]
mod tests {
    use super::{ClassId, LinkId};

    #[test]
    fn pipes_of_an_uplink_are_told_apart_and_belong_together() {
        let second = LinkId(7).with_path_index(1);
        assert_eq!((second.path_index(), second.uplink()), (1, LinkId(7)));
        assert_eq!(second.with_path_index(0), LinkId(7));
        assert!(LinkId(LinkId::MAX_UPLINKS - 1) < second, "the first pipes of all uplinks come first");
        assert!(
            LinkId(7).with_class(ClassId(3)).with_path_index(LinkId::TCP_PATH_INDEX).is_tcp()
                && !second.is_tcp()
        );
    }

    #[test]
    fn each_class_has_pipes_of_its_own() {
        let link = LinkId(7).with_class(ClassId(5)).with_path_index(2);
        assert_eq!((link.class(), link.path_index(), link.uplink()), (ClassId(5), 2, LinkId(7)));
        assert_eq!(link.with_class(ClassId::DEFAULT), LinkId(7).with_path_index(2));
        assert!(
            LinkId(LinkId::MAX_UPLINKS - 1) < LinkId(0).with_class(ClassId(1)),
            "those of the class 0 come first"
        );
    }
}
