//! The network configuration of a machine with a tunnel: of a client ([`ClientNet`]), of the TUN devices of
//! its classes ([`ClassNet`]), of packets past the tunnel ([`BypassNet`]), of a LAN behind it
//! ([`share_tunnel`], [`ClientSite`]), and of a server ([`ServerNet`], [`SiteNet`]).
//!
//! In: TUN devices, and the addresses, routes and MTU that are wanted, each time they change. Out: steps
//! that are applied through the journal. Always holds: every step is in the journal before it is applied;
//! steps that the old and the new configuration have in common are not touched, so connections survive the
//! change; new steps are applied before old ones are reverted.

mod bypass;
mod classes;
mod client;
mod identity;
mod inbound;
mod kept_networks;
mod server;
mod share;
mod sites;
pub(crate) mod tcp_sockets;

use std::collections::BTreeSet;

pub use bypass::{BypassNames, BypassNet, BypassRule, BypassRules};
pub use classes::{ClassNet, ClassSteering, ClassTun, DeviceAddresses};
pub use client::{ClientNet, ClientNetState, Routes};
pub(crate) use identity::{
    BYPASS_BIT, LINK_BIT, NUMBER_MASK, OWN_PACKETS, bypass_mark, is_table_of_instance, link_mark,
};
pub use identity::{ClientNetConfig, StaticRoute};
pub use inbound::{InboundNet, LinkTable};
pub use kept_networks::is_private;
pub use server::{Nat, PacketAccess, ServerNet, ServerNetConfig, first_address};
pub use share::{ShareSource, share_tunnel};
pub use sites::{ClientSite, SiteNet};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    error::OsError,
    firewall::{self, Rules},
    netlink::{Family, Interface, Netlink, RouteKind},
    sysctl,
    undo::{Step, UndoJournal},
};

/// The steps that are applied now.
#[derive(Debug, Default)]
struct AppliedSteps(Vec<Step>);

impl AppliedSteps {
    /// The addresses and routes of these devices in the journal.
    fn of_devices(undo: &UndoJournal, devices: &[&Interface]) -> Self {
        let is_of_device = |step: &&Step| match step {
            Step::Address { interface, .. } | Step::Route { interface: Some(interface), .. } => {
                devices.contains(&interface)
            }
            _ => false,
        };
        Self(undo.steps().iter().filter(is_of_device).cloned().collect())
    }

    /// Applies the steps in `wanted` that are missing, in order, each once, then reverts the steps that
    /// `wanted` does not have, in reverse order. If a step fails, the steps of before the call stay in
    /// force.
    fn change_to(&mut self, undo: &mut UndoJournal, wanted: Vec<Step>) -> Result<(), OsError> {
        let mut now: BTreeSet<&Step> = self.0.iter().collect();
        let missing: Vec<Step> = wanted.iter().filter(|step| now.insert(step)).cloned().collect();
        undo.apply(&missing)?;
        let wanted: BTreeSet<Step> = wanted.into_iter().collect();
        self.0.extend(missing);
        let (kept, old): (Vec<Step>, Vec<Step>) = self.0.drain(..).partition(|step| wanted.contains(step));
        self.0 = kept;
        log_errors(undo.revert(&old));
        Ok(())
    }
}

/// A table of nftables whose rules change while it exists: the step that was recorded, and the rules that
/// are in force.
#[derive(Debug, Default)]
struct ReplaceableTable(Option<(Step, Rules)>);

impl ReplaceableTable {
    /// Installs `rules`. They replace those of before in one transaction, so that no packet passes without a
    /// table. If that fails, those of before stay in force.
    fn change_to(&mut self, undo: &mut UndoJournal, rules: Rules) -> Result<(), OsError> {
        match &mut self.0 {
            Some((_, in_force)) if *in_force == rules => {}
            // The recorded step removes the table by its name, whatever rules it has.
            Some((_, in_force)) => {
                firewall::install(&rules)?;
                *in_force = rules;
            }
            None => {
                let step = Step::Firewall { rules: rules.clone() };
                undo.apply(std::slice::from_ref(&step))?;
                self.0 = Some((step, rules));
            }
        }
        Ok(())
    }

    /// Removes the table, if there is one.
    fn remove(&mut self, undo: &mut UndoJournal) {
        if let Some((step, _)) = self.0.take() {
            log_errors(undo.revert(&[step]));
        }
    }
}

impl Netlink {
    /// The names of the interfaces that have a default route (IPv4 or IPv6, any table but those of mpvpn's
    /// instances) and are not in `excluded`, each once, ordered by the metric of the route, smallest
    /// first.
    pub fn default_route_interfaces(&mut self, excluded: &[&str]) -> Result<Vec<String>, OsError> {
        let links = self.links()?;
        let mut defaults: Vec<_> = self
            .routes()?
            .into_iter()
            .filter(|route| route.is_default() && route.kind == RouteKind::Unicast)
            .filter(|route| !is_table_of_instance(route.table))
            .collect();
        defaults.sort_by_key(|route| (route.metric.unwrap_or(0), route.interface));
        let mut names: Vec<String> = Vec::new();
        for route in defaults {
            let Some(link) = links.iter().find(|link| Some(link.index) == route.interface) else { continue };
            let wanted = !link.loopback && !excluded.contains(&link.name.as_str());
            if wanted && !names.contains(&link.name) {
                names.push(link.name.clone());
            }
        }
        Ok(names)
    }
}

fn log_errors(errors: Vec<OsError>) {
    for error in errors {
        tracing::warn!(%error, "cannot revert a change of the network configuration that is no longer needed");
    }
}

/// Sets the kernel parameters of a TUN device before it comes up. They disappear with the device, so they are
/// not in the journal; a parameter that does not exist (no IPv6) is skipped.
fn prepare_device(name: &str) {
    let settings = [
        // No IPv6 link-local address: the peer would not answer neighbour discovery.
        ("ipv6", "addr_gen_mode", "1"),
        ("ipv6", "accept_ra", "0"),
        // If the first of two addresses is removed, the second stays.
        ("ipv4", "promote_secondaries", "1"),
        // The tunnel itself answers with ICMP errors, whose source address is one of this machine.
        ("ipv4", "accept_local", "1"),
        ("ipv4", "rp_filter", "0"),
        // Clients reach each other through this device only: there is no better next hop for an ICMP
        // redirect.
        ("ipv4", "send_redirects", "0"),
        // A source route would lead past filters, which see the next hop only.
        ("ipv4", "accept_source_route", "0"),
    ];
    for (family, setting, value) in settings {
        let _ = sysctl::write(&sysctl::interface_key(family, name, setting), value);
    }
}

/// Enables forwarding of packets between interfaces.
///
/// A router ignores router advertisements, so an interface that learns its IPv6 routes from them would lose
/// them; accept_ra = 2 (the kernel's ip-sysctl.rst) is set first on such interfaces.
fn enable_forwarding(
    undo: &mut UndoJournal,
    netlink: &mut Netlink,
    families: Families,
) -> Result<(), OsError> {
    if families.v4 {
        // When forwarding ends, the kernel accepts redirects, whatever was set before (inet_forward_change).
        // Journalled as if mpvpn had set that, the value from before is put back afterwards.
        const FORWARD: &str = "net/ipv4/ip_forward";
        const REDIRECTS: &str = "net/ipv4/conf/all/accept_redirects";
        if sysctl::read(FORWARD)? == "0" && sysctl::read(REDIRECTS)? == "0" {
            undo.set_sysctl(REDIRECTS, "1")?;
        }
        undo.set_sysctl(FORWARD, "1")?;
    }
    const ALL_V6: &str = "net/ipv6/conf/all/forwarding";
    if !families.v6 {
        return Ok(());
    }
    for link in netlink.links()? {
        let key = sysctl::interface_key("ipv6", &link.name, "accept_ra");
        if sysctl::read(&key).is_ok_and(|value| value == "1" || value == "2") {
            undo.set_sysctl(&key, "2")?;
        }
    }
    undo.set_sysctl(ALL_V6, "1")
}

/// Sets the reverse path filter of link `name` from strict to loose (RFC 3704, section 2.4). A strict filter
/// drops packets from the server, and of connections from outside: for packets without a mark the route back
/// leads into the tunnel, or over another link.
fn loosen_reverse_path_filter(undo: &mut UndoJournal, name: &str) -> Result<(), OsError> {
    let key = sysctl::interface_key("ipv4", name, "rp_filter");
    let value = |key: &str| sysctl::read(key).ok().and_then(|text| text.parse::<u8>().ok()).unwrap_or(0);
    // The larger of the values for all interfaces and for this one is in force (the kernel's ip-sysctl.rst).
    // It is 2 where another instance has set it, which then keeps it until both have ended.
    match value(&key).max(value("net/ipv4/conf/all/rp_filter")) {
        0 => Ok(()),
        2 if value(&key) != 2 => Ok(()),
        _ => undo.set_sysctl(&key, "2"),
    }
}

/// A set of IP versions.
#[derive(Clone, Copy, Debug)]
struct Families {
    v4: bool,
    v6: bool,
}

fn family_of(network: IpNet) -> Family {
    match network {
        IpNet::V4(_) => Family::V4,
        IpNet::V6(_) => Family::V6,
    }
}

/// The default route's destination: 0.0.0.0/0 or ::/0.
fn default_destination(family: Family) -> IpNet {
    match family {
        Family::V4 => Ipv4Net::default().into(),
        Family::V6 => Ipv6Net::default().into(),
    }
}
