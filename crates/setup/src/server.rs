//! The plan for a server.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use ipnet::{IpNet, Ipv4Net};
use mpvpn_packet::public::is_public;
use mpvpn_types::{PortHolder, PortProtocol};
use toml_edit::{Array, DocumentMut, value};

use super::{
    firewall::{Firewall, Openings},
    instance::Instance,
    machine::{MachineFacts, ServiceChange},
    plan::{Action, Audience, Plan, Step},
    site::SiteWish,
    subnet::{free_subnet, overlap, private_subnet6},
};
use mpvpn_config::{AuthMode, Nat, ServerConfig, ServerDns, SiteContent, Tcp};
use mpvpn_input::{Error, Result};
use mpvpn_users::{UserCredential, credentials, host::HostOption, join::tun_name};

/// The beginning of a server's file that setup makes.
const HEAD: &str = "\
# Configuration of the mpvpn server on this machine, made by `mpvpn setup server`. Further keys: docs/reference/server.md.

";
/// The port of a server if nothing is said.
const DEFAULT_PORT: u16 = 443;
/// A port for servers that cannot have the usual one; that of servers without root.
const OTHER_PORT: u16 = 4433;

/// The settings that the user wants for a server.
#[derive(Clone, Debug)]
pub struct ServerWishes {
    /// Which server of this machine.
    pub instance: Instance,
    /// How clients reach it.
    pub host: Option<HostOption>,
    /// Its port.
    pub port: Option<u16>,
    /// The IPv4 network of the tunnel.
    pub subnet: Option<Ipv4Net>,
    /// The site that visitors without credentials see; `None`: as the file says, none in a new one.
    pub site: Option<SiteWish>,
    /// The CAs whose certificates clients show in place of tokens: the absolute path of a PEM file.
    pub client_ca: Option<PathBuf>,
    /// The user to add; `None`: one with the usual name, if there is no user yet, and if users have tokens.
    pub user: Option<String>,
}

/// The plan for a server.
///
/// # Errors
/// If the machine cannot run it, or the configuration file cannot be understood.
pub fn plan_server(machine: &MachineFacts, wishes: &ServerWishes) -> Result<Plan> {
    let instance = &wishes.instance;
    machine.require_tunnels()?;
    let text = file_text(machine, wishes)?;
    let config = ServerConfig::parse(&text, &instance.file())?;
    let port = config.listen.first().map_or(DEFAULT_PORT, SocketAddr::port);
    let mut plan = Plan::default();
    plan.found.push(machine.describe());
    check_port(machine, &config, port, instance, &mut plan)?;
    describe_address(machine, &config, instance, &mut plan);
    check_subnets(machine, &config, instance, &mut plan);
    plan.found.push(machine.firewall.describe());

    plan.found.push(describe_site(&config));
    plan.steps.extend(wishes.site.as_ref().and_then(|site| site.step(instance, machine)));

    plan.steps.extend(machine.group_steps());
    let changes_file = machine.file.as_ref() != Some(&text);
    if changes_file {
        let write = Action::Write { path: instance.file(), text: text.clone(), audience: Audience::Service };
        let undo = Action::restore(instance.file(), machine.file.clone(), Audience::Service);
        plan.steps.push(Step::new(write, "", Some(undo)));
    }
    // The names of certificates come from their CA.
    let has_first = machine.users.is_empty() && config.auth != AuthMode::Mtls;
    let first = || has_first.then(|| credentials::FIRST_USER.to_owned());
    let user = wishes.user.clone().or_else(first).filter(|user| !machine.users.contains(user));
    if let Some(name) = user.filter(|_| config.auth != AuthMode::None) {
        let file = mpvpn_users::users_file(&config);
        let undo = Action::RemoveUser { name: name.clone(), file: file.clone() };
        let credential = config.auth.into();
        let why = match credential {
            UserCredential::Token => "its join link follows",
            UserCredential::Certificate => "its certificate comes from the CA of `client-ca`",
        };
        plan.steps.push(Step::new(Action::AddUser { name, file, credential }, why, Some(undo)));
    }
    plan.steps.extend(machine.firewall.changes(instance, &openings(&config)));
    plan.steps.extend(drop_in_steps(machine, instance));
    let before =
        machine.file.as_deref().and_then(|before| ServerConfig::parse(before, &instance.file()).ok());
    let needs_restart = before.is_none_or(|before| !before.compare(&config).restart.is_empty());
    plan.steps.extend(machine.service_steps(instance, ServiceChange::new(changes_file, needs_restart)));
    machine.explain_service(instance, &mut plan);
    if !plan.steps.is_empty() && machine.file.is_none() {
        plan.warnings.push(format!(
            "a firewall of your provider, if there is one, must let UDP{} port {port} in",
            if config.tcp == Tcp::On { " and TCP" } else { "" }
        ));
    }
    Ok(plan)
}

/// The steps that let the server's packets pass those chains of the firewall that forget their rules at a
/// reboot.
pub fn passing_firewall_steps(firewall: &Firewall, config: &ServerConfig, instance: &Instance) -> Vec<Step> {
    firewall.passing_changes(instance, &openings(config))
}

/// The ports and devices that the firewall must open for a server with this configuration.
fn openings(config: &ServerConfig) -> Openings {
    let mut ports = Vec::new();
    for address in config.listen.iter().filter(|address| !address.ip().is_loopback()) {
        let tcp = (config.tcp == Tcp::On).then_some(PortProtocol::Tcp);
        for protocol in [Some(PortProtocol::Udp), tcp].into_iter().flatten() {
            if !ports.contains(&(protocol, address.port())) {
                ports.push((protocol, address.port()));
            }
        }
    }
    Openings {
        ports,
        device: config.service.has_tun().then(|| config.tun_name.clone()),
        resolver: config.dns == ServerDns::Own,
        inbound: config.nat == Nat::Off,
    }
}

/// The steps for the drop-in of the unit, which adds rules at each start where they are gone after a reboot.
fn drop_in_steps(machine: &MachineFacts, instance: &Instance) -> Vec<Step> {
    if !machine.has_service() || !machine.firewall.forgets() {
        return Vec::new();
    }
    let text = format!(
        "# Made by `mpvpn setup server`, removed by `mpvpn setup remove`.\n\
         [Unit]\nAfter=nftables.service netfilter-persistent.service docker.service\n\n\
         [Service]\nExecStartPre=-+{} setup firewall{}\n",
        machine.program,
        instance.name_option()
    );
    if machine.drop_in.as_ref() == Some(&text) {
        return Vec::new();
    }
    let path = instance.drop_in();
    let write = Action::Write { path: path.clone(), text, audience: Audience::All };
    let why = "the firewall forgets these rules at a reboot, so the service adds them when it starts";
    vec![
        Step::new(write, why, Some(Action::Remove(path))),
        Step::new(
            Action::run(["systemctl", "daemon-reload"]),
            "",
            Some(Action::run(["systemctl", "daemon-reload"])),
        ),
    ]
}

/// The text of the configuration file: a new one, or the one that is there with what is wanted otherwise.
fn file_text(machine: &MachineFacts, wishes: &ServerWishes) -> Result<String> {
    let path = wishes.instance.file();
    let is_new = machine.file.is_none();
    let mut document = machine
        .file
        .as_deref()
        .unwrap_or_default()
        .parse::<DocumentMut>()
        .map_err(|error| Error::content(path, "the configuration of a server", error))?;
    if is_new || wishes.port.is_some() {
        let port = wishes.port.unwrap_or(DEFAULT_PORT);
        let listen: Vec<String> =
            machine.listen_addresses().iter().map(|ip| SocketAddr::new(*ip, port).to_string()).collect();
        let listens_at_port = |document: &DocumentMut| {
            let addresses = document.get("listen").and_then(|listen| listen.as_array());
            let mut ports =
                addresses.into_iter().flatten().filter_map(|item| item.as_str()?.parse::<SocketAddr>().ok());
            ports.next().is_some_and(|first| first.port() == port) && ports.all(|other| other.port() == port)
        };
        if !listens_at_port(&document) {
            document["listen"] = value(listen.into_iter().collect::<Array>());
        }
    }
    if let Some(subnet) = wishes.subnet {
        document["subnet"] = value(subnet.to_string());
    } else if is_new {
        document["subnet"] = value(machine.choose_subnet()?.to_string());
    }
    if is_new {
        let [a, b, c, d, e, ..] = machine.random;
        document["subnet6"] = value(private_subnet6([a, b, c, d, e]).to_string());
        document["isolate"] = value(true);
        if let Some(name) = wishes.instance.name() {
            document["tun-name"] = value(machine.free_tun_name(name));
            document["name"] = value(name);
            document["state-dir"] = value(format!("{}/{name}", mpvpn_input::dirs::STATE_DIR));
        }
    }
    if let Some(host) = &wishes.host {
        let listens =
            document.get("listen").and_then(|listen| listen.as_array()?.get(0)?.as_str()?.parse().ok());
        let listens = listens.map_or(DEFAULT_PORT, |address: SocketAddr| address.port());
        document["public"] = value(host.clone().or_port(listens).to_string());
    }
    if let Some(site) = &wishes.site {
        site.write(&mut document, &wishes.instance);
    }
    if let Some(ca) = &wishes.client_ca {
        document["auth"] = value(AuthMode::Mtls.as_str());
        document["client-ca"] = value(ca.display().to_string());
    }
    let head = if is_new { HEAD } else { "" };
    Ok(format!("{head}{document}"))
}

/// Whether the port is free, or held by this server.
fn check_port(
    machine: &MachineFacts,
    config: &ServerConfig,
    port: u16,
    instance: &Instance,
    plan: &mut Plan,
) -> Result<()> {
    let is_wanted = |holder: &&PortHolder| holder.protocol == PortProtocol::Udp || config.tcp == Tcp::On;
    let unit = format!("{}.service", instance.unit());
    // Where no service runs it, somebody started it by hand, as setup said.
    let is_own = |holder: &PortHolder| match machine.has_service() {
        true => holder.unit.as_deref() == Some(unit.as_str()),
        false => holder.program.as_deref() == Some("mpvpn"),
    };
    let is_loopback = |holder: &PortHolder| holder.address.ip().is_loopback();
    let wanted = machine.port_holders.iter().filter(is_wanted);
    let Some(other) = wanted.clone().find(|holder| !is_own(holder) && !is_loopback(holder)) else {
        let state = if wanted.clone().any(is_own) { "is that of the server, which runs" } else { "is free" };
        plan.found.push(format!("port {port} {state}"));
        return Ok(());
    };
    let program = other.program.as_deref().unwrap_or("another program");
    let by = other.unit.as_ref().map(|unit| format!(" ({unit})")).unwrap_or_default();
    let why = format!("{program}{by} has {} port {port}", other.protocol.in_capitals());
    let other_port = if port == OTHER_PORT { OTHER_PORT + 1 } else { OTHER_PORT };
    let setup = format!("mpvpn setup server{}", instance.name_option());
    let next = match other.protocol {
        _ if program == "mpvpn" => {
            format!("end that process, or take another port: `{setup} --port {other_port}`")
        }
        PortProtocol::Tcp if port == DEFAULT_PORT => format!(
            "take another port: `{setup} --port {other_port}`; or let mpvpn have this one and show visitors the site of {program}: \
             make {program} listen at 127.0.0.1:8080 without TLS, and run `{setup} --site http://127.0.0.1:8080`"
        ),
        _ => format!("take another port: `{setup} --port {other_port}`; or end {program}"),
    };
    Err(Error::machine(why, next))
}

/// Says how clients reach the machine.
fn describe_address(machine: &MachineFacts, config: &ServerConfig, instance: &Instance, plan: &mut Plan) {
    if let Some(public) = &config.public {
        plan.found.push(format!("clients reach the server at {public}"));
        return;
    }
    let mut addresses = machine.interfaces.iter().flat_map(|interface| interface.addresses.iter().copied());
    match machine.source {
        Some(source) if is_public(source) => {
            plan.found.push(format!("clients reach the server at {source}, a public address"));
        }
        Some(source) => {
            let other = addresses.find(|address| is_public(*address));
            let hint = match other {
                Some(public) => format!("{public} of this machine is public: --host {public}"),
                None => "the console of your provider, or your router, shows the public address: --host ADDRESS".to_owned(),
            };
            plan.warnings.push(format!(
                "{source} is a private address: clients of the internet cannot reach it. If they come by another one, run `mpvpn \
                 setup server{} --host ADDRESS`; {hint}",
                instance.name_option()
            ));
        }
        None => plan.warnings.push(
            "this machine has no default route: clients beyond its own networks cannot reach it, nor can it reach the internet"
                .to_owned(),
        ),
    }
}

/// Says what visitors without credentials see.
fn describe_site(config: &ServerConfig) -> String {
    match &config.site.content {
        SiteContent::Nothing => "visitors without a token see no page: --site shows them one".to_owned(),
        SiteContent::Root(folder) => {
            format!("visitors without a token see the files in {}", folder.display())
        }
        SiteContent::Upstream(server) => format!("visitors without a token see the pages of http://{server}"),
    }
}

/// Says which networks the tunnel has, and whether the machine uses them otherwise.
fn check_subnets(machine: &MachineFacts, config: &ServerConfig, instance: &Instance, plan: &mut Plan) {
    let subnets = [Some(IpNet::V4(config.subnet)), config.subnet6.map(IpNet::V6)];
    let subnets: Vec<IpNet> = subnets.into_iter().flatten().collect();
    let shown: Vec<String> = subnets.iter().map(ToString::to_string).collect();
    plan.found.push(format!("addresses of the tunnel: {}", shown.join(" and ")));
    plan.found.push(match config.isolate {
        true => "clients do not reach each other: isolate = true".to_owned(),
        false => "clients reach each other: isolate = true in the file keeps them apart".to_owned(),
    });
    let used = subnets.iter().find_map(|subnet| {
        let others = machine.networks.iter().filter(|(interface, _)| *interface != config.tun_name);
        let (interface, network) = others.clone().find(|(_, network)| overlap(*network, *subnet))?;
        Some((subnet, network, interface))
    });
    if let Some((subnet, network, interface)) = used {
        plan.warnings.push(format!(
            "{subnet} overlaps {network} of {interface}: take another one with `mpvpn setup server{} --subnet CIDR`",
            instance.name_option()
        ));
    }
}

impl MachineFacts {
    /// All addresses at which a server listens.
    fn listen_addresses(&self) -> Vec<IpAddr> {
        let has_v6 = self.interfaces.iter().flat_map(|interface| &interface.addresses).any(IpAddr::is_ipv6);
        let v6 = has_v6.then_some(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED));
        [IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED)].into_iter().chain(v6).collect()
    }

    fn choose_subnet(&self) -> Result<Ipv4Net> {
        let [.., a, b, c, d] = self.random;
        let used: Vec<IpNet> = self.networks.iter().map(|(_, network)| *network).collect();
        free_subnet(&used, u32::from_be_bytes([a, b, c, d])).ok_or_else(|| {
            Error::machine(
                "the machine has routes to all networks that a tunnel could have",
                "name one that the machine does not need: --subnet CIDR",
            )
        })
    }

    /// A name of a TUN device that no interface and no other instance has: that of the instance, if it is
    /// short enough.
    fn free_tun_name(&self, instance: &str) -> String {
        let is_used = |name: &String| {
            self.interfaces.iter().any(|interface| interface.name == *name) || self.other_tuns.contains(name)
        };
        let own = Some(tun_name(instance));
        // As many numbers as there are instances and one more are enough.
        let count = self.interfaces.len() + self.other_tuns.len() + 1;
        let mut names = own.into_iter().chain((1..=count).map(|number| format!("mpvpn{number}")));
        names.find(|name| !is_used(name)).unwrap_or_else(|| mpvpn_config::TUN_NAME.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::machine::{Interface, UnitState},
        *,
    };
    use mpvpn_input::role::Role;
    use std::path::Path;

    /// A fresh VPS with systemd and the package.
    fn vps() -> MachineFacts {
        let interface = |name: &str, address: &str| Interface {
            name: name.into(),
            addresses: vec![address.parse().unwrap()],
            has_default_route: true,
        };
        MachineFacts {
            kernel: "6.1.0".into(),
            systemd: true,
            unit: UnitState { exists: true, ..UnitState::default() },
            interfaces: vec![interface("eth0", "203.0.113.7")],
            networks: vec![("eth0".into(), "203.0.113.0/24".parse().unwrap())],
            source: "203.0.113.7".parse().ok(),
            random: [0x12, 0x34, 0x56, 0x78, 0x9a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 9],
            program: "/usr/bin/mpvpn".into(),
            ..MachineFacts::default()
        }
    }

    fn wishes() -> ServerWishes {
        ServerWishes {
            instance: Instance::unnamed(Role::Server),
            host: None,
            port: None,
            subnet: None,
            site: None,
            client_ca: None,
            user: None,
        }
    }

    fn texts(plan: &Plan) -> Vec<String> {
        plan.steps.iter().map(|step| step.action.to_string()).collect()
    }

    fn written(plan: &Plan) -> &str {
        let mut texts = plan.steps.iter().filter_map(|step| match &step.action {
            Action::Write { text, audience: Audience::Service, .. } => Some(text.as_str()),
            _ => None,
        });
        texts.next().expect("a file is written")
    }

    #[test]
    fn groups_that_are_missing_are_made_before_the_file_that_one_of_them_reads() {
        let plan_of = |unit| {
            let facts = MachineFacts { missing_groups: vec!["mpvpn-admin"], unit, ..vps() };
            texts(&plan_server(&facts, &wishes()).unwrap())
        };
        let with_service = plan_of(vps().unit);
        assert_eq!(with_service[..2], ["groupadd --system mpvpn-admin", "write /etc/mpvpn/server.toml"]);
        let by_hand = plan_of(UnitState::default());
        assert!(by_hand.iter().all(|step| !step.contains("group")), "without a service all is root's");
    }

    #[test]
    fn a_fresh_vps_gets_a_file_a_user_and_a_service() {
        let plan = plan_server(&vps(), &wishes()).unwrap();
        assert_eq!(
            texts(&plan),
            [
                "write /etc/mpvpn/server.toml",
                "add the user default to /var/lib/mpvpn/users.toml",
                "systemctl enable --now mpvpn-server",
            ]
        );
        assert_eq!(
            written(&plan),
            format!(
                "{HEAD}listen = [\"0.0.0.0:443\"]\nsubnet = \"10.67.9.0/24\"\nsubnet6 = \"fd12:3456:789a::/64\"\n\
                 isolate = true\n"
            )
        );
        let undo: Vec<_> =
            plan.steps.iter().filter_map(|step| step.undo.as_ref()).map(ToString::to_string).collect();
        assert_eq!(
            undo,
            [
                "remove /etc/mpvpn/server.toml",
                "remove the user default from /var/lib/mpvpn/users.toml",
                "systemctl disable --now mpvpn-server",
            ]
        );
        let found = plan.found.join("\n");
        for part in [
            "port 443 is free",
            "203.0.113.7, a public address",
            "10.67.9.0/24",
            "no firewall drops packets",
            "clients do not reach each other: isolate = true",
        ] {
            assert!(found.contains(part), "{part}: {found}");
        }
        assert_eq!((plan.by_hand.len(), plan.warnings.len()), (0, 1), "{plan:?}");
    }

    #[test]
    fn a_server_that_somebody_made_without_isolation_keeps_its_file_and_is_told() {
        let machine = MachineFacts { file: Some("listen = \"0.0.0.0:443\"\n".into()), ..vps() };
        let plan = plan_server(&machine, &wishes()).unwrap();
        assert!(texts(&plan).iter().all(|step| !step.starts_with("write")), "{plan:?}");
        let found = plan.found.join("\n");
        assert!(found.contains("clients reach each other: isolate = true in the file"), "{found}");
    }

    /// The machine after a plan was carried out.
    fn after(mut machine: MachineFacts, plan: &Plan) -> MachineFacts {
        machine.file = Some(written(plan).to_owned());
        machine.users = vec!["default".into()];
        machine.unit = UnitState { exists: true, enabled: true, active: true };
        machine
    }

    #[test]
    fn the_second_time_nothing_has_to_change_and_then_only_what_differs() {
        let first = plan_server(&vps(), &wishes()).unwrap();
        let mut machine = after(vps(), &first);
        machine.random = [7; 16];
        machine.networks.push(("mpvpn0".into(), "10.67.9.0/24".parse().unwrap()));
        let holder = PortHolder {
            protocol: PortProtocol::Udp,
            address: "0.0.0.0:443".parse().unwrap(),
            program: Some("mpvpn".into()),
            unit: Some("mpvpn-server.service".into()),
        };
        machine.port_holders = vec![holder];
        let again = plan_server(&machine, &wishes()).unwrap();
        assert_eq!((texts(&again), &again.warnings), (vec![], &vec![]), "{again:?}");

        let host = "vpn.example".parse().ok();
        let changed = plan_server(&machine, &ServerWishes { host, ..wishes() }).unwrap();
        assert_eq!(texts(&changed), ["write /etc/mpvpn/server.toml", "systemctl reload mpvpn-server"]);
        let expected = format!("{}public = \"vpn.example:443\"\n", machine.file.as_ref().unwrap());
        assert_eq!(written(&changed), expected);
        assert_eq!(changed.after_undo, Some(Action::run(["systemctl", "restart", "mpvpn-server"])));

        let subnet = "10.70.0.0/24".parse().ok();
        let changed = plan_server(&machine, &ServerWishes { subnet, ..wishes() }).unwrap();
        assert_eq!(texts(&changed), ["write /etc/mpvpn/server.toml", "systemctl restart mpvpn-server"]);

        let user = Some("anna".into());
        let more = plan_server(&machine, &ServerWishes { user, ..wishes() }).unwrap();
        assert_eq!(texts(&more), ["add the user anna to /var/lib/mpvpn/users.toml"]);
    }

    #[test]
    fn a_host_without_a_port_is_reached_at_the_port_of_the_server() {
        let address = |text: &str| text.parse::<HostOption>().unwrap().or_port(4433).to_string();
        assert_eq!(address("vpn.example"), "vpn.example:4433");
        assert_eq!(address("vpn.example:443"), "vpn.example:443");
        assert_eq!(address("2001:db8::1"), "[2001:db8::1]:4433");
    }

    #[test]
    fn a_server_for_certificates_gets_no_user_with_a_token() {
        let file = Some("auth = \"mtls\"\nclient-ca = \"/etc/mpvpn/clients.crt\"\n".to_owned());
        let machine = MachineFacts { file, ..vps() };
        let plan = plan_server(&machine, &wishes()).unwrap();
        assert_eq!(texts(&plan), ["systemctl enable --now mpvpn-server"]);
        let named = plan_server(&machine, &ServerWishes { user: Some("anna".into()), ..wishes() }).unwrap();
        let added = Action::AddUser {
            name: "anna".into(),
            file: "/var/lib/mpvpn/users.toml".into(),
            credential: UserCredential::Certificate,
        };
        assert_eq!(named.steps[0].action, added);
    }

    #[test]
    fn certificates_in_place_of_tokens_are_one_option_and_stay_the_next_time() {
        let client_ca = Some("/etc/mpvpn/clients.crt".into());
        let plan = plan_server(&vps(), &ServerWishes { client_ca, ..wishes() }).unwrap();
        assert_eq!(texts(&plan), ["write /etc/mpvpn/server.toml", "systemctl enable --now mpvpn-server"]);
        let text = written(&plan);
        assert!(text.ends_with("auth = \"mtls\"\nclient-ca = \"/etc/mpvpn/clients.crt\"\n"), "{text}");
        let again = plan_server(&after(vps(), &plan), &wishes()).unwrap();
        assert_eq!(texts(&again), Vec::<String>::new());
    }

    #[test]
    fn another_port_changes_the_file_and_counts_for_the_host() {
        let machine = vps();
        let host = "203.0.113.9".parse().ok();
        let plan = plan_server(&machine, &ServerWishes { port: Some(4433), host, ..wishes() }).unwrap();
        let text = written(&plan);
        assert!(text.contains("0.0.0.0:4433") && text.contains("public = \"203.0.113.9:4433\""), "{text}");
        let mut machine = after(machine, &plan);
        machine.file = Some(text.replace("0.0.0.0:4433", "203.0.113.7:4433"));
        let again = plan_server(&machine, &ServerWishes { port: Some(4433), ..wishes() }).unwrap();
        assert_eq!(texts(&again), Vec::<String>::new(), "addresses that somebody chose stay");
    }

    #[test]
    fn a_port_that_another_program_has_is_said_with_the_ways_out() {
        let holder = |protocol, program: &str, unit: Option<&str>| PortHolder {
            protocol,
            address: "0.0.0.0:443".parse().unwrap(),
            program: Some(program.into()),
            unit: unit.map(str::to_owned),
        };
        let refused = |holder| {
            let machine = MachineFacts { port_holders: vec![holder], ..vps() };
            let error = plan_server(&machine, &wishes()).unwrap_err();
            assert!(!error.is_usage());
            format!("{error}: {}", error.next_step())
        };
        let text = refused(holder(PortProtocol::Tcp, "nginx", Some("nginx.service")));
        for part in ["nginx (nginx.service) has TCP port 443", "--port 4433", "--site http://127.0.0.1:8080"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = refused(holder(PortProtocol::Udp, "mpvpn", None));
        assert!(text.contains("mpvpn has UDP port 443: end that process"), "{text}");
        // At a loopback address it is in nobody's way.
        let mut far = holder(PortProtocol::Tcp, "nginx", None);
        far.address = "127.0.0.1:443".parse().unwrap();
        assert!(plan_server(&MachineFacts { port_holders: vec![far], ..vps() }, &wishes()).is_ok());
        // Without TCP only UDP matters.
        let machine = MachineFacts {
            port_holders: vec![holder(PortProtocol::Tcp, "nginx", None)],
            file: Some("tcp = \"off\"\n".into()),
            ..vps()
        };
        assert!(plan_server(&machine, &wishes()).is_ok());
    }

    #[test]
    fn visitors_see_the_site_that_is_wished_and_another_one_after_another_wish() {
        let mut machine = vps();
        let mut site_of = |wish: &str, steps: &[&str]| {
            let site = Some(wish.parse().unwrap());
            let plan = plan_server(&machine, &ServerWishes { site, ..wishes() }).unwrap();
            for step in steps {
                assert!(
                    texts(&plan).iter().any(|text| text == step),
                    "{wish}: no {step} in {:?}",
                    texts(&plan)
                );
            }
            machine.file = Some(written(&plan).to_owned());
            machine.page = (wish == "page").then(|| "mine".into()).or(machine.page.take());
            let said = plan.found.iter().find(|line| line.starts_with("visitors")).unwrap();
            let config =
                ServerConfig::parse(machine.file.as_ref().unwrap(), Path::new("server.toml")).unwrap();
            (config.site, said.clone())
        };
        let (site, said) = site_of("page", &["write /etc/mpvpn/site.d/index.html"]);
        assert_eq!(site.folder(), Some(Path::new("/etc/mpvpn/site.d")));
        assert!(site.hide && said.contains("the files in /etc/mpvpn/site.d"), "{said}");
        let (site, said) = site_of("http://127.0.0.1:8080", &[]);
        assert_eq!(site.content, SiteContent::Upstream("127.0.0.1:8080".into()));
        assert!(said.contains("http://127.0.0.1:8080"), "{said}");
        assert_eq!(site_of("/usr", &[]).0.folder(), Some(Path::new("/usr")));
        let (site, said) = site_of("none", &[]);
        assert_eq!(site, mpvpn_config::Site::default());
        assert!(said.contains("--site"), "{said}");
        // A page that is there stays as it is.
        let plan = plan_server(&machine, &ServerWishes { site: Some(SiteWish::Page), ..wishes() }).unwrap();
        assert!(!texts(&plan).iter().any(|text| text.contains("index.html")), "{:?}", texts(&plan));
        let bad = ServerWishes { site: Some(SiteWish::Upstream("https://x/y".into())), ..wishes() };
        assert!(plan_server(&machine, &bad).is_err());
    }

    #[test]
    fn a_machine_behind_translation_is_told_so() {
        let machine = MachineFacts { source: "10.0.0.5".parse().ok(), ..vps() };
        let plan = plan_server(&machine, &wishes()).unwrap();
        let warnings = plan.warnings.join("\n");
        assert!(
            warnings.contains("10.0.0.5 is a private address") && warnings.contains("--host 203.0.113.7"),
            "{warnings}"
        );
        let known =
            plan_server(&machine, &ServerWishes { host: "203.0.113.9".parse().ok(), ..wishes() }).unwrap();
        assert!(!known.warnings.join("\n").contains("private"), "{known:?}");
    }

    #[test]
    fn what_the_machine_lacks_is_said() {
        let without_tun = MachineFacts { no_tun: Some("No such file".into()), ..vps() };
        let without_nft = MachineFacts { no_nft: Some("nft is not installed".into()), ..vps() };
        for (machine, part) in [(without_tun, "turn on TUN"), (without_nft, "apt install nftables")] {
            let error = plan_server(&machine, &wishes()).unwrap_err();
            assert!(error.next_step().contains(part), "{}", error.next_step());
        }
        for (machine, part) in [
            (MachineFacts { systemd: false, ..vps() }, "start it by `mpvpn server`"),
            (MachineFacts { unit: UnitState::default(), ..vps() }, "no unit mpvpn-server.service"),
        ] {
            let plan = plan_server(&machine, &wishes()).unwrap();
            assert!(plan.by_hand[0].contains(part), "{:?}", plan.by_hand);
            assert_eq!(plan.steps.len(), 2, "{:?}", plan.steps);
        }
        let broken = MachineFacts { file: Some("subnet = 7\n".into()), ..vps() };
        let error = plan_server(&broken, &wishes()).unwrap_err().to_string();
        assert!(error.contains("/etc/mpvpn/server.toml, line 1"), "{error}");
    }

    #[test]
    fn chains_that_forget_are_filled_at_each_start() {
        let chain = serde_json::json!({"chain": {"family": "inet", "table": "filter", "name": "input", "hook": "input", "type": "filter", "policy": "drop"}});
        let mut machine = vps();
        machine.firewall.ruleset = serde_json::json!({"nftables": [chain]});
        let plan = plan_server(&machine, &wishes()).unwrap();
        let steps = texts(&plan);
        assert_eq!(
            steps[2..],
            [
                r#"nft add rule inet filter input 'udp dport 443 accept' comment '"mpvpn-server"'"#,
                r#"nft add rule inet filter input 'tcp dport 443 accept' comment '"mpvpn-server"'"#,
                r#"nft add rule inet filter input 'iifname "mpvpn0" udp dport 53 accept' comment '"mpvpn-server"'"#,
                r#"nft add rule inet filter input 'iifname "mpvpn0" tcp dport 53 accept' comment '"mpvpn-server"'"#,
                "write /etc/systemd/system/mpvpn-server.service.d/mpvpn-firewall.conf",
                "systemctl daemon-reload",
                "systemctl enable --now mpvpn-server",
            ]
        );
        assert!(plan.text().contains("| ExecStartPre=-+/usr/bin/mpvpn setup firewall\n"), "{}", plan.text());
    }

    #[test]
    fn a_second_server_has_a_device_networks_and_a_folder_of_its_own() {
        let mut machine = vps();
        machine.other_tuns = vec!["mpvpn0".into(), "mpvpn-work".into(), "mpvpn1".into()];
        let instance = Instance::new(Role::Server, Some("work".into())).unwrap();
        let plan = plan_server(&machine, &ServerWishes { instance, port: Some(4433), ..wishes() }).unwrap();
        let text = written(&plan);
        for part in ["tun-name = \"mpvpn2\"", "name = \"work\"", "state-dir = \"/var/lib/mpvpn/work\""] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(texts(&plan)[1], "add the user default to /var/lib/mpvpn/work/users.toml");
    }

    #[test]
    fn what_has_to_pass_follows_the_configuration() {
        let openings_of = |text: &str| openings(&ServerConfig::parse(text, "f".as_ref()).unwrap());
        let usual = openings_of("");
        assert_eq!(usual.ports, [(PortProtocol::Udp, 443), (PortProtocol::Tcp, 443)]);
        assert!(usual.resolver && !usual.inbound);
        let other = openings_of(
            "listen = [\"0.0.0.0:4433\", \"[::]:4433\"]\ntcp = \"off\"\ndns = \"off\"\nnat = \"off\"\n",
        );
        assert_eq!(other.ports, [(PortProtocol::Udp, 4433)]);
        assert!(!other.resolver && other.inbound);
        assert_eq!(openings_of("relay-only = true\n").device, None);
    }
}
