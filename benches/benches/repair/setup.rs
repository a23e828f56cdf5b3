use bytes::{Buf, Bytes};
use mpvpn_flow::fec::{Guard, Load, Place, Restorer, Shard, Watch};
use mpvpn_types::{Fec, Instant, PathId};

const PACKETS: usize = 100;
const GROUP: u8 = 20;
const PATH: PathId = PathId(0);

/// Packets that are about to leave.
pub(crate) struct Leaving {
    now: Instant,
    guard: Guard,
    packets: Vec<Bytes>,
}

impl Leaving {
    pub(super) fn new(repair: u8) -> Self {
        let mut guard = Guard::new(&[]);
        let plan = Fec::Fixed { data: GROUP, repair };
        guard.set(PATH, Watch::default().measured(plan, 0.0).flatten());
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
    fn each(&mut self, mut each: impl FnMut(Place, &Bytes)) -> usize {
        let mut bytes = 0;
        for packet in &self.packets {
            if let Some(place) = self.guard.place(self.now, PATH, packet.len()) {
                each(place, packet);
            }
            let _ = self.guard.put(self.now, PATH, packet.clone(), Load::Light);
            while let Some((_, mut datagram)) = self.guard.next_repair(self.now, PATH) {
                bytes += datagram.len();
                if let Ok((place, len)) = Place::decode(&datagram) {
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
    restorer: Restorer,
    datagrams: Vec<(Place, Bytes)>,
}

impl Came {
    /// So many packets of each group were lost, and none of the six repairs.
    pub(super) fn new(lost: u8) -> Self {
        let mut datagrams = Vec::new();
        Leaving::new(6).each(|place, bytes| {
            if !matches!(place.shard, Shard::Data(index) if index < lost) {
                datagrams.push((place, bytes.clone()));
            }
        });
        Self { now: Instant::now(), restorer: Restorer::new(), datagrams }
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
