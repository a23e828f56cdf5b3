//! Addresses that the server assigns and that this machine has already, and the requests for others.
//!
//! In: the addresses of the machine, what the server assigns. Out: which addresses are refused, further
//! ADDRESS_REQUEST capsules (RFC 9484 §4.7.2). Always holds: a refused address is not used in either
//! direction; further requests and the time for their answers are bounded.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, Family, RequestedAddress},
    h3,
};
use mpvpn_types::Instant;

use super::{Client, ClientError, RESPONSE_TIMEOUT, addresses, in_use};

/// Further requests on one connection. More: a server keeps a client that cannot work from saying so; fewer:
/// one that assigns the lowest free address is given up although a later one is usable. A session has at most
/// eight addresses.
const MAX_FURTHER_REQUESTS: u32 = 3;

/// The addresses of the machine outside of the tunnel, shared by all connections of a client: its edge keeps
/// them up to date.
#[derive(Clone, Debug, Default)]
pub struct AddressesInUse(Arc<Mutex<BTreeSet<IpAddr>>>);

impl AddressesInUse {
    /// Replaces the addresses. They count for assignments that arrive from now on.
    pub fn set(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = addresses.into_iter().collect();
    }

    /// Whether a server cannot assign this address: it is in use, or no address of a host in a network.
    fn refuses(&self, ip: IpAddr) -> bool {
        let is_special = match ip {
            IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        is_special
            || ip.is_unspecified()
            || ip.is_loopback()
            || ip.is_multicast()
            || self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&ip)
    }

    /// Removes the addresses that are refused; returns them.
    pub(super) fn take_refused(&self, assigned: &mut Vec<AssignedAddress>) -> Vec<IpAddr> {
        assigned
            .extract_if(.., |entry| self.refuses(entry.net.addr()))
            .map(|entry| entry.net.addr())
            .collect()
    }
}

/// Further requests for addresses on one connection.
#[derive(Debug, Default)]
pub(super) struct FurtherRequests {
    count: u32,
    /// The refused addresses that were answered with a request.
    refused: BTreeSet<IpAddr>,
    /// When the answer to the last request must be there, if there is no address without it.
    pub(super) overdue_at: Option<Instant>,
}

impl FurtherRequests {
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.overdue_at.is_some_and(|at| now >= at)
    }
}

impl Client {
    /// Asks for other addresses instead of those that the server has assigned and that are refused.
    pub(super) fn request_other_addresses(&mut self, now: Instant) {
        let more = self.config.additional_addresses;
        // The server tells the others of the addresses that the initial connection gets.
        let may_ask = !self.membership.role.is_joined();
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        if !session.addresses.is_empty() {
            session.further.overdue_at = None;
        }
        let further = &mut session.further;
        let fresh: Vec<IpAddr> =
            session.refused.iter().copied().filter(|ip| !further.refused.contains(ip)).collect();
        let Some(stream) = session.request.filter(|_| may_ask && !fresh.is_empty()) else { return };
        further.refused.extend(&fresh);
        let usable_of = |family| {
            session.addresses.iter().filter(move |entry| Family::of(entry.net.addr()) == family).count()
        };
        let missing: Vec<Family> =
            fresh.iter().map(|ip| Family::of(*ip)).filter(|family| usable_of(*family) <= more).collect();
        if missing.is_empty() {
            return;
        }
        tracing::warn!(
            addresses = ?fresh,
            "the server assigns addresses that this machine has already, or that no host can have: the client asks for others"
        );
        if further.count == MAX_FURTHER_REQUESTS {
            if session.addresses.is_empty() {
                self.fail_without_address(now);
            }
            return;
        }
        further.count += 1;
        further.overdue_at = session.addresses.is_empty().then_some(now + RESPONSE_TIMEOUT);
        // Request IDs are never used again: RFC 9484 §4.7.2.
        let first = addresses::further_request_id(more, further.count);
        let known =
            session.addresses.iter().map(|entry| entry.net.addr()).chain(further.refused.iter().copied());
        let known = known.map(|ip| (Family::of(ip), Some(IpNet::from(ip))));
        let wishes = known.chain(missing.into_iter().map(|family| (family, None)));
        let requested = wishes.zip(first..).map(|((family, known), request_id)| match known {
            Some(net) => RequestedAddress { request_id, net },
            None => RequestedAddress::any(request_id, family),
        });
        let mut capsule = BytesMut::new();
        Capsule::AddressRequest(requested.collect()).encode(&mut capsule);
        connection.write(stream, h3::encode_data(&capsule));
    }

    /// Ends: all addresses that the server assigns are refused.
    pub(super) fn fail_without_address(&mut self, now: Instant) {
        let Some(session) = &self.session else { return };
        let Some(ip) = session.further.refused.first().copied() else { return };
        self.fail(now, ClientError::AddressInUse(ip));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_machine_and_those_of_no_host_are_refused() {
        let machine = AddressesInUse::default();
        let shared = machine.clone();
        machine.set(["192.168.1.5", "fd00::5"].map(|ip| ip.parse().unwrap()));
        let entry = |ip: &str| AssignedAddress { request_id: 1, net: ip.parse::<IpAddr>().unwrap().into() };
        let mut assigned: Vec<_> = [
            "192.168.1.5",
            "10.0.0.2",
            "127.0.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "169.254.1.1",
            "255.255.255.255",
            "fd00::5",
            "fd00::6",
            "::1",
            "fe80::1",
            "ff02::1",
            "::",
        ]
        .map(entry)
        .into();
        let refused = shared.take_refused(&mut assigned);
        let left: Vec<String> = assigned.iter().map(|entry| entry.net.to_string()).collect();
        assert_eq!(left, ["10.0.0.2/32", "fd00::6/128"]);
        assert_eq!(refused.len(), 11);
    }
}
