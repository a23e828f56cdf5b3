//! The accounts of users: what a user may carry, and has carried, over all connections in all shards.
//!
//! In: rates, and bytes that were carried. Out: members of the limits, and the bytes. Always holds: a user
//! without rates and quota has no account, so that such a user's packets cost nothing more.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};

use mpvpn_class::{RateLimit, RateLimitMember};
use mpvpn_packet::{protocol, udp::UDP_HEADER};
use mpvpn_types::{BitRate, Instant};

/// The limits of a user's rates; `None`: no limit in this direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRates {
    /// From the user's clients.
    pub up: Option<BitRate>,
    /// To the user's clients.
    pub down: Option<BitRate>,
}

/// Bytes of an IP packet that count for its user: the data of its TCP segment or UDP datagram, so that data
/// in packets, in streams, and over IPv4 and IPv6 get the same rate; of other packets, and of those without
/// data, the content of the IP packet, so that floods of them are not free.
pub(crate) fn counted_bytes(packet: &[u8]) -> u64 {
    let (protocol, ip_header) = match packet.first() {
        // The length of the header in words (RFC 791 §3.1).
        Some(first) if first >> 4 == 4 => (packet.get(9).copied(), usize::from(first & 0xf) * 4),
        Some(first) if first >> 4 == 6 => (packet.get(6).copied(), 40),
        _ => (None, 0),
    };
    let content = packet.get(ip_header..).unwrap_or_default();
    let header = match (protocol, content.get(12)) {
        // The data offset in words (RFC 9293 §3.1).
        (Some(protocol::TCP), Some(offset)) => usize::from(offset >> 4) * 4,
        (Some(protocol::UDP), _) => UDP_HEADER,
        _ => 0,
    };
    match content.len().saturating_sub(header) {
        0 => content.len() as u64,
        data => data as u64,
    }
}

/// The account of a user. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct UserAccount {
    up: Arc<Mutex<RateLimit>>,
    down: Arc<Mutex<RateLimit>>,
}

fn lock(limit: &Mutex<RateLimit>) -> MutexGuard<'_, RateLimit> {
    // No code panics while it holds the lock.
    limit.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UserAccount {
    fn new(now: Instant, rates: UserRates) -> Self {
        let limit = |rate| Arc::new(Mutex::new(RateLimit::new(now, rate)));
        Self { up: limit(rates.up), down: limit(rates.down) }
    }

    fn set_rates(&self, now: Instant, rates: UserRates) {
        lock(&self.up).set_rate(now, rates.up);
        lock(&self.down).set_rate(now, rates.down);
    }

    fn count_at(&self, bytes: u64, due: &Arc<AtomicBool>) {
        lock(&self.up).count_at(bytes, due);
        lock(&self.down).count_at(bytes, due);
    }

    fn take_carried(&self) -> u64 {
        lock(&self.up).take_carried() + lock(&self.down).take_carried()
    }

    /// A member of the limit of what comes from the user's clients.
    pub(crate) fn up(&self) -> RateLimitMember {
        RateLimitMember::new(self.up.clone())
    }

    /// A member of the limit of what goes to the user's clients.
    pub(crate) fn down(&self) -> RateLimitMember {
        RateLimitMember::new(self.down.clone())
    }

    /// Whether both are the same account.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.up, &other.up)
    }
}

/// The accounts of all users that have one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accounts(BTreeMap<String, UserAccount>);

impl Accounts {
    /// Sets which users have an account, with their rates. Those that have one already keep it.
    pub(crate) fn set(&mut self, now: Instant, rates: &BTreeMap<String, UserRates>) {
        self.0.retain(|user, _| rates.contains_key(user));
        for (user, rates) in rates {
            match self.0.get(user) {
                Some(account) => account.set_rates(now, *rates),
                None => drop(self.0.insert(user.clone(), UserAccount::new(now, *rates))),
            }
        }
    }

    /// The account of a user.
    pub(crate) fn get(&self, user: &str) -> Option<UserAccount> {
        self.0.get(user).cloned()
    }

    /// Sets `due` once a user has carried so many bytes in one direction since they were taken.
    pub(crate) fn count_at(&self, limits: &BTreeMap<String, u64>, due: &Arc<AtomicBool>) {
        for (user, bytes) in limits {
            self.0.get(user).into_iter().for_each(|account| account.count_at(*bytes, due));
        }
    }

    /// The bytes that each user has carried since the last call, in both directions together.
    pub(crate) fn take_carried(&self) -> Vec<(String, u64)> {
        let all = self.0.iter().map(|(user, account)| (user.clone(), account.take_carried()));
        all.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn headers_of_packets_do_not_count() {
        let content = [7; 100];
        let packet = |first: u8, header: usize| [&vec![first; header][..], &content].concat();
        for packet in [packet(0x45, 20), packet(0x46, 24), packet(0x60, 40)] {
            assert_eq!(counted_bytes(&packet), 100);
        }
        assert_eq!((counted_bytes(&[0x4f; 10]), counted_bytes(&[])), (0, 0));
        // Data offset 8 words: 32 bytes of header.
        let tcp = |content: usize| {
            let mut packet = vec![0; 20 + content];
            (packet[0], packet[9], packet[20 + 12]) = (0x45, protocol::TCP, 0x80);
            packet
        };
        assert_eq!(counted_bytes(&tcp(132)), 100);
        assert_eq!(counted_bytes(&tcp(32)), 32, "an acknowledgement is not free");
        let mut udp = packet(0x60, 40);
        udp[6] = protocol::UDP;
        assert_eq!(counted_bytes(&udp), 92);
    }

    #[test]
    fn a_user_keeps_the_account_when_its_rates_change_and_loses_it_without_any() {
        let (mut accounts, now) = (Accounts::default(), Instant::now());
        let rates = |mbit: u64| UserRates { up: Some(BitRate::from_bps(mbit * 1_000_000)), down: None };
        let both = BTreeMap::from([("alice".to_owned(), rates(1)), ("bob".to_owned(), rates(2))]);
        accounts.set(now, &both);
        let (alice, bob) = (accounts.get("alice").unwrap(), accounts.get("bob").unwrap());
        assert!(!alice.is_same(&bob) && accounts.get("carol").is_none());
        (alice.up(), alice.down()).0.on_carried(now, 100);
        alice.down().on_carried(now, 11);
        let due = Arc::default();
        accounts.count_at(&BTreeMap::from([("alice".to_owned(), 150), ("carol".to_owned(), 1)]), &due);
        alice.down().on_carried(now, 100);
        assert!(!due.load(Ordering::Relaxed), "111 in this direction");
        alice.down().on_carried(now, 39);
        assert!(due.swap(false, Ordering::Relaxed));
        alice.down().on_carried(now, 1000);
        assert!(!due.load(Ordering::Relaxed), "said once");
        assert_eq!(accounts.take_carried(), [("alice".to_owned(), 1250)]);
        assert_eq!(accounts.take_carried(), []);

        accounts.set(now, &BTreeMap::from([("alice".to_owned(), rates(5))]));
        assert!(accounts.get("alice").unwrap().is_same(&alice) && accounts.get("bob").is_none());
        assert_eq!(alice.up().rate(), Some(BitRate::from_bps(5_000_000)));
        assert_eq!(alice.down().rate(), None);
    }
}
