//! The addresses that a client asks for, and those that it gets.

use std::collections::BTreeSet;

use ipnet::IpNet;
use mpvpn_masque::capsule::{AssignedAddress, Family, RequestedAddress};

use super::{Assignment, session::Session};

/// What is asked for: the addresses of before, or any (RFC 9484 §4.7.2: all zero means "no preference"), and as many of
/// each family as `more` says beyond the first.
pub(super) fn wishes(known: Option<&Assignment>, more: usize) -> Vec<RequestedAddress> {
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

/// What the server gave, where `more` addresses of each family were asked for beyond the first.
pub(super) fn assignment(session: &Session, more: usize) -> Assignment {
    // A host address with the length of the network that it is in: the kernel then knows the
    // neighbours.
    let in_network = |net: IpNet| {
        let network = session.agreed.networks.iter().find(|network| network.contains(&net.addr()));
        network.and_then(|network| IpNet::new(net.addr(), network.prefix_len()).ok()).unwrap_or(net)
    };
    let mut addresses = Vec::new();
    let mut beyond = vec![Vec::new(); more];
    for (place, net) in places(&session.addresses, more) {
        match place.checked_sub(1).and_then(|at| beyond.get_mut(at)) {
            Some(list) => list.push(net),
            None => addresses.push(in_network(net)),
        }
    }
    let (routes, dns) = (session.routes.clone(), session.agreed.dns.clone());
    Assignment { addresses, additional: beyond, routes, dns }
}

/// The number of the request for the address of a family at this place: 0 for the first.
fn request_id(place: usize, family: Family) -> u64 {
    2 * place as u64 + if family == Family::V4 { 1 } else { 2 }
}

/// The places of addresses where `more` were asked for beyond the first of each family. One that answers a request has
/// the place of that, and another the next one that is left: servers name all that a session has in the same order. What
/// no place is left for goes with the first.
fn places(assigned: &[AssignedAddress], more: usize) -> Vec<(usize, IpNet)> {
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
    fn an_address_has_the_place_of_the_request_that_it_answers() {
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
