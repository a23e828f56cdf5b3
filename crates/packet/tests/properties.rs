//! Random and hostile input against the whole crate: nothing panics, nothing is lost, bytes come back equal.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use mpvpn_packet::checksum;
use mpvpn_packet::icmp::{self, Unreachable};
use mpvpn_packet::mss::{self, Checksum};
use mpvpn_packet::split::split;
use mpvpn_packet::{FlowKey, GroCoalescer, TunPacket, VNET_HDR_LEN, VnetHdr, ip, tcp_flags};
use mpvpn_packets::{Packet, Tcp, has_valid_lengths_and_checksums, reference_sum};
use proptest::prelude::*;

/// The addresses of a generated flow.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Tcp,
    Udp,
    Echo,
}

fn base(v6: bool, port: u16) -> Packet {
    let base = if v6 { Packet::v6() } else { Packet::v4() };
    Packet { src: SocketAddr::new(base.src.ip(), port), ..base }
}

fn bytes_of(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

fn split_all(hdr: VnetHdr, packet: &[u8], mtu: usize) -> Vec<Vec<u8>> {
    let (mut out, mut ranges) = (BytesMut::new(), Vec::new());
    split(hdr, packet, mtu, b"pre", &mut out, &mut ranges).unwrap();
    ranges.into_iter().map(|range: Range<usize>| out[range].strip_prefix(b"pre").unwrap().to_vec()).collect()
}

fn coalesce_all(packets: impl IntoIterator<Item = Vec<u8>>) -> Vec<TunPacket> {
    let mut coalescer = GroCoalescer::new();
    for packet in packets {
        coalescer.push(Bytes::from(packet));
    }
    coalescer.flush();
    std::iter::from_fn(|| coalescer.pop()).collect()
}

/// The packets into which the kernel splits a merged packet.
fn split_again(merged: &TunPacket) -> Vec<Vec<u8>> {
    let bytes = merged.to_vec();
    assert_eq!(bytes.len(), merged.len());
    if merged.vnet() == VnetHdr::NONE {
        return vec![bytes[VNET_HDR_LEN..].to_vec()];
    }
    split_all(merged.vnet(), &bytes[VNET_HDR_LEN..], 65_535)
}

/// A valid packet of any kind, for mutation.
fn any_packet() -> impl Strategy<Value = Vec<u8>> {
    (any::<bool>(), 0..5u8, 0..1600usize, any::<u8>(), any::<u8>()).prop_map(
        |(v6, kind, len, seed, flags)| {
            let packet = Packet { dont_fragment: seed & 1 == 0, ..base(v6, 5000) };
            let data = bytes_of(len, seed);
            match kind {
                0 => packet.tcp_with(
                    &Tcp { flags, options: vec![2, 4, 0xff, 0xff, 1, 3, 3, seed], ..Tcp::default() },
                    &data,
                ),
                1 => packet.udp(&data),
                2 => packet.echo(1, 1, &data),
                3 => packet.other(50, &data),
                _ => {
                    let header = if v6 { vec![] } else { vec![0x94, 4, 0, 0] };
                    Packet { ip_options: header, ..packet }.udp(&data)
                }
            }
        },
    )
}

/// Random bytes, or a valid packet with some bytes changed and its end perhaps cut off.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let mutated = (any_packet(), prop::collection::vec((0..96usize, any::<u8>()), 0..6), 0..40usize)
        .prop_map(|(mut bytes, changes, cut)| {
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            if cut < 20 {
                bytes.truncate(bytes.len().saturating_sub(cut));
            }
            bytes
        });
    prop_oneof![1 => prop::collection::vec(any::<u8>(), 0..200), 4 => mutated]
}

fn any_vnet() -> impl Strategy<Value = VnetHdr> {
    let small_or_any = || prop_oneof![3 => 0..2000u16, 1 => any::<u16>()];
    let gso_type = prop::sample::select(vec![0u8, 0, 1, 4, 5, 0x81, 0x84, 3, 0x20, 0xff]);
    let csum_start = prop_oneof![2 => Just(20u16), 2 => Just(40u16), 2 => 0..100u16, 1 => any::<u16>()];
    let csum_offset = prop_oneof![2 => Just(16u16), 2 => Just(6u16), 1 => any::<u16>()];
    (any::<u8>(), gso_type, small_or_any(), small_or_any(), csum_start, csum_offset).prop_map(
        |(flags, gso_type, hdr_len, gso_size, csum_start, csum_offset)| VnetHdr {
            flags,
            gso_type,
            hdr_len,
            gso_size,
            csum_start,
            csum_offset,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_make_a_view_panic_or_read_out_of_bounds(bytes in hostile()) {
        if let Ok(packet) = ip::parse(&bytes) {
            prop_assert!(packet.total_len() <= bytes.len());
            prop_assert!(packet.header_len() <= packet.transport_offset());
            prop_assert_eq!(packet.transport_offset() + packet.transport().len(), packet.total_len());
            prop_assert_eq!(ip::dst_of(&bytes), Some(packet.dst()));
            prop_assert_eq!(ip::src_of(&bytes), Some(packet.src()));
            let key = FlowKey::of(&packet);
            prop_assert_eq!(key.reversed().reversed(), key);
            let _ = (packet.tos(), packet.dont_fragment(), packet.ports());
            let _ = (checksum::verify_header(&packet), checksum::verify_transport(&packet));
        }
        let _ = (ip::dst_of(&bytes), ip::src_of(&bytes), VnetHdr::parse(&bytes));
    }

    #[test]
    fn rewriting_never_panics_and_never_hides_damage(bytes in hostile(), mtu in 0..9000usize) {
        let intact = ip::parse(&bytes).is_ok_and(|packet| {
            checksum::verify_header(&packet)
                && checksum::verify_transport(&packet) == checksum::ChecksumStatus::Valid
        });
        let mut changed = bytes.clone();
        let clamped = mss::clamp(&mut changed, mtu, Checksum::Full);
        prop_assert_eq!(clamped, changed != bytes);
        if clamped && let Ok(packet) = ip::parse(&changed) {
            let still = checksum::verify_header(&packet)
                && checksum::verify_transport(&packet) == checksum::ChecksumStatus::Valid;
            prop_assert_eq!(still, intact);
        }
    }

    #[test]
    fn icmp_errors_are_complete_packets_that_get_no_icmp_error(bytes in hostile(), mtu in any::<u32>()) {
        for from in [Packet::v4().dst.ip(), Packet::v6().dst.ip()] {
            let errors = [
                icmp::packet_too_big(&bytes, mtu, from),
                icmp::unreachable(&bytes, Unreachable::NoRoute, from),
            ];
            for error in errors.into_iter().flatten() {
                prop_assert!(has_valid_lengths_and_checksums(&error));
                let longest = if from.is_ipv4() { 576 } else { 1280 };
                prop_assert!(error.len() <= longest);
                prop_assert_eq!(icmp::packet_too_big(&error, mtu, from), None);
            }
        }
    }

    #[test]
    fn no_virtio_header_makes_split_panic_or_exceed_the_mtu(
        hdr in any_vnet(), bytes in hostile(), mtu in 0..2000usize,
    ) {
        let earlier: Range<usize> = 0..1;
        let (mut out, mut ranges) = (BytesMut::from(&b"x"[..]), vec![earlier]);
        let result = split(hdr, &bytes, mtu, b"pre", &mut out, &mut ranges);
        if result.is_err() {
            prop_assert_eq!((out.len(), ranges.len()), (1, 1));
        }
        for pair in ranges.windows(2) {
            prop_assert_eq!(pair[0].end, pair[1].start);
            prop_assert!(pair[1].len() <= mtu + 3);
            prop_assert!(ip::parse(&out[pair[1].start + 3..pair[1].end]).is_ok());
        }
        prop_assert_eq!(out.len(), ranges[ranges.len() - 1].end);
    }

    #[test]
    fn the_fast_sum_equals_the_reference_sum(
        bytes in prop::collection::vec(any::<u8>(), 0..4000), cut in 0..2000usize,
    ) {
        prop_assert_eq!(checksum::sum(&bytes), reference_sum(&bytes));
        let (left, right) = bytes.split_at((cut * 2).min(bytes.len() & !1));
        prop_assert_eq!(checksum::add(checksum::sum(left), checksum::sum(right)), checksum::sum(&bytes));
    }

    #[test]
    fn a_tcp_super_packet_survives_split_and_coalescing(
        v6 in any::<bool>(),
        len in 1..20_000usize,
        gso_size in 100..2000u16,
        seq in any::<u32>(),
        id in any::<u16>(),
        ending in prop::sample::select(vec![0, tcp_flags::PSH, tcp_flags::FIN | tcp_flags::PSH]),
        first in prop::sample::select(vec![0, tcp_flags::CWR]),
        timestamps in any::<bool>(),
    ) {
        let options = if timestamps { vec![1, 1, 8, 10, 9, 9, 9, 9, 8, 8, 8, 8] } else { vec![] };
        let flags = tcp_flags::ACK | ending | first;
        let packet = Packet { id, ..base(v6, 5000) };
        let tcp = Tcp { seq, flags, options, ..Tcp::default() };
        let (hdr, whole) = packet.tcp_super_packet(&tcp, &bytes_of(len, 3), gso_size);
        let segments = split_all(hdr, &whole, 65_535);
        prop_assert_eq!(segments.len(), len.div_ceil(usize::from(gso_size)));
        prop_assert!(segments.iter().all(|segment| has_valid_lengths_and_checksums(segment)));

        let merged: Vec<TunPacket> = coalesce_all(segments.clone());
        let again: Vec<Vec<u8>> = merged.iter().flat_map(split_again).collect();
        prop_assert_eq!(&again, &segments);
        let fits_one = segments.len() > 1 && segments.len() <= 256;
        if fits_one {
            prop_assert_eq!(merged.len(), 1);
            prop_assert_eq!(merged[0].vnet(), hdr);
            prop_assert_eq!(&merged[0].to_vec()[VNET_HDR_LEN..], &whole[..]);
        }
    }

    #[test]
    fn a_udp_super_packet_survives_split_and_coalescing(
        v6 in any::<bool>(), len in 1..20_000usize, gso_size in 100..2000u16, id in any::<u16>(),
    ) {
        let (hdr, whole) = Packet { id, ..base(v6, 5000) }.udp_super_packet(&bytes_of(len, 5), gso_size);
        let datagrams = split_all(hdr, &whole, 65_535);
        prop_assert!(datagrams.iter().all(|datagram| has_valid_lengths_and_checksums(datagram)));
        let merged = coalesce_all(datagrams.clone());
        let again: Vec<Vec<u8>> = merged.iter().flat_map(split_again).collect();
        prop_assert_eq!(&again, &datagrams);
        if (2..=64).contains(&datagrams.len()) {
            prop_assert_eq!(merged.len(), 1);
            prop_assert_eq!(&merged[0].to_vec()[VNET_HDR_LEN..], &whole[..]);
        }
    }

    #[test]
    fn coalescing_keeps_every_packet_and_the_order_of_every_flow(
        choices in prop::collection::vec((0..24u8, 0..12u8, any::<prop::sample::Index>()), 0..200),
        pops in prop::collection::vec(any::<bool>(), 200),
    ) {
        // 24 flows: more than can be merged at a time. Each packet's identification counts within its flow.
        let mut sent: BTreeMap<u8, Vec<Vec<u8>>> = BTreeMap::new();
        let mut next_seq = [1u32; 24];
        let mut coalescer = GroCoalescer::new();
        let mut merged = Vec::new();
        for (at, (flow, twist, index)) in choices.into_iter().enumerate() {
            let list = sent.entry(flow).or_default();
            let kind = [Kind::Tcp, Kind::Udp, Kind::Echo][usize::from(flow % 3)];
            let packet = Packet { id: list.len() as u16, ..base(flow & 8 != 0, 1000 + u16::from(flow)) };
            let len = if twist == 0 { index.index(600) } else { 400 };
            let data = bytes_of(len, at as u8);
            let seq = &mut next_seq[usize::from(flow)];
            let mut bytes = match kind {
                Kind::Udp => packet.udp(&data),
                Kind::Echo => packet.echo(u16::from(flow), 0, &data),
                Kind::Tcp => {
                    let flags = match twist {
                        1 => tcp_flags::ACK | tcp_flags::PSH,
                        2 => tcp_flags::RST,
                        _ => tcp_flags::ACK,
                    };
                    packet.tcp_with(&Tcp { seq: *seq, flags, ..Tcp::default() }, &data)
                }
            };
            *seq = seq.wrapping_add(len as u32);
            if twist == 3 {
                // Damage after the addresses and ports, so that the packet still belongs to its flow.
                let from = if flow & 8 != 0 { 46 } else { 26 };
                let damaged = from + index.index(bytes.len() - from);
                bytes[damaged] ^= 0x20;
            }
            list.push(bytes.clone());
            coalescer.push(Bytes::from(bytes));
            if pops[at] && let Some(done) = coalescer.pop() {
                merged.push(done);
            }
        }
        coalescer.flush();
        merged.extend(std::iter::from_fn(|| coalescer.pop()));

        let mut received: BTreeMap<u8, Vec<Vec<u8>>> = BTreeMap::new();
        for done in &merged {
            let packets = split_again(done);
            prop_assert_eq!(packets.len(), done.segments());
            for bytes in packets {
                let key = FlowKey::of(&ip::parse(&bytes).unwrap());
                let is_echo = matches!(key.protocol, 1 | 58);
                let flow = if is_echo { key.src_port as u8 } else { (key.src_port - 1000) as u8 };
                received.entry(flow).or_default().push(bytes);
            }
        }
        prop_assert_eq!(received, sent);
    }

    #[test]
    fn any_bytes_pass_the_coalescer(packets in prop::collection::vec(hostile(), 0..40)) {
        let merged = coalesce_all(packets.clone());
        prop_assert_eq!(merged.iter().map(TunPacket::segments).sum::<usize>(), packets.len());
        for done in merged.iter().filter(|done| done.segments() == 1) {
            prop_assert!(packets.contains(&done.to_vec()[VNET_HDR_LEN..].to_vec()));
        }
    }
}
