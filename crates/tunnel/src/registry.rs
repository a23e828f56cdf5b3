//! What the shards of a server must agree on: who has which addresses, and which shard serves whom.
//!
//! In: connections that are granted a tunnel, and their ends. Out: sessions with their addresses, and
//! the shard that can reach an address. Always holds: it is asked when a session comes, goes or
//! changes, and for packets whose session has no connection on the shard that read them; never for
//! other packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipnet::{Ipv4Net, Ipv6Net};
use mpvpn_quic::ConnectionHandle;
use mpvpn_types::{ClassId, Instant, SessionId};
use rustc_hash::FxHashMap;

use crate::{AddressPool, AddressSet, Addresses, PoolExhausted, SessionSecret};

/// The number of a connection within its session: a client that spreads its work over several threads has a connection
/// of each, and of each of its classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionNumber(u8);

impl ConnectionNumber {
    /// The connection that makes the session, and the only one of most clients.
    pub const INITIAL: Self = Self(0);
    /// Connections of one session, at most.
    pub const MAX: u8 = mpvpn_quic::MAX_SHARDS * ClassId::MAX;

    /// The member with this number, if there can be one.
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::MAX).then_some(Self(number))
    }

    /// The connection of a class in a thread of the client, if there can be such.
    pub fn of(shard: u8, class: ClassId) -> Option<Self> {
        let fits = shard < mpvpn_quic::MAX_SHARDS && class.0 < ClassId::MAX;
        fits.then(|| Self(class.0 * mpvpn_quic::MAX_SHARDS + shard))
    }

    /// Its number, from 0.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The class that it carries.
    pub fn class(self) -> ClassId {
        ClassId(self.0 / mpvpn_quic::MAX_SHARDS)
    }

    /// The thread of the client that it is in, from 0.
    pub fn shard(self) -> u8 {
        self.0 % mpvpn_quic::MAX_SHARDS
    }
}

/// A tunnel of a member, at the shard that has its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSlot {
    /// The number of the shard.
    pub shard: u8,
    /// The connection at that shard.
    pub connection: ConnectionHandle,
    /// Tells this tunnel from a later one of the same connection number.
    pub serial: u64,
}

/// Why a tunnel is not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denial {
    /// As many sessions as are allowed.
    Full,
    /// A member of a session that nobody knows.
    UnknownSession,
    /// One class more than its user may have.
    Classes,
}

/// What a connection is given when it enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) session: SessionId,
    pub(crate) secret: SessionSecret,
    /// The addresses, if they are known already.
    pub(crate) addresses: Option<AddressSet>,
    pub(crate) serial: u64,
    /// The earlier tunnel of the same member, to be closed.
    pub(crate) replaced: Option<ConnectionSlot>,
}

/// Who enters.
pub(crate) struct Visitor<'a> {
    pub(crate) user: &'a str,
    pub(crate) shown: Option<SessionSecret>,
    pub(crate) member: ConnectionNumber,
    /// How many classes its session may have.
    pub(crate) classes: u8,
    pub(crate) shard: u8,
    pub(crate) connection: ConnectionHandle,
}

#[derive(Debug)]
struct Session {
    id: SessionId,
    members: BTreeMap<ConnectionNumber, ConnectionSlot>,
}

#[derive(Debug)]
struct Inner {
    pool: AddressPool,
    sessions: BTreeMap<SessionSecret, Session>,
    by_ip: FxHashMap<IpAddr, SessionSecret>,
    max_sessions: usize,
    last_session: u32,
    last_serial: u64,
    /// What each shard's clients can take, if it has any (bytes).
    mtus: BTreeMap<u8, usize>,
}

/// The sessions of a server. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Registry(Arc<Mutex<Inner>>);

impl Registry {
    /// No sessions, and addresses from these subnets for at most `max_sessions`.
    pub fn new(v4: Ipv4Net, v6: Option<Ipv6Net>, max_sessions: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            pool: AddressPool::new(v4, v6),
            sessions: BTreeMap::new(),
            by_ip: FxHashMap::default(),
            max_sessions,
            last_session: 0,
            last_serial: 0,
            mtus: BTreeMap::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing here panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sessions now.
    pub fn sessions(&self) -> usize {
        self.lock().sessions.len()
    }

    /// The largest packet that some client can take (bytes), if there is a client.
    pub fn mtu(&self) -> Option<usize> {
        self.lock().mtus.values().max().copied()
    }

    /// Notes what the clients of a shard can take, and returns the same for all.
    pub(crate) fn set_mtu(&self, shard: u8, mtu: Option<usize>) -> Option<usize> {
        let mut inner = self.lock();
        match mtu {
            Some(mtu) => inner.mtus.insert(shard, mtu),
            None => inner.mtus.remove(&shard),
        };
        inner.mtus.values().max().copied()
    }

    /// The server's own addresses.
    pub(crate) fn own(&self) -> Addresses {
        self.lock().pool.server_addresses()
    }

    /// The networks that addresses are given from.
    pub(crate) fn networks(&self) -> (Ipv4Net, Option<Ipv6Net>) {
        let inner = self.lock();
        (inner.pool.v4_net(), inner.pool.v6_net())
    }

    /// A shard with a connection of the session that has this address.
    pub(crate) fn shard_of(&self, ip: IpAddr) -> Option<u8> {
        let inner = self.lock();
        let session = inner.sessions.get(inner.by_ip.get(&ip)?)?;
        session.members.values().next().map(|seat| seat.shard)
    }

    /// Grants a tunnel to a connection: of the session whose secret it shows, or of a new one with
    /// the secret that `fresh` makes.
    pub(crate) fn enter(
        &self,
        visitor: &Visitor<'_>,
        fresh: impl FnOnce() -> SessionSecret,
    ) -> Result<Entry, Denial> {
        let inner = &mut *self.lock();
        let known =
            visitor.shown.and_then(|secret| Some((secret, inner.pool.resume(&secret, visitor.user)?)));
        if known.is_none() && visitor.member != ConnectionNumber::INITIAL {
            return Err(Denial::UnknownSession);
        }
        if known.is_none() && inner.sessions.len() >= inner.max_sessions {
            return Err(Denial::Full);
        }
        // The default class carries what others cannot, and is always let in.
        let class = visitor.member.class();
        if class != ClassId::DEFAULT
            && let Some(session) = known.and_then(|(secret, _)| inner.sessions.get(&secret))
        {
            let others = session.members.keys().map(|member| member.class());
            let others: BTreeSet<_> = others.filter(|id| ![class, ClassId::DEFAULT].contains(id)).collect();
            if others.len() + 2 > usize::from(visitor.classes) {
                return Err(Denial::Classes);
            }
        }
        let (secret, addresses) = match known {
            Some((secret, addresses)) => (secret, Some(addresses)),
            None => (fresh(), None),
        };
        inner.last_serial += 1;
        let serial = inner.last_serial;
        let last_session = &mut inner.last_session;
        let session = inner.sessions.entry(secret).or_insert_with(|| {
            *last_session = last_session.wrapping_add(1);
            Session { id: SessionId(*last_session), members: BTreeMap::new() }
        });
        let seat = ConnectionSlot { shard: visitor.shard, connection: visitor.connection, serial };
        let replaced = session.members.insert(visitor.member, seat);
        let id = session.id;
        for ip in addresses.iter().flat_map(AddressSet::iter) {
            inner.by_ip.insert(ip, secret);
        }
        Ok(Entry { session: id, secret, addresses, serial, replaced })
    }

    /// Gives a session its addresses: one of each family, and as many further ones as there are `wishes` for and may be.
    /// What it has it keeps.
    pub(crate) fn assign(
        &self,
        secret: SessionSecret,
        user: &str,
        wishes: &[Vec<IpAddr>],
    ) -> Result<AddressSet, PoolExhausted> {
        let inner = &mut *self.lock();
        let count = match inner.pool.addresses(&secret) {
            Some(known) => known.count(),
            None => {
                inner.pool.assign(secret, user, wishes.first().map_or(&[], Vec::as_slice))?;
                1
            }
        };
        for wish in wishes.iter().skip(count) {
            if !inner.pool.assign_additional(&secret, wish) {
                break;
            }
        }
        let addresses = inner.pool.addresses(&secret).unwrap_or_default();
        for ip in addresses.iter() {
            inner.by_ip.insert(ip, secret);
        }
        Ok(addresses)
    }

    /// The connections of a session.
    pub(crate) fn seats(&self, secret: &SessionSecret) -> Vec<ConnectionSlot> {
        let inner = self.lock();
        let members = inner.sessions.get(secret).map(|session| session.members.values().copied());
        members.into_iter().flatten().collect()
    }

    /// A tunnel has ended. The session ends with its last one; its addresses stay reserved while
    /// others are free.
    pub(crate) fn leave(&self, now: Instant, secret: &SessionSecret, member: ConnectionNumber, serial: u64) {
        let inner = &mut *self.lock();
        let Some(session) = inner.sessions.get_mut(secret) else { return };
        if session.members.get(&member).is_none_or(|seat| seat.serial != serial) {
            return;
        }
        session.members.remove(&member);
        if !session.members.is_empty() {
            return;
        }
        inner.sessions.remove(secret);
        for ip in inner.pool.addresses(secret).iter().flat_map(AddressSet::iter) {
            inner.by_ip.remove(&ip);
        }
        inner.pool.release(now, secret);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Registry {
        Registry::new("10.0.0.0/24".parse().unwrap(), Some("fd00::/64".parse().unwrap()), 3)
    }

    fn visitor(shown: Option<SessionSecret>, member: u8, shard: u8, connection: usize) -> Visitor<'static> {
        let member = ConnectionNumber::new(member).unwrap();
        Visitor { user: "alice", shown, member, classes: 8, shard, connection: ConnectionHandle(connection) }
    }

    /// A session with addresses whose home is connection 1 of shard 0.
    fn home(registry: &Registry, secret: SessionSecret) -> (Entry, AddressSet) {
        let entry = registry.enter(&visitor(None, 0, 0, 1), || secret).unwrap();
        let addresses = registry.assign(secret, "alice", &[]).unwrap();
        (entry, addresses)
    }

    #[test]
    fn a_member_joins_without_taking_the_others_place() {
        let registry = registry();
        let (first, addresses) = home(&registry, [1; 16]);
        let joined = registry.enter(&visitor(Some([1; 16]), 1, 1, 7), || panic!("no new session")).unwrap();
        assert_eq!((joined.session, joined.addresses), (first.session, Some(addresses)));
        assert_eq!(joined.replaced, None);
        assert_eq!(registry.sessions(), 1);
        assert_eq!(registry.shard_of(addresses.first().v4.unwrap().into()), Some(0));
    }

    #[test]
    fn a_later_connection_of_a_member_replaces_the_earlier_one_and_only_that() {
        let registry = registry();
        let (first, addresses) = home(&registry, [1; 16]);
        let one = registry.enter(&visitor(Some([1; 16]), 1, 1, 7), || unreachable!()).unwrap();
        let two = registry.enter(&visitor(Some([1; 16]), 1, 0, 9), || unreachable!()).unwrap();
        let replaced = ConnectionSlot { shard: 1, connection: ConnectionHandle(7), serial: one.serial };
        assert_eq!(two.replaced, Some(replaced));
        // The end of the replaced one must not end its successor.
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::new(1).unwrap(), one.serial);
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert_eq!(registry.sessions(), 1);
        assert_eq!(registry.shard_of(addresses.first().v6.unwrap().into()), Some(0));
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::new(1).unwrap(), two.serial);
        assert_eq!(registry.sessions(), 0);
    }

    #[test]
    fn a_session_lives_until_its_last_member_leaves() {
        let registry = registry();
        let (first, addresses) = home(&registry, [1; 16]);
        let ip = addresses.first().v4.unwrap().into();
        let other = registry.enter(&visitor(Some([1; 16]), 3, 2, 7), || unreachable!()).unwrap();
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        assert_eq!((registry.sessions(), registry.shard_of(ip)), (1, Some(2)));
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::new(3).unwrap(), other.serial);
        assert_eq!((registry.sessions(), registry.shard_of(ip)), (0, None));
        let back = registry.enter(&visitor(Some([1; 16]), 0, 1, 2), || unreachable!()).unwrap();
        assert_eq!(back.addresses, Some(addresses));
        assert_ne!(back.session, first.session);
        assert_eq!(registry.shard_of(ip), Some(1));
    }

    #[test]
    fn members_of_unknown_sessions_and_of_others_are_denied() {
        let registry = registry();
        home(&registry, [1; 16]);
        let stranger = visitor(Some([9; 16]), 1, 0, 5);
        assert_eq!(registry.enter(&stranger, || unreachable!()).unwrap_err(), Denial::UnknownSession);
        let bob = Visitor { user: "bob", ..visitor(Some([1; 16]), 1, 0, 5) };
        assert_eq!(registry.enter(&bob, || unreachable!()).unwrap_err(), Denial::UnknownSession);
        let bob = Visitor { member: ConnectionNumber::INITIAL, ..bob };
        assert_eq!(registry.enter(&bob, || [2; 16]).unwrap().addresses, None, "a session of his own");
    }

    #[test]
    fn further_addresses_lead_to_the_session_and_stay_its_own() {
        let registry = registry();
        let (first, addresses) = home(&registry, [1; 16]);
        assert_eq!(addresses.count(), 1);
        let more = registry.assign([1; 16], "alice", &[vec![], vec!["10.0.0.9".parse().unwrap()]]).unwrap();
        assert_eq!((more.first(), more.count()), (addresses.first(), 2));
        assert_eq!(registry.assign([1; 16], "alice", &[]).unwrap(), more, "nothing is taken away");
        assert_eq!(registry.shard_of("10.0.0.9".parse().unwrap()), Some(0));
        let joined = registry.enter(&visitor(Some([1; 16]), 16, 1, 7), || unreachable!()).unwrap();
        assert_eq!(joined.addresses, Some(more));
        assert_eq!(registry.seats(&[1; 16]).iter().map(|seat| seat.shard).collect::<Vec<_>>(), [0, 1]);
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::INITIAL, first.serial);
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::new(16).unwrap(), joined.serial);
        assert_eq!(registry.shard_of("10.0.0.9".parse().unwrap()), None);
        assert_eq!(registry.seats(&[1; 16]), []);
    }

    #[test]
    fn a_member_is_a_class_in_a_thread() {
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
    fn a_session_has_no_more_classes_than_its_user_may_have_in_however_many_threads() {
        let registry = registry();
        home(&registry, [1; 16]);
        let enter = |shard, class, classes| {
            let member = ConnectionNumber::of(shard, ClassId(class)).unwrap().number();
            let visitor = Visitor { classes, ..visitor(Some([1; 16]), member, shard, usize::from(member)) };
            registry.enter(&visitor, || unreachable!()).map(|entry| entry.serial)
        };
        assert!(enter(0, 1, 2).is_ok() && enter(1, 0, 2).is_ok() && enter(1, 1, 2).is_ok());
        assert_eq!(enter(0, 2, 2), Err(Denial::Classes));
        assert!(enter(0, 1, 2).is_ok(), "one that comes again");
        let third = enter(0, 2, 3).unwrap();
        assert_eq!(enter(1, 3, 3), Err(Denial::Classes));
        registry.leave(Instant::now(), &[1; 16], ConnectionNumber::of(0, ClassId(2)).unwrap(), third);
        assert!(enter(1, 3, 3).is_ok(), "another one in its place");
        assert_eq!(enter(0, 4, 1), Err(Denial::Classes));
        assert!(enter(2, 0, 1).is_ok(), "no limit keeps the default class out");
    }

    #[test]
    fn members_do_not_count_as_sessions() {
        let registry = registry();
        for n in 1..=3 {
            home(&registry, [n; 16]);
            registry.enter(&visitor(Some([n; 16]), 1, 1, 7), || unreachable!()).unwrap();
        }
        assert_eq!(registry.enter(&visitor(None, 0, 0, 1), || [4; 16]).unwrap_err(), Denial::Full);
        assert!(registry.enter(&visitor(Some([1; 16]), 2, 1, 8), || unreachable!()).is_ok());
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
