//! Instructions for 50 packets through a server with 10 000 clients. Takes minutes, because all clients
//! connect first.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]
#![allow(dead_code, reason = "the other benchmarks of a tunnel need more of it")]

#[path = "../tunnel/bench_tunnel.rs"]
mod bench_tunnel;
#[path = "../tunnel/identity.rs"]
mod identity;

use std::{hint::black_box, mem::forget};

use gungraun::{library_benchmark, library_benchmark_group, main};

use bench_tunnel::BenchTunnel;

// The cost of an allocation in glibc depends on earlier frees, which vary with the random numbers of TLS.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn down(clients: u32) -> BenchTunnel {
    let mut tunnel = BenchTunnel::new(clients, 1, 1);
    tunnel.packets_down();
    tunnel
}

// See `tunnel::server_tun`.
#[library_benchmark(teardown = forget)]
#[bench::clients_10000(down(10_000))]
fn server_tun(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_tun(), tunnel)
}

// See `tunnel::server_sends`.
#[library_benchmark(teardown = forget)]
#[bench::clients_10000(down(10_000))]
fn server_sends(mut tunnel: BenchTunnel) -> (usize, BenchTunnel) {
    (black_box(&mut tunnel).server_sends(), tunnel)
}

library_benchmark_group!(name = many, benchmarks = [server_tun, server_sends]);
main!(library_benchmark_groups = many);
