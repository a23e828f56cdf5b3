//! The networks behind clients on a server's machine ([`SiteNet`]), and the network behind a client on its
//! machine ([`ClientSite`]).
//!
//! In: the networks that are wanted, each time they change. Out: routes into the TUN device, translation of
//! their addresses on the way to other networks, and the filter at a client. Always holds: routes end with
//! the TUN device; at a client the filter is in force before the first packet, and is replaced as a whole.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{Families, enable_forwarding};
use crate::{
    error::OsError,
    firewall::{self, Exit, Masquerade, Origin, Rules, SiteRules},
    netlink::{Interface, MAIN_TABLE, Netlink, Route},
    sysctl,
    undo::{Step, UndoJournal},
};

/// The networks behind clients on a server's machine.
#[derive(Debug)]
pub struct SiteNet {
    tun: Interface,
    netlink: Netlink,
    routed: BTreeSet<IpNet>,
    /// The rules that translate addresses without these networks; `None` where none are translated.
    nat: Option<Rules>,
}

impl SiteNet {
    pub(super) fn new(tun: Interface, nat: Option<Rules>) -> Result<Self, OsError> {
        Ok(Self { tun, netlink: Netlink::open()?, routed: BTreeSet::new(), nat })
    }

    /// The networks of the machine's interfaces, the tunnel's among them.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn networks_of_machine(&mut self) -> Result<Vec<IpNet>, OsError> {
        let mut networks: Vec<IpNet> =
            self.netlink.addresses()?.into_iter().map(|info| info.address.trunc()).collect();
        networks.sort_unstable();
        networks.dedup();
        Ok(networks)
    }

    /// Routes these networks into the TUN device, in place of those before.
    ///
    /// # Errors
    /// If nft refuses the rules; then the networks are as before. A network that the kernel does not route,
    /// for instance since another route to it exists, is named in the log.
    pub fn set(&mut self, networks: BTreeSet<IpNet>) -> Result<(), OsError> {
        if networks != self.routed {
            self.install_nat(&networks)?;
        }
        let route = |network: &IpNet| Route::through(*network, MAIN_TABLE, self.tun.index);
        for gone in self.routed.difference(&networks) {
            if let Err(error) = self.netlink.del_route(&route(gone)) {
                tracing::debug!(network = %gone, %error, "cannot remove the route to a network behind a client");
            }
        }
        for new in networks.difference(&self.routed) {
            if let Err(error) = self.netlink.add_route(&route(new)) {
                tracing::warn!(network = %new, %error, "cannot route a network behind a client: nobody reaches it");
            }
        }
        self.routed = networks;
        Ok(())
    }

    /// Installs the rules that translate addresses again.
    ///
    /// # Errors
    /// If nft refuses.
    pub fn repair(&self) -> Result<(), OsError> {
        self.install_nat(&self.routed)
    }

    fn install_nat(&self, networks: &BTreeSet<IpNet>) -> Result<(), OsError> {
        let Some(nat) = &self.nat else { return Ok(()) };
        let mut rules = nat.clone();
        let exit = Exit::AnyBut(self.tun.name.clone());
        let of_sites =
            networks.iter().map(|net| Masquerade { from: Origin::Network(*net), exit: exit.clone() });
        rules.masquerade.extend(of_sites);
        firewall::install(&rules)
    }
}

/// The networks behind a client on its machine.
#[derive(Debug, Default)]
pub struct ClientSite {
    rules: SiteRules,
    /// Whether the table exists.
    is_installed: bool,
}

impl ClientSite {
    /// Whether there are no networks and no forwards.
    pub fn is_empty(&self) -> bool {
        self.rules.networks.is_empty() && self.rules.forwards.is_empty()
    }

    /// Lets packets pass between the tunnel and these networks as the rules say, in place of those before.
    ///
    /// # Errors
    /// If nft or the kernel refuses; then the rules are those of before.
    pub fn set(&mut self, undo: &mut UndoJournal, rules: SiteRules) -> Result<(), OsError> {
        if rules == self.rules {
            return Ok(());
        }
        let table = Rules {
            name: format!("{} site", rules.tun),
            site: Some(Box::new(rules.clone())),
            ..Rules::default()
        };
        // The step removes the table by its name, whatever it has.
        match self.is_installed {
            false => undo.apply(&[Step::Firewall { rules: table }])?,
            true => firewall::install(&table)?,
        }
        self.is_installed = true;
        let forwarded = rules.forwards.iter().flat_map(|forward| &forward.to);
        let hosts = rules.networks.iter().map(|one| one.network.addr()).chain(forwarded.copied());
        let has = |is_v4| hosts.clone().any(|host| host.is_ipv4() == is_v4);
        let families = Families { v4: has(true), v6: has(false) && sysctl::has_ipv6() };
        self.rules = rules;
        enable_forwarding(undo, &mut Netlink::open()?, families)
    }
}
