//! The option `pipes`: the number of paths over a link.

use derive_more::Display;
use mpvpn_types::LinkId;

use mpvpn_input::values::Text;

/// Number of paths over one link, each from its own source port.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum Pipes {
    /// Found by measurement: paths are added while each raises the rate.
    #[display("auto")]
    Auto,
    /// This many, from 1 to [`Pipes::MAX`].
    Count(u8),
}

impl Pipes {
    /// Largest number of paths over a link. More cost heartbeats and sockets, and the number has to stay
    /// below [`LinkId::TCP_PATH_INDEX`]; fewer leave rate unused where an operator limits each flow
    /// (docs/design/pipes.md).
    pub const MAX: u8 = 8;
}

// The path number `LinkId::TCP` stands for the path inside TCP.
const _: () = assert!(Pipes::MAX < LinkId::TCP_PATH_INDEX);

impl Default for Pipes {
    fn default() -> Self {
        Self::Count(1)
    }
}

impl Text for Pipes {
    const EXPECTED: &'static str = "a number from 1 to 8, or \"auto\"";
    const EXAMPLE: &'static str = "auto";

    fn read(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) if (1..=Self::MAX).contains(&count) => Ok(Self::Count(count)),
            _ => Err(format!("`{text}` is neither auto nor a number from 1 to {}", Self::MAX)),
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
}
