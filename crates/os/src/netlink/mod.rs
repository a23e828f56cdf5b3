//! Interfaces, addresses, routes and policy rules, by rtnetlink (RFC 3549) without an async runtime.
//!
//! In: typed requests. Out: typed lists, or an [`OsError`] with operation, object and the kernel's
//! explanation. Always holds: a [`Netlink`] belongs to the network namespace it was opened in, whichever
//! thread uses it; a message of the kernel that cannot be parsed is skipped and logged.

pub(crate) mod address;
pub(crate) mod link;
mod monitor;
pub(crate) mod neighbour;
mod route;
mod rule;
mod socket;

use std::net::IpAddr;

pub use address::AddressInfo;
use ipnet::IpNet;
pub use link::{Interface, LinkInfo};
pub use monitor::{Event, Monitor};
use neighbour::removal_of_unresolved;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage as Request,
    link::{LinkAttribute, LinkFlags, State},
};
pub use route::{MAIN_TABLE, Route, RouteKind};
pub use rule::{Family, Rule};
use socket::{Change, Socket};
pub(crate) use socket::{Messages, encode, receive};

use crate::error::{OsError, ignore_gone};

/// A blocking rtnetlink socket.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
}

impl Netlink {
    /// Opens a socket in the network namespace of this thread.
    pub fn open() -> Result<Self, OsError> {
        let socket = Socket::open().map_err(|e| OsError::kernel("open", "a netlink socket", e))?;
        Ok(Self { socket })
    }

    /// All interfaces, ordered by index.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>, OsError> {
        let messages = self.socket.dump("list", "interfaces", Request::GetLink(Default::default()))?;
        let mut links: Vec<_> = messages.iter().filter_map(link::parse).collect();
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    /// The interface called `name`.
    pub fn link(&mut self, name: &str) -> Result<LinkInfo, OsError> {
        let found = self.links()?.into_iter().find(|link| link.name == name);
        found.ok_or_else(|| OsError::NoInterface { name: name.to_owned() })
    }

    /// The index of the interface called `name`.
    pub fn index_of(&mut self, name: &str) -> Result<u32, OsError> {
        self.link(name).map(|link| link.index)
    }

    /// All addresses of all interfaces.
    pub fn addresses(&mut self) -> Result<Vec<AddressInfo>, OsError> {
        let messages = self.socket.dump("list", "addresses", Request::GetAddress(Default::default()))?;
        Ok(messages.iter().filter_map(address::parse).collect())
    }

    /// All routes of all tables. A route with several next hops is listed once for each of them.
    pub fn routes(&mut self) -> Result<Vec<Route>, OsError> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for message in self.socket.dump("list", "routes", route::list_request(family))? {
                routes.extend(route::parse(&message));
            }
        }
        Ok(routes)
    }

    /// Brings an interface up.
    pub fn set_up(&mut self, index: u32) -> Result<(), OsError> {
        let request = link::set_request(index, LinkFlags::Up, Vec::new());
        self.socket.change(Change::Set, "bring up interface", index, request)
    }

    /// Sets the MTU of an interface, in bytes.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<(), OsError> {
        let object = format!("{mtu} of interface {index}");
        let request = link::set_request(index, LinkFlags::empty(), vec![LinkAttribute::Mtu(mtu)]);
        self.socket.change(Change::Set, "set the MTU", object, request)
    }

    /// Sets the operational state (RFC 2863) of an interface that has got or lost its carrier. The kernel
    /// acts on that at once: routes become `linkdown`, and programs hear of it. By itself it does so at most
    /// once a second, for all interfaces of the machine together.
    pub(crate) fn set_oper_state(&mut self, index: u32, has_carrier: bool) -> Result<(), OsError> {
        let state = if has_carrier { State::Up } else { State::Dormant };
        let request = link::set_request(index, LinkFlags::empty(), vec![LinkAttribute::OperState(state)]);
        self.socket.change(Change::Set, "set the state of interface", index, request)
    }

    /// Removes a virtual interface.
    pub fn del_link(&mut self, index: u32) -> Result<(), OsError> {
        let request = link::removal(index);
        self.socket.change(Change::Remove, "remove", format!("interface {index}"), request)
    }

    /// Sets the length of an interface's transmit queue, in packets; the kernel drops packets beyond it.
    pub fn set_queue_packets(&mut self, index: u32, packets: u32) -> Result<(), OsError> {
        let object = format!("{packets} of interface {index}");
        let request = link::set_request(index, LinkFlags::empty(), vec![LinkAttribute::TxQueueLen(packets)]);
        self.socket.change(Change::Set, "set the queue length", object, request)
    }

    /// Adds an address. An IPv6 address is usable at once (no duplicate address detection). No error if the
    /// interface has the address already.
    pub fn add_address(&mut self, index: u32, address: IpNet) -> Result<(), OsError> {
        let object = format!("{address} to interface {index}");
        let request = address::add_request(index, address);
        let result = self.socket.change(Change::Add, "add the address", object, request);
        ignore_present(result)
    }

    /// Removes an address.
    pub fn del_address(&mut self, index: u32, address: IpNet) -> Result<(), OsError> {
        let object = format!("{address} from interface {index}");
        let request = Request::DelAddress(address::message(index, address));
        self.socket.change(Change::Remove, "remove the address", object, request)
    }

    /// Removes the unresolved entries of an interface from the neighbour table, so that the next packet
    /// starts a new resolution at once. Call it when a link gets its carrier back: packets sent without a
    /// carrier have started resolutions that the kernel repeats only once a second (`retrans_time_ms`,
    /// arp(7)), and meanwhile it holds packets back.
    pub fn flush_unresolved_neighbours(&mut self, index: u32) -> Result<(), OsError> {
        let entries = self.socket.dump("list", "neighbours", Request::GetNeighbour(Default::default()))?;
        for (address, request) in entries.into_iter().filter_map(|it| removal_of_unresolved(it, index)) {
            let object = format!("{address} of interface {index}");
            ignore_gone(self.socket.change(Change::Remove, "remove the neighbour entry", object, request))?;
        }
        Ok(())
    }

    /// Answers on an interface for an address (proxy ARP, and neighbour advertisements). No error if it does
    /// already.
    pub fn add_proxy_neighbour(&mut self, index: u32, address: IpAddr) -> Result<(), OsError> {
        let object = format!("{address} on interface {index}");
        let request = Request::NewNeighbour(neighbour::proxy(index, address));
        ignore_present(self.socket.change(Change::Add, "answer for", object, request))
    }

    /// Answers for it no more.
    pub fn del_proxy_neighbour(&mut self, index: u32, address: IpAddr) -> Result<(), OsError> {
        let object = format!("{address} on interface {index}");
        let request = Request::DelNeighbour(neighbour::proxy(index, address));
        self.socket.change(Change::Remove, "stop answering for", object, request)
    }

    /// Adds a route.
    ///
    /// # Errors
    /// If it exists already: then it belongs to another program or instance.
    pub fn add_route(&mut self, route: &Route) -> Result<(), OsError> {
        self.socket.change(Change::Add, "add the route", route, Request::NewRoute(route.message()))
    }

    /// Removes a route.
    pub fn del_route(&mut self, route: &Route) -> Result<(), OsError> {
        self.socket.change(Change::Remove, "remove the route", route, Request::DelRoute(route.message()))
    }

    /// Adds a policy rule.
    ///
    /// # Errors
    /// If it exists already: then it belongs to another program or instance.
    pub fn add_rule(&mut self, rule: &Rule) -> Result<(), OsError> {
        self.socket.change(Change::Add, "add the rule", rule, Request::NewRule(rule.message()))
    }

    /// Removes a policy rule.
    pub fn del_rule(&mut self, rule: &Rule) -> Result<(), OsError> {
        self.socket.change(Change::Remove, "remove the rule", rule, Request::DelRule(rule.message()))
    }
}

/// Turns "exists already" into `Ok`: the result of an addition.
fn ignore_present(result: Result<(), OsError>) -> Result<(), OsError> {
    match result {
        Err(error) if error.is_present() => Ok(()),
        other => other,
    }
}
