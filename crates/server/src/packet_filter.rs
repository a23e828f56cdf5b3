//! The filter of clients' packets: the rules `[[access]]` as profiles of nftables, and the thread that keeps
//! the profiles of sessions, and the networks behind clients, in force.
//!
//! In: the rules, sessions that are about to use addresses, networks that clients announce. Out: the same
//! requests, once the kernel filters packets from these addresses by the rules of the session's user; the
//! networks, once the kernel also routes them. Always holds: requests are handled in the order in which they
//! came, all that wait in one transaction; while nft fails, sessions wait without addresses. Sessions that
//! end change nothing: their addresses keep the profile until another user gets them.

use std::{
    collections::BTreeMap,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use mpvpn_access::AccessRule;
use mpvpn_error::RunError;
use mpvpn_os::{
    OsError,
    firewall::{ClientFilter, FilterRule, Profile, SessionProfiles},
    kill_switch::TableMonitor,
    poll::{Events, Interest, PollWaker, Poller},
    tunnel_net::SiteNet,
};
use mpvpn_packet::public::embedding_networks;
use mpvpn_threads::shards::{Inbox, Outbox, mailbox};
use mpvpn_tunnel::{AddressSet, FilterRequest, Registry};

use super::{
    data_plane::{ServerMessage, ShardMessage},
    forwards::ForwardTable,
};

/// How soon nft is tried again after it failed: sessions wait for it. Sooner: it fails more often for the
/// same reason; later: sessions wait for longer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two changes of the networks behind clients. Longer: a second session takes over
/// later; shorter: thousands of clients that come back at once are told of each other thousands of times.
/// Chosen.
const SITES_INTERVAL: Duration = Duration::from_millis(500);
const MONITOR_TOKEN: u64 = 0;
const WAKE_TOKEN: u64 = 1;

/// The rules of each user.
#[derive(Debug)]
pub(super) struct UserProfiles {
    /// The first one is that of users whom no rule names.
    pub(super) profiles: Vec<Profile>,
    by_user: BTreeMap<String, usize>,
}

impl UserProfiles {
    /// Users with the same rules share a profile.
    pub(super) fn new(rules: &[AccessRule]) -> Self {
        let of = |user: Option<&str>| -> Profile {
            let is_about = |rule: &&AccessRule| match user {
                _ if rule.users.is_empty() => true,
                Some(user) => rule.users.iter().any(|name| name == user),
                None => false,
            };
            rules.iter().filter(is_about).map(filter_rule).collect()
        };
        let mut numbers = BTreeMap::from([(of(None), 0)]);
        let mut by_user = BTreeMap::new();
        for user in rules.iter().flat_map(|rule| &rule.users) {
            let next = numbers.len();
            let number = *numbers.entry(of(Some(user))).or_insert(next);
            by_user.insert(user.clone(), number);
        }
        let mut profiles = vec![Profile::new(); numbers.len()];
        for (profile, number) in numbers {
            profiles[number] = profile;
        }
        Self { profiles, by_user }
    }

    /// Whether the rules differ between users.
    pub(super) fn differ(&self) -> bool {
        self.profiles.len() > 1
    }

    fn of(&self, user: &str) -> usize {
        self.by_user.get(user).copied().unwrap_or(0)
    }
}

fn filter_rule(rule: &AccessRule) -> FilterRule {
    let mut to = rule.to.clone();
    if !rule.allow {
        // A forbidden IPv4 address is forbidden in its IPv6 forms, too.
        to.extend(rule.to.iter().flat_map(embedding_networks).map(IpNet::V6));
    }
    let ports = rule.ports.iter().map(|ports| (*ports.range().start(), *ports.range().end()));
    FilterRule { allow: rule.allow, to, ports: ports.collect() }
}

/// To the thread.
#[derive(Debug)]
pub(super) enum FilterMessage {
    /// Filter a session, then tell its shard.
    Filter(Box<FilterRequest>),
    /// Other networks behind clients are wanted: put them in force, then tell all shards.
    Sites,
    /// Ports lead to other hosts now, or other ports do.
    Forwards,
    /// Replace the rules of all users, then tell shard 0.
    Replace(Box<NewRules>),
    /// End.
    End,
}

/// Rules that replace those before.
#[derive(Debug)]
pub(super) struct NewRules {
    pub(super) users: UserProfiles,
    /// Whether clients are kept from each other.
    pub(super) is_isolated: bool,
    /// The ports that lead to clients.
    pub(super) forwarded: Vec<(u8, u16, u16)>,
}

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct FilterThread {
    messages: Outbox<FilterMessage>,
    thread: Option<JoinHandle<()>>,
}

impl FilterThread {
    /// `profiles` and `net`: as they are in the kernel. `registry`: the sessions. `shards`: the mailboxes of
    /// all shards, in order.
    pub(super) fn start(
        (profiles, forwards): (SessionProfiles, ForwardTable),
        net: SiteNet,
        users: UserProfiles,
        registry: Registry,
        shards: Vec<Outbox<ShardMessage>>,
    ) -> Result<Self, RunError> {
        let failed = || RunError::io("watch the firewall");
        let monitor = TableMonitor::open()?;
        let poller = Poller::new().map_err(failed())?;
        let wake = PollWaker::new().map_err(failed())?;
        poller.add(&monitor, MONITOR_TOKEN, Interest::Read).map_err(failed())?;
        poller.add(&wake, WAKE_TOKEN, Interest::Read).map_err(failed())?;
        let (messages, inbox) = mailbox(wake.clone());
        let worker = Worker {
            profiles,
            forwards,
            forwards_due: true,
            net,
            users,
            registry,
            shards,
            inbox,
            waiting: Vec::new(),
            sites_due: false,
            sites_from: Instant::now(),
        };
        let thread = std::thread::Builder::new().name("packet-filter".to_owned());
        let thread = thread.spawn(move || worker.run(&poller, monitor, &wake));
        let thread = thread.map_err(RunError::io("start a thread"))?;
        Ok(Self { messages, thread: Some(thread) })
    }

    /// Takes requests.
    pub(super) fn messages(&self) -> Outbox<FilterMessage> {
        self.messages.clone()
    }
}

impl Drop for FilterThread {
    fn drop(&mut self) {
        self.messages.send(FilterMessage::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    profiles: SessionProfiles,
    forwards: ForwardTable,
    forwards_due: bool,
    net: SiteNet,
    users: UserProfiles,
    registry: Registry,
    shards: Vec<Outbox<ShardMessage>>,
    inbox: Inbox<FilterMessage>,
    /// Requests without an answer, in their order.
    waiting: Vec<FilterRequest>,
    /// Whether other networks behind clients are wanted, and from when on they may be put in force.
    sites_due: bool,
    sites_from: Instant,
}

impl Worker {
    fn run(mut self, poller: &Poller, mut monitor: TableMonitor, wake: &PollWaker) {
        let mut events = Events::with_capacity(2);
        let (mut retry, mut is_monitored) = (None, true);
        loop {
            let pause = self.sites_due.then(|| self.sites_from.saturating_duration_since(Instant::now()));
            if let Err(error) = poller.wait(&mut events, retry.into_iter().chain(pause).min()) {
                return tracing::error!(%error, "the packets of new sessions are not filtered: they get no addresses");
            }
            wake.drain();
            while let Some(message) = self.inbox.next() {
                match message {
                    FilterMessage::Filter(request) => self.waiting.push(*request),
                    FilterMessage::Sites => self.sites_due = true,
                    FilterMessage::Forwards => self.forwards_due = true,
                    FilterMessage::Replace(rules) => self.replace(*rules),
                    FilterMessage::End => return,
                }
            }
            let changed = match monitor.take_changed() {
                Ok(changed) => changed,
                Err(error) if is_monitored => {
                    is_monitored = false;
                    // It would wake this thread all the time.
                    let _ = poller.remove(&monitor);
                    tracing::error!(%error, "changes of the filter of clients' packets are not noticed any more");
                    false
                }
                Err(_) => false,
            };
            let result = if changed || retry.is_some() { self.repair() } else { Ok(()) };
            let result = result.and_then(|()| self.handle_requests()).and_then(|()| self.update_sites());
            let result = result.and_then(|()| self.update_forwards());
            retry = result.err().map(|error| {
                tracing::error!(%error, "the packets of clients cannot be filtered: new sessions wait");
                RETRY_INTERVAL
            });
        }
    }

    /// Installs the rules again if another program has removed them.
    fn repair(&self) -> Result<(), OsError> {
        if self.profiles.repair()? {
            self.net.repair()?;
            tracing::warn!(
                "another program removed the firewall rules for clients: they are installed again"
            );
        }
        Ok(())
    }

    /// Replaces the rules. Requests that wait are handled by the new ones.
    fn replace(&mut self, NewRules { users, is_isolated, forwarded }: NewRules) {
        // A session that gets addresses after this has sent, or will send, a request.
        let sessions = self.registry.addresses_by_user();
        let of_session = |(user, addresses): &(String, AddressSet)| {
            let profile = users.of(user);
            addresses.iter().map(|address| (address, profile)).collect::<Vec<_>>()
        };
        let sessions: Vec<_> = sessions.iter().flat_map(of_session).collect();
        let sites = self.registry.sites();
        let sites = sites.networks().map(|(network, user)| (network, users.of(user)));
        let profiles = users.profiles.clone();
        let filter = ClientFilter { is_isolated, forwarded, profiles, ..self.profiles.filter().clone() };
        let replaced = self.profiles.replace_rules(filter, sessions, sites);
        if replaced.is_ok() {
            self.users = users;
            self.forwards_due = true;
        }
        if let Some(first) = self.shards.first() {
            let answer = replaced.map_err(|error| error.to_string());
            first.send(ShardMessage::Specific(ServerMessage::RulesReplaced(answer)));
        }
    }

    /// Puts the forwards in force as sessions are now, if that may have changed.
    fn update_forwards(&mut self) -> Result<(), OsError> {
        if std::mem::take(&mut self.forwards_due) {
            self.forwards.update(&self.registry).inspect_err(|_| self.forwards_due = true)?;
        }
        Ok(())
    }

    /// Puts the networks behind clients in force that are wanted now, if it is time.
    fn update_sites(&mut self) -> Result<(), OsError> {
        let now = Instant::now();
        if !self.sites_due || now < self.sites_from {
            return Ok(());
        }
        self.registry.reserve_networks(self.net.networks_of_machine()?);
        // Changes from now on are for the next time.
        self.registry.take_sites_due();
        let sites = self.registry.wanted_sites();
        tracing::debug!(networks = sites.networks().count(), "the networks behind clients change");
        self.profiles.set_sites(sites.networks().map(|(network, user)| (network, self.users.of(user))))?;
        self.net.set(sites.routed().collect())?;
        self.registry.put_sites_in_force(sites);
        (self.sites_due, self.sites_from) = (false, now + SITES_INTERVAL);
        for shard in &self.shards {
            shard.send(ShardMessage::Specific(ServerMessage::SitesChanged));
        }
        Ok(())
    }

    fn handle_requests(&mut self) -> Result<(), OsError> {
        let (profiles, users) = (&mut self.profiles, &self.users);
        let wanted = self.waiting.iter().flat_map(|request| {
            let profile = users.of(&request.user);
            request.addresses.iter().map(move |address| (address, profile))
        });
        profiles.change(wanted)?;
        for request in self.waiting.drain(..) {
            if let Some(shard) = self.shards.get(usize::from(request.connection.shard)) {
                shard.send(ShardMessage::Specific(ServerMessage::Filtered(Box::new(request))));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allow: bool, users: &[&str], to: &[&str]) -> AccessRule {
        AccessRule {
            allow,
            users: users.iter().map(ToString::to_string).collect(),
            to: to.iter().map(|net| net.parse().unwrap()).collect(),
            ports: Vec::new(),
        }
    }

    #[test]
    fn users_with_the_same_rules_share_a_profile_and_others_have_the_first() {
        let rules = [
            rule(true, &["anna", "bob"], &["172.16.0.0/12"]),
            rule(true, &["eve"], &["172.16.5.9/32"]),
            rule(false, &[], &["172.16.0.0/12"]),
        ];
        let profiles = UserProfiles::new(&rules);
        assert!(profiles.differ());
        let allowed = |user: &str| {
            let profile = &profiles.profiles[profiles.of(user)];
            profile.iter().map(|rule| rule.allow).collect::<Vec<_>>()
        };
        assert_eq!(profiles.of("anna"), profiles.of("bob"));
        assert_eq!((profiles.of("zoe"), profiles.profiles.len()), (0, 3));
        assert_eq!((allowed("anna"), allowed("eve")), (vec![true, false], vec![true, false]));
        assert_ne!(profiles.of("anna"), profiles.of("eve"));
        assert_eq!(allowed("zoe"), [false]);
        assert!(!UserProfiles::new(&rules[2..]).differ(), "one profile for all");
        assert_eq!(UserProfiles::new(&[]).profiles, [Profile::new()]);
    }

    #[test]
    fn a_forbidden_ipv4_network_is_forbidden_in_its_ipv6_forms() {
        let to = |allow| {
            let rule = filter_rule(&rule(allow, &[], &["198.51.100.0/24", "fd00::/8"]));
            rule.to.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            to(false),
            ["198.51.100.0/24", "fd00::/8", "64:ff9b::c633:6400/120", "2002:c633:6400::/40"]
        );
        assert_eq!(to(true), ["198.51.100.0/24", "fd00::/8"]);
    }
}
