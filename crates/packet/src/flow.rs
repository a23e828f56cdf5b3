//! The flow that a packet belongs to: its 5-tuple.
//!
//! In: a parsed packet. Out: a small key that can be compared, ordered and hashed. Always holds: the hash is
//! the same on every machine and in every run, so both ends and all tests distribute flows in the same way.

use std::net::{IpAddr, SocketAddr};

use crate::ip::IpPacket;
use crate::protocol;

/// Addresses, protocol and ports of a packet.
///
/// For ICMP echo packets both ports hold the identifier, so that requests and replies are one flow. For
/// protocols without ports and for fragments both ports are 0; also for the first fragment, so that all
/// fragments of a packet are one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source port, ICMP echo identifier, or 0.
    pub src_port: u16,
    /// Destination port, ICMP echo identifier, or 0.
    pub dst_port: u16,
    /// Protocol number of the transport header (IANA).
    pub protocol: u8,
}

impl FlowKey {
    /// The key of a packet.
    #[inline]
    pub fn of(packet: &IpPacket<'_>) -> Self {
        let (src_port, dst_port) = match packet.fragment() {
            Some(_) => (0, 0),
            None => packet.ports().or_else(|| echo_id(packet)).unwrap_or((0, 0)),
        };
        Self { src: packet.src(), dst: packet.dst(), src_port, dst_port, protocol: packet.protocol() }
    }

    /// Source address and port.
    pub fn source(&self) -> SocketAddr {
        SocketAddr::new(self.src, self.src_port)
    }

    /// Destination address and port.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.dst, self.dst_port)
    }

    /// The key of packets in the opposite direction.
    pub fn reversed(self) -> Self {
        Self { src: self.dst, dst: self.src, src_port: self.dst_port, dst_port: self.src_port, ..self }
    }

    /// A stable, well mixed hash of all fields. It has no key, so an attacker who can choose addresses can
    /// produce collisions: use it to spread load and to compare quickly, never as an identity.
    #[inline]
    pub fn hash32(&self) -> u32 {
        let ports = u64::from(self.src_port) << 16 | u64::from(self.dst_port);
        let mut hash = mix(0x9e37_79b9_7f4a_7c15, u64::from(self.protocol) << 32 | ports);
        for address in [self.src, self.dst] {
            match address {
                IpAddr::V4(v4) => hash = mix(hash, u64::from(u32::from(v4))),
                IpAddr::V6(v6) => {
                    let bits = u128::from(v6);
                    hash = mix(mix(hash, (bits >> 64) as u64), bits as u64);
                }
            }
        }
        (hash >> 32) as u32 ^ hash as u32
    }
}

/// Folds a word into a hash: the full 128-bit product keeps every input bit alive in the result.
#[inline]
fn mix(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ word ^ 0xa076_1d64_78bd_642f)
        * u128::from(hash.rotate_left(32) ^ 0xe703_7ed1_a0b4_28db);
    ((product >> 64) as u64 ^ product as u64).wrapping_add(hash.rotate_left(17)).wrapping_add(word)
}

fn echo_id(packet: &IpPacket<'_>) -> Option<(u16, u16)> {
    let transport = packet.transport();
    let is_echo = match packet.protocol() {
        protocol::ICMP => matches!(transport.first()?, 0 | 8),
        protocol::ICMPV6 => matches!(transport.first()?, 128 | 129),
        _ => false,
    };
    let id = transport.get(4..6)?;
    is_echo.then(|| u16::from_be_bytes([id[0], id[1]])).map(|id| (id, id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ip::parse;
    use mpvpn_packets::Packet;

    fn key(bytes: &[u8]) -> FlowKey {
        FlowKey::of(&parse(bytes).unwrap())
    }

    #[test]
    fn the_key_of_the_other_direction_is_the_reversed_one() {
        for there in [Packet::v4(), Packet::v6()] {
            let back = Packet { src: there.dst, dst: there.src, ..there.clone() };
            let (there, back) = (key(&there.tcp(b"")), key(&back.tcp(b"")));
            assert_ne!(there, back);
            assert_eq!(there.reversed(), back);
        }
    }

    #[test]
    fn echo_packets_with_different_identifiers_are_different_flows() {
        for packet in [Packet::v4(), Packet::v6()] {
            let first = key(&packet.echo(7, 1, b""));
            assert_eq!((first.src_port, first.dst_port), (7, 7));
            assert_eq!(first, key(&packet.echo(7, 2, b"other")));
            assert_ne!(first, key(&packet.echo(8, 1, b"")));
        }
    }

    #[test]
    fn all_fragments_of_a_packet_share_a_key_without_ports() {
        let mut first = Packet::v4().udp(&[0; 64]);
        first[6..8].copy_from_slice(&0x2000u16.to_be_bytes());
        let mut later = first.clone();
        later[6..8].copy_from_slice(&9u16.to_be_bytes());
        assert_eq!(key(&first), key(&later));
        assert_eq!(key(&first).src_port, 0);
    }

    #[test]
    fn the_hash_is_stable_and_spreads_neighbouring_ports() {
        assert_eq!(key(&Packet::v4().tcp(b"")).hash32(), 238_980_465);
        let mut buckets = [0u32; 16];
        for port in 0..1600 {
            let mut flow = key(&Packet::v4().tcp(b""));
            flow.src_port = port;
            buckets[flow.hash32() as usize % 16] += 1;
        }
        assert!(buckets.iter().all(|count| (60..=140).contains(count)), "{buckets:?}");
    }
}
