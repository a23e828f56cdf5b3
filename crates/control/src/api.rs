//! The local API: HTTP/1.1 on a unix socket that only its owner can open.
//!
//! In: requests of programs on this machine. Out: `GET /v1/status`, a [`Status`](crate::status::Status)
//! in JSON; `GET /v1/flows`, a [`FlowList`](crate::status::FlowList); `GET /v1/events`, the last
//! [events](crate::events) in lines of JSON, and with `?follow` those that come; `POST /v1/links/NAME` with a
//! [`LinkChange`](crate::config::LinkChange) in JSON changes a link and answers with the
//! [`Link`](crate::status::Link); `POST /v1/echoes` tells on which paths [pings](crate::measure) travelled;
//! `POST /v1/measure` puts measured flows on chosen links; `POST /v1/reload` has the configuration read again
//! and answers with [`ReloadReport`](crate::config::ReloadReport); `POST /v1/dashboard/link` answers with a
//! [`DashboardLink`]. Always holds: a socket in use is never taken away from a live process; what waits, is
//! read or is answered is bounded in size and time; the socket's file is gone when the server is.
//!
//! All requests are defined in `requests.rs`; `server.rs` and `client.rs` know none of them.

mod client;
mod requests;
mod server;

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

pub use client::list_sockets;
pub use requests::*;
pub use server::{RequestHandler, Server};

use crate::{Error, Result, dirs, status::Role};

/// Folder of the API sockets of root's processes, unless `--api-socket` names another path.
pub const SOCKET_DIR: &str = "/run/mpvpn";

/// Path of the API socket of root's instance `name`.
pub fn default_socket(role: Role, name: &str) -> PathBuf {
    PathBuf::from(SOCKET_DIR).join(format!("{role}-{name}.sock"))
}

/// Path of the API socket of the instance `name` in the runtime folder of the calling user.
pub fn user_socket(role: Role, name: &str) -> Result<PathBuf> {
    let dir = dirs::runtime_dir().ok_or_else(|| {
        Error::usage(
            "there is no folder for the socket of the local API: XDG_RUNTIME_DIR is not set",
            "log in as this user, so that XDG_RUNTIME_DIR is set, or give --api-socket PATH",
        )
    })?;
    Ok(dir.join(format!("{role}-{name}.sock")))
}

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

#[cfg(test)]
mod tests;
