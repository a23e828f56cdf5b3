//! Keeps what the connections of a user carry within the limits of the user, and counts it.
//!
//! In: the accounts of users, what waits for a limit, the time. Out: packets, payloads, and events of relays
//! that may go on. Always holds: every connection of a user with an account has its limits, whatever replaces
//! the state of the connection.

use std::collections::BTreeMap;

use mpvpn_quic::ConnectionHandle;
use mpvpn_types::Instant;

use super::{
    Peer, Server, ServerEvent,
    limits::{ConnectionLimits, Released},
};
use crate::{RelayId, UdpId, UserRates, accounts::UserAccount};

impl Server {
    /// Sets which users have limited rates or are counted, at a server without other shards.
    pub fn set_accounts(&mut self, now: Instant, rates: &BTreeMap<String, UserRates>) {
        self.registry.set_accounts(now, rates);
        self.update_accounts(now);
    }

    /// The bytes that each of those users has carried since the last call, in both directions together.
    pub fn take_carried(&self) -> Vec<(String, u64)> {
        self.registry.take_carried()
    }

    /// Whether a user has carried as many bytes as
    /// [`Registry::set_count_limits`](crate::Registry::set_count_limits) says.
    pub fn take_count_due(&self) -> bool {
        self.registry.take_count_due()
    }

    /// Whether other networks behind clients are wanted, as [`Registry::take_sites_due`] says.
    ///
    /// [`Registry::take_sites_due`]: crate::Registry::take_sites_due
    pub fn take_sites_due(&self) -> bool {
        self.registry.take_sites_due()
    }

    /// Whether ports may lead to other sessions, as [`Registry::take_forwards_due`] says.
    ///
    /// [`Registry::take_forwards_due`]: crate::Registry::take_forwards_due
    pub fn take_forwards_due(&self) -> bool {
        self.registry.take_forwards_due()
    }

    /// Gives every connection the limits of its user, after
    /// [`Registry::set_accounts`](crate::Registry::set_accounts).
    pub fn update_accounts(&mut self, now: Instant) {
        self.last_time = Some(now);
        for id in self.peers.ids() {
            self.isolated(id, |server| {
                server.attach_account(now, id);
                server.release_limited(now, id);
            });
            // Its timer depends on the rate.
            self.peers.mark_sends(id);
        }
    }

    /// Gives a connection the limits of its user, if it has a user.
    pub(super) fn attach_account(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(authenticated) = &mut peer.authenticated else { return };
        let account = self.registry.account(&authenticated.user);
        authenticated.multipath.rate_limit = account.as_ref().map(UserAccount::down);
        if let (Some(limits), Some(account)) = (&peer.limits, &account)
            && limits.is_of(account)
        {
            return;
        }
        let new = account.map(|account| Box::new(ConnectionLimits::new(account)));
        let Some(before) = std::mem::replace(&mut peer.limits, new) else { return };
        let waiting = before.into_waiting(now);
        waiting.released.into_iter().for_each(|released| self.on_released(id, released));
        let relay = |stream| RelayId::new(id, stream);
        self.events.extend(waiting.readable.into_iter().map(|id| ServerEvent::RelayReadable(relay(id))));
        self.events.extend(waiting.writable.into_iter().map(|id| ServerEvent::RelayWritable(relay(id))));
    }

    /// Passes on what the limits of a connection allow now.
    pub(super) fn release_limited(&mut self, now: Instant, id: ConnectionHandle) {
        while let Some(limits) = self.peers.get_mut(id).and_then(|peer| peer.limits.as_mut())
            && let Some(released) = limits.uplink.pop(now)
        {
            self.on_released(id, released);
        }
        // Relays that did not use their turns lose them.
        if let Some(limits) = self.peers.get_mut(id).and_then(|peer| peer.limits.as_mut()) {
            limits.reads.end_turn();
            limits.writes.end_turn();
        }
        self.call_reader(now, id);
        self.call_writer(now, id);
    }

    /// Reports the relay whose turn to be read begins now, if none has its turn.
    pub(super) fn call_reader(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(Peer { limits: Some(limits), relays, .. }) = self.peers.get_mut(id) else { return };
        let next = limits.reads.next(now, |stream| relays.has(stream));
        self.events.extend(next.map(|stream| ServerEvent::RelayReadable(RelayId::new(id, stream))));
    }

    /// Reports the relay whose turn to write begins now, if none has its turn.
    pub(super) fn call_writer(&mut self, now: Instant, id: ConnectionHandle) {
        let Some(Peer { limits: Some(limits), relays, .. }) = self.peers.get_mut(id) else { return };
        let next = limits.writes.next(now, |stream| relays.has(stream));
        self.events.extend(next.map(|stream| ServerEvent::RelayWritable(RelayId::new(id, stream))));
    }

    fn on_released(&mut self, id: ConnectionHandle, released: Released) {
        match released {
            Released::Packet(packet) => self.joiner.push(packet),
            Released::Payload(stream, payload) => self.udp_in.push(UdpId::new(id, stream), payload),
        }
    }
}
