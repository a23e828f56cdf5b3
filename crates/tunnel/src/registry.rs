//! The sessions of a server, shared by its shards: secret, user, addresses, and the shard of each connection.
//! In: connections that ask for a tunnel, and their ends. Out: sessions with their addresses, and a shard
//! that can reach an address. Always holds: its lock is taken when a session is made, changed or removed, and
//! for packets whose session has no connection on the shard that read them; never for other packets.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use mpvpn_quic::{ConnectionHandle, ProcessBytes, UserBytes};
use mpvpn_types::{ClassId, Instant, SessionId};
use rustc_hash::FxHashMap;

use crate::{
    AddressPool, AddressSet, Addresses, ClientInstance, LeaseRecord, PoolExhausted, RestoreError,
    SessionSecret, UserLimits, UserRates,
    accounts::{Accounts, UserAccount},
    instance::{Claim, SessionHolder},
    session_flows::SessionFlows,
    sites::{Announcements, SiteTable},
    user_memory::MemoryOfUsers,
};

mod sites;

/// The number of a connection in its session, `16 · class + shard`: a client has a connection for each class
/// in each of its shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionNumber(u8);

impl ConnectionNumber {
    /// The initial connection, which makes the session; the only one of most clients.
    pub const INITIAL: Self = Self(0);
    /// Most connections of a session.
    pub const MAX: u8 = mpvpn_quic::MAX_SHARDS * ClassId::MAX;

    /// The connection with this number; `None` if it is not below [`Self::MAX`].
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::MAX).then_some(Self(number))
    }

    /// The connection of a class in a shard of the client; `None` if either is out of range.
    pub fn of(shard: u8, class: ClassId) -> Option<Self> {
        let fits = shard < mpvpn_quic::MAX_SHARDS && class.0 < ClassId::MAX;
        fits.then(|| Self(class.0 * mpvpn_quic::MAX_SHARDS + shard))
    }

    /// The number, from 0.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The class that it carries.
    pub fn class(self) -> ClassId {
        ClassId(self.0 / mpvpn_quic::MAX_SHARDS)
    }

    /// The shard of the client that has it, from 0.
    pub fn shard(self) -> u8 {
        self.0 % mpvpn_quic::MAX_SHARDS
    }
}

/// The place of a connection of a session at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSlot {
    /// The number of the shard.
    pub shard: u8,
    /// The connection at that shard.
    pub connection: ConnectionHandle,
    /// Distinguishes this tunnel from a later one with the same connection ID.
    pub serial: u64,
}

/// Why a tunnel is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionError {
    /// The server has its maximum of sessions.
    ServerFull,
    /// A joined connection of an unknown session.
    UnknownSession,
    /// The user has this many sessions, the maximum.
    TooManySessions(u32),
    /// The session would have more classes than its user may have.
    TooManyClasses,
}

/// Whether two machines show the secret of one session, because the state folder of a client was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecretSharing {
    /// None other does, as far as is known.
    #[default]
    Alone,
    /// Another machine does; this one keeps the session, and the other one gets a session of its own.
    Kept,
    /// Another machine has the session; this one gets a session of its own.
    Moved,
}

/// The session that a connection was admitted to.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    pub(crate) session: SessionId,
    pub(crate) secret: SessionSecret,
    /// The addresses, if the session has them already.
    pub(crate) addresses: Option<AddressSet>,
    pub(crate) serial: u64,
    /// Earlier connections that must be closed: the one with the same number, or all of another process of
    /// the client.
    pub(crate) replaced: Vec<ConnectionSlot>,
    /// Whether another machine shows the same secret.
    pub(crate) sharing: SecretSharing,
    pub(crate) flows: SessionFlows,
}

/// A connection that asks for a tunnel.
pub(crate) struct AdmissionRequest<'a> {
    pub(crate) user: &'a str,
    pub(crate) secret: Option<SessionSecret>,
    /// The process of the client, if it says which.
    pub(crate) instance: Option<ClientInstance>,
    pub(crate) number: ConnectionNumber,
    /// The limits of its user.
    pub(crate) limits: UserLimits,
    pub(crate) shard: u8,
    pub(crate) connection: ConnectionHandle,
}

#[derive(Clone, Debug)]
struct Session {
    id: SessionId,
    user: String,
    /// Most sessions of its user whose addresses are kept.
    max_leases: Option<u32>,
    /// The process of the client that has it.
    holder: SessionHolder,
    connections: BTreeMap<ConnectionNumber, ConnectionSlot>,
    /// For all shards.
    flows: SessionFlows,
}

#[derive(Clone, Debug)]
struct Inner {
    pool: AddressPool,
    sessions: BTreeMap<SessionSecret, Session>,
    /// The number of sessions of each user that has any.
    users: BTreeMap<String, u32>,
    /// The sessions of each user, by the user's name in lower case.
    by_name: BTreeMap<String, BTreeSet<SessionSecret>>,
    by_ip: FxHashMap<IpAddr, SessionSecret>,
    max_sessions: usize,
    /// How often two machines showed the secret of one session.
    shared_secrets: u64,
    last_session: u32,
    last_serial: u64,
    /// The largest MTU of the clients of each shard that has clients (bytes).
    mtus: BTreeMap<u8, usize>,
    accounts: Accounts,
    memory: MemoryOfUsers,
    announcements: Announcements,
    /// Users with addresses outside of the pool, each with the networks of which these are not the addresses
    /// of a session.
    own_networks: BTreeMap<String, Vec<IpNet>>,
    /// Users, in lower case, to whose sessions ports of the machine lead.
    forwarded_users: BTreeSet<String>,
    /// The networks behind clients that are in force.
    sites: Arc<SiteTable>,
}

/// The bytes that may be held for all clients, unless the edge says otherwise: 256 MiB.
const MAX_HELD_BYTES: usize = 256 << 20;

/// The sessions of a server. Clones share them.
#[derive(Clone, Debug)]
pub struct Registry {
    inner: Arc<Mutex<Inner>>,
    /// Whether leases have changed since [`Registry::take_leases_changed`].
    leases_changed: Arc<AtomicBool>,
    /// Whether what users have carried is to be counted since [`Registry::take_count_due`].
    count_due: Arc<AtomicBool>,
    /// Whether other networks behind clients are wanted since [`Registry::take_sites_due`].
    sites_due: Arc<AtomicBool>,
    /// Whether other networks behind clients are wanted than are in force.
    sites_change: Arc<AtomicBool>,
    /// Whether ports may lead to other sessions since [`Registry::take_forwards_due`].
    forwards_due: Arc<AtomicBool>,
}

impl Registry {
    /// A registry without sessions, for at most `max_sessions` with addresses from these subnets.
    pub fn new(v4: Ipv4Net, v6: Option<Ipv6Net>, max_sessions: usize) -> Self {
        let inner = Inner {
            pool: AddressPool::new(v4, v6),
            sessions: BTreeMap::new(),
            users: BTreeMap::new(),
            by_name: BTreeMap::new(),
            by_ip: FxHashMap::default(),
            max_sessions,
            shared_secrets: 0,
            last_session: 0,
            last_serial: 0,
            mtus: BTreeMap::new(),
            accounts: Accounts::default(),
            memory: MemoryOfUsers::new(MAX_HELD_BYTES),
            announcements: Announcements::default(),
            own_networks: BTreeMap::new(),
            forwarded_users: BTreeSet::new(),
            sites: Arc::default(),
        };
        let inner = Arc::new(Mutex::new(inner));
        let (leases_changed, count_due, sites_due, sites_change, forwards_due) = Default::default();
        Self { inner, leases_changed, count_due, sites_due, sites_change, forwards_due }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it holds the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of sessions.
    pub fn sessions(&self) -> usize {
        self.lock().sessions.len()
    }

    /// The largest MTU of any client (bytes); `None` without clients.
    pub fn mtu(&self) -> Option<usize> {
        self.lock().mtus.values().max().copied()
    }

    /// Makes addresses and networks belong to users: their sessions get them first, and nobody else gets
    /// them. IPv4 addresses, and IPv6 addresses of the pool, are those of a session, which has one of each;
    /// the first session of a user has all others as networks behind it.
    pub fn set_fixed_addresses(&self, fixed: impl IntoIterator<Item = (IpNet, String)>) {
        let inner = &mut *self.lock();
        let (mut own, mut fixed_hosts) = (BTreeMap::<String, Vec<IpNet>>::new(), Vec::new());
        for (net, user) in fixed {
            let is_in_pool = inner.pool.contains(net.addr());
            let is_of_session =
                net.prefix_len() == net.max_prefix_len() && (net.addr().is_ipv4() || is_in_pool);
            if !is_in_pool {
                own.entry(user.clone()).or_default().extend((!is_of_session).then_some(net));
            }
            if is_of_session {
                fixed_hosts.push((net.addr(), user));
            }
        }
        inner.pool.set_fixed(fixed_hosts);
        self.note_sites_due(inner.own_networks != own);
        inner.own_networks = own;
        self.note_lease_change();
    }

    /// Restores leases that were kept; returns those that cannot be, with the reasons.
    pub fn restore_leases(
        &self,
        now: Instant,
        records: impl IntoIterator<Item = LeaseRecord>,
    ) -> Vec<(LeaseRecord, RestoreError)> {
        let pool = &mut self.lock().pool;
        let refused =
            records.into_iter().filter_map(|record| Some((record.clone(), pool.restore(now, record).err()?)));
        refused.collect()
    }

    /// The leases, to be kept.
    pub fn leases(&self) -> Vec<LeaseRecord> {
        self.lock().pool.leases().collect()
    }

    /// Whether leases have changed since the last call. Does not take the lock.
    pub fn take_leases_changed(&self) -> bool {
        self.leases_changed.load(Ordering::Relaxed) && self.leases_changed.swap(false, Ordering::Relaxed)
    }

    /// Ends the leases of users that are not `known`, except those that clients use. Returns how many.
    pub fn end_leases_of_unknown(&self, known: impl Fn(&str) -> bool) -> usize {
        let ended = self.lock().pool.evict_of_unknown(known);
        if ended > 0 {
            self.note_lease_change();
        }
        ended
    }

    /// Notes what may follow where a session of this user gets addresses, or ends.
    fn note_addressed(&self, inner: &Inner, user: &str) {
        if !inner.forwarded_users.is_empty() && inner.forwarded_users.contains(&user.to_ascii_lowercase()) {
            self.forwards_due.store(true, Ordering::Relaxed);
        }
        self.note_sites_due(inner.own_networks.contains_key(user));
    }

    fn note_lease_change(&self) {
        self.leases_changed.store(true, Ordering::Relaxed);
    }

    /// How often two machines showed the secret of one session.
    pub fn shared_secrets(&self) -> u64 {
        self.lock().shared_secrets
    }

    /// The users of the sessions, each with the addresses of one session.
    pub fn addresses_by_user(&self) -> Vec<(String, AddressSet)> {
        let inner = self.lock();
        let with_addresses = |(secret, session): (&SessionSecret, &Session)| {
            Some((session.user.clone(), inner.pool.addresses(secret)?))
        };
        inner.sessions.iter().filter_map(with_addresses).collect()
    }

    /// Sets which users have limited rates or are counted.
    /// [`Server::update_accounts`](crate::Server::update_accounts) must be called at all shards after it.
    pub fn set_accounts(&self, now: Instant, rates: &BTreeMap<String, UserRates>) {
        self.lock().accounts.set(now, rates);
    }

    /// The bytes that each of those users has carried since the last call, in both directions together.
    pub fn take_carried(&self) -> Vec<(String, u64)> {
        self.lock().accounts.take_carried()
    }

    /// Sets the bytes that users may carry in one direction until [`Self::take_count_due`].
    pub fn set_count_limits(&self, limits: &BTreeMap<String, u64>) {
        self.lock().accounts.count_at(limits, &self.count_due);
    }

    /// Whether a user has carried so many bytes since the last call. Does not take the lock.
    pub fn take_count_due(&self) -> bool {
        self.count_due.load(Ordering::Relaxed) && self.count_due.swap(false, Ordering::Relaxed)
    }

    /// Sets how much memory the process may allocate (bytes), before the first shard is made.
    pub fn set_max_held(&self, bytes: usize) {
        self.lock().memory = MemoryOfUsers::new(bytes);
    }

    /// The memory of the process.
    pub fn process_bytes(&self) -> Arc<ProcessBytes> {
        self.lock().memory.process()
    }

    /// The bytes that are held for each user, and the connections.
    pub fn held_by_user(&self) -> BTreeMap<String, (usize, usize)> {
        self.lock().memory.held().map(|(name, bytes, count)| (name.to_owned(), (bytes, count))).collect()
    }

    /// The bytes that are held for a user, over all connections.
    pub(crate) fn memory_of(&self, user: &str) -> UserBytes {
        self.lock().memory.of(user)
    }

    /// Whether for nobody more is held than for this user.
    pub(crate) fn holds_most(&self, user: &str) -> bool {
        self.lock().memory.holds_most(user)
    }

    /// The account of a user, if there is one.
    pub(crate) fn account(&self, user: &str) -> Option<UserAccount> {
        self.lock().accounts.get(user)
    }

    /// Sets the largest MTU of the clients of a shard (bytes), and returns the largest of all shards.
    pub(crate) fn set_mtu(&self, shard: u8, mtu: Option<usize>) -> Option<usize> {
        let mut inner = self.lock();
        match mtu {
            Some(mtu) => inner.mtus.insert(shard, mtu),
            None => inner.mtus.remove(&shard),
        };
        inner.mtus.values().max().copied()
    }

    /// The server's own addresses.
    pub(crate) fn server_addresses(&self) -> Addresses {
        self.lock().pool.server_addresses()
    }

    /// The networks from which addresses are assigned.
    pub(crate) fn networks(&self) -> (Ipv4Net, Option<Ipv6Net>) {
        let inner = self.lock();
        (inner.pool.v4_net(), inner.pool.v6_net())
    }

    /// The user of the session with this address, or behind whose client it is.
    pub fn user_of(&self, ip: IpAddr) -> Option<String> {
        let inner = self.lock();
        Some(inner.session_of(ip)?.user.clone())
    }

    /// The user of the session with this very address.
    pub fn user_at(&self, ip: IpAddr) -> Option<String> {
        let inner = self.lock();
        Some(inner.sessions.get(inner.by_ip.get(&ip)?)?.user.clone())
    }

    /// The first addresses of the sessions of a user, whose name is in lower case.
    pub fn addresses_of(&self, name: &str) -> Vec<IpAddr> {
        let inner = self.lock();
        let secrets = inner.by_name.get(name).into_iter().flatten();
        let addresses = secrets.filter_map(|secret| inner.pool.addresses(secret));
        addresses.flat_map(|all| all.first().iter().collect::<Vec<_>>()).collect()
    }

    /// A shard that has a connection of the session with this address, or behind whose client it is.
    pub(crate) fn shard_of(&self, ip: IpAddr) -> Option<u8> {
        let inner = self.lock();
        inner.session_of(ip)?.connections.values().next().map(|slot| slot.shard)
    }

    /// Admits a connection to the session whose secret it shows, or to a new session with a secret from
    /// `new_secret`.
    pub(crate) fn admit(
        &self,
        request: &AdmissionRequest<'_>,
        new_secret: impl FnOnce() -> SessionSecret,
    ) -> Result<Admission, AdmissionError> {
        let inner = &mut *self.lock();
        let mut known = request.secret.filter(|secret| inner.pool.belongs_to(secret, request.user));
        let mut claim = Claim::Holder;
        if let Some(session) = known.and_then(|secret| inner.sessions.get(&secret)) {
            claim = session.holder.claim(request.instance);
            // A process that has to leave the session, or that joins one of another process, does not know
            // this one's secret.
            let is_other = request.number != ConnectionNumber::INITIAL && claim != Claim::Holder;
            if claim == Claim::Later || is_other {
                known = None;
            }
        }
        if known.is_none() && request.number != ConnectionNumber::INITIAL {
            return Err(AdmissionError::UnknownSession);
        }
        if known.is_none_or(|secret| !inner.sessions.contains_key(&secret)) {
            if inner.sessions.len() >= inner.max_sessions {
                return Err(AdmissionError::ServerFull);
            }
            let count = inner.users.get(request.user).copied().unwrap_or(0);
            if request.limits.max_sessions.is_some_and(|limit| count >= limit) {
                return Err(AdmissionError::TooManySessions(count));
            }
        }
        // The default class carries the traffic of refused classes, and is always admitted.
        let class = request.number.class();
        if class != ClassId::DEFAULT
            && let Some(session) = known.and_then(|secret| inner.sessions.get(&secret))
        {
            let others = session.connections.keys().map(|number| number.class());
            let others: BTreeSet<_> = others.filter(|id| ![class, ClassId::DEFAULT].contains(id)).collect();
            if others.len() + 2 > usize::from(request.limits.max_classes) {
                return Err(AdmissionError::TooManyClasses);
            }
        }
        let (secret, addresses) = match known {
            Some(secret) => (secret, inner.pool.resume(&secret, request.user)),
            None => (new_secret(), None),
        };
        inner.last_serial += 1;
        let serial = inner.last_serial;
        let (last_session, users) = (&mut inner.last_session, &mut inner.users);
        let by_name = &mut inner.by_name;
        let session = inner.sessions.entry(secret).or_insert_with(|| {
            *last_session = last_session.wrapping_add(1);
            *users.entry(request.user.to_owned()).or_default() += 1;
            by_name.entry(request.user.to_ascii_lowercase()).or_default().insert(secret);
            let (user, max_leases) = (request.user.to_owned(), request.limits.max_sessions);
            let (id, holder) = (SessionId(*last_session), SessionHolder::new(request.instance));
            let (connections, flows) = (BTreeMap::new(), SessionFlows::default());
            Session { id, user, max_leases, holder, connections, flows }
        });
        let slot = ConnectionSlot { shard: request.shard, connection: request.connection, serial };
        let mut replaced: Vec<_> = session.connections.insert(request.number, slot).into_iter().collect();
        let sharing = match claim {
            Claim::Holder => SecretSharing::Alone,
            Claim::Later => SecretSharing::Moved,
            Claim::New | Claim::Earlier => {
                session.holder.take_over(request.instance);
                // The connections of the other process would get packets for this one.
                let others = session.connections.extract_if(.., |number, _| *number != request.number);
                replaced.extend(others.map(|(_, slot)| slot));
                inner.shared_secrets += u64::from(claim == Claim::Earlier);
                if claim == Claim::Earlier { SecretSharing::Kept } else { SecretSharing::Alone }
            }
        };
        let (id, flows) = (session.id, session.flows.clone());
        for ip in addresses.iter().flat_map(AddressSet::iter) {
            inner.by_ip.insert(ip, secret);
        }
        self.note_addressed(inner, request.user);
        Ok(Admission { session: id, secret, addresses, serial, replaced, sharing, flows })
    }

    /// Assigns addresses to a session: one of each family, and additional ones as far as `wishes` asks for
    /// them and the pool allows. Addresses that the session already has stay.
    pub(crate) fn assign(
        &self,
        secret: SessionSecret,
        user: &str,
        preferred: &[Vec<IpAddr>],
    ) -> Result<AddressSet, PoolExhausted> {
        let inner = &mut *self.lock();
        let count = match inner.pool.addresses(&secret) {
            Some(known) => known.count(),
            None => {
                let limit = inner.sessions.get(&secret).and_then(|session| session.max_leases);
                inner.pool.evict_above(user, limit.map_or(usize::MAX, |limit| limit as usize));
                inner.pool.assign(secret, user, preferred.first().map_or(&[], Vec::as_slice))?;
                1
            }
        };
        for wanted in preferred.iter().skip(count) {
            if !inner.pool.assign_additional(&secret, wanted) {
                break;
            }
        }
        let addresses = inner.pool.addresses(&secret).unwrap_or_default();
        for ip in addresses.iter() {
            inner.by_ip.insert(ip, secret);
        }
        self.note_addressed(inner, user);
        self.note_lease_change();
        Ok(addresses)
    }

    /// The connections of a session.
    pub(crate) fn connections(&self, secret: &SessionSecret) -> Vec<ConnectionSlot> {
        let inner = self.lock();
        let slots = inner.sessions.get(secret).map(|session| session.connections.values().copied());
        slots.into_iter().flatten().collect()
    }

    /// Removes a connection. The session ends with its last connection; its addresses stay reserved while
    /// others are free.
    pub(crate) fn remove(&self, now: Instant, secret: &SessionSecret, number: ConnectionNumber, serial: u64) {
        let inner = &mut *self.lock();
        let Some(session) = inner.sessions.get_mut(secret) else { return };
        if session.connections.get(&number).is_none_or(|slot| slot.serial != serial) {
            return;
        }
        session.connections.remove(&number);
        if !session.connections.is_empty() {
            return;
        }
        if let Some(session) = inner.sessions.remove(secret) {
            self.note_addressed(inner, &session.user);
            if let Entry::Occupied(mut named) = inner.by_name.entry(session.user.to_ascii_lowercase()) {
                named.get_mut().remove(secret);
                if named.get().is_empty() {
                    named.remove();
                }
            }
            if let Entry::Occupied(mut count) = inner.users.entry(session.user) {
                match *count.get() {
                    1 => drop(count.remove()),
                    _ => *count.get_mut() -= 1,
                }
            }
        }
        for ip in inner.pool.addresses(secret).iter().flat_map(AddressSet::iter) {
            inner.by_ip.remove(&ip);
        }
        inner.pool.release(now, secret);
        let withdrawn = inner.announcements.withdraw(secret);
        self.note_lease_change();
        self.note_sites_due(withdrawn);
    }
}

impl Inner {
    fn session_of(&self, ip: IpAddr) -> Option<&Session> {
        self.sessions.get(self.by_ip.get(&ip).or_else(|| self.sites.session_of(ip))?)
    }
}

#[cfg(test)]
mod model_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Registry {
        Registry::new("10.0.0.0/24".parse().unwrap(), Some("fd00::/64".parse().unwrap()), 3)
    }

    fn request(
        secret: Option<SessionSecret>,
        number: u8,
        shard: u8,
        connection: usize,
    ) -> AdmissionRequest<'static> {
        let number = ConnectionNumber::new(number).unwrap();
        AdmissionRequest {
            user: "alice",
            secret,
            instance: None,
            number,
            limits: UserLimits::default(),
            shard,
            connection: ConnectionHandle(connection),
        }
    }

    /// A session with addresses; its initial connection is number 1 at shard 0.
    fn initial(registry: &Registry, secret: SessionSecret) -> (Admission, AddressSet) {
        let entry = registry.admit(&request(None, 0, 0, 1), || secret).unwrap();
        let addresses = registry.assign(secret, "alice", &[]).unwrap();
        (entry, addresses)
    }

    #[test]
    fn a_joined_connection_replaces_no_other() {
        let registry = registry();
        let (first, addresses) = initial(&registry, [1; 16]);
        let joined = registry.admit(&request(Some([1; 16]), 1, 1, 7), || panic!("no new session")).unwrap();
        assert_eq!((joined.session, joined.addresses), (first.session, Some(addresses)));
        assert_eq!(joined.replaced, []);
        assert_eq!(registry.sessions(), 1);
        assert_eq!(registry.shard_of(addresses.first().v4.unwrap().into()), Some(0));
    }

    #[test]
    fn a_later_connection_with_the_same_number_replaces_the_earlier_one() {
        let registry = registry();
        let (first, addresses) = initial(&registry, [1; 16]);
        let one = registry.admit(&request(Some([1; 16]), 1, 1, 7), || unreachable!()).unwrap();
        let two = registry.admit(&request(Some([1; 16]), 1, 0, 9), || unreachable!()).unwrap();
        let replaced = ConnectionSlot { shard: 1, connection: ConnectionHandle(7), serial: one.serial };
        assert_eq!(two.replaced, [replaced]);
        // The end of the replaced one must not end its successor.
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::new(1).unwrap(), one.serial);
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert_eq!(registry.sessions(), 1);
        assert_eq!(registry.shard_of(addresses.first().v6.unwrap().into()), Some(0));
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::new(1).unwrap(), two.serial);
        assert_eq!(registry.sessions(), 0);
    }

    #[test]
    fn a_session_ends_with_its_last_connection() {
        let registry = registry();
        let (first, addresses) = initial(&registry, [1; 16]);
        let ip = addresses.first().v4.unwrap().into();
        let other = registry.admit(&request(Some([1; 16]), 3, 2, 7), || unreachable!()).unwrap();
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert_eq!((registry.sessions(), registry.shard_of(ip)), (1, Some(2)));
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::new(3).unwrap(), other.serial);
        assert_eq!((registry.sessions(), registry.shard_of(ip)), (0, None));
        let back = registry.admit(&request(Some([1; 16]), 0, 1, 2), || unreachable!()).unwrap();
        assert_eq!(back.addresses, Some(addresses));
        assert_ne!(back.session, first.session);
        assert_eq!(registry.shard_of(ip), Some(1));
    }

    #[test]
    fn joins_of_unknown_sessions_and_of_other_users_are_refused() {
        let registry = registry();
        initial(&registry, [1; 16]);
        let stranger = request(Some([9; 16]), 1, 0, 5);
        assert_eq!(registry.admit(&stranger, || unreachable!()).unwrap_err(), AdmissionError::UnknownSession);
        let bob = AdmissionRequest { user: "bob", ..request(Some([1; 16]), 1, 0, 5) };
        assert_eq!(registry.admit(&bob, || unreachable!()).unwrap_err(), AdmissionError::UnknownSession);
        let bob = AdmissionRequest { number: ConnectionNumber::INITIAL, ..bob };
        assert_eq!(registry.admit(&bob, || [2; 16]).unwrap().addresses, None, "a session of his own");
    }

    #[test]
    fn additional_addresses_lead_to_the_session_and_stay_its_own() {
        let registry = registry();
        let (first, addresses) = initial(&registry, [1; 16]);
        assert_eq!(addresses.count(), 1);
        let more = registry.assign([1; 16], "alice", &[vec![], vec!["10.0.0.9".parse().unwrap()]]).unwrap();
        assert_eq!((more.first(), more.count()), (addresses.first(), 2));
        assert_eq!(registry.assign([1; 16], "alice", &[]).unwrap(), more, "nothing is taken away");
        assert_eq!(registry.shard_of("10.0.0.9".parse().unwrap()), Some(0));
        let joined = registry.admit(&request(Some([1; 16]), 16, 1, 7), || unreachable!()).unwrap();
        assert_eq!(joined.addresses, Some(more));
        assert_eq!(registry.connections(&[1; 16]).iter().map(|slot| slot.shard).collect::<Vec<_>>(), [0, 1]);
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::new(16).unwrap(), joined.serial);
        assert_eq!(registry.shard_of("10.0.0.9".parse().unwrap()), None);
        assert_eq!(registry.connections(&[1; 16]), []);
    }

    #[test]
    fn a_connection_number_is_a_class_in_a_shard() {
        let member = ConnectionNumber::of(3, ClassId(2)).unwrap();
        assert_eq!((member.number(), member.class(), member.shard()), (35, ClassId(2), 3));
        assert_eq!(ConnectionNumber::of(0, ClassId::DEFAULT), Some(ConnectionNumber::INITIAL));
        assert_eq!(
            (
                ConnectionNumber::of(16, ClassId(0)),
                ConnectionNumber::of(0, ClassId(8)),
                ConnectionNumber::new(128)
            ),
            (None, None, None)
        );
    }

    #[test]
    fn a_session_has_no_more_classes_than_its_user_may_have_over_all_shards() {
        let registry = registry();
        initial(&registry, [1; 16]);
        let enter = |shard, class, classes| {
            let member = ConnectionNumber::of(shard, ClassId(class)).unwrap().number();
            let limits = UserLimits { max_classes: classes, ..UserLimits::default() };
            let request =
                AdmissionRequest { limits, ..request(Some([1; 16]), member, shard, usize::from(member)) };
            registry.admit(&request, || unreachable!()).map(|entry| entry.serial)
        };
        assert!(enter(0, 1, 2).is_ok() && enter(1, 0, 2).is_ok() && enter(1, 1, 2).is_ok());
        assert_eq!(enter(0, 2, 2), Err(AdmissionError::TooManyClasses));
        assert!(enter(0, 1, 2).is_ok(), "one that comes again");
        let third = enter(0, 2, 3).unwrap();
        assert_eq!(enter(1, 3, 3), Err(AdmissionError::TooManyClasses));
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::of(0, ClassId(2)).unwrap(), third);
        assert!(enter(1, 3, 3).is_ok(), "another one in its place");
        assert_eq!(enter(0, 4, 1), Err(AdmissionError::TooManyClasses));
        assert!(enter(2, 0, 1).is_ok(), "no limit keeps the default class out");
    }

    /// Admits the initial connection of a session of `user`, who may have at most `max` of them.
    fn admit(
        registry: &Registry,
        (user, max): (&str, u32),
        secret: SessionSecret,
    ) -> Result<Admission, AdmissionError> {
        let limits = UserLimits { max_sessions: Some(max), ..UserLimits::default() };
        let admitted = registry.admit(
            &AdmissionRequest { user, limits, ..request(Some(secret), 0, 0, usize::from(secret[0])) },
            || secret,
        )?;
        registry.assign(secret, user, &[]).unwrap();
        Ok(admitted)
    }

    #[test]
    fn a_user_has_no_more_sessions_than_allowed_and_disconnected_ones_do_not_count() {
        let registry = Registry::new("10.0.0.0/24".parse().unwrap(), None, 100);
        let anna = ("anna", 2);
        let first = admit(&registry, anna, [1; 16]).unwrap();
        admit(&registry, anna, [2; 16]).unwrap();
        assert_eq!(admit(&registry, anna, [3; 16]).unwrap_err(), AdmissionError::TooManySessions(2));
        admit(&registry, ("bob", 2), [4; 16]).unwrap();
        assert!(admit(&registry, anna, [1; 16]).is_ok(), "another connection of one that is there");
        assert!(admit(&registry, ("anna", 1), [2; 16]).is_ok(), "the same under a lower limit");
        let joined = registry.connections(&[1; 16]);
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert_eq!(registry.connections(&[1; 16]), joined, "it was replaced");
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, joined[0].serial);
        let third = admit(&registry, anna, [3; 16]).unwrap();
        assert_eq!(admit(&registry, anna, [1; 16]).unwrap_err(), AdmissionError::TooManySessions(2));
        registry.remove(Instant::now(), &[3; 16], ConnectionNumber::INITIAL, third.serial);
        assert!(admit(&registry, anna, [1; 16]).is_ok());
    }

    #[test]
    fn one_user_takes_neither_all_addresses_nor_those_kept_for_others() {
        let registry = Registry::new("10.0.0.0/28".parse().unwrap(), None, 100);
        let bob = admit(&registry, ("bob", 4), [1; 16]).unwrap();
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, bob.serial);
        for n in 10..100 {
            let anna = admit(&registry, ("anna", 4), [n; 16]).unwrap();
            registry.remove(Instant::now(), &[n; 16], ConnectionNumber::INITIAL, anna.serial);
        }
        let back = admit(&registry, ("bob", 4), [1; 16]).unwrap();
        assert_eq!(back.addresses.unwrap().first().v4, Some([10, 0, 0, 2].into()), "his address was kept");
        let kept = (10..100).filter(|n| registry.lock().pool.belongs_to(&[*n; 16], "anna"));
        assert_eq!(kept.collect::<Vec<_>>(), [96, 97, 98, 99]);
        assert_eq!(registry.lock().users.len(), 1);
    }

    #[test]
    fn a_client_that_comes_back_counts_for_the_limit_of_the_server_too() {
        let registry = registry();
        let (first, _) = initial(&registry, [1; 16]);
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        for n in 2..=4 {
            initial(&registry, [n; 16]);
        }
        let back = registry.admit(&request(Some([1; 16]), 0, 0, 1), || unreachable!());
        assert_eq!(back.unwrap_err(), AdmissionError::ServerFull);
    }

    #[test]
    fn joined_connections_do_not_count_as_sessions() {
        let registry = registry();
        for n in 1..=3 {
            initial(&registry, [n; 16]);
            registry.admit(&request(Some([n; 16]), 1, 1, 7), || unreachable!()).unwrap();
        }
        assert_eq!(
            registry.admit(&request(None, 0, 0, 1), || [4; 16]).unwrap_err(),
            AdmissionError::ServerFull
        );
        assert!(registry.admit(&request(Some([1; 16]), 2, 1, 8), || unreachable!()).is_ok());
    }

    #[test]
    fn of_two_machines_with_one_secret_the_later_gets_a_session_of_its_own() {
        let registry = registry();
        let of = |instance: u8, secret, number, connection| AdmissionRequest {
            instance: Some([instance; 16]),
            ..request(secret, number, 0, connection)
        };
        let slots = |admission: &Admission| {
            admission.replaced.iter().map(|slot| slot.connection.0).collect::<Vec<_>>()
        };
        let secret = Some([1; 16]);
        let first = registry.admit(&of(1, None, 0, 1), || [1; 16]).unwrap();
        let addresses = registry.assign([1; 16], "alice", &[]).unwrap();
        registry.admit(&of(1, secret, 16, 2), || unreachable!()).unwrap();
        assert_eq!(first.sharing, SecretSharing::Alone);
        // Its process may have been killed and started again.
        let copy = registry.admit(&of(2, secret, 0, 3), || unreachable!()).unwrap();
        assert_eq!((copy.sharing, copy.addresses), (SecretSharing::Alone, Some(addresses)));
        assert_eq!(slots(&copy), [1, 2], "all connections of the other process");
        let joined = registry.admit(&of(1, secret, 16, 4), || unreachable!());
        assert_eq!(joined.unwrap_err(), AdmissionError::UnknownSession);
        // It was not: its process is there.
        let back = registry.admit(&of(1, secret, 0, 5), || unreachable!()).unwrap();
        assert_eq!(
            (back.sharing, back.addresses, slots(&back)),
            (SecretSharing::Kept, Some(addresses), vec![3])
        );
        let moved = registry.admit(&of(2, secret, 0, 6), || [2; 16]).unwrap();
        assert_eq!((moved.sharing, moved.secret, moved.addresses), (SecretSharing::Moved, [2; 16], None));
        assert_ne!(registry.assign([2; 16], "alice", &[]).unwrap(), addresses);
        // Neither disturbs the other any more.
        for (instance, secret) in [(1, [1; 16]), (2, [2; 16])] {
            let again = registry.admit(&of(instance, Some(secret), 0, 7), || unreachable!()).unwrap();
            assert_eq!((again.sharing, again.secret), (SecretSharing::Alone, secret));
        }
        assert_eq!(registry.sessions(), 2);
    }

    #[test]
    fn changed_leases_are_kept_once() {
        let registry = registry();
        assert!(!registry.take_leases_changed());
        let (first, addresses) = initial(&registry, [1; 16]);
        assert!(registry.take_leases_changed() && !registry.take_leases_changed());
        registry.remove(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert!(registry.take_leases_changed());
        let after = self::registry();
        assert_eq!(after.restore_leases(Instant::now(), registry.leases()), []);
        let back = after.admit(&request(Some([1; 16]), 0, 0, 1), || unreachable!()).unwrap();
        assert_eq!(back.addresses, Some(addresses), "a server that was started again knows the session");
        let users = registry.end_leases_of_unknown(|user| user != "alice");
        assert_eq!((users, registry.leases().len()), (1, 0));
    }

    #[test]
    fn the_mtu_is_the_largest_of_all_shards_with_clients() {
        let registry = registry();
        assert_eq!(registry.mtu(), None);
        assert_eq!(registry.set_mtu(0, Some(1280)), Some(1280));
        assert_eq!(registry.set_mtu(1, Some(1400)), Some(1400));
        assert_eq!(registry.set_mtu(1, None), Some(1280));
    }
}
