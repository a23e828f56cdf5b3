//! Instructions of the operations on packet bytes: splitting, joining, checksums, flow hashes, framing.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]

mod setup;

use std::hint::black_box;

use bytes::{Bytes, BytesMut};
use gungraun::{library_benchmark, library_benchmark_group, main};
use ipnet::IpNet;
use mpvpn_masque::{
    capsule::{AssignedAddress, Capsule, CapsuleReader},
    datagram,
};
use mpvpn_packet::{
    GroCoalescer, VnetHdr, ack_filter, checksum, ip,
    mss::{self, Checksum},
    tcp_flags,
};
use mpvpn_packets::{Packet, Tcp};

use setup::TunRead;

// Split a TUN read into packets with a prefix each: 46 packets in all but the last two cases.
#[library_benchmark]
#[bench::tcp4_46_packets(TunRead::tcp4())]
#[bench::tcp6_46_packets(TunRead::tcp6())]
#[bench::udp4_46_packets(TunRead::udp4())]
#[bench::one_1392_bytes(TunRead::single(1392))]
#[bench::one_64_bytes(TunRead::single(64))]
fn split(mut tun_read: TunRead) -> (TunRead, usize) {
    let count = black_box(&mut tun_read).split();
    (tun_read, count)
}

// Join received packets to super-packets.
#[library_benchmark]
#[bench::one_flow_46_packets(setup::to_join(1, 46))]
#[bench::four_flows_46_packets_each(setup::to_join(4, 46))]
#[bench::forty_flows_4_packets_each(setup::to_join(40, 4))]
#[bench::one_packet(setup::to_join(1, 1))]
fn join((joiner, received): (GroCoalescer, Vec<Bytes>)) -> (GroCoalescer, usize) {
    setup::join(black_box(joiner), received)
}

#[library_benchmark]
#[bench::bytes_20(setup::payload(20))]
#[bench::bytes_1420(setup::payload(1420))]
#[bench::bytes_65535(setup::payload(65_535))]
fn checksum_sum(bytes: Vec<u8>) -> (u16, Vec<u8>) {
    (checksum::sum(black_box(&bytes)), bytes)
}

#[library_benchmark]
fn checksum_update() -> u16 {
    checksum::update(black_box(0x1234), black_box(0x0102), black_box(0x0504))
}

#[library_benchmark]
#[bench::tcp4(Packet::v4().tcp(b"hello"))]
#[bench::tcp6(Packet::v6().tcp(b"hello"))]
#[bench::echo4(Packet::v4().echo(7, 1, b"hello"))]
fn flow_hash(packet: Vec<u8>) -> (u32, Vec<u8>) {
    (setup::flow_hash(black_box(&packet)), packet)
}

#[library_benchmark]
#[bench::tcp4(Packet::v4().tcp(b"hello"))]
#[bench::tcp6(Packet::v6().tcp(b"hello"))]
fn ip_parse(packet: Vec<u8>) -> (usize, Vec<u8>) {
    (ip::parse(black_box(&packet)).map_or(0, |view| view.transport_offset()), packet)
}

fn syn() -> Vec<u8> {
    let options = vec![2, 4, 0x05, 0xb4, 4, 2, 1, 1];
    Packet::v4().tcp_with(&Tcp { flags: tcp_flags::SYN, options, ..Tcp::default() }, b"")
}

#[library_benchmark]
#[bench::syn(syn())]
#[bench::other(Packet::v4().tcp(b"hello"))]
fn mss_clamp(mut packet: Vec<u8>) -> (bool, Vec<u8>) {
    (mss::clamp(black_box(&mut packet), setup::MTU, Checksum::Full), packet)
}

/// An acknowledgement with timestamps.
fn ack(packet: &Packet, number: u32) -> Vec<u8> {
    let options = vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1];
    packet.tcp_with(&Tcp { ack: number, options, ..Tcp::default() }, b"")
}

// The later one of two acknowledgements, and a duplicate.
#[library_benchmark]
#[bench::later4(ack(&Packet::v4(), 200), ack(&Packet::v4(), 100))]
#[bench::later6(ack(&Packet::v6(), 200), ack(&Packet::v6(), 100))]
#[bench::duplicate4(ack(&Packet::v4(), 100), ack(&Packet::v4(), 100))]
fn ack_supersedes(later: Vec<u8>, earlier: Vec<u8>) -> bool {
    ack_filter::supersedes(black_box(&later), black_box(&earlier))
}

#[library_benchmark]
#[bench::tcp4(setup::vnet_header())]
fn vnet_parse(bytes: [u8; 10]) -> Option<VnetHdr> {
    VnetHdr::parse(black_box(&bytes)).filter(|hdr| hdr.gso().is_some())
}

#[library_benchmark]
fn datagram_prefix() -> datagram::DatagramPrefix {
    datagram::prefix(black_box(44), black_box(datagram::CONTEXT_PAYLOAD))
}

fn framed() -> Vec<u8> {
    [datagram::prefix(44, datagram::CONTEXT_PAYLOAD).as_ref(), &setup::payload(1420)].concat()
}

#[library_benchmark]
#[bench::of_a_packet(framed())]
fn datagram_parse(bytes: Vec<u8>) -> (usize, Vec<u8>) {
    (datagram::parse(black_box(&bytes)).map_or(0, |parsed| parsed.payload_at), bytes)
}

fn assignment() -> Capsule {
    let nets = ["10.0.0.2/32", "fd00::2/128"].map(|net| net.parse::<IpNet>().expect("a prefix"));
    Capsule::AddressAssign(nets.map(|net| AssignedAddress { request_id: 1, net }).to_vec())
}

#[library_benchmark]
#[bench::assignment(assignment(), BytesMut::with_capacity(256))]
fn capsule_encode(capsule: Capsule, mut out: BytesMut) -> (Capsule, BytesMut) {
    black_box(&capsule).encode(&mut out);
    (capsule, out)
}

#[library_benchmark]
#[bench::assignment(assignment().to_bytes())]
fn capsule_read(bytes: Bytes) -> (Option<Capsule>, CapsuleReader, Bytes) {
    let mut reader = CapsuleReader::new();
    reader.push(black_box(&bytes));
    let capsule = reader.next().expect("a capsule that was written by us");
    (capsule, reader, bytes)
}

library_benchmark_group!(
    name = packet,
    benchmarks = [
        split,
        join,
        checksum_sum,
        checksum_update,
        flow_hash,
        ip_parse,
        mss_clamp,
        ack_supersedes,
        vnet_parse,
        datagram_prefix,
        datagram_parse,
        capsule_encode,
        capsule_read
    ]
);
main!(library_benchmark_groups = packet);
