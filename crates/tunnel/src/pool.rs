//! The pool of tunnel addresses that a server assigns to clients.
//!
//! In: subnets, and requests for addresses with the secret of a session. Out: addresses. Always holds: an
//! address belongs to at most one session; the pool is bounded by the subnets, and by the IPv4 addresses
//! outside of them that belong to users.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{Ipv4Net, Ipv6Net};
use mpvpn_types::{ClassId, Instant};

/// The secret of a session: a client that presents it gets the addresses of the session.
pub type SessionSecret = [u8; 16];

/// Offset in the subnet of the first client address: after the network address (0) and the server's address
/// (1).
const FIRST_CLIENT_OFFSET: u32 = 2;

/// An IPv4 and an IPv6 address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// IPv4 address, unless the pool has none.
    pub v4: Option<Ipv4Addr>,
    /// IPv6 address, unless the pool has none.
    pub v6: Option<Ipv6Addr>,
}

/// All addresses of one session: those of its TUN device, and further ones for classes with TUN devices of
/// their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressSet {
    all: [Addresses; Self::MAX],
    count: u8,
}

impl AddressSet {
    /// Maximum number of addresses of each family in a session: one for each class.
    pub const MAX: usize = ClassId::MAX as usize;

    /// Returns the addresses of the session's main TUN device.
    pub fn first(&self) -> Addresses {
        self.all[0]
    }

    /// Returns the addresses of this number, counted from 0 in the order of assignment, if there are such.
    pub fn get(&self, number: u8) -> Option<Addresses> {
        self.all.get(usize::from(number)).filter(|_| number < self.count).copied()
    }

    /// Returns the number of addresses of each family.
    pub fn count(&self) -> usize {
        usize::from(self.count)
    }

    /// Returns all addresses in the order of their assignment.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.all.iter().take(self.count()).flat_map(Addresses::iter)
    }

    /// Whether `ip` is one of them.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.all.iter().take(self.count()).any(|one| one.contains(ip))
    }

    /// Adds an address of each family; does nothing if there are [`Self::MAX`].
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
    /// Returns the addresses.
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

/// The error that no address of a pool is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all addresses of the pool {0} are in use: use a larger subnet, or disconnect clients")]
pub struct PoolExhausted(Ipv4Net);

/// A lease as a server keeps it across restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The secret of its session.
    pub secret: SessionSecret,
    /// The user to whom the addresses were assigned.
    pub user: String,
    /// One address of each pair of an IPv4 and an IPv6 address with the same offset, in the order of their
    /// assignment.
    pub addresses: Vec<IpAddr>,
    /// When the last client of the session left; `None` while a client uses the lease.
    pub idle_since: Option<Instant>,
}

/// Why a lease cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// It has no address, or too many.
    #[error("it has {0} addresses")]
    AddressCount(usize),
    /// An address is not one for clients.
    #[error("{0} is not an address for clients of this server")]
    OutsideOfPool(IpAddr),
    /// Another lease has the address or the secret.
    #[error("another lease has {0}")]
    Taken(IpAddr),
}

/// The leases of one user.
#[derive(Clone, Debug, Default)]
struct UserLeases {
    count: usize,
    /// Those that no client uses, the longest unused first.
    idle: BTreeSet<(Instant, SessionSecret)>,
}

#[derive(Clone, Debug)]
struct Lease {
    addresses: AddressSet,
    user: String,
    /// When the last client of the session left; `None` while a client uses the lease.
    idle_since: Option<Instant>,
}

/// The pool of addresses. It assigns addresses, remembers to which session they belong, and evicts the lease
/// that was unused for the longest time when no address is free: one of the same user, if there is one.
///
/// The first address of each subnet is that of the server. The IPv6 address of a client has the same offset
/// in its subnet as the IPv4 address, so that people recognise it. A client gets more than one address of
/// each family only while less than half of the pool is in use, so that further clients can still connect.
#[derive(Clone, Debug)]
pub struct AddressPool {
    v4: Ipv4Net,
    v6: Option<Ipv6Net>,
    leases: BTreeMap<SessionSecret, Lease>,
    by_offset: BTreeMap<u32, SessionSecret>,
    /// Whom an offset belongs to: nobody else gets it.
    fixed: BTreeMap<u32, String>,
    /// All offsets below this one are leased or fixed.
    unused_from: u32,
    /// Leases that no client uses, the longest unused first.
    idle: BTreeSet<(Instant, SessionSecret)>,
    /// Users with leases.
    users: BTreeMap<String, UserLeases>,
}

impl AddressPool {
    /// Creates a pool of the two subnets.
    pub fn new(v4: Ipv4Net, v6: Option<Ipv6Net>) -> Self {
        Self {
            v4: v4.trunc(),
            v6: v6.map(|net| net.trunc()),
            leases: BTreeMap::new(),
            by_offset: BTreeMap::new(),
            fixed: BTreeMap::new(),
            unused_from: FIRST_CLIENT_OFFSET,
            idle: BTreeSet::new(),
            users: BTreeMap::new(),
        }
    }

    /// Returns the addresses of the server.
    pub fn server_addresses(&self) -> Addresses {
        self.addresses_at(1)
    }

    /// Returns the IPv4 subnet.
    pub fn v4_net(&self) -> Ipv4Net {
        self.v4
    }

    /// Returns the IPv6 subnet, if the pool has one.
    pub fn v6_net(&self) -> Option<Ipv6Net> {
        self.v6
    }

    /// The addresses at an offset. An IPv4 address outside of the subnet is an offset of its own, so that
    /// 203.0.113.7 goes with the IPv6 address ::203.0.113.7 of the subnet.
    fn addresses_at(&self, offset: u32) -> Addresses {
        let is_outside = self.is_outside(offset);
        let first = if is_outside { 0 } else { u32::from(self.v4.network()) };
        let v6 = self.v6.filter(|net| !is_outside || net.prefix_len() <= 96);
        Addresses {
            v4: Some(Ipv4Addr::from(first.wrapping_add(offset))),
            v6: v6.map(|net| Ipv6Addr::from(u128::from(net.network()).wrapping_add(u128::from(offset)))),
        }
    }

    /// Whether an offset is an IPv4 address outside of the subnet.
    fn is_outside(&self, offset: u32) -> bool {
        offset > self.last_offset().max(1)
    }

    /// Whether an address is one of the subnets.
    pub(crate) fn contains(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4.contains(&ip),
            IpAddr::V6(ip) => self.v6.is_some_and(|net| net.contains(&ip)),
        }
    }

    /// Returns the last offset for clients: the one before the broadcast address.
    fn last_offset(&self) -> u32 {
        let v4 = u32::MAX >> self.v4.prefix_len();
        let v6 = self.v6.map_or(u128::MAX, |net| u128::MAX >> net.prefix_len());
        u32::try_from(v6).unwrap_or(u32::MAX).min(v4).saturating_sub(1)
    }

    /// Returns the number of client addresses in the pool.
    pub fn capacity(&self) -> u32 {
        self.last_offset().saturating_sub(1)
    }

    fn offset_of(&self, ip: IpAddr) -> Option<u32> {
        let offset = match ip {
            IpAddr::V4(ip) if self.v4.contains(&ip) => u32::from(ip) - u32::from(self.v4.network()),
            IpAddr::V4(ip) => return Some(u32::from(ip)).filter(|offset| self.is_outside(*offset)),
            IpAddr::V6(ip) => {
                let net = self.v6.filter(|net| net.contains(&ip))?;
                u32::try_from(u128::from(ip) - u128::from(net.network())).ok()?
            }
        };
        (FIRST_CLIENT_OFFSET..=self.last_offset()).contains(&offset).then_some(offset)
    }

    /// Whether the session with this secret has addresses that were assigned to `user`.
    pub(crate) fn belongs_to(&self, secret: &SessionSecret, user: &str) -> bool {
        self.leases.get(secret).is_some_and(|lease| lease.user == user)
    }

    /// Makes addresses belong to users: sessions of such a user get them first, and nobody else gets them. A
    /// session that has one of another user keeps it until it ends. An address stands for those of both
    /// families with the same offset.
    pub fn set_fixed(&mut self, fixed: impl IntoIterator<Item = (IpAddr, String)>) {
        let fixed = fixed.into_iter().filter_map(|(ip, user)| Some((self.offset_of(ip)?, user)));
        self.fixed = fixed.collect();
        self.unused_from = FIRST_CLIENT_OFFSET;
        let lost: Vec<_> =
            self.idle.iter().copied().filter(|(_, secret)| self.has_address_of_another(secret)).collect();
        for lease in lost {
            self.evict(lease);
        }
    }

    /// Whether one of these addresses belongs to a user.
    pub(crate) fn is_fixed(&self, addresses: &AddressSet) -> bool {
        addresses.iter().any(|ip| self.offset_of(ip).is_some_and(|offset| self.fixed.contains_key(&offset)))
    }

    /// The users to whom addresses of a session belong.
    fn owners(&self, secret: &SessionSecret) -> impl Iterator<Item = &String> {
        let lease = self.leases.get(secret).filter(|_| !self.fixed.is_empty());
        let offsets =
            lease.into_iter().flat_map(|lease| lease.addresses.iter()).filter_map(|ip| self.offset_of(ip));
        offsets.filter_map(|offset| self.fixed.get(&offset))
    }

    /// Whether a session has an address that belongs to another user than its own.
    fn has_address_of_another(&self, secret: &SessionSecret) -> bool {
        let user = self.leases.get(secret).map(|lease| &lease.user);
        self.owners(secret).any(|owner| Some(owner) != user)
    }

    /// Returns an address of `user` that no client uses, without the lease that a client left behind.
    fn fixed_offset(&mut self, user: &str) -> Option<u32> {
        let mut own = self.fixed.iter().filter(|(_, owner)| *owner == user).map(|(offset, _)| *offset);
        let (offset, left_behind) = own.find_map(|offset| match self.by_offset.get(&offset) {
            None => Some((offset, None)),
            Some(secret) => self.leases.get(secret)?.idle_since.map(|since| (offset, Some((since, *secret)))),
        })?;
        if let Some(lease) = left_behind {
            self.evict(lease);
        }
        Some(offset)
    }

    /// Returns the addresses of the session with this secret and marks them as used, if they were assigned to
    /// `user`.
    pub fn resume(&mut self, secret: &SessionSecret, user: &str) -> Option<AddressSet> {
        let lease = self.leases.get_mut(secret).filter(|lease| lease.user == user)?;
        if let Some(since) = lease.idle_since.take() {
            self.idle.remove(&(since, *secret));
            if let Some(leases) = self.users.get_mut(user) {
                leases.idle.remove(&(since, *secret));
            }
        }
        Some(lease.addresses)
    }

    /// Returns the addresses of the session with this secret.
    pub(crate) fn addresses(&self, secret: &SessionSecret) -> Option<AddressSet> {
        self.leases.get(secret).map(|lease| lease.addresses)
    }

    /// Assigns new addresses to `user`; preferred ones if they are free.
    ///
    /// # Errors
    /// If every address is in use.
    pub fn assign(
        &mut self,
        secret: SessionSecret,
        user: &str,
        preferred: &[IpAddr],
    ) -> Result<Addresses, PoolExhausted> {
        let free = self.fixed_offset(user).or_else(|| self.free_offset(preferred)).or_else(|| {
            let evicted = self.evict_longest_idle_of(user) || self.evict_longest_idle();
            evicted.then(|| self.free_offset(preferred)).flatten()
        });
        let addresses = self.lease(secret, free.ok_or(PoolExhausted(self.v4))?);
        let lease = Lease { addresses: addresses.into(), user: user.to_owned(), idle_since: None };
        self.leases.insert(secret, lease);
        self.users.entry(user.to_owned()).or_default().count += 1;
        Ok(addresses)
    }

    /// All leases.
    pub fn leases(&self) -> impl Iterator<Item = LeaseRecord> {
        self.leases.iter().map(|(secret, lease)| {
            let places = lease.addresses.all.iter().take(lease.addresses.count());
            LeaseRecord {
                secret: *secret,
                user: lease.user.clone(),
                addresses: places.filter_map(|one| one.iter().next()).collect(),
                idle_since: lease.idle_since,
            }
        })
    }

    /// Restores a lease that no client uses. Addresses that belong to users go before it, once
    /// [`Self::set_fixed`] is called.
    ///
    /// # Errors
    /// If an address is not one of the pool, or another lease has it.
    pub fn restore(&mut self, now: Instant, record: LeaseRecord) -> Result<(), RestoreError> {
        let count = record.addresses.len();
        let Some(first) = record.addresses.first().filter(|_| count <= AddressSet::MAX) else {
            return Err(RestoreError::AddressCount(count));
        };
        if self.leases.contains_key(&record.secret) {
            return Err(RestoreError::Taken(*first));
        }
        let mut offsets = BTreeSet::new();
        for ip in &record.addresses {
            let known = |offset: &u32| !self.is_outside(*offset) || self.fixed.contains_key(offset);
            let offset = self.offset_of(*ip).filter(known).ok_or(RestoreError::OutsideOfPool(*ip))?;
            if self.by_offset.contains_key(&offset) || !offsets.insert(offset) {
                return Err(RestoreError::Taken(*ip));
            }
        }
        let mut addresses = AddressSet::default();
        for offset in record.addresses.iter().filter_map(|ip| self.offset_of(*ip)).collect::<Vec<_>>() {
            addresses.push(self.lease(record.secret, offset));
        }
        self.users.entry(record.user.clone()).or_default().count += 1;
        let lease = Lease { addresses, user: record.user, idle_since: None };
        self.leases.insert(record.secret, lease);
        self.release(record.idle_since.unwrap_or(now), &record.secret);
        Ok(())
    }

    /// Evicts the leases of users that are not `known`, if no client uses them.
    pub(crate) fn evict_of_unknown(&mut self, known: impl Fn(&str) -> bool) -> usize {
        let is_unknown = |(_, secret): &&(Instant, SessionSecret)| {
            self.leases.get(secret).is_some_and(|lease| !known(&lease.user))
        };
        let unknown: Vec<_> = self.idle.iter().filter(is_unknown).copied().collect();
        unknown.iter().filter(|lease| self.evict(**lease)).count()
    }

    /// Evicts leases of `user` that no client uses, the longest unused first, until a further one makes at
    /// most `limit`.
    pub(crate) fn evict_above(&mut self, user: &str, limit: usize) {
        while self.users.get(user).is_some_and(|leases| leases.count >= limit)
            && self.evict_longest_idle_of(user)
        {}
    }

    /// Assigns one more address of each family to a session, preferred ones if they are free. Returns false
    /// if the session has none or [`AddressSet::MAX`], or half of the pool is in use.
    pub fn assign_additional(&mut self, secret: &SessionSecret, preferred: &[IpAddr]) -> bool {
        let known = self.addresses(secret).map_or(AddressSet::MAX, |all| all.count());
        // An upper bound: idle leases may have several addresses, but each is subtracted only once.
        let in_use = self.by_offset.len().saturating_sub(self.idle.len());
        if known >= AddressSet::MAX || in_use * 2 >= self.capacity() as usize {
            return false;
        }
        // No session loses its address for an additional one of another.
        let user = self.leases.get(secret).map(|lease| lease.user.clone()).unwrap_or_default();
        let own = self.fixed_offset(&user);
        let Some(offset) = own.or_else(|| self.free_offset(preferred)) else { return false };
        let more = self.lease(*secret, offset);
        if let Some(lease) = self.leases.get_mut(secret) {
            lease.addresses.push(more);
        }
        true
    }

    fn lease(&mut self, secret: SessionSecret, offset: u32) -> Addresses {
        self.by_offset.insert(offset, secret);
        self.addresses_at(offset)
    }

    /// Returns the first preferred offset without a lease, or the lowest.
    fn free_offset(&mut self, preferred: &[IpAddr]) -> Option<u32> {
        let mut wishes = preferred.iter().filter_map(|ip| self.offset_of(*ip));
        let wish = wishes.find(|offset| !self.is_outside(*offset) && !self.is_taken(*offset));
        wish.or_else(|| self.lowest_free_offset())
    }

    /// Returns the lowest offset without a lease.
    fn lowest_free_offset(&mut self) -> Option<u32> {
        while self.is_taken(self.unused_from) {
            self.unused_from += 1;
        }
        (self.unused_from <= self.last_offset()).then_some(self.unused_from)
    }

    /// Whether an offset is leased, or belongs to a user.
    fn is_taken(&self, offset: u32) -> bool {
        self.by_offset.contains_key(&offset) || self.fixed.contains_key(&offset)
    }

    /// Evicts the lease that was unused for the longest time; returns whether there was one.
    fn evict_longest_idle(&mut self) -> bool {
        // An address that belongs to a user would be free for nobody else.
        let longest = self.idle.iter().find(|(_, secret)| self.owners(secret).next().is_none()).copied();
        longest.is_some_and(|lease| self.evict(lease))
    }

    /// Evicts the lease of a user that was unused for the longest time; returns whether there was one.
    fn evict_longest_idle_of(&mut self, user: &str) -> bool {
        let longest = self.users.get(user).and_then(|leases| leases.idle.first().copied());
        longest.is_some_and(|lease| self.evict(lease))
    }

    fn evict(&mut self, idle: (Instant, SessionSecret)) -> bool {
        self.idle.remove(&idle);
        let Some(lease) = self.leases.remove(&idle.1) else { return false };
        for offset in lease.addresses.iter().filter_map(|ip| self.offset_of(ip)).collect::<Vec<_>>() {
            self.by_offset.remove(&offset);
            self.unused_from = self.unused_from.min(offset);
        }
        if let Some(leases) = self.users.get_mut(&lease.user) {
            leases.idle.remove(&idle);
            leases.count -= 1;
            if leases.count == 0 {
                self.users.remove(&lease.user);
            }
        }
        true
    }

    /// The last client of the session has left; its addresses stay reserved while others are free.
    pub fn release(&mut self, now: Instant, secret: &SessionSecret) {
        let Some(lease) = self.leases.get_mut(secret) else { return };
        let before = lease.idle_since.replace(now);
        let Some(leases) = self.users.get_mut(&lease.user) else { return };
        for idle in [&mut self.idle, &mut leases.idle] {
            if let Some(since) = before {
                idle.remove(&(since, *secret));
            }
            idle.insert((now, *secret));
        }
        if self.has_address_of_another(secret) {
            self.evict((now, *secret));
        }
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
        assert_eq!(pool.server_addresses().v4, Some("10.0.0.1".parse().unwrap()));
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
    fn a_preferred_address_is_assigned_only_if_it_is_free() {
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
    fn a_user_loses_own_unused_addresses_before_others_do() {
        let mut pool = pool("10.0.0.0/29");
        let now = Instant::now();
        for (n, user) in [(0, "bob"), (1, "anna"), (2, "anna"), (3, "bob"), (4, "bob")] {
            pool.assign(secret(n), user, &[]).unwrap();
            pool.release(now + Duration::from_secs(n.into()), &secret(n));
        }
        pool.assign(secret(10), "anna", &[]).unwrap();
        assert_eq!(pool.resume(&secret(1), "anna"), None, "her own longest unused one");
        assert!(pool.belongs_to(&secret(0), "bob"), "unused for longer, but not hers");
        pool.assign(secret(11), "anna", &[]).unwrap();
        assert!(!pool.belongs_to(&secret(2), "anna"));
        pool.assign(secret(12), "anna", &[]).unwrap();
        assert!(!pool.belongs_to(&secret(0), "bob"), "no other is left");
        pool.evict_above("bob", 2);
        assert!(!pool.belongs_to(&secret(3), "bob") && pool.belongs_to(&secret(4), "bob"));
        pool.evict_above("anna", 1);
        assert!(pool.belongs_to(&secret(10), "anna"), "leases in use stay");
        for _ in 0..100 {
            pool.evict_above("bob", 0);
            pool.assign(secret(20), "bob", &[]).unwrap();
            pool.release(now, &secret(20));
        }
        assert_eq!((pool.users.len(), pool.users["bob"].count, pool.idle.len()), (2, 1, 1));
    }

    #[test]
    fn an_additional_address_takes_none_from_an_unused_session() {
        let mut pool = pool("10.0.0.0/29");
        let now = Instant::now();
        for n in 0..5 {
            pool.assign(secret(n), "bob", &[]).unwrap();
            pool.release(now, &secret(n));
        }
        pool.assign(secret(9), "anna", &[]).unwrap();
        assert!(!pool.assign_additional(&secret(9), &[]));
        assert_eq!((0..5).filter(|n| pool.belongs_to(&secret(*n), "bob")).count(), 4);
    }

    #[test]
    fn leases_are_restored_with_all_addresses_and_go_in_the_same_order() {
        let (mut before, now) = (pool("10.0.0.0/28"), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        before.assign(secret(1), "anna", &[]).unwrap();
        assert!(before.assign_additional(&secret(1), &["10.0.0.9".parse().unwrap()]));
        before.assign(secret(2), "bob", &[]).unwrap();
        before.release(at(5), &secret(1));
        let records: Vec<_> = before.leases().collect();
        let mut after = pool("10.0.0.0/28");
        for record in &records {
            assert_eq!(after.restore(at(9), record.clone()), Ok(()));
        }
        assert_eq!(after.addresses(&secret(1)), before.addresses(&secret(1)));
        assert_eq!(after.resume(&secret(2), "bob"), before.addresses(&secret(2)));
        assert_eq!(after.resume(&secret(2), "anna"), None);
        let first = after.leases().find(|record| record.secret == secret(1)).unwrap();
        assert_eq!((first.idle_since, first.addresses.len()), (Some(at(5)), 2));
        // Nothing is restored twice, or what is none of its own.
        let wrong = |secret_of, addresses: &[&str]| LeaseRecord {
            secret: secret(secret_of),
            addresses: addresses.iter().map(|ip| ip.parse().unwrap()).collect(),
            ..records[0].clone()
        };
        for (record, why) in [
            (wrong(1, &["10.0.0.7"]), RestoreError::Taken("10.0.0.7".parse().unwrap())),
            (wrong(7, &["10.0.0.2"]), RestoreError::Taken("10.0.0.2".parse().unwrap())),
            (wrong(7, &["10.0.0.7", "fd00::7"]), RestoreError::Taken("fd00::7".parse().unwrap())),
            (wrong(7, &["10.0.0.1"]), RestoreError::OutsideOfPool("10.0.0.1".parse().unwrap())),
            (wrong(7, &["192.0.2.7"]), RestoreError::OutsideOfPool("192.0.2.7".parse().unwrap())),
            (wrong(7, &[]), RestoreError::AddressCount(0)),
        ] {
            assert_eq!(after.restore(now, record), Err(why));
        }
        // A fixed address goes before a lease, and a lease of a removed user goes.
        after.set_fixed([("10.0.0.9".parse().unwrap(), "carol".to_owned())]);
        assert_eq!(after.resume(&secret(1), "anna"), None);
        after.release(now, &secret(2));
        assert_eq!(after.evict_of_unknown(|user| user == "bob"), 0);
        assert_eq!(after.evict_of_unknown(|_| false), 1);
        assert_eq!(after.leases().count(), 0);
    }

    #[test]
    fn fixed_addresses_belong_to_their_user() {
        let mut pool = pool("10.0.0.0/29");
        let (now, v4) = (Instant::now(), |ip: &str| ip.parse::<IpAddr>().unwrap());
        let first = |addresses: Result<Addresses, PoolExhausted>| addresses.unwrap().v4.unwrap().to_string();
        // Bob has .2 before it is Alice's, and keeps it until he leaves.
        assert_eq!(first(pool.assign(secret(1), "bob", &[])), "10.0.0.2");
        pool.set_fixed([(v4("10.0.0.2"), "alice".to_owned()), (v4("10.0.0.4"), "alice".to_owned())]);
        assert_eq!(first(pool.assign(secret(2), "alice", &[])), "10.0.0.4");
        assert_eq!(first(pool.assign(secret(3), "carol", &[v4("10.0.0.4")])), "10.0.0.3");
        pool.release(now, &secret(1));
        assert_eq!(pool.resume(&secret(1), "bob"), None);
        assert_eq!(first(pool.assign(secret(4), "alice", &[])), "10.0.0.2");
        // A third session of Alice gets any address, and a full pool gives hers to nobody.
        assert_eq!(first(pool.assign(secret(5), "alice", &[])), "10.0.0.5");
        assert_eq!(first(pool.assign(secret(6), "bob", &[])), "10.0.0.6");
        pool.release(now, &secret(4));
        assert!(pool.assign(secret(7), "bob", &[]).is_err());
        // Alice's machine has forgotten its secret: what it left behind is hers.
        assert_eq!(first(pool.assign(secret(8), "alice", &[])), "10.0.0.2");
    }

    #[test]
    fn an_address_outside_of_the_pool_goes_to_its_user_only_and_can_be_given_back() {
        let mut pool = pool("10.0.0.0/29");
        let (now, public) = (Instant::now(), "203.0.113.7".parse::<IpAddr>().unwrap());
        let of_alice = || [(public, "alice".to_owned())];
        assert_ne!(pool.assign(secret(1), "bob", &[public]).unwrap().v4.map(IpAddr::V4), Some(public));
        pool.set_fixed(of_alice());
        let alice = pool.assign(secret(2), "alice", &[]).unwrap();
        assert_eq!(alice.v4.map(IpAddr::V4), Some(public));
        assert_eq!(alice.v6, Some("fd00::203.0.113.7".parse().unwrap()));
        assert_eq!(pool.assign(secret(3), "alice", &[]).unwrap().v4, Some("10.0.0.3".parse().unwrap()));
        // It lives through a restart, but not where it is hers no more.
        let record = pool.leases().find(|record| record.secret == secret(2)).unwrap();
        let mut after = self::pool("10.0.0.0/29");
        assert_eq!(after.restore(now, record.clone()), Err(RestoreError::OutsideOfPool(public)));
        after.set_fixed(of_alice());
        assert_eq!(after.restore(now, record), Ok(()));
        assert_eq!(after.resume(&secret(2), "alice"), Some(alice.into()));
        // Taken back, it is nobody's, and once it belongs to somebody again it can be assigned.
        pool.set_fixed([]);
        pool.release(now, &secret(2));
        assert!(pool.evict_of_unknown(|user| user != "alice") > 0);
        assert_ne!(pool.assign(secret(4), "alice", &[public]).unwrap().v4, alice.v4);
        pool.set_fixed(of_alice());
        assert_eq!(pool.assign(secret(5), "alice", &[]).unwrap(), alice);
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
    fn preferred_addresses_are_not_assigned_again() {
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
    fn additional_addresses_follow_the_first_and_never_take_the_last_half() {
        let mut pool = pool("10.0.0.0/28");
        let now = Instant::now();
        assert!(
            !pool.assign_additional(&secret(1), &[]),
            "a session without addresses gets no additional one"
        );
        pool.assign(secret(1), "a", &[]).unwrap();
        assert!(pool.assign_additional(&secret(1), &["fd00::9".parse().unwrap()]));
        assert!(pool.assign_additional(&secret(1), &[]));
        let all = pool.addresses(&secret(1)).unwrap();
        let expected = ["10.0.0.2", "fd00::2", "10.0.0.9", "fd00::9", "10.0.0.3", "fd00::3"];
        assert_eq!(all.iter().map(|ip| ip.to_string()).collect::<Vec<_>>(), expected);
        assert_eq!((all.count(), all.first().v4), (3, Some("10.0.0.2".parse().unwrap())));
        assert!(all.contains("fd00::9".parse().unwrap()) && !all.contains("10.0.0.4".parse().unwrap()));
        while pool.assign_additional(&secret(1), &[]) {}
        assert_eq!(pool.addresses(&secret(1)).unwrap().count(), 7, "13 fit");
        for n in 2..8 {
            pool.assign(secret(n), "a", &[]).unwrap();
            assert!(!pool.assign_additional(&secret(n), &[]));
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
    fn the_number_of_addresses_of_a_session_is_bounded() {
        let mut pool = pool("10.0.0.0/16");
        pool.assign(secret(1), "a", &[]).unwrap();
        assert_eq!((0..100).filter(|_| pool.assign_additional(&secret(1), &[])).count(), AddressSet::MAX - 1);
    }
}
