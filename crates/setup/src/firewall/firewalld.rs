//! firewalld: a service of our own in the zone of the interface to the internet, and the TUN device in the
//! zone `trusted`, which forwards.
//!
//! Permanent settings and those that are in force now are changed apart, because a reload of firewalld would
//! take away what others have set for now only. A new service is in force only after a reload, so until then
//! its ports are.

use super::{NOT_NEEDED, Openings};
use crate::plan::{Action, Step};

/// The zone whose interfaces may reach everything.
const TRUSTED: &str = "trusted";

/// The state of firewalld.
#[derive(Clone, Debug, Default)]
pub struct Firewalld {
    /// The zone of the interface to the internet.
    pub zone: String,
    /// The output of `firewall-cmd --permanent --list-all-zones`.
    pub permanent: String,
    /// The output of `firewall-cmd --list-all-zones`.
    pub runtime: String,
    /// The output of `firewall-cmd --permanent --service=TAG --get-ports`; `None` if there is no such
    /// service.
    pub service_ports: Option<String>,
}

/// A zone, as far as it matters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Zone {
    name: String,
    services: Vec<String>,
    ports: Vec<String>,
    interfaces: Vec<String>,
}

impl Firewalld {
    pub(super) fn changes(&self, tag: &str, openings: &Openings) -> Vec<Step> {
        let [permanent, runtime] = [zones(&self.permanent), zones(&self.runtime)];
        let ports: Vec<String> =
            openings.ports.iter().map(|(protocol, port)| format!("{port}/{}", protocol.as_str())).collect();
        let before: Vec<String> =
            self.service_ports.iter().flat_map(|ports| ports.split_whitespace()).map(str::to_owned).collect();
        let mut steps = Vec::new();
        self.remove_from_zones(tag, &ports, &before, (&permanent, &runtime), &mut steps);
        self.change_service(tag, &ports, &before, &permanent, &mut steps);
        self.open_now(tag, &ports, &runtime, &mut steps);
        if let Some(device) = &openings.device {
            steps.extend(device_steps(device, &permanent, &runtime));
        }
        steps
    }

    /// Takes the service, and ports that it had, from zones where they do not belong.
    fn remove_from_zones(
        &self,
        tag: &str,
        ports: &[String],
        before: &[String],
        (permanent, runtime): (&[Zone], &[Zone]),
        steps: &mut Vec<Step>,
    ) {
        let stays = |zone: &Zone| zone.name == self.zone && !ports.is_empty();
        for zone in permanent.iter().filter(|zone| has(&zone.services, tag) && !stays(zone)) {
            steps.push(removal(true, &zone.name, "service", tag));
        }
        for zone in runtime {
            if has(&zone.services, tag) && !stays(zone) {
                steps.push(removal(false, &zone.name, "service", tag));
            }
            // A port that others opened for good is theirs.
            let is_others =
                |port: &str| permanent.iter().any(|other| other.name == zone.name && has(&other.ports, port));
            for port in before.iter().filter(|port| has(&zone.ports, port) && !is_others(port)) {
                if !stays(zone) || !ports.contains(port) {
                    steps.push(removal(false, &zone.name, "port", port));
                }
            }
        }
    }

    /// Makes, changes or deletes the service.
    fn change_service(
        &self,
        tag: &str,
        ports: &[String],
        before: &[String],
        permanent: &[Zone],
        steps: &mut Vec<Step>,
    ) {
        let [new, delete] = ["new", "delete"]
            .map(|verb| Action::run(["firewall-cmd", "--permanent", &format!("--{verb}-service={tag}")]));
        let leftover = || Action::Remove(format!("/etc/firewalld/services/{tag}.xml.old").into());
        let service = format!("--service={tag}");
        let port_of = |verb: &str, port: &str| {
            Action::run(["firewall-cmd", "--permanent", &service, &format!("--{verb}-port={port}")])
        };
        match (&self.service_ports, ports.is_empty()) {
            (None, true) => return,
            (Some(_), true) => {
                steps.push(Step::new(delete, NOT_NEEDED, None));
                steps.push(Step::new(leftover(), "firewalld keeps a copy of it", None));
                return;
            }
            (None, false) => {
                steps.push(Step::new(new, "the ports of the server, as a service", Some(delete)))
            }
            (Some(_), false) => {}
        }
        for port in before.iter().filter(|port| !ports.contains(port)) {
            steps.push(Step::new(port_of("remove", port), NOT_NEEDED, Some(port_of("add", port))));
        }
        for port in ports.iter().filter(|port| !before.contains(port)) {
            let undo = Some(port_of("remove", port));
            steps.push(Step::new(port_of("add", port), format!("clients reach the server by {port}"), undo));
        }
        let is_in = permanent.iter().any(|zone| zone.name == self.zone && has(&zone.services, tag));
        if !is_in {
            steps.push(addition(true, &self.zone, "service", tag, "after the next start of firewalld, too"));
        }
    }

    /// Opens the ports until firewalld is started again.
    fn open_now(&self, tag: &str, ports: &[String], runtime: &[Zone], steps: &mut Vec<Step>) {
        let zone = runtime.iter().find(|zone| zone.name == self.zone);
        // The service in force may have other ports until a reload.
        let in_force = zone.is_some_and(|zone| has(&zone.services, tag))
            && self.service_ports.as_ref().is_some_and(|before| {
                ports.iter().all(|port| before.split_whitespace().any(|other| other == port))
            });
        let is_open = |port: &String| in_force || zone.is_some_and(|zone| has(&zone.ports, port));
        for port in ports.iter().filter(|port| !is_open(port)) {
            steps.push(addition(false, &self.zone, "port", port, "from now on"));
        }
    }
}

/// The steps by which the device is in the zone [`TRUSTED`].
fn device_steps(device: &str, permanent: &[Zone], runtime: &[Zone]) -> Vec<Step> {
    const WHY: &str = "packets of clients pass to the internet; clients reach all ports of this machine at its address in the tunnel";
    // Somebody who put it into another zone has a reason.
    let is_free = |zones: &[Zone]| zones.iter().all(|zone| !has(&zone.interfaces, device));
    [(true, permanent), (false, runtime)]
        .into_iter()
        .filter(|(_, zones)| is_free(zones))
        .map(|(is_permanent, _)| addition(is_permanent, TRUSTED, "interface", device, WHY))
        .collect()
}

/// The steps that take a device from the zone [`TRUSTED`].
pub(super) fn device_removal(firewalld: &Firewalld, device: &str) -> Vec<Step> {
    [(true, &firewalld.permanent), (false, &firewalld.runtime)]
        .into_iter()
        .filter(|(_, shown)| {
            zones(shown).iter().any(|zone| zone.name == TRUSTED && has(&zone.interfaces, device))
        })
        .map(|(is_permanent, _)| removal(is_permanent, TRUSTED, "interface", device))
        .collect()
}

fn has(list: &[String], word: &str) -> bool {
    list.iter().any(|other| other == word)
}

fn command(is_permanent: bool, zone: &str, verb: &str, kind: &str, value: &str) -> Action {
    let permanent = is_permanent.then_some("--permanent".to_owned());
    let words = ["firewall-cmd".to_owned()].into_iter().chain(permanent);
    Action::run(words.chain([format!("--zone={zone}"), format!("--{verb}-{kind}={value}")]))
}

fn addition(is_permanent: bool, zone: &str, kind: &str, value: &str, why: &str) -> Step {
    let undo = command(is_permanent, zone, "remove", kind, value);
    Step::new(command(is_permanent, zone, "add", kind, value), why, Some(undo))
}

fn removal(is_permanent: bool, zone: &str, kind: &str, value: &str) -> Step {
    let undo = command(is_permanent, zone, "add", kind, value);
    Step::new(command(is_permanent, zone, "remove", kind, value), NOT_NEEDED, Some(undo))
}

/// The zones in the output of `firewall-cmd --list-all-zones`: a name at the start of a line, then indented
/// fields.
fn zones(shown: &str) -> Vec<Zone> {
    let mut zones: Vec<Zone> = Vec::new();
    for line in shown.lines().filter(|line| !line.trim().is_empty()) {
        if !line.starts_with(char::is_whitespace) {
            let name = line.split_whitespace().next().unwrap_or_default().to_owned();
            zones.push(Zone { name, ..Zone::default() });
            continue;
        }
        let (Some(zone), Some((key, value))) = (zones.last_mut(), line.trim().split_once(':')) else {
            continue;
        };
        let words = || value.split_whitespace().map(str::to_owned).collect();
        match key {
            "services" => zone.services = words(),
            "ports" => zone.ports = words(),
            "interfaces" => zone.interfaces = words(),
            _ => {}
        }
    }
    zones
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{openings, texts},
        *,
    };

    fn shown(services: &str, ports: &str, trusted: &str) -> String {
        format!(
            "public\n  target: default\n  interfaces: \n  services: {services}\n  ports: {ports}\n  forward: yes\n\n\
             trusted (active)\n  target: ACCEPT\n  interfaces: {trusted}\n  services: \n  ports: \n"
        )
    }

    fn state(permanent: String, runtime: String, ports: Option<&str>) -> Firewalld {
        Firewalld { zone: "public".into(), permanent, runtime, service_ports: ports.map(str::to_owned) }
    }

    #[test]
    fn a_service_and_a_trusted_device_are_added_for_now_and_for_good() {
        let none = || shown("ssh", "", "");
        let steps = state(none(), none(), None).changes("mpvpn-server", &openings());
        assert_eq!(
            texts(&steps),
            [
                "firewall-cmd --permanent --new-service=mpvpn-server",
                "firewall-cmd --permanent --service=mpvpn-server --add-port=443/udp",
                "firewall-cmd --permanent --service=mpvpn-server --add-port=443/tcp",
                "firewall-cmd --permanent --zone=public --add-service=mpvpn-server",
                "firewall-cmd --zone=public --add-port=443/udp",
                "firewall-cmd --zone=public --add-port=443/tcp",
                "firewall-cmd --permanent --zone=trusted --add-interface=mpvpn0",
                "firewall-cmd --zone=trusted --add-interface=mpvpn0",
            ]
        );
        let done = |runtime| state(shown("ssh mpvpn-server", "", "mpvpn0"), runtime, Some("443/udp 443/tcp"));
        let now = done(shown("ssh", "443/udp 443/tcp", "mpvpn0"));
        assert_eq!(now.changes("mpvpn-server", &openings()), []);
        let after_reload = done(shown("ssh mpvpn-server", "", "mpvpn0"));
        assert_eq!(after_reload.changes("mpvpn-server", &openings()), []);
    }

    #[test]
    fn all_of_it_is_removed_and_nothing_of_others() {
        let permanent = shown("ssh mpvpn-server", "443/tcp", "mpvpn0 wg0");
        let runtime = shown("ssh mpvpn-server", "443/udp 443/tcp 80/tcp", "mpvpn0 wg0");
        let firewalld = state(permanent, runtime, Some("443/udp 443/tcp"));
        let mut steps = firewalld.changes("mpvpn-server", &Openings::default());
        steps.extend(device_removal(&firewalld, "mpvpn0"));
        assert_eq!(
            texts(&steps),
            [
                "firewall-cmd --permanent --zone=public --remove-service=mpvpn-server",
                "firewall-cmd --zone=public --remove-service=mpvpn-server",
                // 443/tcp is somebody else's for good.
                "firewall-cmd --zone=public --remove-port=443/udp",
                "firewall-cmd --permanent --delete-service=mpvpn-server",
                "remove /etc/firewalld/services/mpvpn-server.xml.old",
                "firewall-cmd --permanent --zone=trusted --remove-interface=mpvpn0",
                "firewall-cmd --zone=trusted --remove-interface=mpvpn0",
            ]
        );
    }

    #[test]
    fn another_port_replaces_the_one_before() {
        let firewalld = state(
            shown("mpvpn-server", "", "mpvpn0"),
            shown("", "443/udp 443/tcp", "mpvpn0"),
            Some("443/udp 443/tcp"),
        );
        let mut openings = openings();
        openings.ports = vec![(mpvpn_types::PortProtocol::Udp, 4433)];
        assert_eq!(
            texts(&firewalld.changes("mpvpn-server", &openings)),
            [
                "firewall-cmd --zone=public --remove-port=443/udp",
                "firewall-cmd --zone=public --remove-port=443/tcp",
                "firewall-cmd --permanent --service=mpvpn-server --remove-port=443/udp",
                "firewall-cmd --permanent --service=mpvpn-server --remove-port=443/tcp",
                "firewall-cmd --permanent --service=mpvpn-server --add-port=4433/udp",
                "firewall-cmd --zone=public --add-port=4433/udp",
            ]
        );
    }
}
