use std::{fmt, str::FromStr};

/// How packets are protected against loss by packets of repair (forward error correction).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fec {
    /// Not at all.
    #[default]
    Off,
    /// As the measured loss demands: nothing on paths that lose little.
    Auto,
    /// After every `data` packets, `repair` ones of repair.
    Fixed {
        /// Packets of a group, 1 to [`Fec::MAX_DATA`].
        data: u8,
        /// Packets of repair for it, 1 to [`Fec::MAX_REPAIR`].
        repair: u8,
    },
}

impl Fec {
    /// Packets of a group, at most: longer ones repair late.
    pub const MAX_DATA: u8 = 64;
    /// Packets of repair for a group, at most.
    pub const MAX_REPAIR: u8 = 32;
}

impl fmt::Display for Fec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Fixed { data, repair } => write!(f, "{data}+{repair}"),
        }
    }
}

/// Something that is no way to protect packets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no protection: expected off, auto, or packets and packets of repair, as in 10+2 (1 to {data}, 1 to {repair})",
    data = Fec::MAX_DATA,
    repair = Fec::MAX_REPAIR
)]
pub struct ParseFecError(String);

impl FromStr for Fec {
    type Err = ParseFecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str, max: u8| text.parse().ok().filter(|number| (1..=max).contains(number));
        let fixed = |text: &str| {
            let (data, repair) = text.split_once('+')?;
            Some(Self::Fixed {
                data: number(data, Self::MAX_DATA)?,
                repair: number(repair, Self::MAX_REPAIR)?,
            })
        };
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            _ => fixed(text).ok_or_else(|| ParseFecError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_read_back() {
        for fec in
            [Fec::Off, Fec::Auto, Fec::Fixed { data: 10, repair: 2 }, Fec::Fixed { data: 64, repair: 32 }]
        {
            assert_eq!(fec.to_string().parse(), Ok(fec));
        }
    }

    #[test]
    fn groups_out_of_range_are_refused_with_the_range() {
        for text in ["0+1", "1+0", "65+1", "1+33", "10+", "+2", "10+2+1", "10-2", "on", "", "256+1", "-1+2"] {
            assert!(text.parse::<Fec>().unwrap_err().to_string().contains("1 to 64, 1 to 32"), "{text}");
        }
    }
}
