//! How each link of a client is to be used: what the configuration says, what was changed at run time, and
//! what a used-up quota forbids.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use mpvpn_control::config::{LinkConfig, Pipes, is_match};
use mpvpn_path::{Day, PipeCount};
use mpvpn_tunnel::LinkPolicy;
use mpvpn_types::{BitRate, ByteSize, Tier, Transport};

/// The policies of all links, by the names of interfaces.
#[derive(Clone, Debug)]
pub(crate) struct Policies {
    configured: Vec<LinkConfig>,
    changed: BTreeMap<String, LinkConfig>,
    /// Links whose quota is used up, and until when.
    spent: BTreeMap<String, (ByteSize, Day)>,
    /// Connections that share what a link may carry.
    shares: u64,
    /// What was found for links whose number of pipes nobody has said.
    pipes: BTreeMap<String, PipeCount>,
}

impl Policies {
    pub(crate) fn new(configured: &[LinkConfig]) -> Self {
        Self {
            configured: configured.to_vec(),
            changed: BTreeMap::new(),
            spent: BTreeMap::new(),
            shares: 1,
            pipes: BTreeMap::new(),
        }
    }

    /// What was said about a link, now or in the configuration.
    pub(crate) fn of(&self, name: &str) -> LinkConfig {
        let configured = || self.configured.iter().find(|link| is_match(&link.name, name)).cloned();
        self.changed.get(name).cloned().or_else(configured).unwrap_or_default()
    }

    /// Says something else about a link.
    pub(crate) fn change(&mut self, name: &str, link: LinkConfig) {
        self.changed.insert(name.to_owned(), link);
    }

    /// Says something else about all links, and forgets what was said of single ones; whether that is news.
    pub(crate) fn configure(&mut self, links: &[LinkConfig]) -> bool {
        let news = self.configured != links || !self.changed.is_empty();
        self.configured = links.to_vec();
        self.changed.clear();
        news
    }

    /// Notes whether the quota of a link is used up; whether that is news.
    pub(crate) fn set_spent(&mut self, name: &str, spent: Option<(ByteSize, Day)>) -> bool {
        let before = match spent {
            Some(spent) => self.spent.insert(name.to_owned(), spent),
            None => self.spent.remove(name),
        };
        before != spent
    }

    /// How many pipes a link is to have.
    pub(crate) fn pipes(&self, name: &str) -> PipeCount {
        match self.of(name).pipes.unwrap_or_default() {
            Pipes::Count(count) => PipeCount::all(count.clamp(1, Pipes::MAX)),
            Pipes::Auto => self.pipes.get(name).copied().unwrap_or(PipeCount::all(1)),
        }
    }

    /// What packets of a link travel in.
    pub(crate) fn transport(&self, name: &str) -> Transport {
        self.of(name).transport.unwrap_or_default()
    }

    /// Whether the number of pipes is to be found out.
    pub(crate) fn is_auto(&self, name: &str) -> bool {
        self.of(name).pipes == Some(Pipes::Auto)
    }

    /// Notes how many pipes a link is to have if nobody has said that; whether that is news.
    pub(crate) fn find_pipes(&mut self, name: &str, count: PipeCount) -> bool {
        self.pipes.insert(name.to_owned(), count).unwrap_or(PipeCount::all(1)) != count
    }

    /// Sets how many connections there are; whether that is news.
    pub(crate) fn set_shares(&mut self, shares: usize) -> bool {
        let shares = shares.max(1) as u64;
        std::mem::replace(&mut self.shares, shares) != shares
    }

    /// When a link is used, as things are.
    pub(crate) fn tier(&self, name: &str) -> Tier {
        if self.spent.contains_key(name) { Tier::Never } else { self.of(name).tier }
    }

    /// Why a link is never used; empty if it is.
    pub(crate) fn why_never(&self, name: &str) -> String {
        match self.spent.get(name) {
            _ if self.of(name).tier == Tier::Never => "as configured".to_owned(),
            Some((quota, until)) => format!("the quota of {quota} is used up until {until}"),
            None => String::new(),
        }
    }

    /// What one connection is to do with a link.
    pub(crate) fn policy(&self, name: &str) -> LinkPolicy {
        let link = self.of(name).policy();
        let share = |rate: BitRate| BitRate::from_bps(rate.bps() / self.shares);
        LinkPolicy { tier: self.tier(name), up: link.up.map(share), down: link.down.map(share), ..link }
    }
}

/// Counts what each link carries, whichever thread sends and receives it: bytes of IP packets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meters(Arc<Mutex<BTreeMap<String, Meter>>>);

/// What one link has carried since the start, whatever paths it had.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter(Arc<Carried>);

#[derive(Debug, Default)]
struct Carried {
    /// IP packets, in both directions.
    whole: AtomicU64,
    /// UDP payloads sent, and received.
    payloads: [AtomicU64; 2],
}

/// Which way something goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Sent,
    Received,
}

impl Meters {
    pub(crate) fn of(&self, name: &str) -> Meter {
        let mut meters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        meters.entry(name.to_owned()).or_default().clone()
    }
}

impl Meter {
    /// Counts UDP payloads to or from an IPv4 or IPv6 address.
    pub(crate) fn count(&self, way: Way, payload: usize, datagrams: usize, v4: bool) {
        let header = if v4 { 28 } else { 48 };
        self.0.whole.fetch_add((payload + datagrams * header) as u64, Relaxed);
        self.0.payloads[way as usize].fetch_add(payload as u64, Relaxed);
    }

    /// Bytes of IP packets, in both directions.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.whole.load(Relaxed)
    }

    /// Bytes of UDP payloads that went this way.
    pub(crate) fn payload(&self, way: Way) -> u64 {
        self.0.payloads[way as usize].load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies() -> Policies {
        let link = |name: &str, tier| LinkConfig { name: name.into(), tier, ..LinkConfig::default() };
        let first = LinkConfig { up: Some(BitRate::from_bps(8_000_000)), ..link("wwan*", Tier::Backup) };
        Policies::new(&[first, link("wwan0", Tier::Never)])
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
        assert!(policies.set_shares(4));
        assert_eq!(policies.policy("wwan0").up, Some(BitRate::from_bps(2_000_000)));
    }

    #[test]
    fn a_link_counts_what_every_socket_of_it_carries() {
        let meters = Meters::default();
        meters.of("eth0").count(Way::Sent, 3000, 2, true);
        meters.of("eth0").count(Way::Received, 100, 1, false);
        let meter = meters.of("eth0");
        assert_eq!((meter.payload(Way::Sent), meter.payload(Way::Received)), (3000, 100));
        assert_eq!((meter.bytes(), meters.of("eth1").bytes()), (3056 + 148, 0));
    }

    #[test]
    fn a_used_up_quota_is_the_reason() {
        let mut policies = policies();
        let spent = (ByteSize::from_bytes(50_000_000_000), Day::of(1_796_083_200));
        assert!(policies.set_spent("wwan0", Some(spent)) && !policies.set_spent("wwan0", Some(spent)));
        assert_eq!(policies.tier("wwan0"), Tier::Never);
        assert_eq!(policies.why_never("wwan0"), "the quota of 50 GB is used up until 1 December");
        assert!(policies.set_spent("wwan0", None));
        assert_eq!((policies.tier("wwan0"), policies.why_never("wwan0").as_str()), (Tier::Backup, ""));
    }
}
