//! The connections of one client at this shard: which of them takes what goes down.
//!
//! In: which connection carries which class, and the flows that come up. Out: the connection for what goes down, which is
//! that of the class in which its flow came up last; the one of the default class, or any, where nothing is known or that
//! is gone or reaches nobody. Always holds: what is kept of flows is bounded.

use mpvpn_class::FlowClasses;
use mpvpn_packet::{FlowKey, ip::IpPacket};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{ClassId, Instant};

use crate::shapers::Shapers;

const CLASSES: usize = ClassId::MAX as usize;

#[derive(Debug, Default)]
pub(super) struct Group {
    /// The connections that carry packets down.
    by_class: [Option<ConnectionHandle>; CLASSES],
    flows: FlowClasses,
    pub(super) shapers: Shapers,
}

impl Group {
    /// Says which connections carry packets down, each with its class; of those of one class the first counts. Returns
    /// whether there are any.
    pub(super) fn set(&mut self, all: impl Iterator<Item = (ClassId, ConnectionHandle)>) -> bool {
        self.by_class = [None; CLASSES];
        for (class, id) in all {
            self.by_class[usize::from(class.0) % CLASSES].get_or_insert(id);
        }
        self.by_class.iter().any(Option::is_some)
    }

    /// A packet came up in a class.
    pub(super) fn came_up(&mut self, now: Instant, class: ClassId, packet: &IpPacket<'_>) {
        // Most clients use one class only.
        if class == ClassId::DEFAULT && self.flows.is_empty() {
            return;
        }
        let flow = FlowKey::of(packet).reversed().hash32();
        let known = self.flows.get(now, flow);
        if known.unwrap_or_default() != class {
            self.flows.put(now, flow, class);
        }
    }

    /// The connection for a packet that goes down; `works` tells which still reach the client.
    pub(super) fn down(
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
    fn the_way_back_follows_the_way_up() {
        let (mut group, now) = (Group::default(), Instant::now());
        assert!(!group.set(std::iter::empty()));
        let (up, down) = {
            let up = Packet::v4();
            let down = Packet { src: up.dst, dst: up.src, ..up.clone() };
            (up.udp(b"hello"), down.udp(b"there"))
        };
        let (up, down) = (ip::parse(&up).unwrap(), ip::parse(&down).unwrap());
        assert_eq!(group.down(now, &down, |_| true), None);
        assert!(group.set([(ClassId(1), CALLS)].into_iter()));
        assert_eq!(group.down(now, &down, |_| true), Some(CALLS), "the only one there is");
        assert!(group.set([(ClassId(0), HOME), (ClassId(1), CALLS)].into_iter()));
        assert_eq!(group.down(now, &down, |_| true), Some(HOME));
        group.came_up(now, ClassId(1), &up);
        assert_eq!(group.down(now, &down, |_| true), Some(CALLS));
        assert_eq!(group.down(now, &down, |id| id != CALLS), Some(HOME), "it reaches nobody");
        assert_eq!(group.down(now, &down, |_| false), Some(CALLS), "none is better");
        group.set([(ClassId(0), HOME)].into_iter());
        assert_eq!(group.down(now, &down, |_| true), Some(HOME), "its connection is gone");
        group.set([(ClassId(0), HOME), (ClassId(1), CALLS)].into_iter());
        group.came_up(now, ClassId(0), &up);
        assert_eq!(group.down(now, &down, |_| true), Some(HOME), "it is of another class now");
    }
}
