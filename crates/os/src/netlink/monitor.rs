//! Notifications of changes of interfaces, addresses and routes (rtnetlink multicast groups).
//!
//! In: messages of the kernel. Out: [`Event`]s. Always holds: if notifications are lost, [`Event::Overrun`]
//! says so.

use std::{collections::VecDeque, io};

use ipnet::IpNet;
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{SocketAddr, protocols::NETLINK_ROUTE};

use super::{
    address, link,
    route::{self, Route},
    socket::{self, Messages},
};
use crate::{error::OsError, option::set_buffer};

/// Bytes of the receive buffer: a burst of some thousand routes fits. In a smaller one notifications are lost
/// sooner, and everything is listed again; a larger one may take kernel memory.
const RECV_BUFFER_BYTES: usize = 1024 * 1024;

/// A change of the network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An interface was added, changed or removed.
    Link {
        /// The interface index.
        index: u32,
        /// The interface name.
        name: String,
        /// Whether it is administratively up.
        up: bool,
        /// Whether it is up and has a carrier.
        carrier: bool,
        /// Whether it was removed.
        removed: bool,
    },
    /// An address was added to an interface, or removed. During duplicate address detection (RFC 4862 §5.4)
    /// an address is not reported yet.
    Address {
        /// The interface index.
        index: u32,
        /// The address with the length of its prefix.
        address: IpNet,
        /// Whether it was removed.
        removed: bool,
    },
    /// A route was added or removed.
    Route {
        /// The route.
        route: Route,
        /// Whether it was removed.
        removed: bool,
    },
    /// The receive buffer overflowed and notifications are lost: list everything again.
    Overrun,
}

/// A nonblocking subscription to notifications.
#[derive(Debug)]
pub struct Monitor {
    socket: netlink_sys::Socket,
    buffer: Vec<u8>,
    pending: VecDeque<Event>,
}

impl Monitor {
    /// Subscribes in the network namespace of this thread.
    pub fn open() -> Result<Self, OsError> {
        let socket = subscribe().map_err(|e| OsError::kernel("subscribe to", "network changes", e))?;
        Ok(Self { socket, buffer: Vec::new(), pending: VecDeque::new() })
    }

    /// The next event; `None` if none waits.
    #[allow(clippy::should_implement_trait, reason = "`None` means that nothing waits now, not the end")]
    pub fn next(&mut self) -> io::Result<Option<Event>> {
        loop {
            if let Some(event) = self.pending.pop_front() {
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
                    self.pending.extend(events(&message));
                }
            }
        }
    }
}

crate::as_fd!(Monitor, socket);

fn subscribe() -> io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(NETLINK_ROUTE)?;
    let groups = libc::RTMGRP_LINK
        | libc::RTMGRP_IPV4_IFADDR
        | libc::RTMGRP_IPV6_IFADDR
        | libc::RTMGRP_IPV4_ROUTE
        | libc::RTMGRP_IPV6_ROUTE;
    socket.bind(&SocketAddr::new(0, groups as u32))?;
    socket.set_non_blocking(true)?;
    // A smaller buffer only overruns more often.
    let _ = set_buffer(&socket, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, RECV_BUFFER_BYTES);
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
