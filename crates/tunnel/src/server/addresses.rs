//! The addresses of sessions: requests of clients, and ADDRESS_ASSIGN capsules (RFC 9484 §4.7).

use std::net::IpAddr;

use bytes::BytesMut;
use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule},
    h3,
};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::Instant;

use super::{
    FilterRequest, Server, ServerEvent,
    peer::{AuthenticatedPeer, NextGrant, Peer, PendingGrant},
};
use crate::{AddressSet, ConnectionSlot, SessionSecret, events::ServerChange};

/// Requests for addresses of one connection that are answered once its packets are filtered. An honest client
/// has one for each class. More: more memory for a client that asks again and again; fewer: requests of an
/// honest one stay without an answer.
const MAX_WAITING_REQUESTS: usize = 4 * AddressSet::MAX;

impl Server {
    /// Assigns addresses to a session, in answer to the requests `requested`, as soon as its packets are
    /// filtered.
    pub(super) fn grant(&mut self, id: ConnectionHandle, addresses: AddressSet, requested: &[(u64, IpNet)]) {
        if !self.config.auth.has_rules_of_users() {
            return self.send_assignment(id, addresses, requested);
        }
        let shard = self.shard.index();
        let authenticated = self.peers.get_mut(id).and_then(|peer| peer.authenticated.as_mut());
        let Some(AuthenticatedPeer { user, tunnel: Some(tunnel), .. }) =
            authenticated.map(|peer| &mut **peer)
        else {
            return;
        };
        let mut waiting = match &mut tunnel.grant {
            PendingGrant::None => Vec::new(),
            PendingGrant::Filtering { next } => next.take().map_or(Vec::new(), |next| next.requested),
        };
        waiting.extend(requested.iter().take(MAX_WAITING_REQUESTS.saturating_sub(waiting.len())));
        if let PendingGrant::Filtering { next } = &mut tunnel.grant {
            *next = Some(Box::new(NextGrant { addresses, requested: waiting }));
            return;
        }
        tunnel.grant = PendingGrant::Filtering { next: None };
        let connection = ConnectionSlot { shard, connection: id, serial: tunnel.serial };
        let request = FilterRequest { user: user.clone(), addresses, connection, requested: waiting };
        self.events.push_back(ServerEvent::Filter(Box::new(request)));
    }

    /// The packets of a session are filtered by the rules of its user: it gets its addresses.
    pub fn on_filtered(&mut self, request: &FilterRequest) {
        if !self.awaits(request) {
            return;
        }
        let id = request.connection.connection;
        let tunnel = self.peers.get_mut(id).and_then(Peer::tunnel_mut);
        let pending = tunnel.map(|tunnel| std::mem::take(&mut tunnel.grant));
        self.send_assignment(id, request.addresses, &request.requested);
        if let Some(PendingGrant::Filtering { next: Some(next) }) = pending {
            self.grant(id, next.addresses, &next.requested);
        }
        self.peers.mark_sends(id);
    }

    /// Whether the tunnel of a request exists.
    pub(super) fn awaits(&self, request: &FilterRequest) -> bool {
        let tunnel = self.peers.get(request.connection.connection).and_then(Peer::tunnel);
        tunnel.is_some_and(|tunnel| tunnel.serial == request.connection.serial)
    }

    /// Assigns addresses to a session and sends them to the client.
    pub(super) fn send_assignment(
        &mut self,
        id: ConnectionHandle,
        addresses: AddressSet,
        requested: &[(u64, IpNet)],
    ) {
        let authenticated = self.peers.get_mut(id).and_then(|peer| peer.authenticated.as_mut());
        let Some(authenticated) = authenticated else { return };
        let (Some(tunnel), Some(request)) = (&mut authenticated.tunnel, &authenticated.request) else {
            return;
        };
        let (stream, secret, resumed) = (request.id, tunnel.secret, tunnel.resumed);
        if let Some(class) = &tunnel.class {
            let own = class.address.and_then(|number| addresses.get(number));
            self.sessions.session(&secret).flows.set_own(tunnel.arrival(self.shard.index()), own);
        }
        if tunnel.addresses.replace(addresses).is_none() {
            self.changes.push(ServerChange::Joined { client: authenticated.tag(), resumed });
        }
        self.update_downlink(&secret, addresses);
        let entries = answers(addresses, self.sites.own(&secret), requested);
        let mut capsule = BytesMut::new();
        Capsule::AddressAssign(entries).encode(&mut capsule);
        if let Some(connection) = self.endpoint.get(id) {
            connection.write(stream, h3::encode_data(&capsule));
        }
    }

    /// Assigns the addresses that a client requests, or those that its session has.
    pub(super) fn address(&mut self, now: Instant, id: ConnectionHandle, requested: &[(u64, IpNet)]) {
        let Some(authenticated) = self.peers.get(id).and_then(|peer| peer.authenticated.as_ref()) else {
            return;
        };
        let Some(tunnel) = &authenticated.tunnel else { return };
        let (known, preferred) = (tunnel.addresses, preferred_addresses(requested));
        if let Some(addresses) = known.filter(|known| known.count() >= preferred.len()) {
            return self.grant(id, addresses, requested);
        }
        let secret = tunnel.secret;
        let addresses = match self.registry.assign(secret, &authenticated.user, &preferred) {
            Ok(addresses) => addresses,
            Err(error) => {
                tracing::warn!(%error, "a client got no address");
                return self.close_peer(now, id, h3::code::INTERNAL_ERROR, "no address is free");
            }
        };
        self.grant(id, addresses, requested);
        if known.is_some_and(|known| known != addresses) {
            self.update_joined_connections(id, &secret, addresses);
        }
    }

    /// Sends new addresses of a session to its other connections.
    fn update_joined_connections(
        &mut self,
        id: ConnectionHandle,
        secret: &SessionSecret,
        addresses: AddressSet,
    ) {
        let here: Vec<_> =
            self.sessions.connections(secret).map(|(_, other)| other).filter(|other| *other != id).collect();
        here.into_iter().for_each(|other| self.grant(other, addresses, &[]));
        let own = self.shard.index();
        // Connections of other shards are closed; they get the addresses when they reconnect.
        let elsewhere = self.registry.connections(secret).into_iter().filter(|slot| slot.shard != own);
        self.events.extend(elsewhere.map(ServerEvent::Replaced));
    }
}

/// The addresses that a client prefers, by index: those of each family in the order of the requests, at most
/// [`AddressSet::MAX`]. Requests for networks count where there is none for an address of their family.
fn preferred_addresses(requested: &[(u64, IpNet)]) -> Vec<Vec<IpAddr>> {
    let mut preferred: Vec<Vec<IpAddr>> = Vec::new();
    for v4 in [true, false] {
        let of_family = requested.iter().map(|(_, net)| *net).filter(|net| net.addr().is_ipv4() == v4);
        let (whole, networks): (Vec<_>, Vec<_>) =
            of_family.partition(|net| net.prefix_len() == net.max_prefix_len());
        let wanted = if whole.is_empty() { networks } else { whole };
        for (at, ip) in wanted.iter().map(IpNet::addr).take(AddressSet::MAX).enumerate() {
            match preferred.get_mut(at) {
                Some(wanted) => wanted.push(ip),
                None => preferred.push(vec![ip]),
            }
        }
    }
    preferred
}

/// All addresses of a session, then its networks. Each address answers the request for this very address, or
/// else the next request for an address of its family, a network one for a network of its length; requests
/// without an answer are refused (RFC 9484 §4.7.2).
fn answers(addresses: AddressSet, networks: &[IpNet], requested: &[(u64, IpNet)]) -> Vec<AssignedAddress> {
    let (mut known, mut open): (Vec<_>, Vec<_>) =
        requested.iter().copied().partition(|(_, net)| addresses.contains(net.addr()));
    let mut entries = Vec::new();
    for ip in addresses.iter() {
        let exact = known.iter().position(|(_, net)| net.addr() == ip).map(|at| known.remove(at));
        // A request for a network is left to a network, if there is one.
        let is_for_network =
            |wanted: &IpNet| networks.iter().any(|net| net.prefix_len() == wanted.prefix_len());
        let is_for_it = |wanted: &IpNet| {
            wanted.addr().is_ipv4() == ip.is_ipv4()
                && (wanted.prefix_len() == wanted.max_prefix_len() || !is_for_network(wanted))
        };
        let next = || open.iter().position(|(_, wanted)| is_for_it(wanted));
        let request = match exact {
            Some(request) => Some(request),
            None => next().map(|at| open.remove(at)),
        };
        let request_id = request.map_or(0, |(request_id, _)| request_id);
        entries.push(AssignedAddress { request_id, net: IpNet::from(ip) });
    }
    for net in networks.iter().filter(|net| !addresses.contains(net.addr())) {
        let is_for_it = |(_, wanted): &(u64, IpNet)| {
            wanted.addr().is_ipv4() == net.addr().is_ipv4() && wanted.prefix_len() == net.prefix_len()
        };
        let request = open.iter().position(is_for_it).map(|at| open.remove(at));
        entries
            .push(AssignedAddress { request_id: request.map_or(0, |(request_id, _)| request_id), net: *net });
    }
    for (request_id, net) in known.into_iter().chain(open) {
        let none: IpAddr = if net.addr().is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
        entries.push(AssignedAddress { request_id, net: IpNet::from(none) });
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_for_an_address_gets_one_answer() {
        let mut pool =
            crate::AddressPool::new("10.0.0.0/24".parse().unwrap(), Some("fd00::/64".parse().unwrap()));
        pool.assign([1; 16], "a", &[]).unwrap();
        assert!(pool.assign_additional(&[1; 16], &[]));
        let addresses = pool.addresses(&[1; 16]).unwrap();
        let net = |text: &str| text.parse::<IpAddr>().map(IpNet::from).unwrap();
        let answered = |requested: &[(u64, &str)]| {
            let requested: Vec<_> = requested.iter().map(|(id, ip)| (*id, net(ip))).collect();
            let of = |entry: AssignedAddress| (entry.request_id, entry.net.addr().to_string());
            answers(addresses, &[], &requested).into_iter().map(of).collect::<Vec<_>>()
        };
        let line = |expected: &[(u64, &str)]| {
            expected.iter().map(|(id, ip)| (*id, (*ip).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(answered(&[]), line(&[(0, "10.0.0.2"), (0, "fd00::2"), (0, "10.0.0.3"), (0, "fd00::3")]));
        assert_eq!(
            answered(&[
                (1, "0.0.0.0"),
                (2, "::"),
                (3, "10.0.0.2"),
                (4, "::"),
                (5, "0.0.0.0"),
                (6, "10.0.0.2")
            ]),
            line(&[
                (3, "10.0.0.2"),
                (2, "fd00::2"),
                (1, "10.0.0.3"),
                (4, "fd00::3"),
                (6, "0.0.0.0"),
                (5, "0.0.0.0"),
            ])
        );
        // Networks come behind the addresses, and answer requests for networks.
        let nets = ["2001:db8:7::/64", "203.0.113.8/29"].map(|net| net.parse::<IpNet>().unwrap());
        let requested = [(7, nets[0]), (9, net("::"))];
        assert_eq!(preferred_addresses(&requested).len(), 1, "a network is no second address");
        let all = answers(addresses, &nets, &requested).into_iter();
        let all: Vec<_> = all.map(|entry| (entry.request_id, entry.net.to_string())).collect();
        assert_eq!(
            all[1..],
            line(&[
                (9, "fd00::2/128"),
                (0, "10.0.0.3/32"),
                (0, "fd00::3/128"),
                (7, "2001:db8:7::/64"),
                (0, "203.0.113.8/29"),
            ])
        );
        let many: Vec<_> = (1..100).map(|id| (id, net("0.0.0.0"))).chain([(100, net("fd00::7"))]).collect();
        assert_eq!(preferred_addresses(&many).len(), AddressSet::MAX);
        assert_eq!(
            preferred_addresses(&many)[0],
            ["0.0.0.0", "fd00::7"].map(|ip| ip.parse::<IpAddr>().unwrap())
        );
        assert_eq!(preferred_addresses(&[]), Vec::<Vec<IpAddr>>::new());
    }
}
