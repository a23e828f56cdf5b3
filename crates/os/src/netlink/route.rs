//! Netlink messages about routes.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteNextHop, RouteProtocol, RouteScope,
        RouteType,
    },
};
use serde::{Deserialize, Serialize};

/// The main routing table: the one that `ip route` shows.
pub const MAIN_TABLE: u32 = RouteHeader::RT_TABLE_MAIN as u32;

/// A route through one next hop, or one that rejects packets. Journals on disk have the names of the fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Route {
    /// The destination prefix.
    pub destination: IpNet,
    /// The routing table.
    pub table: u32,
    /// The metric: among routes with the same destination the smallest wins. `None` is the kernel's choice
    /// (0 for IPv4, 1024 for IPv6).
    pub metric: Option<u32>,
    /// The index of the outgoing interface.
    pub interface: Option<u32>,
    /// The next hop; `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address of packets whose sender has not chosen one.
    pub source: Option<IpAddr>,
    /// The treatment of packets that match the route.
    pub kind: RouteKind,
}

/// The treatment of packets that match a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RouteKind {
    /// Forwards them.
    Unicast,
    /// Rejects them with ICMP "destination unreachable".
    Unreachable,
    /// Drops them without an answer.
    Blackhole,
    /// Rejects them with ICMP "communication administratively prohibited".
    Prohibit,
    /// Another type of route (`RTN_*` of linux/rtnetlink.h), as local; read from the kernel, never added
    /// here.
    Other(u8),
}

impl Route {
    /// A route in `table` to `destination` through the interface `index`, without a gateway.
    pub fn through(destination: IpNet, table: u32, index: u32) -> Self {
        let kind = RouteKind::Unicast;
        Self { destination, table, metric: None, interface: Some(index), gateway: None, source: None, kind }
    }

    /// A route in `table` that makes `destination` unreachable; any other route to it in `table` takes
    /// precedence.
    pub fn unreachable(destination: IpNet, table: u32) -> Self {
        let (metric, kind) = (Some(u32::MAX), RouteKind::Unreachable);
        Self { destination, table, metric, interface: None, gateway: None, source: None, kind }
    }

    /// Whether it is a default route (prefix length 0).
    pub fn is_default(&self) -> bool {
        self.destination.prefix_len() == 0
    }

    pub(crate) fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let header = &mut message.header;
        header.address_family = family(self.destination.addr());
        header.destination_prefix_length = self.destination.prefix_len();
        header.protocol = RouteProtocol::Static;
        header.kind = self.kind.into();
        header.scope = match (self.kind, self.gateway, self.destination) {
            (RouteKind::Unicast, None, IpNet::V4(_)) => RouteScope::Link,
            _ => RouteScope::Universe,
        };
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Table(self.table));
        if !self.is_default() {
            attributes.push(RouteAttribute::Destination(self.destination.network().into()));
        }
        attributes.extend(self.metric.map(RouteAttribute::Priority));
        attributes.extend(self.interface.map(RouteAttribute::Oif));
        attributes.extend(self.gateway.map(|ip| RouteAttribute::Gateway(ip.into())));
        attributes.extend(self.source.map(|ip| RouteAttribute::PrefSource(ip.into())));
        message
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind != RouteKind::Unicast {
            write!(f, "{:?} ", self.kind)?;
        }
        write!(f, "{} table {}", self.destination, self.table)?;
        if let Some(index) = self.interface {
            write!(f, " interface {index}")?;
        }
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(metric) = self.metric {
            write!(f, " metric {metric}")?;
        }
        Ok(())
    }
}

impl From<RouteKind> for RouteType {
    fn from(kind: RouteKind) -> Self {
        match kind {
            RouteKind::Unicast => Self::Unicast,
            RouteKind::Unreachable => Self::Unreachable,
            RouteKind::Blackhole => Self::BlackHole,
            RouteKind::Prohibit => Self::Prohibit,
            RouteKind::Other(number) => Self::from(number),
        }
    }
}

impl From<RouteType> for RouteKind {
    fn from(kind: RouteType) -> Self {
        match kind {
            RouteType::Unicast => Self::Unicast,
            RouteType::Unreachable => Self::Unreachable,
            RouteType::BlackHole => Self::Blackhole,
            RouteType::Prohibit => Self::Prohibit,
            other => Self::Other(other.into()),
        }
    }
}

pub(super) fn list_request(family: AddressFamily) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family;
    RouteNetlinkMessage::GetRoute(message)
}

/// The routes in a message: one for each next hop.
pub(super) fn parse(message: &RouteNetlinkMessage) -> Vec<Route> {
    match message {
        RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message) => {
            from_message(message).unwrap_or_default()
        }
        _ => Vec::new(),
    }
}

fn from_message(message: &RouteMessage) -> Option<Vec<Route>> {
    let header = &message.header;
    let unspecified: IpAddr = match header.address_family {
        AddressFamily::Inet => std::net::Ipv4Addr::UNSPECIFIED.into(),
        AddressFamily::Inet6 => std::net::Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let mut route = Route {
        destination: IpNet::new(unspecified, header.destination_prefix_length).ok()?,
        table: header.table.into(),
        metric: None,
        interface: None,
        gateway: None,
        source: None,
        kind: header.kind.into(),
    };
    let mut next_hops: &[RouteNextHop] = &[];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(ip) => {
                route.destination = IpNet::new(address(ip)?, header.destination_prefix_length).ok()?;
            }
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(metric) => route.metric = Some(*metric),
            RouteAttribute::Oif(index) => route.interface = Some(*index),
            RouteAttribute::Gateway(ip) => route.gateway = address(ip),
            RouteAttribute::PrefSource(ip) => route.source = address(ip),
            RouteAttribute::MultiPath(hops) => next_hops = hops,
            _ => {}
        }
    }
    if next_hops.is_empty() {
        return Some(vec![route]);
    }
    Some(next_hops.iter().map(|hop| through_hop(&route, hop)).collect())
}

fn through_hop(route: &Route, hop: &RouteNextHop) -> Route {
    let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(ip) => address(ip),
        _ => None,
    });
    Route { interface: Some(hop.interface_index), gateway, ..route.clone() }
}

pub(super) fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_read_as_it_was_written() {
        let mut route = Route::through("10.0.0.0/8".parse().unwrap(), 28_016, 7);
        route.metric = Some(5);
        route.gateway = "192.0.2.1".parse().ok();
        route.source = "192.0.2.9".parse().ok();
        assert_eq!(parse(&RouteNetlinkMessage::NewRoute(route.message())), [route]);
        let nowhere = Route::unreachable("::/0".parse().unwrap(), 28_016);
        assert_eq!(parse(&RouteNetlinkMessage::DelRoute(nowhere.message())), [nowhere]);
    }

    #[test]
    fn a_route_of_two_next_hops_is_two_routes() {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.kind = RouteType::Unicast;
        let hops = [3, 4].map(|index| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = index;
            hop
        });
        message.attributes.push(RouteAttribute::MultiPath(hops.to_vec()));
        let routes = parse(&RouteNetlinkMessage::NewRoute(message));
        assert_eq!(routes.iter().map(|route| route.interface).collect::<Vec<_>>(), [Some(3), Some(4)]);
        assert!(routes.iter().all(Route::is_default));
    }
}
