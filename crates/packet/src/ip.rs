//! A cheap, strict view of an IPv4 or IPv6 packet.
//!
//! In: a slice that starts with an IP header. Out: an [`IpPacket`]. Always holds: all its lengths were
//! checked, so its methods cannot fail. Bytes after the total length of the header (link padding) are cut
//! off; a slice shorter than the total length is an error.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{be16, be32, protocol};

/// Length of an IPv4 header without options, in bytes.
pub const IPV4_HEADER: usize = 20;
/// Length of the fixed IPv6 header, in bytes.
pub const IPV6_HEADER: usize = 40;
/// Maximum length of an IP packet in bytes (16-bit IPv4 total length; IPv6 jumbograms are not supported).
pub const MAX_PACKET: usize = 65_535;

/// Maximum number of IPv6 extension headers. Ordinary packets have one or two; an attacker could make the
/// parser walk thousands. RFC 8200 sets no limit, so a smaller number risks refusing a legal packet.
const MAX_EXTENSIONS: usize = 16;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
const MOBILITY: u8 = 135;
const HIP: u8 = 139;
const SHIM6: u8 = 140;

/// Why a slice is not an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The slice ends inside the header.
    #[error("IP header needs {need} bytes, got {have}")]
    Short {
        /// Bytes that the header needs.
        need: usize,
        /// Bytes that were there.
        have: usize,
    },
    /// Neither version 4 nor 6.
    #[error("expected IP version 4 or 6, got {0}")]
    Version(u8),
    /// The IPv4 header length is below 20 bytes.
    #[error("expected an IPv4 header of at least 20 bytes, got {0}")]
    HeaderLength(usize),
    /// The total length in the header is less than the header, or more than the bytes received.
    #[error("total length in the IP header is {claimed} bytes, got {have}")]
    TotalLength {
        /// Total length in the header, in bytes.
        claimed: usize,
        /// Bytes that were there.
        have: usize,
    },
    /// An IPv6 extension header does not fit in the packet.
    #[error("IPv6 extension header {next} at byte {at} does not fit in {have} bytes")]
    Extension {
        /// Protocol number of the extension header.
        next: u8,
        /// Where it starts, in bytes.
        at: usize,
        /// Length of the packet, in bytes.
        have: usize,
    },
    /// More than 16 IPv6 extension headers.
    #[error("expected at most {MAX_EXTENSIONS} IPv6 extension headers")]
    TooManyExtensions,
    /// The fragment would extend past the largest possible packet.
    #[error("fragment of {len} bytes at offset {offset} ends after byte 65535")]
    FragmentEnd {
        /// Offset of the fragment, in bytes.
        offset: usize,
        /// Length of the fragment's data, in bytes.
        len: usize,
    },
}

/// IP version of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// IPv4 (RFC 791).
    V4,
    /// IPv6 (RFC 8200).
    V6,
}

/// The fragmentation fields of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Identification: 16 bits in IPv4, 32 in IPv6.
    pub id: u32,
    /// Offset of the data in the original packet, in bytes.
    pub offset: u16,
    /// Whether more fragments follow.
    pub more: bool,
}

/// A view of one IP packet; made by [`parse`].
#[derive(Debug, Clone, Copy)]
pub struct IpPacket<'a> {
    bytes: &'a [u8],
    version: Version,
    protocol: u8,
    header_len: u16,
    transport_offset: u16,
    fragment: Option<Fragment>,
    has_routing_header: bool,
}

/// Checks the headers of `bytes` and returns a view, cut to the total length in the header.
pub fn parse(bytes: &[u8]) -> Result<IpPacket<'_>, ParseError> {
    let Some(first) = bytes.first() else {
        return Err(ParseError::Short { need: IPV4_HEADER, have: 0 });
    };
    match first >> 4 {
        4 => parse_v4(bytes),
        6 => parse_v6(bytes),
        other => Err(ParseError::Version(other)),
    }
}

/// The destination address of a packet; nothing else is checked.
#[inline]
pub fn dst_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.first()? >> 4 {
        4 => Some(IpAddr::V4(v4_at(bytes.get(16..20)?))),
        6 => Some(IpAddr::V6(v6_at(bytes.get(24..40)?))),
        _ => None,
    }
}

/// The source address of a packet; nothing else is checked.
#[inline]
pub fn src_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.first()? >> 4 {
        4 => Some(IpAddr::V4(v4_at(bytes.get(12..16)?))),
        6 => Some(IpAddr::V6(v6_at(bytes.get(8..24)?))),
        _ => None,
    }
}

impl<'a> IpPacket<'a> {
    /// The whole packet, without padding after its total length.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Total length in bytes.
    pub fn total_len(&self) -> usize {
        self.bytes.len()
    }

    /// IP version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Length of the IP header in bytes: with options in IPv4, without extension headers in IPv6.
    pub fn header_len(&self) -> usize {
        usize::from(self.header_len)
    }

    /// Where the transport header (or a fragment's data) starts, in bytes.
    pub fn transport_offset(&self) -> usize {
        usize::from(self.transport_offset)
    }

    /// The bytes after the IP headers: transport header and payload, or a fragment's data.
    pub fn transport(&self) -> &'a [u8] {
        &self.bytes[self.transport_offset()..]
    }

    /// Protocol number after the IP headers and all IPv6 extension headers. In a non-first fragment it is the
    /// next header of the fragment header.
    pub fn protocol(&self) -> u8 {
        self.protocol
    }

    /// Source address.
    pub fn src(&self) -> IpAddr {
        match self.version {
            Version::V4 => IpAddr::V4(v4_at(&self.bytes[12..16])),
            Version::V6 => IpAddr::V6(v6_at(&self.bytes[8..24])),
        }
    }

    /// Destination address.
    pub fn dst(&self) -> IpAddr {
        match self.version {
            Version::V4 => IpAddr::V4(v4_at(&self.bytes[16..20])),
            Version::V6 => IpAddr::V6(v6_at(&self.bytes[24..40])),
        }
    }

    /// The bytes of both addresses, source first: 8 or 32 bytes.
    pub fn addresses(&self) -> &'a [u8] {
        match self.version {
            Version::V4 => &self.bytes[12..20],
            Version::V6 => &self.bytes[8..40],
        }
    }

    /// Type of service, or traffic class: DSCP and ECN.
    pub fn tos(&self) -> u8 {
        match self.version {
            Version::V4 => self.bytes[1],
            Version::V6 => self.bytes[0] << 4 | self.bytes[1] >> 4,
        }
    }

    /// Differentiated services code point (RFC 2474), 0 to 63.
    pub fn dscp(&self) -> u8 {
        self.tos() >> 2
    }

    /// Whether routers must not fragment the packet; always true for IPv6.
    pub fn dont_fragment(&self) -> bool {
        match self.version {
            Version::V4 => self.bytes[6] & 0x40 != 0,
            Version::V6 => true,
        }
    }

    /// The fragmentation fields if the packet is a fragment. An IPv6 "atomic" fragment (offset 0, the only
    /// one) counts too.
    pub fn fragment(&self) -> Option<Fragment> {
        self.fragment
    }

    /// Whether the packet contains the start of the transport header; false for a fragment with an offset.
    pub fn has_transport_header(&self) -> bool {
        self.fragment.is_none_or(|fragment| fragment.offset == 0)
    }

    /// Whether the packet has an IPv6 routing header. The pseudo header then contains the last address of
    /// that header instead of [`dst`](Self::dst) (RFC 8200 §8.1).
    pub fn has_routing_header(&self) -> bool {
        self.has_routing_header
    }

    /// Source and destination port; `None` if the protocol has no ports or the packet does not contain them.
    pub fn ports(&self) -> Option<(u16, u16)> {
        let with_ports = matches!(
            self.protocol,
            protocol::TCP | protocol::UDP | protocol::UDP_LITE | protocol::SCTP | protocol::DCCP
        );
        if !with_ports || !self.has_transport_header() {
            return None;
        }
        let ports = self.transport().get(..4)?;
        Some((be16(ports, 0), be16(ports, 2)))
    }
}

/// Whether traffic class or type of service, TTL, flow label and don't-fragment bit of two packets are equal;
/// `ip_header` is the length of the IP headers of both, which are plain.
pub(crate) fn same_service(first: &[u8], packet: &[u8], ip_header: usize) -> bool {
    if ip_header == IPV6_HEADER {
        // Traffic class and flow label, hop limit.
        return first[..4] == packet[..4] && first[7] == packet[7];
    }
    // Type of service, TTL, and the word with the don't-fragment bit.
    first[1] == packet[1] && first[8] == packet[8] && first[6..8] == packet[6..8]
}

fn parse_v4(bytes: &[u8]) -> Result<IpPacket<'_>, ParseError> {
    let have = bytes.len();
    if have < IPV4_HEADER {
        return Err(ParseError::Short { need: IPV4_HEADER, have });
    }
    let header_len = usize::from(bytes[0] & 0x0f) * 4;
    if header_len < IPV4_HEADER {
        return Err(ParseError::HeaderLength(header_len));
    }
    let claimed = usize::from(be16(bytes, 2));
    if claimed < header_len || claimed > have {
        return Err(ParseError::TotalLength { claimed, have });
    }
    let word = be16(bytes, 6);
    let offset = (word & 0x1fff) << 3;
    let more = word & 0x2000 != 0;
    let fragment = if offset == 0 && !more {
        None
    } else {
        check_fragment_end(offset, claimed - header_len)?;
        Some(Fragment { id: u32::from(be16(bytes, 4)), offset, more })
    };
    Ok(IpPacket {
        bytes: &bytes[..claimed],
        version: Version::V4,
        protocol: bytes[9],
        header_len: header_len as u16,
        transport_offset: header_len as u16,
        fragment,
        has_routing_header: false,
    })
}

fn parse_v6(bytes: &[u8]) -> Result<IpPacket<'_>, ParseError> {
    let have = bytes.len();
    if have < IPV6_HEADER {
        return Err(ParseError::Short { need: IPV6_HEADER, have });
    }
    let claimed = IPV6_HEADER + usize::from(be16(bytes, 4));
    if claimed > have || claimed > MAX_PACKET {
        return Err(ParseError::TotalLength { claimed, have });
    }
    let bytes = &bytes[..claimed];
    let mut packet = IpPacket {
        bytes,
        version: Version::V6,
        protocol: bytes[6],
        header_len: IPV6_HEADER as u16,
        transport_offset: IPV6_HEADER as u16,
        fragment: None,
        has_routing_header: false,
    };
    walk_extensions(&mut packet)?;
    Ok(packet)
}

/// Moves `protocol` and `transport_offset` behind the extension headers (RFC 8200 §4).
fn walk_extensions(packet: &mut IpPacket<'_>) -> Result<(), ParseError> {
    for _ in 0..=MAX_EXTENSIONS {
        let next = packet.protocol;
        let at = packet.transport_offset();
        let have = packet.bytes.len();
        let is_extension = matches!(
            next,
            HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS | MOBILITY | HIP | SHIM6
        );
        if !is_extension {
            return Ok(());
        }
        let header = &packet.bytes[at..];
        if header.len() < 8 {
            return Err(ParseError::Extension { next, at, have });
        }
        let len = match next {
            FRAGMENT => 8,
            AUTHENTICATION => (usize::from(header[1]) + 2) * 4,
            _ => (usize::from(header[1]) + 1) * 8,
        };
        if header.len() < len {
            return Err(ParseError::Extension { next, at, have });
        }
        packet.protocol = header[0];
        packet.transport_offset = (at + len) as u16;
        packet.has_routing_header |= next == ROUTING;
        if next != FRAGMENT {
            continue;
        }
        let word = be16(header, 2);
        let offset = word & 0xfff8;
        check_fragment_end(offset, have - at - len)?;
        packet.fragment = Some(Fragment { id: be32(header, 4), offset, more: word & 1 != 0 });
        if offset != 0 {
            return Ok(());
        }
    }
    Err(ParseError::TooManyExtensions)
}

fn check_fragment_end(offset: u16, len: usize) -> Result<(), ParseError> {
    let offset = usize::from(offset);
    if offset + len > MAX_PACKET {
        return Err(ParseError::FragmentEnd { offset, len });
    }
    Ok(())
}

fn v4_at(bytes: &[u8]) -> Ipv4Addr {
    Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3])
}

fn v6_at(bytes: &[u8]) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&bytes[..16]);
    Ipv6Addr::from(octets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_packets::Packet;

    #[test]
    fn an_ipv4_header_is_read_field_by_field() {
        let bytes = Packet { ttl: 9, tos: 0xb9, id: 77, ..Packet::v4() }.udp(b"hello");
        let packet = parse(&bytes).unwrap();
        assert_eq!(packet.version(), Version::V4);
        assert_eq!(packet.src(), "10.1.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(packet.dst(), "10.2.0.2".parse::<IpAddr>().unwrap());
        assert_eq!((packet.tos(), packet.dscp()), (0xb9, 46));
        assert_eq!((packet.protocol(), packet.transport_offset(), packet.total_len()), (17, 20, 33));
        assert_eq!(packet.ports(), Some((40_000, 443)));
        assert!(packet.dont_fragment());
        assert_eq!(packet.fragment(), None);
        assert_eq!(dst_of(&bytes), Some(packet.dst()));
        assert_eq!(src_of(&bytes), Some(packet.src()));
    }

    #[test]
    fn padding_after_the_packet_is_cut_off_and_a_short_slice_is_an_error() {
        let mut bytes = Packet::v6().udp(b"hello");
        let len = bytes.len();
        bytes.extend_from_slice(&[0xee; 9]);
        assert_eq!(parse(&bytes).unwrap().total_len(), len);
        assert_eq!(
            parse(&bytes[..len - 1]).unwrap_err(),
            ParseError::TotalLength { claimed: len, have: len - 1 }
        );
        assert_eq!(parse(&bytes[..39]).unwrap_err(), ParseError::Short { need: 40, have: 39 });
        assert_eq!(parse(&[]).unwrap_err(), ParseError::Short { need: 20, have: 0 });
        assert_eq!(parse(&[0x55; 40]).unwrap_err(), ParseError::Version(5));
        assert_eq!(parse(&[0x43; 40]).unwrap_err(), ParseError::HeaderLength(12));
    }

    #[test]
    fn ipv6_extension_headers_are_walked_to_the_transport() {
        let extensions = [(HOP_BY_HOP, vec![0; 6]), (DESTINATION_OPTIONS, vec![0; 14])];
        let bytes = Packet { tos: 0xb9, ..Packet::v6() }.udp_behind_extension_headers(&extensions, b"hello");
        let packet = parse(&bytes).unwrap();
        assert_eq!((packet.protocol(), packet.header_len(), packet.transport_offset()), (17, 40, 64));
        assert_eq!(packet.tos(), 0xb9);
        assert_eq!(packet.ports(), Some((40_000, 443)));
        assert!(!packet.has_routing_header());
    }

    #[test]
    fn a_later_ipv6_fragment_has_no_ports() {
        let fragment = |word: u16| {
            let mut body = word.to_be_bytes().to_vec();
            body.extend_from_slice(&7u32.to_be_bytes());
            Packet::v6().udp_behind_extension_headers(&[(FRAGMENT, body)], b"hello")
        };
        let first = fragment(1);
        let first = parse(&first).unwrap();
        assert_eq!(first.fragment(), Some(Fragment { id: 7, offset: 0, more: true }));
        assert!(first.ports().is_some());
        let later = fragment(0x0100);
        let later = parse(&later).unwrap();
        assert_eq!(later.fragment(), Some(Fragment { id: 7, offset: 256, more: false }));
        assert_eq!(later.ports(), None);
        assert!(matches!(parse(&fragment(0xfff8)), Err(ParseError::FragmentEnd { offset: 65_528, len: 13 })));
    }

    #[test]
    fn endless_extension_chains_are_refused() {
        let chain = vec![(DESTINATION_OPTIONS, vec![0; 6]); 17];
        let bytes = Packet::v6().udp_behind_extension_headers(&chain, b"");
        assert_eq!(parse(&bytes).unwrap_err(), ParseError::TooManyExtensions);
        let bytes = Packet::v6().udp_behind_extension_headers(&chain[..16], b"");
        assert_eq!(parse(&bytes).unwrap().protocol(), 17);
    }
}
