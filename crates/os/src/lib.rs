//! The Linux kernel's edge, synchronous and without a runtime.
//!
//! In: calls of the engine and descriptors that became ready. Out: packets of the TUN device
//! ([`tun`]) or of a descriptor of an app ([`PacketFd`]), datagrams of the links' UDP sockets ([`udp`]), bytes of TCP connections ([`tcp`]),
//! readiness ([`poll`]), news of links,
//! addresses and routes ([`netlink::Monitor`]), and a machine set up for a tunnel ([`tunnel_net`],
//! built of [`netlink`], [`firewall`] and [`sysctl`]; its name servers by [`dns`]).
//!
//! What always holds:
//! - Nothing here knows QUIC, sessions or configuration files.
//! - A descriptor is nonblocking unless its type says otherwise, and closes with its owner.
//! - Every change of the system that a process could leave behind is written to the journal
//!   ([`undo`]) *before* it is made, and is taken back in reverse order: by the owner at exit, else
//!   by the next start.
//! - What the kernel sends is parsed without panics; what cannot be read is skipped and logged.
//! - Calls concern the network namespace of the calling thread.

// The edge of the system: clocks, files and sockets are what this crate is for.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod dns;
mod error;
pub mod firewall;
pub mod folder;
pub mod limits;
pub mod memory;
pub mod netlink;
mod option;
mod packet_fd;
pub mod poll;
pub mod privilege;
pub mod sysctl;
pub mod tcp;
pub mod tun;
pub mod tunnel_net;
pub mod udp;
pub mod undo;

pub use error::OsError;
pub use packet_fd::PacketFd;
pub use tcp::{TcpAcceptor, TcpOptions, TcpSocket};
pub use tun::{Tun, TunConfig};
pub use udp::{ConnectedUdp, Outgoing, Received, RecvBatch, UdpOptions, UdpSocket};
pub use undo::UndoJournal;
