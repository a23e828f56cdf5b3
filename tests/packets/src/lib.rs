//! Builds IP packets with valid checksums for the tests of all crates; equal arguments give equal bytes.
//!
//! Checksums are computed by a simple loop in this file, so that the optimised code of `packet` is not tested
//! against itself. This crate uses no other crate of the workspace, so that every crate can use it in tests.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};

/// IP protocol numbers (IANA).
mod protocol {
    pub(crate) const ICMP: u8 = 1;
    pub(crate) const TCP: u8 = 6;
    pub(crate) const UDP: u8 = 17;
    pub(crate) const ICMPV6: u8 = 58;
}

/// TCP flags (RFC 9293 §3.1).
const ACK: u8 = 0x10;
const CWR: u8 = 0x80;

/// Flags and GSO types of a virtio network header (linux/virtio_net.h).
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// A virtio network header as the kernel writes it.
pub type VnetHdrBytes = [u8; 10];

/// The IP header and ports of a packet to build.
#[derive(Debug, Clone)]
pub struct Packet {
    /// Source address and port.
    pub src: SocketAddr,
    /// Destination address and port, of the same family.
    pub dst: SocketAddr,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Type of service or traffic class.
    pub tos: u8,
    /// IPv4 identification.
    pub id: u16,
    /// IPv4 don't-fragment bit.
    pub dont_fragment: bool,
    /// IPv4 options, a multiple of 4 bytes.
    pub ip_options: Vec<u8>,
}

/// The TCP header of a packet to build.
#[derive(Debug, Clone)]
pub struct Tcp {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: u8,
    /// Window.
    pub window: u16,
    /// Options, a multiple of 4 bytes.
    pub options: Vec<u8>,
}

impl Default for Tcp {
    fn default() -> Self {
        Self { seq: 1, ack: 1, flags: ACK, window: 512, options: Vec::new() }
    }
}

impl Packet {
    /// Headers from 10.1.0.1:40000 to 10.2.0.2:443.
    pub fn v4() -> Self {
        Self::between(SocketAddr::from(([10, 1, 0, 1], 40_000)), SocketAddr::from(([10, 2, 0, 2], 443)))
    }

    /// Headers from `[fd01::1]:40000` to `[fd02::2]:443`.
    pub fn v6() -> Self {
        Self::between(
            SocketAddr::from(([0xfd01, 0, 0, 0, 0, 0, 0, 1], 40_000)),
            SocketAddr::from(([0xfd02, 0, 0, 0, 0, 0, 0, 2], 443)),
        )
    }

    /// Headers from `src` to `dst`, which must be of one address family.
    pub fn between(src: SocketAddr, dst: SocketAddr) -> Self {
        assert_eq!(src.is_ipv4(), dst.is_ipv4(), "addresses of one family");
        Self { src, dst, ttl: 64, tos: 0, id: 1, dont_fragment: true, ip_options: Vec::new() }
    }

    /// A TCP segment with the default header.
    pub fn tcp(&self, payload: &[u8]) -> Vec<u8> {
        self.tcp_with(&Tcp::default(), payload)
    }

    /// A TCP segment.
    pub fn tcp_with(&self, tcp: &Tcp, payload: &[u8]) -> Vec<u8> {
        let segment = self.tcp_segment(tcp, payload);
        self.ip_packet(protocol::TCP, segment, Some(16))
    }

    /// A TCP super-packet (GSO) as a TUN device delivers it, with its virtio network header.
    pub fn tcp_super_packet<H: From<VnetHdrBytes>>(
        &self,
        tcp: &Tcp,
        payload: &[u8],
        gso_size: u16,
    ) -> (H, Vec<u8>) {
        let segment = self.tcp_segment(tcp, payload);
        let header = 20 + tcp.options.len();
        let kind = if self.src.is_ipv4() { GSO_TCPV4 } else { GSO_TCPV6 };
        let ecn = if tcp.flags & CWR != 0 { GSO_ECN } else { 0 };
        self.super_packet(protocol::TCP, segment, 16, header, kind | ecn, gso_size)
    }

    /// A UDP datagram.
    pub fn udp(&self, payload: &[u8]) -> Vec<u8> {
        self.ip_packet(protocol::UDP, self.udp_datagram(payload), Some(6))
    }

    /// A UDP super-packet (GSO) as a TUN device delivers it, with its virtio network header.
    pub fn udp_super_packet<H: From<VnetHdrBytes>>(&self, payload: &[u8], gso_size: u16) -> (H, Vec<u8>) {
        self.super_packet(protocol::UDP, self.udp_datagram(payload), 6, 8, GSO_UDP_L4, gso_size)
    }

    /// A UDP datagram after IPv6 extension headers. Each extension is given by its protocol number and its
    /// bytes after "next header" and "length".
    pub fn udp_behind_extension_headers(&self, extensions: &[(u8, Vec<u8>)], payload: &[u8]) -> Vec<u8> {
        let plain = self.udp(payload);
        let mut bytes = plain[..40].to_vec();
        let mut numbers = extensions.iter().map(|(number, _)| *number).chain([protocol::UDP]);
        bytes[6] = numbers.next().unwrap_or(protocol::UDP);
        for (_, body) in extensions {
            bytes.push(numbers.next().unwrap_or(protocol::UDP));
            bytes.push(((body.len() + 2) / 8 - 1) as u8);
            bytes.extend_from_slice(body);
        }
        bytes.extend_from_slice(&plain[40..]);
        let len = (bytes.len() - 40) as u16;
        bytes[4..6].copy_from_slice(&len.to_be_bytes());
        bytes
    }

    /// An ICMP or ICMPv6 echo request.
    pub fn echo(&self, id: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
        let (number, kind) = if self.src.is_ipv4() { (protocol::ICMP, 8) } else { (protocol::ICMPV6, 128) };
        let mut message = vec![kind, 0, 0, 0];
        message.extend_from_slice(&id.to_be_bytes());
        message.extend_from_slice(&sequence.to_be_bytes());
        message.extend_from_slice(payload);
        self.ip_packet(number, message, Some(2))
    }

    /// A packet of any protocol, without a transport checksum.
    pub fn other(&self, number: u8, payload: &[u8]) -> Vec<u8> {
        self.ip_packet(number, payload.to_vec(), None)
    }

    fn tcp_segment(&self, tcp: &Tcp, payload: &[u8]) -> Vec<u8> {
        let mut segment = self.ports();
        segment.extend_from_slice(&tcp.seq.to_be_bytes());
        segment.extend_from_slice(&tcp.ack.to_be_bytes());
        segment.push(((20 + tcp.options.len()) / 4 * 16) as u8);
        segment.push(tcp.flags);
        segment.extend_from_slice(&tcp.window.to_be_bytes());
        segment.extend_from_slice(&[0; 4]);
        segment.extend_from_slice(&tcp.options);
        segment.extend_from_slice(payload);
        segment
    }

    fn udp_datagram(&self, payload: &[u8]) -> Vec<u8> {
        let mut datagram = self.ports();
        datagram.extend_from_slice(&((payload.len() + 8) as u16).to_be_bytes());
        datagram.extend_from_slice(&[0; 2]);
        datagram.extend_from_slice(payload);
        datagram
    }

    fn ports(&self) -> Vec<u8> {
        [self.src.port().to_be_bytes(), self.dst.port().to_be_bytes()].concat()
    }

    fn ip_packet(&self, number: u8, mut transport: Vec<u8>, checksum_at: Option<usize>) -> Vec<u8> {
        if let Some(at) = checksum_at {
            let pseudo_header = if number == protocol::ICMP {
                Vec::new()
            } else {
                self.pseudo_header(number, transport.len())
            };
            let checksum = !reference_sum(&[pseudo_header, transport.clone()].concat());
            let checksum = if checksum == 0 && number == protocol::UDP { 0xffff } else { checksum };
            transport[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        }
        let mut bytes = self.ip_header(number, transport.len());
        bytes.extend_from_slice(&transport);
        bytes
    }

    fn super_packet<H: From<VnetHdrBytes>>(
        &self,
        number: u8,
        mut transport: Vec<u8>,
        checksum_at: usize,
        header: usize,
        gso_type: u8,
        gso_size: u16,
    ) -> (H, Vec<u8>) {
        let partial_sum = reference_sum(&self.pseudo_header(number, transport.len()));
        transport[checksum_at..checksum_at + 2].copy_from_slice(&partial_sum.to_be_bytes());
        let mut bytes = self.ip_header(number, transport.len());
        let csum_start = bytes.len() as u16;
        bytes.extend_from_slice(&transport);
        let words = [csum_start + header as u16, gso_size, csum_start, checksum_at as u16];
        let mut hdr: VnetHdrBytes = [NEEDS_CSUM, gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        for (place, word) in hdr[2..].chunks_mut(2).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        (hdr.into(), bytes)
    }

    fn pseudo_header(&self, number: u8, len: usize) -> Vec<u8> {
        let mut bytes = [octets(self.src.ip()), octets(self.dst.ip())].concat();
        bytes.extend_from_slice(&(len as u32).to_be_bytes());
        bytes.extend_from_slice(&[0, 0, 0, number]);
        bytes
    }

    fn ip_header(&self, number: u8, len: usize) -> Vec<u8> {
        let addresses = [octets(self.src.ip()), octets(self.dst.ip())].concat();
        if self.src.is_ipv6() {
            let mut bytes = vec![0x60 | self.tos >> 4, self.tos << 4, 0, 0];
            bytes.extend_from_slice(&(len as u16).to_be_bytes());
            bytes.extend_from_slice(&[number, self.ttl]);
            bytes.extend_from_slice(&addresses);
            return bytes;
        }
        let header_len = 20 + self.ip_options.len();
        let mut bytes = vec![0x40 | (header_len / 4) as u8, self.tos];
        bytes.extend_from_slice(&((header_len + len) as u16).to_be_bytes());
        bytes.extend_from_slice(&self.id.to_be_bytes());
        bytes.extend_from_slice(&[if self.dont_fragment { 0x40 } else { 0 }, 0, self.ttl, number, 0, 0]);
        bytes.extend_from_slice(&addresses);
        bytes.extend_from_slice(&self.ip_options);
        let checksum = !reference_sum(&bytes);
        bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }
}

/// The Internet checksum before its complement (RFC 1071), computed two bytes at a time.
pub fn reference_sum(bytes: &[u8]) -> u16 {
    let mut total = 0u32;
    for pair in bytes.chunks(2) {
        total += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

/// Whether the lengths and all checksums of a TCP, UDP or ICMP packet without IPv6 extension headers are
/// valid.
pub fn has_valid_lengths_and_checksums(bytes: &[u8]) -> bool {
    let (number, header, total, addresses) = match bytes[0] >> 4 {
        4 => {
            let header = usize::from(bytes[0] & 15) * 4;
            let total = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
            if reference_sum(&bytes[..header]) != 0xffff {
                return false;
            }
            (bytes[9], header, total, &bytes[12..20])
        }
        _ => (bytes[6], 40, 40 + usize::from(u16::from_be_bytes([bytes[4], bytes[5]])), &bytes[8..40]),
    };
    if total != bytes.len() {
        return false;
    }
    let transport = &bytes[header..];
    if number == protocol::UDP
        && usize::from(u16::from_be_bytes([transport[4], transport[5]])) != transport.len()
    {
        return false;
    }
    let mut covered = Vec::new();
    if number != protocol::ICMP {
        covered.extend_from_slice(addresses);
        covered.extend_from_slice(&(transport.len() as u32).to_be_bytes());
        covered.extend_from_slice(&[0, 0, 0, number]);
    }
    covered.extend_from_slice(transport);
    reference_sum(&covered) == 0xffff
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}
