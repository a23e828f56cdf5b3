//! Segmentation: splits one read of a TUN device into packets that fit the tunnel.
//!
//! In: a packet of up to 64 KiB with its virtio header. Out: complete IP packets of at most `mtu` bytes with
//! full checksums, appended to one buffer. A TCP super-packet is split into segments, a UDP super-packet into
//! datagrams; a partial checksum is completed; an IPv4 packet that is too large is fragmented if it may be.
//! Always holds: either all packets of a read are appended or, after an error, none.

use std::ops::Range;

use bytes::BytesMut;

use crate::fragment::fragment;
use crate::ip::{self, IpPacket, ParseError, Version};
use crate::tcp::TCP_HEADER;
use crate::vnet::{Gso, VnetHdr};
use crate::{be16, be32, checksum, protocol, put16, put32, tcp_flags};

const UDP_HEADER: usize = 8;

/// Length in bytes of IPv6 and TCP headers with timestamps (72), rounded up. Only an estimate for buffer
/// sizes.
const TYPICAL_HEADERS_LEN: usize = 80;

/// Minimum payload of a TCP segment, in bytes: Linux never requests less (`TCP_MIN_GSO_SIZE`). Smaller
/// segments would turn one read into thousands of packets; a larger minimum would refuse what the kernel may
/// send.
pub(crate) const MIN_SEGMENT_LEN: usize = 8;

/// Why a read could not be split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// The bytes are not an IP packet.
    #[error(transparent)]
    Ip(#[from] ParseError),
    /// A packet is larger than the MTU and must not be fragmented: answer with
    /// [`icmp::packet_too_big`](crate::icmp::packet_too_big).
    #[error("packet of {len} bytes exceeds the MTU of {mtu} and must not be fragmented")]
    TooBig {
        /// Length of the packet that did not fit, in bytes.
        len: usize,
        /// The MTU, in bytes.
        mtu: usize,
    },
    /// The virtio header requests a kind of segmentation that the TUN device does not offer.
    #[error("expected segmentation type 0, 1, 4 or 5, got {0}")]
    GsoType(u8),
    /// The virtio header does not match the headers of the packet.
    #[error("segmentation type {gso_type} does not match a packet of protocol {protocol}")]
    GsoHeaderMismatch {
        /// `gso_type` of the virtio header.
        gso_type: u8,
        /// Protocol of the packet.
        protocol: u8,
    },
    /// The segment size is zero or less than `MIN_SEGMENT_LEN`.
    #[error("segment size of {0} bytes is too small")]
    GsoSize(u16),
    /// The transport header does not fit in the packet.
    #[error("transport header of {need} bytes does not fit in {have}")]
    TransportHeader {
        /// Bytes that the header needs.
        need: usize,
        /// Bytes that are there.
        have: usize,
    },
    /// The checksum to complete lies outside of the transport part of the packet.
    #[error("checksum start {start} with offset {offset} lies outside of a packet of {len} bytes")]
    ChecksumPosition {
        /// `csum_start` of the virtio header.
        start: u16,
        /// `csum_offset` of the virtio header.
        offset: u16,
        /// Length of the packet in bytes.
        len: usize,
    },
}

/// An upper estimate of the bytes that [`split`] appends for a read of `len` bytes. If unusually long headers
/// need more, the output buffer is reallocated.
pub fn estimated_output_len(hdr: VnetHdr, len: usize, mtu: usize, prefix: usize) -> usize {
    let size = match hdr.gso() {
        Some(Gso::None) | None => mtu,
        Some(_) => usize::from(hdr.gso_size).min(mtu.saturating_sub(TYPICAL_HEADERS_LEN)),
    };
    len + (len / size.max(TYPICAL_HEADERS_LEN) + 1) * (prefix + TYPICAL_HEADERS_LEN)
}

/// Appends to `out` the packets of one TUN read, each of at most `mtu` bytes and preceded by `prefix`, and to
/// `ranges` the position of each in `out`, prefix included.
pub fn split(
    hdr: VnetHdr,
    packet: &[u8],
    mtu: usize,
    prefix: &[u8],
    out: &mut BytesMut,
    ranges: &mut Vec<Range<usize>>,
) -> Result<(), SplitError> {
    let ip = ip::parse(packet)?;
    let mut sink = PacketSink { prefix, out, ranges };
    match hdr.gso().ok_or(SplitError::GsoType(hdr.gso_type))? {
        Gso::None => split_single(hdr, &ip, mtu, &mut sink),
        Gso::Tcp4 => split_tcp(hdr, &ip, Version::V4, mtu, &mut sink),
        Gso::Tcp6 => split_tcp(hdr, &ip, Version::V6, mtu, &mut sink),
        Gso::Udp => split_udp(hdr, &ip, mtu, &mut sink),
    }
}

/// The output buffer for finished packets.
pub(crate) struct PacketSink<'a> {
    prefix: &'a [u8],
    out: &'a mut BytesMut,
    ranges: &'a mut Vec<Range<usize>>,
}

impl PacketSink<'_> {
    /// Reserves space for `count` packets with `bytes` bytes in total.
    pub(crate) fn reserve(&mut self, count: usize, bytes: usize) {
        self.out.reserve(bytes + count * self.prefix.len());
        self.ranges.reserve(count);
    }

    /// Appends a packet of `header` and `payload`, and returns it so that its header can be completed.
    #[inline]
    pub(crate) fn push(&mut self, header: &[u8], payload: &[u8]) -> &mut [u8] {
        let start = self.out.len();
        self.out.extend_from_slice(self.prefix);
        self.out.extend_from_slice(header);
        self.out.extend_from_slice(payload);
        self.ranges.push(start..self.out.len());
        &mut self.out[start + self.prefix.len()..]
    }
}

fn split_single(
    hdr: VnetHdr,
    ip: &IpPacket<'_>,
    mtu: usize,
    sink: &mut PacketSink<'_>,
) -> Result<(), SplitError> {
    let bytes = ip.bytes();
    if hdr.needs_csum() {
        check_checksum_position(hdr, ip)?;
    }
    if bytes.len() <= mtu {
        let packet = sink.push(bytes, &[]);
        if hdr.needs_csum() {
            complete_checksum(hdr, packet);
        }
        return Ok(());
    }
    if !hdr.needs_csum() {
        return fragment(ip, mtu, sink);
    }
    let mut completed = bytes.to_vec();
    complete_checksum(hdr, &mut completed);
    fragment(&ip::parse(&completed)?, mtu, sink)
}

fn check_checksum_position(hdr: VnetHdr, ip: &IpPacket<'_>) -> Result<(), SplitError> {
    let (start, offset) = (usize::from(hdr.csum_start), usize::from(hdr.csum_offset));
    if start < ip.header_len() || start + offset + 2 > ip.total_len() {
        return Err(SplitError::ChecksumPosition {
            start: hdr.csum_start,
            offset: hdr.csum_offset,
            len: ip.total_len(),
        });
    }
    Ok(())
}

/// Completes a partial checksum, whose position has been checked: the field already holds the sum of the
/// pseudo header.
fn complete_checksum(hdr: VnetHdr, packet: &mut [u8]) {
    let covered = &mut packet[usize::from(hdr.csum_start)..];
    let check = checksum::never_zero(!checksum::sum(covered));
    put16(covered, usize::from(hdr.csum_offset), check);
}

/// The IP header of a super-packet, with the sum of the fields that are the same in all its segments.
struct IpTemplate {
    version: Version,
    header_len: usize,
    id: u16,
    sum: u16,
}

impl IpTemplate {
    fn of(ip: &IpPacket<'_>) -> Self {
        let (header, header_len) = (ip.bytes(), ip.header_len());
        let (id, sum) = match ip.version() {
            Version::V4 => {
                let ends = checksum::add(checksum::sum(&header[..2]), checksum::sum(&header[6..10]));
                (be16(header, 4), checksum::add(ends, checksum::sum(&header[12..header_len])))
            }
            Version::V6 => (0, 0),
        };
        Self { version: ip.version(), header_len, id, sum }
    }

    /// Writes length, identification and header checksum of segment `index`.
    #[inline]
    fn write_length_and_id(&self, packet: &mut [u8], index: usize) {
        let len = packet.len() as u16;
        if self.version == Version::V6 {
            put16(packet, 4, len - self.header_len as u16);
            return;
        }
        let id = self.id.wrapping_add(index as u16);
        put16(packet, 2, len);
        put16(packet, 4, id);
        put16(packet, 10, !checksum::add(self.sum, checksum::add(len, id)));
    }
}

fn split_tcp(
    hdr: VnetHdr,
    ip: &IpPacket<'_>,
    version: Version,
    mtu: usize,
    sink: &mut PacketSink<'_>,
) -> Result<(), SplitError> {
    check_gso(hdr, ip, protocol::TCP, 16)?;
    if ip.version() != version {
        return Err(gso_header_mismatch(hdr, ip));
    }
    if usize::from(hdr.gso_size) < MIN_SEGMENT_LEN {
        return Err(SplitError::GsoSize(hdr.gso_size));
    }
    let (bytes, tcp) = (ip.bytes(), ip.transport());
    let header_len = match tcp.get(12) {
        Some(byte) => usize::from(byte >> 4) * 4,
        None => TCP_HEADER,
    };
    if header_len < TCP_HEADER || header_len > tcp.len() {
        return Err(SplitError::TransportHeader { need: header_len.max(TCP_HEADER), have: tcp.len() });
    }
    let offset = ip.transport_offset();
    let headers = offset + header_len;
    let payload = &bytes[headers..];
    let size = usize::from(hdr.gso_size).min(mtu.saturating_sub(headers));
    if size < MIN_SEGMENT_LEN && size < payload.len() {
        return Err(SplitError::TooBig { len: headers + MIN_SEGMENT_LEN.min(payload.len()), mtu });
    }
    if headers > mtu {
        return Err(SplitError::TooBig { len: headers, mtu });
    }

    let template = IpTemplate::of(ip);
    let constant_sum = checksum::add(
        checksum::pseudo(ip.addresses(), protocol::TCP, 0),
        checksum::add(
            checksum::add(checksum::sum(&tcp[..4]), checksum::sum(&tcp[8..12])),
            checksum::add(be16(tcp, 14), checksum::sum(&tcp[18..header_len])),
        ),
    );
    let first_seq = be32(tcp, 4);
    let count = payload.len().div_ceil(size.max(1)).max(1);
    sink.reserve(count, payload.len() + count * headers);
    for index in 0..count {
        let start = index * size;
        let end = (start + size).min(payload.len());
        let packet = sink.push(&bytes[..headers], &payload[start..end]);
        template.write_length_and_id(packet, index);

        let segment = &mut packet[offset..];
        let mut flags = segment[13];
        if index > 0 {
            flags &= !tcp_flags::CWR;
        }
        if index + 1 < count {
            flags &= !(tcp_flags::FIN | tcp_flags::PSH);
        }
        let seq = first_seq.wrapping_add(start as u32);
        put32(segment, 4, seq);
        segment[13] = flags;
        let fields = checksum::add(
            checksum::add((seq >> 16) as u16, seq as u16),
            checksum::add(be16(segment, 12), segment.len() as u16),
        );
        let data = checksum::sum(&segment[header_len..]);
        put16(segment, 16, !checksum::add(checksum::add(constant_sum, fields), data));
    }
    Ok(())
}

fn split_udp(
    hdr: VnetHdr,
    ip: &IpPacket<'_>,
    mtu: usize,
    sink: &mut PacketSink<'_>,
) -> Result<(), SplitError> {
    check_gso(hdr, ip, protocol::UDP, 6)?;
    if hdr.gso_size == 0 {
        return Err(SplitError::GsoSize(0));
    }
    let (bytes, udp) = (ip.bytes(), ip.transport());
    if udp.len() < UDP_HEADER {
        return Err(SplitError::TransportHeader { need: UDP_HEADER, have: udp.len() });
    }
    let offset = ip.transport_offset();
    let headers = offset + UDP_HEADER;
    let payload = &bytes[headers..];
    let size = usize::from(hdr.gso_size);
    let count = payload.len().div_ceil(size).max(1);
    let largest = headers + size.min(payload.len());

    let template = IpTemplate::of(ip);
    let constant_sum =
        checksum::add(checksum::pseudo(ip.addresses(), protocol::UDP, 0), checksum::sum(&udp[..4]));
    let finish = |packet: &mut [u8], index: usize| {
        template.write_length_and_id(packet, index);
        let datagram = &mut packet[offset..];
        let len = datagram.len() as u16;
        put16(datagram, 4, len);
        let data = checksum::sum(&datagram[UDP_HEADER..]);
        let total = checksum::add(checksum::add(constant_sum, checksum::add(len, len)), data);
        put16(datagram, 6, checksum::never_zero(!total));
    };
    if largest <= mtu {
        sink.reserve(count, payload.len() + count * headers);
        for index in 0..count {
            let end = ((index + 1) * size).min(payload.len());
            finish(sink.push(&bytes[..headers], &payload[index * size..end]), index);
        }
        return Ok(());
    }
    // Rare: datagrams that are to be fragmented. The first is the largest, so an error comes before any
    // output.
    for index in 0..count {
        let end = ((index + 1) * size).min(payload.len());
        let mut packet = [&bytes[..headers], &payload[index * size..end]].concat();
        finish(&mut packet, index);
        fragment(&ip::parse(&packet)?, mtu, sink)?;
    }
    Ok(())
}

/// Checks the properties of all super-packets: unfragmented packets of `protocol`, with the checksum at
/// `csum_offset`.
fn check_gso(hdr: VnetHdr, ip: &IpPacket<'_>, protocol: u8, csum_offset: u16) -> Result<(), SplitError> {
    if ip.protocol() != protocol || ip.fragment().is_some() || ip.has_routing_header() {
        return Err(gso_header_mismatch(hdr, ip));
    }
    let in_place = usize::from(hdr.csum_start) == ip.transport_offset() && hdr.csum_offset == csum_offset;
    if hdr.needs_csum() && !in_place {
        return Err(SplitError::ChecksumPosition {
            start: hdr.csum_start,
            offset: hdr.csum_offset,
            len: ip.total_len(),
        });
    }
    Ok(())
}

fn gso_header_mismatch(hdr: VnetHdr, ip: &IpPacket<'_>) -> SplitError {
    SplitError::GsoHeaderMismatch { gso_type: hdr.gso_type, protocol: ip.protocol() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vnet;
    use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

    const PREFIX: &[u8] = &[0xaa, 0xbb, 0];

    fn run(hdr: VnetHdr, packet: &[u8], mtu: usize) -> Result<Vec<Vec<u8>>, SplitError> {
        let mut out = BytesMut::from(&b"before"[..]);
        let mut ranges = Vec::new();
        let result = split(hdr, packet, mtu, PREFIX, &mut out, &mut ranges);
        if let Err(error) = result {
            assert_eq!((&out[..], ranges.len()), (&b"before"[..], 0), "nothing is appended on {error}");
            return Err(error);
        }
        let mut end = 6;
        let mut packets = Vec::new();
        for range in ranges {
            assert_eq!(range.start, end, "packets lie one behind the other");
            end = range.end;
            let packet = out[range].strip_prefix(PREFIX).unwrap();
            assert!(packet.len() <= mtu);
            packets.push(packet.to_vec());
        }
        assert_eq!(out.len(), end);
        Ok(packets)
    }

    fn payload(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn a_tcp_super_packet_becomes_segments_with_right_headers() {
        for base in [Packet { id: 0xffff, ..Packet::v4() }, Packet::v6()] {
            let flags = tcp_flags::ACK | tcp_flags::PSH | tcp_flags::FIN | tcp_flags::CWR;
            let tcp = Tcp {
                seq: u32::MAX - 700,
                flags,
                options: vec![1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8],
                ..Tcp::default()
            };
            let data = payload(10_001);
            let (hdr, bytes) = base.tcp_super_packet(&tcp, &data, 1400);
            let packets = run(hdr, &bytes, 1500).unwrap();
            assert_eq!(packets.len(), 8);
            let mut seen = Vec::new();
            for (index, packet) in packets.iter().enumerate() {
                assert!(has_valid_lengths_and_checksums(packet));
                let ip = ip::parse(packet).unwrap();
                let segment = ip.transport();
                assert_eq!(be32(segment, 4), tcp.seq.wrapping_add(seen.len() as u32));
                let ending = if index == 7 { tcp_flags::PSH | tcp_flags::FIN } else { 0 };
                let cwr = if index == 0 { tcp_flags::CWR } else { 0 };
                assert_eq!(segment[13], tcp_flags::ACK | ending | cwr);
                if ip.version() == Version::V4 {
                    assert_eq!(be16(packet, 4), 0xffffu16.wrapping_add(index as u16));
                }
                seen.extend_from_slice(&segment[32..]);
            }
            assert_eq!(seen, data);
        }
    }

    #[test]
    fn tcp_segments_shrink_to_the_mtu() {
        let (hdr, bytes) = Packet::v4().tcp_super_packet(&Tcp::default(), &payload(5000), 1460);
        let packets = run(hdr, &bytes, 1280).unwrap();
        assert_eq!(packets.iter().map(Vec::len).collect::<Vec<_>>(), [1280, 1280, 1280, 1280, 80]);
        assert!(packets.iter().all(|packet| has_valid_lengths_and_checksums(packet)));
        assert_eq!(run(hdr, &bytes, 44), Err(SplitError::TooBig { len: 48, mtu: 44 }));
    }

    #[test]
    fn a_udp_super_packet_becomes_datagrams() {
        for base in [Packet::v4(), Packet::v6()] {
            let data = payload(3100);
            let (hdr, bytes) = base.udp_super_packet(&data, 1000);
            let packets = run(hdr, &bytes, 1500).unwrap();
            assert_eq!(packets.len(), 4);
            let mut seen = Vec::new();
            for packet in &packets {
                assert!(has_valid_lengths_and_checksums(packet));
                seen.extend_from_slice(&ip::parse(packet).unwrap().transport()[8..]);
            }
            assert_eq!(seen, data);
            assert!(matches!(run(hdr, &bytes, 1000), Err(SplitError::TooBig { .. })));
        }
    }

    #[test]
    fn udp_datagrams_above_the_mtu_are_fragmented_if_allowed() {
        let base = Packet { dont_fragment: false, ..Packet::v4() };
        let (hdr, bytes) = base.udp_super_packet(&payload(3000), 1500);
        let packets = run(hdr, &bytes, 1000).unwrap();
        assert_eq!(packets.len(), 4);
        let fragments: Vec<_> =
            packets.iter().map(|packet| ip::parse(packet).unwrap().fragment().unwrap()).collect();
        assert_eq!(fragments[0].id, fragments[1].id);
        assert_eq!(fragments[2].id, fragments[0].id + 1);
        assert_eq!(fragments.iter().map(|f| f.more).collect::<Vec<_>>(), [true, false, true, false]);
    }

    #[test]
    fn a_partial_checksum_is_completed() {
        for base in [Packet::v4(), Packet::v6()] {
            let (hdr, bytes) = base.tcp_super_packet(&Tcp::default(), b"odd", 0);
            let hdr = VnetHdr { gso_type: vnet::GSO_NONE, ..hdr };
            assert_eq!(run(hdr, &bytes, 1500).unwrap(), [base.tcp(b"odd")]);
            let (hdr, bytes) = base.udp_super_packet(b"even", 0);
            let hdr = VnetHdr { gso_type: vnet::GSO_NONE, ..hdr };
            assert_eq!(run(hdr, &bytes, 1500).unwrap(), [base.udp(b"even")]);
        }
    }

    #[test]
    fn a_packet_that_fits_passes_unchanged_without_padding() {
        let bytes = Packet::v4().echo(1, 1, b"hello");
        let padded = [&bytes[..], &[0; 7]].concat();
        assert_eq!(run(VnetHdr::NONE, &padded, 1500).unwrap(), [bytes]);
    }

    #[test]
    fn a_packet_above_the_mtu_that_must_not_be_fragmented_is_refused() {
        for base in [Packet::v4(), Packet::v6()] {
            let bytes = base.udp(&payload(1600));
            let error = SplitError::TooBig { len: bytes.len(), mtu: 1500 };
            assert_eq!(run(VnetHdr::NONE, &bytes, 1500), Err(error));
        }
    }

    #[test]
    fn inconsistent_virtio_headers_are_refused() {
        let (hdr, bytes) = Packet::v4().tcp_super_packet(&Tcp::default(), &payload(3000), 1400);
        let run = |hdr| run(hdr, &bytes, 1500).unwrap_err();
        assert_eq!(run(VnetHdr { gso_type: 3, ..hdr }), SplitError::GsoType(3));
        for gso_type in [vnet::GSO_TCPV6, vnet::GSO_UDP_L4] {
            assert_eq!(
                run(VnetHdr { gso_type, ..hdr }),
                SplitError::GsoHeaderMismatch { gso_type, protocol: 6 }
            );
        }
        assert_eq!(run(VnetHdr { gso_size: 7, ..hdr }), SplitError::GsoSize(7));
        assert!(matches!(run(VnetHdr { csum_start: 24, ..hdr }), SplitError::ChecksumPosition { .. }));
        let plain = VnetHdr { gso_type: 0, ..hdr };
        for (csum_start, csum_offset) in [(0, 16), (20, 3020), (u16::MAX, u16::MAX), (3040, 0)] {
            let hdr = VnetHdr { csum_start, csum_offset, ..plain };
            assert!(matches!(run(hdr), SplitError::ChecksumPosition { .. }));
        }
    }

    #[test]
    fn a_tcp_header_longer_than_the_packet_is_refused() {
        let (hdr, mut bytes) = Packet::v4().tcp_super_packet(&Tcp::default(), &[], 1400);
        bytes[32] = 0xf0;
        assert_eq!(run(hdr, &bytes, 1500), Err(SplitError::TransportHeader { need: 60, have: 20 }));
        bytes[32] = 0x40;
        assert_eq!(run(hdr, &bytes, 1500), Err(SplitError::TransportHeader { need: 20, have: 20 }));
    }
}
