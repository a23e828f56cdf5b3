//! The sizes of UDP payloads.

/// The largest UDP payload that is used (bytes). An IP packet has room for 507 more (IPv4); the rest is a
/// margin for headers.
pub const MAX_UDP_PAYLOAD: u16 = 65_000;
/// Bytes of IPv4 and UDP headers.
pub const IPV4_UDP_HEADER_BYTES: u32 = 28;
/// Bytes of IPv6 and UDP headers.
pub const IPV6_UDP_HEADER_BYTES: u32 = 48;

/// The largest UDP payload of an interface with this MTU, beside `headers` bytes.
pub fn max_udp_payload(mtu: u32, headers: u32) -> u16 {
    u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX).clamp(1200, MAX_UDP_PAYLOAD)
}
