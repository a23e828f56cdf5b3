//! Decides when to resolve the server's name, and whether the result changes anything.
//!
//! In: whether the server is reached, and results of the resolver. Out: when to query, and new addresses.
//! Always holds: no query while the server is reached, so a failing name server, or one that returns another
//! address each time, never disturbs a working tunnel.

use std::{net::SocketAddr, time::Instant};

use mpvpn_types::Duration;

/// The delay before the second query; it doubles with each further query up to the maximum. Shorter: load on
/// name servers. Longer: a server that moved is found later. Chosen.
const INITIAL_RETRY_DELAY: Duration = Duration::from_secs(2);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// A tunnel that worked for this long resets the delay. Shorter: a flapping tunnel queries often. Chosen.
const REACHED_BEFORE_RESET: Duration = Duration::from_secs(30);

/// The state of resolving one name.
#[derive(Debug, Default)]
pub(super) struct ServerName {
    /// The addresses in use.
    addresses: Vec<SocketAddr>,
    /// Whether a query is pending.
    query_pending: bool,
    /// When to query next if the server is not reached by then.
    next_query_at: Option<Instant>,
    retry_delay: Option<Duration>,
    reached_since: Option<Instant>,
}

impl ServerName {
    /// Whether to query now.
    pub(super) fn update(&mut self, now: Instant, reached: bool) -> bool {
        if reached {
            let since = *self.reached_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= REACHED_BEFORE_RESET {
                (self.retry_delay, self.next_query_at) = (None, None);
            }
            return false;
        }
        self.reached_since = None;
        if self.query_pending || self.next_query_at.is_some_and(|at| now < at) {
            return false;
        }
        let delay = self.retry_delay.map_or(INITIAL_RETRY_DELAY, |delay| (delay * 2).min(MAX_RETRY_DELAY));
        (self.query_pending, self.retry_delay, self.next_query_at) = (true, Some(delay), Some(now + delay));
        true
    }

    /// When [`Self::update`] must be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next_query_at.filter(|_| !self.query_pending && self.reached_since.is_none())
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
        self.next_query_at = self.next_query_at.max(Some(now + INITIAL_RETRY_DELAY));
        let Some(mut found) = found else {
            if self.addresses.is_empty() {
                // Without any address there is nothing else to try, so keep the delay short.
                (self.retry_delay, self.next_query_at) = (None, Some(now + INITIAL_RETRY_DELAY));
            }
            return None;
        };
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
            let asks = name.update(now, reached);
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
        assert_eq!(query_times(&mut name, begin, 100, false, &["192.0.2.1:443"]), [0, 2, 6, 14, 30, 60, 90]);
        let begin = begin + S * 100;
        assert!(
            query_times(&mut name, begin, 40, true, &["192.0.2.1:443"]).is_empty(),
            "it works: nobody asks"
        );
        // After a working time the first query is immediate again.
        assert_eq!(query_times(&mut name, begin + S * 40, 10, false, &["192.0.2.1:443"]), [0, 2, 6]);
    }

    #[test]
    fn a_tunnel_that_works_for_a_moment_earns_no_short_pauses() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        assert_eq!(query_times(&mut name, begin, 8, false, &["192.0.2.1:443"]), [0, 2, 6]);
        assert!(query_times(&mut name, begin + S * 8, 2, true, &[]).is_empty());
        assert_eq!(query_times(&mut name, begin + S * 10, 30, false, &["192.0.2.1:443"]), [4, 20]);
    }

    #[test]
    fn one_question_at_a_time() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        assert!(name.update(begin, false) && !name.update(begin + S * 60, false));
        assert_eq!(name.poll_timeout(), None);
        assert_eq!(name.on_resolved(begin + S * 60, None), None);
        assert_eq!(name.poll_timeout(), Some(begin + S * 62));
        assert!(!name.update(begin + S * 61, false) && name.update(begin + S * 62, false));
    }

    #[test]
    fn a_client_that_knows_no_address_asks_often() {
        let (mut name, begin) = (ServerName::default(), Instant::now());
        let asked = |second: &u32| {
            let now = begin + S * *second;
            let asks = name.update(now, false);
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
