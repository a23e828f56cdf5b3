//! Reading and writing the bytes of IP packets.
//!
//! In: packets from the kernel or the network, single IP packets or the 64 KiB super-packets of a TUN device
//! with virtio headers. Out: views of their headers ([`ip`], [`flow`]), packets that fit an MTU ([`split`]),
//! super-packets for the kernel ([`gro`]), lower maximum segment sizes ([`mss`]), ICMP errors about packets
//! that could not be forwarded ([`icmp`]), segments of TCP connections that this process terminates
//! ([`tcp`]), and UDP datagrams ([`udp`]).
//!
//! Always holds:
//! - No input makes this crate panic: every length and offset is checked against the slice before use.
//! - Packets of one flow keep their order; none is lost or invented, except that [`gro`] drops superseded
//!   acknowledgements.
//! - A packet that arrives with a wrong checksum leaves with it: only checksums that the kernel left to be
//!   completed are computed.
//! - Nothing here reads a clock, opens files or sockets, or starts threads.
#![forbid(unsafe_code)]

pub mod ack_filter;
mod arena;
#[doc(hidden)]
pub mod checksum;
pub mod flow;
mod fragment;
pub mod gro;
pub mod icmp;
pub mod ip;
mod ip_header;
pub mod mss;
pub mod public;
pub mod split;
pub mod tcp;
pub mod udp;
pub mod vnet;

pub use arena::Arena;
pub use flow::FlowKey;
pub use gro::{GroCoalescer, TunPacket};
pub use ip::{IpPacket, ParseError};
pub use split::SplitError;
pub use vnet::{VNET_HDR_LEN, VnetHdr};

/// Protocol numbers (IANA).
pub mod protocol {
    /// ICMP for IPv4 (RFC 792).
    pub const ICMP: u8 = 1;
    /// TCP (RFC 9293).
    pub const TCP: u8 = 6;
    /// UDP (RFC 768).
    pub const UDP: u8 = 17;
    /// DCCP (RFC 4340).
    pub const DCCP: u8 = 33;
    /// ICMP for IPv6 (RFC 4443).
    pub const ICMPV6: u8 = 58;
    /// SCTP (RFC 9260).
    pub const SCTP: u8 = 132;
    /// UDP-Lite (RFC 3828).
    pub const UDP_LITE: u8 = 136;
}

/// Flags of a TCP header, byte 13 (RFC 9293 §3.1).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer is valid.
    pub const URG: u8 = 0x20;
    /// ECN echo (RFC 3168).
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced (RFC 3168).
    pub const CWR: u8 = 0x80;
}

/// Reads the big-endian 16-bit word at `at`; the caller has checked the length.
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads the big-endian 32-bit word at `at`; the caller has checked the length.
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Writes the big-endian 16-bit word at `at`; the caller has checked the length.
fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Writes the big-endian 32-bit word at `at`; the caller has checked the length.
fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}
