//! Emulated links between network namespaces, for demonstrations, tests and benchmarks.
//!
//! In: descriptions of links (`"100mbit,12ms,loss=1%"`) and programs to run. Out: a small network on this
//! machine, in which those programs see ordinary interfaces:
//!
//! ```text
//!  lan ── client ══ eth1 ⇄ up1 ══ server ── inet      eth<i>/up<i>: two TAP devices, joined by one thread
//!               ╚═ eth2 ⇄ up2 ═╝                      of this process that shapes every frame
//! ```
//!
//! * [`emulation`] decides for each packet whether it is dropped and when it is delivered; it has neither
//!   clock nor socket.
//! * [`Lab`] creates and removes namespaces, devices and processes; [`LinkHandle`] changes links of a running
//!   lab.
//! * [`vpn`] runs the `mpvpn` binary in a lab; [`cli`] is `mpvpn lab`, with `demo` and `classes` as two of
//!   its commands.
//!
//! Always holds: links do not reorder packets; dropping a [`Lab`] removes everything that it created; what a
//! lab of a killed process left is removed when the next lab starts.
// This crate is an edge: it talks to the kernel, the clock, files and other processes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod classes;
mod cleanup;
pub mod cli;
mod control;
mod demo;
pub mod emulation;
mod emulator;
mod error;
mod lab;
mod link;
mod namespace;
pub mod plot;
mod process;
mod requirements;
mod results;
mod screen;
mod shaper;
mod signals;
mod spec;
mod tap;
pub mod vpn;

pub use emulation::{Counters, HISTORY_STEP};
pub use error::LabError;
pub use lab::{INET_V4, INET_V6, Lab, LabBuilder, SERVER_V4, SERVER_V6};
pub use link::{Direction, History, LinkHandle, LinkStats};
pub use namespace::Namespace;
pub use process::Process;
pub use shaper::UdpFlow;
pub use signals::remove_labs_when_interrupted;
pub use spec::{ByteCount, ChannelParams, LinkKind, LinkSpec, ParseSpecError};
