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
//! * [`requirements`], [`process`] and [`signals`] are for programs with a lab: requirements of the machine,
//!   programs that end with the lab, and the removal of labs after Ctrl-C.
//!
//! Always holds: links do not reorder packets; dropping a [`Lab`] removes everything that it created; what a
//! lab of a killed process left is removed when the next lab starts.
// This crate is an edge: it talks to the kernel, the clock, files and other processes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod cleanup;
pub mod emulation;
mod emulator;
mod error;
mod lab;
mod link;
mod namespace;
pub mod process;
mod queue;
pub mod requirements;
mod shaper;
pub mod signals;
mod spec;
mod tap;

pub use cleanup::RUN_DIR;
pub use emulation::{Counters, HISTORY_STEP};
pub use error::LabError;
pub use lab::{INET_V4, INET_V6, Lab, LabBuilder, SERVER_V4, SERVER_V6};
pub use link::{Direction, History, LinkHandle, LinkStats};
pub use namespace::Namespace;
pub use process::Process;
pub use queue::Discipline;
pub use shaper::UdpFlow;
pub use signals::remove_labs_when_interrupted;
pub use spec::{ByteCount, ChannelParams, LinkKind, LinkSpec, ParseSpecError, parse_share};
