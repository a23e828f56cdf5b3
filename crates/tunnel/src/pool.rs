//! Addresses of the clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{Ipv4Net, Ipv6Net};
use mpvpn_types::{ClassId, Instant};

/// Known to one client and the server; whoever shows it gets that client's addresses.
pub type SessionSecret = [u8; 16];

/// Offset in the subnet of the first address for clients: after the network's and the server's own.
const FIRST_CLIENT: u32 = 2;

/// An address of each family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// IPv4 address, unless the pool has none.
    pub v4: Option<Ipv4Addr>,
    /// IPv6 address, unless the pool has none.
    pub v6: Option<Ipv6Addr>,
}

/// All addresses of one session: those of its TUN, and further ones for classes that have a TUN of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressSet {
    all: [Addresses; Self::MAX],
    count: u8,
}

impl AddressSet {
    /// Addresses of each family that a session has, at most.
    pub const MAX: usize = ClassId::MAX as usize;

    /// The addresses of its TUN.
    pub fn first(&self) -> Addresses {
        self.all[0]
    }

    /// How many there are of each family.
    pub fn count(&self) -> usize {
        usize::from(self.count)
    }

    /// All of them, in the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.all.iter().take(self.count()).flat_map(Addresses::iter)
    }

    /// Whether `ip` is one of them.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.all.iter().take(self.count()).any(|one| one.contains(ip))
    }

    /// Adds one of each family; nothing happens if there are as many as may be.
    fn push(&mut self, more: Addresses) {
        if let Some(place) = self.all.get_mut(usize::from(self.count)) {
            *place = more;
            self.count += 1;
        }
    }
}

impl From<Addresses> for AddressSet {
    fn from(first: Addresses) -> Self {
        let mut set = Self::default();
        set.push(first);
        set
    }
}

impl Addresses {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.v4.map(IpAddr::V4).into_iter().chain(self.v6.map(IpAddr::V6))
    }

    /// Whether `ip` is one of them.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4 == Some(ip),
            IpAddr::V6(ip) => self.v6 == Some(ip),
        }
    }
}

/// No address is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("every address of the pool {0} is in use")]
pub struct PoolExhausted(Ipv4Net);

#[derive(Clone, Debug)]
struct Lease {
    addresses: AddressSet,
    user: String,
    /// Set while no client uses it.
    idle_since: Option<Instant>,
}

/// Gives addresses out, remembers whose they are, and takes the longest unused ones back when
/// none is free.
///
/// The first address of each subnet is the server's own. A client's IPv6 address has the same
/// offset in its subnet as its IPv4 address, so that people recognise it. Beyond the first one of each family a client
/// gets others only while less than half of the pool is in use: no client should have to do without because others
/// have several.
#[derive(Debug)]
pub struct AddressPool {
    v4: Ipv4Net,
    v6: Option<Ipv6Net>,
    leases: BTreeMap<SessionSecret, Lease>,
    by_offset: BTreeMap<u32, SessionSecret>,
    /// Every offset below is leased.
    unused_from: u32,
    /// Leases that no client uses, longest unused first.
    idle: BTreeSet<(Instant, SessionSecret)>,
}

impl AddressPool {
    /// A pool of the two subnets.
    pub fn new(v4: Ipv4Net, v6: Option<Ipv6Net>) -> Self {
        Self {
            v4: v4.trunc(),
            v6: v6.map(|net| net.trunc()),
            leases: BTreeMap::new(),
            by_offset: BTreeMap::new(),
            unused_from: FIRST_CLIENT,
            idle: BTreeSet::new(),
        }
    }

    /// The server's own addresses.
    pub fn own(&self) -> Addresses {
        self.at(1)
    }

    /// Length of the IPv4 prefix.
    pub fn v4_net(&self) -> Ipv4Net {
        self.v4
    }

    /// The IPv6 subnet.
    pub fn v6_net(&self) -> Option<Ipv6Net> {
        self.v6
    }

    fn at(&self, offset: u32) -> Addresses {
        Addresses {
            v4: Some(Ipv4Addr::from(u32::from(self.v4.network()).wrapping_add(offset))),
            v6: self.v6.map(|net| Ipv6Addr::from(u128::from(net.network()).wrapping_add(u128::from(offset)))),
        }
    }

    /// The last offset that a client may have: before the broadcast address.
    fn last(&self) -> u32 {
        let v4 = u32::MAX >> self.v4.prefix_len();
        let v6 = self.v6.map_or(u128::MAX, |net| u128::MAX >> net.prefix_len());
        u32::try_from(v6).unwrap_or(u32::MAX).min(v4).saturating_sub(1)
    }

    /// Clients that fit.
    pub fn capacity(&self) -> u32 {
        self.last().saturating_sub(1)
    }

    fn offset_of(&self, ip: IpAddr) -> Option<u32> {
        let offset = match ip {
            IpAddr::V4(ip) => self.v4.contains(&ip).then(|| u32::from(ip) - u32::from(self.v4.network()))?,
            IpAddr::V6(ip) => {
                let net = self.v6.filter(|net| net.contains(&ip))?;
                u32::try_from(u128::from(ip) - u128::from(net.network())).ok()?
            }
        };
        (FIRST_CLIENT..=self.last()).contains(&offset).then_some(offset)
    }

    /// The addresses that belong to `secret`, if `user` got them earlier.
    pub fn resume(&mut self, secret: &SessionSecret, user: &str) -> Option<AddressSet> {
        let lease = self.leases.get_mut(secret).filter(|lease| lease.user == user)?;
        if let Some(since) = lease.idle_since.take() {
            self.idle.remove(&(since, *secret));
        }
        Some(lease.addresses)
    }

    /// The addresses that belong to `secret`.
    pub(crate) fn addresses(&self, secret: &SessionSecret) -> Option<AddressSet> {
        self.leases.get(secret).map(|lease| lease.addresses)
    }

    /// New addresses for `user`, the preferred ones if they are free.
    ///
    /// # Errors
    /// If every address is in use.
    pub fn assign(
        &mut self,
        secret: SessionSecret,
        user: &str,
        preferred: &[IpAddr],
    ) -> Result<Addresses, PoolExhausted> {
        let addresses = self.take(secret, preferred).ok_or(PoolExhausted(self.v4))?;
        let lease = Lease { addresses: addresses.into(), user: user.to_owned(), idle_since: None };
        self.leases.insert(secret, lease);
        Ok(addresses)
    }

    /// One more address of each family for who has some, the preferred ones if they are free. Returns whether there is
    /// one.
    pub fn add(&mut self, secret: &SessionSecret, preferred: &[IpAddr]) -> bool {
        let known = self.addresses(secret).map_or(AddressSet::MAX, |all| all.count());
        // A lease that nobody uses may have several, so this is rather too much than too little.
        let in_use = self.by_offset.len().saturating_sub(self.idle.len());
        if known >= AddressSet::MAX || in_use * 2 >= self.capacity() as usize {
            return false;
        }
        let Some(more) = self.take(*secret, preferred) else { return false };
        if let Some(lease) = self.leases.get_mut(secret) {
            lease.addresses.push(more);
        }
        true
    }

    fn take(&mut self, secret: SessionSecret, preferred: &[IpAddr]) -> Option<Addresses> {
        let wish = preferred
            .iter()
            .filter_map(|ip| self.offset_of(*ip))
            .find(|offset| !self.by_offset.contains_key(offset));
        let offset = wish.or_else(|| self.free()).or_else(|| self.reclaim())?;
        self.by_offset.insert(offset, secret);
        Some(self.at(offset))
    }

    /// The lowest offset that nobody has.
    fn free(&mut self) -> Option<u32> {
        while self.by_offset.contains_key(&self.unused_from) {
            self.unused_from += 1;
        }
        (self.unused_from <= self.last()).then_some(self.unused_from)
    }

    /// Takes the longest unused lease back.
    fn reclaim(&mut self) -> Option<u32> {
        let (_, secret) = self.idle.pop_first()?;
        let lease = self.leases.remove(&secret)?;
        for offset in lease.addresses.iter().filter_map(|ip| self.offset_of(ip)).collect::<Vec<_>>() {
            self.by_offset.remove(&offset);
            self.unused_from = self.unused_from.min(offset);
        }
        self.free()
    }

    /// The client has gone; its addresses stay reserved for it while others are free.
    pub fn release(&mut self, now: Instant, secret: &SessionSecret) {
        let Some(lease) = self.leases.get_mut(secret) else { return };
        if let Some(since) = lease.idle_since.replace(now) {
            self.idle.remove(&(since, *secret));
        }
        self.idle.insert((now, *secret));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_types::Duration;

    fn pool(v4: &str) -> AddressPool {
        AddressPool::new(v4.parse().unwrap(), Some("fd00::/64".parse().unwrap()))
    }

    fn secret(n: u8) -> SessionSecret {
        [n; 16]
    }

    #[test]
    fn the_first_address_is_the_servers() {
        let mut pool = pool("10.0.0.0/24");
        assert_eq!(pool.own().v4, Some("10.0.0.1".parse().unwrap()));
        let first = pool.assign(secret(1), "a", &[]).unwrap();
        assert_eq!(first.v4, Some("10.0.0.2".parse().unwrap()));
        assert_eq!(first.v6, Some("fd00::2".parse().unwrap()));
    }

    #[test]
    fn a_client_that_returns_gets_its_addresses() {
        let mut pool = pool("10.0.0.0/24");
        let now = Instant::now();
        let mine = pool.assign(secret(1), "alice", &[]).unwrap();
        pool.release(now, &secret(1));
        let other = pool.assign(secret(2), "bob", &[]).unwrap();
        assert_ne!(mine, other);
        assert_eq!(pool.resume(&secret(1), "alice"), Some(mine.into()));
        assert_eq!(pool.resume(&secret(1), "bob"), None, "a secret is of no use to another user");
        assert_eq!(pool.resume(&secret(9), "alice"), None);
    }

    #[test]
    fn a_wish_is_granted_only_if_the_address_is_free() {
        let mut pool = pool("10.0.0.0/24");
        let wish: IpAddr = "10.0.0.77".parse().unwrap();
        let first = pool.assign(secret(1), "a", &[wish]).unwrap();
        assert_eq!(first.v4.map(IpAddr::V4), Some(wish));
        let second = pool.assign(secret(2), "a", &[wish]).unwrap();
        assert_ne!(second.v4, first.v4);
        for bad in ["10.0.0.1", "10.0.0.0", "10.0.0.255", "192.0.2.1"] {
            let got = pool.assign(secret(3), "a", &[bad.parse().unwrap()]).unwrap();
            assert_ne!(got.v4.map(IpAddr::V4), Some(bad.parse().unwrap()));
        }
    }

    #[test]
    fn a_full_pool_takes_unused_addresses_back_and_only_those() {
        let mut pool = pool("10.0.0.0/29");
        assert_eq!(pool.capacity(), 5);
        for n in 0..5 {
            pool.assign(secret(n), "a", &[]).unwrap();
        }
        assert!(pool.assign(secret(9), "a", &[]).is_err());
        let now = Instant::now();
        pool.release(now + Duration::from_secs(5), &secret(1));
        pool.release(now, &secret(3));
        let got = pool.assign(secret(9), "a", &[]).unwrap();
        assert_eq!(got.v4, Some("10.0.0.5".parse().unwrap()), "the one unused for longest");
        assert_eq!(pool.resume(&secret(3), "a"), None);
    }

    #[test]
    fn a_large_subnet_holds_more_than_254_clients() {
        let mut pool = pool("10.0.0.0/16");
        let mut seen = BTreeSet::new();
        for n in 0..1000u128 {
            let addresses = pool.assign(n.to_be_bytes(), "a", &[]).unwrap();
            assert!(seen.insert(addresses.v4), "{addresses:?} given out twice");
        }
    }

    #[test]
    fn addresses_that_were_wished_for_are_passed_over() {
        let mut pool = pool("10.0.0.0/29");
        for (n, wish) in [(1, "10.0.0.3"), (2, "10.0.0.2")] {
            pool.assign(secret(n), "a", &[wish.parse().unwrap()]).unwrap();
        }
        let rest: Vec<_> = (3..6).map(|n| pool.assign(secret(n), "a", &[]).unwrap().v4.unwrap()).collect();
        assert_eq!(rest, ["10.0.0.4", "10.0.0.5", "10.0.0.6"].map(|ip| ip.parse::<Ipv4Addr>().unwrap()));
        assert!(pool.assign(secret(6), "a", &[]).is_err());
    }

    #[test]
    fn a_client_that_came_back_does_not_lose_its_addresses() {
        let mut pool = pool("10.0.0.0/30");
        let now = Instant::now();
        let mine = pool.assign(secret(1), "a", &[]).unwrap();
        for _ in 0..3 {
            pool.release(now, &secret(1));
            assert_eq!(pool.resume(&secret(1), "a"), Some(mine.into()));
        }
        assert!(pool.assign(secret(2), "a", &[]).is_err(), "an address in use was given away");
        pool.release(now, &secret(1));
        pool.release(now + Duration::from_secs(1), &secret(1));
        assert_eq!(pool.assign(secret(2), "a", &[]).unwrap(), mine);
        assert!(pool.assign(secret(3), "a", &[]).is_err());
    }

    #[test]
    fn further_addresses_go_with_the_first_and_never_take_the_last_half() {
        let mut pool = pool("10.0.0.0/28");
        let now = Instant::now();
        assert!(!pool.add(&secret(1), &[]), "who has none gets no further one");
        pool.assign(secret(1), "a", &[]).unwrap();
        assert!(pool.add(&secret(1), &["fd00::9".parse().unwrap()]));
        assert!(pool.add(&secret(1), &[]));
        let all = pool.addresses(&secret(1)).unwrap();
        let expected = ["10.0.0.2", "fd00::2", "10.0.0.9", "fd00::9", "10.0.0.3", "fd00::3"];
        assert_eq!(all.iter().map(|ip| ip.to_string()).collect::<Vec<_>>(), expected);
        assert_eq!((all.count(), all.first().v4), (3, Some("10.0.0.2".parse().unwrap())));
        assert!(all.contains("fd00::9".parse().unwrap()) && !all.contains("10.0.0.4".parse().unwrap()));
        while pool.add(&secret(1), &[]) {}
        assert_eq!(pool.addresses(&secret(1)).unwrap().count(), 7, "13 fit");
        for n in 2..8 {
            pool.assign(secret(n), "a", &[]).unwrap();
            assert!(!pool.add(&secret(n), &[]));
        }
        assert!(pool.assign(secret(8), "a", &[]).is_err());
        pool.release(now, &secret(1));
        assert_eq!(pool.resume(&secret(1), "a").unwrap().count(), 7);
        pool.release(now, &secret(1));
        for n in 8..15 {
            pool.assign(secret(n), "a", &[]).unwrap();
        }
        assert!(pool.assign(secret(15), "a", &[]).is_err(), "all of its addresses went to others");
    }

    #[test]
    fn a_session_has_so_many_addresses_at_most() {
        let mut pool = pool("10.0.0.0/16");
        pool.assign(secret(1), "a", &[]).unwrap();
        assert_eq!((0..100).filter(|_| pool.add(&secret(1), &[])).count(), AddressSet::MAX - 1);
    }
}
