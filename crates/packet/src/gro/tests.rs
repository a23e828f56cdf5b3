//! What is merged, what is not, and in which order it leaves.

use std::net::SocketAddr;

use super::*;
use mpvpn_packets::{Packet, Tcp};

fn join(packets: impl IntoIterator<Item = Vec<u8>>) -> Vec<TunPacket> {
    let mut joiner = GroCoalescer::new();
    for packet in packets {
        joiner.push(Bytes::from(packet));
    }
    joiner.flush();
    std::iter::from_fn(|| joiner.pop()).collect()
}

fn segment_counts(joined: &[TunPacket]) -> Vec<usize> {
    joined.iter().map(TunPacket::segments).collect()
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
fn segments_in_order_become_the_packet_the_sender_would_have_handed_over() {
    for base in [Packet::v4(), Packet::v6()] {
        let data: Vec<u8> = (0..10u8).flat_map(|index| [index; 100]).collect();
        let (hdr, whole) = base.tcp_super_packet(&Tcp { seq: 1000, ..Tcp::default() }, &data, 100);
        let joined = join(segments(&base, 10, unchanged));
        assert_eq!(segment_counts(&joined), [10]);
        assert_eq!(joined[0].vnet(), hdr);
        assert_eq!(joined[0].to_vec()[VNET_HDR_LEN..], whole);
        assert_eq!(joined[0].len(), VNET_HDR_LEN + whole.len());
        let slices: Vec<_> = joined[0].io_slices().collect();
        assert_eq!(slices.len(), 11);
        let written: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
        assert_eq!(written, joined[0].to_vec());
    }
}

#[test]
fn datagrams_of_equal_size_become_one_and_a_shorter_one_ends_it() {
    for base in [Packet::v4(), Packet::v6()] {
        let sizes = [200, 200, 200, 50, 200, 200, 201];
        let packets = sizes
            .iter()
            .zip(0u16..)
            .map(|(&size, index)| Packet { id: 1 + index, ..base.clone() }.udp(&vec![index as u8; size]));
        let joined = join(packets);
        assert_eq!(segment_counts(&joined), [4, 2, 1]);
        let data: Vec<u8> = [[0; 200], [1; 200], [2; 200]].concat().into_iter().chain([3; 50]).collect();
        let (hdr, whole) = base.udp_super_packet(&data, 200);
        assert_eq!(joined[0].vnet(), hdr);
        assert_eq!(joined[0].to_vec()[VNET_HDR_LEN..], whole);
        assert_eq!(joined[2].vnet(), VnetHdr::NONE);
    }
}

#[test]
fn push_and_fin_end_a_packet_and_the_flags_of_the_last_are_kept() {
    for ending in [tcp_flags::PSH, tcp_flags::FIN, tcp_flags::PSH | tcp_flags::FIN] {
        let joined = join(segments(&Packet::v4(), 5, |index, _, tcp, _| {
            if index == 2 {
                tcp.flags |= ending;
            }
        }));
        assert_eq!(segment_counts(&joined), [3, 2]);
        assert_eq!(joined[0].to_vec()[VNET_HDR_LEN + 33], tcp_flags::ACK | ending);
        assert_eq!(joined[1].to_vec()[VNET_HDR_LEN + 33], tcp_flags::ACK);
    }
}

#[test]
fn a_shorter_segment_ends_a_packet_and_a_longer_one_starts_the_next() {
    let short = join(segments(&Packet::v4(), 4, |index, _, tcp, payload| {
        if index == 1 {
            payload.truncate(60);
        } else if index > 1 {
            tcp.seq -= 40;
        }
    }));
    assert_eq!(segment_counts(&short), [2, 2]);
    let long = join(segments(&Packet::v4(), 2, |index, _, _, payload| {
        if index == 1 {
            payload.push(0);
        }
    }));
    assert_eq!(segment_counts(&long), [1, 1]);
}

#[test]
fn a_difference_in_any_header_field_that_counts_separates() {
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
            let joined = join(segments(&base, 2, |index, packet, tcp, _| {
                if index == 1 {
                    change(packet, tcp);
                }
            }));
            assert_eq!(segment_counts(&joined), [1, 1], "{name}");
        }
    }
}

#[test]
fn segments_without_data_and_with_unusual_flags_pass_alone() {
    for flags in [tcp_flags::SYN, tcp_flags::RST, tcp_flags::URG] {
        let joined = join(segments(&Packet::v4(), 3, |index, _, tcp, _| {
            if index == 1 {
                tcp.flags |= flags;
            }
        }));
        assert_eq!(segment_counts(&joined), [1, 1, 1]);
    }
    let acks = join(segments(&Packet::v4(), 3, |_, _, _, payload| payload.clear()));
    assert_eq!(segment_counts(&acks), [1, 1, 1]);
}

#[test]
fn a_reduced_window_flag_stays_on_the_first_segment() {
    let joined = join(segments(&Packet::v6(), 3, |index, _, tcp, _| {
        if index == 0 {
            tcp.flags |= tcp_flags::CWR;
        }
    }));
    assert_eq!(segment_counts(&joined), [3]);
    assert_eq!(joined[0].vnet().gso_type, vnet::GSO_TCPV6 | vnet::GSO_ECN);
}

#[test]
fn ipv4_identifications_must_count_or_stay_where_fragmenting_is_forbidden() {
    let with_ids = |ids: [u16; 4], dont_fragment: bool| {
        let base = Packet { dont_fragment, ..Packet::v4() };
        let packets = segments(&base, 4, |index, packet, _, _| packet.id = ids[usize::from(index)]);
        segment_counts(&join(packets))
    };
    assert_eq!(with_ids([u16::MAX, 0, 1, 2], true), [4]);
    assert_eq!(with_ids([5, 5, 5, 5], true), [4]);
    assert_eq!(with_ids([5, 5, 6, 7], true), [2, 2]);
    assert_eq!(with_ids([5, 6, 8, 9], true), [2, 2]);
    assert_eq!(with_ids([5, 6, 7, 8], false), [4]);
    assert_eq!(with_ids([5, 5, 5, 5], false), [1, 1, 1, 1]);
}

#[test]
fn damaged_packets_pass_alone_untouched_and_in_their_place() {
    for damaged_at in [8, 25, 60] {
        let mut packets = segments(&Packet::v4(), 5, unchanged);
        packets[2][damaged_at] ^= 1;
        let joined = join(packets.clone());
        assert_eq!(segment_counts(&joined), [2, 1, 2]);
        assert_eq!(joined[1].to_vec()[VNET_HDR_LEN..], packets[2]);
        assert_eq!(joined[1].vnet(), VnetHdr::NONE);
    }
}

#[test]
fn a_datagram_without_checksum_passes_alone() {
    let mut packets: Vec<_> = (0..3).map(|id| Packet { id, ..Packet::v4() }.udp(&[1; 100])).collect();
    packets[1][26..28].fill(0);
    assert_eq!(segment_counts(&join(packets)), [1, 1, 1]);
}

#[test]
fn interleaved_flows_are_merged_each() {
    let flows: Vec<Packet> = (0..OPEN_GROUPS as u16)
        .map(|port| Packet { src: SocketAddr::from(([10, 1, 0, 1], 1000 + port)), ..Packet::v4() })
        .collect();
    let packets: Vec<Vec<Vec<u8>>> = flows.iter().map(|base| segments(base, 6, unchanged)).collect();
    let interleaved = (0..6).flat_map(|index| packets.iter().map(move |flow| flow[index].clone()));
    let joined = join(interleaved);
    assert_eq!(segment_counts(&joined), [6; OPEN_GROUPS]);
}

#[test]
fn one_flow_too_many_closes_the_oldest_only() {
    let flow = |port: u16| {
        let base = Packet { src: SocketAddr::from(([10, 1, 0, 1], 1000 + port)), ..Packet::v4() };
        segments(&base, 2, unchanged)
    };
    let count = OPEN_GROUPS as u16 + 1;
    let firsts = (0..count).map(|port| flow(port)[0].clone());
    let seconds = (1..count).map(|port| flow(port)[1].clone());
    let counts = segment_counts(&join(firsts.chain(seconds)));
    assert_eq!(counts[0], 1);
    assert_eq!(counts[1..], [2; OPEN_GROUPS]);
}

#[test]
fn nothing_of_a_flow_overtakes_a_packet_that_cannot_be_merged() {
    let mut packets = segments(&Packet::v4(), 4, unchanged);
    let mut fragment = Packet { dont_fragment: false, ..Packet::v4() }.tcp(&[9; 64]);
    fragment[6] = 0x20;
    packets.insert(2, fragment);
    let joined = join(packets);
    assert_eq!(segment_counts(&joined), [2, 1, 2]);
}

#[test]
fn merged_packets_stay_within_the_limits() {
    let packets = (0..200u16).map(|id| Packet { id, ..Packet::v4() }.udp(&[7; 500]));
    assert_eq!(segment_counts(&join(packets)), [64, 64, 64, 8]);
    let tiny = segments(&Packet::v4(), 600, |index, _, tcp, payload| {
        tcp.seq = u32::from(index);
        payload.truncate(1);
    });
    assert_eq!(segment_counts(&join(tiny)), [256, 256, 88]);
    let large = segments(&Packet::v4(), 100, |index, _, tcp, payload| {
        tcp.seq = u32::from(index) * 1400;
        payload.resize(1400, 0);
    });
    let joined = join(large);
    assert_eq!(segment_counts(&joined), [46, 46, 8]);
    assert!(joined.iter().all(|joined| joined.len() <= VNET_HDR_LEN + MAX_PACKET));
}

#[test]
fn what_is_finished_can_be_popped_before_the_flush() {
    let mut joiner = GroCoalescer::new();
    let packets = segments(&Packet::v4(), 2, unchanged);
    joiner.push(Bytes::from(Packet::v4().echo(1, 1, b"ping")));
    joiner.push(Bytes::from(packets[0].clone()));
    joiner.push(Bytes::from(Packet::v4().echo(1, 2, b"ping")));
    assert_eq!(joiner.pop().map(|joined| joined.segments()), Some(1));
    assert!(joiner.pop().is_none(), "the first segment still waits for others");
    joiner.push(Bytes::from(packets[1].clone()));
    joiner.flush();
    assert_eq!(joiner.pop().map(|joined| joined.segments()), Some(2));
    assert_eq!(joiner.pop().map(|joined| joined.segments()), Some(1));
    assert!(joiner.pop().is_none());
}

#[test]
fn part_lists_are_used_again() {
    let mut joiner = GroCoalescer::new();
    let mut lists = Vec::new();
    for _ in 0..3 {
        for packet in segments(&Packet::v4(), 8, unchanged) {
            joiner.push(Bytes::from(packet));
        }
        joiner.flush();
        let joined = joiner.pop().unwrap();
        lists.push(joined.rest.as_ptr());
        joiner.recycle(joined);
    }
    assert!(lists.iter().all(|list| *list == lists[0]));
}

#[test]
fn what_is_no_packet_passes_too() {
    let strays = [vec![], vec![0x45], vec![0xff; 64]];
    let joined = join(strays.clone());
    for (joined, stray) in joined.iter().zip(strays) {
        assert_eq!(joined.to_vec()[VNET_HDR_LEN..], stray);
    }
    assert_eq!(joined.len(), 3);
}

/// A bare acknowledgement, with these options.
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
fn the_last_of_the_acknowledgements_that_follow_each_other_stands_for_all() {
    for base in [Packet::v4(), Packet::v6()] {
        let other = Packet { src: SocketAddr::new(base.src.ip(), 9), ..base.clone() };
        let last = ack(&base, 300, &[]);
        let joined = join([ack(&base, 100, &[]), ack(&other, 5, &[]), ack(&base, 200, &[]), last.clone()]);
        let packets: Vec<_> = joined.iter().map(|joined| joined.to_vec()[VNET_HDR_LEN..].to_vec()).collect();
        assert_eq!(packets, [last, ack(&other, 5, &[])]);
        assert_eq!(joined[0].vnet(), VnetHdr::NONE);
        // Sequence numbers wrap, and so do timestamps.
        let joined = join([
            ack(&base, u32::MAX, &timestamps(u32::MAX)),
            ack(&base, 1, &timestamps(u32::MAX)),
            ack(&base, 2, &timestamps(0)),
        ]);
        assert_eq!(joined.len(), 1);
        assert_eq!(joined[0].to_vec()[VNET_HDR_LEN..], ack(&base, 2, &timestamps(0)));
    }
}

#[test]
fn an_acknowledgement_that_says_something_of_its_own_stays() {
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
        let joined = join([first.clone(), second.clone()]);
        assert_eq!(joined.len(), 2, "{what}");
        assert_eq!(joined[0].to_vec()[VNET_HDR_LEN..], first, "{what}");
        // What comes after it does not pass it either.
        let third = ack(&base, 300, &timestamps(70));
        let all: Vec<_> = join([first.clone(), second.clone(), third.clone()])
            .iter()
            .map(|joined| joined.to_vec()[VNET_HDR_LEN..].to_vec())
            .collect();
        assert!(all == [first.clone(), second, third.clone()] || all == [first.clone(), third], "{what}");
    }
}
