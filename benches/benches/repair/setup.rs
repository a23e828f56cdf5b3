use bytes::{Buf, Bytes};
use mpvpn_flow::fec::{GroupDecoder, GroupEncoder, GroupPosition, Load, LossMonitor, Symbol};
use mpvpn_types::{Fec, Instant, PathId};

/// Number of encoded packets.
const PACKET_COUNT: usize = 100;
/// Source packets per group.
const GROUP_PACKETS: u8 = 20;
const PATH: PathId = PathId(0);

/// Packets to be sent with repair packets.
pub(crate) struct SentPackets {
    now: Instant,
    encoder: GroupEncoder,
    packets: Vec<Bytes>,
}

impl SentPackets {
    pub(super) fn new(repair: u8) -> Self {
        let mut encoder = GroupEncoder::new(&[]);
        let plan = Fec::Fixed { data: GROUP_PACKETS, repair };
        encoder.set_plan(PATH, LossMonitor::default().update(plan, 0.0).flatten());
        let packets = (0..PACKET_COUNT).map(|n| vec![n as u8; 1300].into()).collect();
        let mut sent = Self { now: Instant::now(), encoder, packets };
        // The first pass allocates memory.
        sent.pass();
        sent
    }

    /// Encodes all packets; returns the bytes of repair packets.
    pub(super) fn pass(&mut self) -> usize {
        self.each(|_, _| {})
    }

    /// Encodes all packets, and calls `each` for every packet and repair packet.
    fn each(&mut self, mut each: impl FnMut(GroupPosition, &Bytes)) -> usize {
        let mut bytes = 0;
        for packet in &self.packets {
            if let Some(position) = self.encoder.assign_position(self.now, PATH, packet.len()) {
                each(position, packet);
            }
            let _ = self.encoder.add_packet(self.now, PATH, packet.clone(), Load::Light);
            while let Some((_, mut datagram)) = self.encoder.next_repair(self.now, PATH) {
                bytes += datagram.len();
                if let Ok((position, len)) = GroupPosition::decode(&datagram) {
                    datagram.advance(len);
                    each(position, &datagram);
                }
            }
        }
        bytes
    }
}

/// Received packets and repair packets.
pub(crate) struct ReceivedPackets {
    now: Instant,
    decoder: GroupDecoder,
    datagrams: Vec<(GroupPosition, Bytes)>,
}

impl ReceivedPackets {
    /// All packets of groups with six repair packets, except `lost` packets of each group.
    pub(super) fn new(lost: u8) -> Self {
        let mut datagrams = Vec::new();
        SentPackets::new(6).each(|position, bytes| {
            if !matches!(position.symbol, Symbol::Source(index) if index < lost) {
                datagrams.push((position, bytes.clone()));
            }
        });
        Self { now: Instant::now(), decoder: GroupDecoder::new(), datagrams }
    }

    /// Decodes all packets; returns the bytes of recovered packets.
    pub(super) fn pass(&mut self) -> usize {
        let mut bytes = 0;
        for (position, datagram) in &self.datagrams {
            self.decoder.push(self.now, *position, datagram, |packet| bytes += packet.len());
        }
        bytes
    }
}
