//! Ports that lead to other hosts: of a server's machine to hosts in the tunnel, of a client's address there
//! to hosts behind it: the tables `[[forward]]`.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use mpvpn_input::{
    Error, Result,
    rules::{Ports, Prefix},
    values::{Filled, One, Text},
};
use mpvpn_types::PortProtocol;
use schemars::JsonSchema;
use serde::Deserialize;

/// Ports of one protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedPorts {
    /// TCP or UDP.
    pub protocol: PortProtocol,
    /// The first and the last port.
    pub range: (u16, u16),
}

/// The host to which ports lead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardHost {
    /// The client of this user.
    User(String),
    /// This address: of a client, or behind one.
    Address(IpAddr),
}

/// The host to which ports lead, and its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardTarget {
    /// The host.
    pub host: ForwardHost,
    /// Its port; `None`: that to which the packet was sent.
    pub port: Option<u16>,
}

/// A port that leads to another host: of a server's machine to one in the tunnel, of a client's address in
/// the tunnel to one behind it.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "forward")]
#[serde(deny_unknown_fields, expecting = "a table with the head [[forward]]")]
pub struct ForwardRule {
    /// Protocol and port, or a range of ports: of a server at all addresses of its machine, of a client at
    /// its addresses in the tunnel
    #[serde(with = "One::<ForwardedPorts>")]
    #[schemars(with = "One<ForwardedPorts>")]
    port: Option<ForwardedPorts>,
    /// The host, and its port if that is another one. At a server: a user, whose client it is, or an address
    /// of a client or of a host behind one; at a client: an address of a host behind it
    #[serde(with = "One::<ForwardTarget>")]
    #[schemars(with = "One<ForwardTarget>")]
    to: Option<ForwardTarget>,
    /// Networks from which packets are let in [default: everywhere]
    #[serde(default, with = "Filled::<Prefix>")]
    pub from: Vec<IpNet>,
}

impl Text for ForwardedPorts {
    const EXPECTED: &'static str =
        "a protocol and a port in quotes, as in \"tcp/8443\", or a range, as in \"udp/5000-5010\"";
    const EXAMPLE: &'static str = "tcp/8443";

    fn read(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a protocol and a port, as in tcp/8443 or udp/5000-5010");
        let (protocol, ports) = text.split_once('/').ok_or_else(wrong)?;
        let protocol = protocol.parse().map_err(|_| wrong())?;
        let ports = Ports::read(ports)?;
        Ok(Self { protocol, range: (*ports.range().start(), *ports.range().end()) })
    }
}

impl ForwardedPorts {
    /// The protocol's number (IANA, Assigned Internet Protocol Numbers).
    pub fn protocol_number(&self) -> u8 {
        match self.protocol {
            PortProtocol::Tcp => 6,
            PortProtocol::Udp => 17,
        }
    }
}

impl fmt::Display for ForwardedPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = self.protocol.as_str();
        match self.range {
            (first, last) if first == last => write!(f, "{protocol}/{first}"),
            (first, last) => write!(f, "{protocol}/{first}-{last}"),
        }
    }
}

impl Text for ForwardTarget {
    const EXPECTED: &'static str = "a user or an address in quotes, with a port or without one, as in \"anna:443\", \
                                    \"192.168.7.9:443\" or \"[fd00::7]:443\"";
    const EXAMPLE: &'static str = "anna:443";

    fn read(text: &str) -> Result<Self, String> {
        if let Ok(socket) = text.parse::<SocketAddr>() {
            let host = ForwardHost::Address(socket.ip().to_canonical());
            return Ok(Self { host, port: Some(socket.port()).filter(|port| *port > 0) });
        }
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self { host: ForwardHost::Address(ip.to_canonical()), port: None });
        }
        // A user's name may have a colon, but no port behind it then.
        let with_port = text.rsplit_once(':').and_then(|(user, port)| {
            let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
            Some((user, Some(port)))
        });
        let (user, port) = with_port.unwrap_or((text, None));
        if user.is_empty() {
            return Err(format!("`{text}` names neither a user nor an address"));
        }
        Ok(Self { host: ForwardHost::User(user.to_owned()), port })
    }
}

impl fmt::Display for ForwardTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.port) {
            (ForwardHost::User(user), Some(port)) => write!(f, "{user}:{port}"),
            (ForwardHost::User(user), None) => f.write_str(user),
            (ForwardHost::Address(ip), Some(port)) => write!(f, "{}", SocketAddr::new(*ip, port)),
            (ForwardHost::Address(ip), None) => write!(f, "{ip}"),
        }
    }
}

/// A port that leads to a host, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The ports.
    pub ports: ForwardedPorts,
    /// The host to which they lead.
    pub to: ForwardTarget,
    /// Networks from which packets are let in; all if it is empty.
    pub from: Vec<IpNet>,
}

/// The forwards of a server that accepts clients at `listen`.
pub(super) fn resolve(rules: Vec<ForwardRule>, listen: &[SocketAddr]) -> Result<Vec<Forward>> {
    let mut all: Vec<Forward> = Vec::new();
    for ForwardRule { port, to, from } in rules {
        let Some((ports, to)) = port.zip(to) else { continue };
        let wrong = |why: String, next: &str| Err(Error::usage(format!("[[forward]] {ports} {why}"), next));
        let (first, last) = ports.range;
        if first < last && to.port.is_some() {
            let next = "leave out the port behind `to`: each packet keeps its port";
            return wrong(format!("is a range, and `to` has one port: {to}"), next);
        }
        if let Some(own) = listen.iter().find(|own| (first..=last).contains(&own.port())) {
            return wrong(format!("is where this server accepts clients, {own}"), "choose another port");
        }
        let overlaps = |other: &&Forward| {
            other.ports.protocol == ports.protocol
                && other.ports.range.0 <= last
                && first <= other.ports.range.1
        };
        if let Some(other) = all.iter().find(overlaps) {
            return wrong(format!("overlaps [[forward]] {}", other.ports), "give each port once");
        }
        all.push(Forward { ports, to, from });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rights, ServerConfig, ServerOptions};

    fn read(text: &str) -> Result<Vec<Forward>, String> {
        let options = ServerOptions::parse(text).map_err(|error| error.to_string())?;
        ServerConfig::resolve(options, Rights::ALL)
            .map(|config| config.forwards)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn ports_lead_to_users_and_addresses() {
        let forward = |port: &str, to: &str| format!("[[forward]]\nport = '{port}'\nto = '{to}'\n");
        for (port, to) in [
            ("tcp/8443", "anna:443"),
            ("udp/5000-5010", "anna"),
            ("tcp/80", "192.168.7.9:8080"),
            ("udp/53", "[fd00::7]:53"),
            ("tcp/22", "fd00::7"),
        ] {
            let all = read(&forward(port, to)).unwrap();
            assert_eq!((all[0].ports.to_string(), all[0].to.to_string()), (port.to_owned(), to.to_owned()));
        }
        assert_eq!(read(&forward("tcp/1", "a:b")).unwrap()[0].to.host, ForwardHost::User("a:b".into()));
        let twice = forward("tcp/80-90", "anna") + &forward("tcp/85", "bob:22");
        for (text, why) in [
            (forward("8443", "anna"), "is not a protocol and a port"),
            (forward("icmp/1", "anna"), "is not a protocol and a port"),
            (forward("tcp/0", "anna"), "neither a port from 1 to 65535"),
            (forward("tcp/80-90", "anna:80"), "is a range, and `to` has one port"),
            (forward("tcp/443", "anna"), "is where this server accepts clients, 0.0.0.0:443"),
            (twice, "overlaps [[forward]] tcp/80-90"),
            ("[[forward]]\nport = 'tcp/80'\n".to_owned(), "missing field `to`"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
