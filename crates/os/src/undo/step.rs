//! The changes of the system that we know how to make and to take back.

use std::{fs, io, path::PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    dns,
    error::{OsError, ignore_gone},
    firewall,
    netlink::{
        LinkInfo, Netlink, Route, Rule,
        mptcp::{Endpoint, Limits, PathManager},
    },
    sysctl,
};

/// An interface, recognised only while both its index and its name are the same: another one that
/// got the name later is not ours to change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
}

impl Interface {
    fn is_one_of(&self, links: &[LinkInfo]) -> bool {
        links.iter().any(|link| link.index == self.index && link.name == self.name)
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    /// An address was added.
    Address {
        /// To which interface.
        interface: Interface,
        /// Which.
        address: IpNet,
    },
    /// A route was added.
    Route {
        /// Which.
        route: Route,
        /// The interface it leads out of, if any.
        interface: Option<Interface>,
    },
    /// A policy rule was added.
    Rule {
        /// Which.
        rule: Rule,
    },
    /// A table of the firewall was installed.
    Firewall {
        /// With which rules.
        rules: firewall::Rules,
    },
    /// A kernel setting was changed; it is restored only if it still has our value.
    Sysctl {
        /// Which, as a path below `/proc/sys`.
        key: String,
        /// What it was.
        before: String,
        /// What we set.
        set: String,
    },
    /// An address was given to Multipath TCP.
    MptcpEndpoint {
        /// Which.
        endpoint: Endpoint,
    },
    /// Multipath TCP may have other numbers of subflows; they are restored only if they are still ours.
    MptcpLimits {
        /// What they were.
        before: Limits,
        /// What we set.
        set: Limits,
    },
    /// The file with the name servers was rewritten; it is put back only if it is still as we left it.
    Resolver(dns::Rewrite),
    /// A file was created (by the caller).
    File {
        /// Which.
        path: PathBuf,
    },
}

impl Step {
    pub(super) fn make(&self, netlink: &mut Netlink) -> Result<(), OsError> {
        match self {
            Self::Address { interface, address } => netlink.add_address(interface.index, *address),
            Self::Route { route, .. } => netlink.add_route(route),
            Self::Rule { rule } => netlink.add_rule(rule),
            Self::Firewall { rules } => firewall::install(rules),
            Self::Sysctl { key, set, .. } => sysctl::write(key, set),
            Self::MptcpEndpoint { endpoint } => PathManager::open()?.add(endpoint),
            Self::MptcpLimits { set, .. } => PathManager::open()?.set_limits(*set),
            Self::Resolver(rewrite) => dns::make(rewrite),
            Self::File { .. } => Ok(()),
        }
    }

    /// `links`: the interfaces that exist now.
    pub(super) fn revert(&self, netlink: &mut Netlink, links: &[LinkInfo]) -> Result<(), OsError> {
        match self {
            Self::Address { interface, .. } | Self::Route { interface: Some(interface), .. }
                if !interface.is_one_of(links) =>
            {
                Ok(())
            }
            Self::Address { interface, address } => {
                ignore_gone(netlink.del_address(interface.index, *address))
            }
            Self::Route { route, .. } => ignore_gone(netlink.del_route(route)),
            Self::Rule { rule } => ignore_gone(netlink.del_rule(rule)),
            Self::Firewall { rules } => firewall::remove(&rules.name),
            Self::Sysctl { key, before, set } => restore(key, before, set),
            Self::MptcpEndpoint { endpoint } => ignore_gone(PathManager::open()?.remove(endpoint)),
            Self::MptcpLimits { before, set } => {
                let mut manager = PathManager::open()?;
                if manager.limits()? == *set { manager.set_limits(*before) } else { Ok(()) }
            }
            Self::Resolver(rewrite) => dns::revert(rewrite),
            Self::File { path } => match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(OsError::kernel("remove the file", path.display(), error))
                }
                _ => Ok(()),
            },
        }
    }
}

fn restore(key: &str, before: &str, set: &str) -> Result<(), OsError> {
    match sysctl::read(key) {
        Ok(now) if now == set => ignore_gone(sysctl::write(key, before)),
        Ok(_) => Ok(()),
        Err(error) => ignore_gone(Err(error)),
    }
}
