//! MSS clamping: lowers the maximum segment size that the ends of a TCP connection announce.
//!
//! In: a packet and an MTU. Out: the packet, with a lower MSS if it is a SYN. Both ends then send segments
//! that fit the tunnel; Packet Too Big messages would cost a round trip, or be filtered. Always holds: an MSS
//! is never raised or added.

use crate::ip::{self, Version};
use crate::tcp::{self, TCP_HEADER};
use crate::{be16, checksum, protocol, put16, tcp_flags};

/// The content of a packet's TCP checksum field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksum {
    /// The checksum of the whole segment.
    Full,
    /// Only the sum of the pseudo header ([`NEEDS_CSUM`](crate::vnet::NEEDS_CSUM)), which does not cover
    /// options.
    Partial,
}

/// Lowers the MSS option of a TCP SYN to the largest payload that fits in `mtu` bytes without IP or TCP
/// options (RFC 6691), and returns whether it was lowered. A lower MSS is kept, and a missing option is not
/// added.
pub fn clamp(packet: &mut [u8], mtu: usize, checksum: Checksum) -> bool {
    let Some((tcp, value_at, headers)) = find_mss(packet) else {
        return false;
    };
    let max = u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
    let segment = &mut packet[tcp..];
    let old = be16(segment, value_at);
    if old <= max || max == 0 {
        return false;
    }
    put16(segment, value_at, max);
    if checksum == Checksum::Full {
        // At an odd offset the two bytes of the value belong to two words, so it enters the sum with swapped
        // bytes.
        let (old, new) = if value_at % 2 == 0 { (old, max) } else { (old.swap_bytes(), max.swap_bytes()) };
        let check = checksum::update(be16(segment, 16), old, new);
        put16(segment, 16, check);
    }
    true
}

/// Whether a packet is a TCP SYN that announces a maximum segment size.
pub fn is_syn(packet: &[u8]) -> bool {
    find_mss(packet).is_some()
}

/// The offset of the TCP header of a SYN, the offset of the MSS value in that header, and the length of IP
/// and TCP headers without options.
fn find_mss(packet: &[u8]) -> Option<(usize, usize, usize)> {
    let ip = ip::parse(packet).ok()?;
    if ip.protocol() != protocol::TCP || !ip.has_transport_header() {
        return None;
    }
    let segment = ip.transport();
    if segment.len() < TCP_HEADER || segment[13] & tcp_flags::SYN == 0 {
        return None;
    }
    let header = segment.get(..usize::from(segment[12] >> 4) * 4)?;
    let headers = TCP_HEADER
        + match ip.version() {
            Version::V4 => ip::IPV4_HEADER,
            Version::V6 => ip::IPV6_HEADER,
        };
    let (at, _) = tcp::mss_option(header)?;
    Some((ip.transport_offset(), at, headers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums};

    fn syn(packet: &Packet, options: &[u8]) -> Vec<u8> {
        packet.tcp_with(&Tcp { flags: tcp_flags::SYN, options: options.to_vec(), ..Tcp::default() }, b"")
    }

    fn mss(bytes: &[u8]) -> u16 {
        let (tcp, at, _) = find_mss(bytes).unwrap();
        be16(bytes, tcp + at)
    }

    #[test]
    fn an_mss_that_does_not_fit_is_lowered_at_any_alignment() {
        for (packet, expected) in [(Packet::v4(), 1360), (Packet::v6(), 1340)] {
            for options in [vec![2, 4, 0x05, 0xb4], vec![1, 2, 4, 0x05, 0xb4, 1, 1, 0]] {
                let mut bytes = syn(&packet, &options);
                assert!(clamp(&mut bytes, 1400, Checksum::Full));
                assert_eq!(mss(&bytes), expected);
                assert!(has_valid_lengths_and_checksums(&bytes));
                assert!(!clamp(&mut bytes, 1400, Checksum::Full));
            }
        }
    }

    #[test]
    fn a_lower_mss_is_never_raised_and_none_is_added() {
        let mut low = syn(&Packet::v4(), &[2, 4, 0x02, 0x00]);
        assert!(!clamp(&mut low, 1400, Checksum::Full));
        assert_eq!(mss(&low), 512);
        let mut none = syn(&Packet::v4(), &[]);
        let before = none.clone();
        assert!(!clamp(&mut none, 1400, Checksum::Full));
        assert_eq!(none, before);
    }

    #[test]
    fn a_partial_checksum_is_not_changed() {
        let mut bytes = syn(&Packet::v4(), &[2, 4, 0x05, 0xb4]);
        let check = be16(&bytes, 36);
        assert!(clamp(&mut bytes, 1400, Checksum::Partial));
        assert_eq!(be16(&bytes, 36), check);
    }

    #[test]
    fn packets_that_are_no_syn_or_have_malformed_options_are_unchanged() {
        let plain = Tcp { options: vec![2, 4, 0x05, 0xb4], ..Tcp::default() };
        let mut data = Packet::v4().tcp_with(&plain, b"");
        assert!(!clamp(&mut data, 1400, Checksum::Full));
        for options in [[3, 0, 2, 4], [3, 9, 2, 4], [2, 3, 5, 0], [0, 2, 4, 5]] {
            assert!(!clamp(&mut syn(&Packet::v4(), &options), 1400, Checksum::Full));
        }
    }
}
