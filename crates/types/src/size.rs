use std::{fmt, str::FromStr};

/// An amount of data in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

/// Units for printing, largest first: powers of 1000, as mobile data plans count.
const UNITS: [(u64, &str); 4] =
    [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];

impl ByteSize {
    /// `n` bytes.
    pub const fn from_bytes(n: u64) -> Self {
        Self(n)
    }

    /// The amount in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in UNITS {
            if self.0 >= unit && (self.0 % unit).is_multiple_of(unit / 10) {
                let (whole, tenths) = (self.0 / unit, self.0 % unit / (unit / 10));
                return match tenths {
                    0 => write!(f, "{whole} {name}"),
                    _ => write!(f, "{whole}.{tenths} {name}"),
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// A text that is not an amount of data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an amount of data: write a number with a unit, as in 50GB, 1.5TB or 500MB")]
pub struct ParseByteSizeError(String);

/// Units that are parsed, in lower case.
const PARSED_UNITS: [(&[&str], f64); 9] = [
    (&["b"], 1.0),
    (&["k", "kb"], 1e3),
    (&["m", "mb"], 1e6),
    (&["g", "gb"], 1e9),
    (&["t", "tb"], 1e12),
    (&["kib"], 1024.0),
    (&["mib"], 1_048_576.0),
    (&["gib"], 1_073_741_824.0),
    (&["tib"], 1_099_511_627_776.0),
];

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_amount(text, &PARSED_UNITS, 1e18).map(Self).ok_or_else(|| ParseByteSizeError(text.to_owned()))
    }
}

/// Parses a number with one of `units` in any case; `None` unless the amount is from 0 to `max`.
pub(crate) fn parse_amount(text: &str, units: &[(&[&str], f64)], max: f64) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, unit) = lower.split_at(lower.find(|c: char| c.is_ascii_alphabetic())?);
    let (_, factor) = units.iter().find(|(names, _)| names.contains(&unit))?;
    let amount = number.trim().parse::<f64>().ok()? * factor;
    (0.0..=max).contains(&amount).then(|| amount.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        assert_eq!("50GB".parse(), Ok(ByteSize::from_bytes(50_000_000_000)));
        assert_eq!("1.5 tb".parse(), Ok(ByteSize::from_bytes(1_500_000_000_000)));
        assert_eq!("2MiB".parse(), Ok(ByteSize::from_bytes(2 << 20)));
        for bad in ["", "50", "GB", "-1GB", "1XB", "1e99GB", "NaNGB"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad} was taken for an amount of data");
        }
    }

    #[test]
    fn printing_and_reading_agree() {
        for text in ["50 GB", "1.5 TB", "500 MB", "7 B", "123456 B"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
    }
}
