//! The connections of a server, and which of them is handled next. In: connections, with marks that one has
//! received packets, may have some to send, or has a timer. Out: the next one to handle for each. Always
//! holds: a connection is at most once in each queue; users with packets to send take turns, and so do the
//! connections of a user ([`turns`]); those who received packets take them by time ([`received`]). IDs are
//! small and reused (see [`ConnectionHandle`]), so they index a list that is as long as the most connections
//! at a time.

mod queries;
mod received;
mod turns;
mod users;

use std::collections::BTreeSet;

use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{Duration, Instant};

use queries::{Queries, UserQueries};
use received::Received;
pub(super) use received::TURN_TIME;
use turns::Turns;
use users::{UserNumber, Users};

#[derive(Debug)]
struct Slot<P> {
    peer: P,
    user: UserNumber,
    /// It is in `received`.
    received: bool,
    /// Bytes of its packets that wait.
    waiting: usize,
    /// Bytes of all its packets.
    received_bytes: u64,
    sends: bool,
    /// Its time in `timers`.
    armed: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Peers<P> {
    slots: Vec<Option<Slot<P>>>,
    users: Users,
    received: Received,
    queries: Queries,
    sending: Turns,
    timers: BTreeSet<(Instant, ConnectionHandle)>,
}

impl<P> Default for Peers<P> {
    fn default() -> Self {
        let (slots, timers, users) = (Vec::new(), BTreeSet::new(), Users::default());
        let (received, queries, sending) = Default::default();
        Self { slots, users, received, queries, sending, timers }
    }
}

/// The slot of a connection, where the queues are used beside it.
fn slot_of<P>(slots: &mut [Option<Slot<P>>], id: ConnectionHandle) -> Option<&mut Slot<P>> {
    slots.get_mut(id.0)?.as_mut()
}

impl<P> Peers<P> {
    fn slot(&mut self, id: ConnectionHandle) -> Option<&mut Slot<P>> {
        slot_of(&mut self.slots, id)
    }

    #[inline]
    pub(super) fn get(&self, id: ConnectionHandle) -> Option<&P> {
        self.slots.get(id.0)?.as_ref().map(|slot| &slot.peer)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: ConnectionHandle) -> Option<&mut P> {
        self.slot(id).map(|slot| &mut slot.peer)
    }

    /// A connection, and the name queries of its user.
    pub(super) fn get_with_queries(&mut self, id: ConnectionHandle) -> Option<(&mut P, UserQueries<'_>)> {
        let Slot { peer, user, .. } = slot_of(&mut self.slots, id)?;
        Some((peer, self.queries.of(*user)))
    }

    pub(super) fn insert(&mut self, id: ConnectionHandle, peer: P) {
        if self.slots.len() <= id.0 {
            self.slots.resize_with(id.0 + 1, || None);
        }
        let user = self.users.enter(None);
        let (received, waiting, received_bytes, sends, armed) = Default::default();
        self.slots[id.0] = Some(Slot { peer, user, received, waiting, received_bytes, sends, armed });
    }

    /// Sets the user of a connection, which was a stranger's.
    pub(super) fn set_user(&mut self, id: ConnectionHandle, user: &str) {
        let number = self.users.enter(Some(user));
        let Some(slot) = slot_of(&mut self.slots, id) else {
            return self.users.leave(number);
        };
        let before = std::mem::replace(&mut slot.user, number);
        self.received.transfer(before, number, slot.waiting);
        // Its places among those of strangers are skipped.
        if slot.received {
            self.received.push(number, id);
        }
        if slot.sends {
            self.sending.push(number, id);
        }
        self.users.leave(before);
    }

    pub(super) fn remove(&mut self, id: ConnectionHandle) -> Option<P> {
        let slot = self.slots.get_mut(id.0)?.take()?;
        if let Some(at) = slot.armed {
            self.timers.remove(&(at, id));
        }
        self.received.release(slot.user, slot.waiting);
        self.users.leave(slot.user);
        Some(slot.peer)
    }

    /// All connections, in the order of their IDs.
    pub(super) fn ids(&self) -> Vec<ConnectionHandle> {
        let taken = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        taken.map(|(number, _)| ConnectionHandle(number)).collect()
    }

    /// All connections, in the order of their IDs.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnectionHandle, &mut P)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(number, slot)| Some((ConnectionHandle(number), &mut slot.as_mut()?.peer)))
    }

    /// Marks a connection that has to be handled like one that received packets.
    pub(super) fn mark_received(&mut self, id: ConnectionHandle) {
        if let Some(slot) = slot_of(&mut self.slots, id)
            && !std::mem::replace(&mut slot.received, true)
        {
            self.received.push(slot.user, id);
        }
    }

    /// Marks a connection that received packets of so many bytes; returns it if they may wait.
    pub(super) fn receive(&mut self, id: ConnectionHandle, bytes: usize) -> Option<&mut P> {
        let slot = slot_of(&mut self.slots, id)?;
        if !self.received.admit(slot.user, bytes) {
            return None;
        }
        slot.received_bytes += bytes as u64;
        slot.waiting += bytes;
        self.mark_received(id);
        self.get_mut(id)
    }

    /// The bytes of all packets that a connection has received.
    pub(super) fn received_bytes(&self, id: ConnectionHandle) -> u64 {
        self.slots.get(id.0).and_then(Option::as_ref).map_or(0, |slot| slot.received_bytes)
    }

    /// The connection with received packets whose turn it is; [`Self::end_received_turn`] ends the turn.
    pub(super) fn next_received(&mut self) -> Option<ConnectionHandle> {
        loop {
            let (user, id) = self.received.next()?;
            if self.slot(id).is_some_and(|slot| slot.received && slot.user == user) {
                return Some(id);
            }
            // It is gone, or was a stranger's.
            self.received.end(Duration::ZERO);
        }
    }

    /// A connection has taken packets of so many bytes.
    pub(super) fn take_received(&mut self, id: ConnectionHandle, bytes: usize) {
        if let Some(slot) = slot_of(&mut self.slots, id) {
            slot.waiting -= bytes;
            self.received.release(slot.user, bytes);
        }
    }

    /// The connection whose turn it was has been handled for this time. It gets another turn if packets are
    /// left.
    pub(super) fn end_received_turn(&mut self, id: ConnectionHandle, took: Duration) {
        match self.slot(id) {
            Some(slot) if slot.waiting > 0 => self.received.pass(took),
            slot => {
                slot.into_iter().for_each(|slot| slot.received = false);
                self.received.end(took);
            }
        }
    }

    /// Whether received packets wait.
    pub(super) fn is_behind(&self) -> bool {
        !self.received.is_empty()
    }

    /// Marks a connection that may have packets to send.
    pub(super) fn mark_sends(&mut self, id: ConnectionHandle) {
        if let Some(slot) = slot_of(&mut self.slots, id)
            && !std::mem::replace(&mut slot.sends, true)
        {
            self.sending.push(slot.user, id);
        }
    }

    /// The connection whose turn it is to send.
    pub(super) fn sender(&mut self) -> Option<ConnectionHandle> {
        loop {
            let (user, id) = self.sending.next()?;
            if self.slot(id).is_some_and(|slot| slot.sends && slot.user == user) {
                return Some(id);
            }
            // It is gone, or was a stranger's.
            self.sending.skip();
        }
    }

    /// It has sent a packet: passes the turn on.
    pub(super) fn pass_turn(&mut self) {
        self.sending.pass();
    }

    /// It has no more packets to send: removes it from the queue.
    pub(super) fn end_turn(&mut self) {
        if let Some(id) = self.sending.end()
            && let Some(slot) = self.slot(id)
        {
            slot.sends = false;
        }
    }

    /// Sets the timer of a connection.
    pub(super) fn arm(&mut self, id: ConnectionHandle, next: Option<Instant>) {
        let Some(slot) = self.slot(id) else { return };
        if slot.armed == next {
            return;
        }
        if let Some(at) = std::mem::replace(&mut slot.armed, next) {
            self.timers.remove(&(at, id));
        }
        self.timers.extend(next.map(|at| (at, id)));
    }

    /// The earliest timer.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The next connection whose timer has expired; its timer is cleared. One whose packets wait is left out,
    /// as they may be what its timer waits for: it is armed again in its turn.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<ConnectionHandle> {
        while let Some((_, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.pop_first();
            let Some(slot) = self.slot(id) else { continue };
            slot.armed = None;
            if !slot.received {
                return Some(id);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::Duration;

    use super::*;

    fn peers(count: usize) -> Peers<usize> {
        let mut peers = Peers::default();
        (0..count).for_each(|number| peers.insert(ConnectionHandle(number), number));
        peers
    }

    #[test]
    fn connections_take_turns_to_send_until_they_have_no_more_packets() {
        let mut peers = peers(2);
        [1, 0, 1].into_iter().for_each(|number| peers.mark_sends(ConnectionHandle(number)));
        let mut turns = Vec::new();
        for left in [true, true, false, false] {
            turns.extend(peers.sender().map(|id| id.0));
            if left { peers.pass_turn() } else { peers.end_turn() }
        }
        assert_eq!((turns, peers.sender()), (vec![1, 0, 1, 0], None));
        peers.mark_sends(ConnectionHandle(1));
        assert_eq!(peers.sender(), Some(ConnectionHandle(1)), "it may come again");
    }

    #[test]
    fn a_user_with_many_connections_gets_as_many_turns_as_one_with_one() {
        let mut peers = peers(102);
        (0..102).for_each(|number| peers.mark_sends(ConnectionHandle(number)));
        (0..100).for_each(|number| peers.set_user(ConnectionHandle(number), "many"));
        peers.set_user(ConnectionHandle(100), "one");
        let mut turns = [0; 102];
        for _ in 0..300 {
            turns[peers.sender().expect("somebody").0] += 1;
            peers.pass_turn();
        }
        // The last connection shows no credentials: strangers are as one user.
        assert_eq!((turns[100], turns[101]), (100, 100));
        assert!(turns[..100].iter().all(|turns| *turns == 1), "{turns:?}");
        peers.remove(ConnectionHandle(100));
        peers.insert(ConnectionHandle(100), 0);
        peers.set_user(ConnectionHandle(100), "many");
        (0..102).for_each(|number| _ = peers.remove(ConnectionHandle(number)));
        assert_eq!(peers.sender(), None);
    }

    #[test]
    fn a_connection_that_received_packets_is_handled_until_none_is_left_unless_removed() {
        let mut peers = peers(3);
        [2, 1, 2, 0]
            .into_iter()
            .for_each(|number| assert!(peers.receive(ConnectionHandle(number), 1).is_some()));
        assert_eq!(peers.remove(ConnectionHandle(1)), Some(1));
        let take = |peers: &mut Peers<usize>| {
            let id = peers.next_received()?;
            peers.take_received(id, 1);
            peers.end_received_turn(id, Duration::ZERO);
            Some(id.0)
        };
        assert_eq!(std::iter::from_fn(|| take(&mut peers)).collect::<Vec<_>>(), [2, 0, 2]);
        assert_eq!(peers.receive(ConnectionHandle(7), 1), None, "it is not known");
    }

    #[test]
    fn a_connection_has_one_timer_and_none_when_removed() {
        let (mut peers, start) = (peers(3), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for (number, ms) in [(0, 30), (1, 10), (2, 20), (1, 40)] {
            peers.arm(ConnectionHandle(number), Some(at(ms)));
        }
        peers.remove(ConnectionHandle(0));
        assert_eq!(peers.poll_timeout(), Some(at(20)));
        assert_eq!(peers.next_due(at(19)), None);
        assert_eq!(peers.next_due(at(40)), Some(ConnectionHandle(2)));
        peers.arm(ConnectionHandle(1), None);
        assert_eq!((peers.next_due(at(40)), peers.poll_timeout()), (None, None));
    }
}
