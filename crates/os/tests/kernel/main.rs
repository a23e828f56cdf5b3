//! Sockets, devices and settings against the kernel, one file a subject.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "real sockets, processes and clocks")]

mod common;
mod mptcp;
mod network;
mod steer;
mod tun;
mod udp;
