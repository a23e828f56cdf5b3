//! IP packets: views and ICMP errors, segmentation and coalescing, the split-TCP proxy.

use std::{collections::BTreeMap, net::IpAddr};

use bytes::{Bytes, BytesMut};
use mpvpn_flow::split_tcp::{Event, FlowId, ProxyLimits, Read, Refusal, SplitTcpProxy};
use mpvpn_packet::{
    FlowKey, GroCoalescer, IpPacket, TunPacket, VNET_HDR_LEN, VnetHdr,
    checksum::{self, ChecksumStatus},
    icmp::{self, Unreachable},
    ip,
    mss::{self, Checksum},
    public,
    split::{self, split},
    tcp::{self, Segment},
    udp,
};
use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums, reference_sum};
use mpvpn_types::{Duration, Instant};

use crate::input::Input;

/// The views of one packet, and what is made of it: `MTU, packet`.
pub fn ip_packets(data: &[u8]) {
    let mut input = Input(data);
    let mtu = usize::from(input.u16());
    let bytes = input.0;
    assert_eq!(checksum::sum(bytes), reference_sum(bytes));
    let _ = (ip::dst_of(bytes), ip::src_of(bytes), VnetHdr::parse(bytes), mss::is_syn(bytes));
    for from in [Packet::v4().dst.ip(), Packet::v6().dst.ip()] {
        let errors = [
            icmp::packet_too_big(bytes, mtu as u32, from),
            icmp::unreachable(bytes, Unreachable::NoRoute, from),
        ];
        for error in errors.into_iter().flatten() {
            assert!(has_valid_lengths_and_checksums(&error));
            assert!(error.len() <= if from.is_ipv4() { 576 } else { 1280 });
            assert_eq!(
                icmp::packet_too_big(&error, mtu as u32, from),
                None,
                "errors are not answered by errors"
            );
            assert_eq!(icmp::unreachable(&error, Unreachable::NoRoute, from), None);
        }
    }
    let Ok(packet) = ip::parse(bytes) else { return };
    assert!(packet.total_len() <= bytes.len() && packet.header_len() <= packet.transport_offset());
    assert_eq!(packet.transport_offset() + packet.transport().len(), packet.total_len());
    assert_eq!((ip::dst_of(bytes), ip::src_of(bytes)), (Some(packet.dst()), Some(packet.src())));
    let _ = (packet.tos(), packet.dscp(), packet.dont_fragment(), packet.fragment());
    let _ = (packet.has_routing_header(), tcp::wants_multipath(&packet), public::is_public(packet.dst()));
    let inner = public::embedded_ipv4(packet.dst());
    assert!(inner.is_none_or(|ip| ip.is_ipv4()));
    let key = FlowKey::of(&packet);
    assert_eq!(key.reversed().reversed(), key);
    // Fragments of a packet have one key, and only the first has ports.
    let ports = if packet.fragment().is_some() { Some((0, 0)) } else { packet.ports() };
    assert!(ports.is_none_or(|ports| (key.src_port, key.dst_port) == ports));
    if let Some(segment) = Segment::of(&packet) {
        let _ = (segment.seq(), segment.ack(), segment.flags(), segment.window(), segment.mss());
        assert!(segment.payload().len() <= packet.transport().len());
        assert!(segment.window_scale().is_none_or(|scale| scale <= 14), "RFC 7323 §2.3");
    }
    for payload in udp::payloads(VnetHdr::NONE, &packet).take(2) {
        let from = std::net::SocketAddr::new(packet.src(), key.src_port);
        let to = std::net::SocketAddr::new(packet.dst(), key.dst_port);
        let made = udp::build_packet(from, to, payload).expect("it was in a packet");
        let view = ip::parse(&made).expect("a packet");
        assert_eq!(udp::payloads(VnetHdr::NONE, &view).collect::<Vec<_>>(), [payload]);
    }
    clamping_keeps_checksums(bytes, mtu);
}

fn clamping_keeps_checksums(bytes: &[u8], mtu: usize) {
    let is_intact = |bytes: &[u8]| {
        ip::parse(bytes).is_ok_and(|packet| {
            checksum::verify_header(&packet) && checksum::verify_transport(&packet) == ChecksumStatus::Valid
        })
    };
    let mut changed = bytes.to_vec();
    let clamped = mss::clamp(&mut changed, mtu, Checksum::Full);
    assert_eq!(clamped, changed != bytes);
    assert_eq!(is_intact(bytes), is_intact(&changed), "damage is neither mended nor made");
    assert!(!mss::clamp(&mut changed, mtu, Checksum::Full), "a clamped packet fits");
}

/// Splits what a TUN device delivers, joins the packets, and splits again as the kernel would: nothing is
/// lost or changed.
///
/// `MTU, flags, virtio header, (packet)…`; flags say whether the packets are valid ones that the input
/// describes.
pub fn split_join(data: &[u8]) {
    let mut input = Input(data);
    let (mtu, flags) = (usize::from(input.u16()), input.byte());
    let mut packets = Vec::new();
    if flags & 1 == 0 {
        let header = input.take(VNET_HDR_LEN);
        if let Some(header) = VnetHdr::parse(header) {
            packets.extend(split_all(header, input.0, mtu));
        }
    } else {
        while !input.is_empty() && packets.len() < 300 {
            packets.extend(described(&mut input, mtu));
        }
    }
    let mut coalescer = GroCoalescer::new();
    let mut joined = Vec::new();
    for (at, packet) in packets.iter().enumerate() {
        coalescer.push(Bytes::copy_from_slice(packet));
        // Some are popped while others still grow.
        if flags & 2 != 0 && at % 7 == 6 {
            joined.extend(coalescer.pop());
        }
    }
    coalescer.flush();
    joined.extend(std::iter::from_fn(|| coalescer.pop()));
    returned_are_pushed(&packets, &joined);
}

/// The packets of one TUN read.
fn split_all(header: VnetHdr, packet: &[u8], mtu: usize) -> Vec<Vec<u8>> {
    let earlier: std::ops::Range<usize> = 0..1;
    let (mut out, mut ranges) = (BytesMut::from(&b"x"[..]), vec![earlier]);
    let before = split::estimated_output_len(header, packet.len(), mtu, 3);
    if split(header, packet, mtu, b"pre", &mut out, &mut ranges).is_err() {
        assert_eq!((out.len(), ranges.len()), (1, 1), "after an error nothing is appended");
        return Vec::new();
    }
    assert!(before >= packet.len());
    for pair in ranges.windows(2) {
        assert_eq!(pair[0].end, pair[1].start);
        assert!(pair[1].len() <= mtu + 3, "{} bytes exceed {mtu}", pair[1].len());
        assert!(ip::parse(&out[pair[1].start + 3..pair[1].end]).is_ok());
    }
    assert_eq!(out.len(), ranges[ranges.len() - 1].end);
    ranges[1..].iter().map(|range| out[range.start + 3..range.end].to_vec()).collect()
}

/// Valid packets by a few bytes: kind, port, length, flags; those of one port are one flow.
fn described(input: &mut Input<'_>, mtu: usize) -> Vec<Vec<u8>> {
    let (kind, port, seed, len) =
        (input.byte(), input.byte() % 4, input.byte(), usize::from(input.u16()) % 5000);
    let base = if kind & 1 == 0 { Packet::v4() } else { Packet::v6() };
    let src = std::net::SocketAddr::new(base.src.ip(), 1000 + u16::from(port));
    let packet = Packet { src, id: seed.into(), dont_fragment: kind & 2 == 0, tos: seed & 3, ..base };
    let payload: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(seed)).collect();
    let tcp = Tcp { seq: u32::from(seed) * 1000, flags: input.byte(), ..Tcp::default() };
    let (header, bytes) = match kind >> 2 & 7 {
        0 | 1 if len > 0 => packet.tcp_super_packet(&tcp, &payload, (seed % 200).into()),
        2 if len > 0 => packet.udp_super_packet(&payload, u16::from(seed) * 8),
        3 => (VnetHdr::NONE, packet.udp(&payload)),
        4 => (VnetHdr::NONE, packet.echo(1, seed.into(), &payload)),
        5 => (VnetHdr::NONE, packet.other(50, &payload)),
        _ => (VnetHdr::NONE, packet.tcp_with(&tcp, &payload)),
    };
    split_all(header, &bytes, mtu)
}

/// Packets that leave the coalescer are, cut as the kernel cuts them, those that were pushed, and every flow
/// is in order.
fn returned_are_pushed(pushed: &[Vec<u8>], joined: &[TunPacket]) {
    assert!(joined.iter().map(TunPacket::segments).sum::<usize>() <= pushed.len());
    let mut got: BTreeMap<Option<FlowKey>, Vec<Vec<u8>>> = BTreeMap::new();
    for packet in joined {
        let bytes = packet.to_vec();
        assert_eq!(bytes.len(), packet.len());
        let whole = &bytes[VNET_HDR_LEN..];
        let parts = match packet.vnet() == VnetHdr::NONE {
            true => vec![whole.to_vec()],
            false => split_all(packet.vnet(), whole, usize::from(u16::MAX)),
        };
        assert_eq!(parts.len(), packet.segments());
        for part in parts {
            got.entry(flow_of(&part)).or_default().push(without_meaningless_id(part));
        }
    }
    let mut sent: BTreeMap<Option<FlowKey>, Vec<Vec<u8>>> = BTreeMap::new();
    for packet in pushed {
        sent.entry(flow_of(packet)).or_default().push(without_meaningless_id(packet.clone()));
    }
    for (flow, sent) in sent {
        let got = got.remove(&flow).unwrap_or_default();
        // Acknowledgements that a later one supersedes are dropped; everything else comes back, in order.
        let mut rest = got.iter();
        for packet in &sent {
            let is_next = rest.as_slice().first() == Some(packet);
            if is_next {
                rest.next();
            } else {
                assert!(is_pure_ack(packet), "a packet of {flow:?} is lost or overtaken");
            }
        }
        assert_eq!(rest.len(), 0, "{flow:?}");
    }
    assert!(got.is_empty(), "packets that were not pushed");
}

/// The packet without its identification, if that has no meaning: of IPv4 packets that may not be fragmented
/// and are no fragments (RFC 6864 §4.1). The kernel counts it up when it cuts a large packet.
fn without_meaningless_id(mut packet: Vec<u8>) -> Vec<u8> {
    let is_atomic =
        |view: IpPacket<'_>| view.src().is_ipv4() && view.dont_fragment() && view.fragment().is_none();
    if ip::parse(&packet).is_ok_and(is_atomic) {
        // With the checksum of the header.
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

fn flow_of(packet: &[u8]) -> Option<FlowKey> {
    // Fragments belong to all flows between their addresses.
    let packet = ip::parse(packet).ok()?;
    let key = FlowKey::of(&packet);
    Some(if packet.fragment().is_some() { FlowKey { src_port: 0, dst_port: 0, ..key } } else { key })
}

fn is_pure_ack(packet: &[u8]) -> bool {
    let Ok(packet) = ip::parse(packet) else { return false };
    Segment::of(&packet).is_some_and(|segment| segment.payload().is_empty() && segment.flags() == 0x10)
}

/// The split-TCP proxy with apps and a server that do anything: `(operation, arguments)…`.
pub fn split_tcp(data: &[u8]) {
    let mut input = Input(data);
    let limits = ProxyLimits {
        max_flows: 8,
        max_flow_bytes: 16 << 10,
        max_total_bytes: 48 << 10,
        ..Default::default()
    };
    let mut now = Instant::now();
    let mut proxy = SplitTcpProxy::new(now, limits, [1, 2], 1400);
    let (mut flows, mut all): (Vec<FlowId>, Vec<FlowId>) = Default::default();
    // The last acknowledgement of each flow, so that an input need not find sequence numbers.
    let mut last: BTreeMap<FlowKey, (u32, u32)> = BTreeMap::new();
    while !input.is_empty() {
        let operation = input.byte();
        let flow = flows.get(input.below(8)).copied();
        match (operation % 10, flow) {
            (0..=2, _) => {
                let packet = app_segment(&mut input, &last);
                proxy.handle_packet(now, &ip::parse(&packet).expect("a packet"));
            }
            (3, _) => {
                if let Ok(packet) = ip::parse(input.long()) {
                    proxy.handle_packet(now, &packet);
                }
            }
            (4, Some(id)) => proxy.accept(now, id),
            (5, Some(id)) => {
                let gateway = IpAddr::from([10, 0, 0, 1]);
                let refusals =
                    [Refusal::Reset, Refusal::Silence, Refusal::Unreachable(Unreachable::NoRoute, gateway)];
                proxy.refuse(id, refusals[input.below(3)]);
            }
            (6, Some(id)) => {
                while let Read::Data(bytes) = proxy.read(now, id, usize::from(input.byte()) * 64 + 1) {
                    assert!(!bytes.is_empty());
                }
            }
            (7, Some(id)) => {
                let room = proxy.writable_bytes(id);
                proxy.write(now, id, Bytes::from(vec![operation; usize::from(input.u16()).min(room)]));
            }
            (8, Some(id)) if input.bool() => proxy.finish(now, id),
            (8, Some(id)) => proxy.abort(id),
            _ => {
                let time = Duration::from_millis(1 << (input.byte() % 24));
                now += time;
                proxy.handle_timeout(now);
                assert!(proxy.poll_timeout().is_none_or(|at| at > now), "what is due was handled");
            }
        }
        while let Some(event) = proxy.poll_event() {
            if let Event::ConnectRequested { id, .. } = event {
                all.push(id);
                flows.insert(0, id);
                flows.truncate(8);
            }
        }
        let mut sent = 0;
        while let Some(packet) = proxy.poll_packet(now) {
            note_packet(&packet, &mut last);
            sent += packet.len();
            assert!(sent <= 1 << 20, "one operation causes no endless packets");
        }
        assert!(proxy.flow_count() <= limits.max_flows);
        assert_eq!(proxy.summaries().count(), proxy.flow_count());
        // Each may hold 4 KiB in each direction beyond the bytes of all, and one segment that was already
        // accepted.
        let bound = limits.max_total_bytes + limits.max_flows * (2 * 4096 + limits.max_flow_bytes);
        assert!(proxy.held_bytes() <= bound, "{} bytes", proxy.held_bytes());
    }
    // Without a word from anybody every connection ends, but for those whose bytes the far side has not read:
    // these end when it leaves. Nothing stays for ever.
    for far_side_leaves in [false, true] {
        if far_side_leaves {
            all.iter().for_each(|id| proxy.abort(*id));
        }
        for _ in 0..10_000 {
            let Some(at) = proxy.poll_timeout() else { break };
            now = now.max(at);
            proxy.handle_timeout(now);
            while proxy.poll_packet(now).is_some() {}
            while proxy.poll_event().is_some() {}
        }
        while proxy.poll_packet(now).is_some() {}
    }
    assert_eq!((proxy.flow_count(), proxy.held_bytes(), proxy.poll_timeout()), (0, 0, None));
}

/// A TCP segment of one of four apps, near the numbers that it may use.
fn app_segment(input: &mut Input<'_>, last: &BTreeMap<FlowKey, (u32, u32)>) -> Vec<u8> {
    let (app, flags, near) = (input.byte(), input.byte(), input.byte());
    let base = if app & 1 == 0 { Packet::v4() } else { Packet::v6() };
    let packet =
        Packet { src: std::net::SocketAddr::new(base.src.ip(), 1000 + u16::from(app >> 1 & 3)), ..base };
    let options = match app >> 4 {
        0..=7 => Vec::new(),
        8..=11 => vec![2, 4, 5, 120, 3, 3, near, 0],
        _ => input.take(8).to_vec(),
    };
    let options = [options.as_slice(), &[0; 3]].concat()[..options.len().div_ceil(4) * 4].to_vec();
    let key = FlowKey::of(&ip::parse(&packet.tcp(b"")).expect("a packet"));
    let (seq, ack) = last.get(&key).copied().unwrap_or((u32::MAX - 2, 0));
    let offset =
        |at: u32, by: u8| at.wrapping_add_signed(i32::from(by as i8) * if by & 1 == 0 { 1 } else { 700 });
    let (seq, ack) = match near {
        0..=99 => (seq, ack),
        100..=199 => (offset(seq, input.byte()), offset(ack, input.byte())),
        _ => (input.u32(), input.u32()),
    };
    let tcp = Tcp { seq, ack, flags, window: input.u16(), options };
    let len = if flags & 8 == 0 { 0 } else { usize::from(input.u16()) % 3000 };
    packet.tcp_with(&tcp, &vec![near; len])
}

/// Checks a packet to an app, and notes where its connection is.
fn note_packet(packet: &TunPacket, last: &mut BTreeMap<FlowKey, (u32, u32)>) {
    let bytes = packet.to_vec();
    for part in split_all(packet.vnet(), &bytes[VNET_HDR_LEN..], usize::from(u16::MAX)) {
        assert!(has_valid_lengths_and_checksums(&part));
        let view = ip::parse(&part).expect("a packet");
        if let Some(segment) = Segment::of(&view) {
            let end = segment.seq().wrapping_add(segment.seq_len() as u32);
            last.insert(FlowKey::of(&view).reversed(), (segment.ack(), end));
        }
    }
}
