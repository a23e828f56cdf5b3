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

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseByteSizeError(text.to_owned());
        let lower = text.trim().to_ascii_lowercase();
        let split = lower.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(error)?;
        let (number, unit) = lower.split_at(split);
        let factor = match unit {
            "b" => 1.0,
            "k" | "kb" => 1e3,
            "m" | "mb" => 1e6,
            "g" | "gb" => 1e9,
            "t" | "tb" => 1e12,
            "kib" => 1024.0,
            "mib" => 1024.0 * 1024.0,
            "gib" => 1024.0 * 1024.0 * 1024.0,
            "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return Err(error()),
        };
        let value: f64 = number.trim().parse().map_err(|_| error())?;
        if !value.is_finite() || value < 0.0 || value * factor > 1e18 {
            return Err(error());
        }
        Ok(Self((value * factor).round() as u64))
    }
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
