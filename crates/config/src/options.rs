//! The options of a server and of a client: the one definition behind the command line, its help and
//! the configuration file. A field's name with hyphens is the option and the key; the first lines of
//! its comment are the help.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use ipnet::{IpNet, Ipv4Net};
use mpvpn_types::{Domain, Transport};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    acme::{AcmeTable, acme_table},
    announce::SiteNetwork,
    bypass::BypassTables,
    classes::ClassTables,
    dns::{DnsOption, ServerDnsOption},
    dns_names::DnsName,
    file::{ConfigFile, OrFallback, SourceText},
    forward::ForwardRule,
    lane::LaneRule,
    limits::LimitRule,
    links::{LinkConfig, link_tables},
    route::RouteRule,
    servers::{Choose, Return, ServerOption, WhenDown},
    shards::Shards,
    site::{self, Site},
    text_or_table,
    via::ViaOption,
    words::{AuthMode, Confine, LogLevel, Nat, ReloadMode, Routes, SharedNetwork, Subnet6, Tcp},
};
use mpvpn_access::AccessRule;
use mpvpn_identity::{cert_files::CertFiles, identity::Fingerprint, token::Token, trust::Ca};
use mpvpn_input::rules::Prefix;
use mpvpn_input::values::{Filled, InstanceName, Many, One, OneOrNumber, ServerAddr, text, word};
use mpvpn_path::Scheduler;
use mpvpn_status::pipes::Pipes;
use mpvpn_types::{ByteSize, CongestionControl, FlowMode};

/// The configuration file of a server (`/etc/mpvpn/server.toml`): keys and tables.
#[derive(Args, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "mpvpn server")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServerOptions {
    /// Address and port at which the server accepts clients, over UDP and TCP; repeatable. Set it for
    /// another port, or for IPv6 too, as in `[::]:443` [default: 0.0.0.0:443; without root 0.0.0.0:4433]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "Many::<SocketAddr>")]
    pub listen: Vec<SocketAddr>,

    /// Accept clients over TCP, too, at the addresses of --listen: needed by clients whose networks block
    /// UDP. Turn it off if another program needs the TCP port [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Tcp>())]
    #[serde(with = "One::<Tcp>")]
    pub tcp: Option<Tcp>,

    /// Accept clients of early MASQUE drafts over TCP (TLS without ALPN, CONNECT-UDP in HTTP/1.1). Give it
    /// only if such clients have to connect
    #[arg(long)]
    pub old_clients: bool,

    /// Relay TCP connections and UDP flows only, without a TUN device, addresses and routes, so that the
    /// machine's network stays unchanged. A server without root always works like this
    #[arg(long)]
    pub relay_only: bool,

    /// PEM file with the certificate chain of the server, leaf first; needs --key. Give it if clients trust
    /// your CA, with --ca [default: a self-signed certificate, made at the first start, which clients
    /// pin]
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub cert: Option<PathBuf>,

    /// PEM file with the private key of --cert
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub key: Option<PathBuf>,

    /// Further certificates, for other server names: the tables `[[certificate]]`
    #[arg(skip)]
    #[serde(deserialize_with = "site::certificates")]
    #[schemars(with = "Vec<site::CertificateTable>")]
    pub certificate: Vec<CertFiles>,

    /// Certificates that a CA issues by ACME: the table `[acme]`
    #[arg(skip)]
    #[serde(deserialize_with = "acme_table")]
    #[schemars(with = "AcmeTable")]
    pub acme: Option<AcmeTable>,

    /// Network of a load balancer in front of the server; repeatable. TCP connections from there must begin
    /// with a PROXY protocol header (version 1 or 2), which tells the client's address; without this
    /// option all clients seem to have the balancer's address
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(with = "Filled::<Prefix>")]
    pub proxy_protocol_from: Vec<IpNet>,

    /// Web site that visitors without credentials see: the table `[site]`
    #[arg(skip)]
    #[serde(deserialize_with = "site::site_table")]
    #[schemars(with = "site::SiteTable")]
    pub site: Option<Site>,

    /// IPv4 network of the tunnel, /8 to /30: the server is its first host, each client gets another
    /// address. Change it if clients use this network elsewhere, or for more than 253 clients [default:
    /// 10.0.0.0/24]
    #[arg(long, value_name = "CIDR", value_parser = text::<Ipv4Net>)]
    #[serde(with = "One::<Ipv4Net>")]
    pub subnet: Option<Ipv4Net>,

    /// IPv6 network of the tunnel, /16 to /126, or none for a tunnel without IPv6. Set it to your own prefix
    /// to give clients public addresses, with --nat off [default: fd00:6d70:766e::/64]
    #[arg(long, value_name = "CIDR|none", value_parser = text::<Subnet6>)]
    #[serde(with = "One::<Subnet6>")]
    pub subnet6: Option<Subnet6>,

    /// Name of the TUN device, up to 15 characters. Change it to run several servers on one machine
    /// [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(with = "One::<String>")]
    pub tun_name: Option<String>,

    /// How clients prove who they are [default: token]
    #[arg(long, value_name = "none|token|mtls", value_parser = word::<AuthMode>())]
    #[serde(with = "One::<AuthMode>")]
    pub auth: Option<AuthMode>,

    /// PEM file with the CAs that sign the certificates of clients; with --auth mtls
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub client_ca: Option<PathBuf>,

    /// PEM file with the certificates of clients that were revoked; with --client-ca. It is read again when
    /// it changes: then sessions with a revoked certificate end at once [default: none is revoked]
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub crl: Option<PathBuf>,

    /// TOML file with the users and the hashes of their tokens. Set it to have more users than the one that
    /// the first start makes [default: users.toml in the state folder, made at the first start]
    #[arg(long, value_name = "FILE")]
    #[serde(with = "One::<PathBuf>")]
    pub users: Option<PathBuf>,

    /// Name or address, and port, at which clients reach the server, as `mpvpn user add` writes it into join
    /// links. Set it if the machine is behind address translation, or has a name [default: an address of
    /// this machine]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = text::<ServerAddr>)]
    #[serde(with = "One::<ServerAddr>")]
    pub public: Option<ServerAddr>,

    /// Folder for certificate, users and other data that survive a restart [default: /var/lib/mpvpn; without
    /// root $XDG_STATE_HOME/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(with = "One::<PathBuf>")]
    pub state_dir: Option<PathBuf>,

    /// Translate clients' source addresses to the server's own (NAT). Turn it off if the network behind the
    /// server has a route back to the tunnel's networks and shall see clients' addresses [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Nat>())]
    #[serde(with = "One::<Nat>")]
    pub nat: Option<Nat>,

    /// Carry clients' packets to this network only, and advertise it to clients, which use it with --routes
    /// advertised; repeatable. Set it for access to a few networks instead of the internet [default:
    /// everywhere]
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(with = "Filled::<Prefix>")]
    pub routes: Vec<IpNet>,

    /// Suggest this resolver to clients, which use it if all their traffic goes into the tunnel; repeatable
    /// (up to 3); or off: suggest none [default: this server, at its addresses in the tunnel; it asks
    /// the resolvers of its machine]
    #[arg(long, value_name = "ADDR|off", value_parser = text::<ServerDnsOption>)]
    #[serde(with = "Many::<ServerDnsOption>")]
    pub dns: Vec<ServerDnsOption>,

    /// Answer clients the names of users below this domain, as in `anna.vpn.internal`, with the addresses of
    /// their sessions, and reverse; with --isolate a client learns its own only [default: none]
    #[arg(long, value_name = "DOMAIN", value_parser = text::<Domain>)]
    #[serde(with = "One::<Domain>")]
    pub dns_domain: Option<Domain>,

    /// Names of further hosts below --dns-domain, for instance in networks behind clients: the tables
    /// `[[dns-name]]`
    #[arg(skip)]
    pub dns_name: Vec<DnsName>,

    /// Ports of this machine that lead to clients, or to hosts behind them: the tables `[[forward]]`
    #[arg(skip)]
    pub forward: Vec<ForwardRule>,

    /// Number of clients that may be connected at once [default: as many as the subnet has addresses, up to
    /// 4096]
    #[arg(long, value_name = "N")]
    pub max_clients: Option<u32>,

    /// Keep clients from each other, whatever the tables `[[access]]` say; `mpvpn setup server` writes it.
    /// Give it if clients do not trust each other
    #[arg(long)]
    pub isolate: bool,

    /// Destinations that clients reach, by packets and by connections that the server opens for them: the
    /// tables `[[access]]`
    #[arg(skip)]
    pub access: Vec<AccessRule>,

    /// Limits of users: the tables `[[limit]]`
    #[arg(skip)]
    pub limit: Vec<LimitRule>,

    /// Number of TCP connections and UDP flows that the server relays at once for all clients together; each
    /// needs a socket and buffers [default: 32768]
    #[arg(long, value_name = "N")]
    pub max_relays: Option<u32>,

    /// Number of TCP connections and UDP flows that the server relays at once for one user, so that no user
    /// takes all of --max-relays [default: 8192]
    #[arg(long, value_name = "N")]
    pub max_user_relays: Option<u32>,

    /// Memory that the server may use, as in 512MB; it allocates at most half. A user gets at most as much as
    /// is left of that half, and when it is used up, the user that holds most loses connections [default:
    /// the memory of the machine, or of the control group that the server runs in]
    #[arg(long, value_name = "SIZE", value_parser = text::<ByteSize>)]
    #[serde(with = "One::<ByteSize>")]
    pub max_memory: Option<ByteSize>,

    /// Number of threads that carry packets: 1 to 16, or auto, which is one per processor if there are more
    /// than two, else one. Set it to leave processors to other programs [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(with = "OneOrNumber::<Shards>")]
    pub shards: Option<Shards>,

    /// Name of this server in `mpvpn status --name NAME` and in the name of its socket, for machines with
    /// several mpvpn processes [default: that of the TUN device, else server]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    #[schemars(with = "One<InstanceName>")]
    pub name: Option<String>,

    /// Path of the unix socket at which `mpvpn status` and other commands reach this server [default:
    /// server-NAME.sock in /run/mpvpn; without root in $XDG_RUNTIME_DIR/mpvpn]
    #[arg(long, value_name = "PATH")]
    #[serde(with = "One::<PathBuf>")]
    pub api_socket: Option<PathBuf>,

    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics, without authentication: choose an address
    /// that only the monitoring reaches. Requests must name an address or a name without a dot as their host,
    /// so that no page in a browser reads them [default: no metrics]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "One::<SocketAddr>")]
    pub metrics: Option<SocketAddr>,

    /// Number of users that have metrics of their own, those with the most traffic; all others are added up
    /// as the user `other`. Whoever reaches the metrics then sees names of users and what they carry
    /// [default: 0]
    #[arg(long, value_name = "N")]
    pub metrics_users: Option<u32>,

    /// Serve the dashboard, a page for browsers, at this address; `mpvpn dashboard` prints a link that logs
    /// in. Loopback addresses are reached from elsewhere by `ssh -L 9470:127.0.0.1:9470 HOST`; others
    /// show the certificate of this server, by HTTPS [default: no dashboard]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "One::<SocketAddr>")]
    pub dashboard: Option<SocketAddr>,

    /// Answer `mpvpn measure` of clients, at port 9494 of the server's addresses in the tunnel; the limits
    /// of the user count for what is measured, too
    #[arg(long)]
    pub measure: bool,

    /// Write qlog files to this folder, 1 GiB at most: packets, losses and congestion control of each
    /// connection, to find out why it is slow [default: no files]
    #[arg(long, value_name = "DIR")]
    #[serde(with = "One::<PathBuf>")]
    pub qlog: Option<PathBuf>,

    /// Whether the process gives up what it does not need: capabilities, system calls, files of others. Turn
    /// it off only to find out whether it is the cause of a failure [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Confine>())]
    #[serde(with = "One::<Confine>")]
    pub confine: Option<Confine>,

    /// When the configuration file is read again while the process runs [default: manual]
    #[arg(long, value_name = "manual|auto", value_parser = word::<ReloadMode>())]
    #[serde(with = "One::<ReloadMode>")]
    pub reload: Option<ReloadMode>,

    /// How much is logged to stderr; the environment variable RUST_LOG overrides it [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = word::<LogLevel>())]
    #[serde(with = "One::<LogLevel>")]
    pub log_level: Option<LogLevel>,
}

/// The configuration file of a client (`/etc/mpvpn/client.toml`): keys and tables.
#[derive(Args, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "mpvpn client")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClientOptions {
    /// Name or address of the server, with its port if that is not 443; repeatable: another server is used
    /// while the first does not answer. While none answers, the names are resolved again. In a file a server
    /// may have its own `pin` or `ca`, `token-file` and `weight`
    #[arg(long, value_name = "HOST:PORT", value_parser = text::<ServerOption>)]
    #[serde(deserialize_with = "text_or_table::list")]
    #[schemars(with = "Many<ServerOption>")]
    pub server: Vec<ServerOption>,

    /// Which of several servers is preferred [default: order]
    #[arg(long, value_name = "order|nearest|weighted", value_parser = word::<Choose>())]
    #[serde(with = "One::<Choose>")]
    pub choose: Option<Choose>,

    /// When the client goes back to a preferred server, once that has answered for a minute; the change ends
    /// connections in the tunnel [default: idle]
    #[arg(long = "return", value_name = "idle|now|never", value_parser = word::<Return>())]
    #[serde(with = "One::<Return>", rename = "return")]
    pub return_when: Option<Return>,

    /// Whether packets for the tunnel are blocked or leave past it while no server answers [default: block]
    #[arg(long, value_name = "block|direct", value_parser = word::<WhenDown>())]
    #[serde(with = "One::<WhenDown>")]
    pub when_down: Option<WhenDown>,

    /// Network interface to use as a link, or a pattern for several, as in 'wwan*'; repeatable. Set it to
    /// leave other interfaces out [default: auto, every interface with a default route]
    #[arg(long, value_name = "IFACE|auto", value_parser = text::<String>)]
    #[serde(with = "Many::<String>")]
    pub path: Vec<String>,

    /// How single links are used: the tables `[[link]]`
    #[arg(skip)]
    #[serde(deserialize_with = "link_tables")]
    #[schemars(with = "Vec<LinkConfig>")]
    pub link: Vec<LinkConfig>,

    /// Classes of traffic: the tables `[[class]]`
    #[arg(skip)]
    pub class: ClassTables,

    /// Number of paths over each link, each from its own UDP source port: 1 to 8, or auto, which adds paths
    /// while each raises the rate. Raise it if an operator limits the rate of each UDP flow; `pipes` of
    /// a `[[link]]` overrides it. Without this option it is auto over links whose public address has a
    /// name of Starlink [default: 1]
    #[arg(long, value_name = "auto|N", value_parser = text::<Pipes>)]
    #[serde(with = "OneOrNumber::<Pipes>")]
    pub pipes: Option<Pipes>,

    /// How the packets of all links reach the server; TCP uses the same port number as UDP. Set tcp where
    /// UDP passes but is slowed down; `transport` of a `[[link]]` overrides it [default: auto]
    #[arg(long, value_name = "auto|quic|tcp", value_parser = word::<Transport>())]
    #[serde(with = "One::<Transport>")]
    pub transport: Option<Transport>,

    /// PEM file that says which server to trust: one whose certificate is in this file, or is signed for the
    /// server's name by a CA in this file; or system: one whose certificate is signed for its name by a
    /// CA that this machine trusts
    #[arg(long, value_name = "PEM|system", value_parser = text::<Ca>)]
    #[serde(with = "One::<Ca>")]
    pub ca: Option<Ca>,

    /// Trust the server whose certificate has this SHA-256 fingerprint, 64 hexadecimal digits; `mpvpn
    /// server` prints it at its start; repeatable: before the server's certificate changes, give the new
    /// fingerprint, too
    #[arg(long, value_name = "SHA256", value_parser = text::<Fingerprint>)]
    #[serde(with = "Many::<Fingerprint>")]
    pub pin: Vec<Fingerprint>,

    /// PEM file with this client's certificate chain, leaf first, for servers with --auth mtls; needs --key
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub cert: Option<PathBuf>,

    /// PEM file with the private key of --cert
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub key: Option<PathBuf>,

    /// Trust any server, for tests only: an attacker between client and server can read and change
    /// everything
    #[arg(long)]
    pub insecure: bool,

    /// Token of a user, as `mpvpn user add` prints it. It is hidden in the list of processes at once;
    /// --token-file keeps it out of the history of the shell, too
    #[arg(long, value_name = "TOKEN", value_parser = text::<Token>)]
    #[serde(with = "One::<Token>")]
    pub token: Option<Token>,

    /// File with the token on one line, readable by its owner only
    #[arg(long, value_name = "FILE")]
    #[serde(with = "One::<PathBuf>")]
    pub token_file: Option<PathBuf>,

    /// Name of the TUN device, up to 15 characters. Change it to run several clients on one machine
    /// [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(with = "One::<String>")]
    pub tun_name: Option<String>,

    /// How packets are spread over the paths [default: auto]
    #[arg(long, value_name = "NAME", value_parser = word::<Scheduler>())]
    #[serde(with = "One::<Scheduler>")]
    pub scheduler: Option<Scheduler>,

    /// Congestion control of every path, in both directions [default: bbr]
    #[arg(long, value_name = "bbr|cubic", value_parser = word::<CongestionControl>())]
    #[serde(with = "One::<CongestionControl>")]
    pub cc: Option<CongestionControl>,

    /// HTTP proxy for TCP connections to the server, as in http://proxy:3128, where only a proxy leads out;
    /// none ignores the environment [default: the proxy of the environment variable https_proxy or all_proxy,
    /// unless no_proxy names the server]
    #[arg(long, value_name = "http://[USER:PASSWORD@]HOST:PORT|none", value_parser = text::<ViaOption>)]
    #[serde(with = "One::<ViaOption>")]
    pub via: Option<ViaOption>,

    /// How TCP connections travel inside the tunnel [default: auto]
    #[arg(long, value_name = "NAME", value_parser = word::<FlowMode>())]
    #[serde(with = "One::<FlowMode>")]
    pub lane: Option<FlowMode>,

    /// How TCP connections to some destinations travel: the tables `[[lane-rule]]`
    #[arg(skip)]
    pub lane_rule: Vec<LaneRule>,

    /// Destinations whose packets go into the tunnel [default: all]
    #[arg(long, value_name = "NAME", value_parser = word::<Routes>())]
    #[serde(with = "One::<Routes>")]
    pub routes: Option<Routes>,

    /// Let packets to this network go past the tunnel where the system's routes lead there; private networks
    /// and those of the links do so without it; repeatable [default: none]
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(with = "Filled::<Prefix>")]
    pub keep_routes: Vec<IpNet>,

    /// Address of a resolver to ask while the tunnel is up, repeatable (up to 3); or off: keep the resolvers
    /// of the system; or auto: those that the server suggests, for all names if all traffic goes into the
    /// tunnel, else for those below the server's own domain [default: auto]
    #[arg(long, value_name = "ADDR|auto|off", value_parser = text::<DnsOption>)]
    #[serde(with = "Many::<DnsOption>")]
    pub dns: Vec<DnsOption>,

    /// Ask the resolver of the local network, past the tunnel, for names below this domain, as in lan or
    /// home.arpa; repeatable [default: none]
    #[arg(long, value_name = "DOMAIN", value_parser = text::<Domain>)]
    #[serde(with = "Many::<Domain>")]
    pub dns_local: Vec<Domain>,

    /// Kill switch: block all packets past the tunnel, from before the client connects until it is stopped
    /// by Ctrl-C or SIGTERM; a crash leaves the block in force, and `mpvpn reset` ends it
    #[arg(long)]
    pub kill_switch: bool,

    /// Whether the private networks of the links stay reachable under the kill switch, except their DNS
    /// servers [default: true]
    #[arg(long, value_name = "true|false")]
    #[schemars(with = "bool")]
    pub kill_switch_lan: Option<bool>,

    /// Let the machines behind this interface, or of this network, use the tunnel, which makes this machine
    /// a router; repeatable [default: only this machine uses it]
    #[arg(long, value_name = "IFACE|CIDR", value_parser = text::<SharedNetwork>)]
    #[serde(with = "Many::<SharedNetwork>")]
    pub share: Vec<SharedNetwork>,

    /// Network behind this machine that other clients, and the network behind the server, reach here;
    /// repeatable. The user needs leave for it (`mpvpn user add --route`). Where another home has the same
    /// network, announce it as one that nobody else has: 192.168.1.0/24=10.77.1.0/24 [default: none]
    #[arg(long, value_name = "CIDR[=CIDR]", value_parser = text::<SiteNetwork>)]
    #[serde(deserialize_with = "text_or_table::list")]
    #[schemars(with = "Many<SiteNetwork>")]
    pub announce: Vec<SiteNetwork>,

    /// Accept connections from this network of the tunnel to those of --announce; repeatable; 0.0.0.0/0 and
    /// ::/0 are everybody [default: none, so that hosts behind this machine only reach others]
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(with = "Many::<Prefix>")]
    pub accept_from: Vec<IpNet>,

    /// Show hosts behind this machine its own address as that of everybody who comes in. Give it where this
    /// machine is not their gateway, so that their answers come back to it
    #[arg(long)]
    pub masquerade: bool,

    /// Ports of this machine's address in the tunnel that lead to hosts behind it: the tables `[[forward]]`
    #[arg(skip)]
    pub forward: Vec<ForwardRule>,

    /// Routes into the tunnel beside those of --routes: the tables `[[route]]`
    #[arg(skip)]
    pub route: Vec<RouteRule>,

    /// Keep the TUN devices, their addresses and routes when the client ends, so that routes of others into
    /// them outlast a restart; `mpvpn reset` removes them
    #[arg(long)]
    pub tun_persist: bool,

    /// Take the carrier off the TUN device while the tunnel does not work, so that packets take the next
    /// route and other programs see it
    #[arg(long)]
    pub tun_carrier: bool,

    /// Packets that leave past the tunnel, over a link: the tables `[[bypass]]`
    #[arg(skip)]
    pub bypass: BypassTables,

    /// Offer a SOCKS5 proxy, for TCP and UDP, to apps at this TCP address; repeatable. Use 127.0.0.1 unless
    /// other machines may use it, too: it asks for no password
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "Many::<SocketAddr>")]
    pub socks5: Vec<SocketAddr>,

    /// Offer an HTTP proxy to apps at this TCP address; repeatable. Use 127.0.0.1 unless other machines may
    /// use it, too: it asks for no password
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "Many::<SocketAddr>")]
    pub http: Vec<SocketAddr>,

    /// Folder for data that survive a restart: how much of its quota each link has used [default:
    /// /var/lib/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(with = "One::<PathBuf>")]
    pub state_dir: Option<PathBuf>,

    /// Number of threads that carry packets, each with its own connection: 1 to 16, or auto, which is 1.
    /// Raise it if one processor is too slow for all links together [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(with = "OneOrNumber::<Shards>")]
    pub shards: Option<Shards>,

    /// Name of this client in `mpvpn status --name NAME` and in the name of its socket, for machines with
    /// several mpvpn processes [default: that of the TUN device]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    #[schemars(with = "One<InstanceName>")]
    pub name: Option<String>,

    /// Path of the unix socket at which `mpvpn status` and other commands reach this client [default:
    /// /run/mpvpn/client-NAME.sock]
    #[arg(long, value_name = "PATH")]
    #[serde(with = "One::<PathBuf>")]
    pub api_socket: Option<PathBuf>,

    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics, without authentication: choose an address
    /// that only the monitoring reaches. Requests must name an address or a name without a dot as their host,
    /// so that no page in a browser reads them [default: no metrics]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "One::<SocketAddr>")]
    pub metrics: Option<SocketAddr>,

    /// Serve the dashboard, a page for browsers, at this address; `mpvpn dashboard` prints a link that logs
    /// in. Loopback addresses are reached from elsewhere by `ssh -L 9470:127.0.0.1:9470 HOST`; others
    /// need --dashboard-cert [default: no dashboard]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(with = "One::<SocketAddr>")]
    pub dashboard: Option<SocketAddr>,

    /// PEM file with the certificate chain of the dashboard, leaf first, for HTTPS; needs --dashboard-key
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub dashboard_cert: Option<PathBuf>,

    /// PEM file with the private key of --dashboard-cert
    #[arg(long, value_name = "PEM")]
    #[serde(with = "One::<PathBuf>")]
    pub dashboard_key: Option<PathBuf>,

    /// Write qlog files to this folder, 1 GiB at most: packets, losses and congestion control of each
    /// connection, to find out why it is slow [default: no files]
    #[arg(long, value_name = "DIR")]
    #[serde(with = "One::<PathBuf>")]
    pub qlog: Option<PathBuf>,

    /// Whether the process gives up what it does not need: capabilities, system calls, files of others. Turn
    /// it off only to find out whether it is the cause of a failure [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Confine>())]
    #[serde(with = "One::<Confine>")]
    pub confine: Option<Confine>,

    /// When the configuration file is read again while the process runs [default: manual]
    #[arg(long, value_name = "manual|auto", value_parser = word::<ReloadMode>())]
    #[serde(with = "One::<ReloadMode>")]
    pub reload: Option<ReloadMode>,

    /// How much is logged to stderr; the environment variable RUST_LOG overrides it [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = word::<LogLevel>())]
    #[serde(with = "One::<LogLevel>")]
    pub log_level: Option<LogLevel>,
}

impl ConfigFile for ServerOptions {}

impl ConfigFile for ClientOptions {
    fn set_source(&mut self, source: SourceText) {
        self.class.set_source(source.clone());
        self.bypass.set_source(source);
    }
}

/// A struct with these fields of `preferred`; a missing one is taken from `fallback`.
macro_rules! fields_or_fallback {
    ($preferred:expr, $fallback:expr; $($field:ident)+) => {
        Self { $($field: $preferred.$field.or_fallback($fallback.$field)),+ }
    };
}

impl ServerOptions {
    /// These options; a missing one is taken from `fallback`.
    pub(super) fn or_fallback(self, fallback: Self) -> Self {
        fields_or_fallback! { self, fallback;
            listen tcp old_clients relay_only cert key certificate acme proxy_protocol_from site
            subnet subnet6 tun_name
            auth client_ca crl users public state_dir nat routes dns dns_domain dns_name
            forward max_clients isolate access limit
            max_relays max_user_relays max_memory
            shards name api_socket metrics metrics_users dashboard measure qlog confine reload log_level
        }
    }
}

impl ClientOptions {
    /// These options; a missing one is taken from `fallback`. Options that exclude each other count as one
    /// choice: `--pin` on the command line replaces `ca` of the file.
    pub(super) fn or_fallback(self, mut fallback: Self) -> Self {
        if self.ca.is_some() || !self.pin.is_empty() || self.insecure {
            (fallback.ca, fallback.pin, fallback.insecure) = (None, Vec::new(), false);
        }
        if self.token.is_some() || self.token_file.is_some() {
            (fallback.token, fallback.token_file) = (None, None);
        }
        fields_or_fallback! { self, fallback;
            server choose return_when when_down path link class pipes transport
            ca pin cert key insecure token token_file tun_name
            scheduler cc via
            lane lane_rule routes keep_routes dns dns_local kill_switch kill_switch_lan
            share announce accept_from masquerade forward
            route tun_persist tun_carrier bypass socks5 http state_dir shards name
            api_socket metrics dashboard
            dashboard_cert dashboard_key qlog confine reload log_level
        }
    }
}

fn instance(name: &str) -> Result<String, String> {
    text::<InstanceName>(name).map(|name| name.0)
}

fn one_instance<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(One::<InstanceName>::deserialize(from)?.map(|name| name.0))
}
