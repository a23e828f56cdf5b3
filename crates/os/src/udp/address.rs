//! Socket addresses in the kernel's layout (`sockaddr_in`, `sockaddr_in6`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Bytes of `sockaddr_in`.
const SOCKADDR_IN_LEN: u32 = 16;
/// Bytes of `sockaddr_in6`.
const SOCKADDR_IN6_LEN: u32 = 28;

/// The protocol family that a socket was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    /// Also carries IPv4, with mapped addresses (RFC 4291, 2.5.5.2), unless IPV6_V6ONLY is set.
    V6,
}

impl Family {
    pub(super) fn of(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(_) => Self::V4,
            SocketAddr::V6(_) => Self::V6,
        }
    }
}

/// A socket address in the kernel's layout, with its length.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(4))]
pub(crate) struct RawAddress {
    bytes: [u8; SOCKADDR_IN6_LEN as usize],
    length: u32,
}

impl RawAddress {
    /// Bytes that hold any address.
    pub(super) const MAX_LEN: u32 = SOCKADDR_IN6_LEN;

    /// Writes `address` for a socket of `family`: on an IPv6 socket an IPv4 address becomes a mapped one.
    pub(super) fn new(address: SocketAddr, family: Family) -> Self {
        match (address, family) {
            (SocketAddr::V4(v4), Family::V4) => Self::v4(v4),
            (SocketAddr::V4(v4), Family::V6) => {
                Self::v6(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0))
            }
            (SocketAddr::V6(v6), _) => Self::v6(v6),
        }
    }

    fn v4(address: SocketAddrV4) -> Self {
        let mut raw = Self { length: SOCKADDR_IN_LEN, ..Self::default() };
        raw.bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        raw.bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        raw.bytes[4..8].copy_from_slice(&address.ip().octets());
        raw
    }

    fn v6(address: SocketAddrV6) -> Self {
        let mut raw = Self { length: SOCKADDR_IN6_LEN, ..Self::default() };
        raw.bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        raw.bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        raw.bytes[4..8].copy_from_slice(&address.flowinfo().to_be_bytes());
        raw.bytes[8..24].copy_from_slice(&address.ip().octets());
        raw.bytes[24..28].copy_from_slice(&address.scope_id().to_ne_bytes());
        raw
    }

    /// Parses the first `length` bytes; a mapped address is returned as IPv4.
    pub(super) fn parse(&self, length: u32) -> Option<SocketAddr> {
        let b = &self.bytes;
        let family = i32::from(u16::from_ne_bytes([b[0], b[1]]));
        let port = u16::from_be_bytes([b[2], b[3]]);
        if family == libc::AF_INET && length >= SOCKADDR_IN_LEN {
            let ip = Ipv4Addr::new(b[4], b[5], b[6], b[7]);
            return Some(SocketAddr::V4(SocketAddrV4::new(ip, port)));
        }
        if family != libc::AF_INET6 || length < SOCKADDR_IN6_LEN {
            return None;
        }
        let ip = Ipv6Addr::from(<[u8; 16]>::try_from(&b[8..24]).ok()?);
        if let Some(v4) = ip.to_ipv4_mapped() {
            return Some(SocketAddr::V4(SocketAddrV4::new(v4, port)));
        }
        let scope = u32::from_ne_bytes([b[24], b[25], b[26], b[27]]);
        Some(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)))
    }

    pub(super) fn length(&self) -> u32 {
        self.length
    }

    pub(super) fn pointer(&self) -> *const libc::sockaddr {
        self.bytes.as_ptr().cast()
    }

    pub(super) fn pointer_mut(&mut self) -> *mut libc::c_void {
        self.bytes.as_mut_ptr().cast()
    }
}

/// Turns a mapped address into IPv4; leaves other addresses as they are.
pub(super) fn unmapped(ip: Ipv6Addr) -> IpAddr {
    ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_parsed_as_it_was_written() {
        for text in ["192.0.2.7:443", "[2001:db8::1]:40001", "[fe80::1%3]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            let raw = RawAddress::new(address, Family::of(address));
            assert_eq!(raw.parse(raw.length()), Some(address));
        }
    }

    #[test]
    fn a_dual_stack_socket_reports_plain_ipv4() {
        let address: SocketAddr = "192.0.2.7:443".parse().unwrap();
        let raw = RawAddress::new(address, Family::V6);
        assert_eq!(raw.length(), SOCKADDR_IN6_LEN);
        assert_eq!(raw.parse(SOCKADDR_IN6_LEN), Some(address));
    }

    #[test]
    fn a_truncated_address_or_another_family_is_refused() {
        let raw = RawAddress::new("[2001:db8::1]:1".parse().unwrap(), Family::V6);
        assert_eq!(raw.parse(27), None);
        assert_eq!(RawAddress::default().parse(28), None);
    }
}
