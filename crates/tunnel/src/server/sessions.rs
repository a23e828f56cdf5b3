//! The sessions of a shard: the connections of each, and those that carry packets to its addresses. In:
//! connections that are added and removed, with the addresses of their sessions. Out: the connections of a
//! session or an address. Always holds: a session without connections at this shard has no state here.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
};

use mpvpn_quic::ConnectionHandle;
use rustc_hash::FxHashMap;

use super::session_connections::SessionConnections;
use crate::{AddressSet, ConnectionNumber, SessionSecret};

#[derive(Debug, Default)]
pub(super) struct Sessions {
    /// The session of an address, if a connection here is ready for its packets.
    by_ip: FxHashMap<IpAddr, SessionSecret>,
    by_secret: FxHashMap<SessionSecret, SessionConnections>,
    by_number: BTreeMap<(SessionSecret, ConnectionNumber), ConnectionHandle>,
}

impl Sessions {
    /// Adds a connection; it replaces an earlier one with the same number.
    pub(super) fn add(&mut self, secret: SessionSecret, number: ConnectionNumber, id: ConnectionHandle) {
        self.by_number.insert((secret, number), id);
    }

    /// Removes a connection; a later one with the same number stays.
    pub(super) fn remove(&mut self, secret: SessionSecret, number: ConnectionNumber, id: ConnectionHandle) {
        if let Entry::Occupied(entry) = self.by_number.entry((secret, number))
            && *entry.get() == id
        {
            entry.remove();
        }
    }

    /// The connections of a session.
    pub(super) fn connections(
        &self,
        secret: &SessionSecret,
    ) -> impl Iterator<Item = (ConnectionNumber, ConnectionHandle)> {
        let from = self.by_number.range((*secret, ConnectionNumber::INITIAL)..);
        from.take_while(move |((other, _), _)| other == secret).map(|((_, number), id)| (*number, *id))
    }

    /// Sends packets for the addresses of a session down those of its connections that are ready.
    pub(super) fn update_downlink(
        &mut self,
        secret: &SessionSecret,
        addresses: AddressSet,
        is_ready: impl Fn(ConnectionHandle) -> bool,
    ) {
        let connections: Vec<_> = self.connections(secret).collect();
        let serving = connections.iter().filter(|(_, id)| is_ready(*id));
        let reached = self.session(secret).set(serving.map(|(number, id)| (number.class(), *id)));
        if connections.is_empty() {
            self.by_secret.remove(secret);
        }
        for ip in addresses.iter() {
            match reached {
                true => self.by_ip.insert(ip, *secret),
                false => self.by_ip.remove(&ip),
            };
        }
    }

    /// The connections of a session that carry packets.
    pub(super) fn session(&mut self, secret: &SessionSecret) -> &mut SessionConnections {
        self.by_secret.entry(*secret).or_default()
    }

    /// The same by an address of the session, if this shard can reach it.
    #[inline]
    pub(super) fn session_at(&self, ip: IpAddr) -> Option<&SessionConnections> {
        self.reachable(self.by_ip.get(&ip)?)
    }

    /// The connections of a session that carry packets, if it has connections here.
    pub(super) fn reachable(&self, secret: &SessionSecret) -> Option<&SessionConnections> {
        self.by_secret.get(secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: SessionSecret = [7; 16];
    const FIRST: ConnectionHandle = ConnectionHandle(0);
    const SECOND: ConnectionHandle = ConnectionHandle(1);

    #[test]
    fn an_address_is_reached_while_a_connection_of_its_session_is_ready() {
        let mut pool = crate::AddressPool::new("10.0.0.0/24".parse().unwrap(), None);
        pool.assign(SECRET, "a", &[]).unwrap();
        let addresses = pool.addresses(&SECRET).unwrap();
        let ip = addresses.iter().next().unwrap();
        let mut sessions = Sessions::default();
        sessions.add(SECRET, ConnectionNumber::INITIAL, FIRST);
        sessions.update_downlink(&SECRET, addresses, |_| false);
        assert!(sessions.session_at(ip).is_none(), "it is not ready yet");
        sessions.update_downlink(&SECRET, addresses, |id| id == FIRST);
        assert!(sessions.session_at(ip).is_some());
        sessions.add(SECRET, ConnectionNumber::INITIAL, SECOND);
        sessions.remove(SECRET, ConnectionNumber::INITIAL, FIRST);
        assert_eq!(
            sessions.connections(&SECRET).collect::<Vec<_>>(),
            [(ConnectionNumber::INITIAL, SECOND)],
            "the later one"
        );
        sessions.remove(SECRET, ConnectionNumber::INITIAL, SECOND);
        sessions.update_downlink(&SECRET, addresses, |_| true);
        assert!(sessions.session_at(ip).is_none());
        assert!(sessions.by_secret.is_empty() && sessions.by_ip.is_empty(), "nothing is left of it");
    }
}
