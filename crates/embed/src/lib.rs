//! mpvpn inside an app: a client whose packets the app has, as Android's `VpnService` gives them or another TCP/IP stack
//! makes them.
//!
//! In: a configuration with the keys of `client.toml`, packets, news of the network. Out: packets, events ([`Event`]), the
//! status. [`c`] has the same for C (`include/mpvpn.h`).
//!
//! What always holds:
//! - It needs no privilege. It changes nothing on the machine, takes no signal, prints nothing, and never ends the process.
//! - A process may have several tunnels. Each has threads of its own, which are gone, with all their descriptors, when
//!   [`Tunnel::stop`] returns.
//! - What goes wrong is a value or an event; no panic leaves this crate.
// Threads and clocks are what an app is made of.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod c;
mod log;
mod tunnel;

pub use log::Level;
pub use mpvpn_control::status::Status;
pub use mpvpn_engine::{
    EngineError as Error, GivenLink as Link,
    client::embedded::{Event, Network},
};
pub use tunnel::{Builder, Tunnel};
