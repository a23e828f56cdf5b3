//! Packets that leave past the tunnel of a client, over a link.
//!
//! In: rules, the links with their routing tables ([`LinkTable`]), the addresses of names. Out: a table of
//! nftables, and policy rules. Always holds: a connection goes where its first packet went; a packet for a
//! link that is not there, or has no route of its IP version, is refused and goes nowhere else; while the
//! kill switch blocks, only packets of rules with `always` leave; a process that dies leaves no table
//! behind where it had a helper.
//!
//! 1. The first packet that a rule matches gets the mark of the link and [`BYPASS_BIT`], as does its
//!    connection.
//! 2. The policy rule of this mark looks up kept networks in the main table ([`KeptNetworks`]), which the
//!    LAN stays reachable by, and then the link's own table.
//! 3. Packets that leave by the link get its address.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use mpvpn_types::target::BYPASS;

use super::{
    AppliedSteps, BYPASS_BIT, ClientNetConfig, LINK_BIT, LinkTable, OWN_PACKETS, bypass_mark,
    classes::vlan_interfaces, identity::Layer, kept_networks::KeptNetworks,
};
use crate::{
    error::OsError,
    firewall::{self, BypassLink, BypassMatch, BypassTable, Change, Destination, PacketMatch, Rules},
    netlink::{Family, LinkInfo, Netlink, Rule},
    undo::{Step, UndoJournal},
};

/// The shortest and the longest time that an address of a name counts. Shorter: programs keep an address
/// longer than its time to live. Longer: it belongs to somebody else by then.
const ADDRESS_TIMES: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(24 * 3600));
/// The most addresses of names, of all rules.
const MAX_ADDRESSES: usize = 16_384;

/// Packets that leave past the tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BypassRule {
    /// The packets.
    pub packets: PacketMatch,
    /// VLAN IDs (IEEE 802.1Q), as of [`ClassSteering`](super::ClassSteering).
    pub vlans: Vec<u16>,
    /// The link; `None`: the best one.
    pub link: Option<String>,
    /// Whether they leave while the kill switch blocks, too.
    pub always: bool,
    /// Whether the destination has to be one that [`BypassNames::add`] has named.
    pub has_names: bool,
    /// Whether packets of this machine can match, and packets of other hosts.
    pub of_own: bool,
    /// See `of_own`.
    pub of_others: bool,
}

/// Rules, and groups whose programs need none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BypassRules {
    /// The first that matches decides.
    pub rules: Vec<BypassRule>,
    /// The group whose programs use the tunnel, whatever the rules say.
    pub tunnel_group: Option<u32>,
    /// The group whose programs leave by the best link.
    pub bypass_group: Option<u32>,
}

/// The packets past the tunnel of a machine.
#[derive(Debug)]
pub struct BypassNet {
    config: ClientNetConfig,
    tuns: Vec<String>,
    netlink: Netlink,
    wanted: BypassRules,
    applied: AppliedSteps,
    /// Whether the journal has the table.
    is_recorded: bool,
    installed: Arc<Mutex<Installed>>,
}

/// The table as it is in force, and the addresses in it.
#[derive(Debug, Default)]
struct Installed {
    table: BypassTable,
    /// Until when an address counts, by the number of the rule.
    addresses: BTreeMap<(usize, IpAddr), Instant>,
}

impl BypassNet {
    /// Changes nothing yet. `tuns` are all TUN devices of the client, its own first.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn new(config: ClientNetConfig, tuns: Vec<String>) -> Result<Self, OsError> {
        let (wanted, applied, is_recorded, installed) = Default::default();
        Ok(Self { config, tuns, netlink: Netlink::open()?, wanted, applied, is_recorded, installed })
    }

    /// Replaces the rules; [`Self::update`] puts them in force. Names have to be looked up again.
    pub fn set_rules(&mut self, wanted: BypassRules) {
        if self.wanted != wanted {
            self.wanted = wanted;
            self.lock().addresses.clear();
        }
    }

    /// Adds addresses of names to the rules in force.
    pub fn names(&self) -> BypassNames {
        BypassNames(Arc::clone(&self.installed))
    }

    /// Puts the rules in force. `links` are those with routing tables, `best` is the name of the best one,
    /// and `is_open` says whether others than those with `always` leave.
    ///
    /// # Errors
    /// If nft or the kernel refuses; what was there before stays.
    pub fn update(
        &mut self,
        undo: &mut UndoJournal,
        links: &[LinkTable],
        best: Option<&str>,
        is_open: bool,
    ) -> Result<(), OsError> {
        let BypassRules { rules, tunnel_group, bypass_group } = &self.wanted;
        if rules.is_empty() && bypass_group.is_none() && !self.is_recorded {
            return Ok(());
        }
        let has_vlans = rules.iter().any(|rule| !rule.vlans.is_empty());
        let interfaces = if has_vlans { self.netlink.links()? } else { Vec::new() };
        let best = links.iter().find(|link| Some(&*link.name) == best).or(links.first());
        let best = best.map(|link| link.number);
        let table = BypassTable {
            tuns: self.tuns.clone(),
            links: links.iter().map(bypass_link).collect(),
            rules: rules
                .iter()
                .enumerate()
                .filter_map(|(number, rule)| rule.resolved(number, links, best, &interfaces))
                .collect(),
            best,
            tunnel_group: *tunnel_group,
            bypass_group: *bypass_group,
            is_open,
            destinations: Vec::new(),
        };
        if self.lock().table == table {
            return self.update_routing(undo, links);
        }
        if !self.is_recorded {
            let rules = Rules { name: format!("{} bypass", self.config.tun.name), ..Rules::default() };
            undo.record(Step::Firewall { rules })?;
            self.is_recorded = true;
        }
        self.update_routing(undo, links)?;
        tracing::debug!(
            target: BYPASS,
            rules = table.rules.len(),
            best = table.best,
            is_open = table.is_open,
            "packets past the tunnel are decided anew"
        );
        self.lock().install(table)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Installed> {
        self.installed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the policy rules those of these links.
    fn update_routing(&mut self, undo: &mut UndoJournal, links: &[LinkTable]) -> Result<(), OsError> {
        let kept = KeptNetworks::new(&self.netlink.addresses()?, &self.config.keep_routes);
        let past = OWN_PACKETS.value | LINK_BIT | BYPASS_BIT;
        let any_link = Some((past, OWN_PACKETS.mask | LINK_BIT | BYPASS_BIT));
        let mut steps = Vec::new();
        for (at, family) in [Family::V4, Family::V6].into_iter().enumerate() {
            let ways: Vec<&LinkTable> = links.iter().filter(|link| link.leads[at]).collect();
            if ways.is_empty() {
                continue;
            }
            let kept = kept.rules(family, self.config.priority(Layer::Inbound));
            steps.extend(kept.map(|rule| Step::Rule { rule: Rule { mark: any_link, ..rule } }));
            steps.extend(ways.iter().map(|link| {
                let mark = bypass_mark(link.number);
                let table = self.config.link_table(link.number);
                let rule = Rule::lookup(family, self.config.priority(Layer::Bypass), table);
                Step::Rule { rule: Rule { mark: Some((mark.value, mark.mask)), ..rule } }
            }));
        }
        self.applied.change_to(undo, steps)
    }
}

fn bypass_link(link: &LinkTable) -> BypassLink {
    BypassLink { name: link.name.clone(), number: link.number, leads: link.leads }
}

impl BypassRule {
    /// The rule for these links and interfaces; `None` if no packet can match.
    fn resolved(
        &self,
        number: usize,
        links: &[LinkTable],
        best: Option<u8>,
        interfaces: &[LinkInfo],
    ) -> Option<BypassMatch> {
        let mut packets = self.packets.clone();
        if !self.vlans.is_empty() {
            packets.ingress = vlan_interfaces(&packets.ingress, &self.vlans, interfaces);
            if packets.ingress.is_empty() {
                return None;
            }
        }
        packets.destinations = self.has_names.then_some(number);
        let link = match &self.link {
            Some(name) => links.iter().find(|link| link.name == *name).map(|link| link.number),
            None => best,
        };
        let Self { always, of_own, of_others, .. } = *self;
        Some(BypassMatch { packets, link, always, of_own, of_others })
    }
}

impl Installed {
    /// Replaces the table, with the addresses that still count.
    fn install(&mut self, table: BypassTable) -> Result<(), OsError> {
        let now = Instant::now();
        self.addresses.retain(|_, until| *until > now);
        let left = |until: &Instant| until.duration_since(now).as_secs() as u32;
        let destinations = self.addresses.iter().map(|((rule, ip), until)| (*rule, *ip, left(until)));
        let change = BypassTable { destinations: destinations.collect(), ..table.clone() };
        firewall::apply(Change::Bypass(Box::new(change)))?;
        self.table = table;
        Ok(())
    }
}

/// Adds addresses of names to the rules in force.
#[derive(Clone, Debug, Default)]
pub struct BypassNames(Arc<Mutex<Installed>>);

impl BypassNames {
    /// The addresses of a name, with their times to live, are destinations of the rule with this number.
    /// They are in force when it returns.
    ///
    /// # Errors
    /// If nft refuses.
    pub fn add(&self, rule: usize, found: &[(IpAddr, Duration)]) -> Result<(), OsError> {
        let mut installed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_there = installed.table.rules.iter().any(|one| one.packets.destinations == Some(rule));
        if !is_there {
            return Ok(());
        }
        installed.addresses.retain(|_, until| *until > now);
        let mut list: Vec<Destination> = Vec::new();
        for (ip, time_to_live) in found {
            let time = (*time_to_live).clamp(ADDRESS_TIMES.0, ADDRESS_TIMES.1);
            if installed.addresses.len() < MAX_ADDRESSES || installed.addresses.contains_key(&(rule, *ip)) {
                list.push((rule, *ip, time.as_secs() as u32));
            }
        }
        if list.is_empty() {
            return Ok(());
        }
        firewall::apply(Change::BypassDestinations(installed.table.name(), list.clone()))?;
        let until = |seconds: u32| now + Duration::from_secs(seconds.into());
        installed.addresses.extend(list.into_iter().map(|(rule, ip, seconds)| ((rule, ip), until(seconds))));
        Ok(())
    }

    /// The mark of packets that leave by the link of the rule with this number; `None` if it is not there, or
    /// nothing of the rule leaves now.
    pub fn mark_of(&self, rule: usize) -> Option<u32> {
        let installed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = installed.table.rules.iter().find(|one| one.packets.destinations == Some(rule))?;
        let leaves = installed.table.is_open || found.always;
        found.link.filter(|_| leaves).map(|number| super::link_mark(number).value)
    }
}
