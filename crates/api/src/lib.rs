//! The local API: HTTP/1.1 on a unix socket.
//!
//! In: requests of programs on this machine. Out: `GET /v1/status`, a [`Status`](mpvpn_status::Status) in
//! JSON; `GET /v1/flows`, a [`FlowList`](mpvpn_status::FlowList); `GET /v1/events`, the last
//! [events](mpvpn_status::events) in lines of JSON, and with `?follow` those that come; `POST /v1/links/NAME`
//! with a [`LinkChange`](mpvpn_status::link_change::LinkChange) in JSON changes a link and answers with the
//! [`Link`](mpvpn_status::Link); `POST /v1/echoes` tells on which paths [pings](mpvpn_status::measure)
//! travelled; `POST /v1/measure` puts measured flows on chosen links; `POST /v1/reload` has the configuration
//! read again and answers with [`ReloadReport`](mpvpn_status::reload_report::ReloadReport); `POST
//! /v1/dashboard/link` answers with a [`DashboardLink`]. Always holds: only requests that are marked so are
//! answered to more than root, the own user and administrators, by the user and groups of the program; a
//! socket in use is never taken away from a live process; what waits, is read or is answered is bounded in
//! size and time; the socket's file is gone when the server is.
//!
//! All requests are defined in `requests.rs`; `server.rs` and `client.rs` know none of them.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod access;
mod client;
pub mod metrics;
mod requests;
mod server;
pub mod untrusted;

use std::{io, os::fd::OwnedFd, path::Path, time::Duration};

use tokio::sync::oneshot;

pub use client::{list_sockets, may_list};
pub use requests::*;
pub use server::{RequestHandler, Server};

/// Time for the reply of the data plane, which answers between two batches of packets. Shorter fails on a
/// busy machine; longer than the client's timeout (5 s) would make the reason invisible.
const DATA_PLANE_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of the process that listens at the socket `path`.
pub fn process_at(path: &Path) -> Option<u32> {
    let stream = connect_nonblocking(path).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// Connects to the socket `path` without waiting. `WouldBlock` means that a process listens and its backlog
/// is full.
fn connect_nonblocking(path: &Path) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The reply of the data plane; `None` if it does not reply within `DATA_PLANE_TIMEOUT`.
pub async fn ask_data_plane<T>(
    handler: &RequestHandler,
    request: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
) -> Option<T> {
    let (sender, receiver) = oneshot::channel();
    handler(request(sender));
    tokio::time::timeout(DATA_PLANE_TIMEOUT, receiver).await.ok()?.ok()
}

#[cfg(test)]
mod tests;
