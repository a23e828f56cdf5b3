//! Measures a running client from outside, with ordinary sockets: for `mpvpn ping` and `mpvpn measure`.
//!
//! In: addresses, the device of the tunnel, what to measure. Out: figures. Always holds: the load is made by
//! this process, not by the data plane; what is sent goes to the responder of the server, or to addresses
//! that the user names; a signal ends every wait within 50 ms.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod echo_probe;
mod interrupt;
mod lan_page;
mod link_lease;
mod long;
mod ping;
mod plan;
mod responder;
mod run;
mod tcp_load;
mod udp_sweep;

use std::time::Duration;

pub use interrupt::Interrupt;
pub use lan_page::LanPage;
pub use ping::{PingPlan, PingResult, Pinger};
pub use plan::{CUT_SECONDS, DEFAULT_LOAD_SECONDS, MeasurePlan};
pub use run::{MeasureError, MeasureEvent, links_of, measure};

/// How often waits look for a signal: longer delays the end after Ctrl-C, shorter costs wake-ups.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
