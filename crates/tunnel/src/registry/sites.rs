//! Networks behind clients, and sessions to which ports of the server's machine lead.
//! In: the networks that clients announce, those that users may announce, and those for which the machine is
//! prepared. Out: the networks that are wanted, and whether they are others than those in force.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, atomic::Ordering},
};

use ipnet::IpNet;

use super::{Inner, Registry, Session};
use crate::{
    SessionSecret,
    sites::{OwnNetwork, SiteTable},
};

impl Registry {
    /// A session announces these networks behind its client, whose user may announce parts of others, and
    /// whose links have these addresses. Returns whether other networks are wanted.
    pub(crate) fn announce(
        &self,
        secret: SessionSecret,
        user: &str,
        networks: Vec<IpNet>,
        (allowed, links): (Vec<IpNet>, Vec<IpAddr>),
    ) -> bool {
        let changed = self.lock().announcements.announce(secret, user, networks, (allowed, links));
        self.note_sites_due(changed);
        changed
    }

    /// Sets the networks of the server's machine, which no client can announce.
    pub fn reserve_networks(&self, reserved: Vec<IpNet>) {
        let changed = self.lock().announcements.reserve(reserved);
        self.note_sites_due(changed);
    }

    /// Sets the networks of which users may announce parts.
    pub fn allow_networks(&self, allowed: impl Fn(&str) -> Vec<IpNet>) {
        let changed = self.lock().announcements.allow(allowed);
        self.note_sites_due(changed);
    }

    pub(super) fn note_sites_due(&self, changed: bool) {
        if changed {
            self.sites_due.store(true, Ordering::Relaxed);
            self.sites_change.store(true, Ordering::Relaxed);
        }
    }

    /// Whether other networks behind clients are wanted since the last call: the edge prepares the machine
    /// for [`Self::wanted_sites`], then calls [`Self::put_sites_in_force`], and
    /// [`Server::update_sites`](crate::Server::update_sites) at all shards. Does not take the lock.
    pub fn take_sites_due(&self) -> bool {
        self.sites_due.load(Ordering::Relaxed) && self.sites_due.swap(false, Ordering::Relaxed)
    }

    /// The networks behind clients as sessions and users are now.
    pub fn wanted_sites(&self) -> SiteTable {
        let inner = self.lock();
        inner.announcements.table(inner.networks_of_users())
    }

    /// The machine is prepared for these networks behind clients.
    pub fn put_sites_in_force(&self, sites: SiteTable) {
        self.lock().sites = Arc::new(sites);
        self.sites_change.store(self.sites_due.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether other networks behind clients are wanted than are in force, or than `known`.
    pub(crate) fn is_changing_sites(&self, known: &Arc<SiteTable>) -> bool {
        self.sites_change.load(Ordering::Relaxed) || !Arc::ptr_eq(known, &self.lock().sites)
    }

    /// The networks behind clients that are in force.
    pub fn sites(&self) -> Arc<SiteTable> {
        Arc::clone(&self.lock().sites)
    }

    /// Sets the users, in lower case, to whose sessions ports of the machine lead.
    pub fn set_forwarded_users(&self, users: BTreeSet<String>) {
        self.lock().forwarded_users = users;
        self.forwards_due.store(true, Ordering::Relaxed);
    }

    /// Whether ports may lead to other sessions since the last call. Does not take the lock.
    pub fn take_forwards_due(&self) -> bool {
        self.forwards_due.load(Ordering::Relaxed) && self.forwards_due.swap(false, Ordering::Relaxed)
    }

    /// The addresses of the session to which the ports of a user, in lower case, lead: that with a fixed
    /// address, else the oldest; none if there is no session.
    pub fn forward_target(&self, user: &str) -> Vec<IpAddr> {
        let inner = self.lock();
        let sessions = inner.by_name.get(user).into_iter().flatten();
        let known = sessions.filter_map(|secret| {
            let (session, addresses) = (inner.sessions.get(secret)?, inner.pool.addresses(secret)?);
            Some(((!inner.pool.is_fixed(&addresses), session.id.0), addresses.first()))
        });
        known.min_by_key(|(order, _)| *order).map_or(Vec::new(), |(_, first)| first.iter().collect())
    }
}

impl Inner {
    /// The networks of users, and their addresses outside of the pool, in the order of the sessions.
    fn networks_of_users(&self) -> Vec<OwnNetwork> {
        let of_users =
            self.own_networks.keys().filter_map(|user| self.by_name.get(&user.to_ascii_lowercase()));
        let sessions = of_users.flatten().filter_map(|secret| Some((self.sessions.get(secret)?, secret)));
        let mut sessions: Vec<_> = sessions.collect();
        sessions.sort_by_key(|(session, _)| session.id.0);
        let of_session = |(session, secret): (&Session, &SessionSecret)| {
            let addresses = self.pool.addresses(secret).unwrap_or_default();
            let outside = addresses.iter().filter(|ip| !self.pool.contains(*ip)).map(IpNet::from);
            let networks = self.own_networks.get(&session.user).into_iter().flatten().copied();
            let networks = networks.filter(|_| addresses.count() > 0);
            let own = |net| OwnNetwork { secret: *secret, user: session.user.clone(), net };
            outside.chain(networks).map(own).collect::<Vec<_>>()
        };
        sessions.into_iter().flat_map(of_session).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_changing_from_the_wish_until_a_shard_knows_what_is_in_force() {
        let registry = Registry::new("10.0.0.0/24".parse().unwrap(), None, 10);
        let net: IpNet = "192.168.7.0/24".parse().unwrap();
        let known = registry.sites();
        assert!(!registry.is_changing_sites(&known));
        assert!(registry.announce([1; 16], "anna", vec![net], (vec![net], Vec::new())));
        assert!(registry.is_changing_sites(&known));
        assert!(registry.take_sites_due());
        registry.put_sites_in_force(registry.wanted_sites());
        assert!(registry.is_changing_sites(&known), "this shard has the networks of before");
        let known = registry.sites();
        assert!(!registry.is_changing_sites(&known));
        // A change that comes while the machine is being prepared is for the next time.
        registry.announce([1; 16], "anna", Vec::new(), (vec![net], Vec::new()));
        registry.put_sites_in_force(registry.wanted_sites());
        assert!(registry.is_changing_sites(&registry.sites()));
    }
}
