//! Options, filled in with defaults and checked.
//!
//! In: [`ServerOptions`], [`ClientOptions`]. Out: [`ServerConfig`], [`ClientConfig`]. Always holds:
//! contradictions are refused.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_path::Scheduler;
use mpvpn_status::pipes::Pipes;
use mpvpn_types::{ByteSize, ClassId, CongestionControl, FlowMode, Transport};

use mpvpn_identity::trust::Trust;
use mpvpn_input::values::ServerAddr;

use mpvpn_input::{
    dirs::STATE_DIR,
    role::{Role, default_socket},
};

use mpvpn_access::AccessRule;
use mpvpn_identity::{cert_files::CertFiles, token::Token};
use mpvpn_input::{Error, Result, files};

use crate::{
    acme::Acme,
    announce::SiteConfig,
    bypass::BypassRule,
    classes::{ClassConfig, ClassContext, MatchRule, SteeringRule},
    dashboard::ClientDashboard,
    defaults::*,
    dns::{self, Dns, ServerDns},
    dns_names::DnsNames,
    file,
    forward::{self, Forward},
    lane::LaneRule,
    limits::LimitRule,
    links::LinkConfig,
    options::{ClientOptions, ServerOptions},
    proxy::Proxies,
    route::RouteRule,
    servers::{self, Access, Choose, Return, Server, WhenDown},
    service::{self, Rights, ServerMode},
    shards::Shards,
    site::{Site, cert_files},
    via::{self, ViaOption, ViaProxy},
    words::{AuthMode, Confine, LogLevel, Nat, ReloadMode, Routes, SharedNetwork, Tcp},
};

/// The complete, checked configuration of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Addresses to listen on, at least one.
    pub listen: Vec<SocketAddr>,
    /// Whether the server listens on TCP at these addresses, too.
    pub tcp: Tcp,
    /// Whether TCP accepts clients of early MASQUE drafts: TLS without ALPN, CONNECT-UDP in HTTP/1.1.
    pub old_clients: bool,
    /// Whether the server carries packets, or relays only.
    pub service: ServerMode,
    /// The certificate (PEM, leaf first) and its private key (PEM); `None`: a self-signed one in
    /// `state_dir`.
    pub cert: Option<CertFiles>,
    /// Further certificates. A client gets the one for the server name that it asks for (SNI), else `cert`.
    pub more_certs: Vec<CertFiles>,
    /// Certificates that a CA issues by ACME.
    pub acme: Option<Acme>,
    /// Networks of load balancers, whose TCP connections begin with a PROXY protocol header.
    pub proxy_protocol_from: Vec<IpNet>,
    /// The web site for visitors without credentials.
    pub site: Site,
    /// IPv4 addresses of the tunnel; the server takes the first host.
    pub subnet: Ipv4Net,
    /// IPv6 addresses of the tunnel; the server takes the first host.
    pub subnet6: Option<Ipv6Net>,
    /// Name of the TUN device.
    pub tun_name: String,
    /// How clients prove who they are.
    pub auth: AuthMode,
    /// The CAs that sign certificates of clients (PEM), if these are what counts.
    pub client_ca: Option<PathBuf>,
    /// The certificates of clients that were revoked (PEM).
    pub crl: Option<PathBuf>,
    /// The file with the users; `None`: `users.toml` in `state_dir`, created if it is missing.
    pub users: Option<PathBuf>,
    /// Where clients reach the server; `None`: see
    /// `guess_address` of the crate `users`.
    pub public: Option<ServerAddr>,
    /// Folder for data that survive a restart.
    pub state_dir: PathBuf,
    /// Whether the server translates clients' source addresses to its own.
    pub nat: Nat,
    /// Networks to which clients' packets are carried, beside the tunnel's own; advertised to clients.
    /// Sorted, without overlaps.
    pub routes: Vec<IpNet>,
    /// Limit of sessions at once; not above the number of addresses in `subnet`.
    pub max_clients: u32,
    /// Resolvers suggested to clients.
    pub dns: ServerDns,
    /// The names that clients are answered.
    pub dns_names: DnsNames,
    /// Ports that lead to clients, or to hosts behind them.
    pub forwards: Vec<Forward>,
    /// Whether clients are kept from each other.
    pub isolate: bool,
    /// Rules for the destinations of packets and relayed connections; the first that matches decides.
    pub access: Vec<AccessRule>,
    /// Limits of users' sessions and classes of traffic; the first that names a user counts.
    pub limits: Vec<LimitRule>,
    /// Limit of TCP connections and UDP flows relayed at once for all clients.
    pub max_relays: u32,
    /// Limit of TCP connections and UDP flows relayed at once for one user; not above `max_relays`.
    pub max_user_relays: u32,
    /// Memory that the server may use; `None`: that of its machine or control group.
    pub max_memory: Option<ByteSize>,
    /// Threads that carry packets.
    pub shards: Shards,
    /// The instance's name.
    pub name: String,
    /// Unix socket of the local API.
    pub api_socket: PathBuf,
    /// TCP address at which metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Number of users that have metrics of their own.
    pub metrics_users: u32,
    /// TCP address of the dashboard; with TLS unless it is one of the loopback.
    pub dashboard: Option<SocketAddr>,
    /// Whether measurements of clients are answered.
    pub measure: bool,
    /// Folder for qlog files; `None`: none are written.
    pub qlog: Option<PathBuf>,
    /// Whether the process gives up the rights that it does not need.
    pub confine: Confine,
    /// When the file is read again.
    pub reload: ReloadMode,
    /// How much is logged.
    pub log_level: LogLevel,
}

/// The complete, checked configuration of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// The servers, at least one.
    pub servers: Vec<Server>,
    /// Which of them is preferred.
    pub choose: Choose,
    /// When the client returns to a preferred one.
    pub return_when: Return,
    /// The way of packets while none answers.
    pub when_down: WhenDown,
    /// The name or address, and UDP port, of the server in use: see [`ClientConfig::use_server`].
    pub server: ServerAddr,
    /// How the server's certificate is judged.
    pub trust: Trust,
    /// This client's own certificate and its private key.
    pub cert: Option<CertFiles>,
    /// The bearer token, if given directly: see [`ClientConfig::load_token`].
    pub token: Option<Token>,
    /// The file with the bearer token: see [`ClientConfig::load_token`].
    pub token_file: Option<PathBuf>,
    /// Interfaces to use, or patterns of their names, each once, or the one word `auto`.
    pub paths: Vec<String>,
    /// Settings of links; the first whose name pattern matches an interface counts.
    pub links: Vec<LinkConfig>,
    /// The classes of traffic in the order of their numbers. `default`, `critical` and `bulk` always exist.
    pub classes: Vec<ClassConfig>,
    /// Rules that assign packets to classes; the first that matches decides. The built-in rules come last.
    pub class_rules: Vec<MatchRule>,
    /// Rules by which the kernel steers packets into the TUN devices of classes, in the order of evaluation.
    pub class_steering: Vec<SteeringRule>,
    /// Names of the TUN devices of classes that a proxy ignores.
    pub ignored_class_tuns: Vec<String>,
    /// Folder for data that survive a restart: how much of the quotas is used.
    pub state_dir: PathBuf,
    /// Name of the TUN device.
    pub tun_name: String,
    /// How packets are spread over the paths.
    pub scheduler: Scheduler,
    /// The congestion controller of every path.
    pub cc: CongestionControl,
    /// The HTTP proxy for TCP connections to the server.
    pub via: Option<ViaProxy>,
    /// How TCP connections travel where no rule decides.
    pub lane: FlowMode,
    /// How TCP connections to some destinations travel; the first rule that matches decides.
    pub lane_rules: Vec<LaneRule>,
    /// The destinations whose packets go into the tunnel.
    pub routes: Routes,
    /// Networks that keep their routes past the tunnel, beside private networks and those of links.
    pub keep_routes: Vec<IpNet>,
    /// The resolvers that this machine asks while the tunnel is up.
    pub dns: Dns,
    /// Domains whose names the resolver of the local network is asked for, in lower case.
    pub dns_local: Vec<String>,
    /// Whether packets past the tunnel are blocked, and which of them are not.
    pub kill_switch: KillSwitch,
    /// Interfaces or networks behind this machine that may use the tunnel; each parses as a
    /// [`SharedNetwork`].
    pub share: Vec<String>,
    /// The networks behind this machine that are announced.
    pub site: SiteConfig,
    /// Routes into the tunnel beside those of `routes`.
    pub static_routes: Vec<RouteRule>,
    /// Whether the TUN devices stay when the client ends.
    pub tun_persist: bool,
    /// Whether the TUN device has a carrier only while the tunnel works.
    pub tun_carrier: bool,
    /// Packets that leave past the tunnel, in the order of evaluation.
    pub bypass: Vec<BypassRule>,
    /// Addresses at which the client is a proxy for apps. If there are any, it has no TUN device.
    pub proxies: Proxies,
    /// Threads that carry packets, each with a connection of its own.
    pub shards: Shards,
    /// The instance's name.
    pub name: String,
    /// Unix socket of the local API.
    pub api_socket: PathBuf,
    /// TCP address at which metrics are served.
    pub metrics: Option<SocketAddr>,
    /// The dashboard.
    pub dashboard: Option<ClientDashboard>,
    /// Folder for qlog files; `None`: none are written.
    pub qlog: Option<PathBuf>,
    /// Whether the process gives up the rights that it does not need.
    pub confine: Confine,
    /// When the file is read again.
    pub reload: ReloadMode,
    /// How much is logged.
    pub log_level: LogLevel,
}

/// Whether a client blocks packets past its tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KillSwitch {
    /// It does not.
    #[default]
    Off,
    /// It does.
    On {
        /// Whether private networks that a link is in may be reached nevertheless, except their DNS servers.
        allows_lan: bool,
    },
}

impl Default for ServerConfig {
    /// The configuration of a server that root starts without options and file.
    fn default() -> Self {
        Self::resolve(ServerOptions::default(), Rights::ALL)
            .expect("the defaults do not contradict each other")
    }
}

impl ServerConfig {
    /// Merges the options `cli` with those of `file`, and checks the result. Without `file`, [`SERVER_FILE`]
    /// is read if it exists and the process has root's rights.
    pub fn load(file: Option<&Path>, cli: ServerOptions, rights: Rights) -> Result<Self> {
        service::load(file, cli, rights)
    }

    /// The configuration in `text`, the content of `file`, of a server that root starts.
    ///
    /// # Errors
    /// If the text has a mistake, or its keys contradict each other.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        Self::resolve(file::parse(text, file)?, Rights::ALL)
    }

    /// Fills in the defaults, and refuses options that contradict each other.
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
        let auth = options.auth.unwrap_or_default();
        check_client_ca(auth, options.client_ca.as_deref(), options.crl.as_deref())?;
        if options.users.is_some() && auth == AuthMode::None {
            return Err(Error::usage(
                "--users and --auth none contradict each other",
                "leave out one of the two",
            ));
        }
        let tcp = options.tcp.unwrap_or_default();
        let acme = options.acme.map(|table| table.resolve(&listen, tcp)).transpose()?;
        let dns = dns::server_dns(options.dns)?;
        let forwards = forward::resolve(options.forward, &listen)?;
        let (max_relays, max_user_relays) = max_relays(options.max_relays, options.max_user_relays)?;
        Ok(Self {
            tcp,
            listen,
            old_clients: options.old_clients,
            service,
            cert: cert_files("", options.cert, options.key)?,
            more_certs: options.certificate,
            acme,
            proxy_protocol_from: options.proxy_protocol_from,
            site: options.site.unwrap_or_default(),
            max_clients: max_clients(options.max_clients, subnet)?,
            isolate: options.isolate,
            access: options.access,
            limits: options.limit,
            max_relays,
            max_user_relays,
            max_memory: max_memory(options.max_memory)?,
            shards: options.shards.unwrap_or_default(),
            subnet,
            subnet6,
            tun_name,
            auth,
            client_ca: options.client_ca,
            crl: options.crl,
            users: options.users,
            public: options.public,
            state_dir: options.state_dir.unwrap_or_else(|| STATE_DIR.into()),
            nat: options.nat.unwrap_or_default(),
            routes: routes(&options.routes, subnet6)?,
            forwards,
            dns_names: DnsNames::of(options.dns_domain, options.dns_name, &dns)?,
            dns,
            api_socket: options.api_socket.unwrap_or_else(|| default_socket(Role::Server, &name)),
            name,
            metrics: options.metrics,
            metrics_users: options.metrics_users.unwrap_or(0),
            dashboard: options.dashboard,
            measure: options.measure,
            qlog: options.qlog,
            confine: options.confine.unwrap_or_default(),
            reload: options.reload.unwrap_or_default(),
            log_level: options.log_level.unwrap_or_default(),
        })
    }
}

impl ClientConfig {
    /// A client of `server` with the defaults for everything else.
    pub fn new(server: ServerAddr, trust: Trust) -> Self {
        let server = vec![server.into()];
        let options = ClientOptions { server, insecure: true, ..ClientOptions::default() };
        let mut config = Self::resolve(options).expect("the defaults do not contradict each other");
        config.servers[0].trust = trust;
        config.use_server(0);
        config
    }

    /// Merges the options `cli` with those of `file` (by default [`CLIENT_FILE`], if it exists), and checks
    /// the result.
    pub fn load(file: Option<&Path>, cli: ClientOptions) -> Result<Self> {
        if !cli.socks5.is_empty() || !cli.http.is_empty() {
            return Err(Error::usage(
                "--socks5 and --http are options of `mpvpn proxy`, not of `mpvpn client`",
                "use `mpvpn proxy`, or leave them out",
            ));
        }
        file::load(file, Path::new(CLIENT_FILE))?.resolve(cli, |cli: ClientOptions, from_file| {
            let options = cli.or_fallback(from_file);
            let via = via::or_from_environment(options.via, servers::first(&options.server));
            Self::resolve(ClientOptions { via, ..options })
        })
    }

    /// The configuration in `text`, the content of `file`.
    ///
    /// # Errors
    /// If the text has a mistake, or its keys contradict each other.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        Self::resolve(file::parse(text, file)?)
    }

    /// Loads a file for a command that needs the classes only: `server` and the trust options may be missing.
    pub fn load_without_server(file: Option<&Path>) -> Result<Self> {
        let mut options: ClientOptions = file::load(file, Path::new(CLIENT_FILE))?.content;
        if options.server.is_empty() {
            options.server = vec![ServerAddr { host: String::new(), port: DEFAULT_PORT }.into()];
        }
        options.insecure |= options.ca.is_none() && options.pin.is_empty();
        Self::resolve(options)
    }

    /// Fills in the defaults, and refuses options that contradict each other.
    pub fn resolve(options: ClientOptions) -> Result<Self> {
        let access = Access {
            ca: options.ca,
            pin: options.pin,
            insecure: options.insecure,
            token: options.token,
            token_file: options.token_file,
        };
        let servers = servers::resolve(options.server, &access)?;
        let Server { address: server, trust, token, token_file, .. } = servers[0].clone();
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
        let (networks, accept_from) = (options.announce, options.accept_from);
        let forwards = forward::resolve(options.forward, &[])?;
        let masquerade = options.masquerade;
        let site = SiteConfig { networks, accept_from, masquerade, forwards };
        let site = site.resolve(&servers, !share.is_empty())?;
        let kill_switch = kill_switch(options.kill_switch, options.kill_switch_lan)?;
        let dashboard =
            ClientDashboard::of(options.dashboard, options.dashboard_cert, options.dashboard_key)?;
        let paths = paths(options.path, &tun_name)?;
        let links = links(options.link, options.pipes, options.transport);
        let context = ClassContext { paths: &paths, links: &links, tun_name: &tun_name, share: &share };
        let classes = options.class.resolve(&context)?;
        let class_tuns = classes.list.iter().filter_map(|class| class.tun.as_deref());
        let tuns: Vec<&str> = class_tuns.chain([&*tun_name]).collect();
        let bypass = options.bypass.resolve(&tuns)?;
        let when_down = options.when_down.unwrap_or_default();
        if when_down == WhenDown::Direct && kill_switch != KillSwitch::Off {
            return Err(Error::usage(
                "--when-down direct and --kill-switch contradict each other",
                "leave out one of the two",
            ));
        }
        Ok(Self {
            servers,
            choose: options.choose.unwrap_or_default(),
            return_when: options.return_when.unwrap_or_default(),
            when_down,
            server,
            trust,
            cert: cert_files("", options.cert, options.key)?,
            token,
            token_file,
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
            keep_routes: keep_routes(options.keep_routes)?,
            dns_local: dns::local_domains(options.dns_local, &options.dns)?,
            dns: dns::client_dns(options.dns)?,
            kill_switch,
            share: share.iter().map(ToString::to_string).collect(),
            site,
            static_routes: options.route,
            tun_persist: options.tun_persist,
            tun_carrier: options.tun_carrier,
            bypass,
            shards,
            api_socket: options.api_socket.unwrap_or_else(|| default_socket(Role::Client, &name)),
            tun_name,
            name,
            metrics: options.metrics,
            dashboard,
            qlog: options.qlog,
            confine: options.confine.unwrap_or_default(),
            reload: options.reload.unwrap_or_default(),
            log_level: options.log_level.unwrap_or_default(),
            proxies: Proxies::default(),
        })
    }

    /// The token for the server, read from `token_file` if that is given.
    pub fn load_token(&self) -> Result<Option<Token>> {
        let Some(file) = &self.token_file else { return Ok(self.token.clone()) };
        let bytes = files::read_secret(file)?;
        let token = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok());
        let bad = || Error::content(file, "one bearer token on one line", "something else");
        token.map(Some).ok_or_else(bad)
    }
}

impl ClientConfig {
    /// The class with this number.
    pub fn class(&self, id: ClassId) -> Option<&ClassConfig> {
        self.classes.iter().find(|class| class.id == id)
    }

    /// Whether the TUN devices lose their carrier while the tunnel does not work, at once or after a while.
    pub fn has_carrier_of_tunnel(&self) -> bool {
        self.tun_carrier || self.when_down == WhenDown::Direct
    }

    /// Uses another of the servers.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn use_server(&mut self, at: usize) {
        let Server { address, trust, token, token_file, .. } = self.servers[at].clone();
        (self.server, self.trust, self.token, self.token_file) = (address, trust, token, token_file);
    }

    /// The addresses of the server: those that were found for its name, and those of `[[link]]`.
    pub fn servers(&self, found: &[SocketAddr]) -> Vec<SocketAddr> {
        let of_links = self.links.iter().filter_map(|link| link.server);
        found.iter().copied().chain(of_links).collect()
    }

    /// The name of the class with this number; empty if there is none.
    pub fn class_name(&self, id: ClassId) -> String {
        self.class(id).map_or(String::new(), |class| class.name.clone())
    }

    /// The classes that have a TUN device of their own, with its name.
    pub fn class_tuns(&self) -> impl Iterator<Item = (&ClassConfig, &str)> {
        self.classes.iter().filter_map(|class| Some((class, class.tun.as_deref()?)))
    }
}

fn keep_routes(given: Vec<IpNet>) -> Result<Vec<IpNet>> {
    match given.iter().find(|network| network.prefix_len() == 0) {
        None => Ok(given),
        Some(all) => Err(Error::usage(
            format!(
                "--keep-routes {all} would keep all routes but the default routes, also those that a link makes by DHCP"
            ),
            "name the networks that are to be reached past the tunnel",
        )),
    }
}

fn kill_switch(is_on: bool, allows_lan: Option<bool>) -> Result<KillSwitch> {
    match (is_on, allows_lan) {
        (true, allows_lan) => Ok(KillSwitch::On { allows_lan: allows_lan.unwrap_or(true) }),
        (false, None) => Ok(KillSwitch::Off),
        (false, Some(_)) => Err(Error::usage(
            "--kill-switch-lan is given without --kill-switch",
            "add --kill-switch, or leave out --kill-switch-lan",
        )),
    }
}

fn check_client_ca(auth: AuthMode, client_ca: Option<&Path>, crl: Option<&Path>) -> Result<()> {
    match (auth, client_ca, crl) {
        (AuthMode::Mtls, None, _) => Err(Error::usage(
            "--auth mtls is given without --client-ca",
            "add --client-ca PEM with the CA that signs the certificates of clients",
        )),
        (AuthMode::None | AuthMode::Token, Some(_), _) => Err(Error::usage(
            format!("--client-ca is given with --auth {auth}, so that no certificate counts"),
            "add --auth mtls, or leave out --client-ca",
        )),
        (_, None, Some(_)) => {
            Err(Error::usage("--crl is given without --client-ca", "add --auth mtls --client-ca PEM"))
        }
        _ => Ok(()),
    }
}

/// The limit of clients. Each needs an IPv4 address: all hosts of the subnet but the server.
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

/// The networks to which clients' packets are carried, sorted and merged; all addresses if none are given.
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

/// The memory that the server may use.
fn max_memory(given: Option<ByteSize>) -> Result<Option<ByteSize>> {
    match given {
        Some(given) if given < MIN_MEMORY => Err(Error::usage(
            format!("--max-memory {given} would let few clients connect"),
            format!("give at least {MIN_MEMORY}"),
        )),
        given => Ok(given),
    }
}

/// The limits of relayed connections: for all clients, and for one user.
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

/// The link tables with the general `pipes` and `transport` filled in, and a last table for all other links.
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

#[cfg(test)]
mod tests;
