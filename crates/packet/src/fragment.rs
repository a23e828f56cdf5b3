//! Fragmentation of IPv4 packets (RFC 791 §3.2).
//!
//! In: a packet and an MTU. Out: fragments with complete headers, or an error if the packet must not be
//! fragmented. Always holds: after an error nothing was appended.

use arrayvec::ArrayVec;

use crate::ip::{IPV4_HEADER, IpPacket, Version};
use crate::split::{PacketSink, SplitError};
use crate::{be16, checksum, put16};

/// Length of the longest IPv4 header, in bytes: IHL 15 (RFC 791 §3.1).
const MAX_HEADER: usize = 60;
const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
/// The copied flag in the type of an option: the option is repeated in every fragment (RFC 791 §3.1).
const OPTION_COPIED: u8 = 0x80;

/// Splits a packet into fragments of at most `mtu` bytes, or passes it unchanged if it fits. A fragment can
/// be fragmented again. After an error nothing was appended.
pub(crate) fn fragment(ip: &IpPacket<'_>, mtu: usize, sink: &mut PacketSink<'_>) -> Result<(), SplitError> {
    let bytes = ip.bytes();
    if bytes.len() <= mtu {
        sink.push(bytes, &[]);
        return Ok(());
    }
    let first = &bytes[..ip.header_len()];
    // Every fragment but the last carries a multiple of 8 bytes.
    let fits = mtu >= first.len() + 8;
    if ip.version() == Version::V6 || ip.dont_fragment() || !fits {
        return Err(SplitError::TooBig { len: bytes.len(), mtu });
    }
    let rest = later_header(first);
    let data = &bytes[first.len()..];
    let word = be16(bytes, 6);
    let mut at = 0;
    while at < data.len() {
        let header = if at == 0 { first } else { &rest[..] };
        let room = mtu - header.len();
        let left = data.len() - at;
        let take = if left <= room { left } else { room & !7 };
        let is_last = take == left;
        let packet = sink.push(header, &data[at..at + take]);

        // The offset cannot overflow its 13 bits: the parser refuses fragments that end after byte 65535.
        let more = if is_last { word & MORE_FRAGMENTS } else { MORE_FRAGMENTS };
        let offset = (word & 0x1fff) + (at / 8) as u16;
        let len = packet.len() as u16;
        put16(packet, 2, len);
        put16(packet, 6, (word & !(DONT_FRAGMENT | MORE_FRAGMENTS | 0x1fff)) | more | offset);
        put16(packet, 10, 0);
        let check = !checksum::sum(&packet[..header.len()]);
        put16(packet, 10, check);
        at += take;
    }
    Ok(())
}

/// The header of all fragments except the first: only options with the copied flag, padded to a multiple of 4
/// bytes.
fn later_header(first: &[u8]) -> ArrayVec<u8, MAX_HEADER> {
    let mut header: ArrayVec<u8, MAX_HEADER> = first[..IPV4_HEADER].iter().copied().collect();
    let mut options = &first[IPV4_HEADER..];
    while let [kind, tail @ ..] = options {
        let len = match (*kind, tail.first()) {
            (OPTION_END, _) => break,
            (OPTION_NOP, _) => 1,
            (_, Some(&len)) if len >= 2 && usize::from(len) <= options.len() => usize::from(len),
            _ => break,
        };
        if kind & OPTION_COPIED != 0 {
            header.extend(options[..len].iter().copied());
        }
        options = &options[len..];
    }
    while header.len() % 4 != 0 {
        header.push(OPTION_END);
    }
    header[0] = 0x40 | (header.len() / 4) as u8;
    header
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use crate::vnet::VnetHdr;
    use crate::{ip, split::split};
    use mpvpn_packets::{Packet, reference_sum};

    fn fragments(packet: &[u8], mtu: usize) -> Vec<Vec<u8>> {
        let (mut out, mut ranges) = (BytesMut::new(), Vec::new());
        split(VnetHdr::NONE, packet, mtu, &[], &mut out, &mut ranges).unwrap();
        ranges.into_iter().map(|range| out[range].to_vec()).collect()
    }

    /// Puts fragments together, in order, and checks each header on the way.
    fn reassemble(fragments: &[Vec<u8>]) -> Vec<u8> {
        let mut data = Vec::new();
        for (index, bytes) in fragments.iter().enumerate() {
            let packet = ip::parse(bytes).unwrap();
            let fragment = packet.fragment().unwrap();
            assert_eq!(reference_sum(&bytes[..packet.header_len()]), 0xffff);
            assert_eq!(packet.total_len(), bytes.len());
            assert_eq!(usize::from(fragment.offset), data.len());
            assert_eq!(fragment.more, index + 1 < fragments.len());
            data.extend_from_slice(packet.transport());
        }
        data
    }

    #[test]
    fn fragments_reassemble_to_the_packet_at_every_mtu() {
        let data: Vec<u8> = (0..2500u32).map(|i| (i * 31) as u8).collect();
        let packet = Packet { dont_fragment: false, ..Packet::v4() }.udp(&data);
        for mtu in [28, 29, 68, 576, 1000, 1279, 1500, 2527] {
            let fragments = fragments(&packet, mtu);
            assert!(fragments.iter().all(|fragment| fragment.len() <= mtu));
            assert_eq!(reassemble(&fragments), packet[20..], "mtu {mtu}");
        }
    }

    #[test]
    fn fragments_of_fragments_keep_their_offsets() {
        let data: Vec<u8> = (0..3000u32).map(|i| (i * 13) as u8).collect();
        let packet = Packet { dont_fragment: false, ..Packet::v4() }.udp(&data);
        let twice: Vec<_> =
            fragments(&packet, 1500).iter().flat_map(|fragment| fragments(fragment, 600)).collect();
        assert_eq!(reassemble(&twice), packet[20..]);
    }

    #[test]
    fn later_fragments_carry_only_the_options_with_the_copied_flag() {
        // Record route (7) stays in the first; router alert (148) is copied.
        let ip_options = vec![1, 7, 7, 4, 0, 0, 0, 0, 148, 4, 0, 0];
        let packet = Packet { dont_fragment: false, ip_options, ..Packet::v4() }.udp(&[7; 3000]);
        let fragments = fragments(&packet, 1400);
        assert_eq!(fragments[0][..2], [0x48, 0]);
        for later in &fragments[1..] {
            assert_eq!(ip::parse(later).unwrap().header_len(), 24);
            assert_eq!(later[20..24], [148, 4, 0, 0]);
        }
        assert_eq!(reassemble(&fragments), packet[32..]);
    }

    #[test]
    fn broken_options_are_not_copied() {
        for ip_options in [vec![0x83, 0, 1, 1], vec![0x83, 9, 1, 1], vec![1, 1, 1, 0x83]] {
            let packet = Packet { dont_fragment: false, ip_options, ..Packet::v4() }.udp(&[7; 3000]);
            let fragments = fragments(&packet, 1400);
            assert_eq!(ip::parse(&fragments[1]).unwrap().header_len(), 20);
            assert_eq!(reassemble(&fragments), packet[24..]);
        }
    }
}
