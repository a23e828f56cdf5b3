//! Parses users, networks and ports in the rules of a file.

use std::{fmt, net::IpAddr, ops::RangeInclusive};

use derive_more::Into;
use ipnet::IpNet;

use super::values::{Text, host_bits};

/// A range of ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// The ports from `first` to `last`; `None` if the range is empty or has port 0.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (first > 0 && first <= last).then_some(Self { first, last })
    }

    /// The ports as a range.
    pub fn range(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { self.first.fmt(f) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// The name of a user.
#[derive(Into)]
pub struct UserName(String);

/// A network or an address.
#[derive(Into)]
pub struct Prefix(pub IpNet);

impl Text for UserName {
    const EXPECTED: &'static str = "a user's name in quotes";
    const EXAMPLE: &'static str = "alice";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("the user's name is empty".into()),
            name => Ok(Self(name.into())),
        }
    }
}

impl Text for Prefix {
    const EXPECTED: &'static str = "a network or an address in quotes, as in \"192.168.1.0/24\"";
    const EXAMPLE: &'static str = "192.168.1.0/24";

    fn read(text: &str) -> Result<Self, String> {
        let host = || text.parse::<IpAddr>().ok().map(IpNet::from);
        let net: IpNet = text.parse().ok().or_else(host).ok_or_else(|| {
            format!("`{text}` is neither a network, as in 192.168.1.0/24 or fd00::/8, nor an address")
        })?;
        if net.trunc() != net {
            return Err(host_bits(text, &net.trunc()));
        }
        match net {
            IpNet::V6(v6) if v6.prefix_len() >= 96 && v6.addr().to_ipv4_mapped().is_some() => {
                Err(format!("`{text}` is an IPv4-mapped network: write the IPv4 network instead"))
            }
            _ => Ok(Self(net)),
        }
    }
}

impl Text for Ports {
    const EXPECTED: &'static str = "a port or a range of ports in quotes, as in \"443\" or \"8000-8100\"";
    const EXAMPLE: &'static str = "8000-8100";

    fn read(text: &str) -> Result<Self, String> {
        // Digits only: `parse` alone would accept a plus sign.
        let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse::<u16>().ok(),
            false => None,
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let ports = number(first).zip(number(last)).and_then(|(first, last)| Self::new(first, last));
        ports.ok_or_else(|| {
            format!(
                "`{text}` is neither a port from 1 to 65535 nor a range from a lower to a higher one, as in 8000-8100"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_a_port_or_a_range() {
        assert_eq!(Ports::new(443, 443).unwrap().to_string(), "443");
        assert_eq!(Ports::new(1, u16::MAX).unwrap().to_string(), "1-65535");
        assert_eq!(Ports::new(0, 5), None);
        assert_eq!(Ports::new(6, 5), None);
    }
}
