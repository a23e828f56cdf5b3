//! The connections of a session at this shard, and which of them carries a packet to the client. In: the
//! connection of each class, and the packets of flows from the client. Out: the connection for a packet to
//! the client: that of the class in which its flow was last received; if the flow is unknown, or no path of
//! that connection works, the one of the default class, or any. Always holds: the table of flows is bounded.

use mpvpn_class::FlowClasses;
use mpvpn_packet::{FlowKey, ip::IpPacket};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{ClassId, Instant};

use crate::shapers::Shapers;

const CLASSES: usize = ClassId::MAX as usize;

#[derive(Debug, Default)]
pub(super) struct SessionConnections {
    /// The connections that carry packets to the client.
    by_class: [Option<ConnectionHandle>; CLASSES],
    flows: FlowClasses,
    pub(super) shapers: Shapers,
}

impl SessionConnections {
    /// Sets the connections that carry packets to the client, each with its class; of several of a class the
    /// first is used. Returns whether there are any.
    pub(super) fn set(&mut self, all: impl Iterator<Item = (ClassId, ConnectionHandle)>) -> bool {
        self.by_class = [None; CLASSES];
        for (class, id) in all {
            self.by_class[usize::from(class.0) % CLASSES].get_or_insert(id);
        }
        self.by_class.iter().any(Option::is_some)
    }

    /// Records the class in which a packet of the client arrived.
    pub(super) fn record_uplink(&mut self, now: Instant, class: ClassId, packet: &IpPacket<'_>) {
        // Most clients use one class only.
        if class == ClassId::DEFAULT && self.flows.is_empty() {
            return;
        }
        let flow = FlowKey::of(packet).reversed().hash32();
        let known = self.flows.get(now, flow);
        if known.unwrap_or_default() != class {
            self.flows.insert(now, flow, class);
        }
    }

    /// The connection for a packet to the client; `works` tells whether a connection has a path that works.
    pub(super) fn downlink(
        &mut self,
        now: Instant,
        packet: &IpPacket<'_>,
        works: impl Fn(ConnectionHandle) -> bool,
    ) -> Option<ConnectionHandle> {
        let class = match self.flows.is_empty() {
            true => ClassId::DEFAULT,
            false => self.flows.get(now, FlowKey::of(packet).hash32()).unwrap_or_default(),
        };
        let of = |class: ClassId| self.by_class[usize::from(class.0) % CLASSES];
        let all = || of(class).into_iter().chain(self.by_class.iter().flatten().copied());
        all().find(|id| works(*id)).or_else(|| all().next())
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_packet::ip;
    use mpvpn_packets::Packet;

    use super::*;

    const HOME: ConnectionHandle = ConnectionHandle(3);
    const CALLS: ConnectionHandle = ConnectionHandle(9);

    #[test]
    fn a_flow_is_answered_in_the_class_in_which_it_arrived() {
        let (mut group, now) = (SessionConnections::default(), Instant::now());
        assert!(!group.set(std::iter::empty()));
        let (up, down) = {
            let up = Packet::v4();
            let down = Packet { src: up.dst, dst: up.src, ..up.clone() };
            (up.udp(b"hello"), down.udp(b"there"))
        };
        let (up, down) = (ip::parse(&up).unwrap(), ip::parse(&down).unwrap());
        assert_eq!(group.downlink(now, &down, |_| true), None);
        assert!(group.set([(ClassId(1), CALLS)].into_iter()));
        assert_eq!(group.downlink(now, &down, |_| true), Some(CALLS), "the only one there is");
        assert!(group.set([(ClassId(0), HOME), (ClassId(1), CALLS)].into_iter()));
        assert_eq!(group.downlink(now, &down, |_| true), Some(HOME));
        group.record_uplink(now, ClassId(1), &up);
        assert_eq!(group.downlink(now, &down, |_| true), Some(CALLS));
        assert_eq!(group.downlink(now, &down, |id| id != CALLS), Some(HOME), "its paths are down");
        assert_eq!(group.downlink(now, &down, |_| false), Some(CALLS), "none is better");
        group.set([(ClassId(0), HOME)].into_iter());
        assert_eq!(group.downlink(now, &down, |_| true), Some(HOME), "its connection is gone");
        group.set([(ClassId(0), HOME), (ClassId(1), CALLS)].into_iter());
        group.record_uplink(now, ClassId(0), &up);
        assert_eq!(group.downlink(now, &down, |_| true), Some(HOME), "it is of another class now");
    }
}
