//! Instructions for 50 packets of 1228 bytes through a client and a server, by number of clients, links and
//! routes. Sending and receiving include QUIC and its cryptography.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]

mod bench_tunnel;
mod identity;
mod noq_pair;

use std::{hint::black_box, mem::forget};

use gungraun::{library_benchmark, library_benchmark_group, main};
use mpvpn_tunnel::{AddressPool, Addresses};

use bench_tunnel::{BenchTunnel, pool};
use noq_pair::NoqPair;

// The cost of an allocation in glibc depends on earlier frees, which vary with the random numbers of TLS.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn down(clients: u32, links: u16) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(clients, links, 1);
    tunnel.packets_down();
    tunnel
}

fn up(links: u16, routes: u32) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(1, links, routes);
    tunnel.packets_up();
    tunnel
}

fn turns(links: u16) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(1, links, 1);
    tunnel.turns();
    tunnel
}

fn noq_with_arrivals(paths: u16) -> NoqPair {
    let mut pair = NoqPair::new(paths);
    pair.turns();
    pair
}

fn unroutable(clients: u32) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(clients, 1, 1);
    tunnel.packets_to_unassigned_address();
    tunnel
}

fn sent(clients: u32) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(clients, 1, 1);
    tunnel.packets_up();
    tunnel.client_sends();
    tunnel
}

// Packets for a client are read from the server's TUN: client lookup and queueing.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(down(1, 1))]
#[bench::clients_100(down(100, 1))]
fn server_tun(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_tun(), tunnel)
}

// Packets to an unassigned address are read from the server's TUN and answered by ICMP errors.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(unroutable(1))]
#[bench::clients_100(unroutable(100))]
fn server_tun_astray(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_tun(), tunnel)
}

// Packets for a client are read from the server's TUN and sent.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(down(1, 1))]
#[bench::clients_100(down(100, 1))]
#[bench::clients_1_links_4(down(1, 4))]
fn server_sends(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_sends(), tunnel)
}

// Packets from a client are received by the server.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(sent(1))]
#[bench::clients_100(sent(100))]
fn server_receives(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_receives(), tunnel)
}

// Packets are read from the client's TUN.
#[library_benchmark(teardown = forget)]
#[bench::routes_1(up(1, 1))]
#[bench::routes_100(up(1, 100))]
#[bench::routes_6000(up(1, 6000))]
fn client_tun(mut tunnel: BenchTunnel) -> BenchTunnel {
    black_box(&mut tunnel).client_tun();
    tunnel
}

// Packets are read from the client's TUN and sent.
#[library_benchmark(teardown = forget)]
#[bench::links_1(up(1, 1))]
#[bench::links_4(up(4, 1))]
fn client_sends(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).client_sends(), tunnel)
}

// Packets arrive at the client one at a time, and each is answered by a short one: whole iterations of its
// event loop but for the kernel.
#[library_benchmark(teardown = forget)]
#[bench::links_1(turns(1))]
#[bench::links_4(turns(4))]
fn client_turns(mut tunnel: BenchTunnel) -> ((usize, usize), BenchTunnel) {
    (black_box(&mut tunnel).client_turns(), tunnel)
}

// The QUIC library alone sends datagrams of the same size: the floor of `client_sends`.
#[library_benchmark(teardown = forget)]
#[bench::paths_1(NoqPair::new(1))]
#[bench::paths_4(NoqPair::new(4))]
fn noq_sends(mut pair: NoqPair) -> (usize, NoqPair) {
    (black_box(&mut pair).client_sends(), pair)
}

// Datagrams arrive at the QUIC library alone one at a time, and each is answered by a short one: the floor of
// `client_turns`.
#[library_benchmark(teardown = forget)]
#[bench::paths_1(noq_with_arrivals(1))]
#[bench::paths_4(noq_with_arrivals(4))]
fn noq_turns(mut pair: NoqPair) -> (usize, NoqPair) {
    (black_box(&mut pair).client_turns(), pair)
}

// An address is assigned to a client: once per session.
#[library_benchmark]
#[bench::leases_1(pool(1))]
#[bench::leases_100(pool(100))]
#[bench::leases_10000(pool(10_000))]
fn pool_assign(mut pool: AddressPool) -> (Option<Addresses>, AddressPool) {
    (black_box(&mut pool).assign([255; 16], "user", &[]).ok(), pool)
}

library_benchmark_group!(
    name = tunnel,
    benchmarks = [
        server_tun,
        server_tun_astray,
        server_sends,
        server_receives,
        client_tun,
        client_sends,
        client_turns,
        noq_sends,
        noq_turns,
        pool_assign
    ]
);
main!(library_benchmark_groups = tunnel);
