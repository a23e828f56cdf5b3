//! Notices changes of nftables by any program.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

use crate::{error::OsError, netlink};

/// `NFNLGRP_NFTABLES` of linux/netfilter/nfnetlink.h.
const NFTABLES_GROUP: u32 = 7;

/// A nonblocking subscription to changes of nftables in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct TableMonitor {
    socket: Socket,
    buffer: Vec<u8>,
}

impl TableMonitor {
    /// Subscribes.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open() -> Result<Self, OsError> {
        let open = || {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind(&SocketAddr::new(0, 0))?;
            socket.add_membership(NFTABLES_GROUP)?;
            socket.set_non_blocking(true)?;
            Ok::<_, io::Error>(socket)
        };
        let socket = open().map_err(|error| OsError::kernel("subscribe to", "changes of nftables", error))?;
        Ok(Self { socket, buffer: Vec::new() })
    }

    /// Whether any table was changed since the last call, by this process or another.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn take_changed(&mut self) -> io::Result<bool> {
        let mut changed = false;
        loop {
            match netlink::receive(&self.socket, &mut self.buffer) {
                Ok(()) => changed = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(changed),
                // Messages were lost: something has changed.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => changed = true,
                Err(error) => return Err(error),
            }
        }
    }
}

crate::as_fd!(TableMonitor, socket);
