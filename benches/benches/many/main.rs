//! 50 packets through a server with 10 000 clients. Takes minutes, because all of them connect first.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]
#![allow(dead_code, reason = "the other benchmarks of a tunnel need more of it")]

#[path = "../tunnel/identity.rs"]
mod identity;
#[path = "../tunnel/site.rs"]
mod site;

use std::{hint::black_box, mem::forget};

use gungraun::{library_benchmark, library_benchmark_group, main};

use site::Site;

// What an allocation of glibc costs depends on all that were freed before, and random numbers of TLS change those.
#[global_allocator]
static STEADY: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn down(clients: u32) -> Site {
    let mut site = Site::new(clients, 1, 1);
    site.packets_down();
    site
}

// See `tunnel::server_tun`.
#[library_benchmark(teardown = forget)]
#[bench::clients_10000(down(10_000))]
fn server_tun(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_tun(), site)
}

// See `tunnel::server_sends`.
#[library_benchmark(teardown = forget)]
#[bench::clients_10000(down(10_000))]
fn server_sends(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_sends(), site)
}

library_benchmark_group!(name = many, benchmarks = [server_tun, server_sends]);
main!(library_benchmark_groups = many);
