//! A pool of addresses for a whole site: assignment, release, resumption.

use std::{collections::BTreeSet, net::IpAddr};

use mpvpn_tunnel::{AddressPool, SessionSecret};
use mpvpn_types::{Duration, Instant};

fn pool(v4: &str) -> AddressPool {
    AddressPool::new(v4.parse().unwrap(), Some("fd00::/64".parse().unwrap()))
}

fn secret(n: u32) -> SessionSecret {
    u128::from(n).to_be_bytes()
}

#[test]
fn sixty_thousand_clients_get_different_addresses_and_return_to_them() {
    let mut pool = pool("10.0.0.0/16");
    let now = Instant::now();
    let all: Vec<_> = (0..60_000).map(|n| pool.assign(secret(n), "a", &[]).unwrap()).collect();
    assert_eq!(all.iter().filter_map(|addresses| addresses.v4).collect::<BTreeSet<_>>().len(), all.len());
    assert_eq!(all.iter().filter_map(|addresses| addresses.v6).collect::<BTreeSet<_>>().len(), all.len());
    for n in 0..60_000 {
        pool.release(now + Duration::from_millis(n.into()), &secret(n));
    }
    for n in (0..60_000).rev() {
        assert_eq!(pool.resume(&secret(n), "a"), Some(all[n as usize].into()));
    }
}

#[test]
fn a_pool_that_is_exhausted_again_and_again_takes_back_the_longest_unused_each_time() {
    let mut pool = pool("10.0.0.0/20");
    let room = pool.capacity();
    let now = Instant::now();
    for n in 0..room {
        pool.assign(secret(n), "a", &[]).unwrap();
    }
    for round in 1..4 {
        assert!(pool.assign(secret(u32::MAX), "a", &[]).is_err(), "all are in use");
        let before: Vec<_> =
            (0..room).map(|n| pool.resume(&secret((round - 1) * room + n), "a").unwrap()).collect();
        for n in 0..room {
            // Released in reverse order, so that the last one is unused for longest.
            let at = now + Duration::from_millis((round * room + room - n).into());
            pool.release(at, &secret((round - 1) * room + n));
        }
        for n in 0..room {
            let got = pool.assign(secret(round * room + n), "a", &[]).unwrap();
            assert_eq!(got, before[(room - 1 - n) as usize].first(), "round {round}");
        }
        assert_eq!(pool.resume(&secret((round - 1) * room), "a"), None, "it belongs to somebody else");
    }
}

#[test]
fn wishes_leave_no_address_out_and_give_none_twice() {
    let mut pool = pool("10.0.0.0/24");
    let mut seen = BTreeSet::new();
    for n in 0..pool.capacity() {
        // Every other client wishes for an address from the upper half, some of them for a taken one.
        let wish: IpAddr = [10, 0, 0, 128 + (n % 100) as u8].into();
        let wishes = if n % 2 == 0 { vec![wish] } else { Vec::new() };
        let got = pool.assign(secret(n), "a", &wishes).unwrap();
        assert!(seen.insert(got.v4), "{got:?} given out twice");
    }
    assert_eq!(seen.len() as u32, pool.capacity());
    assert!(pool.assign(secret(u32::MAX), "a", &[]).is_err());
}
