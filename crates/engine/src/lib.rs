//! The event loops between the kernel (`mpvpn-os`) and the tunnel (`mpvpn-tunnel`).
//!
//! In: a checked configuration. Out: a running client ([`client::run`]) or server ([`server::run`]) that ends
//! on SIGINT, SIGTERM, on SIGHUP in a terminal, or on an error that it cannot recover from; or a client
//! inside an app ([`client::embedded`]).
//!
//! Always holds:
//! - A packet thread (one per shard) owns all state that a packet needs. It does not block, does not lock,
//!   and does not allocate for each packet. The slow thread serves the local API, name resolution and HTTP
//!   over TCP; with `--qlog`, another thread writes qlog files.
//! - Each loop iteration reads the clock once.
//! - Changes to the machine are undone however the process ends; after SIGKILL, the next start undoes them.
#![forbid(unsafe_code)]
// The engine is the place of clocks, sockets and files.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod acme;
mod answers;
pub mod client;
pub mod confine;
mod dial;
mod dns;
mod egress;
mod error;
mod event_loop;
mod events;
mod flows;
mod h2_stream;
pub mod hold;
mod https_server;
mod link_state;
mod links;
mod loop_timer;
pub mod measure;
mod memory_trimmer;
mod overview;
mod packet_io;
mod policies;
mod proxy;
mod qlog;
pub mod reset;
mod resolver;
mod secrets;
pub mod server;
mod service_manager;
pub mod setup;
mod shards;
mod slow_thread;
mod splice;
mod status;
mod tcp_transport;
pub mod untrusted;
mod wakeup_coalescer;
mod watched_files;

pub use error::EngineError;
pub use links::{GivenLink, Protect};
pub use secrets::hide_tokens;
pub use slow_thread::Resolve;
