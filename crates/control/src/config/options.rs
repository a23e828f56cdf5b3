//! The options of a server and of a client: the one definition behind the command line, its help and
//! the configuration file. A field's name with hyphens is the option and the key; the first lines of
//! its comment are the help.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use ipnet::{IpNet, Ipv4Net};
use mpvpn_types::Transport;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    CertFiles, CongestionControl, FlowMode, Scheduler,
    classes::ClassTables,
    dns::{DnsOption, DnsServer},
    file::{Content, Source},
    lane::LaneRule,
    limits::LimitRule,
    links::{LinkConfig, list},
    pipes::Pipes,
    rules::Prefix,
    schema,
    shards::Shards,
    site::{self, Site},
    values::{
        AuthMode, InstanceName, LogLevel, Nat, Routes, ServerAddr, SharedNetwork, Subnet6, Tcp, many, one,
        one_or_number, text, word,
    },
    via::ViaOption,
};
use crate::{access::AccessRule, auth::Token, identity::Fingerprint};

/// The configuration file of a server (`/etc/mpvpn/server.toml`): keys and tables.
#[derive(Args, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "mpvpn server")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServerOptions {
    /// Listen on this address, UDP and TCP; repeatable [default: 0.0.0.0:443; without root 0.0.0.0:4433]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<SocketAddr>")]
    pub listen: Vec<SocketAddr>,

    /// Listen on TCP at the same addresses, for clients whose networks block UDP [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Tcp>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Tcp>")]
    pub tcp: Option<Tcp>,

    /// Serve clients of early MASQUE drafts over TCP: TLS without ALPN, CONNECT-UDP in HTTP/1.1
    #[arg(long)]
    pub old_clients: bool,

    /// Relay TCP and UDP only, without a TUN device; a server without root always does this
    #[arg(long)]
    pub relay_only: bool,

    /// Certificate chain, leaf first [default: a self-signed certificate, made at the first start]
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub cert: Option<PathBuf>,

    /// Private key of the certificate
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub key: Option<PathBuf>,

    /// Further certificates for other server names: the tables `[[certificate]]`
    #[arg(skip)]
    #[serde(deserialize_with = "site::certificates")]
    #[schemars(with = "Vec<site::CertificateTable>")]
    pub certificate: Vec<CertFiles>,

    /// Require a PROXY protocol header (version 1 or 2) on TCP connections from this network; a load balancer sends
    /// the client's address in it; repeatable
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(deserialize_with = "site::networks")]
    #[schemars(schema_with = "schema::some::<Prefix>")]
    pub proxy_protocol_from: Vec<IpNet>,

    /// The web site for visitors without credentials: the table `[site]`
    #[arg(skip)]
    #[serde(deserialize_with = "site::table")]
    #[schemars(with = "site::SiteTable")]
    pub site: Option<Site>,

    /// IPv4 network of the tunnel; the server is its first host [default: 10.0.0.0/24]
    #[arg(long, value_name = "CIDR", value_parser = text::<Ipv4Net>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Ipv4Net>")]
    pub subnet: Option<Ipv4Net>,

    /// IPv6 network of the tunnel, or none [default: fd00:6d70:766e::/64]
    #[arg(long, value_name = "CIDR|none", value_parser = text::<Subnet6>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Subnet6>")]
    pub subnet6: Option<Subnet6>,

    /// Name of the TUN device [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<String>")]
    pub tun_name: Option<String>,

    /// How clients authenticate [default: token]
    #[arg(long, value_name = "none|token", value_parser = word::<AuthMode>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<AuthMode>")]
    pub auth: Option<AuthMode>,

    /// File of the users and their tokens [default: users.toml in the state folder, made at the first start]
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub users: Option<PathBuf>,

    /// Folder for certificate, users and other data that survive a restart [default: /var/lib/mpvpn; without root $XDG_STATE_HOME/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub state_dir: Option<PathBuf>,

    /// Translate clients' addresses to the server's own on the way to the network behind it [default: on]
    #[arg(long, value_name = "on|off", value_parser = word::<Nat>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Nat>")]
    pub nat: Option<Nat>,

    /// Carry clients' packets to this network only, and advertise it to clients, which use it with --routes advertised;
    /// repeatable [default: everywhere]
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(deserialize_with = "site::networks")]
    #[schemars(schema_with = "schema::some::<Prefix>")]
    pub routes: Vec<IpNet>,

    /// Suggest this resolver to clients; a client uses it if all its traffic goes into the tunnel; repeatable
    #[arg(long, value_name = "ADDR", value_parser = text::<DnsServer>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<DnsServer>")]
    pub dns: Vec<DnsServer>,

    /// Limit of clients at once [default: as many as the subnet has addresses, up to 4096]
    #[arg(long, value_name = "N")]
    pub max_clients: Option<u32>,

    /// Destinations to which the server opens TCP connections and UDP flows for clients: the tables `[[access]]`
    #[arg(skip)]
    pub access: Vec<AccessRule>,

    /// Limits of users: the tables `[[limit]]`
    #[arg(skip)]
    pub limit: Vec<LimitRule>,

    /// Limit of TCP connections and UDP flows that the server relays at once, for all clients [default: 32768]
    #[arg(long, value_name = "N")]
    pub max_relays: Option<u32>,

    /// Limit of TCP connections and UDP flows that the server relays at once for one user [default: 8192]
    #[arg(long, value_name = "N")]
    pub max_user_relays: Option<u32>,

    /// Threads that carry packets: 1 to 16, or auto, which is one per processor if there are more than two [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(deserialize_with = "one_or_number")]
    #[schemars(schema_with = "schema::one_or_number::<Shards>")]
    pub shards: Option<Shards>,

    /// Name of this server among the mpvpn processes of this machine [default: that of the TUN, else server]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    #[schemars(schema_with = "schema::one::<InstanceName>")]
    pub name: Option<String>,

    /// Unix socket for `mpvpn status` [default: server-NAME.sock in /run/mpvpn; without root in $XDG_RUNTIME_DIR/mpvpn]
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub api_socket: Option<PathBuf>,

    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics, without authentication
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<SocketAddr>")]
    pub metrics: Option<SocketAddr>,

    /// Write qlog files to this folder, 1 GiB at most: packets, losses and congestion control of each connection
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub qlog: Option<PathBuf>,

    /// Level of the log; the environment variable RUST_LOG overrides it [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = word::<LogLevel>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<LogLevel>")]
    pub log_level: Option<LogLevel>,
}

/// The configuration file of a client (`/etc/mpvpn/client.toml`): keys and tables.
#[derive(Args, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[schemars(rename = "mpvpn client")]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClientOptions {
    /// Name or address of the server, with its port if that is not 443; a name is resolved again while the server does not
    /// answer
    #[arg(long, value_name = "HOST:PORT", value_parser = text::<ServerAddr>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<ServerAddr>")]
    pub server: Option<ServerAddr>,

    /// Use this interface as a link, or all whose names match a pattern as in 'wwan*'; repeatable [default: auto, every
    /// interface with a default route]
    #[arg(long, value_name = "IFACE|auto", value_parser = text::<String>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<String>")]
    pub path: Vec<String>,

    /// How single links are used: the tables `[[link]]`
    #[arg(skip)]
    #[serde(deserialize_with = "list")]
    #[schemars(with = "Vec<LinkConfig>")]
    pub link: Vec<LinkConfig>,

    /// Classes of traffic: the tables `[[class]]`
    #[arg(skip)]
    pub class: ClassTables,

    /// Paths over each link, each from a source port of its own, for operators that limit the rate of a UDP session:
    /// 1 to 8, or auto, which adds paths while these raise the rate; `pipes` of a `[[link]]` overrides it
    /// [default: 1]
    #[arg(long, value_name = "auto|N", value_parser = text::<Pipes>)]
    #[serde(deserialize_with = "one_or_number")]
    #[schemars(schema_with = "schema::one_or_number::<Pipes>")]
    pub pipes: Option<Pipes>,

    /// Transport of every link; `transport` of a `[[link]]` overrides it; TCP uses the same port as UDP [default: auto]
    #[arg(long, value_name = "auto|quic|tcp", value_parser = word::<Transport>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Transport>")]
    pub transport: Option<Transport>,

    /// Trust a server whose certificate is in this file, or is signed for its name by a CA in this file
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub ca: Option<PathBuf>,

    /// Trust the server whose certificate has this SHA-256 fingerprint, which the server prints
    #[arg(long, value_name = "SHA256", value_parser = text::<Fingerprint>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Fingerprint>")]
    pub pin: Option<Fingerprint>,

    /// Trust any server: an attacker on the path can read and change everything
    #[arg(long)]
    pub insecure: bool,

    /// Token of a user; other users of this machine can see it in the list of processes
    #[arg(long, value_name = "TOKEN", value_parser = text::<Token>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Token>")]
    pub token: Option<Token>,

    /// File with the token
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub token_file: Option<PathBuf>,

    /// Name of the TUN device [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<String>")]
    pub tun_name: Option<String>,

    /// How packets are spread over the paths [default: auto]
    #[arg(long, value_name = "NAME", value_parser = word::<Scheduler>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Scheduler>")]
    pub scheduler: Option<Scheduler>,

    /// Congestion control of every path, in both directions [default: bbr]
    #[arg(long, value_name = "bbr|cubic", value_parser = word::<CongestionControl>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<CongestionControl>")]
    pub cc: Option<CongestionControl>,

    /// HTTP proxy for TCP connections to the server, or none [default: the proxy of the environment variable https_proxy
    /// or all_proxy, unless no_proxy names the server]
    #[arg(long, value_name = "http://[USER:PASSWORD@]HOST:PORT|none", value_parser = text::<ViaOption>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<ViaOption>")]
    pub via: Option<ViaOption>,

    /// How TCP connections travel [default: auto]
    #[arg(long, value_name = "NAME", value_parser = word::<FlowMode>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<FlowMode>")]
    pub lane: Option<FlowMode>,

    /// How TCP connections to some destinations travel: the tables `[[lane-rule]]`
    #[arg(skip)]
    pub lane_rule: Vec<LaneRule>,

    /// Destinations whose packets go into the tunnel [default: all]
    #[arg(long, value_name = "NAME", value_parser = word::<Routes>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<Routes>")]
    pub routes: Option<Routes>,

    /// Ask this resolver while the tunnel is up, repeatable (up to 3); or off: keep the resolvers of the system; or auto:
    /// the server's suggestion, if all traffic goes into the tunnel [default: auto]
    #[arg(long, value_name = "ADDR|auto|off", value_parser = text::<DnsOption>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<DnsOption>")]
    pub dns: Vec<DnsOption>,

    /// Let the machines behind this interface, or of this network, use the tunnel; repeatable
    #[arg(long, value_name = "IFACE|CIDR", value_parser = text::<SharedNetwork>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<SharedNetwork>")]
    pub share: Vec<SharedNetwork>,

    /// Offer a SOCKS5 proxy, for TCP and UDP, to apps at this TCP address; repeatable
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<SocketAddr>")]
    pub socks5: Vec<SocketAddr>,

    /// Offer an HTTP proxy to apps at this TCP address; repeatable
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    #[schemars(schema_with = "schema::many::<SocketAddr>")]
    pub http: Vec<SocketAddr>,

    /// Folder for the use of quotas by links [default: /var/lib/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub state_dir: Option<PathBuf>,

    /// Threads that carry packets, each with a connection of its own: 1 to 16, or auto, which is one
    /// [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(deserialize_with = "one_or_number")]
    #[schemars(schema_with = "schema::one_or_number::<Shards>")]
    pub shards: Option<Shards>,

    /// Name of this client among the mpvpn processes of this machine [default: that of the TUN]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    #[schemars(schema_with = "schema::one::<InstanceName>")]
    pub name: Option<String>,

    /// Unix socket for `mpvpn status` [default: /run/mpvpn/client-NAME.sock]
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub api_socket: Option<PathBuf>,

    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics, without authentication
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<SocketAddr>")]
    pub metrics: Option<SocketAddr>,

    /// Write qlog files to this folder, 1 GiB at most: packets, losses and congestion control of each connection
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<PathBuf>")]
    pub qlog: Option<PathBuf>,

    /// Level of the log; the environment variable RUST_LOG overrides it [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = word::<LogLevel>())]
    #[serde(deserialize_with = "one")]
    #[schemars(schema_with = "schema::one::<LogLevel>")]
    pub log_level: Option<LogLevel>,
}

impl Content for ServerOptions {}

impl Content for ClientOptions {
    fn came_from(&mut self, source: Source) {
        self.class.came_from(source);
    }
}

/// An option that may be missing.
pub(super) trait Over {
    /// This option; where it is missing, `below`.
    fn over(self, below: Self) -> Self;
}

impl<T> Over for Option<T> {
    fn over(self, below: Self) -> Self {
        self.or(below)
    }
}

impl<T> Over for Vec<T> {
    fn over(self, below: Self) -> Self {
        if self.is_empty() { below } else { self }
    }
}

impl Over for bool {
    fn over(self, below: Self) -> Self {
        self || below
    }
}

/// Each of these fields of `above`; where one is missing, that of `below`.
macro_rules! over {
    ($above:expr, $below:expr; $($field:ident)+) => {
        Self { $($field: $above.$field.over($below.$field)),+ }
    };
}

impl ServerOptions {
    /// These options; where one is missing, the one of `below`.
    pub(super) fn over(self, below: Self) -> Self {
        over! { self, below;
            listen tcp old_clients relay_only cert key certificate proxy_protocol_from site subnet subnet6 tun_name
            auth users state_dir nat routes dns max_clients access limit max_relays max_user_relays
            shards name api_socket metrics qlog log_level
        }
    }
}

impl ClientOptions {
    /// These options; where one is missing, the one of `below`. Options that exclude each other are
    /// one choice: `--pin` replaces a `ca` below it.
    pub(super) fn over(self, mut below: Self) -> Self {
        if self.ca.is_some() || self.pin.is_some() || self.insecure {
            (below.ca, below.pin, below.insecure) = (None, None, false);
        }
        if self.token.is_some() || self.token_file.is_some() {
            (below.token, below.token_file) = (None, None);
        }
        over! { self, below;
            server path link class pipes transport ca pin insecure token token_file tun_name scheduler cc via
            lane lane_rule routes dns share socks5 http state_dir shards name api_socket metrics qlog log_level
        }
    }
}

fn instance(name: &str) -> Result<String, String> {
    text::<InstanceName>(name).map(|name| name.0)
}

fn one_instance<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(one::<D, InstanceName>(from)?.map(|name| name.0))
}
