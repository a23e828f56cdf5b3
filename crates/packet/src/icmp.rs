//! ICMP errors about packets that could not be forwarded, and the fields of echo messages.
//!
//! In: the offending packet. Out: a complete ICMP packet to its source, or nothing where an error must not be
//! sent (RFC 1122 §3.2.2, RFC 1812 §4.3.2.7, RFC 4443 §2.4). The caller limits the rate.

use std::net::IpAddr;

use crate::ip::{self, IPV4_HEADER, IPV6_HEADER, IpPacket, Version};
use crate::ip_header::ip_header;
use crate::{checksum, protocol, put16};

const ICMP_HEADER: usize = 8;
/// Maximum length of an ICMP error packet over IPv4, in bytes (RFC 1812 §4.3.2.3).
const MAX_V4: usize = 576;
/// Maximum length of an ICMP error packet over IPv6, in bytes (RFC 4443 §2.4 (c)).
const MAX_V6: usize = 1280;
/// Type of service of ICMP errors over IPv4: precedence "internetwork control" (RFC 1812 §4.3.2.5).
const TOS_V4: u8 = 0xc0;

/// Why a destination is unreachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreachable {
    /// No route to the destination.
    NoRoute,
    /// Forbidden by a rule (administratively prohibited).
    Prohibited,
    /// There is a route, but the address does not answer.
    AddressUnreachable,
    /// No process listens on the port.
    PortUnreachable,
}

/// An ICMP echo message (RFC 792, RFC 4443 §4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// Request or reply.
    pub kind: EchoKind,
    /// Identifier of the sender's socket.
    pub identifier: u16,
    /// Sequence number.
    pub sequence: u16,
}

/// Which echo message it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EchoKind {
    /// A request.
    Request,
    /// The reply to a request.
    Reply,
}

/// The echo message in a packet, if it is one.
pub fn echo_of(packet: &[u8]) -> Option<Echo> {
    let view = ip::parse(packet).ok().filter(IpPacket::has_transport_header)?;
    let header: &[u8; ICMP_HEADER] = view.transport().first_chunk()?;
    let kind = match (view.protocol(), view.version(), header[0]) {
        (protocol::ICMP, Version::V4, 8) | (protocol::ICMPV6, Version::V6, 128) => EchoKind::Request,
        (protocol::ICMP, Version::V4, 0) | (protocol::ICMPV6, Version::V6, 129) => EchoKind::Reply,
        _ => return None,
    };
    let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    Some(Echo { kind, identifier: word(4), sequence: word(6) })
}

/// Type, code and second header word of an ICMP error, for IPv4 and IPv6.
struct Message {
    v4: (u8, u8),
    v6: (u8, u8),
    word: u32,
    /// Whether the error may be sent about a packet to an IPv6 multicast group (RFC 4443 §2.4 (e.3)).
    answers_multicast: bool,
}

/// "Packet Too Big": IPv4 type 3 code 4 (RFC 1191), IPv6 type 2 (RFC 4443 §3.2). `mtu` is in bytes.
pub fn packet_too_big(original: &[u8], mtu: u32, from: IpAddr) -> Option<Vec<u8>> {
    let word = if from.is_ipv4() { mtu.min(u32::from(u16::MAX)) } else { mtu };
    error_about(original, from, &Message { v4: (3, 4), v6: (2, 0), word, answers_multicast: true })
}

/// "Destination Unreachable": IPv4 type 3 (RFC 792), IPv6 type 1 (RFC 4443 §3.1).
pub fn unreachable(original: &[u8], reason: Unreachable, from: IpAddr) -> Option<Vec<u8>> {
    let (v4, v6) = match reason {
        Unreachable::NoRoute => (0, 0),
        Unreachable::Prohibited => (13, 1),
        Unreachable::AddressUnreachable => (1, 3),
        Unreachable::PortUnreachable => (3, 4),
    };
    error_about(original, from, &Message { v4: (3, v4), v6: (1, v6), word: 0, answers_multicast: false })
}

fn error_about(original: &[u8], from: IpAddr, message: &Message) -> Option<Vec<u8>> {
    let packet = ip::parse(original).ok()?;
    if !may_answer(&packet, message) {
        return None;
    }
    build_error(&packet, from, message)
}

fn may_answer(packet: &IpPacket<'_>, message: &Message) -> bool {
    if !packet.has_transport_header() {
        return false;
    }
    let source_is_a_host = match packet.src() {
        IpAddr::V4(src) => src.octets()[0] != 0 && src.octets()[0] < 224 && !src.is_loopback(),
        IpAddr::V6(src) => !src.is_unspecified() && !src.is_multicast() && !src.is_loopback(),
    };
    let destination_is_a_host = match packet.dst() {
        IpAddr::V4(dst) => !dst.is_multicast() && !dst.is_broadcast(),
        IpAddr::V6(dst) => !dst.is_multicast() || message.answers_multicast,
    };
    source_is_a_host && destination_is_a_host && !is_error(packet)
}

/// Whether a packet is itself an ICMP error, or an ICMP message without a type.
fn is_error(packet: &IpPacket<'_>) -> bool {
    let kind = packet.transport().first();
    match (packet.protocol(), packet.version()) {
        (protocol::ICMP, Version::V4) => matches!(kind, None | Some(3 | 4 | 5 | 11 | 12)),
        // Below 128 are errors; 137 is a redirect.
        (protocol::ICMPV6, Version::V6) => matches!(kind, None | Some(0..=127 | 137)),
        _ => false,
    }
}

fn build_error(original: &IpPacket<'_>, from: IpAddr, message: &Message) -> Option<Vec<u8>> {
    let v4 = from.is_ipv4();
    let (header, max, tos, protocol, kind) = match v4 {
        true => (IPV4_HEADER, MAX_V4, TOS_V4, protocol::ICMP, message.v4),
        false => (IPV6_HEADER, MAX_V6, 0, protocol::ICMPV6, message.v6),
    };
    let quote = quote(original, max - header - ICMP_HEADER);
    let len = ICMP_HEADER + quote.len();
    let (header, pseudo) = ip_header(from, original.src(), tos, protocol, len)?;
    let mut bytes = Vec::with_capacity(header.len() + len);
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&[kind.0, kind.1, 0, 0]);
    bytes.extend_from_slice(&message.word.to_be_bytes());
    bytes.extend_from_slice(quote);
    // ICMP for IPv4 has no pseudo header.
    let pseudo = if v4 { 0 } else { pseudo };
    let check = !checksum::add(pseudo, checksum::sum(&bytes[header.len()..]));
    put16(&mut bytes, header.len() + 2, check);
    Some(bytes)
}

fn quote<'a>(original: &IpPacket<'a>, max: usize) -> &'a [u8] {
    &original.bytes()[..original.total_len().min(max)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::be32;
    use mpvpn_packets::{Packet, has_valid_lengths_and_checksums};
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));

    fn v4(src: &str, dst: &str) -> Packet {
        let at = |address: &str| SocketAddr::new(address.parse().unwrap(), 9);
        Packet::between(at(src), at(dst))
    }

    #[test]
    fn packet_too_big_contains_the_mtu_and_quotes_the_packet() {
        let original = Packet::v4().udp(&[7; 3000]);
        let error = packet_too_big(&original, 1400, V4).unwrap();
        assert!(has_valid_lengths_and_checksums(&error));
        let packet = ip::parse(&error).unwrap();
        assert_eq!((packet.src(), packet.dst()), (V4, "10.1.0.1".parse::<IpAddr>().unwrap()));
        assert_eq!(packet.transport()[..2], [3, 4]);
        assert_eq!(be32(packet.transport(), 4), 1400);
        assert_eq!(packet.total_len(), 576);
        assert_eq!(packet.transport()[8..], original[..548]);

        let original = Packet::v6().udp(&[7; 3000]);
        let error = packet_too_big(&original, 1400, V6).unwrap();
        assert!(has_valid_lengths_and_checksums(&error));
        let packet = ip::parse(&error).unwrap();
        assert_eq!(packet.transport()[..2], [2, 0]);
        assert_eq!(be32(packet.transport(), 4), 1400);
        assert_eq!(packet.total_len(), 1280);
        assert_eq!(packet.transport()[8..], original[..1232]);
    }

    #[test]
    fn each_reason_has_its_code() {
        let reasons = [
            (Unreachable::NoRoute, 0, 0),
            (Unreachable::Prohibited, 13, 1),
            (Unreachable::AddressUnreachable, 1, 3),
            (Unreachable::PortUnreachable, 3, 4),
        ];
        for (reason, code4, code6) in reasons {
            let error = unreachable(&Packet::v4().tcp(b""), reason, V4).unwrap();
            assert!(has_valid_lengths_and_checksums(&error));
            assert_eq!(error[20..22], [3, code4]);
            let error = unreachable(&Packet::v6().tcp(b""), reason, V6).unwrap();
            assert!(has_valid_lengths_and_checksums(&error));
            assert_eq!(error[40..42], [1, code6]);
        }
    }

    #[test]
    fn errors_are_never_answered_with_errors() {
        for (packet, from) in [(Packet::v4().tcp(b""), V4), (Packet::v6().tcp(b""), V6)] {
            let error = unreachable(&packet, Unreachable::NoRoute, from).unwrap();
            assert_eq!(unreachable(&error, Unreachable::NoRoute, from), None);
        }
        assert!(unreachable(&Packet::v4().echo(1, 1, b""), Unreachable::NoRoute, V4).is_some());
        assert!(unreachable(&Packet::v6().echo(1, 1, b""), Unreachable::NoRoute, V6).is_some());
    }

    #[test]
    fn packets_to_groups_and_broadcasts_or_from_invalid_sources_get_no_error() {
        let silent = [
            ("10.0.0.2", "224.0.0.5"),
            ("10.0.0.2", "255.255.255.255"),
            ("0.0.0.0", "10.0.0.3"),
            ("127.0.0.1", "10.0.0.3"),
            ("224.0.0.5", "10.0.0.3"),
            ("255.255.255.255", "10.0.0.3"),
            ("240.0.0.1", "10.0.0.3"),
        ];
        for (src, dst) in silent {
            assert_eq!(packet_too_big(&v4(src, dst).udp(b"x"), 1400, V4), None, "{src} to {dst}");
        }
        for (src, dst) in [("::", "fd00::3"), ("ff02::1", "fd00::3"), ("::1", "fd00::3")] {
            assert_eq!(packet_too_big(&v4(src, dst).udp(b"x"), 1400, V6), None, "{src} to {dst}");
        }
        let group = v4("fd00::2", "ff0e::1").udp(b"x");
        assert_eq!(unreachable(&group, Unreachable::NoRoute, V6), None);
        assert!(packet_too_big(&group, 1400, V6).is_some());
    }

    #[test]
    fn only_the_first_fragment_is_answered() {
        let mut fragment = Packet { dont_fragment: false, ..Packet::v4() }.udp(&[0; 64]);
        fragment[6] = 0x20;
        assert!(unreachable(&fragment, Unreachable::NoRoute, V4).is_some());
        fragment[7] = 2;
        assert_eq!(unreachable(&fragment, Unreachable::NoRoute, V4), None);
    }

    #[test]
    fn families_are_not_mixed_and_garbage_is_not_answered() {
        assert_eq!(unreachable(&Packet::v4().tcp(b""), Unreachable::NoRoute, V6), None);
        assert_eq!(unreachable(&Packet::v6().tcp(b""), Unreachable::NoRoute, V4), None);
        assert_eq!(unreachable(&[0x45; 10], Unreachable::NoRoute, V4), None);
    }
}
