//! The facts about a machine that matter for setup.

use std::net::IpAddr;

use ipnet::IpNet;
use mpvpn_types::PortHolder;

use super::{
    firewall::Firewall,
    instance::Instance,
    plan::{Action, Plan, Step},
};
use mpvpn_input::{Error, Result};

/// The facts about a machine.
#[derive(Clone, Debug, Default)]
pub struct MachineFacts {
    /// Version of the kernel.
    pub kernel: String,
    /// By what the kernel can confine a process, a sentence.
    pub confinement: String,
    /// Why no TUN device can be made; `None` if one can.
    pub no_tun: Option<String>,
    /// Why nftables cannot be used; `None` if it can.
    pub no_nft: Option<String>,
    /// Whether systemd runs services here.
    pub systemd: bool,
    /// The unit of the instance.
    pub unit: UnitState,
    /// The unit of the kill switch.
    pub kill_switch_unit: UnitState,
    /// The interfaces, without loopback and devices of mpvpn.
    pub interfaces: Vec<Interface>,
    /// Networks of addresses and destinations of routes, without default routes, each with its interface.
    pub networks: Vec<(String, IpNet)>,
    /// The address from which packets to the internet come; `None` without a default route.
    pub source: Option<IpAddr>,
    /// Sockets at the port of the server.
    pub port_holders: Vec<PortHolder>,
    /// The firewall.
    pub firewall: Firewall,
    /// The text of the instance's configuration file.
    pub file: Option<String>,
    /// The text of the page that setup makes for the site of a server.
    pub page: Option<String>,
    /// The text of the drop-in of the instance's unit.
    pub drop_in: Option<String>,
    /// TUN devices that other configuration files name.
    pub other_tuns: Vec<String>,
    /// The groups of mpvpn that the machine does not have.
    pub missing_groups: Vec<&'static str>,
    /// Names of the server's users.
    pub users: Vec<String>,
    /// Whether the person who runs setup came by SSH.
    pub over_ssh: bool,
    /// Random bytes.
    pub random: [u8; 16],
    /// The path of this program.
    pub program: String,
}

impl MachineFacts {
    /// Whether the kernel has what every tunnel needs.
    ///
    /// # Errors
    /// If there is no TUN device, or nftables cannot be used.
    pub(super) fn require_tunnels(&self) -> Result<()> {
        if let Some(why) = &self.no_tun {
            return Err(Error::machine(
                format!("there is no TUN device: {why}"),
                "load the module with `modprobe tun`; in a container, turn on TUN in the console of your provider, or give it \
                 /dev/net/tun and CAP_NET_ADMIN",
            ));
        }
        match &self.no_nft {
            None => Ok(()),
            Some(why) => Err(Error::machine(
                format!("nftables cannot be used: {why}"),
                "install it with `apt install nftables`; in a container, give it CAP_NET_ADMIN",
            )),
        }
    }

    pub(super) fn describe(&self) -> String {
        format!("Linux {} with TUN and nftables; {}", self.kernel, self.confinement)
    }

    /// Whether systemd runs the instance here.
    pub(super) fn has_service(&self) -> bool {
        self.systemd && self.unit.exists
    }

    /// The steps that make the groups of the services.
    pub(super) fn group_steps(&self) -> impl Iterator<Item = Step> {
        self.missing_groups.iter().filter(|_| self.has_service()).map(|group| {
            let make = Action::run(["groupadd", "--system", group]);
            let undo = Some(Action::run(["groupdel", group]));
            Step::new(make, "its members use mpvpn without sudo", undo)
        })
    }

    /// The steps after which the service runs, now and after each boot, with the file as it is then.
    pub(super) fn service_steps(&self, instance: &Instance, change: ServiceChange) -> Vec<Step> {
        if !self.has_service() {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if !self.unit.enabled || !self.unit.active {
            let undo: &[&str] = match (self.unit.enabled, self.unit.active) {
                (true, _) => &["stop"],
                (false, true) => &["disable"],
                (false, false) => &["disable", "--now"],
            };
            let start = Action::systemctl(&["enable", "--now"], instance);
            steps.push(Step::new(
                start,
                "it runs from now on, and after each boot",
                Some(Action::systemctl(undo, instance)),
            ));
        }
        let (verb, why) = match change {
            ServiceChange::None => return steps,
            ServiceChange::Reload => ("reload", "with the new settings; no connection ends"),
            ServiceChange::Restart => ("restart", "with the new settings"),
        };
        if self.unit.active {
            steps.push(Step::new(Action::systemctl(&[verb], instance), why, None));
        }
        steps
    }

    /// Adds to the plan how the instance is started where systemd does not do it, and how a failure ends.
    pub(super) fn explain_service(&self, instance: &Instance, plan: &mut Plan) {
        if self.unit.active {
            plan.after_undo = Some(Action::systemctl(&["restart"], instance));
        }
        let command = instance.command();
        if !self.systemd {
            plan.by_hand.push(format!("no systemd runs here, so start it by `{command}`, as root"));
        } else if !self.unit.exists {
            plan.by_hand.push(format!(
                "there is no unit {}.service, which the package brings: install that and run this again, or start it by `{command}`, \
                 as root",
                instance.unit()
            ));
        }
    }
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its addresses, without link-local ones.
    pub addresses: Vec<IpAddr>,
    /// Whether a default route leads through it.
    pub has_default_route: bool,
}

/// The change of a running service after a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceChange {
    /// Nothing.
    None,
    /// Read its file again.
    Reload,
    /// Start anew: settings differ that a reload does not change.
    Restart,
}

impl ServiceChange {
    pub(super) fn new(changes_file: bool, needs_restart: bool) -> Self {
        match (changes_file, needs_restart) {
            (false, _) => Self::None,
            (true, false) => Self::Reload,
            (true, true) => Self::Restart,
        }
    }
}

/// The state of a systemd unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitState {
    /// Whether there is such a unit.
    pub exists: bool,
    /// Whether it starts at boot.
    pub enabled: bool,
    /// Whether it runs.
    pub active: bool,
}

impl UnitState {
    /// From the output of `systemctl show --property=LoadState,ActiveState,UnitFileState UNIT`.
    pub fn parse(shown: &str) -> Self {
        let value = |key: &str| {
            shown.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
        };
        Self {
            exists: value("LoadState") == "loaded",
            enabled: value("UnitFileState") == "enabled",
            active: matches!(value("ActiveState"), "active" | "activating" | "reloading"),
        }
    }
}

/// Whether one of these processes, by their names, serves a session over the network.
pub fn comes_over_network<'a>(ancestors: impl IntoIterator<Item = &'a str>) -> bool {
    ancestors.into_iter().any(|name| ["sshd", "sshd-session", "dropbear", "mosh-server"].contains(&name))
}

#[cfg(test)]
mod tests {
    use mpvpn_packet::public::is_public;

    use super::*;

    #[test]
    fn addresses_behind_translation_are_told_from_public_ones() {
        for (address, public) in [
            ("10.1.2.3", false),
            ("172.20.0.1", false),
            ("192.168.1.1", false),
            ("100.64.0.1", false),
            ("100.128.0.1", true),
            ("169.254.1.1", false),
            ("203.0.113.7", true),
            ("fd00::1", false),
            ("fe80::1", false),
            ("2001:db8::1", true),
            ("::ffff:10.0.0.1", false),
        ] {
            assert_eq!(is_public(address.parse().unwrap()), public, "{address}");
        }
    }

    #[test]
    fn the_state_of_a_unit_is_read() {
        let shown = "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\n";
        assert_eq!(UnitState::parse(shown), UnitState { exists: true, enabled: true, active: true });
        assert_eq!(
            UnitState::parse("LoadState=not-found\nActiveState=inactive\nUnitFileState=\n"),
            UnitState::default()
        );
        assert_eq!(UnitState::parse(""), UnitState::default());
    }

    #[test]
    fn a_session_over_the_network_is_known_by_its_ancestors() {
        assert!(comes_over_network(["sudo", "bash", "sshd", "systemd"]));
        assert!(!comes_over_network(["sudo", "bash", "login", "systemd"]));
    }
}
