//! Connections of two endpoints in simulated time, one file a subject.

#![allow(clippy::disallowed_methods, reason = "a simulation needs an instant to begin with")]

mod classes;
mod mtu;
mod qlog;
mod tls;
