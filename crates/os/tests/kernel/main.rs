//! Tests of sockets, devices and network configuration with the real kernel; one file for each subject.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "real sockets, processes and clocks")]

mod client_filter;
mod common;
mod forged;
mod instances;
mod kill_switch;
mod links;
mod network;
mod steer;
mod tun;
mod udp;
