//! What a server or a client was asked to do.
//!
//! In: the options of the command line ([`ServerOptions`], [`ClientOptions`]) and a TOML file with the
//! same names as keys. Out: [`ServerConfig`] and [`ClientConfig`], where everything is filled in and
//! checked. The command line wins over the file, the file over the defaults.

mod app;
mod classes;
mod dns;
mod file;
mod lane;
mod limits;
mod links;
mod options;
mod pipes;
mod proxy;
mod reload;
pub(crate) mod rules;
pub(crate) mod schema;
mod service;
mod shards;
mod site;
mod values;
mod via;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_types::Transport;

pub use classes::{
    ClassConfig, ClassTables, Classification, KernelMatch, Mark, MatchRule, PacketDescription, RuleOrigin,
    SteeringRule, render_classes, rules_of,
};
pub use dns::Dns;
pub use lane::LaneRule;
pub use limits::LimitRule;
pub use links::{Limit, LinkChange, LinkConfig, is_match};
pub use mpvpn_path::Scheduler;
pub use mpvpn_types::{CongestionControl, FlowMode};
pub use options::{ClientOptions, ServerOptions};
pub use pipes::Pipes;
pub use proxy::Proxies;
pub use reload::{ConfigSource, ReloadReport};
pub use service::{Rights, ServerMode};
pub use shards::Shards;
pub use site::{Site, SiteContent};
pub use values::{AuthMode, LogLevel, Nat, Routes, ServerAddr, SharedNetwork, Subnet6, Tcp, is_link_name};
pub use via::{ProxyCredentials, ViaOption, ViaProxy};

use classes::ClassContext;

use crate::{Error, Result, access::AccessRule, api, auth::Token, files, identity::Fingerprint};

pub use crate::status::Role;

/// Where a server looks for its configuration unless `--config` names another file.
pub const SERVER_FILE: &str = "/etc/mpvpn/server.toml";
/// Where a client looks for its configuration unless `--config` names another file.
pub const CLIENT_FILE: &str = "/etc/mpvpn/client.toml";
/// All networks.
const ALL_NETWORKS: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];
/// Where a server keeps its certificate, its users and the first client's token, and a client what it has
/// used of its quotas.
pub const STATE_DIR: &str = "/var/lib/mpvpn";
/// The name of the TUN device unless `--tun-name` gives another.
pub const TUN_NAME: &str = "mpvpn0";

/// What a server listens at unless told otherwise.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT);
/// The addresses that it gives to clients.
const DEFAULT_SUBNET: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 24);
const DEFAULT_SUBNET6: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x6d70, 0x766e, 0, 0, 0, 0, 0), 64);
/// The port of a server unless `--listen` gives another.
const DEFAULT_PORT: u16 = 443;

/// Addresses that a server gives out when nobody says how many clients it may have.
const DEFAULT_MAX_CLIENTS: u32 = 4096;

/// TCP connections that a server has open for its clients unless told otherwise.
const DEFAULT_MAX_RELAYS: u32 = 32_768;
/// Those that it has open for one user.
const DEFAULT_MAX_USER_RELAYS: u32 = 8192;

/// Everything a server needs to know, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Addresses to listen on, at least one.
    pub listen: Vec<SocketAddr>,
    /// Whether that is for TCP, too.
    pub tcp: Tcp,
    /// Whether clients of the first drafts of MASQUE are served there: TLS without ALPN, CONNECT-UDP by HTTP/1.1.
    pub old_clients: bool,
    /// What it does for its clients.
    pub service: ServerMode,
    /// The certificate (PEM, leaf first) and its private key (PEM); without it one is made in `state_dir`.
    pub cert: Option<CertFiles>,
    /// Certificates for other names than those of the first, which who asks for an unknown name gets.
    pub more_certs: Vec<CertFiles>,
    /// Whose TCP connections begin with the address of the client (PROXY protocol).
    pub proxy_protocol_from: Vec<IpNet>,
    /// What those see who have no credentials.
    pub site: Site,
    /// IPv4 addresses of the tunnel; the server takes the first host.
    pub subnet: Ipv4Net,
    /// IPv6 addresses of the tunnel; the server takes the first host.
    pub subnet6: Option<Ipv6Net>,
    /// Name of the TUN device.
    pub tun_name: String,
    /// How clients prove who they are.
    pub auth: AuthMode,
    /// The file with the users; without it `users.toml` in `state_dir`, made when it is missing.
    pub users: Option<PathBuf>,
    /// Folder for what has to survive a restart.
    pub state_dir: PathBuf,
    /// Whether clients' packets leave with the server's address.
    pub nat: Nat,
    /// Where clients' packets may go, beside the tunnel's own networks: what clients are told. In order, without overlaps.
    pub routes: Vec<IpNet>,
    /// Sessions at once, at most; never more than `subnet` has addresses.
    pub max_clients: u32,
    /// Resolvers that it suggests to clients, at most three, the best first.
    pub dns: Vec<IpAddr>,
    /// Where clients may connect to through the server's own TCP connections; the first rule that fits counts.
    pub access: Vec<AccessRule>,
    /// What the classes of users may not exceed; the first that fits a user counts.
    pub limits: Vec<LimitRule>,
    /// TCP connections that the server has open for its clients at once, at most.
    pub max_relays: u32,
    /// Those that it has open for one user, at most; never more than `max_relays`.
    pub max_user_relays: u32,
    /// Threads that carry packets.
    pub shards: Shards,
    /// The instance's name.
    pub name: String,
    /// Unix socket of the local API.
    pub api_socket: PathBuf,
    /// TCP address where metrics are offered.
    pub metrics: Option<SocketAddr>,
    /// Folder for qlog files, if they are wanted.
    pub qlog: Option<PathBuf>,
    /// How much is logged.
    pub log_level: LogLevel,
}

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertFiles {
    /// PEM file with the certificate, leaf first.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// Everything a client needs to know, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// The server's name or address, and UDP port.
    pub server: ServerAddr,
    /// How the server's certificate is judged.
    pub trust: Trust,
    /// The bearer token, if given directly: see [`ClientConfig::load_token`].
    pub token: Option<Token>,
    /// The file with the bearer token: see [`ClientConfig::load_token`].
    pub token_file: Option<PathBuf>,
    /// Interfaces to use, or patterns of their names, each once, or the one word `auto`.
    pub paths: Vec<String>,
    /// How links are used; the first whose name fits counts.
    pub links: Vec<LinkConfig>,
    /// The classes of traffic in the order of their numbers: default, critical and bulk are always there.
    pub classes: Vec<ClassConfig>,
    /// What belongs to them; the first that fits counts. Those that every client has come last.
    pub class_rules: Vec<MatchRule>,
    /// What the kernel steers into the TUN devices of classes, in the order in which it tries them.
    pub class_steering: Vec<SteeringRule>,
    /// The TUN devices of classes that its file asks for, and a proxy does not have.
    pub ignored_class_tuns: Vec<String>,
    /// Folder for what has to survive a restart: how much of the quotas is used.
    pub state_dir: PathBuf,
    /// Name of the TUN device.
    pub tun_name: String,
    /// How packets are spread over the paths.
    pub scheduler: Scheduler,
    /// The congestion controller of every path.
    pub cc: CongestionControl,
    /// The proxy through which the server is reached by TCP.
    pub via: Option<ViaProxy>,
    /// How TCP connections travel where no rule says anything.
    pub lane: FlowMode,
    /// How they travel to some destinations; the first that fits counts.
    pub lane_rules: Vec<LaneRule>,
    /// Which destinations go into the tunnel.
    pub routes: Routes,
    /// Which resolvers this machine asks while the tunnel is up.
    pub dns: Dns,
    /// Interfaces or networks behind this machine that may use the tunnel; each parses as a [`SharedNetwork`].
    pub share: Vec<String>,
    /// Where it is a proxy for apps; if anywhere, it has no TUN.
    pub proxies: Proxies,
    /// Threads that carry packets, each with a connection of its own.
    pub shards: Shards,
    /// The instance's name.
    pub name: String,
    /// Unix socket of the local API.
    pub api_socket: PathBuf,
    /// TCP address where metrics are offered.
    pub metrics: Option<SocketAddr>,
    /// Folder for qlog files, if they are wanted.
    pub qlog: Option<PathBuf>,
    /// How much is logged.
    pub log_level: LogLevel,
}

/// How a client judges the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The certificate is in this PEM file, or a CA in it signed it for the name asked for.
    Ca(PathBuf),
    /// The certificate's SHA-256 is this.
    Pin(Fingerprint),
    /// Any certificate.
    Insecure,
}

impl Default for ServerConfig {
    /// A server of root's that was told nothing.
    fn default() -> Self {
        Self::resolve(ServerOptions::default(), Rights::ALL)
            .expect("the defaults do not contradict each other")
    }
}

impl ServerConfig {
    /// The options `cli` over those in `file`, checked. Without one they are over those in [`SERVER_FILE`] if it is
    /// there, and this is no ordinary user's process.
    pub fn load(file: Option<&Path>, cli: ServerOptions, rights: Rights) -> Result<Self> {
        service::load(file, cli, rights)
    }

    /// Fills in the defaults and checks what belongs together.
    pub fn resolve(mut options: ServerOptions, rights: Rights) -> Result<Self> {
        let service = ServerMode::of(&options, rights);
        if !service.has_tun() {
            options = service::without_tun(options, rights)?;
        }
        let subnet = options.subnet.unwrap_or(DEFAULT_SUBNET);
        let subnet6 = options.subnet6.map_or(Some(DEFAULT_SUBNET6), |given| given.0);
        let tun_name = options.tun_name.unwrap_or_else(|| TUN_NAME.into());
        let name = options.name.unwrap_or_else(|| tun_name.clone());
        let listen = if options.listen.is_empty() { vec![DEFAULT_LISTEN] } else { options.listen };
        if let Some(twice) = first_repeated(&listen) {
            return Err(Error::usage(format!("--listen {twice} is given twice"), "give every address once"));
        }
        if options.users.is_some() && options.auth == Some(AuthMode::None) {
            return Err(Error::usage(
                "--users and --auth none contradict each other",
                "leave out one of the two",
            ));
        }
        let (max_relays, max_user_relays) = max_relays(options.max_relays, options.max_user_relays)?;
        Ok(Self {
            listen,
            tcp: options.tcp.unwrap_or_default(),
            old_clients: options.old_clients,
            service,
            cert: cert_files(options.cert, options.key)?,
            more_certs: options.certificate,
            proxy_protocol_from: options.proxy_protocol_from,
            site: options.site.unwrap_or_default(),
            max_clients: max_clients(options.max_clients, subnet)?,
            access: options.access,
            limits: options.limit,
            max_relays,
            max_user_relays,
            shards: options.shards.unwrap_or_default(),
            subnet,
            subnet6,
            tun_name,
            auth: options.auth.unwrap_or_default(),
            users: options.users,
            state_dir: options.state_dir.unwrap_or_else(|| STATE_DIR.into()),
            nat: options.nat.unwrap_or_default(),
            routes: routes(&options.routes, subnet6)?,
            dns: dns::suggested_servers(options.dns)?,
            api_socket: options.api_socket.unwrap_or_else(|| api::default_socket(Role::Server, &name)),
            name,
            metrics: options.metrics,
            qlog: options.qlog,
            log_level: options.log_level.unwrap_or_default(),
        })
    }
}

impl ClientConfig {
    /// A client of `server` with the defaults for everything else.
    pub fn new(server: ServerAddr, trust: Trust) -> Self {
        let options = ClientOptions { server: Some(server), insecure: true, ..ClientOptions::default() };
        Self { trust, ..Self::resolve(options).expect("the defaults do not contradict each other") }
    }

    /// The options `cli` over those in `file` (by default [`CLIENT_FILE`], if it is there), checked.
    pub fn load(file: Option<&Path>, cli: ClientOptions) -> Result<Self> {
        if !cli.socks5.is_empty() || !cli.http.is_empty() {
            return Err(Error::usage(
                "--socks5 and --http are options of `mpvpn proxy`, not of `mpvpn client`",
                "use `mpvpn proxy`, or leave them out",
            ));
        }
        let from_file: ClientOptions = file::load(file, Path::new(CLIENT_FILE))?;
        let options = cli.or_fallback(from_file);
        let via = via::or_from_environment(options.via, options.server.as_ref());
        Self::resolve(ClientOptions { via, ..options })
    }

    /// The same for who wants to know about classes only: no server need be named.
    pub fn load_without_server(file: Option<&Path>) -> Result<Self> {
        let mut options: ClientOptions = file::load(file, Path::new(CLIENT_FILE))?;
        options.server.get_or_insert(ServerAddr { host: String::new(), port: DEFAULT_PORT });
        options.insecure |= options.ca.is_none() && options.pin.is_none();
        Self::resolve(options)
    }

    /// Fills in the defaults and checks what belongs together.
    pub fn resolve(options: ClientOptions) -> Result<Self> {
        let Some(server) = options.server else {
            return Err(Error::usage("no server is given", "add --server HOST:PORT"));
        };
        let trust = trust(options.ca, options.pin, options.insecure)?;
        if options.token.is_some() && options.token_file.is_some() {
            return Err(Error::usage(
                "--token and --token-file are given together",
                "leave out one of the two",
            ));
        }
        let shards = options.shards.unwrap_or_default();
        let streams = options.lane == Some(FlowMode::Stream)
            || options.lane_rule.iter().any(|rule| rule.streams)
            || options.class.takes_streams();
        if streams && shards.count(1) > 1 {
            return Err(Error::usage(
                "TCP connections can travel as streams only with --shards 1",
                "leave out --shards, or use --lane datagram and no [[lane-rule]] or [[class]] that says stream",
            ));
        }
        let tun_name = options.tun_name.unwrap_or_else(|| TUN_NAME.into());
        let name = options.name.unwrap_or_else(|| tun_name.clone());
        let share = options.share;
        if let Some(twice) = first_repeated(&share) {
            return Err(Error::usage(format!("--share {twice} is given twice"), "give every network once"));
        }
        if share.contains(&SharedNetwork::Interface(tun_name.clone())) {
            return Err(Error::usage(
                format!("--share {tun_name} is the TUN device of the tunnel itself"),
                "name the interface or the network of the machines behind this one",
            ));
        }
        let paths = paths(options.path, &tun_name)?;
        let links = links(options.link, options.pipes, options.transport);
        let context = ClassContext { paths: &paths, links: &links, tun_name: &tun_name, share: &share };
        let classes = options.class.resolve(&context)?;
        Ok(Self {
            server,
            trust,
            token: options.token,
            token_file: options.token_file,
            paths,
            links,
            classes: classes.list,
            class_rules: classes.rules,
            class_steering: classes.steering,
            ignored_class_tuns: Vec::new(),
            state_dir: options.state_dir.unwrap_or_else(|| STATE_DIR.into()),
            scheduler: options.scheduler.unwrap_or_default(),
            cc: options.cc.unwrap_or_default(),
            via: match options.via {
                Some(ViaOption::Proxy(via)) => Some(via),
                Some(ViaOption::None) | None => None,
            },
            lane: options.lane.unwrap_or_default(),
            lane_rules: options.lane_rule,
            routes: options.routes.unwrap_or_default(),
            dns: dns::client_dns(options.dns)?,
            share: share.iter().map(ToString::to_string).collect(),
            shards,
            api_socket: options.api_socket.unwrap_or_else(|| api::default_socket(Role::Client, &name)),
            tun_name,
            name,
            metrics: options.metrics,
            qlog: options.qlog,
            log_level: options.log_level.unwrap_or_default(),
            proxies: Proxies::default(),
        })
    }

    /// The token to show to the server, read from its file if it is in one.
    pub fn load_token(&self) -> Result<Option<Token>> {
        let Some(file) = &self.token_file else { return Ok(self.token.clone()) };
        let bytes = files::read_secret(file)?;
        let token = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok());
        token.map(Some).ok_or_else(|| Error::Content {
            path: file.clone(),
            expected: "one bearer token on one line",
            found: "something else".into(),
        })
    }
}

fn cert_files(cert: Option<PathBuf>, key: Option<PathBuf>) -> Result<Option<CertFiles>> {
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(CertFiles { cert, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(Error::usage("--cert is given without --key", "add --key PEM")),
        (None, Some(_)) => Err(Error::usage("--key is given without --cert", "add --cert PEM")),
    }
}

/// Every client needs an IPv4 address: all hosts of the subnet but the server.
fn max_clients(given: Option<u32>, subnet: Ipv4Net) -> Result<u32> {
    let hosts = u32::MAX >> subnet.prefix_len();
    let available = hosts.saturating_sub(2);
    match given {
        None => Ok(available.min(DEFAULT_MAX_CLIENTS)),
        Some(0) => Err(Error::usage("--max-clients 0 would let no client connect", "give at least 1")),
        Some(given) if given > available => Err(Error::usage(
            format!(
                "--max-clients {given} is more than {available}, the number of addresses for clients in {subnet}"
            ),
            "give a larger --subnet or fewer clients",
        )),
        Some(given) => Ok(given),
    }
}

/// Where clients' packets may go: everywhere unless networks are given, which are put in order and merged.
fn routes(given: &[IpNet], subnet6: Option<Ipv6Net>) -> Result<Vec<IpNet>> {
    if given.is_empty() {
        return Ok(ALL_NETWORKS.into());
    }
    match given.iter().find(|net| matches!(net, IpNet::V6(_))) {
        Some(net) if subnet6.is_none() => Err(Error::usage(
            format!(
                "--routes {net} is an IPv6 network, but with --subnet6 none clients have no IPv6 addresses"
            ),
            "leave out one of the two",
        )),
        _ => Ok(IpNet::aggregate(&given.to_vec())),
    }
}

/// Those of all clients, and those of one.
fn max_relays(all: Option<u32>, user: Option<u32>) -> Result<(u32, u32)> {
    for (option, given) in [("max-relays", all), ("max-user-relays", user)] {
        if given == Some(0) {
            return Err(Error::usage(
                format!("--{option} 0 would relay nothing"),
                "give at least 1, or forbid all destinations with a table [[access]] in the file",
            ));
        }
    }
    let all = all.unwrap_or(DEFAULT_MAX_RELAYS);
    match user {
        Some(user) if user > all => Err(Error::usage(
            format!(
                "--max-user-relays {user} is more than --max-relays {all}, the limit for all users together"
            ),
            "give a larger --max-relays or a smaller --max-user-relays",
        )),
        Some(user) => Ok((all, user)),
        None => Ok((all, all.min(DEFAULT_MAX_USER_RELAYS))),
    }
}

fn trust(ca: Option<PathBuf>, pin: Option<Fingerprint>, insecure: bool) -> Result<Trust> {
    let next = "give one of --ca PEM, --pin SHA256 (the server prints it) and, for tests only, --insecure";
    match (ca, pin, insecure) {
        (Some(ca), None, false) => Ok(Trust::Ca(ca)),
        (None, Some(pin), false) => Ok(Trust::Pin(pin)),
        (None, None, true) => Ok(Trust::Insecure),
        (None, None, false) => Err(Error::usage("no option says how to verify the server", next)),
        (ca, pin, insecure) => {
            let given = [("--ca", ca.is_some()), ("--pin", pin.is_some()), ("--insecure", insecure)];
            let given: Vec<_> = given.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
            Err(Error::usage(format!("{} contradict each other", given.join(" and ")), next))
        }
    }
}

fn paths(given: Vec<String>, tun_name: &str) -> Result<Vec<String>> {
    if given.is_empty() {
        return Ok(vec!["auto".into()]);
    }
    if let Some(twice) = first_repeated(&given) {
        return Err(Error::usage(format!("--path {twice} is given twice"), "give every interface once"));
    }
    if given.len() > 1 && given.iter().any(|path| path == "auto") {
        return Err(Error::usage(
            "--path auto is given together with interfaces",
            "give either auto or the interfaces",
        ));
    }
    if given.iter().any(|path| path == tun_name) {
        return Err(Error::usage(
            format!("--path {tun_name} is the TUN device of the tunnel itself"),
            "give the interfaces that lead to the server",
        ));
    }
    Ok(given)
}

/// Links of which nothing else is said have so many paths, in this.
fn links(mut links: Vec<LinkConfig>, pipes: Option<Pipes>, transport: Option<Transport>) -> Vec<LinkConfig> {
    if pipes.is_some() || transport.is_some() {
        for link in &mut links {
            link.pipes = link.pipes.or(pipes);
            link.transport = link.transport.or(transport);
        }
        links.push(LinkConfig { pipes, transport, ..LinkConfig::default() });
    }
    links
}

fn first_repeated<T: PartialEq>(items: &[T]) -> Option<&T> {
    items.iter().enumerate().find(|(at, item)| items[..*at].contains(item)).map(|(_, item)| item)
}

#[cfg(test)]
mod tests;
