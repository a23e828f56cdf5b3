//! TCP segments: views of received ones, and packets to send.
//!
//! In: an IP packet; or a [`TcpHeader`] and a payload in parts. Out: a [`Segment`]; or a [`TunPacket`] of up
//! to 64 KiB of one flow, which the kernel segments and whose checksum it completes. Always holds: all
//! lengths in a [`Segment`] were checked.

use std::net::SocketAddr;

use arrayvec::ArrayVec;
use bytes::Bytes;

use crate::ip::{IPV4_HEADER, IPV6_HEADER, IpPacket, MAX_PACKET};
use crate::ip_header::ip_header;
use crate::vnet::{GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, VnetHdr};
use crate::{TunPacket, be16, be32, protocol, tcp_flags};

/// Length of a TCP header without options, in bytes.
pub const TCP_HEADER: usize = 20;
/// Offset of the checksum in the TCP header, in bytes.
const CHECKSUM_OFFSET: u16 = 16;

const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_MSS: u8 = 2;
const OPTION_MPTCP: u8 = 30;
const OPTION_WINDOW_SCALE: u8 = 3;
/// The largest window scale; a higher one counts as this (RFC 7323 §2.3).
const MAX_WINDOW_SCALE: u8 = 14;

/// A view of a TCP segment (RFC 9293 §3.1).
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    header: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// The TCP segment in a packet; `None` if the packet is not TCP, is a fragment, or is malformed.
    #[inline]
    pub fn of(packet: &IpPacket<'a>) -> Option<Self> {
        if packet.protocol() != protocol::TCP || packet.fragment().is_some() {
            return None;
        }
        let transport = packet.transport();
        let len = usize::from(transport.get(12)? >> 4) * 4;
        if len < TCP_HEADER {
            return None;
        }
        let (header, payload) = transport.split_at_checked(len)?;
        Some(Self { header, payload })
    }

    /// Sequence number.
    #[inline]
    pub fn seq(&self) -> u32 {
        be32(self.header, 4)
    }

    /// Acknowledgement number; only valid if [`crate::tcp_flags::ACK`] is set.
    #[inline]
    pub fn ack(&self) -> u32 {
        be32(self.header, 8)
    }

    /// Flags, see [`crate::tcp_flags`].
    #[inline]
    pub fn flags(&self) -> u8 {
        self.header[13]
    }

    /// Whether any of `flags` is set.
    #[inline]
    pub fn has(&self, flags: u8) -> bool {
        self.flags() & flags != 0
    }

    /// The window field, not scaled.
    #[inline]
    pub fn window(&self) -> u16 {
        be16(self.header, 14)
    }

    /// The payload.
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Number of sequence numbers that the segment occupies: payload bytes, SYN and FIN (SEG.LEN of RFC 9293
    /// §3.3.1).
    #[inline]
    pub fn seq_len(&self) -> usize {
        self.payload.len() + usize::from(self.has(tcp_flags::SYN)) + usize::from(self.has(tcp_flags::FIN))
    }

    /// The maximum segment size option of a SYN, in bytes (RFC 9293 §3.7.1).
    pub fn mss(&self) -> Option<u16> {
        let (_, value) = mss_option(self.header)?;
        Some(value)
    }

    /// The window scale option of a SYN, at most 14 (RFC 7323 §2).
    pub fn window_scale(&self) -> Option<u8> {
        let (_, _, value) = options(self.header).find(|(_, kind, _)| *kind == OPTION_WINDOW_SCALE)?;
        value.first().filter(|_| value.len() == 1).map(|scale| (*scale).min(MAX_WINDOW_SCALE))
    }
}

/// Whether a TCP packet has a Multipath TCP option (RFC 8684 §3.1). A proxy that terminates the connection
/// would disable Multipath TCP for it.
pub fn wants_multipath(packet: &IpPacket<'_>) -> bool {
    Segment::of(packet)
        .is_some_and(|segment| options(segment.header).any(|(_, kind, _)| kind == OPTION_MPTCP))
}

/// The offset of the MSS option's value in a TCP header, and the value.
pub(crate) fn mss_option(header: &[u8]) -> Option<(usize, u16)> {
    let (at, _, value) = options(header).find(|(_, kind, _)| *kind == OPTION_MSS)?;
    Some((at, u16::from_be_bytes(value.try_into().ok()?)))
}

/// The options of a TCP header: offset of the value, kind, and value. Ends at the first malformed option.
fn options(header: &[u8]) -> impl Iterator<Item = (usize, u8, &[u8])> {
    let mut at = TCP_HEADER;
    std::iter::from_fn(move || {
        while header.get(at) == Some(&OPTION_NOP) {
            at += 1;
        }
        let kind = *header.get(at)?;
        if kind == OPTION_END {
            return None;
        }
        let value_at = at + 2;
        at += usize::from(*header.get(at + 1)?);
        Some((value_at, kind, header.get(value_at..at)?))
    })
}

/// The headers of a segment to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpHeader {
    /// Source address and port.
    pub from: SocketAddr,
    /// Destination address and port, of the same family.
    pub to: SocketAddr,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags, see [`crate::tcp_flags`].
    pub flags: u8,
    /// The window field, already scaled.
    pub window: u16,
    /// Maximum segment size option for a SYN, in bytes.
    pub mss: Option<u16>,
    /// Window scale option for a SYN, in bits.
    pub window_scale: Option<u8>,
}

impl TcpHeader {
    fn options(&self) -> ArrayVec<u8, 8> {
        let mut options = ArrayVec::new();
        if let Some(mss) = self.mss {
            options.extend([OPTION_MSS, 4]);
            options.extend(mss.to_be_bytes());
        }
        if let Some(scale) = self.window_scale {
            options.extend([OPTION_NOP, OPTION_WINDOW_SCALE, 3, scale]);
        }
        options
    }
}

/// Length in bytes of the IP and TCP headers of a packet to `to`, both without options.
pub fn headers_len(to: SocketAddr) -> usize {
    TCP_HEADER + if to.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER }
}

/// Maximum payload in bytes of one packet to `to`. IPv6 would allow 40 bytes more, because its length field
/// does not count the header, but the kernel's buffers are no larger.
pub fn max_payload(to: SocketAddr) -> usize {
    MAX_PACKET - headers_len(to)
}

/// A packet for a TUN device with virtio headers: the headers `head` and the payload `parts`, at most
/// [`max_payload`] bytes in at most [`crate::gro::MAX_PARTS`] − 1 parts. The kernel splits it into segments
/// of `mss` bytes and completes the checksum. `None` if the addresses are of two families, or there is too
/// much payload.
pub fn build_packet(head: &TcpHeader, parts: Vec<Bytes>, mss: u16) -> Option<TunPacket> {
    let payload: usize = parts.iter().map(Bytes::len).sum();
    let options = head.options();
    let tcp_len = TCP_HEADER + options.len() + payload;
    let (header, pseudo) = ip_header(head.from.ip(), head.to.ip(), 0, protocol::TCP, tcp_len)?;
    let ip_len = header.len();
    let mut bytes = ArrayVec::<u8, { IPV6_HEADER + TCP_HEADER + 8 }>::new();
    bytes.extend(header);
    bytes.extend(head.from.port().to_be_bytes());
    bytes.extend(head.to.port().to_be_bytes());
    bytes.extend(head.seq.to_be_bytes());
    bytes.extend(head.ack.to_be_bytes());
    bytes.extend([((TCP_HEADER + options.len()) as u8) << 2, head.flags]);
    bytes.extend(head.window.to_be_bytes());
    bytes.extend(pseudo.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(options);
    let mut vnet = VnetHdr {
        flags: NEEDS_CSUM,
        hdr_len: bytes.len() as u16,
        csum_start: ip_len as u16,
        csum_offset: CHECKSUM_OFFSET,
        ..VnetHdr::NONE
    };
    if payload > usize::from(mss) {
        vnet.gso_type = if head.from.is_ipv4() { GSO_TCPV4 } else { GSO_TCPV6 };
        vnet.gso_size = mss;
    }
    TunPacket::with_headers(vnet, &bytes, parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ip, split};
    use bytes::BytesMut;
    use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

    fn head(packet: &Packet) -> TcpHeader {
        TcpHeader {
            from: packet.src,
            to: packet.dst,
            seq: 7,
            ack: 9,
            flags: tcp_flags::ACK,
            window: 100,
            mss: None,
            window_scale: None,
        }
    }

    #[test]
    fn a_built_super_packet_splits_into_correct_segments() {
        for packet in [Packet::v4(), Packet::v6()] {
            let payload: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
            let parts = payload.chunks(1234).map(Bytes::copy_from_slice).collect();
            let joined = build_packet(&head(&packet), parts, 1400).unwrap();
            let whole = joined.to_vec().split_off(crate::VNET_HDR_LEN);
            let (mut out, mut ranges) = (BytesMut::new(), Vec::new());
            split::split(joined.vnet(), &whole, 1500, &[], &mut out, &mut ranges).unwrap();
            assert_eq!(ranges.len(), 4);
            let mut carried = Vec::new();
            for range in ranges {
                assert!(has_valid_lengths_and_checksums(&out[range.clone()]));
                let view = ip::parse(&out[range]).unwrap();
                let segment = Segment::of(&view).unwrap();
                assert_eq!(segment.seq() as usize, 7 + carried.len());
                assert_eq!((segment.ack(), segment.window(), segment.mss()), (9, 100, None));
                carried.extend_from_slice(segment.payload());
            }
            assert_eq!(carried, payload);
        }
    }

    #[test]
    fn options_of_a_syn_are_read_as_written() {
        for packet in [Packet::v4(), Packet::v6()] {
            let head = TcpHeader {
                flags: tcp_flags::SYN | tcp_flags::ACK,
                mss: Some(1360),
                window_scale: Some(4),
                ..head(&packet)
            };
            let whole =
                build_packet(&head, Vec::new(), 1400).unwrap().to_vec().split_off(crate::VNET_HDR_LEN);
            let view = ip::parse(&whole).unwrap();
            let segment = Segment::of(&view).unwrap();
            assert!(segment.has(tcp_flags::SYN) && segment.payload().is_empty());
            assert_eq!((segment.mss(), segment.window_scale()), (Some(1360), Some(4)));
        }
    }

    #[test]
    fn a_malformed_option_ends_the_list() {
        let with = |options: &[u8]| {
            let tcp = Tcp { options: options.to_vec(), flags: tcp_flags::SYN, ..Tcp::default() };
            let bytes = Packet::v4().tcp_with(&tcp, b"");
            let view = ip::parse(&bytes).unwrap();
            let segment = Segment::of(&view).unwrap();
            (segment.mss(), segment.window_scale())
        };
        assert_eq!(with(&[1, 1, 3, 3, 200, 2, 4, 5, 180, 0, 0, 0]), (Some(1460), Some(14)));
        assert_eq!(with(&[2, 3, 5, 0]), (None, None));
        assert_eq!(with(&[3, 0, 2, 4]), (None, None));
        assert_eq!(with(&[0, 2, 4, 5]), (None, None));
        assert_eq!(with(&[1, 1, 1, 2]), (None, None));
    }

    #[test]
    fn mixed_families_and_too_much_payload_are_refused() {
        let mixed = TcpHeader { to: Packet::v6().dst, ..head(&Packet::v4()) };
        assert!(build_packet(&mixed, Vec::new(), 1400).is_none());
        for packet in [Packet::v4(), Packet::v6()] {
            let most = max_payload(packet.dst);
            assert!(build_packet(&head(&packet), vec![Bytes::from(vec![0; most])], 1400).is_some());
        }
        let much = max_payload(Packet::v4().dst) + 1;
        assert!(build_packet(&head(&Packet::v4()), vec![Bytes::from(vec![0; much])], 1400).is_none());
    }

    #[test]
    fn a_header_length_beyond_the_packet_is_refused() {
        let mut bytes = Packet::v4().tcp(b"");
        bytes[32] = 0xf0;
        assert!(Segment::of(&ip::parse(&bytes).unwrap()).is_none());
        bytes[32] = 0x40;
        assert!(Segment::of(&ip::parse(&bytes).unwrap()).is_none());
        assert!(Segment::of(&ip::parse(&Packet::v4().udp(b"12345678901234567890")).unwrap()).is_none());
    }
}
