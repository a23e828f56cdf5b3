//! Generic receive offload (GRO): merges received packets into super-packets for the kernel.
//!
//! In: IP packets in the order of their arrival. Out: [`TunPacket`]s, each a virtio header and a packet that
//! one `writev` hands to a TUN device. Consecutive TCP segments or UDP datagrams of a flow are merged by the
//! rules of Linux's own GRO (net/ipv4/tcp_offload.c, udp_offload.c); all other packets pass unchanged. No
//! payload is copied. Of consecutive pure acknowledgements of a flow only the last is kept: the kernel would
//! process all of them at the same moment, and send a few segments after each.
//!
//! Always holds: packets of a flow keep their order, merged or not; no packet is lost except such
//! acknowledgements; only packets with correct checksums are merged; the kernel can split a merged packet
//! into exactly the packets that came in.

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use bytes::{Buf, Bytes};

use crate::ack_filter::{acknowledges_more, is_bare_ack_segment};
use crate::checksum;
use crate::flow::FlowKey;
use crate::ip::{self, IPV4_HEADER, IPV6_HEADER, IpPacket, MAX_PACKET, Version};
use crate::split::MIN_SEGMENT_LEN;
use crate::tcp::TCP_HEADER;
use crate::vnet::{self, VNET_HDR_LEN, VnetHdr};
use crate::{be16, be32, protocol, put16, tcp_flags};

/// Maximum number of flows that are merged at the same time; one more closes the oldest. A smaller number
/// merges less when flows interleave; a larger one makes each lookup, a linear search, slower. The number is
/// chosen (docs/design/packets.md, open questions).
const MAX_OPEN_GROUPS: usize = 16;
/// Maximum number of datagrams in a UDP super-packet: older kernels refuse more (`UDP_MAX_SEGMENTS`). A
/// smaller number needs more writes.
const MAX_DATAGRAMS: u16 = 64;
/// Maximum number of segments in a TCP super-packet. It keeps the buffers of one `writev` far below `IOV_MAX`
/// (1024) when a sender uses very small segments; of 1300 bytes at most 50 fit into a super-packet of 64 KiB
/// anyway.
const MAX_SEGMENTS: u16 = 256;
/// Maximum number of parts of a [`TunPacket`]: its headers, and one payload for each segment.
pub const MAX_PARTS: usize = MAX_SEGMENTS as usize + 1;
/// Length in bytes of the longest headers of a super-packet: virtio header, IPv6 header, and a TCP header of
/// 60 bytes.
const MAX_HEADERS_LEN: usize = VNET_HDR_LEN + IPV6_HEADER + 60;
/// Maximum number of part lists kept for reuse, about as many as one batch of received packets needs. A
/// smaller number allocates more often; a larger one holds more memory. The number is chosen
/// (docs/design/packets.md, open questions).
const MAX_SPARE_PART_LISTS: usize = 128;

const UDP_HEADER: usize = 8;
const DONT_FRAGMENT: u8 = 0x40;

/// One packet for a TUN device with its virtio header, in parts for one `writev`.
#[derive(Debug, Clone)]
pub struct TunPacket {
    /// The virtio header and, in a merged packet, the rewritten IP and transport headers.
    head: ArrayVec<u8, MAX_HEADERS_LEN>,
    first: Bytes,
    rest: Vec<Bytes>,
    len: usize,
    segments: u16,
    flow: Option<u32>,
}

impl TunPacket {
    fn unmerged(packet: Bytes, rest: Vec<Bytes>) -> Self {
        let head = VnetHdr::NONE.to_bytes().into_iter().collect();
        Self { len: VNET_HDR_LEN + packet.len(), head, first: packet, rest, segments: 1, flow: None }
    }

    /// A single packet that was not merged.
    pub fn single(packet: Bytes) -> Self {
        Self::unmerged(packet, Vec::new())
    }

    /// A packet of `headers` and the payload `parts`; `None` if the headers are longer than the longest
    /// possible ones, or there are more than [`MAX_PARTS`] − 1 parts.
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

    /// Hash of the packet's flow ([`FlowKey::hash32`]) if the packet comes from a [`GroCoalescer`].
    pub fn flow_hash(&self) -> Option<u32> {
        self.flow
    }

    /// Length in bytes, virtio header included.
    #[expect(clippy::len_without_is_empty, reason = "it always has a virtio header")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of received packets that it contains.
    pub fn segments(&self) -> usize {
        usize::from(self.segments)
    }

    /// The virtio header.
    pub fn vnet(&self) -> VnetHdr {
        VnetHdr::parse(&self.head).unwrap_or_default()
    }

    /// The packet without its virtio header, for an interface without such headers; `None` if it is a
    /// super-packet.
    pub fn as_single_packet(&self) -> Option<&[u8]> {
        let is_plain =
            self.rest.is_empty() && self.head.len() == VNET_HDR_LEN && self.vnet() == VnetHdr::NONE;
        is_plain.then_some(&self.first)
    }

    /// The leading bytes of the packet, at least the IP header.
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

    /// A copy of all bytes, virtio header included.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        bytes.extend_from_slice(&self.head);
        for part in std::iter::once(&self.first).chain(&self.rest) {
            bytes.extend_from_slice(part);
        }
        bytes
    }
}

/// Merges received packets; see the module's description.
///
/// For batches: push what one wake-up received, flush, pop everything. It holds all pushed packets until
/// then, so the size of the caller's batch bounds its memory.
#[derive(Debug, Default)]
pub struct GroCoalescer {
    /// Packets in the order of their first segments.
    queue: VecDeque<TunPacket>,
    /// Number of elements removed from `queue`, which is the number of its first element.
    popped_count: u64,
    open_groups: ArrayVec<OpenGroup, MAX_OPEN_GROUPS>,
    spare_part_lists: Vec<Vec<Bytes>>,
}

/// An element of the queue to which further segments can be appended.
#[derive(Debug)]
struct OpenGroup {
    key: FlowKey,
    hash: u32,
    /// Number of the element in the queue, counted from the first one ever pushed.
    number: u64,
    layout: HeaderLayout,
    /// Payload length in bytes of every segment but the last; 0 for a pure acknowledgement.
    segment_size: usize,
    next_seq: u32,
    packet_len: usize,
    segments: u16,
    /// Whether the checksums of its packets were verified.
    is_intact: bool,
    /// The PSH and FIN flags of the last segment.
    final_flags: u8,
    id_rule: Ipv4IdRule,
}

/// How the IPv4 identification changes from segment to segment (as in the kernel's `inet_gro_flush`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ipv4IdRule {
    /// IPv6, or only one packet so far.
    Undecided,
    /// All are the same; only allowed if packets must not be fragmented.
    Fixed,
    /// Each is one higher than the one before.
    Counting,
}

/// Offsets of the headers of a mergeable packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeaderLayout {
    transport: Transport,
    /// Length of the IP header, in bytes.
    ip_header: usize,
    /// Length of IP and transport header together, in bytes.
    headers: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
}

impl GroCoalescer {
    /// A coalescer that holds no packets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a received packet.
    pub fn push(&mut self, packet: Bytes) {
        let Ok(view) = ip::parse(&packet) else {
            self.enqueue(packet, None);
            return;
        };
        let key = FlowKey::of(&view);
        if view.fragment().is_some() {
            self.close_groups_between(&key);
            self.enqueue(packet, None);
            return;
        }
        let hash = key.hash32();
        let open = self.find(&key, hash);
        let layout = layout_of(&view).filter(|_| packet.len() == view.total_len());
        let is_pure_ack = layout.is_some_and(|layout| packet.len() == layout.headers);
        let joined = open.zip(layout).filter(|(at, layout)| self.joins(*at, &view, *layout));
        match joined {
            Some((at, _)) if is_pure_ack => return self.replace(at, packet),
            Some((at, _)) => return self.append(at, packet),
            None => open.into_iter().for_each(|at| self.close(at)),
        }
        match layout {
            Some(layout) => self.start(key, hash, layout, packet),
            None => _ = self.enqueue(packet, Some(hash)),
        }
    }

    /// Closes all groups: afterwards all pushed packets can be popped.
    pub fn flush(&mut self) {
        while !self.open_groups.is_empty() {
            self.close(0);
        }
    }

    /// The next finished packet, in the order in which the first segment of each was pushed.
    pub fn pop(&mut self) -> Option<TunPacket> {
        if self.open_groups.iter().any(|group| group.number == self.popped_count) {
            return None;
        }
        let merged = self.queue.pop_front()?;
        self.popped_count += 1;
        Some(merged)
    }

    /// Takes back a written packet, to reuse its memory.
    pub fn recycle(&mut self, merged: TunPacket) {
        let mut parts = merged.rest;
        if parts.capacity() == 0 || self.spare_part_lists.len() == MAX_SPARE_PART_LISTS {
            return;
        }
        parts.clear();
        self.spare_part_lists.push(parts);
    }

    fn find(&self, key: &FlowKey, hash: u32) -> Option<usize> {
        self.open_groups.iter().position(|group| group.hash == hash && group.key == *key)
    }

    fn queue_index(&self, number: u64) -> usize {
        (number - self.popped_count) as usize
    }

    /// Queues a packet as an element of its own and returns the element's number.
    fn enqueue(&mut self, packet: Bytes, flow: Option<u32>) -> u64 {
        let number = self.popped_count + self.queue.len() as u64;
        self.queue.push_back(TunPacket { flow, ..TunPacket::unmerged(packet, Vec::new()) });
        number
    }

    fn start(&mut self, key: FlowKey, hash: u32, layout: HeaderLayout, packet: Bytes) {
        let flags = flags_of(&packet, layout);
        let size = packet.len() - layout.headers;
        if flags & (tcp_flags::PSH | tcp_flags::FIN) != 0 {
            self.enqueue(packet, Some(hash));
            return;
        }
        if self.open_groups.is_full() {
            let oldest = (0..self.open_groups.len()).min_by_key(|&at| self.open_groups[at].number);
            self.close(oldest.unwrap_or(0));
        }
        let next_seq = match layout.transport {
            Transport::Tcp => be32(&packet, layout.ip_header + 4).wrapping_add(size as u32),
            Transport::Udp => 0,
        };
        let packet_len = packet.len();
        let number = self.enqueue(packet, Some(hash));
        self.open_groups.push(OpenGroup {
            key,
            hash,
            number,
            layout,
            segment_size: size,
            next_seq,
            packet_len,
            segments: 1,
            is_intact: false,
            final_flags: 0,
            id_rule: Ipv4IdRule::Undecided,
        });
    }

    /// Whether a packet of the same flow can be appended to a group, or replace its acknowledgement. Only
    /// then the checksums of both are verified: a lone packet is verified by its receiver.
    fn joins(&mut self, at: usize, packet: &IpPacket<'_>, layout: HeaderLayout) -> bool {
        let (group, bytes) = (&self.open_groups[at], packet.bytes());
        let fits = match bytes.len() == layout.headers {
            true => self.supersedes(group, bytes, layout),
            false => self.extends(group, bytes, layout),
        };
        if !fits || !checksum::is_intact(packet) {
            return false;
        }
        let first = &self.queue[self.queue_index(group.number)].first;
        let is_intact = group.is_intact || ip::parse(first).is_ok_and(|first| checksum::is_intact(&first));
        self.open_groups[at].is_intact = is_intact;
        is_intact
    }

    /// Whether `packet`, of the same flow, can be appended to the group.
    fn extends(&self, group: &OpenGroup, packet: &[u8], layout: HeaderLayout) -> bool {
        let first = &self.queue[self.queue_index(group.number)].first;
        let payload = packet.len() - layout.headers;
        if group.layout != layout || payload > group.segment_size || group.packet_len + payload > MAX_PACKET {
            return false;
        }
        if !same_ip_header(first, packet, group) {
            return false;
        }
        match layout.transport {
            Transport::Udp => group.segments < MAX_DATAGRAMS,
            Transport::Tcp => {
                group.segments < MAX_SEGMENTS
                    && group.segment_size >= MIN_SEGMENT_LEN
                    && be32(packet, layout.ip_header + 4) == group.next_seq
                    && same_tcp_header(&first[layout.ip_header..layout.headers], &packet[layout.ip_header..])
            }
        }
    }

    /// Whether `packet`, a bare acknowledgement of the group's flow, supersedes the group's, which is one
    /// too.
    fn supersedes(&self, group: &OpenGroup, packet: &[u8], layout: HeaderLayout) -> bool {
        let first = &self.queue[self.queue_index(group.number)].first;
        group.segment_size == 0
            && group.layout == layout
            && acknowledges_more(packet, first, layout.ip_header)
    }

    fn replace(&mut self, at: usize, packet: Bytes) {
        let element = self.queue_index(self.open_groups[at].number);
        self.queue[element].first = packet;
    }

    fn append(&mut self, at: usize, mut packet: Bytes) {
        let element = self.queue_index(self.open_groups[at].number);
        let group = &mut self.open_groups[at];
        let ending = flags_of(&packet, group.layout) & (tcp_flags::PSH | tcp_flags::FIN);
        let payload = packet.len() - group.layout.headers;
        if group.id_rule == Ipv4IdRule::Undecided && group.layout.ip_header == IPV4_HEADER {
            let same = be16(&packet, 4) == be16(&self.queue[element].first, 4);
            group.id_rule = if same { Ipv4IdRule::Fixed } else { Ipv4IdRule::Counting };
        }
        group.segments += 1;
        group.packet_len += payload;
        group.next_seq = group.next_seq.wrapping_add(payload as u32);
        group.final_flags = ending;
        let is_last = payload < group.segment_size || ending != 0;

        packet.advance(group.layout.headers);
        let rest = &mut self.queue[element].rest;
        if rest.capacity() == 0 {
            *rest = self.spare_part_lists.pop().unwrap_or_else(|| Vec::with_capacity(64));
        }
        rest.push(packet);
        if is_last {
            self.close(at);
        }
    }

    fn close_groups_between(&mut self, key: &FlowKey) {
        let between = |group: &OpenGroup| {
            group.key.src == key.src && group.key.dst == key.dst && group.key.protocol == key.protocol
        };
        while let Some(at) = self.open_groups.iter().position(between) {
            self.close(at);
        }
    }

    /// Closes a group and writes the final headers of its packet.
    fn close(&mut self, at: usize) {
        let group = self.open_groups.swap_remove(at);
        if group.segments > 1 {
            let element = self.queue_index(group.number);
            finish(&mut self.queue[element], &group);
        }
    }
}

/// The header layout of a packet that can be merged: IP header without options or extensions, and either
/// payload or nothing but an acknowledgement.
fn layout_of(packet: &IpPacket<'_>) -> Option<HeaderLayout> {
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
                Some(0) => is_bare_ack_segment(transport),
                None => false,
            };
            usable.then_some(HeaderLayout {
                transport: Transport::Tcp,
                ip_header,
                headers: ip_header + header,
            })
        }
        protocol::UDP => {
            let usable = transport.len() > UDP_HEADER && usize::from(be16(transport, 4)) == transport.len();
            usable.then_some(HeaderLayout {
                transport: Transport::Udp,
                ip_header,
                headers: ip_header + UDP_HEADER,
            })
        }
        _ => None,
    }
}

/// TCP flags; none for UDP.
fn flags_of(packet: &[u8], layout: HeaderLayout) -> u8 {
    match layout.transport {
        Transport::Tcp => packet[layout.ip_header + 13],
        Transport::Udp => 0,
    }
}

/// Whether the IP headers differ only in fields that segmentation restores: length, identification and
/// checksum.
fn same_ip_header(first: &[u8], packet: &[u8], group: &OpenGroup) -> bool {
    if !ip::same_service(first, packet, group.layout.ip_header) {
        return false;
    }
    if group.layout.ip_header == IPV6_HEADER {
        return true;
    }
    let ahead = be16(packet, 4).wrapping_sub(be16(first, 4));
    let may_stay = first[6] & DONT_FRAGMENT != 0;
    match group.id_rule {
        Ipv4IdRule::Undecided => ahead == 1 || (ahead == 0 && may_stay),
        Ipv4IdRule::Fixed => ahead == 0,
        Ipv4IdRule::Counting => ahead == group.segments,
    }
}

/// Whether the TCP headers differ only in sequence number, checksum, and flags that only the first (CWR) or
/// the last segment (PSH, FIN) may have. `first` is a header; `segment` is at least as long.
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

/// Writes the final headers of a merged packet and removes the headers from its first part.
fn finish(merged: &mut TunPacket, group: &OpenGroup) {
    let HeaderLayout { transport, ip_header, headers } = group.layout;
    let mut head = [0; MAX_HEADERS_LEN];
    let len = VNET_HDR_LEN + headers;
    head[VNET_HDR_LEN..len].copy_from_slice(&merged.first[..headers]);
    let packet = &mut head[VNET_HDR_LEN..len];
    let mut gso_type = match (transport, ip_header) {
        (Transport::Udp, _) => vnet::GSO_UDP_L4,
        (Transport::Tcp, IPV4_HEADER) => vnet::GSO_TCPV4,
        (Transport::Tcp, _) => vnet::GSO_TCPV6,
    };

    let transport_len = group.packet_len - ip_header;
    let (protocol, csum_offset) = match transport {
        Transport::Tcp => {
            packet[ip_header + 13] |= group.final_flags;
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
        gso_size: group.segment_size as u16,
        csum_start: ip_header as u16,
        csum_offset: csum_offset as u16,
    };
    head[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
    merged.head = head[..len].iter().copied().collect();
    merged.first.advance(headers);
    merged.len = VNET_HDR_LEN + group.packet_len;
    merged.segments = group.segments;
}

#[cfg(test)]
mod tests;
