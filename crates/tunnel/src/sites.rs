//! The networks behind clients: which session announced which, and which has each.
//!
//! In: the networks that sessions announce (RFC 9484 §4.7.3), those that their users may, those that belong
//! to users, those of the server. Out: the session of an address, and the state of each network for a client.
//! Always holds: networks of different users do not overlap; of several sessions of one user that announce
//! the same network, the one that did so first has it.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use mpvpn_masque::capsule::{IpRange, Site, SiteState};

use crate::SessionSecret;

/// Networks of one session that count. Chosen. More: one client takes the places of others; fewer: a large
/// site has to announce shorter prefixes.
pub const MAX_NETWORKS_OF_SESSION: usize = 256;
/// Networks of all sessions. They fit into one capsule (64 KiB, at most 19 bytes each), which all clients
/// get. Chosen.
const MAX_NETWORKS: usize = 3000;

/// The networks that one session announces.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Announcement {
    /// Which was first.
    order: u64,
    user: String,
    networks: Vec<IpNet>,
    /// The networks of which its user may announce parts.
    allowed: Vec<IpNet>,
    /// The addresses of its client's links, as the server sees them.
    links: Vec<IpAddr>,
}

/// The networks that all sessions of a server announce.
#[derive(Clone, Debug, Default)]
pub(crate) struct Announcements {
    sessions: BTreeMap<SessionSecret, Announcement>,
    last_order: u64,
    /// Networks of the server's machine, with its addresses there.
    reserved: Vec<IpNet>,
}

/// A network that belongs to the user of a session, who need not announce it.
#[derive(Clone, Debug)]
pub(crate) struct OwnNetwork {
    pub(crate) secret: SessionSecret,
    pub(crate) user: String,
    pub(crate) net: IpNet,
}

/// The networks behind clients, and who has each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteTable {
    in_use: BTreeMap<IpNet, Owner>,
    /// The lengths of their prefixes, the longest first: of IPv4, and of IPv6.
    lengths: [Vec<u8>; 2],
    /// The networks that each session announced, or that belong to its user.
    announced: BTreeMap<SessionSecret, Announced>,
    /// The networks of users that sessions have.
    own: BTreeMap<SessionSecret, Vec<IpNet>>,
}

/// The networks that a session announced, with the states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Announced {
    user: String,
    sites: Vec<Site>,
}

/// The session that has a network.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Owner {
    secret: SessionSecret,
    user: String,
    /// Whether the network belongs to the user.
    is_own: bool,
}

impl Announcements {
    /// A session announces these networks in place of those before. Returns whether anything has changed.
    pub(crate) fn announce(
        &mut self,
        secret: SessionSecret,
        user: &str,
        networks: Vec<IpNet>,
        (allowed, links): (Vec<IpNet>, Vec<IpAddr>),
    ) -> bool {
        if networks.is_empty() {
            return self.withdraw(&secret);
        }
        let order = match self.sessions.get(&secret) {
            Some(before) => before.order,
            None => {
                self.last_order += 1;
                self.last_order
            }
        };
        let announcement = Announcement { order, user: user.to_owned(), networks, allowed, links };
        self.sessions.insert(secret, announcement.clone()) != Some(announcement)
    }

    /// A session has ended, or announces nothing more. Returns whether it had announced anything.
    pub(crate) fn withdraw(&mut self, secret: &SessionSecret) -> bool {
        self.sessions.remove(secret).is_some()
    }

    /// Sets the networks of the server's machine. Returns whether they have changed.
    pub(crate) fn reserve(&mut self, reserved: Vec<IpNet>) -> bool {
        let changed = self.reserved != reserved;
        self.reserved = reserved;
        changed
    }

    /// Users may announce other networks now. Returns whether anything has changed.
    pub(crate) fn allow(&mut self, allowed: impl Fn(&str) -> Vec<IpNet>) -> bool {
        let mut changed = false;
        for announcement in self.sessions.values_mut() {
            let now = allowed(&announcement.user);
            changed |= now != announcement.allowed;
            announcement.allowed = now;
        }
        changed
    }

    /// Decides who has which network. `own`: those of users, in the order of their sessions.
    pub(crate) fn table(&self, own: Vec<OwnNetwork>) -> SiteTable {
        let mut table = SiteTable::default();
        for one in own {
            table.add_own(one, &self.reserved);
        }
        let mut in_order: Vec<_> = self.sessions.iter().collect();
        in_order.sort_by_key(|(_, announcement)| announcement.order);
        for (secret, announcement) in in_order {
            let mut sites = Vec::new();
            for (at, net) in announcement.networks.iter().enumerate() {
                let state = match table.judge(announcement, *net, &self.reserved) {
                    SiteState::InUse if at >= MAX_NETWORKS_OF_SESSION => SiteState::TooMany,
                    SiteState::InUse if table.in_use.len() >= MAX_NETWORKS => SiteState::TooMany,
                    state => state,
                };
                if state == SiteState::InUse {
                    let owner = Owner { secret: *secret, user: announcement.user.clone(), is_own: false };
                    table.in_use.insert(*net, owner);
                }
                sites.push(Site { net: *net, state });
            }
            let announced = table.announced.entry(*secret).or_default();
            announced.user.clone_from(&announcement.user);
            announced.sites.extend(sites);
        }
        for (at, is_v4) in [true, false].into_iter().enumerate() {
            let nets = table.in_use.keys().filter(|net| net.addr().is_ipv4() == is_v4);
            let mut lengths: Vec<u8> = nets.map(IpNet::prefix_len).collect();
            lengths.sort_unstable_by(|a, b| b.cmp(a));
            lengths.dedup();
            table.lengths[at] = lengths;
        }
        table
    }
}

impl SiteTable {
    /// Adds a network that belongs to a user. It may be a part of a network of the server's machine, but has
    /// none of its addresses.
    fn add_own(&mut self, OwnNetwork { secret, user, net }: OwnNetwork, reserved: &[IpNet]) {
        let state = if reserved.iter().any(|of_machine| net.contains(&of_machine.addr())) {
            SiteState::OfServer
        } else if self.in_use.len() >= MAX_NETWORKS {
            SiteState::TooMany
        } else if self.overlapping(net).any(|owner| owner.user != user) {
            SiteState::Taken
        } else if self.in_use.contains_key(&net) {
            SiteState::Standby
        } else {
            self.own.entry(secret).or_default().push(net);
            self.in_use.insert(net, Owner { secret, user: user.clone(), is_own: true });
            SiteState::InUse
        };
        let announced = self.announced.entry(secret).or_default();
        announced.user = user;
        announced.sites.push(Site { net, state });
    }

    /// The state of a network that is announced after those of the table.
    fn judge(&self, announcement: &Announcement, net: IpNet, reserved: &[IpNet]) -> SiteState {
        if !announcement.allowed.iter().any(|allowed| allowed.contains(&net)) {
            return SiteState::NotAllowed;
        }
        let holds_link = announcement.links.iter().any(|link| net.contains(link));
        if holds_link || reserved.iter().any(|own| own.contains(&net) || net.contains(own)) {
            return SiteState::OfServer;
        }
        if self.overlapping(net).any(|owner| owner.user != announcement.user) {
            return SiteState::Taken;
        }
        if self.in_use.contains_key(&net) { SiteState::Standby } else { SiteState::InUse }
    }

    /// The owners of networks that contain `net`, or that it contains.
    fn overlapping(&self, net: IpNet) -> impl Iterator<Item = &Owner> {
        let around = (0..net.prefix_len()).filter_map(move |length| {
            let outer = IpNet::new(net.network(), length).ok()?;
            self.in_use.get(&outer.trunc())
        });
        let first = IpNet::new(net.network(), 0).unwrap_or(net);
        let last = IpNet::new(net.broadcast(), net.max_prefix_len()).unwrap_or(net);
        let within = self.in_use.range(first..=last).map(|(_, owner)| owner);
        around.chain(within)
    }

    /// The session behind which an address is: that of the longest prefix.
    #[inline]
    pub(crate) fn session_of(&self, ip: IpAddr) -> Option<&SessionSecret> {
        let lengths = &self.lengths[usize::from(ip.is_ipv6())];
        let owner = lengths.iter().find_map(|length| {
            let net = IpNet::new(ip, *length).ok()?;
            self.in_use.get(&net.trunc())
        })?;
        Some(&owner.secret)
    }

    /// All networks that are in use, with the users that have them.
    pub fn networks(&self) -> impl Iterator<Item = (IpNet, &str)> {
        self.in_use.iter().map(|(net, owner)| (*net, owner.user.as_str()))
    }

    /// All networks that are in use, and whether each belongs to a user, whose client has it untranslated.
    pub fn routed(&self) -> impl Iterator<Item = (IpNet, bool)> {
        self.in_use.iter().map(|(net, owner)| (*net, owner.is_own))
    }

    /// The networks of its user that a session has.
    pub(crate) fn own(&self, secret: &SessionSecret) -> &[IpNet] {
        self.own.get(secret).map_or(&[], Vec::as_slice)
    }

    /// All networks that were announced or belong to users, with their users and states.
    pub fn announced(&self) -> impl Iterator<Item = (&str, &Site)> {
        self.announced.values().flat_map(|own| own.sites.iter().map(|site| (own.user.as_str(), site)))
    }

    /// The networks for the client of a session: those that it announced, and those of others.
    pub(crate) fn sites_for(&self, secret: &SessionSecret) -> Vec<Site> {
        let own = self.announced.get(secret).into_iter().flat_map(|own| own.sites.iter().copied());
        let others = self.in_use.iter().filter(|(_, owner)| owner.secret != *secret);
        own.chain(others.map(|(net, _)| Site { net: *net, state: SiteState::OfAnother })).collect()
    }

    /// Whether the client of a session knows the same from `before`.
    pub(crate) fn is_same_for(&self, secret: &SessionSecret, before: &Self) -> bool {
        self.announced.get(secret) == before.announced.get(secret)
            && (self.in_use == before.in_use || self.sites_for(secret) == before.sites_for(secret))
    }
}

/// The networks of ROUTE_ADVERTISEMENT for all protocols, one more than count at most.
pub(crate) fn announced_networks(ranges: &[IpRange]) -> Vec<IpNet> {
    let for_all = ranges.iter().filter(|range| range.protocol() == 0);
    for_all.flat_map(IpRange::to_nets).take(MAX_NETWORKS_OF_SESSION + 1).collect()
}

/// Networks as ROUTE_ADVERTISEMENT has them: in order, and none inside another. Neighbours stay apart, since
/// a user may have leave for one of them only.
pub(crate) fn ranges_of(networks: &[IpNet]) -> Vec<IpRange> {
    let mut sorted: Vec<IpNet> = networks.iter().map(IpNet::trunc).collect();
    sorted.sort_unstable();
    let mut apart: Vec<IpNet> = Vec::new();
    for net in sorted {
        if !apart.last().is_some_and(|last| last.contains(&net)) {
            apart.push(net);
        }
    }
    apart.into_iter().map(|net| IpRange::from_net(net, 0)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: SessionSecret = [1; 16];
    const B: SessionSecret = [2; 16];

    fn nets(list: &[&str]) -> Vec<IpNet> {
        list.iter().map(|net| net.parse().unwrap()).collect()
    }

    /// Leave for these networks, of a client whose links have no address of them.
    fn may(list: &[&str]) -> (Vec<IpNet>, Vec<IpAddr>) {
        (nets(list), Vec::new())
    }

    fn states(table: &SiteTable, secret: &SessionSecret) -> Vec<SiteState> {
        table.announced[secret].sites.iter().map(|site| site.state).collect()
    }

    fn session(table: &SiteTable, ip: &str) -> Option<SessionSecret> {
        table.session_of(ip.parse().unwrap()).copied()
    }

    #[test]
    fn a_user_may_announce_parts_of_what_the_user_has_leave_for() {
        let mut all = Announcements::default();
        let announced = nets(&["192.168.7.0/24", "192.168.8.0/24", "2001:db8:7::/64", "10.0.0.0/8"]);
        all.announce(A, "anna", announced, may(&["192.168.7.0/24", "2001:db8:7::/48", "10.1.0.0/16"]));
        let table = all.table(Vec::new());
        use SiteState::{InUse, NotAllowed};
        assert_eq!(states(&table, &A), [InUse, NotAllowed, InUse, NotAllowed]);
        for (ip, owner) in [
            ("192.168.7.0", Some(A)),
            ("192.168.7.255", Some(A)),
            ("192.168.8.1", None),
            ("2001:db8:7::9", Some(A)),
            ("2001:db8:7:1::9", None),
            ("10.1.0.1", None),
        ] {
            assert_eq!(session(&table, ip), owner, "{ip}");
        }
    }

    #[test]
    fn of_two_homes_with_the_same_network_the_first_has_it_and_a_second_session_of_its_user_waits() {
        let mut all = Announcements::default();
        let home = || nets(&["192.168.1.0/24"]);
        let anything = || may(&["0.0.0.0/0"]);
        assert!(all.announce(A, "anna", home(), anything()));
        assert!(!all.announce(A, "anna", home(), anything()), "nothing new");
        all.announce(B, "anna", home(), anything());
        all.announce(
            [3; 16],
            "bob",
            nets(&["192.168.0.0/16", "192.168.1.128/25", "10.77.1.0/24"]),
            anything(),
        );
        let table = all.table(Vec::new());
        use SiteState::{InUse, Standby, Taken};
        assert_eq!(states(&table, &A), [InUse]);
        assert_eq!(states(&table, &B), [Standby]);
        assert_eq!(states(&table, &[3; 16]), [Taken, Taken, InUse]);
        assert_eq!(session(&table, "192.168.1.9"), Some(A));
        let for_bob = table.sites_for(&[3; 16]);
        assert_eq!(for_bob.last().map(|site| site.state), Some(SiteState::OfAnother));
        assert_eq!(for_bob.len(), 4);
        assert!(all.withdraw(&A) && !all.withdraw(&A));
        let after = all.table(Vec::new());
        assert_eq!((states(&after, &B), session(&after, "192.168.1.9")), (vec![InUse], Some(B)));
        assert!(!after.is_same_for(&B, &table) && after.is_same_for(&[3; 16], &table));
    }

    #[test]
    fn networks_of_the_server_and_too_many_are_refused() {
        let mut all = Announcements::default();
        assert!(all.reserve(nets(&["10.0.0.0/24", "192.0.2.0/24"])));
        let anything = may(&["0.0.0.0/0", "::/0"]);
        all.announce(A, "anna", nets(&["10.0.0.128/25", "192.0.0.0/8", "10.0.1.0/24"]), anything.clone());
        use SiteState::{InUse, OfServer};
        assert_eq!(states(&all.table(Vec::new()), &A), [OfServer, OfServer, InUse]);
        let many = (0..=255).flat_map(|a| [format!("172.16.{a}.0/24"), format!("172.17.{a}.0/24")]);
        let many: Vec<IpNet> = many.map(|net| net.parse().unwrap()).collect();
        all.announce(B, "bob", many, anything.clone());
        let in_use = states(&all.table(Vec::new()), &B).into_iter().filter(|state| *state == InUse).count();
        assert_eq!(in_use, MAX_NETWORKS_OF_SESSION);
        let links = vec!["203.0.113.7".parse().unwrap()];
        all.announce([3; 16], "eve", nets(&["203.0.113.0/24"]), (anything.0, links));
        assert_eq!(states(&all.table(Vec::new()), &[3; 16]), [OfServer], "the way to its own server");
        assert!(all.allow(|_| Vec::new()) && !all.allow(|_| Vec::new()));
        assert_eq!(all.table(Vec::new()).networks().count(), 0);
    }

    #[test]
    fn networks_of_a_user_need_no_announcement_and_go_before_those_of_others() {
        let mut all = Announcements::default();
        all.reserve(nets(&["198.51.100.1/24", "2001:db8:1::1/64"]));
        all.announce(B, "bob", nets(&["203.0.113.0/24", "192.168.7.0/24"]), may(&["0.0.0.0/0"]));
        let own = |secret, user: &str, net: &str| OwnNetwork {
            secret,
            user: user.to_owned(),
            net: net.parse().unwrap(),
        };
        let table = all.table(vec![
            own(A, "anna", "203.0.113.7/32"),
            own(A, "anna", "2001:db8:7::/64"),
            own(A, "anna", "198.51.100.9/32"),
            own(A, "anna", "198.51.100.0/28"),
            own([3; 16], "anna", "2001:db8:7::/64"),
        ]);
        use SiteState::{InUse, OfServer, Standby, Taken};
        assert_eq!(states(&table, &A), [InUse, InUse, InUse, OfServer], "the last has the server's address");
        assert_eq!(states(&table, &[3; 16]), [Standby]);
        assert_eq!(states(&table, &B), [Taken, InUse]);
        assert_eq!(table.own(&A), nets(&["203.0.113.7/32", "2001:db8:7::/64", "198.51.100.9/32"]));
        assert!(table.own(&B).is_empty() && table.own(&[3; 16]).is_empty());
        assert_eq!(session(&table, "2001:db8:7::9"), Some(A));
        let translated = table.routed().filter(|(_, is_own)| !is_own).map(|(net, _)| net);
        assert_eq!(translated.collect::<Vec<_>>(), nets(&["192.168.7.0/24"]));
    }

    #[test]
    fn ranges_are_in_order_and_neighbours_stay_apart() {
        let given =
            ["192.168.7.0/24", "192.168.6.0/24", "192.168.7.128/25", "2001:db8::/32", "192.168.6.0/24"];
        let ranges = ranges_of(&nets(&given));
        assert_eq!(announced_networks(&ranges), nets(&["192.168.6.0/24", "192.168.7.0/24", "2001:db8::/32"]));
    }

    proptest! {
        #[test]
        fn networks_of_different_users_never_overlap_and_addresses_have_the_longest_prefix(
            given in prop::collection::vec((0u8..4, 0u8..3, any::<u8>(), 24u8..=32), 0..24),
            ip in any::<u8>(),
        ) {
            let mut all = Announcements::default();
            for session in 0..4u8 {
                let own = given.iter().filter(|one| one.0 == session);
                let networks = own.map(|(_, _, last, length)| {
                    IpNet::new_assert([10, 0, 0, *last].into(), *length).trunc()
                });
                let user = (session % 3).to_string();
                all.announce([session; 16], &user, networks.collect(), may(&["10.0.0.0/8"]));
            }
            let table = all.table(Vec::new());
            let in_use: Vec<_> = table.networks().collect();
            for (net, user) in &in_use {
                for (other, of) in &in_use {
                    prop_assert!(user == of || !net.contains(other));
                }
            }
            let ip = IpAddr::from([10, 0, 0, ip]);
            let longest = table.in_use.iter().filter(|(net, _)| net.contains(&ip));
            let longest = longest.max_by_key(|(net, _)| net.prefix_len()).map(|(_, owner)| owner.secret);
            prop_assert_eq!(table.session_of(ip).copied(), longest);
        }
    }
}
