//! Limits for strangers: clients of a server before they are authenticated.
//!
//! In: attempts to connect with their source and time, and the connections that become of them. Out: which
//! attempts are accepted, which have to validate their address, which are dropped, and which connection ends
//! early. Always holds: memory does not grow with the number of sources, and packets with a forged source
//! address spend nothing of the source's own share but the round trip of a Retry.
//!
//! Sources are IPv4 addresses and IPv6 networks of 56 bits, which is what providers assign to a customer (RFC
//! 6177). Their hash selects one of [`CELLS`] cells, so sources may share a cell.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    net::{IpAddr, Ipv6Addr},
};

use mpvpn_types::{Duration, Instant};

use crate::ConnectionHandle;

/// Cells for sources, in each shard. More: 34 bytes of memory each; fewer: more sources that share a cell.
const CELLS: usize = 1024;
/// Attempts of a source whose address is not validated. Beyond them a Retry is demanded (RFC 9000 §8.1.2). A
/// household connects at once. More: work for forged packets; less: one more round trip for clients behind
/// one address.
const UNVALIDATED: Rate = Rate { burst: 16, interval: Duration::from_nanos(1_000_000_000 / 16) };
/// Attempts of a source whose address is validated; more are dropped, and clients repeat them after 1, 3, 7
/// and 15 s. 200 clients behind one address, with four connections each, are taken without waiting. More:
/// processor time for one source; less: many clients behind one address return late.
const VALIDATED: Rate = Rate { burst: 1024, interval: Duration::from_nanos(1_000_000_000 / 64) };
/// Connections of a source that are not authenticated, with a validated address, in each shard. More: memory
/// for one source; fewer: many clients behind one address return late.
const MAX_OF_SOURCE: u16 = 256;
/// Connections that are not authenticated, in all shards together: about 60 KB each, and 128 KiB more if they
/// fill their windows. More: memory; fewer: see [`MIN_AGE`].
const MAX_OPEN: usize = 1024;
/// Beyond [`MAX_OPEN`] the oldest connection ends for a new one, if it has had this time for its handshake
/// and request: three round trips of 600 ms. Longer: new clients are dropped in a flood; shorter: clients far
/// away do not get in.
const MIN_AGE: Duration = Duration::from_secs(2);

/// The decision about an attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is accepted.
    Accept,
    /// The client has to validate its address.
    Retry,
    /// It is ignored.
    Drop,
}

/// A token bucket: `burst` at once, and one more after each interval.
#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    interval: Duration,
}

/// A token bucket for each cell.
#[derive(Debug)]
struct Buckets {
    rate: Rate,
    /// When each bucket is full; `None` for one that was never used.
    full_at: Box<[Option<Instant>; CELLS]>,
}

impl Buckets {
    fn new(rate: Rate) -> Self {
        Self { rate, full_at: Box::new([None; CELLS]) }
    }

    /// Takes a token, if there is one.
    fn take(&mut self, cell: Cell, now: Instant) -> bool {
        let full_at = &mut self.full_at[cell.index()];
        let next = full_at.map_or(now, |at| at.max(now)) + self.rate.interval;
        let enough = next.saturating_duration_since(now) <= self.rate.interval * self.rate.burst;
        if enough {
            *full_at = Some(next);
        }
        enough
    }
}

/// The cell of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell(u16);

impl Cell {
    fn index(self) -> usize {
        usize::from(self.0) % CELLS
    }
}

/// A connection that is counted here until [`Strangers::remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StrangerId(u64);

#[derive(Debug)]
struct Open {
    connection: ConnectionHandle,
    since: Instant,
    /// The cell in which it is counted, if its address was validated.
    cell: Option<Cell>,
}

/// The strangers of one shard.
#[derive(Debug)]
pub(crate) struct Strangers {
    /// Makes the cell of a source unpredictable.
    key: u64,
    unvalidated: Buckets,
    validated: Buckets,
    /// The connections of each cell.
    of_cell: Box<[u16; CELLS]>,
    /// All connections that are not authenticated, the oldest first.
    open: BTreeMap<StrangerId, Open>,
    max_open: usize,
    last_id: u64,
}

impl Strangers {
    /// `key`: secret; `shards`: how many share the limits.
    pub(crate) fn new(key: u64, shards: u8) -> Self {
        Self {
            key,
            unvalidated: Buckets::new(UNVALIDATED),
            validated: Buckets::new(VALIDATED),
            of_cell: Box::new([0; CELLS]),
            open: BTreeMap::new(),
            max_open: (MAX_OPEN / usize::from(shards.max(1))).max(usize::from(MAX_OF_SOURCE)),
            last_id: 0,
        }
    }

    /// Decides about an attempt to connect from `source`. `busy`: every client has to validate its address
    /// now.
    pub(crate) fn judge(&mut self, now: Instant, source: IpAddr, validated: bool, busy: bool) -> Verdict {
        let cell = self.cell(source);
        if !validated {
            return if !busy && self.has_place(now) && self.unvalidated.take(cell, now) {
                Verdict::Accept
            } else {
                Verdict::Retry
            };
        }
        let fits = self.of_cell[cell.index()] < MAX_OF_SOURCE && self.has_place(now);
        match fits && self.validated.take(cell, now) {
            true => Verdict::Accept,
            false => Verdict::Drop,
        }
    }

    /// Whether one more connection may be opened, if need be for an old one.
    fn has_place(&self, now: Instant) -> bool {
        let oldest = self.open.first_key_value().map(|(_, oldest)| oldest);
        self.open.len() < self.max_open
            || oldest.is_some_and(|oldest| now.saturating_duration_since(oldest.since) >= MIN_AGE)
    }

    /// Counts an accepted connection.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        connection: ConnectionHandle,
        source: IpAddr,
        validated: bool,
    ) -> StrangerId {
        let cell = validated.then(|| self.cell(source));
        if let Some(cell) = cell {
            let count = &mut self.of_cell[cell.index()];
            *count = count.saturating_add(1);
        }
        self.last_id += 1;
        let id = StrangerId(self.last_id);
        self.open.insert(id, Open { connection, since: now, cell });
        id
    }

    /// A connection is authenticated, or has ended.
    pub(crate) fn remove(&mut self, id: StrangerId) {
        let cell = self.open.remove(&id).and_then(|open| open.cell);
        if let Some(cell) = cell {
            let count = &mut self.of_cell[cell.index()];
            *count = count.saturating_sub(1);
        }
    }

    /// The connection that has to end because there are too many; it is not counted any more.
    pub(crate) fn excess(&mut self) -> Option<ConnectionHandle> {
        let (id, oldest) = self.open.first_key_value().filter(|_| self.open.len() > self.max_open)?;
        let (id, connection) = (*id, oldest.connection);
        self.remove(id);
        Some(connection)
    }

    fn cell(&self, source: IpAddr) -> Cell {
        let source = match source.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> (128 - 56) << (128 - 56)).into(),
            v4 @ IpAddr::V4(_) => v4,
        };
        let mut hasher = DefaultHasher::new();
        (self.key, source).hash(&mut hasher);
        Cell((hasher.finish() % CELLS as u64) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 7));

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// How many of `attempts` at once get this verdict.
    fn count(
        strangers: &mut Strangers,
        now: Instant,
        source: IpAddr,
        validated: bool,
        verdict: Verdict,
    ) -> usize {
        (0..2000).filter(|_| strangers.judge(now, source, validated, false) == verdict).count()
    }

    #[test]
    fn a_source_has_a_burst_and_a_rate_and_forged_packets_do_not_spend_them() {
        let (mut strangers, now) = (Strangers::new(1, 1), Instant::now());
        assert_eq!(count(&mut strangers, now, SOURCE, false, Verdict::Accept), 16);
        assert_eq!(count(&mut strangers, now, SOURCE, false, Verdict::Retry), 2000);
        // Those were forged. The source itself can still validate its address.
        assert_eq!(count(&mut strangers, now, SOURCE, true, Verdict::Accept), 1024);
        assert_eq!(count(&mut strangers, now, SOURCE, true, Verdict::Drop), 2000);
        let later = now + Duration::from_secs(1);
        assert_eq!(count(&mut strangers, later, SOURCE, false, Verdict::Accept), 16);
        assert_eq!(count(&mut strangers, later, SOURCE, true, Verdict::Accept), 64);
        let much_later = now + Duration::from_secs(3600);
        assert_eq!(count(&mut strangers, much_later, SOURCE, true, Verdict::Accept), 1024, "not more");
    }

    #[test]
    fn a_source_is_an_ipv4_address_or_an_ipv6_network_of_a_customer() {
        let (mut strangers, now) = (Strangers::new(1, 1), Instant::now());
        let mut left = |text: &str| count(&mut strangers, now, ip(text), true, Verdict::Accept);
        assert_eq!((left("198.51.100.1"), left("198.51.100.2")), (1024, 1024));
        assert_eq!((left("::ffff:198.51.100.1"), left("2001:db8:0:a::1")), (0, 1024));
        // Bits 57 to 128 belong to the customer.
        assert_eq!((left("2001:db8:0:ff:1:2:3:4"), left("2001:db8:0:100::1")), (0, 1024));
    }

    #[test]
    fn a_million_sources_take_no_memory() {
        let (mut strangers, now) = (Strangers::new(1, 1), Instant::now());
        let retried = (0..1_000_000_u32)
            .filter(|bits| {
                strangers.judge(now, std::net::Ipv4Addr::from_bits(*bits).into(), false, false)
                    == Verdict::Retry
            })
            .count();
        assert_eq!(retried, 1_000_000 - 16 * CELLS, "each cell has a burst");
        assert!(strangers.open.is_empty());
        assert_eq!(strangers.judge(now, SOURCE, true, false), Verdict::Accept);
    }

    #[test]
    fn a_source_has_at_most_256_connections_that_are_not_authenticated() {
        let (mut strangers, now) = (Strangers::new(1, 1), Instant::now());
        let ids: Vec<_> = (0..256)
            .map(|number| {
                assert_eq!(strangers.judge(now, SOURCE, true, false), Verdict::Accept);
                strangers.insert(now, ConnectionHandle(number), SOURCE, true)
            })
            .collect();
        assert_eq!(strangers.judge(now, SOURCE, true, false), Verdict::Drop);
        assert_eq!(strangers.judge(now, ip("198.51.100.8"), true, false), Verdict::Accept);
        strangers.remove(ids[100]);
        assert_eq!(strangers.judge(now, SOURCE, true, false), Verdict::Accept);
        // Forged attempts do not count against the source.
        (0..300).for_each(|number| {
            strangers.insert(now, ConnectionHandle(1000 + number), SOURCE, false);
        });
        assert_eq!(strangers.judge(now, SOURCE, true, false), Verdict::Accept);
    }

    #[test]
    fn beyond_1024_strangers_an_old_one_ends_for_a_new_one() {
        let (mut strangers, start) = (Strangers::new(1, 1), Instant::now());
        let source = |number: usize| ip(&format!("203.0.{}.{}", number / 256, number % 256));
        for number in 0..MAX_OPEN {
            let now = start + Duration::from_millis(number as u64);
            assert_eq!(strangers.judge(now, source(number), true, false), Verdict::Accept);
            strangers.insert(now, ConnectionHandle(number), source(number), true);
        }
        assert_eq!(strangers.excess(), None);
        let early = start + MIN_AGE - Duration::from_millis(1);
        assert_eq!(strangers.judge(early, source(2000), true, false), Verdict::Drop, "all are young");
        assert_eq!(strangers.judge(early, source(2000), false, false), Verdict::Retry);
        let now = start + MIN_AGE;
        assert_eq!(strangers.judge(now, source(2000), true, false), Verdict::Accept);
        strangers.insert(now, ConnectionHandle(2000), source(2000), true);
        assert_eq!((strangers.excess(), strangers.excess()), (Some(ConnectionHandle(0)), None));
    }
}
