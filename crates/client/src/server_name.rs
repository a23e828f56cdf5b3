//! Decides when to resolve the server's name, and whether the result changes anything.
//!
//! In: whether the server is reached, and results of the resolver. Out: when to query, and new addresses.
//! Always holds: no query while the server is reached, so a failing name server, or one that returns another
//! address each time, never disturbs a working tunnel.

use std::{net::SocketAddr, time::Instant};

use mpvpn_path::next_probe_at;
use mpvpn_types::Duration;

/// The shortest pause between queries; it grows with the silence of the server. Shorter: load on name
/// servers. Longer: a server that moved is found later. Chosen.
const MIN_QUERY_PAUSE: Duration = Duration::from_secs(2);
/// A tunnel that worked for this long begins anew with short pauses. Shorter: a flapping tunnel queries
/// often. Chosen.
const REACHED_BEFORE_RESET: Duration = Duration::from_secs(30);

/// The state of resolving one name.
#[derive(Debug, Default)]
pub(super) struct ServerName {
    /// The addresses in use.
    addresses: Vec<SocketAddr>,
    /// Whether a query is pending.
    query_pending: bool,
    /// When the last query began or was answered.
    queried_at: Option<Instant>,
    /// Since when the server has not been reached, or had a reason to be asked for anew.
    silent_since: Option<Instant>,
    reached_since: Option<Instant>,
}

impl ServerName {
    /// Whether to query now; `restarted_at` is the last reason to ask anew.
    pub(super) fn update(&mut self, now: Instant, reached: bool, restarted_at: Instant) -> bool {
        if reached {
            let since = *self.reached_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= REACHED_BEFORE_RESET {
                (self.silent_since, self.queried_at) = (None, None);
            }
            return false;
        }
        self.reached_since = None;
        self.silent_since = Some(self.silent_since.unwrap_or(now).max(restarted_at));
        if self.query_pending || self.next_query_at().is_some_and(|at| now < at) {
            return false;
        }
        (self.query_pending, self.queried_at) = (true, Some(now));
        true
    }

    fn next_query_at(&self) -> Option<Instant> {
        Some(next_probe_at(self.queried_at?, self.silent_since?, MIN_QUERY_PAUSE, false))
    }

    /// When [`Self::update`] must be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next_query_at().filter(|_| !self.query_pending && self.reached_since.is_none())
    }

    /// Handles the result of a query; `None` if it failed. Returns the addresses to use if they have changed,
    /// new ones first, because the old ones did not work.
    pub(super) fn on_resolved(
        &mut self,
        now: Instant,
        found: Option<Vec<SocketAddr>>,
    ) -> Option<Vec<SocketAddr>> {
        self.query_pending = false;
        // After a slow answer, the next query waits, too.
        self.queried_at = Some(now);
        let mut found = found?;
        let same = found.len() == self.addresses.len() && found.iter().all(|it| self.addresses.contains(it));
        if same {
            return None;
        }
        found.sort_by_key(|address| self.addresses.contains(address));
        self.addresses.clone_from(&found);
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// Simulates `seconds` with a resolver that answers at once; returns the seconds of the queries.
    fn query_times(
        name: &mut ServerName,
        begin: Instant,
        seconds: u64,
        reached: bool,
        found: &[&str],
    ) -> Vec<u64> {
        let ask = |second: &u64| {
            let now = begin + S * *second as u32;
            let asks = name.update(now, reached, begin);
            if asks {
                name.on_resolved(now, Some(addresses(found)));
            }
            asks
        };
        (0..seconds).filter(ask).collect()
    }

    #[test]
    fn the_name_is_asked_for_ever_more_seldom_while_nothing_is_reached() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        let times = query_times(&mut name, begin, 100, false, &["192.0.2.1:443"]);
        assert_eq!(times[..4], [0, 2, 4, 6]);
        assert!(times.iter().filter(|at| (30..60).contains(*at)).count() <= 11, "{times:?}");
        assert!(times.iter().filter(|at| **at > 61).count() <= 2, "{times:?}");
        let begin = begin + S * 100;
        assert!(
            query_times(&mut name, begin, 40, true, &["192.0.2.1:443"]).is_empty(),
            "it works: nobody asks"
        );
        // After a working time the first query is immediate again.
        assert_eq!(query_times(&mut name, begin + S * 40, 10, false, &["192.0.2.1:443"]), [0, 2, 4, 6, 8]);
    }

    #[test]
    fn a_tunnel_that_works_for_a_moment_earns_no_short_pauses() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        query_times(&mut name, begin, 90, false, &["192.0.2.1:443"]);
        let asked = |name: &mut ServerName, second| name.update(begin + S * second, false, begin);
        assert!(!name.update(begin + S * 91, true, begin) && !asked(&mut name, 93));
        assert!((94..120).any(|second| asked(&mut name, second)));
    }

    #[test]
    fn a_change_of_the_network_makes_the_next_query_due_at_once() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        query_times(&mut name, begin, 300, false, &["192.0.2.1:443"]);
        let now = begin + S * 300;
        assert!(!name.update(now, false, begin) && name.update(now, false, now));
        name.on_resolved(now, None);
        assert!(!name.update(now + S, false, now) && name.update(now + S * 2, false, now));
    }

    #[test]
    fn one_question_at_a_time() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        let update = |name: &mut ServerName, second| name.update(begin + S * second, false, begin);
        assert!(update(&mut name, 0) && !update(&mut name, 50));
        assert_eq!(name.poll_timeout(), None);
        assert_eq!(name.on_resolved(begin + S * 20, None), None);
        assert_eq!(name.poll_timeout(), Some(begin + S * 22));
        assert!(!update(&mut name, 21) && update(&mut name, 22));
    }

    #[test]
    fn a_client_that_knows_no_address_asks_often_at_first() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        let asked = |second: &u32| {
            let now = begin + S * *second;
            let asks = name.update(now, false, begin);
            if asks {
                name.on_resolved(now, None);
            }
            asks
        };
        assert_eq!((0..9).filter(asked).collect::<Vec<_>>(), [0, 2, 4, 6, 8]);
    }

    #[test]
    fn other_addresses_are_used_and_the_same_ones_change_nothing() {
        let (mut name, now) = (ServerName::default(), Instant::now());
        let mut resolved = |list: &[&str]| name.on_resolved(now, Some(addresses(list)));
        let two = ["192.0.2.1:443", "192.0.2.2:443"];
        assert_eq!(resolved(&two), Some(addresses(&two)));
        assert_eq!(resolved(&["192.0.2.2:443", "192.0.2.1:443"]), None, "another order is nothing new");
        let found = resolved(&["192.0.2.2:443", "192.0.2.3:443"]);
        assert_eq!(found, Some(addresses(&["192.0.2.3:443", "192.0.2.2:443"])));
    }
}
