//! The option `shards`: the number of threads that carry packets.

use std::str::FromStr;

use derive_more::Display;

/// Number of threads that carry packets.
#[derive(Clone, Copy, Debug, Default, Display, PartialEq, Eq)]
pub enum Shards {
    /// Chosen for this machine: see the help of the option.
    #[default]
    #[display("auto")]
    Auto,
    /// This many, from 1 to [`Shards::MAX`].
    Count(u8),
}

impl Shards {
    /// Largest number of threads: a connection ID has four bits for the thread.
    pub const MAX: u8 = 16;

    /// The number of threads, from 1 to [`Self::MAX`]; [`Self::Auto`] stands for `auto` threads.
    pub fn count(self, auto: usize) -> u8 {
        match self {
            Self::Auto => u8::try_from(auto).unwrap_or(Self::MAX).clamp(1, Self::MAX),
            Self::Count(count) => count.clamp(1, Self::MAX),
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

mpvpn_input::text_of_parsed! {
    Shards: "a number from 1 to 16, or \"auto\"", as in "auto";
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
