//! The facts about the machine: from netlink, `/proc`, files, and the output of systemctl, nft, ufw,
//! firewalld and iptables.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use mpvpn_config::{ClientConfig, ServerConfig, TUN_NAME};
use mpvpn_confine::kernel_check;
use mpvpn_error::RunError;
use mpvpn_identity::random;
use mpvpn_input::{Result, dirs::STATE_DIR, groups, role::Role};
use mpvpn_os::{
    netlink::{Netlink, RouteKind},
    port_holders::holders_of,
    program::{self, Ended},
};
use mpvpn_users::{
    Users,
    credentials::{guess_address, state_files},
    users_file,
};
use serde_json::Value;

use crate::{
    Instance, Interface, KILL_SWITCH_UNIT, MachineFacts, UnitState, comes_over_network,
    firewall::{Firewall, Firewalld},
    site::page_file,
};

/// The longest that a program may take to report a fact. Chosen: firewalld, in Python, takes some 0.3 s on
/// an idle machine.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);
/// Ancestors of this process that are looked at. Chosen: a shell in a shell in a session has fewer.
const MAX_ANCESTORS: usize = 32;
/// The table `local` of linux/rtnetlink.h, which has the addresses of the machine.
const LOCAL_TABLE: u32 = 255;
/// Folder of configuration files.
const CONFIG_FOLDER: &str = "/etc/mpvpn";

/// Collects the facts about the machine for an instance. `port` is the port that its server is going to have,
/// if that is known.
///
/// # Errors
/// If the kernel does not say, or the configuration file has mistakes.
pub fn look(instance: &Instance, port: Option<u16>) -> std::result::Result<MachineFacts, RunError> {
    let file = fs::read_to_string(instance.file()).ok();
    let config = match (&file, instance.role()) {
        (Some(text), Role::Server) => {
            Some(ServerConfig::parse(text, &instance.file()).map_err(RunError::Control)?)
        }
        _ => None,
    };
    let port = port.unwrap_or_else(|| {
        config.as_ref().and_then(|config| config.listen.first()).map_or(443, SocketAddr::port)
    });
    let mut netlink = Netlink::open()?;
    let systemd = Path::new("/run/systemd/system").is_dir();
    let unit_state = |unit: &str| if systemd { ask_unit(unit) } else { UnitState::default() };
    let users = match (&config, instance.role()) {
        (Some(config), _) => names_of_users(&users_file(config)).map_err(RunError::Control)?,
        // Where the server of this instance will look for them.
        (None, Role::Server) if instance.name().is_none() => {
            names_of_users(&Path::new(STATE_DIR).join("users.toml")).map_err(RunError::Control)?
        }
        (None, _) => Vec::new(),
    };
    let interfaces = interfaces(&mut netlink)?;
    Ok(MachineFacts {
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        confinement: kernel_check().sentence(),
        no_tun: fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .err()
            .map(|error| error.to_string()),
        no_nft: match ask("nft", &["list", "tables"]) {
            Ended::Well(_) => None,
            Ended::Badly(said) => Some(said),
            Ended::Missing => Some("nft is not installed".to_owned()),
            Ended::Late => Some("nft did not answer".to_owned()),
        },
        systemd,
        unit: unit_state(&format!("{}.service", instance.unit())),
        kill_switch_unit: unit_state(KILL_SWITCH_UNIT),
        networks: networks(&mut netlink)?,
        source: guess_address(&[]),
        port_holders: holders_of(port),
        firewall: firewall(&instance.tag(), &interfaces),
        interfaces,
        page: page_file(instance).and_then(|page| fs::read_to_string(page).ok()),
        drop_in: fs::read_to_string(instance.drop_in()).ok(),
        file,
        other_tuns: other_tuns(instance),
        missing_groups: groups::ALL.into_iter().filter(|name| groups::id(name).is_none()).collect(),
        users,
        over_ssh: std::env::var_os("SSH_CONNECTION").is_some()
            || comes_over_network(ancestors().iter().map(String::as_str)),
        random: random().map_err(RunError::io("get random numbers"))?,
        program: std::env::current_exe()
            .map_or_else(|_| "mpvpn".to_owned(), |path| path.display().to_string()),
    })
}

fn ask(name: &str, args: &[&str]) -> Ended {
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    program::run(name, &args, String::new(), Some(PROGRAM_TIMEOUT))
}

/// The output of a program; `None` if it fails or is missing.
fn answer(name: &str, args: &[&str]) -> Option<String> {
    match ask(name, args) {
        Ended::Well(printed) => Some(printed),
        Ended::Badly(_) | Ended::Missing | Ended::Late => None,
    }
}

fn ask_unit(unit: &str) -> UnitState {
    let shown = answer("systemctl", &["show", "--property=LoadState,ActiveState,UnitFileState", unit]);
    UnitState::parse(&shown.unwrap_or_default())
}

fn names_of_users(file: &Path) -> Result<Vec<String>> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    Ok(Users::load(file)?.iter().map(|entry| entry.name.clone()).collect())
}

fn interfaces(netlink: &mut Netlink) -> std::result::Result<Vec<Interface>, RunError> {
    let with_default = netlink.default_route_interfaces(&[])?;
    let addresses = netlink.addresses()?;
    let links = netlink.links()?.into_iter().filter(|link| !link.loopback);
    Ok(links
        .map(|link| Interface {
            addresses: addresses
                .iter()
                .filter(|info| info.index == link.index && !info.link_local)
                .map(|info| info.address.addr())
                .collect(),
            has_default_route: with_default.contains(&link.name),
            name: link.name,
        })
        .collect())
}

/// The networks that the machine uses, with the names of their interfaces.
fn networks(netlink: &mut Netlink) -> std::result::Result<Vec<(String, IpNet)>, RunError> {
    let links = netlink.links()?;
    let name = |index: u32| links.iter().find(|link| link.index == index).map(|link| link.name.clone());
    let mut networks = Vec::new();
    for info in netlink.addresses()? {
        networks.extend(name(info.index).map(|name| (name, info.address.trunc())));
    }
    for route in netlink.routes()? {
        let counts = !route.is_default() && route.kind == RouteKind::Unicast && route.table != LOCAL_TABLE;
        let interface = route.interface.and_then(name).filter(|_| counts);
        networks.extend(interface.map(|name| (name, route.destination.trunc())));
    }
    // Every machine has these, and no tunnel wants them.
    networks.retain(|(_, network)| !is_link_local(network));
    networks.sort();
    networks.dedup();
    Ok(networks)
}

fn is_link_local(network: &IpNet) -> bool {
    match network.addr() {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_multicast(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_multicast() || v6.segments()[0] & 0xffc0 == 0xfe80,
    }
}

/// The state of the firewalls of this machine.
pub fn firewall(tag: &str, interfaces: &[Interface]) -> Firewall {
    let ufw_is_active = answer("ufw", &["status"]).is_some_and(|said| said.contains("Status: active"));
    let saved = |name: &str| answer(name, &[]).unwrap_or_default();
    Firewall {
        ufw: ufw_is_active.then(|| answer("ufw", &["show", "added"])).flatten(),
        firewalld: firewalld(tag, interfaces),
        ruleset: ruleset(),
        iptables: saved("iptables-save"),
        ip6tables: saved("ip6tables-save"),
    }
}

/// The rules of nftables.
pub(crate) fn ruleset() -> Value {
    let listed = answer("nft", &["--json", "list", "ruleset"]).unwrap_or_default();
    serde_json::from_str(&listed).unwrap_or_default()
}

fn firewalld(tag: &str, interfaces: &[Interface]) -> Option<Firewalld> {
    let command = |args: &[&str]| answer("firewall-cmd", args);
    command(&["--state"])?;
    let outer = interfaces.iter().find(|interface| interface.has_default_route);
    let zone = outer.and_then(|outer| command(&[&format!("--get-zone-of-interface={}", outer.name)]));
    Some(Firewalld {
        zone: zone.or_else(|| command(&["--get-default-zone"]))?.trim().to_owned(),
        permanent: command(&["--permanent", "--list-all-zones"])?,
        runtime: command(&["--list-all-zones"])?,
        service_ports: command(&["--permanent", &format!("--service={tag}"), "--get-ports"]),
    })
}

/// TUN devices that the configuration files of other instances name.
fn other_tuns(instance: &Instance) -> Vec<String> {
    let files = fs::read_dir(CONFIG_FOLDER).into_iter().flatten().flatten().map(|entry| entry.path());
    let others =
        files.filter(|path| *path != instance.file() && path.extension().is_some_and(|end| end == "toml"));
    let tun_of = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        let name = ServerConfig::parse(&text, &path).map(|config| config.tun_name);
        name.or_else(|_| ClientConfig::parse(&text, &path).map(|config| config.tun_name)).ok()
    };
    others.filter_map(tun_of).chain([TUN_NAME.to_owned()]).collect()
}

/// The names of the processes from which this one comes, the nearest first.
fn ancestors() -> Vec<String> {
    let mut names = Vec::new();
    let mut process = "self".to_owned();
    while names.len() < MAX_ANCESTORS {
        let Ok(status) = fs::read_to_string(format!("/proc/{process}/status")) else { break };
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let (Some(name), Some(parent)) = (value("Name:"), value("PPid:")) else { break };
        names.push(name.to_owned());
        process = parent.to_owned();
    }
    names
}

/// The instances that setup has made, by their records.
pub fn records() -> Vec<Instance> {
    let entries = fs::read_dir(STATE_DIR).into_iter().flatten().flatten();
    let mut found: Vec<Instance> =
        entries.filter_map(|entry| Instance::of_record(entry.file_name().to_str()?)).collect();
    found.sort_by_key(Instance::tag);
    found
}

/// The files with users and certificates of a server that exist.
pub fn files_of_server(config: &ServerConfig) -> Vec<PathBuf> {
    state_files(config).into_iter().filter(|path| path.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_looked_at() {
        let machine = look(&Instance::unnamed(Role::Client), None).unwrap();
        assert!(!machine.kernel.is_empty() && !machine.program.is_empty());
        assert!(machine.networks.iter().all(|(_, network)| !is_link_local(network)));
        assert!(ancestors().len() > 1);
    }
}
