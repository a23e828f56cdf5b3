//! mpvpn inside an app: a client that exchanges IP packets with the app, for example with Android's
//! `VpnService` or a TCP/IP stack in user space.
//!
//! In: a configuration with the keys of `client.toml`, packets, changes of the network. Out: packets, events
//! ([`Event`]), the status. [`c`] has the same functions for C (`include/mpvpn.h`).
//!
//! Always holds:
//! - It needs no privilege. It changes nothing on the machine, takes no signal, prints nothing, and never
//!   ends the process.
//! - A process may have several tunnels. Each has threads of its own, which are gone, with all their
//!   descriptors, when [`Tunnel::stop`] returns.
//! - Errors are return values or events; no panic leaves this crate.
// Threads and clocks are what an app is made of.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod c;
mod log;
mod tunnel;

pub use log::Level;
pub use mpvpn_client::embedded::{Event, Network};
pub use mpvpn_error::RunError as Error;
pub use mpvpn_links::GivenLink as Link;
pub use mpvpn_status::Status;
pub use tunnel::{Builder, Tunnel};
