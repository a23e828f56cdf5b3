//! Packets as read from a TUN device and received from the network.

use std::net::{Ipv4Addr, SocketAddr};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::datagram;
use mpvpn_packet::{FlowKey, GroCoalescer, VNET_HDR_LEN, VnetHdr, ip, split};
use mpvpn_packets::{Packet, Tcp};

/// MTU of the tunnel, bytes: 1500 of Ethernet less outer headers.
pub(crate) const MTU: usize = 1420;
/// TCP payload, bytes, of a segment with timestamps that fills [`MTU`].
const MSS: usize = MTU - 20 - 32;
/// TCP options NOP, NOP, timestamps (RFC 7323), as Linux sends them.
const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];

/// One read from a TUN device, and the buffers for its packets.
pub(crate) struct TunRead {
    hdr: VnetHdr,
    packet: Vec<u8>,
    arena: BytesMut,
    ranges: Vec<std::ops::Range<usize>>,
}

impl TunRead {
    fn new((hdr, packet): (VnetHdr, Vec<u8>)) -> Self {
        let (arena, ranges) = (BytesMut::with_capacity(128 << 10), Vec::with_capacity(64));
        Self { hdr, packet, arena, ranges }
    }

    /// A TCP super-packet over IPv4 of maximum length.
    pub(crate) fn tcp4() -> Self {
        Self::new(Packet::v4().tcp_super_packet(&segment(0), &payload(46 * MSS), MSS as u16))
    }

    /// A TCP super-packet over IPv6 of maximum length.
    pub(crate) fn tcp6() -> Self {
        Self::new(Packet::v6().tcp_super_packet(&segment(0), &payload(46 * (MSS - 20)), (MSS - 20) as u16))
    }

    /// A UDP super-packet of 46 datagrams.
    pub(crate) fn udp4() -> Self {
        Self::new(Packet::v4().udp_super_packet(&payload(46 * 1392), 1392))
    }

    /// A single UDP packet with `len` bytes of payload.
    pub(crate) fn single(len: usize) -> Self {
        Self::new((VnetHdr::NONE, Packet::v4().udp(&payload(len))))
    }

    /// Splits it; returns the number of packets.
    pub(crate) fn split(&mut self) -> usize {
        let prefix = datagram::prefix(0, datagram::CONTEXT_PAYLOAD);
        split::split(self.hdr, &self.packet, MTU, prefix.as_ref(), &mut self.arena, &mut self.ranges)
            .expect("a packet that can be cut");
        self.ranges.len()
    }
}

/// `count` consecutive full TCP segments of each of `flows` flows, interleaved.
pub(crate) fn segments(flows: u16, count: u32) -> Vec<Bytes> {
    let body = payload(MSS);
    let rounds = (0..count).flat_map(|n| (0..flows).map(move |flow| (flow, n)));
    let packet = |(flow, n)| Bytes::from(of_flow(flow).tcp_with(&segment(n * MSS as u32), &body));
    rounds.map(packet).collect()
}

/// A joiner with allocated buffers, and packets to join.
pub(crate) fn to_join(flows: u16, count: u32) -> (GroCoalescer, Vec<Bytes>) {
    let (joiner, _) = join(GroCoalescer::new(), segments(flows, count));
    (joiner, segments(flows, count))
}

/// Joins `packets`; returns the number of super-packets.
pub(crate) fn join(mut joiner: GroCoalescer, packets: Vec<Bytes>) -> (GroCoalescer, usize) {
    for packet in packets {
        joiner.push(packet);
    }
    joiner.flush();
    let mut count = 0;
    while let Some(joined) = joiner.pop() {
        count += 1;
        joiner.recycle(joined);
    }
    (joiner, count)
}

/// The flow hash of a packet.
pub(crate) fn flow_hash(packet: &[u8]) -> u32 {
    FlowKey::of(&ip::parse(packet).expect("an IP packet")).hash32()
}

/// A virtio header as a TUN device writes it.
pub(crate) fn vnet_header() -> [u8; VNET_HDR_LEN] {
    TunRead::tcp4().hdr.to_bytes()
}

/// Bytes that are not all the same.
pub(crate) fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

fn of_flow(flow: u16) -> Packet {
    let from = SocketAddr::from((Ipv4Addr::new(10, 1, 0, 1), 10_000 + flow));
    Packet::between(from, SocketAddr::from((Ipv4Addr::new(10, 2, 0, 2), 443)))
}

fn segment(seq: u32) -> Tcp {
    Tcp { seq, options: TIMESTAMPS.to_vec(), ..Tcp::default() }
}
