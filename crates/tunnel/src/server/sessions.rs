//! The sessions of a shard: which connections each has here, and which of them reach its addresses.
//!
//! In: connections that come and go, with the addresses of their sessions. Out: the connections of a session, and for an
//! address those that what goes there may go down. Always holds: nothing is kept of a session without connections here.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
};

use mpvpn_quic::ConnectionHandle;
use rustc_hash::FxHashMap;

use super::groups::Group;
use crate::{AddressSet, ConnectionNumber, SessionSecret};

#[derive(Debug, Default)]
pub(super) struct Sessions {
    /// The session that has an address.
    by_ip: FxHashMap<IpAddr, SessionSecret>,
    groups: FxHashMap<SessionSecret, Group>,
    by_member: BTreeMap<(SessionSecret, ConnectionNumber), ConnectionHandle>,
}

impl Sessions {
    /// A member of a session has this connection from now on.
    pub(super) fn enter(&mut self, secret: SessionSecret, member: ConnectionNumber, id: ConnectionHandle) {
        self.by_member.insert((secret, member), id);
    }

    /// The connection is over; a later one of the same member stays.
    pub(super) fn leave(&mut self, secret: SessionSecret, member: ConnectionNumber, id: ConnectionHandle) {
        if let Entry::Occupied(entry) = self.by_member.entry((secret, member))
            && *entry.get() == id
        {
            entry.remove();
        }
    }

    /// The connections of a session.
    pub(super) fn members(
        &self,
        secret: &SessionSecret,
    ) -> impl Iterator<Item = (ConnectionNumber, ConnectionHandle)> {
        let from = self.by_member.range((*secret, ConnectionNumber::INITIAL)..);
        from.take_while(move |((other, _), _)| other == secret).map(|((_, member), id)| (*member, *id))
    }

    /// Lets what goes to the addresses of a session go down those of its connections that serve.
    pub(super) fn serve(
        &mut self,
        secret: &SessionSecret,
        addresses: AddressSet,
        serves: impl Fn(ConnectionHandle) -> bool,
    ) {
        let members: Vec<_> = self.members(secret).collect();
        let serving = members.iter().filter(|(_, id)| serves(*id));
        let reached = self.group(secret).set(serving.map(|(member, id)| (member.class(), *id)));
        if members.is_empty() {
            self.groups.remove(secret);
        }
        for ip in addresses.iter() {
            match reached {
                true => self.by_ip.insert(ip, *secret),
                false => self.by_ip.remove(&ip),
            };
        }
    }

    /// What connects the connections of a session.
    pub(super) fn group(&mut self, secret: &SessionSecret) -> &mut Group {
        self.groups.entry(*secret).or_default()
    }

    /// The same for the session that has an address, if one is reached here.
    #[inline]
    pub(super) fn group_at(&mut self, ip: IpAddr) -> Option<&mut Group> {
        self.groups.get_mut(self.by_ip.get(&ip)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: SessionSecret = [7; 16];
    const FIRST: ConnectionHandle = ConnectionHandle(0);
    const SECOND: ConnectionHandle = ConnectionHandle(1);

    #[test]
    fn an_address_is_reached_while_a_connection_of_its_session_serves() {
        let mut pool = crate::AddressPool::new("10.0.0.0/24".parse().unwrap(), None);
        pool.assign(SECRET, "a", &[]).unwrap();
        let addresses = pool.addresses(&SECRET).unwrap();
        let ip = addresses.iter().next().unwrap();
        let mut sessions = Sessions::default();
        sessions.enter(SECRET, ConnectionNumber::INITIAL, FIRST);
        sessions.serve(&SECRET, addresses, |_| false);
        assert!(sessions.group_at(ip).is_none(), "it does not serve yet");
        sessions.serve(&SECRET, addresses, |id| id == FIRST);
        assert!(sessions.group_at(ip).is_some());
        sessions.enter(SECRET, ConnectionNumber::INITIAL, SECOND);
        sessions.leave(SECRET, ConnectionNumber::INITIAL, FIRST);
        assert_eq!(
            sessions.members(&SECRET).collect::<Vec<_>>(),
            [(ConnectionNumber::INITIAL, SECOND)],
            "the later one"
        );
        sessions.leave(SECRET, ConnectionNumber::INITIAL, SECOND);
        sessions.serve(&SECRET, addresses, |_| true);
        assert!(sessions.group_at(ip).is_none());
        assert!(sessions.groups.is_empty() && sessions.by_ip.is_empty(), "nothing is left of it");
    }
}
