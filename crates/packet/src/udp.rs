//! UDP datagrams: payloads of received packets, and packets to send.
//!
//! In: packets of a TUN device; or addresses and a payload. Out: payloads; or complete packets with
//! checksums. Always holds: a fragment, or a datagram with inconsistent lengths, has no payload.

use std::net::SocketAddr;

use crate::ip::IpPacket;
use crate::ip_header::ip_header;
use crate::vnet::{Gso, VnetHdr};
use crate::{be16, checksum, protocol, put16};

/// Length of a UDP header, in bytes.
pub const UDP_HEADER: usize = 8;
/// Offset of the checksum in the UDP header, in bytes.
const CHECKSUM_OFFSET: usize = 6;

/// The payloads of a UDP packet from a TUN device: one, or from a super-packet several of equal size with a
/// possibly shorter last one. None if the packet is not UDP, is a fragment, or has inconsistent lengths.
/// Checksums are not verified, because the packet comes from this machine.
pub fn payloads<'a>(hdr: VnetHdr, packet: &IpPacket<'a>) -> impl Iterator<Item = &'a [u8]> {
    let payload = payload(hdr, packet);
    let bytes = payload.unwrap_or_default();
    let size = match hdr.gso() {
        Some(Gso::Udp) => usize::from(hdr.gso_size),
        _ => bytes.len(),
    };
    // An empty payload is a datagram, too.
    payload.filter(|payload| payload.is_empty()).into_iter().chain(bytes.chunks(size.max(1)))
}

fn payload<'a>(hdr: VnetHdr, packet: &IpPacket<'a>) -> Option<&'a [u8]> {
    if packet.protocol() != protocol::UDP || packet.fragment().is_some() {
        return None;
    }
    let datagram = packet.transport();
    let whole = datagram.len();
    let len = match hdr.gso()? {
        // The length field of a super-packet is that of one datagram.
        Gso::Udp => whole,
        Gso::None if whole >= UDP_HEADER => usize::from(be16(datagram, 4)),
        _ => return None,
    };
    datagram.get(UDP_HEADER..len)
}

/// A complete packet. `None` if the addresses are of two families, or there is too much payload.
pub fn build_packet(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    let len = UDP_HEADER + payload.len();
    let (header, pseudo) = ip_header(from.ip(), to.ip(), 0, protocol::UDP, len)?;
    let at = header.len();
    let mut bytes = Vec::with_capacity(at + len);
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&from.port().to_be_bytes());
    bytes.extend_from_slice(&to.port().to_be_bytes());
    bytes.extend_from_slice(&u16::try_from(len).ok()?.to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(payload);
    let check = checksum::never_zero(!checksum::add(pseudo, checksum::sum(&bytes[at..])));
    put16(&mut bytes, at + CHECKSUM_OFFSET, check);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ip;
    use mpvpn_packets::{Packet, has_valid_lengths_and_checksums};

    fn payloads_of(hdr: VnetHdr, packet: &[u8]) -> Vec<Vec<u8>> {
        payloads(hdr, &ip::parse(packet).unwrap()).map(<[u8]>::to_vec).collect()
    }

    #[test]
    fn a_built_packet_yields_its_payload() {
        for shape in [Packet::v4(), Packet::v6()] {
            for payload in [&b"hello"[..], b"", &[7; 1400]] {
                let made = build_packet(shape.src, shape.dst, payload).unwrap();
                assert!(has_valid_lengths_and_checksums(&made));
                assert_eq!(payloads_of(VnetHdr::NONE, &made), [payload]);
                let view = ip::parse(&made).unwrap();
                assert_eq!((view.src(), view.dst()), (shape.src.ip(), shape.dst.ip()));
                assert_eq!(view.ports(), Some((shape.src.port(), shape.dst.port())));
            }
        }
        assert_eq!(build_packet(Packet::v4().src, Packet::v6().dst, b""), None);
        assert_eq!(build_packet(Packet::v4().src, Packet::v4().dst, &[0; 65_508]), None);
    }

    #[test]
    fn a_super_packet_yields_many_datagrams() {
        let (hdr, bytes) = Packet::v4().udp_super_packet(&[1; 2500], 1000);
        let sizes: Vec<_> = payloads_of(hdr, &bytes).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1000, 1000, 500]);
    }

    #[test]
    fn malformed_datagrams_and_fragments_have_no_payload() {
        let mut short = Packet::v4().udp(b"12345");
        short[25] = 200;
        assert!(payloads_of(VnetHdr::NONE, &short).is_empty(), "longer than the packet");
        short[25] = 3;
        assert!(payloads_of(VnetHdr::NONE, &short).is_empty(), "shorter than its header");
        let mut fragment = Packet { dont_fragment: false, ..Packet::v4() }.udp(&[0; 64]);
        fragment[6] = 0x20;
        assert!(payloads_of(VnetHdr::NONE, &fragment).is_empty(), "a fragment");
        assert!(payloads_of(VnetHdr::NONE, &Packet::v4().tcp(b"12345")).is_empty(), "TCP");
    }
}
