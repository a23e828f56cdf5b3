//! Networks for a tunnel that this machine does not use, and that few others do.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// IPv4 networks are taken from here: apart from those that routers of homes (192.168.0.0/24, 10.0.0.0/24),
/// Docker (172.17.0.0/16), Kubernetes (10.96.0.0/12, 10.244.0.0/16) and Google's cloud (10.128.0.0/9) give by
/// default.
const RANGE: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 64, 0, 0), 11);
/// Length of the prefix: 253 clients. A larger network collides with networks of clients more often.
const PREFIX_LENGTH: u8 = 24;

/// An IPv4 network that overlaps none of `used`, chosen by `random` so that two servers seldom have the same.
pub(super) fn free_subnet(used: &[IpNet], random: u32) -> Option<Ipv4Net> {
    let step = 1 << (32 - PREFIX_LENGTH);
    let count = 1 << (PREFIX_LENGTH - RANGE.prefix_len());
    let first = random % count;
    (0..count).map(|at| (first + at) % count).find_map(|at| {
        let address = Ipv4Addr::from(u32::from(RANGE.network()) + at * step);
        let subnet = Ipv4Net::new(address, PREFIX_LENGTH).ok()?;
        let is_free = !used.iter().any(|net| overlap(*net, IpNet::V4(subnet)));
        is_free.then_some(subnet)
    })
}

/// A private IPv6 network with a random identifier (RFC 4193 §3.2).
pub(super) fn private_subnet6(random: [u8; 5]) -> Ipv6Net {
    let [a, b, c, d, e] = random.map(u16::from);
    let address = Ipv6Addr::new(0xfd00 | a, b << 8 | c, d << 8 | e, 0, 0, 0, 0, 0);
    Ipv6Net::new_assert(address, 64)
}

/// Whether two networks have an address in common.
pub(super) fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_chosen_at_random_and_apart_from_those_in_use() {
        let first = free_subnet(&[], 7).unwrap();
        assert_eq!(first.to_string(), "10.64.7.0/24");
        let used = ["10.64.7.128/25".parse().unwrap(), "10.64.8.0/22".parse().unwrap()];
        assert_eq!(free_subnet(&used, 7).unwrap().to_string(), "10.64.12.0/24");
        assert_eq!(free_subnet(&[], u32::MAX).unwrap().to_string(), "10.95.255.0/24");
        assert_eq!(free_subnet(&["10.0.0.0/8".parse().unwrap()], 7), None);
    }

    #[test]
    fn the_private_network_has_the_form_of_rfc_4193() {
        assert_eq!(private_subnet6([0x12, 0x34, 0x56, 0x78, 0x9a]).to_string(), "fd12:3456:789a::/64");
    }
}
