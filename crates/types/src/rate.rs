use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::size::parse_amount;

/// A data rate in bit/s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct BitRate(u64);

impl BitRate {
    /// A rate of `n` bit/s.
    pub const fn from_bps(n: u64) -> Self {
        Self(n)
    }

    /// A rate of `n` bytes/s.
    pub const fn from_bytes_per_second(n: u64) -> Self {
        Self(n.saturating_mul(8))
    }

    /// The rate in bit/s.
    pub const fn bps(self) -> u64 {
        self.0
    }

    /// How long it takes to send `bytes` at this rate; [`Duration::MAX`] at rate 0.
    pub fn time_for(self, bytes: u64) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let ns = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// How many whole bytes fit into `time` at this rate.
    pub fn bytes_in(self, time: Duration) -> u64 {
        let bytes = u128::from(self.0) * time.as_nanos() / 8 / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// How many whole bytes a rate (bytes/s) carries in `time`.
#[inline]
pub fn bytes_in(rate: u64, time: Duration) -> u64 {
    // Most products fit 64 bits, where a division is much cheaper.
    let product = u64::try_from(time.as_nanos()).ok().and_then(|nanos| rate.checked_mul(nanos));
    product.map_or_else(
        || u64::try_from(time.as_nanos().saturating_mul(rate.into()) / 1_000_000_000).unwrap_or(u64::MAX),
        |product| product / 1_000_000_000,
    )
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in [(1_000_000_000, "gbit"), (1_000_000, "mbit"), (1_000, "kbit")] {
            if self.0 >= unit && self.0.is_multiple_of(unit) {
                return write!(f, "{}{name}", self.0 / unit);
            }
        }
        write!(f, "{}bit", self.0)
    }
}

impl From<BitRate> for String {
    fn from(rate: BitRate) -> Self {
        rate.to_string()
    }
}

impl TryFrom<String> for BitRate {
    type Error = ParseBitRateError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// A text that is not a data rate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a rate: write a number with a unit, as in 100mbit, 1.5gbit or 500kbit")]
pub struct ParseBitRateError(String);

/// Units of rates, in lower case.
const UNITS: [(&[&str], f64); 4] = [
    (&["bit", "bps"], 1.0),
    (&["k", "kbit", "kbps"], 1e3),
    (&["m", "mbit", "mbps"], 1e6),
    (&["g", "gbit", "gbps"], 1e9),
];

impl FromStr for BitRate {
    type Err = ParseBitRateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_amount(text, &UNITS, 1e15).map(Self).ok_or_else(|| ParseBitRateError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_time_are_rounded_down_and_bounded() {
        let in_an_hour = bytes_in(1_000_000_000, Duration::from_secs(3600));
        assert_eq!((bytes_in(1500, Duration::from_micros(999)), in_an_hour), (1, 3_600_000_000_000));
        // More than 64 bits in nanoseconds.
        assert_eq!(bytes_in(1 << 60, Duration::from_millis(500)), 1 << 59);
        assert_eq!(bytes_in(u64::MAX, Duration::MAX), u64::MAX);
    }

    #[test]
    fn rates_are_read_as_people_write_them() {
        assert_eq!("100mbit".parse(), Ok(BitRate::from_bps(100_000_000)));
        assert_eq!("1.5 gbit".parse(), Ok(BitRate::from_bps(1_500_000_000)));
        assert_eq!("64K".parse(), Ok(BitRate::from_bps(64_000)));
        for bad in ["", "100", "mbit", "-1mbit", "1xbit", "1e99gbit"] {
            assert!(bad.parse::<BitRate>().is_err(), "{bad} was taken for a rate");
        }
    }

    #[test]
    fn printing_and_reading_agree() {
        for text in ["100mbit", "1500kbit", "7bit", "2gbit"] {
            assert_eq!(text.parse::<BitRate>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bytes_and_time_are_inverse() {
        let rate = BitRate::from_bps(8_000_000);
        assert_eq!(rate.time_for(1000), Duration::from_millis(1));
        assert_eq!(rate.bytes_in(Duration::from_millis(1)), 1000);
        assert_eq!(BitRate::default().time_for(1), Duration::MAX);
    }
}
