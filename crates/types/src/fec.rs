use std::str::FromStr;

use derive_more::Display;

/// Forward error correction: how many repair packets protect data packets against loss.
#[derive(Clone, Copy, Debug, Default, Display, PartialEq, Eq, Hash)]
pub enum Fec {
    /// No repair packets.
    #[default]
    #[display("off")]
    Off,
    /// As many repair packets as the measured loss requires; none on paths that lose little.
    #[display("auto")]
    Auto,
    /// After every group of `data` packets, `repair` repair packets.
    #[display("{data}+{repair}")]
    Fixed {
        /// Data packets in a group, 1 to [`Fec::MAX_DATA`].
        data: u8,
        /// Repair packets for a group, 1 to [`Fec::MAX_REPAIR`].
        repair: u8,
    },
}

impl Fec {
    /// Maximum number of data packets in a group: the index has 6 bits on the wire (docs/protocol.md, "FEC
    /// groups"). The larger a group, the later its repair packets, which follow its last data packet; the
    /// smaller, the more repair packets for the same protection.
    pub const MAX_DATA: u8 = 64;
    /// Maximum number of repair packets for a group. With at most 64 data packets and 32 repair packets the
    /// Cauchy coefficients of the code are distinct and not 0 (docs/design/fec.md).
    pub const MAX_REPAIR: u8 = 32;
}

/// A text that is not a [`Fec`] setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a FEC setting: expected off, auto, or data packets + repair packets, as in 10+2 (1 to {data}, 1 to {repair})",
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
    fn every_printed_setting_parses_to_itself() {
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
