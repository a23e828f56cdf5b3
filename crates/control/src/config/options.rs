//! The options of a server and of a client: the one definition behind the command line, its help and
//! the configuration file. A field's name with hyphens is the option and the key; the first lines of
//! its comment are the help.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use ipnet::{IpNet, Ipv4Net};
use mpvpn_types::Transport;
use serde::Deserialize;

use super::{
    CertFiles, CongestionControl, FlowMode, Scheduler,
    classes::ClassTables,
    dns::{DnsServer, DnsWord},
    file::{Content, Source},
    lane::LaneRule,
    limits::LimitRule,
    links::{LinkConfig, list},
    pipes::Pipes,
    shards::Shards,
    site::{self, Site},
    values::{
        AuthMode, InstanceName, LogLevel, Nat, Routes, ServerAddr, Share, Subnet6, Tcp, many, one,
        one_or_number, text,
    },
    via::ViaWord,
};
use crate::{access::AccessRule, auth::Token, identity::Fingerprint};

/// What a server is told, before defaults.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServerOptions {
    /// Listen on this address, UDP and TCP; repeatable [default: 0.0.0.0:443; without root 0.0.0.0:4433]
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    pub listen: Vec<SocketAddr>,

    /// Take TCP connections at the same addresses, for clients that UDP does not get through to: on or off [default: on]
    #[arg(long, value_name = "on|off", value_parser = text::<Tcp>)]
    #[serde(deserialize_with = "one")]
    pub tcp: Option<Tcp>,

    /// Serve clients of the first drafts of MASQUE over TCP: TLS without ALPN, CONNECT-UDP by HTTP/1.1
    #[arg(long)]
    pub old_clients: bool,

    /// Relay TCP and UDP only, without a TUN device: what a server that is not root does anyway
    #[arg(long)]
    pub relay_only: bool,

    /// Certificate, leaf first [default: one of its own, made at the first start]
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    pub cert: Option<PathBuf>,

    /// Private key of the certificate
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    pub key: Option<PathBuf>,

    /// Certificates for other names: the tables `[[certificate]]` of a file.
    #[arg(skip)]
    #[serde(deserialize_with = "site::certificates")]
    pub certificate: Vec<CertFiles>,

    /// Take TCP connections from this network only with the client's address in front (PROXY protocol, version 1 or
    /// 2), as load balancers put it there; repeatable
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(deserialize_with = "site::networks")]
    pub proxy_protocol_from: Vec<IpNet>,

    /// What those see who have no credentials: the table `[site]` of a file.
    #[arg(skip)]
    #[serde(deserialize_with = "site::table")]
    pub site: Option<Site>,

    /// IPv4 network of the tunnel; the server is its first host [default: 10.0.0.0/24]
    #[arg(long, value_name = "CIDR", value_parser = text::<Ipv4Net>)]
    #[serde(deserialize_with = "one")]
    pub subnet: Option<Ipv4Net>,

    /// IPv6 network of the tunnel, or none [default: fd00:6d70:766e::/64]
    #[arg(long, value_name = "CIDR|none", value_parser = text::<Subnet6>)]
    #[serde(deserialize_with = "one")]
    pub subnet6: Option<Subnet6>,

    /// Name of the TUN device [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(deserialize_with = "one")]
    pub tun_name: Option<String>,

    /// How clients prove who they are: token, or none to let everybody in [default: token]
    #[arg(long, value_name = "none|token", value_parser = text::<AuthMode>)]
    #[serde(deserialize_with = "one")]
    pub auth: Option<AuthMode>,

    /// File with the users [default: users.toml in the state folder, made at the first start]
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "one")]
    pub users: Option<PathBuf>,

    /// Folder for what has to survive a restart [default: /var/lib/mpvpn; without root $XDG_STATE_HOME/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    pub state_dir: Option<PathBuf>,

    /// Let clients reach the network behind the server with the server's address [default: on]
    #[arg(long, value_name = "on|off", value_parser = text::<Nat>)]
    #[serde(deserialize_with = "one")]
    pub nat: Option<Nat>,

    /// Carry clients' packets to this network only, and tell clients so, for whose --routes advertised it is; repeatable
    /// [default: everywhere]
    #[arg(long, value_name = "CIDR", value_parser = site::network)]
    #[serde(deserialize_with = "site::networks")]
    pub routes: Vec<IpNet>,

    /// Suggest this resolver to clients, which use it where all their traffic comes here; repeatable
    #[arg(long, value_name = "ADDR", value_parser = text::<DnsServer>)]
    #[serde(deserialize_with = "many")]
    pub dns: Vec<DnsServer>,

    /// Clients at once, at most [default: as many as the subnet has addresses, up to 4096]
    #[arg(long, value_name = "N")]
    pub max_clients: Option<u32>,

    /// Where clients may connect to: the tables `[[access]]` of a file.
    #[arg(skip)]
    pub access: Vec<AccessRule>,

    /// What users may not exceed: the tables `[[limit]]` of a file.
    #[arg(skip)]
    pub limit: Vec<LimitRule>,

    /// TCP connections and UDP flows that the server has open for clients at once, at most [default: 32768]
    #[arg(long, value_name = "N")]
    pub max_relays: Option<u32>,

    /// Those for one user, at most [default: 8192]
    #[arg(long, value_name = "N")]
    pub max_user_relays: Option<u32>,

    /// Threads that carry packets: a number up to 16, or auto: one a processor if there are more than two [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(deserialize_with = "one_or_number")]
    pub shards: Option<Shards>,

    /// Name of this server among the mpvpn processes of this machine [default: that of the TUN, else server]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    pub name: Option<String>,

    /// Unix socket for `mpvpn status` [default: server-NAME.sock in /run/mpvpn; without root in $XDG_RUNTIME_DIR/mpvpn]
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "one")]
    pub api_socket: Option<PathBuf>,

    /// Offer metrics for Prometheus at http://ADDR:PORT/metrics, to all who can reach that address
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "one")]
    pub metrics: Option<SocketAddr>,

    /// Write files in the format qlog to this folder, 1 GiB at most: packets, losses and congestion control of each
    /// connection
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    pub qlog: Option<PathBuf>,

    /// error, warn, info, debug or trace; RUST_LOG has the last word [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = text::<LogLevel>)]
    #[serde(deserialize_with = "one")]
    pub log_level: Option<LogLevel>,
}

/// What a client is told, before defaults.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClientOptions {
    /// The server's name or address, and UDP port if it is not 443
    #[arg(long, value_name = "HOST:PORT", value_parser = text::<ServerAddr>)]
    #[serde(deserialize_with = "one")]
    pub server: Option<ServerAddr>,

    /// Use this interface, or all with names like 'wwan*'; repeatable [default: auto, every interface
    /// with a default route]
    #[arg(long, value_name = "IFACE|auto", value_parser = text::<String>)]
    #[serde(deserialize_with = "many")]
    pub path: Vec<String>,

    /// How links are used: the tables `[[link]]` of a file.
    #[arg(skip)]
    #[serde(deserialize_with = "list")]
    pub link: Vec<LinkConfig>,

    /// Classes of traffic: the tables `[[class]]` of a file.
    #[arg(skip)]
    pub class: ClassTables,

    /// Paths over each link, each from a source port of its own, for operators that limit every UDP session: a
    /// number up to 8, or auto, which tries whether more of them carry more;
    /// the entry of a link in the file comes first [default: 1]
    #[arg(long, value_name = "auto|N", value_parser = text::<Pipes>)]
    #[serde(deserialize_with = "one_or_number")]
    pub pipes: Option<Pipes>,

    /// What packets travel in: quic (over UDP), tcp (inside HTTP/2, to the same port), or auto, which is tcp where UDP does
    /// not get through; the entry of a link in the file comes first [default: auto]
    #[arg(long, value_name = "auto|quic|tcp", value_parser = text::<Transport>)]
    #[serde(deserialize_with = "one")]
    pub transport: Option<Transport>,

    /// Trust a server whose certificate is in this file, or signed for its name by a CA in it
    #[arg(long, value_name = "PEM")]
    #[serde(deserialize_with = "one")]
    pub ca: Option<PathBuf>,

    /// Trust the server whose certificate has this SHA-256, as the server prints it
    #[arg(long, value_name = "SHA256", value_parser = text::<Fingerprint>)]
    #[serde(deserialize_with = "one")]
    pub pin: Option<Fingerprint>,

    /// Trust any server: anybody on the way can read and change everything
    #[arg(long)]
    pub insecure: bool,

    /// Token of a user; others on this machine can see it in the list of processes
    #[arg(long, value_name = "TOKEN", value_parser = text::<Token>)]
    #[serde(deserialize_with = "one")]
    pub token: Option<Token>,

    /// File with the token
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "one")]
    pub token_file: Option<PathBuf>,

    /// Name of the TUN device [default: mpvpn0]
    #[arg(long, value_name = "NAME", value_parser = text::<String>)]
    #[serde(deserialize_with = "one")]
    pub tun_name: Option<String>,

    /// How packets are spread over the paths: auto, minrtt, balanced (by what they
    /// carry), weighted (by the weights of the links), redundant (every packet on all), flow (a flow stays
    /// on its path) or failover (one path at a time) [default: auto]
    #[arg(long, value_name = "NAME", value_parser = text::<Scheduler>)]
    #[serde(deserialize_with = "one")]
    pub scheduler: Option<Scheduler>,

    /// Congestion control of every path, in both directions: bbr or cubic [default: bbr]
    #[arg(long, value_name = "bbr|cubic", value_parser = text::<CongestionControl>)]
    #[serde(deserialize_with = "one")]
    pub cc: Option<CongestionControl>,

    /// Reach the server by this HTTP proxy where it is reached by TCP, or none [default: what https_proxy or
    /// all_proxy names in the environment, unless no_proxy has the server]
    #[arg(long, value_name = "http://[USER:PASSWORD@]HOST:PORT|none", value_parser = text::<ViaWord>)]
    #[serde(deserialize_with = "one")]
    pub via: Option<ViaWord>,

    /// How TCP connections travel: datagram (as packets), stream (they end here, and the server makes
    /// others) or auto, which is stream to public addresses if the server translates addresses and this client has
    /// one shard [default: auto]
    #[arg(long, value_name = "NAME", value_parser = text::<FlowMode>)]
    #[serde(deserialize_with = "one")]
    pub lane: Option<FlowMode>,

    /// How they travel to some destinations: the tables `[[lane-rule]]` of a file.
    #[arg(skip)]
    pub lane_rule: Vec<LaneRule>,

    /// What goes into the tunnel: all, advertised (what the server says) or none (the tunnel's own
    /// network only) [default: all]
    #[arg(long, value_name = "NAME", value_parser = text::<Routes>)]
    #[serde(deserialize_with = "one")]
    pub routes: Option<Routes>,

    /// Ask this resolver while the tunnel is up, repeatable; or off: leave the system's resolver alone; or
    /// auto: what the server suggests, if everything goes into the tunnel [default: auto]
    #[arg(long, value_name = "ADDR|auto|off", value_parser = text::<DnsWord>)]
    #[serde(deserialize_with = "many")]
    pub dns: Vec<DnsWord>,

    /// Let the machines behind this interface, or of this network, use the tunnel; repeatable
    #[arg(long, value_name = "IFACE|CIDR", value_parser = text::<Share>)]
    #[serde(deserialize_with = "many")]
    pub share: Vec<Share>,

    /// Offer a SOCKS5 proxy, for TCP and UDP, to apps at this TCP address; repeatable
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    pub socks5: Vec<SocketAddr>,

    /// Offer an HTTP proxy to apps at this TCP address; repeatable
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "many")]
    pub http: Vec<SocketAddr>,

    /// Folder for what links have used of their quotas [default: /var/lib/mpvpn]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    pub state_dir: Option<PathBuf>,

    /// Threads that carry packets, each with a connection of its own: a number up to 16, or auto, which
    /// is one [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = text::<Shards>)]
    #[serde(deserialize_with = "one_or_number")]
    pub shards: Option<Shards>,

    /// Name of this client among the mpvpn processes of this machine [default: that of the TUN]
    #[arg(long, value_name = "NAME", value_parser = instance)]
    #[serde(deserialize_with = "one_instance")]
    pub name: Option<String>,

    /// Unix socket for `mpvpn status` [default: /run/mpvpn/client-NAME.sock]
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "one")]
    pub api_socket: Option<PathBuf>,

    /// Offer metrics for Prometheus at http://ADDR:PORT/metrics, to all who can reach that address
    #[arg(long, value_name = "ADDR:PORT", value_parser = text::<SocketAddr>)]
    #[serde(deserialize_with = "one")]
    pub metrics: Option<SocketAddr>,

    /// Write files in the format qlog to this folder, 1 GiB at most: packets, losses and congestion control of each
    /// connection
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "one")]
    pub qlog: Option<PathBuf>,

    /// error, warn, info, debug or trace; RUST_LOG has the last word [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = text::<LogLevel>)]
    #[serde(deserialize_with = "one")]
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
