//! Options whose values are one of a few words, and networks that a client or server names.

use std::str::FromStr;

use derive_more::Display;
use ipnet::{IpNet, Ipv6Net};
use mpvpn_types::word_enum;

use super::{
    acme::AcmeChallenge,
    servers::{Choose, Return, WhenDown},
};
use mpvpn_input::values::{Text, host_bits, is_link_name};

mpvpn_input::text_of_words!(
    AcmeChallenge,
    AuthMode,
    Choose,
    Confine,
    LogLevel,
    Nat,
    ReloadMode,
    Return,
    Routes,
    Tcp,
    WhenDown
);

word_enum! {
    /// How a server authenticates clients.
    pub enum AuthMode {
        /// No authentication: everybody may use the server.
        None = "none",
        /// Bearer tokens of named users (RFC 6750).
        #[default]
        Token = "token",
        /// Certificates that a CA of `client-ca` has signed; the user is the first e-mail address, DNS name
        /// or URI of the subjectAltName, else the common name, and has to be in the users' file.
        Mtls = "mtls",
    }
}

word_enum! {
    /// The destinations that a client sends into the tunnel.
    pub enum Routes {
        /// Everything but the packets of the tunnel itself, and those to private networks, the links'
        /// networks and `keep-routes` that the system has routes to.
        #[default]
        All = "all",
        /// Only the subnets of the tunnel.
        None = "none",
        /// The networks that the server advertises: private ones, and public ones of /8 (IPv6: /16) or
        /// smaller.
        Advertised = "advertised",
    }
}

word_enum! {
    /// Whether the server translates addresses.
    pub enum Nat {
        /// Clients' packets leave with the server's address as their source.
        #[default]
        On = "on",
        /// Clients' packets keep their source addresses: the network behind the server needs a route back to
        /// it.
        Off = "off",
    }
}

word_enum! {
    /// Whether the server listens on TCP.
    pub enum Tcp {
        /// Listen on TCP at the addresses of QUIC.
        #[default]
        On = "on",
        /// Listen on UDP only.
        Off = "off",
    }
}

word_enum! {
    /// Whether the process gives up the rights that it does not need.
    pub enum Confine {
        /// It keeps what it needs only.
        #[default]
        On = "on",
        /// It keeps everything.
        Off = "off",
    }
}

word_enum! {
    /// The command that reads a file.
    pub enum FileKind {
        /// `mpvpn server`.
        #[default]
        Server = "server",
        /// `mpvpn client`.
        Client = "client",
        /// `mpvpn proxy`.
        Proxy = "proxy",
    }
}

word_enum! {
    /// When a process reads its configuration file again.
    pub enum ReloadMode {
        /// On SIGHUP and on `mpvpn config reload`.
        #[default]
        Manual = "manual",
        /// Also when the file changes.
        Auto = "auto",
    }
}

word_enum! {
    /// The level of the log.
    pub enum LogLevel {
        /// Conditions that need a person to act.
        Error = "error",
        /// Also losses and refusals.
        Warn = "warn",
        /// Also changes of state.
        #[default]
        Info = "info",
        /// Also frequent events.
        Debug = "debug",
        /// Also single packets.
        Trace = "trace",
    }
}

/// Machines behind a client that may use its tunnel.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum SharedNetwork {
    /// All machines behind this interface.
    Interface(String),
    /// The machines of this network.
    Network(IpNet),
}

impl FromStr for SharedNetwork {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            let net: IpNet =
                text.parse().map_err(|_| format!("`{text}` is not a network, as in 192.168.1.0/24"))?;
            return match net.trunc() == net {
                true => Ok(Self::Network(net)),
                false => Err(host_bits(text, &net.trunc())),
            };
        }
        if !is_link_name(text) {
            return Err(format!("`{text}` is neither an interface's name nor a network"));
        }
        Ok(Self::Interface(text.into()))
    }
}

mpvpn_input::text_of_parsed! {
    SharedNetwork: "an interface's name or a network in quotes", as in "lan0";
}

/// An IPv6 network, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet6(pub Option<Ipv6Net>);

impl Text for Subnet6 {
    const EXPECTED: &'static str = "an IPv6 network in quotes, as in \"fd00:1:2:3::/64\", or \"none\"";
    const EXAMPLE: &'static str = "fd00:1:2:3::/64";

    fn read(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let net: Ipv6Net = text
            .parse()
            .map_err(|_| format!("`{text}` is neither an IPv6 network, as in fd00:1:2:3::/64, nor none"))?;
        if net.trunc() != net {
            return Err(host_bits(text, &net.trunc()));
        }
        if net.prefix_len() > 126 {
            return Err(format!("{net} is too small: a server and a client need /126 or larger"));
        }
        let first = net.network();
        let unusable = first.is_multicast() || first.is_unicast_link_local() || first.segments()[0] == 0;
        if unusable || net.prefix_len() < 16 {
            return Err(format!("{net} cannot be given to clients: choose one of fd00::/8 or your own"));
        }
        Ok(Self(Some(net)))
    }
}
