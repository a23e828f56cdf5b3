//! How many threads carry packets.

use std::{fmt, str::FromStr};

use super::values::Text;

/// Threads that carry packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shards {
    /// As many as are good for this machine.
    #[default]
    Auto,
    /// This many, from 1 to [`Shards::MAX`].
    Count(u8),
}

impl Shards {
    /// Threads at most: a connection ID has four bits for their number.
    pub const MAX: u8 = 16;

    /// The number, where `auto` means `auto` threads, within the limits.
    pub fn count(self, auto: usize) -> u8 {
        match self {
            Self::Auto => u8::try_from(auto).unwrap_or(Self::MAX).clamp(1, Self::MAX),
            Self::Count(count) => count.clamp(1, Self::MAX),
        }
    }
}

impl fmt::Display for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => count.fmt(f),
        }
    }
}

impl FromStr for Shards {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) if (1..=Self::MAX).contains(&count) => Ok(Self::Count(count)),
            _ => Err(format!("`{text}` is neither auto nor a number from 1 to {}", Self::MAX)),
        }
    }
}

impl Text for Shards {
    const EXPECTED: &'static str = "a number from 1 to 16, or \"auto\"";
    const EXAMPLE: &'static str = "auto";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_and_numbers_within_the_limits_are_read() {
        assert_eq!("auto".parse(), Ok(Shards::Auto));
        assert_eq!("1".parse(), Ok(Shards::Count(1)));
        assert_eq!("16".parse(), Ok(Shards::Count(16)));
        for bad in ["0", "17", "-1", "", "Auto", "two", "256"] {
            assert!(bad.parse::<Shards>().unwrap_err().contains("from 1 to 16"), "{bad}");
        }
    }

    #[test]
    fn auto_stays_within_the_limits_too() {
        assert_eq!([0, 1, 2, 16, 64, 1000].map(|auto| Shards::Auto.count(auto)), [1, 1, 2, 16, 16, 16]);
        assert_eq!(Shards::Count(3).count(64), 3);
    }
}
