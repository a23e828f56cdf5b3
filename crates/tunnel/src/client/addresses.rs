//! The addresses that a client requests, and the assignment it makes of the server's answer.

use std::collections::BTreeSet;

use ipnet::IpNet;
use mpvpn_masque::capsule::{AssignedAddress, Family, RequestedAddress};
use mpvpn_packet::public::is_public;

use super::Assignment;

/// Assigned networks that are used. Each is compared with the source of packets.
const MAX_NETWORKS: usize = 64;
/// Shortest prefixes of assigned networks, of IPv4 and of IPv6. Shorter: a server captures a larger part of
/// the internet; longer: a client with such a network cannot use it. Those of providers have 32 bits (RIPE
/// NCC, IPv6 Address Allocation and Assignment Policy).
const MIN_NETWORK_PREFIX: (u8, u8) = (16, 32);
/// Request IDs that are set aside for each further request: more than a server can assign.
const MAX_PER_REQUEST: u64 = 1 << 20;

/// The addresses to request: the previous ones, or any (RFC 9484 §4.7.2: all zero means "no preference"), and
/// `more` additional ones of each family.
pub(super) fn requested_addresses(known: Option<&Assignment>, more: usize) -> Vec<RequestedAddress> {
    let place = |place: usize| {
        let before = match place.checked_sub(1) {
            None => known.map(|known| &known.addresses),
            Some(more) => known.and_then(|known| known.additional.get(more)),
        };
        [Family::V4, Family::V6].map(|family| {
            let request_id = request_id(place, family);
            let before = before.into_iter().flatten().find(|net| Family::of(net.addr()) == family);
            before.map_or(RequestedAddress::any(request_id, family), |net| RequestedAddress {
                request_id,
                net: IpNet::from(net.addr()),
            })
        })
    };
    (0..=more).flat_map(place).collect()
}

/// The address with the prefix length of its network, if the client may route that network: one of the
/// server's `networks`, or the prefix in the ADDRESS_ASSIGN capsule. Networks with public addresses are not
/// routed: a server could capture any part of the internet with them.
pub(super) fn with_network(assigned: IpNet, networks: &[IpNet]) -> IpNet {
    let ip = assigned.addr();
    let network = networks.iter().find(|network| network.contains(&ip)).unwrap_or(&assigned);
    let routed = is_private_network(network).then(|| IpNet::new(ip, network.prefix_len()).ok());
    routed.flatten().unwrap_or(IpNet::from(ip))
}

/// Whether the network lies in one of the private blocks, of which the largest are 10.0.0.0/8 (RFC 1918) and
/// fc00::/7 (RFC 4193).
fn is_private_network(network: &IpNet) -> bool {
    let largest = if network.addr().is_ipv4() { 8 } else { 7 };
    network.prefix_len() >= largest && !is_public(network.network()) && !is_public(network.broadcast())
}

/// Takes the networks out of an assignment: entries shorter than an address, without an address of a host,
/// beside a whole address of their family. Private ones, and parts of the internet that nobody gets for a
/// home, are not used: a server could capture the hosts of a LAN with them.
pub(super) fn assigned_networks(assigned: &mut Vec<AssignedAddress>) -> Vec<IpNet> {
    let is_whole = |net: &IpNet| net.prefix_len() == net.max_prefix_len();
    let whole = assigned.iter().filter(|entry| is_whole(&entry.net));
    let families: BTreeSet<Family> = whole.map(|entry| Family::of(entry.net.addr())).collect();
    let is_network = |net: &IpNet| {
        !is_whole(net) && net.addr() == net.network() && families.contains(&Family::of(net.addr()))
    };
    let networks = assigned.extract_if(.., |entry| is_network(&entry.net)).map(|entry| entry.net);
    let is_usable = |net: &IpNet| {
        let least = if net.addr().is_ipv4() { MIN_NETWORK_PREFIX.0 } else { MIN_NETWORK_PREFIX.1 };
        net.prefix_len() >= least && is_public(net.network())
    };
    networks.filter(is_usable).take(MAX_NETWORKS).collect()
}

/// The request ID for the address of a family at this index; index 0 is the first address.
fn request_id(place: usize, family: Family) -> u64 {
    2 * place as u64 + if family == Family::V4 { 1 } else { 2 }
}

/// The first request ID of a further request, of at most [`MAX_PER_REQUEST`] addresses; the first request is
/// number 0.
pub(super) fn further_request_id(more: usize, number: u32) -> u64 {
    request_id(more, Family::V6) + 1 + u64::from(number - 1) * MAX_PER_REQUEST
}

/// The index of each assigned address, if `more` additional ones of each family were requested. An address
/// that answers a request has the index of the request, any other the next free one: servers list the
/// addresses of a session in the same order each time. Without a free index it counts as a first address.
pub(super) fn places(assigned: &[AssignedAddress], more: usize) -> Vec<(usize, IpNet)> {
    let family = |entry: &AssignedAddress| Family::of(entry.net.addr());
    let answered = |entry: &AssignedAddress| {
        (0..=more).find(|place| request_id(*place, family(entry)) == entry.request_id)
    };
    let mut taken: BTreeSet<(usize, Family)> =
        assigned.iter().filter_map(|entry| Some((answered(entry)?, family(entry)))).collect();
    let place = |entry: &AssignedAddress| {
        let place = answered(entry).unwrap_or_else(|| {
            let free = (0..=more).find(|place| !taken.contains(&(*place, family(entry))));
            taken.extend(free.map(|place| (place, family(entry))));
            free.unwrap_or(0)
        });
        (place, entry.net)
    };
    assigned.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn a_server_cannot_claim_a_part_of_the_internet_as_its_network() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let with = |address: &str, networks: &[&str]| {
            let networks: Vec<_> = networks.iter().map(|text| net(text)).collect();
            with_network(net(address), &networks).to_string()
        };
        assert_eq!(with("128.0.0.2/32", &["128.0.0.0/1"]), "128.0.0.2/32");
        assert_eq!(with("128.0.0.2/1", &[]), "128.0.0.2/32");
        assert_eq!(with("10.0.0.2/32", &["0.0.0.0/1"]), "10.0.0.2/32");
        assert_eq!(with("192.168.0.2/32", &["192.0.0.0/8"]), "192.168.0.2/32");
        assert_eq!(with("fd00::2/128", &["::/0"]), "fd00::2/128");
        assert_eq!(with("2001:db8::2/128", &["2000::/3"]), "2001:db8::2/128");
        // Whether a private network is that of a link is known to the edge only.
        assert_eq!(with("192.168.1.5/32", &["192.168.1.0/25"]), "192.168.1.5/25");
        assert_eq!(with("10.0.0.2/32", &["10.0.0.0/24"]), "10.0.0.2/24");
        assert_eq!(with("fd00::2/128", &["fd00::/64"]), "fd00::2/64");
    }

    #[test]
    fn a_network_beside_an_address_is_for_hosts_behind_the_client() {
        let taken = |list: &[&str]| {
            let entry = |net: &&str| AssignedAddress { request_id: 0, net: net.parse().unwrap() };
            let mut assigned: Vec<_> = list.iter().map(entry).collect();
            let networks = assigned_networks(&mut assigned);
            let texts = |nets: Vec<IpNet>| nets.iter().map(ToString::to_string).collect::<Vec<_>>();
            (texts(networks), texts(assigned.into_iter().map(|entry| entry.net).collect()))
        };
        let (networks, addresses) =
            taken(&["10.0.0.2/32", "fd00::2/128", "2001:db8:7::/64", "203.0.113.8/29", "2001:db8::7/128"]);
        assert_eq!(networks, ["2001:db8:7::/64", "203.0.113.8/29"]);
        assert_eq!(addresses, ["10.0.0.2/32", "fd00::2/128", "2001:db8::7/128"]);
        // A server that says the network of an address, with its last bits or without.
        for address in ["fd00::2/64", "2001:db8:7::/64"] {
            assert_eq!(taken(&["10.0.0.2/32", address]).1, ["10.0.0.2/32", address]);
        }
        // A server cannot capture the hosts of a LAN, or a part of the internet.
        let (networks, addresses) =
            taken(&["10.0.0.2/32", "fd00::2/128", "192.168.1.0/24", "2000::/3", "fd07::/64", "8.0.0.0/8"]);
        assert_eq!((networks.len(), addresses.len()), (0, 2));
    }

    #[test]
    fn an_address_has_the_index_of_the_request_that_it_answers() {
        let entry = |(request_id, net): &(u64, &str)| AssignedAddress {
            request_id: *request_id,
            net: net.parse::<IpAddr>().map(IpNet::from).unwrap(),
        };
        let placed = |more, list: &[(u64, &str)]| {
            let list: Vec<_> = list.iter().map(entry).collect();
            places(&list, more).into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(
            placed(1, &[(0, "10.0.0.2"), (0, "fd00::2"), (0, "10.0.0.3"), (0, "fd00::3")]),
            [0, 0, 1, 1]
        );
        assert_eq!(placed(1, &[(3, "10.0.0.2"), (1, "10.0.0.3"), (2, "fd00::3")]), [1, 0, 0]);
        assert_eq!(placed(2, &[(0, "10.0.0.2"), (1, "10.0.0.3"), (9, "10.0.0.4")]), [1, 0, 2]);
        assert_eq!(placed(0, &[(1, "10.0.0.2"), (0, "10.0.0.3"), (7, "fd00::3")]), [0, 0, 0]);
        assert_eq!(placed(1, &[(0, "fd00::1"), (0, "10.0.0.2"), (0, "fd00::2")]), [0, 0, 1]);
    }
}
