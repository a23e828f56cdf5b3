//! The destinations for which routes of the main table count while a client routes packets into its tunnel.
//!
//! In: the addresses of links, networks that the user names, routes of the main table. Out: policy rules, and
//! the routes that the rules ignore. Always holds: a route counts only for a kept network, and only if it is
//! as specific as that network or more so. So a DHCP server on a link cannot send packets to the internet
//! past the tunnel by more specific routes (CVE-2024-3661), nor by a public network of the link's own that is
//! large (CVE-2023-36672).
//!
//! Kept are all private networks, the networks of links if they are small enough, and what the user names.

use ipnet::IpNet;

use super::family_of;
use crate::netlink::{AddressInfo, Family, MAIN_TABLE, Rule};

/// Networks that no router of the internet forwards to: private (RFC 1918, RFC 4193) and link-local (RFC
/// 3927, RFC 4291).
const PRIVATE_NETWORKS: [&str; 6] =
    ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10"];
/// Multicast (RFC 5771), which routers do not forward by these routes. For IPv6 it is in another table.
const MULTICAST: &str = "224.0.0.0/4";
/// The shortest prefixes of public networks of links that are kept (bits), for IPv4 and IPv6. A link says its
/// network itself, by DHCP or router advertisements. Shorter: a rogue link takes more of the internet.
/// Longer: neighbours in larger networks of internet providers are reached through the tunnel. Most such
/// networks are of 18 to 24 bits; those of router advertisements are of 64 (RFC 4862).
const MIN_LINK_PREFIX: (u8, u8) = (16, 64);

/// Whether a network lies in a range that only a LAN uses.
pub fn is_private(network: &IpNet) -> bool {
    private_networks().any(|range| range.contains(network))
}

fn private_networks() -> impl Iterator<Item = IpNet> {
    PRIVATE_NETWORKS.iter().map(|range| range.parse().expect("a network"))
}

/// The kept networks; none contains another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeptNetworks(Vec<IpNet>);

impl KeptNetworks {
    /// Those of a machine with these addresses, whose user names `named`.
    pub(super) fn new(addresses: &[AddressInfo], named: &[IpNet]) -> Self {
        let of_links = addresses.iter().map(|info| info.address.trunc()).filter(is_small_enough);
        let multicast: Option<IpNet> = MULTICAST.parse().ok();
        let all: Vec<IpNet> =
            private_networks().chain(multicast).chain(of_links).chain(named.iter().copied()).collect();
        Self(IpNet::aggregate(&all))
    }

    /// Whether a route of the main table to `destination` counts.
    pub(super) fn keeps(&self, destination: &IpNet) -> bool {
        self.0.iter().any(|kept| kept.contains(destination))
    }

    /// The rules that look up these networks in the main table.
    pub(super) fn rules(&self, family: Family, priority: u32) -> impl Iterator<Item = Rule> {
        let of_family = self.0.iter().filter(move |network| family_of(**network) == family);
        of_family.map(move |network| Rule {
            destination: Some(*network),
            // Less specific routes do not count.
            suppress_prefix_length: Some(u32::from(network.prefix_len()).saturating_sub(1)),
            ..Rule::lookup(family, priority, MAIN_TABLE)
        })
    }
}

/// Whether the network of an address is kept if it is public. Host addresses have no network.
fn is_small_enough(network: &IpNet) -> bool {
    let least = if network.addr().is_ipv4() { MIN_LINK_PREFIX.0 } else { MIN_LINK_PREFIX.1 };
    (least..network.max_prefix_len()).contains(&network.prefix_len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn kept(addresses: &[&str], named: &[&str]) -> KeptNetworks {
        let info =
            |text: &&str| AddressInfo { index: 2, address: net(text), usable: true, link_local: false };
        let addresses: Vec<_> = addresses.iter().map(info).collect();
        KeptNetworks::new(&addresses, &named.iter().map(|text| net(text)).collect::<Vec<_>>())
    }

    #[test]
    fn routes_count_for_private_networks_those_of_links_and_those_that_the_user_names() {
        let all = kept(&["203.0.113.7/24", "2001:db8:1::7/64", "198.51.100.9/32"], &["192.0.2.0/25"]);
        for counts in [
            "10.20.0.0/16",
            "192.168.1.0/24",
            "203.0.113.0/24",
            "2001:db8:1::/64",
            "192.0.2.7/32",
            "fe80::/64",
        ] {
            assert!(all.keeps(&net(counts)), "{counts} is ignored");
        }
        for ignored in
            ["0.0.0.0/1", "8.0.0.0/7", "198.51.100.9/32", "203.0.112.0/23", "192.0.2.0/24", "2000::/3"]
        {
            assert!(!all.keeps(&net(ignored)), "{ignored} counts");
        }
    }

    #[test]
    fn a_link_cannot_claim_a_part_of_the_internet_as_its_network() {
        let all = kept(&["128.0.0.7/1", "8.8.0.7/15", "2001:db8::7/32"], &[]);
        assert_eq!(all, kept(&[], &[]));
        assert!(kept(&["8.8.0.7/16"], &[]).keeps(&net("8.8.8.8/32")));
    }

    #[test]
    fn a_route_that_is_less_specific_than_a_kept_network_does_not_count_for_it() {
        let rules: Vec<String> =
            kept(&[], &["192.0.2.0/24"]).rules(Family::V4, 7).map(|rule| rule.to_string()).collect();
        assert_eq!(
            rules,
            [
                "7: to 10.0.0.0/8 lookup 254 suppress_prefixlength 7",
                "7: to 169.254.0.0/16 lookup 254 suppress_prefixlength 15",
                "7: to 172.16.0.0/12 lookup 254 suppress_prefixlength 11",
                "7: to 192.0.2.0/24 lookup 254 suppress_prefixlength 23",
                "7: to 192.168.0.0/16 lookup 254 suppress_prefixlength 15",
                "7: to 224.0.0.0/4 lookup 254 suppress_prefixlength 3",
            ]
        );
    }
}
