//! The configuration of a server or client.
//!
//! In: the options of the command line ([`ServerOptions`], [`ClientOptions`]) and a TOML file with the same
//! names as keys. Out: [`ServerConfig`] and [`ClientConfig`], with defaults filled in and contradictions
//! refused. Always holds: the command line overrides the file, the file overrides the defaults.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod acme;
mod announce;
mod app;
mod block;
mod bypass;
mod class_reload;
mod classes;
mod classify;
mod dashboard;
mod defaults;
mod dns;
mod dns_names;
mod file;
mod forward;
mod inspect;
mod lane;
pub mod limits;
mod links;
pub mod log;
mod options;
mod proxy;
mod reload;
mod render_classes;
mod resolve;
mod route;
mod servers;
mod service;
mod shards;
mod site;
mod text_or_table;
mod via;
pub(crate) mod words;

pub use acme::{Acme, AcmeChallenge};
pub use announce::{SiteConfig, SiteNetwork};
pub use block::BlockWish;
pub use bypass::{BypassRule, Mac};
pub use classes::{
    ClassConfig, ClassTables, KernelMatch, Mark, MatchRule, RuleOrigin, SteeringRule, rules_of,
};
pub use classify::{Classification, PacketDescription, PacketRoute};
pub use dashboard::ClientDashboard;
pub use defaults::{CLIENT_FILE, SERVER_FILE, TUN_NAME};
pub use dns::{Dns, ServerDns};
pub use dns_names::{DnsName, DnsNames};
pub use forward::{Forward, ForwardHost, ForwardTarget, ForwardedPorts};
pub use inspect::values;
pub use lane::LaneRule;
pub use limits::LimitRule;
pub use links::{LinkConfig, is_match};
pub use mpvpn_path::Scheduler;
pub use mpvpn_types::{BitRate, CongestionControl, FlowMode, most_similar};
pub use options::{ClientOptions, ServerOptions};
pub use proxy::Proxies;
pub use reload::{ConfigSource, ServerChanges, ServerSetting};
pub use render_classes::render_classes;
pub use resolve::{ClientConfig, KillSwitch, ServerConfig};
pub use route::RouteRule;
pub use servers::{Choose, Return, Server, ServerOption, WhenDown};
pub use service::{Rights, ServerMode};
pub use shards::Shards;
pub use site::{DEFAULT_SERVER_FIELD, Site, SiteContent};
pub use via::{ProxyCredentials, ViaOption, ViaProxy};
pub use words::{
    AuthMode, Confine, FileKind, LogLevel, Nat, ReloadMode, Routes, SharedNetwork, Subnet6, Tcp,
};
