use std::str::FromStr;

use derive_more::Display;

use crate::BitRate;

/// A part of a link's capacity: a rate, or a percentage of the capacity.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Hash)]
pub enum Portion {
    /// An absolute rate, whatever the capacity of the link.
    Rate(BitRate),
    /// Percent of the link's capacity, 1 to 100.
    #[display("{_0}%")]
    Percent(u8),
}

impl Portion {
    /// The rate on a link with this capacity.
    pub fn of(self, capacity: BitRate) -> BitRate {
        match self {
            Self::Rate(rate) => rate,
            Self::Percent(percent) => {
                BitRate::from_bps((u128::from(capacity.bps()) * u128::from(percent) / 100) as u64)
            }
        }
    }
}

/// A text that is not a part of a link's capacity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a part of a link: expected a rate as in 10mbit, or 1% to 100%")]
pub struct ParsePortionError(String);

impl FromStr for Portion {
    type Err = ParsePortionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = match text.strip_suffix('%') {
            Some(number) => {
                let percent = number.parse().ok().filter(|percent| (1..=100).contains(percent));
                percent.map(Self::Percent)
            }
            None => text.parse().ok().filter(|rate: &BitRate| rate.bps() > 0).map(Self::Rate),
        };
        found.ok_or_else(|| ParsePortionError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portion_is_a_rate_or_a_percentage_of_the_link() {
        let link = BitRate::from_bps(50_000_000);
        for (text, bps) in [("10mbit", 10_000_000), ("20%", 10_000_000), ("100%", 50_000_000)] {
            let portion: Portion = text.parse().unwrap();
            assert_eq!((portion.of(link).bps(), portion.to_string().as_str()), (bps, text));
        }
        assert_eq!(Portion::Percent(100).of(BitRate::from_bps(u64::MAX)).bps(), u64::MAX);
        for text in ["0%", "101%", "%", "0mbit", "much", "", "-5%", "5 %"] {
            assert!(text.parse::<Portion>().unwrap_err().to_string().contains("1% to 100%"), "{text}");
        }
    }
}
