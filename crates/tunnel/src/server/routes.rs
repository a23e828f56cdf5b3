//! Where a server carries its clients' packets.
//!
//! In: the networks of the configuration, and those that clients' addresses are from. Out: the ROUTE_ADVERTISEMENT capsule
//! (RFC 9484 §4.7.3), and whether a packet's destination is in it. Always holds: both say the same. The tunnel's own networks
//! are always among them, so that clients reach the server and each other.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_masque::capsule::{Capsule, IpRange, routes_sorted};

/// The advertised ranges of addresses, for all protocols, in order and without overlaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Routes(Vec<IpRange>);

impl Routes {
    /// `networks` are those that clients' addresses are from; a family that they lack is left out.
    pub(super) fn new(given: &[IpNet], networks: (Ipv4Net, Option<Ipv6Net>)) -> Self {
        let (v4, v6) = networks;
        let own = [IpNet::V4(v4)].into_iter().chain(v6.map(IpNet::V6));
        let has_family = |net: &IpNet| matches!(net, IpNet::V4(_)) || v6.is_some();
        let all = given.iter().copied().filter(has_family).chain(own);
        Self(routes_sorted(all.map(|net| IpRange::from_net(net, 0)).collect()))
    }

    /// What clients are told.
    pub(super) fn capsule(&self) -> Capsule {
        Capsule::RouteAdvertisement(self.0.clone())
    }

    /// Whether the server carries packets there.
    pub(super) fn lead_to(&self, ip: IpAddr) -> bool {
        // `IpAddr` orders IPv4 before IPv6, as the ranges are.
        let at = self.0.partition_point(|range| range.end() < ip);
        self.0.get(at).is_some_and(|range| range.contains(ip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(given: &[&str], subnet6: Option<&str>) -> Routes {
        let given: Vec<IpNet> = given.iter().map(|net| net.parse().unwrap()).collect();
        Routes::new(&given, ("10.0.0.0/24".parse().unwrap(), subnet6.map(|net| net.parse().unwrap())))
    }

    fn shown(routes: &Routes) -> Vec<String> {
        routes.0.iter().map(ToString::to_string).collect()
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
    fn packets_go_where_the_capsule_says_and_nowhere_else() {
        let some = routes(&["192.168.8.0/24", "198.51.100.7/32"], Some("fd00::/64"));
        for ip in ["10.0.0.1", "192.168.8.0", "192.168.8.255", "198.51.100.7", "fd00::1"] {
            assert!(some.lead_to(ip.parse().unwrap()), "{ip}");
        }
        for ip in
            ["9.255.255.255", "10.0.1.0", "192.168.9.0", "198.51.100.8", "255.255.255.255", "::", "fd01::"]
        {
            assert!(!some.lead_to(ip.parse().unwrap()), "{ip}");
        }
        let all = routes(&["0.0.0.0/0", "::/0"], Some("fd00::/64"));
        for ip in ["0.0.0.0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"] {
            assert!(all.lead_to(ip.parse().unwrap()), "{ip}");
        }
    }
}
