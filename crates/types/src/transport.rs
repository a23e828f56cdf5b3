use std::{fmt, str::FromStr};

/// What packets of a link travel in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// QUIC over UDP where that gets through, else inside HTTP/2 over TCP.
    #[default]
    Auto,
    /// QUIC over UDP only.
    Quic,
    /// HTTP/2 over TCP only.
    Tcp,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Quic, Self::Tcp];

    /// The word that options and status output use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that no transport has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of: auto, quic, tcp")]
pub struct ParseTransportError(String);

impl FromStr for Transport {
    type Err = ParseTransportError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|transport| transport.as_str() == text);
        found.ok_or_else(|| ParseTransportError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_is_read_as_it_is_shown() {
        for transport in Transport::ALL {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        assert!("udp".parse::<Transport>().unwrap_err().to_string().contains("auto, quic, tcp"));
    }
}
