//! How the client uses each link: the configuration, changes at run time, and exhausted quotas. Also counts
//! what each link carries.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use mpvpn_config::{LinkConfig, is_match};
use mpvpn_path::{Day, PathCount};
use mpvpn_status::pipes::Pipes;
use mpvpn_tunnel::LinkPolicy;
use mpvpn_types::{BitRate, ByteSize, Tier, Transport};

/// The policies of all links, by interface name.
#[derive(Clone, Debug)]
pub struct LinkPolicies {
    configured: Vec<LinkConfig>,
    changed: BTreeMap<String, LinkConfig>,
    /// Links whose quota is exhausted, with the quota and the first day of the next period.
    exhausted_quotas: BTreeMap<String, (ByteSize, Day)>,
    /// The number of connections that share a configured rate.
    connection_count: u64,
    /// The number of pipes found for each link with `pipes = "auto"`.
    auto_pipes: BTreeMap<String, PathCount>,
    /// Links without `pipes` that get an automatic number, because of their operator.
    limited_by_operator: BTreeSet<String>,
}

impl LinkPolicies {
    /// The configured policies.
    pub fn new(configured: &[LinkConfig]) -> Self {
        Self {
            configured: configured.to_vec(),
            changed: BTreeMap::new(),
            exhausted_quotas: BTreeMap::new(),
            connection_count: 1,
            auto_pipes: BTreeMap::new(),
            limited_by_operator: BTreeSet::new(),
        }
    }

    /// The settings of a link: changed at run time, else of the first matching table of the configuration,
    /// else defaults.
    pub fn of(&self, name: &str) -> LinkConfig {
        let configured = || self.configured.iter().find(|link| is_match(&link.name, name)).cloned();
        self.changed.get(name).cloned().or_else(configured).unwrap_or_default()
    }

    /// Changes the settings of one link until the process ends or reloads.
    pub fn change(&mut self, name: &str, link: LinkConfig) {
        self.changed.insert(name.to_owned(), link);
    }

    /// Replaces the configuration of all links, and drops changes at run time. Returns whether anything
    /// changed.
    pub fn configure(&mut self, links: &[LinkConfig]) -> bool {
        let changed = self.configured != links || !self.changed.is_empty();
        self.configured = links.to_vec();
        self.changed.clear();
        changed
    }

    /// Sets whether the quota of a link is exhausted. Returns whether that changed.
    pub fn set_quota_exhausted(&mut self, name: &str, spent: Option<(ByteSize, Day)>) -> bool {
        let before = match spent {
            Some(spent) => self.exhausted_quotas.insert(name.to_owned(), spent),
            None => self.exhausted_quotas.remove(name),
        };
        before != spent
    }

    /// How many paths a link has.
    pub fn path_count(&self, name: &str) -> PathCount {
        match self.configured_pipes(name) {
            Pipes::Count(count) => PathCount::all(count.clamp(1, Pipes::MAX)),
            Pipes::Auto => self.auto_pipes.get(name).copied().unwrap_or(PathCount::all(1)),
        }
    }

    /// The configured transport of a link.
    pub fn transport(&self, name: &str) -> Transport {
        self.of(name).transport.unwrap_or_default()
    }

    /// The value of `pipes` that counts for a link.
    fn configured_pipes(&self, name: &str) -> Pipes {
        let default = || if self.limited_by_operator.contains(name) { Pipes::Auto } else { Pipes::default() };
        self.of(name).pipes.unwrap_or_else(default)
    }

    /// Whether the number of pipes is found automatically.
    pub fn has_auto_pipes(&self, name: &str) -> bool {
        self.configured_pipes(name) == Pipes::Auto
    }

    /// Whether `pipes` is not configured for a link.
    pub fn has_default_pipes(&self, name: &str) -> bool {
        self.of(name).pipes.is_none()
    }

    /// Sets whether the operator of a link is known to limit UDP sessions, so that the default of `pipes` is
    /// `auto`. Returns whether that changed.
    pub fn set_limited_by_operator(&mut self, name: &str, is_limited: bool) -> bool {
        match is_limited {
            true => self.limited_by_operator.insert(name.to_owned()),
            false => self.limited_by_operator.remove(name),
        }
    }

    /// Sets the number of pipes of a link with automatic pipes. Returns whether it changed.
    pub fn set_auto_pipes(&mut self, name: &str, count: PathCount) -> bool {
        self.auto_pipes.insert(name.to_owned(), count).unwrap_or(PathCount::all(1)) != count
    }

    /// Sets how many connections share the configured rates. Returns whether it changed.
    pub fn set_connection_count(&mut self, connections: usize) -> bool {
        let connections = connections.max(1) as u64;
        std::mem::replace(&mut self.connection_count, connections) != connections
    }

    /// The effective tier of a link: never while its quota is exhausted.
    pub fn tier(&self, name: &str) -> Tier {
        if self.exhausted_quotas.contains_key(name) { Tier::Never } else { self.of(name).tier }
    }

    /// Why a link's tier is `never`; empty if it is not.
    pub fn never_reason(&self, name: &str) -> String {
        match self.exhausted_quotas.get(name) {
            _ if self.of(name).tier == Tier::Never => "as configured".to_owned(),
            Some((quota, until)) => format!("the quota of {quota} is used up until {until}"),
            None => String::new(),
        }
    }

    /// The policy of a link for one connection, with its share of the configured rates.
    pub fn policy(&self, name: &str) -> LinkPolicy {
        let link = self.of(name).policy();
        let share = |rate: BitRate| BitRate::from_bps(rate.bps() / self.connection_count);
        LinkPolicy { tier: self.tier(name), up: link.up.map(share), down: link.down.map(share), ..link }
    }
}

/// Counters of all links, shared by all threads.
#[derive(Clone, Debug, Default)]
pub struct LinkMeters(Arc<Mutex<BTreeMap<String, LinkMeter>>>);

/// The bytes that one link has carried since the process started, over all its paths.
#[derive(Clone, Debug, Default)]
pub struct LinkMeter(Arc<MeterCounters>);

#[derive(Debug, Default)]
struct MeterCounters {
    /// Bytes of IP packets in both directions.
    ip_packet_bytes: AtomicU64,
    /// Bytes of UDP payloads, indexed by [`Direction`].
    udp_payload_bytes: [AtomicU64; 2],
}

/// Seen from this machine.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    /// To the peer.
    Sent,
    /// From the peer.
    Received,
}

impl LinkMeters {
    /// The counters of a link.
    pub fn of(&self, name: &str) -> LinkMeter {
        let mut meters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        meters.entry(name.to_owned()).or_default().clone()
    }
}

impl LinkMeter {
    /// Counts UDP payloads (bytes) in `datagrams` packets to or from an IPv4 or IPv6 address.
    pub fn count(&self, direction: Direction, payload: usize, datagrams: usize, is_ipv4: bool) {
        let header = if is_ipv4 { 28 } else { 48 };
        self.0.ip_packet_bytes.fetch_add((payload + datagrams * header) as u64, Relaxed);
        self.0.udp_payload_bytes[direction as usize].fetch_add(payload as u64, Relaxed);
    }

    /// Bytes of IP packets in both directions.
    pub fn ip_bytes(&self) -> u64 {
        self.0.ip_packet_bytes.load(Relaxed)
    }

    /// Bytes of UDP payloads in one direction.
    pub fn payload_bytes(&self, direction: Direction) -> u64 {
        self.0.udp_payload_bytes[direction as usize].load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies() -> LinkPolicies {
        let link = |name: &str, tier| LinkConfig { name: name.into(), tier, ..LinkConfig::default() };
        let first = LinkConfig { up: Some(BitRate::from_bps(8_000_000)), ..link("wwan*", Tier::Backup) };
        LinkPolicies::new(&[first, link("wwan0", Tier::Never)])
    }

    #[test]
    fn the_first_name_that_fits_counts_and_what_was_said_later_more() {
        let mut policies = policies();
        assert_eq!((policies.tier("wwan0"), policies.tier("eth0")), (Tier::Backup, Tier::Primary));
        policies.change("wwan0", LinkConfig { tier: Tier::Overflow, ..policies.of("wwan0") });
        assert_eq!((policies.tier("wwan0"), policies.tier("wwan1")), (Tier::Overflow, Tier::Backup));
        assert_eq!(policies.policy("wwan0").up, Some(BitRate::from_bps(8_000_000)));
        assert!(policies.configure(&[]) && !policies.configure(&[]));
        assert_eq!(policies.tier("wwan0"), Tier::Primary);
        policies = self::policies();
        assert!(policies.set_connection_count(4));
        assert_eq!(policies.policy("wwan0").up, Some(BitRate::from_bps(2_000_000)));
    }

    #[test]
    fn a_link_counts_what_every_socket_of_it_carries() {
        let meters = LinkMeters::default();
        meters.of("eth0").count(Direction::Sent, 3000, 2, true);
        meters.of("eth0").count(Direction::Received, 100, 1, false);
        let meter = meters.of("eth0");
        assert_eq!(
            (meter.payload_bytes(Direction::Sent), meter.payload_bytes(Direction::Received)),
            (3000, 100)
        );
        assert_eq!((meter.ip_bytes(), meters.of("eth1").ip_bytes()), (3056 + 148, 0));
    }

    #[test]
    fn a_used_up_quota_is_the_reason() {
        let mut policies = policies();
        let spent = (ByteSize::from_bytes(50_000_000_000), Day::of(1_796_083_200));
        assert!(
            policies.set_quota_exhausted("wwan0", Some(spent))
                && !policies.set_quota_exhausted("wwan0", Some(spent))
        );
        assert_eq!(policies.tier("wwan0"), Tier::Never);
        assert_eq!(policies.never_reason("wwan0"), "the quota of 50 GB is used up until 1 December");
        assert!(policies.set_quota_exhausted("wwan0", None));
        assert_eq!((policies.tier("wwan0"), policies.never_reason("wwan0").as_str()), (Tier::Backup, ""));
    }
}
