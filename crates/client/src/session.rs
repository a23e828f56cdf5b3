//! Shard 0's view of the session and of the connections that carry it.

use std::collections::BTreeMap;

use mpvpn_tunnel::ConnectionNumber;

/// The MTU before anything is known (bytes): the minimum of IPv6 (RFC 8200 §5).
const INITIAL_MTU: u32 = 1280;

/// The state of the session.
#[derive(Debug)]
pub(super) struct SessionState {
    is_up: bool,
    /// The number of resumptions that was last reported.
    resumed: u32,
    mtu: u32,
    /// The MTU (bytes) of other shards' connections that carry packets.
    mtu_by_member: BTreeMap<ConnectionNumber, usize>,
}

impl Default for SessionState {
    fn default() -> Self {
        Self { is_up: false, resumed: 0, mtu: INITIAL_MTU, mtu_by_member: BTreeMap::new() }
    }
}

impl SessionState {
    /// Sets whether shard 0's connection works.
    pub(super) fn set_up(&mut self, is_up: bool) {
        self.is_up = is_up;
    }

    /// Whether any connection carries packets.
    pub(super) fn is_up(&self) -> bool {
        self.is_up || !self.mtu_by_member.is_empty()
    }

    /// Sets the MTU (bytes) of shard 0's connection.
    pub(super) fn set_mtu(&mut self, mtu: u32) {
        self.mtu = mtu;
    }

    /// Sets the MTU (bytes) of another shard's connection, or that it carries no packets.
    pub(super) fn set_carried(&mut self, member: ConnectionNumber, mtu: Option<usize>) {
        match mtu {
            Some(mtu) => self.mtu_by_member.insert(member, mtu),
            None => self.mtu_by_member.remove(&member),
        };
    }

    /// The tunnel's MTU (bytes): the smallest of all shards, because any shard may get any packet.
    pub(super) fn mtu(&self) -> u32 {
        self.mtu_by_member.values().fold(self.mtu, |mtu, other| mtu.min(*other as u32))
    }

    /// Whether shard 0's queue is attached: not while its connection is down and another shard's works.
    pub(super) fn accepts_packets(&self) -> bool {
        self.is_up || self.mtu_by_member.is_empty()
    }

    /// The number of connections that share the links' rates.
    pub(super) fn connections(&self) -> usize {
        1 + self.mtu_by_member.len()
    }

    /// Whether the session was resumed since the last call; `resumed` is the total number of resumptions.
    pub(super) fn is_resumed(&mut self, resumed: u32) -> bool {
        std::mem::replace(&mut self.resumed, resumed) != resumed
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::ClassId;

    use super::*;

    fn member(shard: u8) -> ConnectionNumber {
        ConnectionNumber::of(shard, ClassId::DEFAULT).unwrap()
    }

    #[test]
    fn the_smallest_mtu_of_all_shards_counts() {
        let mut session = SessionState::default();
        assert_eq!(session.mtu(), 1280);
        session.set_mtu(1420);
        session.set_carried(member(1), Some(1400));
        session.set_carried(member(2), Some(1390));
        assert_eq!((session.mtu(), session.connections()), (1390, 3));
        session.set_carried(member(2), None);
        assert_eq!((session.mtu(), session.connections()), (1400, 2));
    }

    #[test]
    fn packets_go_to_other_shards_only_while_this_one_has_no_connection_and_another_has() {
        let mut session = SessionState::default();
        assert!(session.accepts_packets(), "no other has one either");
        session.set_carried(member(1), Some(1400));
        assert!(!session.accepts_packets());
        session.set_up(true);
        assert!(session.accepts_packets());
    }

    #[test]
    fn a_session_is_resumed_once_for_each_time() {
        let mut session = SessionState::default();
        assert!(!session.is_resumed(0) && session.is_resumed(1) && !session.is_resumed(1));
    }
}
