//! The rules that a server needs in the firewall of its machine: ufw, firewalld, or chains of nftables and
//! iptables that drop.
//!
//! In: the state of the firewall ([`Firewall`]), and what has to pass ([`Openings`]). Out: steps that add
//! tagged rules and remove those that are not needed any more. Always holds: no firewall is enabled, no
//! policy changed, no rule without the tag removed; where nothing drops, there are no steps. An accept in a
//! table of one's own would not overrule the drop of another table, so rules go into the chains that drop.

mod firewalld;
mod iptables;
mod nft;
mod ufw;

use mpvpn_types::PortProtocol;
use serde_json::Value;

pub use firewalld::Firewalld;
pub use nft::handle_of;

use super::{
    instance::Instance,
    plan::{Action, Step},
};

/// The port of name servers.
const DNS_PORT: u16 = 53;

/// The state of a machine's firewalls.
#[derive(Clone, Debug, Default)]
pub struct Firewall {
    /// The output of `ufw show added`, if ufw is active.
    pub ufw: Option<String>,
    /// firewalld, if it runs.
    pub firewalld: Option<Firewalld>,
    /// The output of `nft --json list ruleset`.
    pub ruleset: Value,
    /// The output of `iptables-save`.
    pub iptables: String,
    /// The output of `ip6tables-save`.
    pub ip6tables: String,
}

/// The ports and devices that a firewall must open for a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    /// Ports at which clients reach the server.
    pub ports: Vec<(PortProtocol, u16)>,
    /// The TUN device; `None` if nothing has to pass.
    pub device: Option<String>,
    /// Whether clients ask the server for names, at its addresses in the tunnel.
    pub resolver: bool,
    /// Whether hosts behind the server open connections to clients.
    pub inbound: bool,
}

/// A rule in the words of no firewall.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Packets to a port of this machine.
    Port(PortProtocol, u16),
    /// Queries for names that arrive by a device.
    Resolver(PortProtocol, String),
    /// Packets from a device to other hosts.
    From(String),
    /// Packets of other hosts to a device that answer.
    Replies(String),
    /// All packets of other hosts to a device.
    To(String),
}

impl Rule {
    /// Whether it is about packets to this machine, not about those that it forwards.
    fn is_input(&self) -> bool {
        matches!(self, Self::Port(..) | Self::Resolver(..))
    }

    fn why(&self) -> String {
        match self {
            Self::Port(protocol, port) => {
                format!("clients reach the server by {} port {port}", protocol.in_capitals())
            }
            Self::Resolver(..) => "clients ask the server for names".to_owned(),
            Self::From(_) => "packets of clients pass to the internet".to_owned(),
            Self::Replies(_) => "answers pass back to clients".to_owned(),
            Self::To(_) => "hosts behind the server reach clients (nat is off)".to_owned(),
        }
    }
}

impl Openings {
    fn rules(&self) -> Vec<Rule> {
        let mut rules: Vec<_> =
            self.ports.iter().map(|(protocol, port)| Rule::Port(*protocol, *port)).collect();
        if let Some(device) = &self.device {
            if self.resolver {
                rules.extend(
                    [PortProtocol::Udp, PortProtocol::Tcp]
                        .map(|protocol| Rule::Resolver(protocol, device.clone())),
                );
            }
            rules.push(Rule::From(device.clone()));
            rules.push(if self.inbound { Rule::To(device.clone()) } else { Rule::Replies(device.clone()) });
        }
        rules
    }
}

impl Firewall {
    /// The firewalls in words, for people.
    pub(super) fn describe(&self) -> String {
        let mut kinds = Vec::new();
        if self.ufw.is_some() {
            kinds.push("ufw".to_owned());
        }
        if let Some(firewalld) = &self.firewalld {
            kinds.push(format!("firewalld, zone {}", firewalld.zone));
        }
        kinds.extend(nft::dropping_chains(&self.ruleset, self.ufw.is_some()).iter().map(ToString::to_string));
        for (program, saved) in self.iptables_rules() {
            let chains = iptables::dropping_chains(saved);
            kinds.extend(chains.iter().map(|chain| format!("{program} {chain}")));
        }
        if kinds.is_empty() {
            "no firewall drops packets".to_owned()
        } else {
            format!("firewall: {}", kinds.join("; "))
        }
    }

    /// The steps after which `openings` pass, and no tagged rule is there that is not needed.
    pub(super) fn changes(&self, instance: &Instance, openings: &Openings) -> Vec<Step> {
        let mut steps = self.lasting_changes(instance, openings);
        steps.extend(self.passing_changes(instance, openings));
        steps
    }

    /// The steps after which no tagged rule is there, and `device` has no place of its own in the firewall.
    pub(super) fn removal(&self, instance: &Instance, device: &str) -> Vec<Step> {
        let mut steps = self.changes(instance, &Openings::default());
        if let Some(firewalld) = &self.firewalld {
            steps.extend(firewalld::device_removal(firewalld, device));
        }
        steps
    }

    /// The steps for firewalls that keep rules over a reboot.
    fn lasting_changes(&self, instance: &Instance, openings: &Openings) -> Vec<Step> {
        let (tag, rules) = (instance.tag(), openings.rules());
        let mut steps = Vec::new();
        if let Some(added) = &self.ufw {
            steps.extend(ufw::changes(added, &tag, &rules));
        }
        if let Some(firewalld) = &self.firewalld {
            steps.extend(firewalld.changes(&tag, openings));
        }
        steps
    }

    /// The steps for chains whose rules are gone after a reboot, so that the service adds them at each start.
    pub(super) fn passing_changes(&self, instance: &Instance, openings: &Openings) -> Vec<Step> {
        let (tag, rules) = (instance.tag(), openings.rules());
        let mut steps = nft::changes(&self.ruleset, self.ufw.is_some(), &tag, &rules);
        let changes = |(program, saved)| iptables::changes(program, saved, &tag, &rules);
        steps.extend(self.iptables_rules().flat_map(changes));
        steps
    }

    /// Whether chains that forget their rules at a reboot need some.
    pub(super) fn forgets(&self) -> bool {
        !nft::dropping_chains(&self.ruleset, self.ufw.is_some()).is_empty()
            || self.iptables_rules().any(|(_, saved)| !iptables::dropping_chains(saved).is_empty())
    }

    /// The programs iptables and ip6tables with their rules, unless these belong to ufw.
    fn iptables_rules(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("iptables", self.iptables.as_str()), ("ip6tables", self.ip6tables.as_str())];
        all.into_iter().filter(|_| self.ufw.is_none())
    }
}

/// A step that adds a rule, and how it is undone.
fn adding(words: Vec<String>, rule: &Rule, undo: Action) -> Step {
    Step::new(Action::Run(words), rule.why(), Some(undo))
}

const NOT_NEEDED: &str = "a rule that is not needed any more";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use mpvpn_input::role::Role;

    pub(super) fn openings() -> Openings {
        Openings {
            ports: vec![(PortProtocol::Udp, 443), (PortProtocol::Tcp, 443)],
            device: Some("mpvpn0".into()),
            resolver: true,
            inbound: false,
        }
    }

    pub(super) fn texts(steps: &[Step]) -> Vec<String> {
        steps.iter().map(|step| step.action.to_string()).collect()
    }

    #[test]
    fn a_machine_without_a_firewall_is_left_alone() {
        let firewall = Firewall::default();
        let server = Instance::unnamed(Role::Server);
        assert_eq!(firewall.changes(&server, &openings()), []);
        assert_eq!(firewall.describe(), "no firewall drops packets");
        assert!(!firewall.forgets());
    }

    #[test]
    fn chains_of_ufw_are_changed_by_ufw_only() {
        let chain = json!({"chain": {"family": "ip", "table": "filter", "name": "INPUT", "hook": "input", "type": "filter", "policy": "drop"}});
        let firewall = Firewall {
            ufw: Some("Added user rules (see 'ufw status' for running firewall):\n(None)\n".into()),
            ruleset: json!({"nftables": [chain]}),
            iptables: "*filter\n:INPUT DROP [0:0]\n-A INPUT -j ufw-before-input\nCOMMIT\n".into(),
            ..Firewall::default()
        };
        let steps = texts(&firewall.changes(&Instance::unnamed(Role::Server), &openings()));
        assert!(steps.iter().all(|step| step.starts_with("ufw ")), "{steps:?}");
        assert_eq!(firewall.describe(), "firewall: ufw");
        assert!(!firewall.forgets());
    }

    proptest! {
        #[test]
        fn any_output_of_other_programs_is_read_without_panic(text in "\\PC*", name in "[a-z]{0,8}") {
            let firewall = Firewall {
                ufw: Some(text.clone()),
                firewalld: Some(Firewalld {
                    zone: name,
                    permanent: text.clone(),
                    runtime: text.clone(),
                    service_ports: Some(text.clone()),
                }),
                ruleset: serde_json::from_str(&text).unwrap_or_default(),
                iptables: text.clone(),
                ip6tables: format!("*filter\n:INPUT DROP\n-A INPUT {text}\n"),
            };
            let _ = firewall.changes(&Instance::unnamed(Role::Server), &openings());
            let _ = firewall.describe();
        }
    }
}
