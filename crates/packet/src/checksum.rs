//! The internet checksum (RFC 1071): of whole packets, of pseudo headers, and updated incrementally (RFC
//! 1624).
//!
//! In: bytes of a packet. Out: sums, checksums, and whether a received checksum is valid. A *sum* is the
//! folded ones' complement sum of big-endian 16-bit words, not yet complemented; [`add`] combines the sums of
//! parts with even lengths. A *checksum* is the complement of a sum, as stored in a header.

use crate::ip::{IpPacket, Version};
use crate::{be16, protocol};

/// The result of verifying a transport checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecksumStatus {
    /// The checksum is present and correct.
    Valid,
    /// The checksum is wrong, or the transport header is malformed.
    Invalid,
    /// There is no checksum to verify: a fragment, an unknown protocol, or UDP over IPv4 without a checksum.
    Absent,
}

/// The ones' complement sum of `bytes`; an odd last byte counts as the high half of a word.
#[inline]
pub fn sum(bytes: &[u8]) -> u16 {
    // The sum of words in native order is the swapped sum of swapped words, and wider words only need their
    // carries (RFC 1071 §2): two instructions for 8 bytes.
    let (words, rest) = bytes.as_chunks::<8>();
    let wide: u128 = words.iter().map(|word| u128::from(u64::from_ne_bytes(*word))).sum();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let wide = wide + u128::from(u64::from_ne_bytes(last));
    let (high, low) = ((wide >> 64) as u64, wide as u64);
    // Each part has at most 33 bits, so the total does not overflow.
    let total = high + (low >> 32) + (low & 0xffff_ffff);
    u16::from_be(fold(total))
}

/// The ones' complement sum of two sums.
#[inline]
pub fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// The sum of the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1): the bytes of both addresses, the protocol,
/// and the length of transport header and payload in bytes.
#[inline]
pub fn pseudo(addresses: &[u8], protocol: u8, transport_len: usize) -> u16 {
    let len = transport_len as u32;
    add(sum(addresses), fold(u64::from(protocol) + u64::from(len)))
}

/// The checksum after a covered 16-bit word, at an even offset, changed from `old` to `new` (RFC 1624,
/// equation 3).
#[inline]
pub fn update(check: u16, old: u16, new: u16) -> u16 {
    !add(add(!check, !old), new)
}

/// A computed UDP checksum as sent on the wire: 0 is sent as 0xffff, because 0 means "no checksum" (RFC 768).
#[inline]
pub fn never_zero(check: u16) -> u16 {
    if check == 0 { 0xffff } else { check }
}

/// Whether the header checksum of an IPv4 packet is correct; true for IPv6, which has none.
#[inline]
pub fn verify_header(packet: &IpPacket<'_>) -> bool {
    match packet.version() {
        Version::V4 => sum(&packet.bytes()[..packet.header_len()]) == 0xffff,
        Version::V6 => true,
    }
}

/// Verifies the checksum of TCP, UDP, ICMP or ICMPv6.
pub fn verify_transport(packet: &IpPacket<'_>) -> ChecksumStatus {
    if packet.fragment().is_some() || packet.has_routing_header() {
        return ChecksumStatus::Absent;
    }
    let transport = packet.transport();
    let (covered, min_len) = match (packet.protocol(), packet.version()) {
        (protocol::TCP, _) => (transport, 20),
        (protocol::UDP, version) => {
            if transport.len() < 8 {
                return ChecksumStatus::Invalid;
            }
            if be16(transport, 6) == 0 {
                return if version == Version::V4 { ChecksumStatus::Absent } else { ChecksumStatus::Invalid };
            }
            let Some(datagram) = transport.get(..usize::from(be16(transport, 4))) else {
                return ChecksumStatus::Invalid;
            };
            (datagram, 8)
        }
        (protocol::ICMP, Version::V4) | (protocol::ICMPV6, Version::V6) => (transport, 8),
        _ => return ChecksumStatus::Absent,
    };
    if covered.len() < min_len {
        return ChecksumStatus::Invalid;
    }
    let with_pseudo = if packet.protocol() == protocol::ICMP {
        0
    } else {
        pseudo(packet.addresses(), packet.protocol(), covered.len())
    };
    if add(with_pseudo, sum(covered)) == 0xffff { ChecksumStatus::Valid } else { ChecksumStatus::Invalid }
}

/// Whether the checksums of a packet are there and correct.
pub(crate) fn is_intact(packet: &IpPacket<'_>) -> bool {
    verify_header(packet) && verify_transport(packet) == ChecksumStatus::Valid
}

#[inline]
fn fold(total: u64) -> u16 {
    let total = (total >> 32) + (total & 0xffff_ffff);
    let total = (total >> 32) + (total & 0xffff_ffff);
    let total = (total >> 16) + (total & 0xffff);
    let total = (total >> 16) + (total & 0xffff);
    ((total >> 16) + (total & 0xffff)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ip::parse;
    use mpvpn_packets::{Packet, reference_sum};

    #[test]
    fn the_example_of_rfc_1071_gives_its_sum() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
    }

    #[test]
    fn every_length_and_alignment_agrees_with_the_plain_loop() {
        let bytes: Vec<u8> = (0..700u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for start in 0..9 {
            for end in start..bytes.len() {
                assert_eq!(sum(&bytes[start..end]), reference_sum(&bytes[start..end]), "{start}..{end}");
            }
        }
        assert_eq!(sum(&[0xff; 65_536]), 0xffff);
    }

    #[test]
    fn an_updated_checksum_equals_a_new_one() {
        let mut bytes = [0x12, 0x34, 0xff, 0xff, 0x00, 0x00, 0x56, 0x78];
        for new in [0u32, 1, 0xffff_ffff, 0xffff_0000, 0x1234_5678] {
            let before = !sum(&bytes);
            let old = u32::from_be_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
            bytes[2..6].copy_from_slice(&new.to_be_bytes());
            let words = |word: u32| [(word >> 16) as u16, word as u16];
            let changes = words(old).into_iter().zip(words(new));
            assert_eq!(changes.fold(before, |check, (old, new)| update(check, old, new)), !sum(&bytes));
        }
    }

    #[test]
    fn verification_finds_every_single_damaged_byte() {
        let packets = [
            Packet::v4().tcp(b"payload"),
            Packet::v6().tcp(b"payload"),
            Packet::v4().udp(b"payload"),
            Packet::v6().udp(b"payload"),
            Packet::v4().echo(7, 1, b"payload"),
            Packet::v6().echo(7, 1, b"payload"),
        ];
        for good in packets {
            assert_eq!(verify_transport(&parse(&good).unwrap()), ChecksumStatus::Valid);
            let start = parse(&good).unwrap().transport_offset();
            for at in start..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                assert_eq!(verify_transport(&parse(&bad).unwrap()), ChecksumStatus::Invalid, "byte {at}");
            }
        }
    }

    #[test]
    fn udp_without_checksum_is_absent_in_ipv4_and_wrong_in_ipv6() {
        let mut v4 = Packet::v4().udp(b"x");
        v4[26..28].fill(0);
        assert_eq!(verify_transport(&parse(&v4).unwrap()), ChecksumStatus::Absent);
        let mut v6 = Packet::v6().udp(b"x");
        v6[46..48].fill(0);
        assert_eq!(verify_transport(&parse(&v6).unwrap()), ChecksumStatus::Invalid);
    }
}
