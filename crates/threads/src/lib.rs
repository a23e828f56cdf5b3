//! The threads of a process, at client and server: the event loops of its shards, and the slow thread.
//!
//! In: readiness of sockets, signals, time, messages between threads. Out: iterations of an event loop, and
//! answers of the slow thread.
//!
//! Always holds:
//! - A packet thread (one per shard) owns all state that a packet needs. It does not block, does not lock,
//!   and does not allocate for each packet. The slow thread serves the local API, name resolution and HTTP
//!   over TCP.
//! - Each loop iteration reads the clock once.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod event_loop;
mod loop_timer;
mod memory_trimmer;
pub mod service_manager;
pub mod shards;
pub mod slow_thread;
mod wakeup_coalescer;
pub mod watched_files;
