//! The users of a server that have series of their own: at most N, the rest together is `other`.
//!
//! In: the users of each status. Out: a name and figures for each series. Always holds: the number of series
//! is bounded; the counters of a series only grow, also when a user gets a series or loses it, so the sum of
//! all rates is right.

use std::collections::{BTreeMap, BTreeSet};

use super::{Metric, metrics};
use crate::User;

/// The series of all users that have none of their own. A user with this name has none either.
const OTHER: &str = "other";
/// A user takes the series of another one with this many times its traffic. Smaller: two users with about
/// equal traffic replace each other, and each time a series ends. Larger: users with much traffic have no
/// series. Chosen.
const TRAFFIC_RATIO_TO_REPLACE: u64 = 2;

/// The values of a user that a series shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserFigures {
    tx_bytes: u64,
    rx_bytes: u64,
    sessions: u32,
    quota_bytes: Option<u64>,
    quota_used_bytes: Option<u64>,
}

impl UserFigures {
    /// The metrics of each user.
    pub const METRICS: &[Metric<Self>] = metrics! { user: UserFigures;
        "user_transmit_bytes_total" Counter user.tx_bytes, "Bytes of IP packets sent to the clients of a user.";
        "user_receive_bytes_total" Counter user.rx_bytes, "Bytes of IP packets received from the clients of a user.";
        "user_sessions" Gauge u64::from(user.sessions), "Sessions of a user.";
        "user_quota_bytes" Gauge user.quota_bytes, "Quota of a user for a month, in bytes.";
        "user_quota_used_bytes" Gauge user.quota_used_bytes, "Used part of the quota, in bytes.";
    };
}

/// Which users have series, and the counters of these.
#[derive(Debug)]
pub struct UserSeries {
    /// Users with a series of their own at most.
    limit: usize,
    /// Bytes sent and received of each user, at the last status.
    seen: BTreeMap<String, [u64; 2]>,
    /// Bytes of each series since it began.
    own: BTreeMap<String, [u64; 2]>,
    other: [u64; 2],
}

impl UserSeries {
    /// With series for at most `limit` users.
    pub fn new(limit: u32) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self { limit, seen: BTreeMap::new(), own: BTreeMap::new(), other: [0; 2] }
    }

    /// The series now, by name. None without a limit above 0, or without users.
    pub fn update(&mut self, users: &[User]) -> BTreeMap<String, UserFigures> {
        if self.limit == 0 || users.is_empty() && self.seen.is_empty() {
            return BTreeMap::new();
        }
        self.choose(users);
        let mut series: BTreeMap<String, UserFigures> = BTreeMap::new();
        for user in users {
            let total = [user.tx_bytes, user.rx_bytes];
            let before = self.seen.insert(user.name.clone(), total).unwrap_or_default();
            // A user that was removed and added again begins at 0.
            let grown = |at: usize| if total[at] < before[at] { total[at] } else { total[at] - before[at] };
            let (bytes, name) = match self.own.get_mut(&user.name) {
                Some(own) => (own, user.name.as_str()),
                None => (&mut self.other, OTHER),
            };
            (bytes[0], bytes[1]) = (bytes[0] + grown(0), bytes[1] + grown(1));
            let figures = series.entry(name.to_owned()).or_default();
            figures.sessions += user.sessions;
            if name == user.name && name != OTHER {
                (figures.quota_bytes, figures.quota_used_bytes) = (user.quota_bytes, user.quota_used_bytes);
            }
        }
        let names: BTreeSet<&str> = users.iter().map(|user| user.name.as_str()).collect();
        self.seen.retain(|name, _| names.contains(name.as_str()));
        // Users that are gone have taken their series with them, but `other` goes on.
        if self.other != [0; 2] {
            series.entry(OTHER.to_owned()).or_default();
        }
        for (name, figures) in &mut series {
            [figures.tx_bytes, figures.rx_bytes] = self.own.get(name).copied().unwrap_or(self.other);
        }
        series
    }

    /// Decides which users have series: those with the most traffic.
    fn choose(&mut self, users: &[User]) {
        let mut ranked: Vec<(u64, &str)> = users
            .iter()
            .filter(|user| user.name != OTHER)
            .map(|user| (user.tx_bytes.saturating_add(user.rx_bytes), user.name.as_str()))
            .collect();
        ranked.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
        let traffic: BTreeMap<&str, u64> = ranked.iter().map(|(bytes, name)| (*name, *bytes)).collect();
        self.own.retain(|name, _| traffic.contains_key(name.as_str()));
        for (bytes, name) in ranked.into_iter().take(self.limit) {
            if self.own.contains_key(name) {
                continue;
            }
            if self.own.len() >= self.limit {
                let least = self.own.keys().map(|own| (traffic.get(own.as_str()).copied().unwrap_or(0), own));
                let Some((least, replaced)) = least.min().map(|(bytes, own)| (bytes, own.clone())) else {
                    return;
                };
                if bytes == 0 || bytes < least.saturating_mul(TRAFFIC_RATIO_TO_REPLACE) {
                    return;
                }
                self.own.remove(&replaced);
            }
            self.own.insert(name.to_owned(), [0; 2]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(all: &[(&str, u64)]) -> Vec<User> {
        let user = |(name, bytes): &(&str, u64)| User {
            name: (*name).to_owned(),
            sessions: 1,
            tx_bytes: *bytes,
            rx_bytes: bytes / 10,
            quota_bytes: Some(7),
            ..User::default()
        };
        all.iter().map(user).collect()
    }

    fn sent(series: &mut UserSeries, all: &[(&str, u64)]) -> Vec<(String, u64)> {
        series.update(&users(all)).into_iter().map(|(name, figures)| (name, figures.tx_bytes)).collect()
    }

    fn expected(all: &[(&str, u64)]) -> Vec<(String, u64)> {
        all.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
    }

    #[test]
    fn the_users_with_the_most_traffic_have_series_and_the_rest_is_other() {
        let mut series = UserSeries::new(2);
        let all = [("anna", 30), ("bob", 500), ("carl", 200), ("dora", 1)];
        assert_eq!(sent(&mut series, &all), expected(&[("bob", 500), ("carl", 200), ("other", 31)]));
        let figures = series.update(&users(&all));
        assert_eq!((figures["other"].sessions, figures["other"].quota_bytes), (2, None));
        assert_eq!((figures["bob"].rx_bytes, figures["bob"].quota_bytes), (50, Some(7)));
        assert!(UserSeries::new(0).update(&users(&all)).is_empty(), "none unless they are wanted");
        assert!(UserSeries::new(2).update(&[]).is_empty(), "none without users");
    }

    #[test]
    fn the_counters_of_a_series_only_grow_and_no_byte_counts_twice() {
        let mut series = UserSeries::new(1);
        let mut before = BTreeMap::new();
        let mut total = 0;
        for (anna, bob) in [(100, 60), (110, 199), (120, 260), (1000, 300), (1100, 310)] {
            let now: BTreeMap<_, _> =
                sent(&mut series, &[("anna", anna), ("bob", bob)]).into_iter().collect();
            assert_eq!(now.len(), 2, "{now:?}");
            for (name, bytes) in &now {
                let grown = bytes.checked_sub(before.get(name).copied().unwrap_or(0));
                total += grown.unwrap_or_else(|| panic!("{name} shrinks: {before:?} {now:?}"));
            }
            assert_eq!(total, anna + bob, "{now:?}");
            before = now;
        }
        assert!(before.contains_key("anna"), "bob took its series for a while");
    }

    #[test]
    fn users_with_about_equal_traffic_do_not_replace_each_other() {
        let mut series = UserSeries::new(1);
        assert_eq!(sent(&mut series, &[("anna", 100), ("bob", 99)])[0].0, "anna");
        assert_eq!(sent(&mut series, &[("anna", 100), ("bob", 199)])[0].0, "anna");
        assert_eq!(sent(&mut series, &[("anna", 100), ("bob", 200)])[0].0, "bob");
        assert_eq!(sent(&mut series, &[("anna", 300), ("bob", 200)])[0].0, "bob");
    }

    #[test]
    fn a_user_that_is_gone_makes_place_and_one_named_other_has_no_series() {
        let mut series = UserSeries::new(1);
        assert_eq!(
            sent(&mut series, &[("anna", 100), ("other", 999)]),
            expected(&[("anna", 100), ("other", 999)])
        );
        assert_eq!(sent(&mut series, &[("bob", 5), ("other", 999)]), expected(&[("bob", 5), ("other", 999)]));
        assert_eq!(sent(&mut series, &[("bob", 2)]), expected(&[("bob", 7), ("other", 999)]), "added again");
        assert!(series.seen.len() == 1 && series.own.len() == 1);
    }
}
