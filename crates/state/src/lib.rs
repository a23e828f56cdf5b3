//! State that outlives a process: leases of addresses, a client's session, used quotas.
//!
//! In: values of a running process. Out: files, and the values again at the next start. Always holds: a
//! damaged file is moved away and never stops a start.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
mod file;
pub mod kept_session;
pub mod leases;
pub mod quota_usage;
