//! IP headers of packets that this crate builds.

use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::ip::{IPV4_HEADER, IPV6_HEADER};
use crate::{checksum, put16};

/// Initial time to live, or hop limit: the default of hosts (IANA, IP Parameters; RFC 1700).
const TTL: u8 = 64;

/// An IP header without options for `len` bytes of `protocol`, and the sum of the pseudo header. `None` if
/// the addresses are of two families, or the packet would be too long.
pub(crate) fn ip_header(
    from: IpAddr,
    to: IpAddr,
    tos: u8,
    protocol: u8,
    len: usize,
) -> Option<(ArrayVec<u8, IPV6_HEADER>, u16)> {
    let mut bytes = ArrayVec::new();
    let addresses = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            bytes.extend([0x45, tos]);
            bytes.extend(u16::try_from(IPV4_HEADER + len).ok()?.to_be_bytes());
            // Don't fragment: only then may the identification be the same in every packet (RFC 6864 §4.1).
            bytes.extend([0, 0, 0x40, 0, TTL, protocol, 0, 0]);
            bytes.extend(from.octets());
            bytes.extend(to.octets());
            let check = !checksum::sum(&bytes);
            put16(&mut bytes, 10, check);
            12..20
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0]);
            bytes.extend(u16::try_from(len).ok()?.to_be_bytes());
            bytes.extend([protocol, TTL]);
            bytes.extend(from.octets());
            bytes.extend(to.octets());
            8..40
        }
        _ => return None,
    };
    let pseudo = checksum::pseudo(&bytes[addresses], protocol, len);
    Some((bytes, pseudo))
}
