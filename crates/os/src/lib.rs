//! Wrappers around Linux system calls and netlink: synchronous, without an async runtime.
//!
//! In: calls of the crates above, and descriptors that became ready. Out:
//! - packets of the TUN device ([`tun`]), or of a descriptor that an app provides ([`PacketFd`]);
//! - datagrams of the UDP sockets of the links ([`udp`]), and bytes of TCP connections ([`tcp`]);
//! - readiness of descriptors ([`poll`]);
//! - changes of interfaces, addresses and routes ([`netlink::Monitor`]);
//! - a machine configured for a tunnel ([`tunnel_net`], which uses [`netlink`], [`firewall`] and [`sysctl`]),
//!   and its name servers ([`dns`]).
//!
//! Always holds:
//! - Nothing here knows QUIC, sessions or configuration files.
//! - A descriptor is nonblocking unless its type says otherwise, and closes with its owner.
//! - Every change of the system that can outlive this process is written to the journal ([`undo`]) *before*
//!   it is made, and reverted in reverse order: by its owner at exit, otherwise by the next process with the
//!   same journal name.
//! - Messages of the kernel are parsed without panics; a message that cannot be parsed is skipped and logged.
//! - Calls act on the network namespace of the calling thread.

// This crate is at the edge: it uses clocks, files and sockets.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

/// Implements `AsFd` for a type whose descriptor is this field.
macro_rules! as_fd {
    ($name:ty, $field:tt) => {
        impl ::std::os::fd::AsFd for $name {
            fn as_fd(&self) -> ::std::os::fd::BorrowedFd<'_> {
                self.$field.as_fd()
            }
        }
    };
}
pub(crate) use as_fd;

pub mod arguments;
pub mod confinement;
pub mod dns;
mod error;
pub mod file_watch;
pub mod firewall;
pub mod folder;
pub mod helper;
pub mod icmp;
pub mod kill_switch;
pub mod limits;
pub mod memory;
pub mod netlink;
mod option;
mod packet_fd;
pub mod poll;
pub mod port_holders;
pub mod privilege;
pub mod program;
mod regular_file;
pub mod service_manager;
pub mod sysctl;
pub mod tcp;
pub mod tun;
pub mod tunnel_net;
pub mod udp;
pub mod undo;
pub mod untrusted;
pub mod usage;

pub use error::OsError;
pub use packet_fd::PacketFd;
pub use tcp::{TcpAcceptor, TcpOptions, TcpSocket};
pub use tun::{Tun, TunConfig};
pub use udp::{ConnectedUdp, Outgoing, Received, RecvBatch, UdpOptions, UdpSocket};
pub use undo::UndoJournal;
