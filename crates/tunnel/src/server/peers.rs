//! The connections of a server, found by their numbers in one step, however many there are.
//!
//! Numbers are small and used again (see [`ConnectionId`]), so a list with gaps does; it is as long as there
//! were ever connections at a time.

use mpvpn_quic::ConnectionId;

use super::Peer;

#[derive(Debug, Default)]
pub(super) struct Peers {
    slots: Vec<Option<Peer>>,
}

impl Peers {
    pub(super) fn get(&self, id: ConnectionId) -> Option<&Peer> {
        self.slots.get(id.0)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Peer> {
        self.slots.get_mut(id.0)?.as_mut()
    }

    pub(super) fn insert(&mut self, id: ConnectionId, peer: Peer) {
        if self.slots.len() <= id.0 {
            self.slots.resize_with(id.0 + 1, || None);
        }
        self.slots[id.0] = Some(peer);
    }

    pub(super) fn remove(&mut self, id: ConnectionId) -> Option<Peer> {
        self.slots.get_mut(id.0)?.take()
    }

    /// All, in the order of their numbers.
    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        let taken = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        taken.map(|(number, _)| ConnectionId(number)).collect()
    }

    /// All, in the order of their numbers.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnectionId, &mut Peer)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(number, slot)| Some((ConnectionId(number), slot.as_mut()?)))
    }
}
