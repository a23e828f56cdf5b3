//! The connections of a session at this shard, and which of them carries a packet to the client. In: the
//! connection of each class, and the packets of flows from the client. Out: the connection for a packet to
//! the client: that of the class in which its flow was last received; if the flow is unknown, or no path of
//! that connection works, the one of the default class, or any; a pinned class uses its own only. The
//! answer to a flow that another shard receives belongs to that shard. Always holds: the table of flows is
//! bounded.

use mpvpn_packet::ip::IpPacket;
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{ClassId, Instant};

use crate::{session_flows::SessionFlows, shapers::Shapers};

const CLASSES: usize = ClassId::MAX as usize;

/// Where this shard has a packet to the client from.
#[derive(Clone, Copy, Debug)]
pub(super) enum PacketSource {
    /// From its queue of the TUN device. `shard`: the number of this shard.
    Tun { shard: u8 },
    /// From another shard, which handed it over.
    OtherShard,
}

/// The connection that carries a packet to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Downlink {
    /// This connection of this shard.
    Connection(ConnectionHandle),
    /// One of the shard with this number.
    OtherShard(u8),
}

#[derive(Debug, Default)]
pub(super) struct SessionConnections {
    /// The connections that carry packets to the client.
    by_class: [Option<ConnectionHandle>; CLASSES],
    /// Shared with the other shards.
    pub(super) flows: SessionFlows,
    pub(super) shapers: Shapers,
}

impl SessionConnections {
    /// Sets the connections that carry packets to the client, each with its class; of several of a class the
    /// first is used. Returns whether there are any.
    pub(super) fn set(&mut self, all: impl Iterator<Item = (ClassId, ConnectionHandle)>) -> bool {
        let reached = self.reaches_client();
        self.by_class = [None; CLASSES];
        for (class, id) in all {
            self.by_class[usize::from(class.0) % CLASSES].get_or_insert(id);
        }
        if reached && !self.reaches_client() {
            // Other shards would hand over the answers to flows that arrived here.
            self.flows.clear();
        }
        self.reaches_client()
    }

    fn reaches_client(&self) -> bool {
        self.by_class.iter().any(Option::is_some)
    }

    /// Returns where a packet to the client goes. `works` tells whether a connection has a path that works.
    pub(super) fn downlink(
        &self,
        now: Instant,
        source: PacketSource,
        packet: &IpPacket<'_>,
        works: impl Fn(ConnectionHandle) -> bool,
    ) -> Option<Downlink> {
        let arrival = self.flows.arrival(now, packet);
        match (arrival, source) {
            (Some(arrival), PacketSource::Tun { shard }) if arrival.shard != shard => {
                Some(Downlink::OtherShard(arrival.shard))
            }
            _ => {
                let (class, is_pinned) =
                    arrival.map_or((ClassId::DEFAULT, false), |arrival| (arrival.class, arrival.is_pinned));
                self.connection_of(class, is_pinned, works).map(Downlink::Connection)
            }
        }
    }

    /// Returns the connection of a class, or another one if no path of it works and it is not pinned.
    fn connection_of(
        &self,
        class: ClassId,
        is_pinned: bool,
        works: impl Fn(ConnectionHandle) -> bool,
    ) -> Option<ConnectionHandle> {
        let own = self.by_class[usize::from(class.0) % CLASSES];
        if is_pinned {
            return own;
        }
        let all = || own.into_iter().chain(self.by_class.iter().flatten().copied());
        all().find(|id| works(*id)).or_else(|| all().next())
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_packet::ip;
    use mpvpn_packets::Packet;

    use super::*;
    use crate::session_flows::Arrival;

    const INITIAL: ConnectionHandle = ConnectionHandle(3);
    const CALLS: ConnectionHandle = ConnectionHandle(9);
    const SHARD: u8 = 1;

    /// Both directions of a flow.
    fn flow() -> (Vec<u8>, Vec<u8>) {
        let up = Packet::v4();
        let down = Packet { src: up.dst, dst: up.src, ..up.clone() };
        (up.udp(b"hello"), down.udp(b"there"))
    }

    #[test]
    fn a_pinned_class_uses_its_own_connection_only_also_for_flows_that_begin_here() {
        let (mut group, now) = (SessionConnections::default(), Instant::now());
        let (up, down) = flow();
        let (up, down) = (ip::parse(&up).unwrap(), ip::parse(&down).unwrap());
        let source = PacketSource::Tun { shard: SHARD };
        let downlink = |group: &SessionConnections, works: bool| {
            group.downlink(now, source, &down, |id| works || id != CALLS)
        };
        let own = Some(Downlink::Connection(CALLS));
        let arrival = Arrival { class: ClassId(1), shard: SHARD, is_pinned: true };
        let addresses = crate::Addresses { v4: up.src().to_string().parse().ok(), v6: None };
        let both = [(ClassId(0), INITIAL), (ClassId(1), CALLS)];
        group.set(both.into_iter());
        assert_eq!(downlink(&group, true), Some(Downlink::Connection(INITIAL)), "nothing is known yet");
        group.flows.set_own(arrival, Some(addresses));
        assert_eq!((downlink(&group, true), downlink(&group, false)), (own, own), "by its address");
        group.flows.set_own(Arrival { is_pinned: false, ..arrival }, Some(addresses));
        assert_eq!(downlink(&group, true), Some(Downlink::Connection(INITIAL)), "it is pinned no more");
        group.flows.record(now, arrival, &up);
        assert_eq!((downlink(&group, true), downlink(&group, false)), (own, own), "by its flow");
        group.set([(ClassId(0), INITIAL)].into_iter());
        assert_eq!(downlink(&group, true), None, "its connection is gone");
    }

    #[test]
    fn a_flow_is_answered_in_the_class_in_which_it_arrived() {
        let (mut group, now) = (SessionConnections::default(), Instant::now());
        assert!(!group.set(std::iter::empty()));
        let (up, down) = flow();
        let (up, down) = (ip::parse(&up).unwrap(), ip::parse(&down).unwrap());
        let downlink = |group: &SessionConnections, works: &dyn Fn(ConnectionHandle) -> bool| match group
            .downlink(now, PacketSource::Tun { shard: SHARD }, &down, works)
        {
            Some(Downlink::Connection(id)) => Some(id),
            Some(Downlink::OtherShard(_)) => panic!("no other shard has received anything"),
            None => None,
        };
        let arrives = |group: &SessionConnections, class| {
            group.flows.record(now, Arrival { class: ClassId(class), shard: SHARD, is_pinned: false }, &up);
        };
        assert_eq!(downlink(&group, &|_| true), None);
        assert!(group.set([(ClassId(1), CALLS)].into_iter()));
        assert_eq!(downlink(&group, &|_| true), Some(CALLS), "the only one there is");
        assert!(group.set([(ClassId(0), INITIAL), (ClassId(1), CALLS)].into_iter()));
        assert_eq!(downlink(&group, &|_| true), Some(INITIAL));
        arrives(&group, 1);
        assert_eq!(downlink(&group, &|_| true), Some(CALLS));
        assert_eq!(downlink(&group, &|id| id != CALLS), Some(INITIAL), "its paths are down");
        assert_eq!(downlink(&group, &|_| false), Some(CALLS), "none is better");
        group.set([(ClassId(0), INITIAL)].into_iter());
        assert_eq!(downlink(&group, &|_| true), Some(INITIAL), "its connection is gone");
        group.set([(ClassId(0), INITIAL), (ClassId(1), CALLS)].into_iter());
        arrives(&group, 0);
        assert_eq!(downlink(&group, &|_| true), Some(INITIAL), "it is of another class now");
    }

    #[test]
    fn the_answer_to_a_flow_goes_to_the_shard_at_which_the_flow_arrived_while_that_reaches_the_client() {
        let now = Instant::now();
        let (up, down) = flow();
        let (up, down) = (ip::parse(&up).unwrap(), ip::parse(&down).unwrap());
        let (mut here, mut other) = (SessionConnections::default(), SessionConnections::default());
        other.flows = here.flows.clone();
        for shard in [&mut here, &mut other] {
            shard.set([(ClassId(0), INITIAL), (ClassId(1), CALLS)].into_iter());
        }
        let read_by = |shard: &SessionConnections, number| {
            shard.downlink(now, PacketSource::Tun { shard: number }, &down, |_| true)
        };
        assert_eq!(read_by(&other, 2), Some(Downlink::Connection(INITIAL)), "an unknown flow");
        here.flows.record(now, Arrival { class: ClassId(1), shard: SHARD, is_pinned: false }, &up);
        assert_eq!(read_by(&here, SHARD), Some(Downlink::Connection(CALLS)));
        assert_eq!(read_by(&other, 2), Some(Downlink::OtherShard(SHARD)));
        let handed = other.downlink(now, PacketSource::OtherShard, &down, |_| true);
        assert_eq!(handed, Some(Downlink::Connection(CALLS)), "it is not handed over again");
        here.set(std::iter::empty());
        assert_eq!(read_by(&other, 2), Some(Downlink::Connection(INITIAL)), "that shard has no connection");
    }
}
