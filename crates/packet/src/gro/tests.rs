//! Which packets are merged, which are not, and in which order they leave.

use std::net::SocketAddr;

use super::*;
use mpvpn_packets::{Packet, Tcp};

fn coalesce(packets: impl IntoIterator<Item = Vec<u8>>) -> Vec<TunPacket> {
    let mut coalescer = GroCoalescer::new();
    for packet in packets {
        coalescer.push(Bytes::from(packet));
    }
    coalescer.flush();
    std::iter::from_fn(|| coalescer.pop()).collect()
}

fn segment_counts(merged: &[TunPacket]) -> Vec<usize> {
    merged.iter().map(TunPacket::segments).collect()
}

/// Consecutive segments of 100 bytes with counting identifications, each changed by `change`.
fn segments(
    base: &Packet,
    count: u16,
    change: impl Fn(u16, &mut Packet, &mut Tcp, &mut Vec<u8>),
) -> Vec<Vec<u8>> {
    let make = |index: u16| {
        let mut packet = Packet { id: base.id.wrapping_add(index), ..base.clone() };
        let mut tcp = Tcp { seq: 1000 + 100 * u32::from(index), ..Tcp::default() };
        let mut payload = vec![index as u8; 100];
        change(index, &mut packet, &mut tcp, &mut payload);
        packet.tcp_with(&tcp, &payload)
    };
    (0..count).map(make).collect()
}

fn unchanged(_: u16, _: &mut Packet, _: &mut Tcp, _: &mut Vec<u8>) {}

#[test]
fn segments_in_order_become_the_super_packet_of_the_sender() {
    for base in [Packet::v4(), Packet::v6()] {
        let data: Vec<u8> = (0..10u8).flat_map(|index| [index; 100]).collect();
        let (hdr, whole) = base.tcp_super_packet(&Tcp { seq: 1000, ..Tcp::default() }, &data, 100);
        let merged = coalesce(segments(&base, 10, unchanged));
        assert_eq!(segment_counts(&merged), [10]);
        assert_eq!(merged[0].vnet(), hdr);
        assert_eq!(merged[0].to_vec()[VNET_HDR_LEN..], whole);
        assert_eq!(merged[0].len(), VNET_HDR_LEN + whole.len());
        let slices: Vec<_> = merged[0].io_slices().collect();
        assert_eq!(slices.len(), 11);
        let written: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
        assert_eq!(written, merged[0].to_vec());
    }
}

#[test]
fn segments_of_a_size_that_nobody_splits_again_are_not_merged() {
    for (len, counts) in [(7u32, vec![1, 1, 1]), (8, vec![3])] {
        let merged = coalesce(segments(&Packet::v4(), 3, |index, _, tcp, payload| {
            tcp.seq = 1000 + len * u32::from(index);
            payload.truncate(len as usize);
        }));
        assert_eq!(segment_counts(&merged), counts, "{len} bytes");
    }
}

#[test]
fn datagrams_of_equal_size_are_merged_and_a_shorter_one_ends_the_packet() {
    for base in [Packet::v4(), Packet::v6()] {
        let sizes = [200, 200, 200, 50, 200, 200, 201];
        let packets = sizes
            .iter()
            .zip(0u16..)
            .map(|(&size, index)| Packet { id: 1 + index, ..base.clone() }.udp(&vec![index as u8; size]));
        let merged = coalesce(packets);
        assert_eq!(segment_counts(&merged), [4, 2, 1]);
        let data: Vec<u8> = [[0; 200], [1; 200], [2; 200]].concat().into_iter().chain([3; 50]).collect();
        let (hdr, whole) = base.udp_super_packet(&data, 200);
        assert_eq!(merged[0].vnet(), hdr);
        assert_eq!(merged[0].to_vec()[VNET_HDR_LEN..], whole);
        assert_eq!(merged[2].vnet(), VnetHdr::NONE);
    }
}

#[test]
fn push_and_fin_end_a_packet_and_the_flags_of_the_last_are_kept() {
    for ending in [tcp_flags::PSH, tcp_flags::FIN, tcp_flags::PSH | tcp_flags::FIN] {
        let merged = coalesce(segments(&Packet::v4(), 5, |index, _, tcp, _| {
            if index == 2 {
                tcp.flags |= ending;
            }
        }));
        assert_eq!(segment_counts(&merged), [3, 2]);
        assert_eq!(merged[0].to_vec()[VNET_HDR_LEN + 33], tcp_flags::ACK | ending);
        assert_eq!(merged[1].to_vec()[VNET_HDR_LEN + 33], tcp_flags::ACK);
    }
}

#[test]
fn a_shorter_segment_ends_a_packet_and_a_longer_one_starts_the_next() {
    let short = coalesce(segments(&Packet::v4(), 4, |index, _, tcp, payload| {
        if index == 1 {
            payload.truncate(60);
        } else if index > 1 {
            tcp.seq -= 40;
        }
    }));
    assert_eq!(segment_counts(&short), [2, 2]);
    let long = coalesce(segments(&Packet::v4(), 2, |index, _, _, payload| {
        if index == 1 {
            payload.push(0);
        }
    }));
    assert_eq!(segment_counts(&long), [1, 1]);
}

#[test]
fn a_difference_in_a_relevant_header_field_prevents_merging() {
    type Change = fn(&mut Packet, &mut Tcp);
    let changes: [(&str, Change); 8] = [
        ("acknowledgement", |_, tcp| tcp.ack += 1),
        ("window", |_, tcp| tcp.window += 1),
        ("echo flag", |_, tcp| tcp.flags |= tcp_flags::ECE),
        ("options", |_, tcp| tcp.options = vec![1, 1, 1, 1]),
        ("sequence", |_, tcp| tcp.seq += 1),
        ("window reduced", |_, tcp| tcp.flags |= tcp_flags::CWR),
        ("hop count", |packet, _| packet.ttl -= 1),
        ("type of service", |packet, _| packet.tos = 3),
    ];
    for base in [Packet::v4(), Packet::v6()] {
        for (name, change) in changes {
            let merged = coalesce(segments(&base, 2, |index, packet, tcp, _| {
                if index == 1 {
                    change(packet, tcp);
                }
            }));
            assert_eq!(segment_counts(&merged), [1, 1], "{name}");
        }
    }
}

#[test]
fn segments_without_data_and_with_unusual_flags_pass_alone() {
    for flags in [tcp_flags::SYN, tcp_flags::RST, tcp_flags::URG] {
        let merged = coalesce(segments(&Packet::v4(), 3, |index, _, tcp, _| {
            if index == 1 {
                tcp.flags |= flags;
            }
        }));
        assert_eq!(segment_counts(&merged), [1, 1, 1]);
    }
    let acks = coalesce(segments(&Packet::v4(), 3, |_, _, _, payload| payload.clear()));
    assert_eq!(segment_counts(&acks), [1, 1, 1]);
}

#[test]
fn a_reduced_window_flag_stays_on_the_first_segment() {
    let merged = coalesce(segments(&Packet::v6(), 3, |index, _, tcp, _| {
        if index == 0 {
            tcp.flags |= tcp_flags::CWR;
        }
    }));
    assert_eq!(segment_counts(&merged), [3]);
    assert_eq!(merged[0].vnet().gso_type, vnet::GSO_TCPV6 | vnet::GSO_ECN);
}

#[test]
fn ipv4_identifications_must_increment_or_with_dont_fragment_stay_equal() {
    let with_ids = |ids: [u16; 4], dont_fragment: bool| {
        let base = Packet { dont_fragment, ..Packet::v4() };
        let packets = segments(&base, 4, |index, packet, _, _| packet.id = ids[usize::from(index)]);
        segment_counts(&coalesce(packets))
    };
    assert_eq!(with_ids([u16::MAX, 0, 1, 2], true), [4]);
    assert_eq!(with_ids([5, 5, 5, 5], true), [4]);
    assert_eq!(with_ids([5, 5, 6, 7], true), [2, 2]);
    assert_eq!(with_ids([5, 6, 8, 9], true), [2, 2]);
    assert_eq!(with_ids([5, 6, 7, 8], false), [4]);
    assert_eq!(with_ids([5, 5, 5, 5], false), [1, 1, 1, 1]);
}

#[test]
fn damaged_packets_pass_unmerged_unchanged_and_in_order() {
    for damaged_at in [8, 25, 60] {
        let mut packets = segments(&Packet::v4(), 5, unchanged);
        packets[2][damaged_at] ^= 1;
        let merged = coalesce(packets.clone());
        assert_eq!(segment_counts(&merged), [2, 1, 2]);
        assert_eq!(merged[1].to_vec()[VNET_HDR_LEN..], packets[2]);
        assert_eq!(merged[1].vnet(), VnetHdr::NONE);
    }
}

#[test]
fn a_datagram_without_checksum_passes_alone() {
    let mut packets: Vec<_> = (0..3).map(|id| Packet { id, ..Packet::v4() }.udp(&[1; 100])).collect();
    packets[1][26..28].fill(0);
    assert_eq!(segment_counts(&coalesce(packets)), [1, 1, 1]);
}

#[test]
fn each_of_interleaved_flows_is_merged() {
    let flows: Vec<Packet> = (0..MAX_OPEN_GROUPS as u16)
        .map(|port| Packet { src: SocketAddr::from(([10, 1, 0, 1], 1000 + port)), ..Packet::v4() })
        .collect();
    let packets: Vec<Vec<Vec<u8>>> = flows.iter().map(|base| segments(base, 6, unchanged)).collect();
    let interleaved = (0..6).flat_map(|index| packets.iter().map(move |flow| flow[index].clone()));
    let merged = coalesce(interleaved);
    assert_eq!(segment_counts(&merged), [6; MAX_OPEN_GROUPS]);
}

#[test]
fn a_flow_beyond_the_maximum_closes_only_the_oldest_group() {
    let flow = |port: u16| {
        let base = Packet { src: SocketAddr::from(([10, 1, 0, 1], 1000 + port)), ..Packet::v4() };
        segments(&base, 2, unchanged)
    };
    let count = MAX_OPEN_GROUPS as u16 + 1;
    let firsts = (0..count).map(|port| flow(port)[0].clone());
    let seconds = (1..count).map(|port| flow(port)[1].clone());
    let counts = segment_counts(&coalesce(firsts.chain(seconds)));
    assert_eq!(counts[0], 1);
    assert_eq!(counts[1..], [2; MAX_OPEN_GROUPS]);
}

#[test]
fn no_packet_of_a_flow_overtakes_one_that_cannot_be_merged() {
    let mut packets = segments(&Packet::v4(), 4, unchanged);
    let mut fragment = Packet { dont_fragment: false, ..Packet::v4() }.tcp(&[9; 64]);
    fragment[6] = 0x20;
    packets.insert(2, fragment);
    let merged = coalesce(packets);
    assert_eq!(segment_counts(&merged), [2, 1, 2]);
}

#[test]
fn merged_packets_stay_within_the_limits() {
    let packets = (0..200u16).map(|id| Packet { id, ..Packet::v4() }.udp(&[7; 500]));
    assert_eq!(segment_counts(&coalesce(packets)), [64, 64, 64, 8]);
    let tiny = segments(&Packet::v4(), 600, |index, _, tcp, payload| {
        tcp.seq = u32::from(index) * 8;
        payload.truncate(8);
    });
    assert_eq!(segment_counts(&coalesce(tiny)), [256, 256, 88]);
    let large = segments(&Packet::v4(), 100, |index, _, tcp, payload| {
        tcp.seq = u32::from(index) * 1400;
        payload.resize(1400, 0);
    });
    let merged = coalesce(large);
    assert_eq!(segment_counts(&merged), [46, 46, 8]);
    assert!(merged.iter().all(|merged| merged.len() <= VNET_HDR_LEN + MAX_PACKET));
}

#[test]
fn finished_packets_can_be_popped_before_the_flush() {
    let mut coalescer = GroCoalescer::new();
    let packets = segments(&Packet::v4(), 2, unchanged);
    coalescer.push(Bytes::from(Packet::v4().echo(1, 1, b"ping")));
    coalescer.push(Bytes::from(packets[0].clone()));
    coalescer.push(Bytes::from(Packet::v4().echo(1, 2, b"ping")));
    assert_eq!(coalescer.pop().map(|merged| merged.segments()), Some(1));
    assert!(coalescer.pop().is_none(), "the first segment still waits for others");
    coalescer.push(Bytes::from(packets[1].clone()));
    coalescer.flush();
    assert_eq!(coalescer.pop().map(|merged| merged.segments()), Some(2));
    assert_eq!(coalescer.pop().map(|merged| merged.segments()), Some(1));
    assert!(coalescer.pop().is_none());
}

#[test]
fn part_lists_are_reused() {
    let mut coalescer = GroCoalescer::new();
    let mut lists = Vec::new();
    for _ in 0..3 {
        for packet in segments(&Packet::v4(), 8, unchanged) {
            coalescer.push(Bytes::from(packet));
        }
        coalescer.flush();
        let merged = coalescer.pop().unwrap();
        lists.push(merged.rest.as_ptr());
        coalescer.recycle(merged);
    }
    assert!(lists.iter().all(|list| *list == lists[0]));
}

#[test]
fn bytes_that_are_no_ip_packet_pass_unchanged() {
    let strays = [vec![], vec![0x45], vec![0xff; 64]];
    let merged = coalesce(strays.clone());
    for (merged, stray) in merged.iter().zip(strays) {
        assert_eq!(merged.to_vec()[VNET_HDR_LEN..], stray);
    }
    assert_eq!(merged.len(), 3);
}

/// A pure acknowledgement with these options.
fn ack(base: &Packet, number: u32, options: &[u8]) -> Vec<u8> {
    base.tcp_with(&Tcp { ack: number, options: options.to_vec(), ..Tcp::default() }, b"")
}

fn timestamps(value: u32) -> Vec<u8> {
    let mut options = vec![1, 1, 8, 10];
    options.extend_from_slice(&value.to_be_bytes());
    options.extend_from_slice(&7u32.to_be_bytes());
    options
}

#[test]
fn of_consecutive_pure_acknowledgements_only_the_last_is_kept() {
    for base in [Packet::v4(), Packet::v6()] {
        let other = Packet { src: SocketAddr::new(base.src.ip(), 9), ..base.clone() };
        let last = ack(&base, 300, &[]);
        let merged =
            coalesce([ack(&base, 100, &[]), ack(&other, 5, &[]), ack(&base, 200, &[]), last.clone()]);
        let packets: Vec<_> = merged.iter().map(|merged| merged.to_vec()[VNET_HDR_LEN..].to_vec()).collect();
        assert_eq!(packets, [last, ack(&other, 5, &[])]);
        assert_eq!(merged[0].vnet(), VnetHdr::NONE);
        // Sequence numbers wrap, and so do timestamps.
        let merged = coalesce([
            ack(&base, u32::MAX, &timestamps(u32::MAX)),
            ack(&base, 1, &timestamps(u32::MAX)),
            ack(&base, 2, &timestamps(0)),
        ]);
        assert_eq!(merged.len(), 1);
        assert_eq!(merged[0].to_vec()[VNET_HDR_LEN..], ack(&base, 2, &timestamps(0)));
    }
}

#[test]
fn an_acknowledgement_with_other_differences_is_kept() {
    let base = Packet::v4();
    let first = ack(&base, 100, &timestamps(50));
    let with = |change: fn(&mut Packet, &mut Tcp)| {
        let (mut packet, mut tcp) =
            (base.clone(), Tcp { ack: 200, options: timestamps(60), ..Tcp::default() });
        change(&mut packet, &mut tcp);
        packet.tcp_with(&tcp, b"")
    };
    let mut damaged = with(|_, _| {});
    *damaged.last_mut().unwrap() ^= 1;
    for (what, second) in [
        ("the same byte again", with(|_, tcp| tcp.ack = 100)),
        ("an older one", with(|_, tcp| tcp.ack = 99)),
        ("an older timestamp", with(|_, tcp| tcp.options = timestamps(49))),
        ("no timestamps", with(|_, tcp| tcp.options.clear())),
        ("selective acknowledgements", with(|_, tcp| tcp.options.splice(..4, [1, 1, 5, 10]).for_each(drop))),
        ("a keep-alive", with(|_, tcp| tcp.seq = 0)),
        ("an end", with(|_, tcp| tcp.flags |= tcp_flags::FIN)),
        ("a mark of congestion", with(|_, tcp| tcp.flags |= tcp_flags::ECE)),
        ("another service", with(|packet, _| packet.tos = 3)),
        ("damage", damaged),
        ("data", base.tcp_with(&Tcp { ack: 200, ..Tcp::default() }, b"data")),
    ] {
        let merged = coalesce([first.clone(), second.clone()]);
        assert_eq!(merged.len(), 2, "{what}");
        assert_eq!(merged[0].to_vec()[VNET_HDR_LEN..], first, "{what}");
        // Later packets do not overtake it either.
        let third = ack(&base, 300, &timestamps(70));
        let all: Vec<_> = coalesce([first.clone(), second.clone(), third.clone()])
            .iter()
            .map(|merged| merged.to_vec()[VNET_HDR_LEN..].to_vec())
            .collect();
        assert!(all == [first.clone(), second, third.clone()] || all == [first.clone(), third], "{what}");
    }
}
