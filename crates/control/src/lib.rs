//! Configuration, identity, authentication and monitoring: everything of a server or client beside the tunnel
//! itself.
//!
//! In: command-line options, TOML files, PEM files, the state directory, requests on a unix socket.
//! Out: validated [`config::ServerConfig`] and [`config::ClientConfig`], a server's
//! [`identity::Identity`], rustls configurations, the check of a client's credentials and of where it may
//! connect to ([`access::Access`]), the local
//! API with its [`status::Status`] and the last [`events`], and the same as metrics ([`metrics::Server`]);
//! what a [`check::CheckReport`] of the links has found.
//!
//! Always holds: nothing here touches a packet, a route or a UDP socket that sends. Every file that
//! holds a secret is made with mode 0600 before the secret is written to it. Input from files, peers
//! and the API is bounded and never panics; every error names the file or option it comes from and
//! knows what to do next ([`Error::next_step`]).
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod access;
pub mod acme;
pub mod api;
pub mod auth;
pub mod backup;
pub mod check;
pub mod client_certificates;
pub mod config;
pub mod credentials;
mod dirs;
mod error;
pub mod events;
pub mod files;
pub mod given_pins;
pub mod http;
pub mod identity;
pub mod join;
pub mod kept_session;
pub mod leases;
pub mod limiter;
pub mod log;
pub mod measure;
pub mod metrics;
pub mod quota_usage;
pub mod rates;
pub mod reference;
pub mod setup;
pub mod shared;
pub mod status;
pub mod tls;
pub mod users;

pub use error::Error;

/// The result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;
