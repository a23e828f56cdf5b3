//! The hop count of a forwarded packet.

use crate::ip::{IPV4_HEADER, IPV6_HEADER};
use crate::{be16, checksum, put16};

/// The packet must not be forwarded: its hop count is used up, or it is no IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a packet with hops left")]
pub struct Expired;

/// Takes one from the TTL or hop limit and corrects the IPv4 header checksum. At 1 or 0 the packet is left as
/// it is: the caller answers with [`icmp::time_exceeded`](crate::icmp::time_exceeded).
#[inline]
pub fn decrement(packet: &mut [u8]) -> Result<(), Expired> {
    match packet.first().map(|first| first >> 4) {
        Some(4) if packet.len() >= IPV4_HEADER => {
            if packet[8] <= 1 {
                return Err(Expired);
            }
            let old = be16(packet, 8);
            packet[8] -= 1;
            let check = checksum::update(be16(packet, 10), old, be16(packet, 8));
            put16(packet, 10, check);
            Ok(())
        }
        Some(6) if packet.len() >= IPV6_HEADER => {
            if packet[7] <= 1 {
                return Err(Expired);
            }
            packet[7] -= 1;
            Ok(())
        }
        _ => Err(Expired),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{Packet, checks_out};

    #[test]
    fn each_hop_takes_one_and_the_checksum_stays_right() {
        for packet in [Packet { ttl: 255, ..Packet::v4() }, Packet { ttl: 255, ..Packet::v6() }] {
            let mut bytes = packet.udp(b"hello");
            for _ in 0..254 {
                decrement(&mut bytes).unwrap();
                assert!(checks_out(&bytes));
            }
            let last = bytes.clone();
            assert_eq!(decrement(&mut bytes), Err(Expired));
            assert_eq!(bytes, last);
        }
    }

    #[test]
    fn what_is_no_packet_is_not_forwarded() {
        for mut bytes in [vec![], vec![0x45; 19], vec![0x60; 39], vec![0x70; 60]] {
            assert_eq!(decrement(&mut bytes), Err(Expired));
        }
    }
}
