use std::str::FromStr;

use derive_more::Display;

/// A relative weight, 1 to 1000: of a link under the scheduler `weighted`, or of a class that competes for a
/// link.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u16);

impl Weight {
    /// The largest weight: a chosen bound (docs/design/scheduler.md, open questions). A smaller one could not
    /// express the ratio of a fast and a slow link; a larger one only allows values that hardly differ in
    /// effect.
    pub const MAX: Self = Self(1000);

    /// The weight `number`; `None` if it is 0 or above [`Self::MAX`].
    pub fn new(number: u64) -> Option<Self> {
        u16::try_from(number).ok().filter(|number| (1..=Self::MAX.0).contains(number)).map(Self)
    }

    /// The weight as a number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl Default for Weight {
    /// 1: equal shares for all links or classes without a configured weight.
    fn default() -> Self {
        Self(1)
    }
}

/// A text that is not a weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a weight: expected a whole number from 1 to {max}", max = Weight::MAX)]
pub struct ParseWeightError(String);

impl FromStr for Weight {
    type Err = ParseWeightError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = text.parse().ok().and_then(Self::new);
        found.ok_or_else(|| ParseWeightError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_numbers_from_1_to_1000() {
        for number in [1, 3, 1000] {
            let weight = Weight::new(number).unwrap();
            assert_eq!((u64::from(weight.get()), weight.to_string().parse()), (number, Ok(weight)));
        }
        assert_eq!((Weight::new(0), Weight::new(1001), Weight::new(u64::MAX)), (None, None, None));
        for text in ["0", "1001", "-1", "much", ""] {
            assert!(text.parse::<Weight>().unwrap_err().to_string().contains("1 to 1000"), "{text}");
        }
    }
}
