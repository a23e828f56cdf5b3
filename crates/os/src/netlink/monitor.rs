//! News of links, addresses and routes, as they happen.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use ipnet::IpNet;
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{SocketAddr, protocols::NETLINK_ROUTE};

use super::{
    address, link,
    route::{self, Route},
    socket::{self, Messages},
};
use crate::error::OsError;

/// Bytes of the receive buffer: a burst of some thousand routes fits.
const BUFFER: libc::c_int = 1024 * 1024;

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An interface appeared, changed or went.
    Link {
        /// Its index.
        index: u32,
        /// Its name.
        name: String,
        /// Whether it is switched on.
        up: bool,
        /// Whether it is on and has a carrier.
        carrier: bool,
        /// Whether it is gone.
        removed: bool,
    },
    /// An interface got or lost an address. One that is still being checked for duplicates is
    /// reported only when it can be used.
    Address {
        /// The interface.
        index: u32,
        /// The address with the length of its prefix.
        address: IpNet,
        /// Whether it is gone.
        removed: bool,
    },
    /// A route came or went.
    Route {
        /// The route.
        route: Route,
        /// Whether it is gone.
        removed: bool,
    },
    /// News came faster than they were read and some are lost: list everything again.
    Overrun,
}

/// A nonblocking subscription.
#[derive(Debug)]
pub struct Monitor {
    socket: netlink_sys::Socket,
    buffer: Vec<u8>,
    waiting: VecDeque<Event>,
}

impl Monitor {
    /// Subscribes in the network namespace of this thread.
    pub fn open() -> Result<Self, OsError> {
        let socket = subscribe().map_err(|e| OsError::kernel("subscribe to", "network changes", e))?;
        Ok(Self { socket, buffer: Vec::new(), waiting: VecDeque::new() })
    }

    /// The next piece of news; `None` if there is none.
    #[allow(clippy::should_implement_trait, reason = "nothing now does not mean the end")]
    pub fn next(&mut self) -> io::Result<Option<Event>> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Ok(Some(event));
            }
            match socket::receive(&self.socket, &mut self.buffer) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Some(Event::Overrun)),
                Err(error) => return Err(error),
            }
            let messages = Messages(&self.buffer).filter_map(socket::parse);
            for message in messages {
                if let NetlinkPayload::InnerMessage(message) = message.payload {
                    self.waiting.extend(events(&message));
                }
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn subscribe() -> io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(NETLINK_ROUTE)?;
    let groups = libc::RTMGRP_LINK
        | libc::RTMGRP_IPV4_IFADDR
        | libc::RTMGRP_IPV6_IFADDR
        | libc::RTMGRP_IPV4_ROUTE
        | libc::RTMGRP_IPV6_ROUTE;
    socket.bind(&SocketAddr::new(0, groups as u32))?;
    socket.set_non_blocking(true)?;
    socket::grow_buffer(&socket, BUFFER);
    Ok(socket)
}

fn events(message: &RouteNetlinkMessage) -> Vec<Event> {
    use RouteNetlinkMessage as M;
    let removed = matches!(message, M::DelLink(_) | M::DelAddress(_) | M::DelRoute(_));
    match message {
        M::NewLink(_) | M::DelLink(_) => link::parse(message)
            .map(|link| Event::Link {
                index: link.index,
                name: link.name,
                up: link.up && !removed,
                carrier: link.carrier && !removed,
                removed,
            })
            .into_iter()
            .collect(),
        M::NewAddress(_) | M::DelAddress(_) => address::parse(message)
            .filter(|info| info.usable || removed)
            .map(|info| Event::Address { index: info.index, address: info.address, removed })
            .into_iter()
            .collect(),
        M::NewRoute(_) | M::DelRoute(_) => {
            route::parse(message).into_iter().map(|route| Event::Route { route, removed }).collect()
        }
        _ => Vec::new(),
    }
}
