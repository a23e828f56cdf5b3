//! The routes of a server: the destinations to which it forwards packets of its clients. In: the configured
//! networks, and those of clients' addresses. Out: the ROUTE_ADVERTISEMENT capsule (RFC 9484 §4.7.3), and
//! whether it contains an address. Always holds: both agree, and contain the networks of clients, so that
//! clients reach the server and each other.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::capsule::{Capsule, IpRange, routes_sorted};

use crate::{Addresses, multipath::Gateway};

/// The routes of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Routes {
    /// The server's own addresses, and the networks of clients' addresses.
    own: Addresses,
    networks: (Ipv4Net, Option<Ipv6Net>),
    /// The advertised ranges, for all protocols, sorted and without overlaps.
    ranges: Vec<IpRange>,
}

impl Routes {
    /// `networks` are those of clients' addresses; routes of a family without such a network are left out.
    pub(super) fn new(given: &[IpNet], own: Addresses, networks: (Ipv4Net, Option<Ipv6Net>)) -> Self {
        let (v4, v6) = networks;
        let tunnel = [IpNet::V4(v4)].into_iter().chain(v6.map(IpNet::V6));
        let has_family = |net: &IpNet| matches!(net, IpNet::V4(_)) || v6.is_some();
        let all = given.iter().copied().filter(has_family).chain(tunnel);
        let ranges = routes_sorted(all.map(|net| IpRange::from_net(net, 0)).collect());
        Self { own, networks, ranges }
    }

    /// The networks of clients' addresses.
    pub(super) fn networks(&self) -> (Ipv4Net, Option<Ipv6Net>) {
        self.networks
    }

    /// Whether an address can belong to a client.
    pub(super) fn is_client(&self, ip: IpAddr) -> bool {
        let (v4, v6) = self.networks;
        match ip {
            _ if self.own.contains(ip) => false,
            IpAddr::V4(ip) => v4.contains(&ip),
            IpAddr::V6(ip) => v6.is_some_and(|net| net.contains(&ip)),
        }
    }

    /// The source addresses of ICMP errors.
    #[inline]
    pub(super) fn gateway(&self) -> Gateway {
        Gateway { v4: self.own.v4.map(IpAddr::V4), v6: self.own.v6.map(IpAddr::V6) }
    }

    /// The ROUTE_ADVERTISEMENT capsule.
    pub(super) fn capsule(&self) -> Capsule {
        Capsule::RouteAdvertisement(self.ranges.clone())
    }

    /// Whether an advertised range contains the address.
    #[inline]
    pub(super) fn contain(&self, ip: IpAddr) -> bool {
        // `IpAddr` orders IPv4 before IPv6, as the ranges are.
        let at = self.ranges.partition_point(|range| range.end() < ip);
        self.ranges.get(at).is_some_and(|range| range.contains(ip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(given: &[&str], subnet6: Option<&str>) -> Routes {
        let given: Vec<IpNet> = given.iter().map(|net| net.parse().unwrap()).collect();
        let networks = ("10.0.0.0/24".parse().unwrap(), subnet6.map(|net| net.parse().unwrap()));
        let own = Addresses { v4: Some([10, 0, 0, 1].into()), v6: None };
        Routes::new(&given, own, networks)
    }

    fn shown(routes: &Routes) -> Vec<String> {
        routes.ranges.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn networks_are_put_in_order_and_merged_with_those_of_the_tunnel() {
        let given = ["192.168.9.0/24", "fd00:1::/32", "10.0.1.0/24", "192.168.8.0/24", "192.168.8.7/32"];
        assert_eq!(
            shown(&routes(&given, Some("fd00::/64"))),
            [
                "10.0.0.0-10.0.1.255",
                "192.168.8.0-192.168.9.255",
                "fd00::-fd00::ffff:ffff:ffff:ffff",
                "fd00:1::-fd00:1:ffff:ffff:ffff:ffff:ffff:ffff"
            ]
        );
        assert_eq!(shown(&routes(&["0.0.0.0/0", "::/0"], None)), ["0.0.0.0-255.255.255.255"]);
    }

    #[test]
    fn clients_have_all_addresses_of_the_tunnel_but_the_servers_own() {
        let routes = routes(&["192.168.8.0/24"], Some("fd00::/64"));
        for (ip, is_client) in [
            ("10.0.0.1", false),
            ("10.0.0.2", true),
            ("192.168.8.1", false),
            ("fd00::2", true),
            ("fd01::2", false),
        ] {
            assert_eq!(routes.is_client(ip.parse().unwrap()), is_client, "{ip}");
        }
    }

    #[test]
    fn packets_go_where_the_capsule_says_and_nowhere_else() {
        let some = routes(&["192.168.8.0/24", "198.51.100.7/32"], Some("fd00::/64"));
        for ip in ["10.0.0.1", "192.168.8.0", "192.168.8.255", "198.51.100.7", "fd00::1"] {
            assert!(some.contain(ip.parse().unwrap()), "{ip}");
        }
        for ip in
            ["9.255.255.255", "10.0.1.0", "192.168.9.0", "198.51.100.8", "255.255.255.255", "::", "fd01::"]
        {
            assert!(!some.contain(ip.parse().unwrap()), "{ip}");
        }
        let all = routes(&["0.0.0.0/0", "::/0"], Some("fd00::/64"));
        for ip in ["0.0.0.0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"] {
            assert!(all.contain(ip.parse().unwrap()), "{ip}");
        }
    }
}
