use bytes::{Buf, Bytes};
use mpvpn_flow::fec::{GroupDecoder, GroupEncoder, GroupPosition, Load, LossMonitor, Symbol};
use mpvpn_types::{Fec, Instant, PathId};

const PACKETS: usize = 100;
const GROUP: u8 = 20;
const PATH: PathId = PathId(0);

/// Packets that are about to leave.
pub(crate) struct Leaving {
    now: Instant,
    guard: GroupEncoder,
    packets: Vec<Bytes>,
}

impl Leaving {
    pub(super) fn new(repair: u8) -> Self {
        let mut guard = GroupEncoder::new(&[]);
        let plan = Fec::Fixed { data: GROUP, repair };
        guard.set_plan(PATH, LossMonitor::default().update(plan, 0.0).flatten());
        let packets = (0..PACKETS).map(|n| vec![n as u8; 1300].into()).collect();
        let mut leaving = Self { now: Instant::now(), guard, packets };
        // Memory is there after the first time.
        leaving.pass();
        leaving
    }

    /// Bytes of repair.
    pub(super) fn pass(&mut self) -> usize {
        self.each(|_, _| {})
    }

    /// Calls `each` for all that leaves.
    fn each(&mut self, mut each: impl FnMut(GroupPosition, &Bytes)) -> usize {
        let mut bytes = 0;
        for packet in &self.packets {
            if let Some(place) = self.guard.assign_position(self.now, PATH, packet.len()) {
                each(place, packet);
            }
            let _ = self.guard.add_packet(self.now, PATH, packet.clone(), Load::Light);
            while let Some((_, mut datagram)) = self.guard.next_repair(self.now, PATH) {
                bytes += datagram.len();
                if let Ok((place, len)) = GroupPosition::decode(&datagram) {
                    datagram.advance(len);
                    each(place, &datagram);
                }
            }
        }
        bytes
    }
}

/// Packets and repair that arrived.
pub(crate) struct Came {
    now: Instant,
    restorer: GroupDecoder,
    datagrams: Vec<(GroupPosition, Bytes)>,
}

impl Came {
    /// So many packets of each group were lost, and none of the six repairs.
    pub(super) fn new(lost: u8) -> Self {
        let mut datagrams = Vec::new();
        Leaving::new(6).each(|place, bytes| {
            if !matches!(place.symbol, Symbol::Source(index) if index < lost) {
                datagrams.push((place, bytes.clone()));
            }
        });
        Self { now: Instant::now(), restorer: GroupDecoder::new(), datagrams }
    }

    /// Bytes of packets that were restored.
    pub(super) fn pass(&mut self) -> usize {
        let mut bytes = 0;
        for (place, datagram) in &self.datagrams {
            self.restorer.push(self.now, *place, datagram, |packet| bytes += packet.len());
        }
        bytes
    }
}
