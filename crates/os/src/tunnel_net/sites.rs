//! The networks behind clients on a server's machine ([`SiteNet`]), and the network behind a client on its
//! machine ([`ClientSite`]).
//!
//! In: the networks that are wanted, each time they change. Out: routes into the TUN device, translation of
//! their addresses on the way to other networks, answers for addresses of a network of the machine that are
//! led on, and the filter at a client. Always holds: routes end with the TUN device; at a client the filter
//! is in force before the first packet, and is replaced as a whole.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use ipnet::IpNet;

use super::{Families, enable_forwarding};
use crate::{
    error::OsError,
    firewall::{self, Exit, Masquerade, Origin, Rules, SiteRules},
    netlink::{Interface, MAIN_TABLE, Netlink, Route},
    sysctl,
    undo::{self, Step, UndoJournal},
};

/// The networks behind clients on a server's machine.
#[derive(Debug)]
pub struct SiteNet {
    tun: Interface,
    netlink: Netlink,
    /// Whether each belongs to a user, and keeps its addresses on the way to other networks.
    routed: BTreeMap<IpNet, bool>,
    /// Undoes the answers for addresses, once there are any.
    undo: Option<UndoJournal>,
    /// The rules that translate addresses without these networks; `None` where none are translated.
    nat: Option<Rules>,
}

impl SiteNet {
    pub(super) fn new(tun: Interface, nat: Option<Rules>) -> Result<Self, OsError> {
        Ok(Self { tun, netlink: Netlink::open()?, routed: BTreeMap::new(), undo: None, nat })
    }

    /// The machine's addresses with their networks, those of the tunnel among them.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn networks_of_machine(&mut self) -> Result<Vec<IpNet>, OsError> {
        let mut networks: Vec<IpNet> =
            self.netlink.addresses()?.into_iter().map(|info| info.address).collect();
        networks.sort_unstable();
        networks.dedup();
        Ok(networks)
    }

    /// Routes these networks into the TUN device, in place of those before; those of users, with `true`, keep
    /// their addresses. An address of a user in a network of another interface is answered for there.
    ///
    /// # Errors
    /// If nft refuses the rules; then the networks are as before. A network that the kernel does not route,
    /// for instance since another route to it exists, is named in the log.
    pub fn set(&mut self, networks: BTreeMap<IpNet, bool>) -> Result<(), OsError> {
        if networks != self.routed {
            self.install_nat(&networks)?;
        }
        let route = |network: &IpNet| Route::through(*network, MAIN_TABLE, self.tun.index);
        for gone in self.routed.keys().filter(|net| !networks.contains_key(net)) {
            if let Err(error) = self.netlink.del_route(&route(gone)) {
                tracing::debug!(network = %gone, %error, "cannot remove the route to a network behind a client");
            }
        }
        for new in networks.keys().filter(|net| !self.routed.contains_key(net)) {
            if let Err(error) = self.netlink.add_route(&route(new)) {
                tracing::warn!(network = %new, %error, "cannot route a network behind a client: nobody reaches it");
            }
        }
        if let Err(error) = self.answer_for(&networks) {
            tracing::warn!(%error, "cannot answer for an address of a user in a network of this machine: nobody reaches it");
        }
        self.routed = networks;
        Ok(())
    }

    /// Answers other hosts that ask for addresses of users (proxy ARP, RFC 1027; proxy neighbour
    /// advertisements, RFC 4861, section 7.2.8), in place of those before.
    fn answer_for(&mut self, networks: &BTreeMap<IpNet, bool>) -> Result<(), OsError> {
        let of_users =
            networks.iter().filter(|(net, is_own)| **is_own && net.prefix_len() == net.max_prefix_len());
        let hosts: Vec<_> = of_users.map(|(net, _)| net.addr()).collect();
        let mut wanted = Vec::new();
        if !hosts.is_empty() {
            let (links, addresses) = (self.netlink.links()?, self.netlink.addresses()?);
            let elsewhere = addresses.iter().filter(|info| info.index != self.tun.index);
            for (info, host) in elsewhere.flat_map(|info| hosts.iter().map(move |host| (info, *host))) {
                let link = links.iter().find(|link| link.index == info.index);
                if let Some(link) = link.filter(|_| info.address.contains(&host)) {
                    let interface = Interface { name: link.name.clone(), index: link.index };
                    wanted.push(Step::Answer { interface, address: host });
                }
            }
        }
        let is_answer = |step: &&Step| matches!(step, Step::Answer { .. });
        let before: Vec<_> =
            self.undo.iter().flat_map(|undo| undo.steps().iter().filter(is_answer).cloned()).collect();
        let gone: Vec<_> = before.iter().filter(|step| !wanted.contains(step)).cloned().collect();
        wanted.retain(|step| !before.contains(step));
        if let Some(error) = self.undo.as_mut().and_then(|undo| undo.revert(&gone).pop()) {
            tracing::debug!(%error, "cannot stop to answer for an address");
        }
        for step in wanted {
            let undo = match &mut self.undo {
                Some(undo) => undo,
                none => none.insert(UndoJournal::open(
                    Path::new(undo::DEFAULT_FOLDER),
                    &format!("{} neighbours", self.tun.name),
                )?),
            };
            if let Step::Answer { interface, address: IpAddr::V6(_) } = &step {
                undo.set_sysctl(&format!("net/ipv6/conf/{}/proxy_ndp", interface.name), "1")?;
            }
            undo.apply(&[step])?;
        }
        Ok(())
    }

    /// Installs the rules that translate addresses again.
    ///
    /// # Errors
    /// If nft refuses.
    pub fn repair(&self) -> Result<(), OsError> {
        self.install_nat(&self.routed)
    }

    fn install_nat(&self, networks: &BTreeMap<IpNet, bool>) -> Result<(), OsError> {
        let Some(nat) = &self.nat else { return Ok(()) };
        let mut rules = nat.clone();
        let exit = Exit::AnyBut(self.tun.name.clone());
        let translated = networks.iter().filter(|(_, is_own)| !**is_own);
        let of_sites =
            translated.map(|(net, _)| Masquerade { from: Origin::Network(*net), exit: exit.clone() });
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
