//! From received packets to super-packets for the kernel: generic receive offload.
//!
//! In come IP packets in the order of their arrival. Out go [`TunPacket`]s, each a virtio header and a packet
//! that one `writev` hands to a TUN device: consecutive TCP segments and UDP datagrams of a flow are merged,
//! by the rules of Linux's own GRO (net/ipv4/tcp_offload.c, udp_offload.c), everything else passes alone and
//! untouched. No payload is copied. Of bare acknowledgements of a flow that follow each other the last one stands
//! for all: the kernel would take one after the other at the same moment, and send a little each time.
//!
//! What always holds: packets of a flow keep their order, whether they were merged or not; nothing else is lost;
//! only packets with right checksums are merged; the kernel can cut a merged packet back into what came in.

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use bytes::{Buf, Bytes};

use crate::checksum::{self, ChecksumStatus};
use crate::flow::FlowKey;
use crate::ip::{self, IPV4_HEADER, IPV6_HEADER, IpPacket, MAX_PACKET, Version};
use crate::tcp::TCP_HEADER;
use crate::vnet::{self, VNET_HDR_LEN, VnetHdr};
use crate::{be16, be32, protocol, put16, tcp_flags};

/// How many flows can be merged at a time; one more closes the oldest.
const OPEN_GROUPS: usize = 16;
/// The kernel refuses UDP super-packets with more datagrams (`UDP_MAX_SEGMENTS` of older kernels).
const MAX_DATAGRAMS: u16 = 64;
/// Bounds the buffers of one `writev` far below `IOV_MAX`, whatever sizes the sender chooses.
const MAX_SEGMENTS: u16 = 256;
/// Parts of a [`TunPacket`], at most: its headers, and a payload a segment.
pub const MAX_PARTS: usize = MAX_SEGMENTS as usize + 1;
/// Virtio header, IPv6 header and the longest TCP header.
const MAX_HEAD: usize = VNET_HDR_LEN + IPV6_HEADER + 60;
/// Part lists kept for reuse.
const MAX_SPARE: usize = 128;

const UDP_HEADER: usize = 8;
/// A TCP header with timestamps as all systems write it, what stands before their values (RFC 7323, appendix A), and
/// where the first value is.
const WITH_TIMESTAMPS: usize = 32;
const TIMESTAMPS: [u8; 4] = [1, 1, 8, 10];
const TIMESTAMP_AT: usize = 24;
const DONT_FRAGMENT: u8 = 0x40;

/// One packet for a TUN device with its virtio header, in parts that are to be written one behind the other.
#[derive(Debug, Clone)]
pub struct TunPacket {
    /// The virtio header and, of a merged packet, the rewritten IP and transport headers.
    head: ArrayVec<u8, MAX_HEAD>,
    first: Bytes,
    rest: Vec<Bytes>,
    len: usize,
    segments: u16,
    flow: Option<u32>,
}

impl TunPacket {
    fn alone(packet: Bytes, rest: Vec<Bytes>) -> Self {
        let head = VnetHdr::NONE.to_bytes().into_iter().collect();
        Self { len: VNET_HDR_LEN + packet.len(), head, first: packet, rest, segments: 1, flow: None }
    }

    /// A packet that is complete as it is.
    pub fn single(packet: Bytes) -> Self {
        Self::alone(packet, Vec::new())
    }

    /// The payload `parts` behind the headers `headers`; `None` if these are longer than any, or the parts more than
    /// [`MAX_PARTS`] − 1.
    pub(crate) fn with_headers(vnet: VnetHdr, headers: &[u8], parts: Vec<Bytes>) -> Option<Self> {
        let mut head = ArrayVec::from_iter(vnet.to_bytes());
        head.try_extend_from_slice(headers).ok()?;
        let payload: usize = parts.iter().map(Bytes::len).sum();
        let segments = match vnet.gso_size {
            0 => 1,
            size => payload.div_ceil(usize::from(size)),
        };
        (parts.len() < MAX_PARTS).then_some(Self {
            len: head.len() + payload,
            head,
            first: Bytes::new(),
            rest: parts,
            segments: u16::try_from(segments).ok()?,
            flow: None,
        })
    }

    /// The hash of its flow ([`FlowKey::hash32`]) where a [`GroCoalescer`] has looked at it.
    pub fn flow_hash(&self) -> Option<u32> {
        self.flow
    }

    /// Bytes to write, virtio header included.
    #[expect(clippy::len_without_is_empty, reason = "the virtio header is always there")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many received packets are in it.
    pub fn segments(&self) -> usize {
        usize::from(self.segments)
    }

    /// The virtio header.
    pub fn vnet(&self) -> VnetHdr {
        VnetHdr::parse(&self.head).unwrap_or_default()
    }

    /// The packet as an interface without virtio headers takes it, if it is complete and in one piece.
    pub fn as_single_packet(&self) -> Option<&[u8]> {
        let is_plain =
            self.rest.is_empty() && self.head.len() == VNET_HDR_LEN && self.vnet() == VnetHdr::NONE;
        is_plain.then_some(&self.first)
    }

    /// The packet from its beginning, IP header included, if not to its end.
    pub fn leading_bytes(&self) -> &[u8] {
        match self.head.get(VNET_HDR_LEN..) {
            Some(headers) if !headers.is_empty() => headers,
            _ => &self.first,
        }
    }

    /// The parts for `writev`, at most [`MAX_PARTS`].
    pub fn io_slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let parts = std::iter::once(&self.first).chain(&self.rest);
        std::iter::once(IoSlice::new(&self.head)).chain(parts.map(|part| IoSlice::new(part)))
    }

    /// All bytes in one piece, virtio header included; copies.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        bytes.extend_from_slice(&self.head);
        for part in std::iter::once(&self.first).chain(&self.rest) {
            bytes.extend_from_slice(part);
        }
        bytes
    }
}

/// Merges packets; see the module's description.
///
/// Meant for batches: push what one wakeup received, flush, pop everything. It holds what was pushed until
/// then, so the caller's batch bounds its memory.
#[derive(Debug, Default)]
pub struct GroCoalescer {
    /// What came in, in the order of each element's first packet.
    queue: VecDeque<TunPacket>,
    /// How many elements have left `queue`: the number of its first one.
    popped: u64,
    open: ArrayVec<Group, OPEN_GROUPS>,
    spare: Vec<Vec<Bytes>>,
}

/// An element of the queue that still takes packets.
#[derive(Debug)]
struct Group {
    key: FlowKey,
    hash: u32,
    /// Number of the element.
    number: u64,
    shape: Shape,
    /// Payload of every segment but the last; 0 of a bare acknowledgement.
    size: usize,
    next_seq: u32,
    packet_len: usize,
    segments: u16,
    /// PSH and FIN of the last segment.
    ending: u8,
    id: IdRule,
}

/// How IPv4 identifications continue (as in the kernel's `inet_gro_flush`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IdRule {
    /// IPv6, or only one packet so far.
    Undecided,
    /// All are the same; only where packets must not be fragmented.
    Fixed,
    /// Each is one higher.
    Counting,
}

/// Where the headers of a packet that can be merged lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    transport: Transport,
    ip_header: usize,
    /// IP and transport header, in bytes.
    headers: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
}

/// What a received packet is to the joiner.
enum Class {
    /// Not an IP packet.
    Stray,
    /// A fragment, which may belong to any flow between its addresses.
    Fragment(FlowKey),
    /// Belongs to a flow but cannot be merged.
    Single(FlowKey),
    /// Can be merged, or is a bare acknowledgement, in whose place a later one can stand.
    Segment(FlowKey, Shape),
}

impl GroCoalescer {
    /// An empty joiner.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a received packet.
    pub fn push(&mut self, packet: Bytes) {
        let flow = match classify(&packet) {
            Class::Stray => None,
            Class::Fragment(key) => {
                self.close_all_between(&key);
                None
            }
            Class::Single(key) => {
                let hash = key.hash32();
                if let Some(at) = self.find(&key, hash) {
                    self.close(at);
                }
                Some(hash)
            }
            Class::Segment(key, shape) => {
                let hash = key.hash32();
                let bare = packet.len() == shape.headers;
                match self.find(&key, hash) {
                    Some(at) if bare && self.includes(&self.open[at], &packet, shape) => {
                        self.replace(at, packet)
                    }
                    Some(at) if !bare && self.continues(&self.open[at], &packet, shape) => {
                        self.append(at, packet)
                    }
                    Some(at) => {
                        self.close(at);
                        self.start(key, hash, shape, packet);
                    }
                    None => self.start(key, hash, shape, packet),
                }
                return;
            }
        };
        self.enqueue(packet, flow);
    }

    /// Ends all merging: afterwards everything pushed can be popped.
    pub fn flush(&mut self) {
        while !self.open.is_empty() {
            self.close(0);
        }
    }

    /// The next finished packet. Packets leave in the order in which the first of each came.
    pub fn pop(&mut self) -> Option<TunPacket> {
        if self.open.iter().any(|group| group.number == self.popped) {
            return None;
        }
        let joined = self.queue.pop_front()?;
        self.popped += 1;
        Some(joined)
    }

    /// Takes back a packet that has been written, to use its memory again.
    pub fn recycle(&mut self, joined: TunPacket) {
        let mut parts = joined.rest;
        if parts.capacity() == 0 || self.spare.len() == MAX_SPARE {
            return;
        }
        parts.clear();
        self.spare.push(parts);
    }

    fn find(&self, key: &FlowKey, hash: u32) -> Option<usize> {
        self.open.iter().position(|group| group.hash == hash && group.key == *key)
    }

    fn element(&self, number: u64) -> usize {
        (number - self.popped) as usize
    }

    /// Queues a packet on its own and returns its number.
    fn enqueue(&mut self, packet: Bytes, flow: Option<u32>) -> u64 {
        let number = self.popped + self.queue.len() as u64;
        self.queue.push_back(TunPacket { flow, ..TunPacket::alone(packet, Vec::new()) });
        number
    }

    fn start(&mut self, key: FlowKey, hash: u32, shape: Shape, packet: Bytes) {
        let flags = flags_of(&packet, shape);
        let size = packet.len() - shape.headers;
        if flags & (tcp_flags::PSH | tcp_flags::FIN) != 0 {
            self.enqueue(packet, Some(hash));
            return;
        }
        if self.open.is_full() {
            let oldest = (0..self.open.len()).min_by_key(|&at| self.open[at].number);
            self.close(oldest.unwrap_or(0));
        }
        let next_seq = match shape.transport {
            Transport::Tcp => be32(&packet, shape.ip_header + 4).wrapping_add(size as u32),
            Transport::Udp => 0,
        };
        let packet_len = packet.len();
        let number = self.enqueue(packet, Some(hash));
        self.open.push(Group {
            key,
            hash,
            number,
            shape,
            size,
            next_seq,
            packet_len,
            segments: 1,
            ending: 0,
            id: IdRule::Undecided,
        });
    }

    /// Whether `packet`, of the same flow, can be the next one of the group.
    fn continues(&self, group: &Group, packet: &[u8], shape: Shape) -> bool {
        let first = &self.queue[self.element(group.number)].first;
        let payload = packet.len() - shape.headers;
        if group.shape != shape || payload > group.size || group.packet_len + payload > MAX_PACKET {
            return false;
        }
        if !same_ip_header(first, packet, group) {
            return false;
        }
        match shape.transport {
            Transport::Udp => group.segments < MAX_DATAGRAMS,
            Transport::Tcp => {
                group.segments < MAX_SEGMENTS
                    && be32(packet, shape.ip_header + 4) == group.next_seq
                    && same_tcp_header(&first[shape.ip_header..shape.headers], &packet[shape.ip_header..])
            }
        }
    }

    /// Whether `packet`, a bare acknowledgement, says all that the one of the group says, and more.
    fn includes(&self, group: &Group, packet: &[u8], shape: Shape) -> bool {
        let first = &self.queue[self.element(group.number)].first;
        if group.size > 0 || group.shape != shape || !same_service(first, packet, shape) {
            return false;
        }
        let (before, after) = (&first[shape.ip_header..], &packet[shape.ip_header..]);
        let newer = |at: usize| be32(after, at).wrapping_sub(be32(before, at)) as i32;
        before[4..8] == after[4..8]
            && before[12..14] == after[12..14]
            && newer(8) > 0
            && (shape.headers == shape.ip_header + TCP_HEADER || newer(TIMESTAMP_AT) >= 0)
    }

    fn replace(&mut self, at: usize, packet: Bytes) {
        let element = self.element(self.open[at].number);
        self.queue[element].first = packet;
    }

    fn append(&mut self, at: usize, mut packet: Bytes) {
        let element = self.element(self.open[at].number);
        let group = &mut self.open[at];
        let ending = flags_of(&packet, group.shape) & (tcp_flags::PSH | tcp_flags::FIN);
        let payload = packet.len() - group.shape.headers;
        if group.id == IdRule::Undecided && group.shape.ip_header == IPV4_HEADER {
            let same = be16(&packet, 4) == be16(&self.queue[element].first, 4);
            group.id = if same { IdRule::Fixed } else { IdRule::Counting };
        }
        group.segments += 1;
        group.packet_len += payload;
        group.next_seq = group.next_seq.wrapping_add(payload as u32);
        group.ending = ending;
        let is_last = payload < group.size || ending != 0;

        packet.advance(group.shape.headers);
        let rest = &mut self.queue[element].rest;
        if rest.capacity() == 0 {
            *rest = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(64));
        }
        rest.push(packet);
        if is_last {
            self.close(at);
        }
    }

    fn close_all_between(&mut self, key: &FlowKey) {
        let between = |group: &Group| {
            group.key.src == key.src && group.key.dst == key.dst && group.key.protocol == key.protocol
        };
        while let Some(at) = self.open.iter().position(between) {
            self.close(at);
        }
    }

    /// Ends a group: its packet gets its final headers.
    fn close(&mut self, at: usize) {
        let group = self.open.swap_remove(at);
        if group.segments > 1 {
            let element = self.element(group.number);
            finish(&mut self.queue[element], &group);
        }
    }
}

fn classify(bytes: &[u8]) -> Class {
    let Ok(packet) = ip::parse(bytes) else {
        return Class::Stray;
    };
    let key = FlowKey::of(&packet);
    if packet.fragment().is_some() {
        return Class::Fragment(key);
    }
    match shape_of(&packet) {
        Some(shape) if bytes.len() == packet.total_len() && is_intact(&packet) => Class::Segment(key, shape),
        _ => Class::Single(key),
    }
}

/// Where the headers lie, if the packet is of a kind that can be merged: plain IP headers, and data in it or nothing
/// but an acknowledgement.
fn shape_of(packet: &IpPacket<'_>) -> Option<Shape> {
    let plain = match packet.version() {
        Version::V4 => IPV4_HEADER,
        Version::V6 => IPV6_HEADER,
    };
    let ip_header = packet.transport_offset();
    if ip_header != plain {
        return None;
    }
    let transport = packet.transport();
    match packet.protocol() {
        protocol::TCP => {
            let header = usize::from(transport.get(12)? >> 4) * 4;
            let unusual = tcp_flags::SYN | tcp_flags::RST | tcp_flags::URG;
            let usable = match transport.len().checked_sub(header) {
                Some(1..) => header >= TCP_HEADER && transport[13] & unusual == 0,
                Some(0) => is_bare_ack(transport),
                None => false,
            };
            usable.then_some(Shape { transport: Transport::Tcp, ip_header, headers: ip_header + header })
        }
        protocol::UDP => {
            let usable = transport.len() > UDP_HEADER && usize::from(be16(transport, 4)) == transport.len();
            usable.then_some(Shape { transport: Transport::Udp, ip_header, headers: ip_header + UDP_HEADER })
        }
        _ => None,
    }
}

/// Whether a segment without payload only acknowledges, with no option but timestamps: selective acknowledgements have
/// each their own to say.
fn is_bare_ack(segment: &[u8]) -> bool {
    segment[13] == tcp_flags::ACK
        && match segment.len() {
            TCP_HEADER => true,
            WITH_TIMESTAMPS => segment[TCP_HEADER..TIMESTAMP_AT] == TIMESTAMPS,
            _ => false,
        }
}

fn is_intact(packet: &IpPacket<'_>) -> bool {
    checksum::verify_header(packet) && checksum::verify_transport(packet) == ChecksumStatus::Valid
}

/// TCP flags; none for UDP.
fn flags_of(packet: &[u8], shape: Shape) -> u8 {
    match shape.transport {
        Transport::Tcp => packet[shape.ip_header + 13],
        Transport::Udp => 0,
    }
}

/// Whether the IP headers ask for the same treatment.
fn same_service(first: &[u8], packet: &[u8], shape: Shape) -> bool {
    if shape.ip_header == IPV6_HEADER {
        // Traffic class and flow label, hop limit.
        return first[..4] == packet[..4] && first[7] == packet[7];
    }
    // Type of service, TTL, and the word with the don't-fragment bit.
    first[1] == packet[1] && first[8] == packet[8] && first[6..8] == packet[6..8]
}

/// Whether the IP headers differ only in what segmentation gives back: length, identification and checksum.
fn same_ip_header(first: &[u8], packet: &[u8], group: &Group) -> bool {
    if !same_service(first, packet, group.shape) {
        return false;
    }
    if group.shape.ip_header == IPV6_HEADER {
        return true;
    }
    let ahead = be16(packet, 4).wrapping_sub(be16(first, 4));
    let may_stay = first[6] & DONT_FRAGMENT != 0;
    match group.id {
        IdRule::Undecided => ahead == 1 || (ahead == 0 && may_stay),
        IdRule::Fixed => ahead == 0,
        IdRule::Counting => ahead == group.segments,
    }
}

/// Whether the TCP headers differ only in sequence number, checksum, and flags that only the first (CWR) or
/// the last segment (PSH, FIN) may have. `first` is the header, `segment` is as long or longer.
fn same_tcp_header(first: &[u8], segment: &[u8]) -> bool {
    let ending = tcp_flags::PSH | tcp_flags::FIN;
    let flags = first[13] & !tcp_flags::CWR;
    // Acknowledgement; header length and reserved bits; flags; window; urgent pointer and options.
    first[8..12] == segment[8..12]
        && first[12] == segment[12]
        && flags == segment[13] & !ending
        && first[14..16] == segment[14..16]
        && first[18..] == segment[18..first.len()]
}

/// Writes the headers of a merged packet, and takes them from its first part.
fn finish(joined: &mut TunPacket, group: &Group) {
    let Shape { transport, ip_header, headers } = group.shape;
    let mut head = [0; MAX_HEAD];
    let len = VNET_HDR_LEN + headers;
    head[VNET_HDR_LEN..len].copy_from_slice(&joined.first[..headers]);
    let packet = &mut head[VNET_HDR_LEN..len];
    let mut gso_type = match (transport, ip_header) {
        (Transport::Udp, _) => vnet::GSO_UDP_L4,
        (Transport::Tcp, IPV4_HEADER) => vnet::GSO_TCPV4,
        (Transport::Tcp, _) => vnet::GSO_TCPV6,
    };

    let transport_len = group.packet_len - ip_header;
    let (protocol, csum_offset) = match transport {
        Transport::Tcp => {
            packet[ip_header + 13] |= group.ending;
            if packet[ip_header + 13] & tcp_flags::CWR != 0 {
                gso_type |= vnet::GSO_ECN;
            }
            (protocol::TCP, 16)
        }
        Transport::Udp => {
            put16(packet, ip_header + 4, transport_len as u16);
            (protocol::UDP, 6)
        }
    };
    let addresses = if ip_header == IPV4_HEADER {
        put16(packet, 2, group.packet_len as u16);
        put16(packet, 10, 0);
        let check = !checksum::sum(&packet[..IPV4_HEADER]);
        put16(packet, 10, check);
        12..20
    } else {
        put16(packet, 4, transport_len as u16);
        8..40
    };
    let partial = checksum::pseudo(&packet[addresses], protocol, transport_len);
    put16(packet, ip_header + csum_offset, partial);

    let vnet = VnetHdr {
        flags: vnet::NEEDS_CSUM,
        gso_type,
        hdr_len: headers as u16,
        gso_size: group.size as u16,
        csum_start: ip_header as u16,
        csum_offset: csum_offset as u16,
    };
    head[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
    joined.head = head[..len].iter().copied().collect();
    joined.first.advance(headers);
    joined.len = VNET_HDR_LEN + group.packet_len;
    joined.segments = group.segments;
}

#[cfg(test)]
mod tests;
