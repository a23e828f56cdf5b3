//! How many paths a link has.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use super::values::Text;

/// Paths over one link, each from a source port of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pipes {
    /// What a link's addresses suggest: [`Pipes::SHARED`] behind a carrier's address translation, else one.
    Auto,
    /// This many, from 1 to [`Pipes::MAX`].
    Count(u8),
}

impl Pipes {
    /// Paths a link at most.
    pub const MAX: u8 = 8;
    /// Where many customers share an address, operators are known to limit each UDP session.
    pub const SHARED: u8 = 4;

    /// The number for a link with these addresses.
    pub fn count(self, addresses: &[IpAddr]) -> u8 {
        match self {
            Self::Count(count) => count.clamp(1, Self::MAX),
            Self::Auto if addresses.iter().any(is_shared) => Self::SHARED,
            Self::Auto => 1,
        }
    }
}

/// Whether an address is from the block for networks behind a carrier's address translation (RFC 6598).
fn is_shared(address: &IpAddr) -> bool {
    const BLOCK: u32 = Ipv4Addr::new(100, 64, 0, 0).to_bits() >> 22;
    matches!(address, IpAddr::V4(ip) if ip.to_bits() >> 22 == BLOCK)
}

impl Default for Pipes {
    fn default() -> Self {
        Self::Count(1)
    }
}

impl fmt::Display for Pipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => count.fmt(f),
        }
    }
}

impl Text for Pipes {
    const EXPECTED: &'static str = "a number from 1 to 8, or \"auto\"";

    fn read(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) if (1..=Self::MAX).contains(&count) => Ok(Self::Count(count)),
            _ => Err(format!("`{text}` is not auto and no number from 1 to {}", Self::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_and_numbers_within_the_limits_are_read() {
        assert_eq!(Pipes::read("auto"), Ok(Pipes::Auto));
        assert_eq!(Pipes::read("8"), Ok(Pipes::Count(8)));
        for bad in ["0", "9", "-1", "", "Auto", "four", "256"] {
            assert!(Pipes::read(bad).unwrap_err().contains("from 1 to 8"), "{bad}");
        }
    }

    #[test]
    fn auto_goes_by_the_block_for_shared_addresses() {
        let count =
            |address: &str| Pipes::Auto.count(&["2001:db8::1", address].map(|ip| ip.parse().unwrap()));
        for shared in ["100.64.0.1", "100.127.255.254"] {
            assert_eq!(count(shared), 4, "{shared}");
        }
        for own in ["100.63.255.255", "100.128.0.1", "192.168.1.2", "203.0.113.7"] {
            assert_eq!(count(own), 1, "{own}");
        }
        assert_eq!(Pipes::Count(3).count(&[]), 3);
    }
}
