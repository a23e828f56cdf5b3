//! The changes of the system that the journal can apply and revert.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Owners;
use crate::{
    dns,
    error::{OsError, ignore_gone},
    firewall,
    netlink::{Interface, LinkInfo, Netlink, Route, Rule},
    sysctl,
};

/// One change of the system. Journals on disk have the names of the variants and fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    /// Makes a device that stays when its process ends.
    Device {
        /// The device.
        interface: Interface,
    },
    /// Adds an address to an interface.
    Address {
        /// The interface.
        interface: Interface,
        /// The address, with the length of its prefix.
        address: IpNet,
    },
    /// Adds a route.
    Route {
        /// The route.
        route: Route,
        /// Its outgoing interface, if it has one.
        interface: Option<Interface>,
    },
    /// Answers other hosts that ask an interface for an address of another one.
    Answer {
        /// The interface.
        interface: Interface,
        /// The address.
        address: IpAddr,
    },
    /// Adds a rule for policy routing.
    Rule {
        /// The rule.
        rule: Rule,
    },
    /// Installs a table of nftables.
    Firewall {
        /// The rules in the table.
        rules: firewall::Rules,
    },
    /// Installs the table that filters packets of a server's clients.
    ClientFilter(firewall::ClientFilter),
    /// Changes a kernel parameter; it is restored only if it still has the value `set`, and no other instance
    /// needs it.
    Sysctl {
        /// The parameter, as a path below `/proc/sys`.
        key: String,
        /// The value before the change.
        before: String,
        /// The value after the change.
        set: String,
    },
    /// Rewrites the file with the name servers; it is restored only if no other program has changed it, and
    /// to what another instance that still runs has written.
    Resolver(dns::FileRewrite),
    /// A file, which a test creates.
    #[cfg(test)]
    File {
        /// The path of the file.
        path: std::path::PathBuf,
    },
}

impl Step {
    /// Whether it is one of these devices, or an address or a route of one.
    pub(super) fn is_of_device(&self, names: &[String]) -> bool {
        match self {
            Self::Device { interface }
            | Self::Address { interface, .. }
            | Self::Route { interface: Some(interface), .. } => names.contains(&interface.name),
            _ => false,
        }
    }

    pub(super) fn apply(&self, netlink: &mut Netlink, owners: &Owners) -> Result<(), OsError> {
        match self {
            // It is there already.
            Self::Device { .. } => Ok(()),
            Self::Address { interface, address } => netlink.add_address(interface.index, *address),
            Self::Route { route, .. } => netlink.add_route(route),
            Self::Answer { interface, address } => netlink.add_proxy_neighbour(interface.index, *address),
            Self::Rule { rule } => netlink.add_rule(rule),
            Self::Firewall { rules } => firewall::install(rules),
            Self::ClientFilter(filter) => filter.install(),
            Self::Sysctl { key, before, set } => {
                owners.claim(&sysctl_key(key), before, set, || sysctl::write(key, set))
            }
            Self::Resolver(rewrite) => dns::apply(rewrite, owners),
            #[cfg(test)]
            Self::File { .. } => Ok(()),
        }
    }

    /// Undoes the change. `links` are the interfaces that exist now.
    pub(super) fn revert(
        &self,
        netlink: &mut Netlink,
        owners: &Owners,
        links: &[LinkInfo],
    ) -> Result<(), OsError> {
        match self {
            Self::Device { interface }
            | Self::Address { interface, .. }
            | Self::Answer { interface, .. }
            | Self::Route { interface: Some(interface), .. }
                if !interface.is_one_of(links) =>
            {
                Ok(())
            }
            // A journal that somebody forged names no other device.
            Self::Device { interface } if !is_tun(interface, links) => Ok(()),
            Self::Device { interface } => ignore_gone(netlink.del_link(interface.index)),
            Self::Address { interface, address } => {
                ignore_gone(netlink.del_address(interface.index, *address))
            }
            Self::Answer { interface, address } => {
                ignore_gone(netlink.del_proxy_neighbour(interface.index, *address))
            }
            Self::Route { route, .. } => ignore_gone(netlink.del_route(route)),
            Self::Rule { rule } => ignore_gone(netlink.del_rule(rule)),
            Self::Firewall { rules } => firewall::remove(&rules.name),
            Self::ClientFilter(filter) => filter.remove(),
            Self::Sysctl { key, before, set } => {
                owners.release(&sysctl_key(key), before, set, |before| restore_sysctl(key, before, set))
            }
            Self::Resolver(rewrite) => dns::revert(rewrite, owners),
            #[cfg(test)]
            Self::File { path } => {
                let _ = std::fs::remove_file(path);
                Ok(())
            }
        }
    }
}

fn is_tun(interface: &Interface, links: &[LinkInfo]) -> bool {
    links.iter().any(|link| link.index == interface.index && link.kind.as_deref() == Some("tun"))
}

/// The steps of devices, addresses and routes that are in force.
pub(super) fn in_force(mut steps: Vec<Step>, netlink: &mut Netlink) -> Result<Vec<Step>, OsError> {
    if steps.is_empty() {
        return Ok(steps);
    }
    let (links, addresses, routes) = (netlink.links()?, netlink.addresses()?, netlink.routes()?);
    steps.retain(|step| match step {
        Step::Device { interface } => interface.is_one_of(&links),
        Step::Address { interface, address } => {
            addresses.iter().any(|info| info.index == interface.index && info.address == *address)
        }
        Step::Route { route, .. } => routes.iter().any(|other| {
            let key = |route: &Route| (route.destination, route.table, route.interface);
            key(other) == key(route) && route.metric.is_none_or(|metric| other.metric == Some(metric))
        }),
        _ => false,
    });
    Ok(steps)
}

/// The name of a kernel parameter among the settings that have several owners.
pub(super) fn sysctl_key(key: &str) -> String {
    format!("sysctl {key}")
}

fn restore_sysctl(key: &str, before: &str, set: &str) -> Result<(), OsError> {
    match sysctl::read(key) {
        Ok(now) if now == set => ignore_gone(sysctl::write(key, before)),
        Ok(_) => Ok(()),
        Err(error) => ignore_gone(Err(error)),
    }
}
