//! How clients reach a server, as an option.

use std::{net::IpAddr, str::FromStr};

use mpvpn_input::values::ServerAddr;

/// How clients reach a server: a name or address, and a port if it is another one than that at which it
/// listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOption {
    host: String,
    port: Option<u16>,
}

impl HostOption {
    /// The address with this port, if it names none.
    pub fn or_port(self, port: u16) -> ServerAddr {
        ServerAddr { host: self.host, port: self.port.unwrap_or(port) }
    }
}

impl FromStr for HostOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ServerAddr { host, port } = text.parse()?;
        let names_port = text.parse::<IpAddr>().is_err() && text.ends_with(&format!(":{port}"));
        Ok(Self { host, port: names_port.then_some(port) })
    }
}
