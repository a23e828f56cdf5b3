//! Sharing the tunnel of a client with a LAN (`--share`): forwarding, and source NAT to the tunnel's address.

use std::str::FromStr;

use derive_more::Display;
use ipnet::IpNet;

use super::{Families, enable_forwarding};
use crate::{
    error::OsError,
    firewall::{Exit, Masquerade, Origin, Rules},
    netlink::Netlink,
    sysctl,
    tun::check_interface_name,
    undo::{Step, UndoJournal},
};

/// The hosts that may use the tunnel.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub enum ShareSource {
    /// Hosts behind this interface.
    Interface(String),
    /// Hosts with an address in this network.
    Network(IpNet),
}

impl FromStr for ShareSource {
    type Err = OsError;

    fn from_str(text: &str) -> Result<Self, OsError> {
        if let Ok(network) = text.parse::<IpNet>() {
            return Ok(Self::Network(network.trunc()));
        }
        match check_interface_name(text) {
            Ok(()) => Ok(Self::Interface(text.to_owned())),
            Err(_) => Err(OsError::InvalidShareSource { text: text.to_owned() }),
        }
    }
}

/// Shares the TUN device `tun` with `sources`, until the journal reverts it.
pub fn share_tunnel(undo: &mut UndoJournal, tun: &str, sources: &[ShareSource]) -> Result<(), OsError> {
    let mut netlink = Netlink::open()?;
    for source in sources {
        if let ShareSource::Interface(name) = source {
            netlink.link(name)?;
        }
    }
    if sources.is_empty() {
        return Ok(());
    }
    undo.apply(&[Step::Firewall { rules: nat_rules(tun, sources) }])?;
    let is_interface = |source: &ShareSource| matches!(source, ShareSource::Interface(_));
    let is_v4 = |source: &ShareSource| matches!(source, ShareSource::Network(IpNet::V4(_)));
    let is_v6 = |source: &ShareSource| matches!(source, ShareSource::Network(IpNet::V6(_)));
    let families = Families {
        v4: sources.iter().any(|source| is_interface(source) || is_v4(source)),
        v6: sources.iter().any(|source| is_interface(source) || is_v6(source)) && sysctl::has_ipv6(),
    };
    enable_forwarding(undo, &mut netlink, families)
}

fn nat_rules(tun: &str, sources: &[ShareSource]) -> Rules {
    let masquerade = sources.iter().map(|source| Masquerade {
        from: match source {
            ShareSource::Interface(name) => Origin::Interface(name.clone()),
            ShareSource::Network(network) => Origin::Network(*network),
        },
        exit: Exit::Through(tun.to_owned()),
    });
    Rules { name: tun.to_owned(), masquerade: masquerade.collect(), ..Rules::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_and_networks_are_distinguished() {
        let parse = |text: &str| text.parse::<ShareSource>().unwrap().to_string();
        assert_eq!(parse("eth2"), "eth2");
        assert_eq!(parse("192.168.1.7/24"), "192.168.1.0/24");
        assert_eq!(parse("fd00:1::/64"), "fd00:1::/64");
        for bad in ["", "192.168.1.0/33", "a b", "/24"] {
            assert!(bad.parse::<ShareSource>().is_err(), "{bad} was taken");
        }
    }
}
