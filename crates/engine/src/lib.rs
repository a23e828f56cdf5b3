//! The event loop: a TUN device on one side, UDP sockets on the other, a tunnel in between.
//!
//! In: a checked configuration. Out: a running client ([`client::run`]) or server
//! ([`server::run`]) that ends when it is told to (SIGINT, SIGTERM, and SIGHUP in a terminal) or when going on makes
//! no sense; or a client inside an app ([`client::embedded`]).
//!
//! Always holds:
//! - A thread that moves packets owns everything on their way; nothing there blocks, locks or
//!   allocates by the packet. There is one of them a shard. One more thread does what is slow: the
//!   local API, name resolution, HTTP over TCP; and one writes qlog files, where they are wanted.
//! - The clock is read once a turn of the loop.
//! - What was changed on the machine is taken back however the loop ends; what a killed process
//!   left behind is taken back by the next start.
#![forbid(unsafe_code)]
// Clocks, sockets and files are what an engine is for.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod answers;
pub mod client;
mod dial;
mod egress;
mod error;
mod event_loop;
mod events;
mod flows;
mod h2_stream;
mod https_server;
mod links;
mod memory_trimmer;
mod packet_io;
mod policies;
mod proxy;
mod qlog;
mod resolver;
pub mod server;
mod shards;
mod slow_thread;
mod splice;
mod status;
mod tcp_transport;
mod wakeup_coalescer;

pub use error::EngineError;
pub use links::{GivenLink, Protect};
pub use slow_thread::Resolve;
