//! The view that a browser requests: how often, and which sessions of a server.
//!
//! In: the query of `GET /api/live`, and all sessions in short. Out: the sessions to show, in order. Always
//! holds: at most [`MAX_SHOWN`].

use std::cmp::Ordering;

use mpvpn_status::SessionSummary;
use percent_encoding::percent_decode_str;
use serde::{
    Deserialize,
    de::{DeserializeOwned, value::StrDeserializer},
};

/// Sessions that a browser gets at a time, each of some 2 kB with its paths. More: larger frames, up to four
/// times a second; fewer: more pages to turn.
pub(crate) const MAX_SHOWN: usize = 100;
/// Sessions that a browser gets if it does not say how many.
const DEFAULT_SHOWN: usize = 25;
/// Longest text to find (bytes): that of the longest user's name. More: memory for nothing.
const MAX_FIND_BYTES: usize = 64;

/// The content of a stream. Streams with the same view get the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View {
    /// Frames a second, 1 to 4.
    pub(crate) hz: u8,
    offset: usize,
    count: usize,
    order: SessionOrder,
    reversed: bool,
    /// In small letters.
    find: String,
}

impl Default for View {
    fn default() -> Self {
        Self {
            hz: 1,
            offset: 0,
            count: DEFAULT_SHOWN,
            order: SessionOrder::Rate,
            reversed: false,
            find: String::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
enum SessionOrder {
    /// Highest rate first.
    Rate,
    Down,
    Up,
    /// Most bytes first.
    Bytes,
    User,
    Address,
    /// The newest first.
    Connected,
}

/// A session with its rates in bit/s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RatedSession<'a> {
    pub(crate) session: &'a SessionSummary,
    pub(crate) down_bps: f64,
    pub(crate) up_bps: f64,
}

/// The sessions of a view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Identifiers, in order.
    pub(crate) ids: Vec<u64>,
    /// Number of sessions that the text to find leaves.
    pub(crate) found: usize,
}

impl View {
    /// The view that a query asks for; keys that are not about a view are skipped.
    pub(crate) fn parse<'a>(query: impl Iterator<Item = (&'a str, String)>) -> Result<Self, String> {
        let mut view = Self::default();
        for (key, value) in query {
            let number = || value.parse::<usize>().map_err(|_| format!("`{key}` is no number: {value:?}"));
            match key {
                "hz" => {
                    let hz = number()?;
                    view.hz = u8::try_from(hz)
                        .ok()
                        .filter(|hz| (1..=4).contains(hz))
                        .ok_or_else(|| format!("`hz` is {hz}, and not from 1 to 4"))?;
                }
                "offset" => view.offset = number()?,
                "count" => view.count = number()?.min(MAX_SHOWN),
                "find" if value.len() > MAX_FIND_BYTES => {
                    return Err(format!("`find` has more than {MAX_FIND_BYTES} bytes"));
                }
                "find" => view.find = value.to_lowercase(),
                "sort" => {
                    view.reversed = value.starts_with('-');
                    view.order = word(value.trim_start_matches('-')).ok_or_else(|| {
                        format!(
                            "`sort` is {value:?}, and not rate, down, up, bytes, user, address or connected"
                        )
                    })?;
                }
                _ => {}
            }
        }
        Ok(view)
    }

    /// The sessions to show.
    pub(crate) fn choose<'a>(&self, all: impl Iterator<Item = RatedSession<'a>>) -> Shown {
        let mut found: Vec<_> = all.filter(|rated| self.matches(rated.session)).collect();
        let order = |a: &RatedSession<'_>, b: &RatedSession<'_>| {
            let order = self.order.compare(a, b).then(a.session.id.cmp(&b.session.id));
            if self.reversed { order.reverse() } else { order }
        };
        let end = self.offset.saturating_add(self.count);
        if end < found.len() && end > 0 {
            // Only those up to the end are sorted.
            found.select_nth_unstable_by(end - 1, order);
        }
        let all_found = found.len();
        found.truncate(end);
        found.sort_unstable_by(order);
        Shown {
            ids: found.iter().skip(self.offset).map(|rated| rated.session.id).collect(),
            found: all_found,
        }
    }

    fn matches(&self, session: &SessionSummary) -> bool {
        self.find.is_empty()
            || session.user.to_lowercase().contains(&self.find)
            || session.address.is_some_and(|address| address.to_string().contains(&self.find))
    }
}

impl SessionOrder {
    fn compare(self, a: &RatedSession<'_>, b: &RatedSession<'_>) -> Ordering {
        let bytes = |rated: &RatedSession<'_>| rated.session.tx_bytes.saturating_add(rated.session.rx_bytes);
        match self {
            Self::Rate => (b.down_bps + b.up_bps).total_cmp(&(a.down_bps + a.up_bps)),
            Self::Down => b.down_bps.total_cmp(&a.down_bps),
            Self::Up => b.up_bps.total_cmp(&a.up_bps),
            Self::Bytes => bytes(b).cmp(&bytes(a)),
            Self::User => a.session.user.cmp(&b.session.user),
            Self::Address => a.session.address.cmp(&b.session.address),
            Self::Connected => a.session.connected_s.total_cmp(&b.session.connected_s),
        }
    }
}

/// The value that a word of a URI stands for.
pub(crate) fn word<T: DeserializeOwned>(text: &str) -> Option<T> {
    T::deserialize(StrDeserializer::<serde::de::value::Error>::new(text)).ok()
}

/// The keys and values of a query, with `%` sequences and `+` decoded.
pub(crate) fn query_pairs(query: &str) -> impl Iterator<Item = (&str, String)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key, percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions() -> Vec<SessionSummary> {
        let session = |id: u64, user: &str, last: u8| SessionSummary {
            id,
            user: user.into(),
            address: Some([10, 0, 0, last].into()),
            connected_s: id as f64,
            tx_bytes: 1000 * u64::from(last),
            rx_bytes: 0,
        };
        vec![session(1, "bob", 7), session(2, "alice", 9), session(3, "Carol", 8), session(4, "alice", 2)]
    }

    fn ids(query: &str) -> (Vec<u64>, usize) {
        let all = sessions();
        let rated = all.iter().map(|session| RatedSession {
            session,
            down_bps: (session.id % 3) as f64,
            up_bps: session.id as f64 / 100.0,
        });
        let shown = View::parse(query_pairs(query)).unwrap().choose(rated);
        (shown.ids, shown.found)
    }

    #[test]
    fn sessions_are_sorted_filtered_and_cut() {
        assert_eq!(ids(""), (vec![2, 4, 1, 3], 4));
        assert_eq!(ids("sort=-rate&count=2"), (vec![3, 1], 4));
        assert_eq!(ids("sort=user"), (vec![3, 2, 4, 1], 4));
        assert_eq!(ids("sort=address&offset=1&count=2"), (vec![1, 3], 4));
        assert_eq!(ids("sort=bytes"), (vec![2, 3, 1, 4], 4));
        assert_eq!(ids("sort=-connected"), (vec![4, 3, 2, 1], 4));
        assert_eq!(ids("sort=up"), (vec![4, 3, 2, 1], 4));
        assert_eq!(ids("sort=address&find=ALIC"), (vec![4, 2], 2));
        assert_eq!(ids("find=10.0.0.8"), (vec![3], 1));
        assert_eq!(ids("find=nobody&offset=3"), (vec![], 0));
        assert_eq!(ids("offset=18446744073709551615&count=9"), (vec![], 4));
        assert_eq!(ids("count=0"), (vec![], 4));
    }

    #[test]
    fn a_query_with_a_mistake_is_refused() {
        for wrong in ["hz=0", "hz=5", "hz=x", "offset=-1", "sort=size", "count=1e9"] {
            assert!(View::parse(query_pairs(wrong)).is_err(), "{wrong}");
        }
        assert!(View::parse(query_pairs(&format!("find={}", "x".repeat(65)))).is_err());
        let view = View::parse(query_pairs("hz=4&count=1000000&csrf=abc&find=a%2Bb+c%")).unwrap();
        assert_eq!((view.hz, view.count, view.find.as_str()), (4, MAX_SHOWN, "a+b c%"));
    }
}
