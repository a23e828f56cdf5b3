//! Turns packets from the TUN device, and UDP payloads, into the payloads of datagrams.
//!
//! In: a packet of up to 64 KiB with its virtio header, and the sizes that fit. Out: IP packets that fit a
//! datagram, each after the datagram prefix of the tunnel. Always holds: a packet that does not fit and must
//! not be split is refused as a whole.

use std::ops::Range;

use bytes::Bytes;
use mpvpn_class::QueuedPacket;
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_packet::{
    Arena, SplitError, VnetHdr, ip,
    mss::{self, Checksum},
    protocol, split,
};

/// The packet sizes that fit (bytes).
#[derive(Clone, Copy, Debug)]
pub(super) struct PacketLimits {
    /// Largest packet that can be sent now. Larger packets are split or refused.
    pub(super) mtu: usize,
    /// The announced MTU of the tunnel: larger than `mtu` while a path searches for its MTU.
    pub(super) announced: usize,
    /// Largest TCP segment that is split if it does not fit.
    pub(super) largest: usize,
}

/// Splits packets and puts datagram prefixes in front of them.
#[derive(Debug)]
pub(super) struct Packetizer {
    /// The prefix of each packet of the tunnel.
    pub(super) prefix: DatagramPrefix,
    arena: Arena,
    /// The positions of the pieces of the last packet that was split; a field so that its allocation is
    /// reused.
    ranges: Vec<Range<usize>>,
}

/// The packets into which a packet was split, each after the prefix of the tunnel.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    bytes: Bytes,
    ranges: &'a [Range<usize>],
}

impl Pieces<'_> {
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = Bytes> + '_ {
        self.ranges.iter().map(|range| self.bytes.slice(range.clone()))
    }
}

impl Packetizer {
    /// Creates the packetizer of the tunnel on the request stream `stream`.
    pub(super) fn new(stream: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, datagram::CONTEXT_PAYLOAD),
            arena: Arena::new(),
            ranges: Vec::new(),
        }
    }

    /// Splits a packet from the TUN device into packets that fit; `protocol` is its transport protocol. The
    /// MSS option of TCP handshakes is clamped to the announced MTU.
    ///
    /// # Errors
    /// If the packet is malformed, or does not fit and must not be split.
    pub(super) fn split(
        &mut self,
        hdr: VnetHdr,
        packet: &mut [u8],
        protocol: u8,
        limits: PacketLimits,
    ) -> Result<Pieces<'_>, SplitError> {
        let PacketLimits { mtu, announced, largest } = limits;
        let is_tcp = protocol == protocol::TCP;
        if is_tcp {
            let partial = if hdr.needs_csum() { Checksum::Partial } else { Checksum::Full };
            mss::clamp(packet, announced, partial);
        }
        match self.append(hdr, packet, mtu) {
            // While a path searches for its MTU, the limit is below the announced MTU: split the TCP segment.
            Err(SplitError::TooBig { len, .. }) if is_tcp && len <= largest => {
                self.append(as_super_packet(packet), packet, mtu)?;
            }
            result => result?,
        }
        Ok(self.take_pieces())
    }

    /// Appends the pieces of a packet to the arena; nothing on an error.
    #[inline]
    fn append(&mut self, hdr: VnetHdr, packet: &[u8], mtu: usize) -> Result<(), SplitError> {
        let prefix = self.prefix.as_ref();
        self.ranges.clear();
        let buffer = self.arena.reserve(split::estimated_output_len(hdr, packet.len(), mtu, prefix.len()));
        split::split(hdr, packet, mtu, prefix, buffer, &mut self.ranges)
    }

    #[inline]
    fn take_pieces(&mut self) -> Pieces<'_> {
        Pieces { bytes: self.arena.take(), ranges: &self.ranges }
    }

    /// Returns a UDP payload after a prefix.
    pub(super) fn payload(&mut self, prefix: &DatagramPrefix, payload: &[u8]) -> Bytes {
        let buffer = self.arena.reserve(prefix.as_ref().len() + payload.len());
        buffer.extend_from_slice(prefix.as_ref());
        buffer.extend_from_slice(payload);
        self.arena.take()
    }

    /// Returns a queued packet without its prefix.
    #[inline]
    pub(super) fn behind_prefix<'a>(&self, packet: &'a QueuedPacket) -> &'a [u8] {
        packet.data.get(self.prefix.as_ref().len()..).unwrap_or_default()
    }

    /// Whether a queued packet is a TCP packet.
    pub(super) fn is_tcp(&self, packet: &QueuedPacket) -> bool {
        ip::parse(self.behind_prefix(packet)).is_ok_and(|view| view.protocol() == protocol::TCP)
    }

    /// Splits a queued packet into smaller TCP packets or IP fragments, after the limit of a datagram fell to
    /// `max` bytes. Each new path lowers the limit for a moment, as it searches for its MTU.
    ///
    /// # Errors
    /// If the packet must not be split.
    #[cold]
    pub(super) fn cut(&mut self, packet: &QueuedPacket, max: usize) -> Result<Vec<QueuedPacket>, SplitError> {
        let whole = self.behind_prefix(packet);
        let hdr = if self.is_tcp(packet) { as_super_packet(whole) } else { VnetHdr::NONE };
        self.append(hdr, whole, max.saturating_sub(self.prefix.as_ref().len()))?;
        Ok(self.take_pieces().iter().map(|data| QueuedPacket { data, ..*packet }).collect())
    }

    /// Releases unused memory.
    pub(super) fn trim(&mut self) {
        self.arena.release();
    }
}

/// Returns the virtio header with which a single TCP packet is split into smaller ones.
fn as_super_packet(packet: &[u8]) -> VnetHdr {
    let v6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
    let gso_type = if v6 { mpvpn_packet::vnet::GSO_TCPV6 } else { mpvpn_packet::vnet::GSO_TCPV4 };
    VnetHdr { gso_type, gso_size: u16::MAX, ..VnetHdr::NONE }
}

#[cfg(test)]
mod tests {
    use mpvpn_packet::tcp_flags;
    use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

    use super::*;

    const LIMITS: PacketLimits = PacketLimits { mtu: 1280, announced: 1400, largest: 1400 };
    const PREFIX: usize = 2;

    /// The sizes of the IP packets that a packet becomes.
    fn sizes(hdr: VnetHdr, mut packet: Vec<u8>, limits: PacketLimits) -> Result<Vec<usize>, SplitError> {
        let mut packetizer = Packetizer::new(0);
        let protocol = ip::parse(&packet)?.protocol();
        let pieces: Vec<Bytes> = packetizer.split(hdr, &mut packet, protocol, limits)?.iter().collect();
        for piece in &pieces {
            assert!(piece.starts_with(packetizer.prefix.as_ref()));
            assert!(has_valid_lengths_and_checksums(&piece[PREFIX..]), "{piece:?}");
        }
        Ok(pieces.iter().map(|piece| piece.len() - PREFIX).collect())
    }

    #[test]
    fn a_read_of_64_kib_becomes_packets_that_fit() {
        let (hdr, packet) = Packet::v4().tcp_super_packet(&Tcp::default(), &[7; 60_000], 1240);
        let sizes = sizes(hdr, packet, LIMITS).expect("it is well formed");
        assert_eq!((sizes.len(), sizes[0]), (49, 1280));
    }

    #[test]
    fn a_packet_within_the_announced_mtu_that_does_not_fit_is_split_if_tcp_and_refused_if_not() {
        let tcp = |len: usize| sizes(VnetHdr::NONE, Packet::v4().tcp(&vec![7; len - 40]), LIMITS);
        assert_eq!(tcp(1280), Ok(vec![1280]));
        assert_eq!(tcp(1400).map(|sizes| sizes.len()), Ok(2));
        assert_eq!(tcp(1401), Err(SplitError::TooBig { len: 1401, mtu: 1280 }));
        let udp = sizes(VnetHdr::NONE, Packet::v4().udp(&[7; 1300]), LIMITS);
        assert_eq!(udp, Err(SplitError::TooBig { len: 1328, mtu: 1280 }));
    }

    #[test]
    fn the_mss_of_tcp_handshakes_is_clamped_to_the_announced_mtu() {
        const MSS: [u8; 4] = [2, 4, 0x05, 0xb4];
        let tcp = Tcp { flags: tcp_flags::SYN, options: MSS.to_vec(), ..Tcp::default() };
        let mut packet = Packet::v4().tcp_with(&tcp, &[]);
        let mut packetizer = Packetizer::new(0);
        let pieces = packetizer.split(VnetHdr::NONE, &mut packet, protocol::TCP, LIMITS);
        let piece = pieces.expect("it fits").iter().next().expect("a packet");
        let mss = u16::from_be_bytes([piece[PREFIX + 42], piece[PREFIX + 43]]);
        assert_eq!(mss, 1360);
    }

    #[test]
    fn a_packet_that_waited_while_the_limit_fell_leaves_in_smaller_ones() {
        let mut packetizer = Packetizer::new(0);
        let mut queued = |mut packet: Vec<u8>| {
            let protocol = ip::parse(&packet).expect("a packet").protocol();
            let limits = PacketLimits { mtu: 1400, announced: 1400, largest: 1400 };
            let pieces = packetizer.split(VnetHdr::NONE, &mut packet, protocol, limits);
            let data = pieces.expect("it fits").iter().next().expect("a packet");
            let queued = QueuedPacket { data, flow: 9, needs_order: true, unnumbered: false };
            (packetizer.is_tcp(&queued), packetizer.cut(&queued, 1000))
        };
        let (is_tcp, parts) = queued(Packet::v6().tcp(&[7; 1300]));
        let parts = parts.expect("TCP may be cut");
        assert!(is_tcp && parts.len() == 2, "{parts:?}");
        assert!(parts.iter().all(|part| part.flow == 9 && part.needs_order && part.data.len() <= 1000));
        let (is_tcp, parts) = queued(Packet::v6().udp(&[7; 1300]));
        assert!(!is_tcp && matches!(parts, Err(SplitError::TooBig { .. })), "{parts:?}");
    }
}
