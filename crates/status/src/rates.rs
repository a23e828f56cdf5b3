//! Rates of counters, measured between two statuses, and those of the last minutes.
//!
//! In: counters of bytes with the time of the process. Out: rates in bit/s. Always holds: the number of
//! samples of a counter is bounded, and there is no counter that the last status did not have.

use std::collections::{HashMap, VecDeque};

use mpvpn_input::role::Role;

use crate::{Client, Path, Status};

/// Rates towards the client (`down`) and from the client (`up`), in bit/s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Towards the client.
    pub down: f64,
    /// From the client.
    pub up: f64,
}

impl Rate {
    /// Both directions together.
    pub fn sum(self) -> f64 {
        self.down + self.up
    }
}

/// Rates of all counters of a process.
#[derive(Debug)]
pub struct Rates {
    max_samples: usize,
    series: HashMap<String, Series>,
    /// Time since the start of the process (s), at the last status.
    uptime: f64,
}

#[derive(Debug)]
struct Series {
    down_bytes: u64,
    up_bytes: u64,
    rates: VecDeque<Rate>,
}

/// Counters of bytes of one thing.
#[derive(Clone, Debug)]
pub struct Counters {
    /// Name of the thing, unique within a process.
    pub key: String,
    /// Towards the client.
    pub down_bytes: u64,
    /// From the client.
    pub up_bytes: u64,
}

impl Counters {
    /// The counters of a process with this role; at a server, sent bytes go down.
    pub fn new(role: Role, key: String, tx_bytes: u64, rx_bytes: u64) -> Self {
        let (down_bytes, up_bytes) = match role {
            Role::Server => (tx_bytes, rx_bytes),
            Role::Client => (rx_bytes, tx_bytes),
        };
        Self { key, down_bytes, up_bytes }
    }

    /// The counters of everything in a status that has a rate.
    pub fn of_all(status: &Status) -> impl Iterator<Item = Self> {
        let of_client = |client: &Client| {
            let own = Self::new(Role::Server, client_key(client), client.tx_bytes, client.rx_bytes);
            let name = client_name(client);
            Self::of_paths(Role::Server, &name, &client.paths).chain([own]).collect::<Vec<_>>()
        };
        Self::of_status(status).chain(status.clients.iter().flat_map(of_client))
    }

    /// The counters of the links, classes and paths of a process, without those of its clients.
    pub fn of_status(status: &Status) -> impl Iterator<Item = Self> {
        let role = status.role;
        let links = status
            .links
            .iter()
            .map(move |link| Self::new(role, link_key(&link.name), link.tx_bytes, link.rx_bytes));
        let classes = status
            .classes
            .iter()
            .map(move |class| Self::new(role, class_key(&class.name), class.tx_bytes, class.rx_bytes));
        links.chain(classes).chain(Self::of_paths(role, "", &status.paths))
    }

    /// The counters of the paths of a client of a server, or of a process itself, whose name is empty.
    pub fn of_paths(role: Role, owner: &str, paths: &[Path]) -> impl Iterator<Item = Self> {
        paths.iter().map(move |path| Self::new(role, path_key(owner, path), path.tx_bytes, path.rx_bytes))
    }
}

/// The key of the link with this name.
pub fn link_key(name: &str) -> String {
    format!("link {name}")
}

/// The key of the class with this name.
pub fn class_key(name: &str) -> String {
    format!("class {name}")
}

/// The key of a client of a server.
pub fn client_key(client: &Client) -> String {
    format!("client {}", client_name(client))
}

/// The name of a session: its user and its first address.
pub fn client_name(client: &Client) -> String {
    match client.addresses.first() {
        Some(address) => format!("{} {}", client.user, address.addr()),
        None => client.user.clone(),
    }
}

/// The paths of a process, each with the name of its client, which is empty at a client.
pub fn all_paths(status: &Status) -> impl Iterator<Item = (String, &Path)> {
    let own = status.paths.iter().map(|path| (String::new(), path));
    let of_clients = |client| {
        let name = client_name(client);
        client.paths.iter().map(move |path| (name.clone(), path))
    };
    own.chain(status.clients.iter().flat_map(of_clients))
}

/// The key of a path of `owner`; see [`Counters::of_paths`].
pub fn path_key(owner: &str, path: &Path) -> String {
    format!("path {owner} {}", path.id)
}

impl Rates {
    /// No rates yet. The last `max_samples` of each counter are kept, at least one.
    pub fn new(max_samples: usize) -> Self {
        Self { max_samples: max_samples.max(1), series: HashMap::new(), uptime: 0.0 }
    }

    /// Whether no status was taken yet.
    pub fn is_empty(&self) -> bool {
        self.series.is_empty()
    }

    /// Takes the counters of a status that was made `uptime` seconds after the start of the process.
    pub fn take(&mut self, uptime: f64, counters: impl IntoIterator<Item = Counters>) {
        let seconds = uptime - self.uptime;
        // Another process: its counters began at 0.
        let continues = seconds > 0.0;
        self.uptime = uptime;
        let mut before = std::mem::take(&mut self.series);
        for Counters { key, down_bytes, up_bytes } in counters {
            let mut rates = VecDeque::new();
            if let Some(known) = before.remove(&key).filter(|_| continues) {
                rates = known.rates;
                let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 * 8.0 / seconds;
                if rates.len() >= self.max_samples {
                    rates.pop_front();
                }
                rates.push_back(Rate {
                    down: rate(down_bytes, known.down_bytes),
                    up: rate(up_bytes, known.up_bytes),
                });
            }
            self.series.insert(key, Series { down_bytes, up_bytes, rates });
        }
    }

    /// The sum of the latest rates of these counters, as far as they are known.
    pub fn total(&self, keys: impl Iterator<Item = String>) -> Option<Rate> {
        let add = |sum: Rate, rate: Rate| Rate { down: sum.down + rate.down, up: sum.up + rate.up };
        keys.filter_map(|key| self.now(&key)).reduce(add)
    }

    /// The sum of the rates of a process: of its links, or of its clients.
    pub fn of_process(&self, status: &Status) -> Option<Rate> {
        let links = status.links.iter().map(|link| link_key(&link.name));
        self.total(links.chain(status.clients.iter().map(client_key)))
    }

    /// The latest rate; `None` before the second status.
    pub fn now(&self, key: &str) -> Option<Rate> {
        self.series.get(key)?.rates.back().copied()
    }

    /// The last `count` sums of both directions, the oldest first; 0 where nothing is known.
    pub fn last(&self, key: &str, count: usize) -> Vec<f64> {
        let known = self.series.get(key).map(|series| &series.rates);
        let known_len = known.map_or(0, VecDeque::len);
        let missing = std::iter::repeat_n(0.0, count.saturating_sub(known_len));
        let skipped = known_len.saturating_sub(count);
        missing.chain(known.into_iter().flatten().skip(skipped).map(|rate| rate.sum())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_SAMPLES: usize = 300;

    fn counters(key: &str, down_bytes: u64, up_bytes: u64) -> Counters {
        Counters { key: key.into(), down_bytes, up_bytes }
    }

    #[test]
    fn a_rate_is_the_difference_of_counters_over_the_time_of_the_process() {
        let mut rates = Rates::new(MAX_SAMPLES);
        rates.take(10.0, [counters("eth0", 1000, 0)]);
        assert_eq!(rates.now("eth0"), None);
        rates.take(12.0, [counters("eth0", 251_000, 500)]);
        assert_eq!(rates.now("eth0"), Some(Rate { down: 1e6, up: 2e3 }));
        assert_eq!(rates.last("eth0", 3), [0.0, 0.0, 1_002_000.0]);
    }

    #[test]
    fn a_process_that_started_again_has_no_rate_from_before() {
        let mut rates = Rates::new(MAX_SAMPLES);
        rates.take(10.0, [counters("eth0", 1000, 0)]);
        rates.take(11.0, [counters("eth0", 2000, 0)]);
        rates.take(0.5, [counters("eth0", 100, 0)]);
        assert_eq!(rates.now("eth0"), None);
        rates.take(1.5, [counters("eth0", 200, 0)]);
        assert_eq!(rates.now("eth0").unwrap().down, 800.0);
    }

    #[test]
    fn counters_that_are_gone_are_forgotten_and_the_others_are_bounded() {
        let mut rates = Rates::new(MAX_SAMPLES);
        for second in 1..1000_u32 {
            let gone = (second < 500).then(|| counters("wwan0", 0, 0));
            rates.take(f64::from(second), gone.into_iter().chain([counters("eth0", u64::from(second), 0)]));
        }
        assert_eq!(rates.series.len(), 1);
        assert_eq!(rates.series["eth0"].rates.len(), MAX_SAMPLES);
    }
}
