//! The way of 50 packets of 1228 bytes, one after the other, through a client and a server, and how it grows with
//! clients, links and routes. What sends and receives includes QUIC and its cryptography.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]

mod identity;
mod site;

use std::{hint::black_box, mem::forget};

use gungraun::{library_benchmark, library_benchmark_group, main};
use mpvpn_tunnel::{AddressPool, Addresses};

use site::{Site, pool};

// What an allocation of glibc costs depends on all that were freed before, and random numbers of TLS change those.
#[global_allocator]
static STEADY: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn down(clients: u32, links: u16) -> Site {
    let mut site = Site::new(clients, links, 1);
    site.packets_down();
    site
}

fn up(links: u16, routes: u32) -> Site {
    let mut site = Site::new(1, links, routes);
    site.packets_up();
    site
}

fn astray(clients: u32) -> Site {
    let mut site = Site::new(clients, 1, 1);
    site.packets_astray();
    site
}

fn sent(clients: u32) -> Site {
    let mut site = Site::new(clients, 1, 1);
    site.packets_up();
    site.client_sends();
    site
}

// Packets for a client are read from the TUN: the client is looked up, and they wait for a path.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(down(1, 1))]
#[bench::clients_100(down(100, 1))]
fn server_tun(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_tun(), site)
}

// Packets for nobody are answered.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(astray(1))]
#[bench::clients_100(astray(100))]
fn server_tun_astray(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_tun(), site)
}

// Packets for a client are read from the TUN and sent.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(down(1, 1))]
#[bench::clients_100(down(100, 1))]
#[bench::clients_1_links_4(down(1, 4))]
fn server_sends(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_sends(), site)
}

// Packets from a client arrive.
#[library_benchmark(teardown = forget)]
#[bench::clients_1(sent(1))]
#[bench::clients_100(sent(100))]
fn server_receives(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).server_receives(), site)
}

// Packets of the client's machine are read from its TUN.
#[library_benchmark(teardown = forget)]
#[bench::routes_1(up(1, 1))]
#[bench::routes_100(up(1, 100))]
#[bench::routes_6000(up(1, 6000))]
fn client_tun(mut site: Site) -> Site {
    black_box(&mut site).client_tun();
    site
}

// Packets of the client's machine are read from its TUN and sent.
#[library_benchmark(teardown = forget)]
#[bench::links_1(up(1, 1))]
#[bench::links_4(up(4, 1))]
fn client_sends(mut site: Site) -> (usize, Site) {
    (black_box(&mut site).client_sends(), site)
}

// A client gets its address: once a session, not once a packet.
#[library_benchmark]
#[bench::leases_1(pool(1))]
#[bench::leases_100(pool(100))]
#[bench::leases_10000(pool(10_000))]
fn pool_assign(mut pool: AddressPool) -> (Option<Addresses>, AddressPool) {
    (black_box(&mut pool).assign([255; 16], "user", &[]).ok(), pool)
}

library_benchmark_group!(
    name = tunnel,
    benchmarks =
        [server_tun, server_tun_astray, server_sends, server_receives, client_tun, client_sends, pool_assign]
);
main!(library_benchmark_groups = tunnel);
