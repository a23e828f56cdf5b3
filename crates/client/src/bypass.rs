//! Packets past the tunnel: the tables `[[bypass]]`, and the group of `mpvpn exec --bypass`.
//!
//! In: the configuration, the links and whether they work, whether the tunnel works. Out: the rules of
//! [`BypassNet`]. Always holds: with a kill switch only rules with `always` count while the tunnel does not
//! work; the best link stays the same as long as it works.

use std::{cell::LazyCell, path::Path};

use mpvpn_config::{BypassRule, ClientConfig};
use mpvpn_error::RunError;
use mpvpn_input::groups;
use mpvpn_os::{
    dns::link_resolvers,
    tunnel_net::{self, BypassNames, BypassNet, BypassRules},
    undo,
};
use mpvpn_types::target::BYPASS;

use super::{
    local_names::BypassedNames,
    machine::{Machine, packet_match},
};

/// Packets past the tunnel, and what they depend on.
pub(super) struct Bypass {
    pub(super) net: BypassNet,
    /// The groups [`groups::BYPASS`] and [`groups::TUNNEL`], as they were at the start: a confined process
    /// may not read the file.
    groups: [Option<u32>; 2],
    /// Whether there are rules or a group.
    is_used: bool,
    /// The link for packets whose rule names none.
    best: Option<String>,
    is_up: bool,
}

impl Bypass {
    pub(super) fn new(net: BypassNet) -> Self {
        let groups = groups::ids([groups::BYPASS, groups::TUNNEL]);
        Self { net, groups, is_used: false, best: None, is_up: false }
    }

    /// Adds addresses of names to the rules.
    pub(super) fn addresses(&self) -> BypassNames {
        self.net.names()
    }
}

impl Machine {
    /// Takes the rules of the configuration. Where it has none, the group alone is no reason to fail, as on a
    /// machine without nft.
    ///
    /// # Errors
    /// If nft or the kernel refuses the rules.
    pub(super) fn set_bypass(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        let [bypass_group, tunnel_group] = self.bypass.groups;
        let rules: Vec<_> = config.bypass.iter().map(rule).collect();
        self.bypass.is_used = !rules.is_empty() || bypass_group.is_some();
        self.bypass.net.set_rules(BypassRules { rules, tunnel_group, bypass_group });
        self.forget_resolvers();
        let installed = self.install_bypass();
        if config.bypass.is_empty()
            && let Err(error) = &installed
        {
            tracing::warn!(%error, "programs of the group {} do not leave past the tunnel", groups::BYPASS);
            return Ok(());
        }
        installed
    }

    /// The tunnel works, or not any more.
    pub(super) fn set_up(&mut self, is_up: bool) {
        if let Some(kill_switch) = &self.kill_switch {
            kill_switch.set_up(is_up);
        }
        self.bypass.is_up = is_up;
        self.update_bypass();
    }

    /// Takes the links that work, the best first; those are called only if they are needed.
    pub(super) fn set_working_links(&mut self, working: impl FnOnce() -> Vec<String>) {
        if !self.bypass.is_used {
            return;
        }
        let working = working();
        if self.bypass.best.as_ref().is_some_and(|best| working.contains(best)) {
            return;
        }
        if let Some(best) = working.into_iter().next() {
            tracing::debug!(target: BYPASS, best, before = self.bypass.best, "packets past the tunnel have a new link");
            self.bypass.best = Some(best);
            self.update_bypass();
        }
    }

    /// Puts the rules in force for the links that are there now.
    pub(super) fn update_bypass(&mut self) {
        if let Err(error) = self.install_bypass() {
            tracing::warn!(%error, "what leaves past the tunnel stays as it was");
        }
    }

    fn install_bypass(&mut self) -> Result<(), RunError> {
        let is_open = self.kill_switch.is_none() || self.bypass.is_up;
        let Self { bypass, inbound, undo, .. } = self;
        Ok(bypass.net.update(undo, inbound.links(), bypass.best.as_deref(), is_open)?)
    }
}

fn rule(found: &BypassRule) -> tunnel_net::BypassRule {
    let BypassRule { rule, kernel_match, macs, uids, link, always, .. } = found;
    let mut packets = packet_match(rule, kernel_match);
    packets.macs = macs.iter().map(|mac| mac.0).collect();
    packets.uids.clone_from(uids);
    tunnel_net::BypassRule {
        packets,
        vlans: kernel_match.vlans.clone(),
        link: link.clone(),
        always: *always,
        has_names: !rule.domains.is_empty(),
        of_own: found.is_for_own(),
        of_others: found.is_for_others(),
    }
}

/// The names that are asked for past the tunnel.
pub(super) fn names(config: &ClientConfig) -> Vec<BypassedNames> {
    let rules = config.bypass.iter().enumerate().filter(|(_, found)| !found.rule.domains.is_empty());
    let of_links = LazyCell::new(|| link_resolvers(Path::new(undo::DEFAULT_FOLDER)));
    let names = rules.map(|(rule, found)| {
        let resolvers = if found.dns.is_empty() { of_links.clone() } else { found.dns.clone() };
        BypassedNames { rule, domains: found.rule.domains.clone(), resolvers }
    });
    names.collect()
}
