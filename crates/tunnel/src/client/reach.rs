//! How a client reaches the server: handshakes over all links while there is no connection that works, and
//! paths of the connection over links that have none.

use std::net::SocketAddr;

use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_path::TransportHealth;
use mpvpn_quic::{ConnectionHandle, Event as QuicEvent, LostReason};
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier};

use super::{
    Client, ClientError,
    connector::{Connector, Wanted},
    in_use,
    links::at_this_end,
};
use crate::{attempt::ATTEMPT, events::ClientChange};

/// With every path silent for this long while data moves, or no answer to the request, a new connection is
/// tried beside the old one.
pub(super) const REVIVE: Duration = Duration::from_millis(1200);
/// The same if the server is heard, but not a word about what it hears.
const REVIVE_MUTE: Duration = Duration::from_millis(200);

impl Client {
    /// A link can carry packets to the server at `remote`. Also to be called when its address or
    /// the server's has changed.
    pub fn link_up(&mut self, now: Instant, id: LinkId, remote: SocketAddr) {
        if self.links.up(now, id, remote) {
            self.give_up_on(now, id, "the server has another address");
        }
        if let Some(session) = &mut self.session {
            session.multipath.on_link_carrier(now, id, true);
        }
        self.try_if_none_works(now, id);
        if id.is_tcp() {
            self.open_paths(now);
        }
    }

    /// A link cannot carry packets: no carrier, no address, or gone.
    pub fn link_down(&mut self, now: Instant, id: LinkId) {
        if !self.links.down(id) {
            return;
        }
        if let Some(session) = &mut self.session {
            session.multipath.on_link_carrier(now, id, false);
        }
        self.give_up_on(now, id, "the link is down");
        self.attempts_over(now);
    }

    /// Sets how a link is to be used, from now on and whether it is there yet or not.
    ///
    /// A link of the tier `never` loses its path. If that was the only one, the connection is made anew
    /// over other links.
    pub fn set_link(&mut self, now: Instant, id: LinkId, policy: LinkPolicy) {
        let before = self.links.set_policy(id, policy);
        if before == policy {
            return;
        }
        if let Some(session) = &mut self.session {
            session.multipath.set_link(now, id, at_this_end(&policy, session.agreed.links));
        }
        match (before.tier, policy.tier) {
            (Tier::Never, Tier::Never) => {}
            (_, Tier::Never) => self.leave_link(now, id),
            (Tier::Never, _) if self.links.ask_again(now, id) => self.try_if_none_works(now, id),
            _ => {}
        }
        self.tell_links();
    }

    /// What is heard of the server over a link.
    pub fn heard_on(&self, id: LinkId) -> TransportHealth {
        let works = self.session.as_ref().and_then(|session| session.multipath.path_works_on(id));
        let attempts = self.connector.attempts().iter();
        let tried = || attempts.clone().any(|attempt| attempt.link == id && attempt.heard.is_some());
        match works {
            Some(true) => TransportHealth::Working,
            Some(false) => TransportHealth::Dead,
            None if self.links.has_answered(id) || tried() => TransportHealth::Answering,
            // Whoever has taken the TCP connection answers at first: a path has been given up there.
            None if id.is_tcp() && self.session.is_some() && self.links.usable(id).is_some() => {
                TransportHealth::Dead
            }
            None => TransportHealth::Unknown,
        }
    }

    fn leave_link(&mut self, now: Instant, id: LinkId) {
        self.links.leave(id);
        self.give_up_on(now, id, "the link is not to be used");
        if let Some(session) = &self.session
            && let Some(path) = session.multipath.path_on(id)
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if session.multipath.any_path_works_besides(id) {
                connection.close_path(now, path);
            } else {
                let reason = "the only link that worked is not to be used any more".to_owned();
                self.lost(now, &LostReason::Transport(reason));
                self.connector.backoff.now(now);
            }
        }
        self.attempts_over(now);
    }

    fn give_up_on(&mut self, now: Instant, id: LinkId, reason: &str) {
        self.connector.give_up(now, &mut self.endpoint, |link| link == id, reason);
    }

    pub(super) fn may_connect(&self) -> bool {
        self.connector.wanted == Wanted::Yes && self.membership.may_connect()
    }

    fn try_if_none_works(&mut self, now: Instant, id: LinkId) {
        if self.session.as_ref().is_none_or(|session| !session.multipath.any_path_works()) {
            self.try_link(now, id);
        }
    }

    fn try_link(&mut self, now: Instant, id: LinkId) {
        // One pipe of each kind is enough to find out whether a link leads to the server; the others join as paths.
        if id.path_index() > 0 && !id.is_tcp() || !self.may_connect() {
            return;
        }
        let Some(remote) = self.links.usable(id) else { return };
        // Where UDP died, the connection is not to blame: a path for it comes first.
        if id.is_tcp() && self.session.is_some() && self.links.age(now, id) < REVIVE {
            return;
        }
        self.connector.connect(now, &mut self.endpoint, &self.config, &self.links, (id, remote));
    }

    pub(super) fn try_all_links(&mut self, now: Instant) {
        self.links.ids().into_iter().for_each(|id| self.try_link(now, id));
    }

    /// What paths there are may work again by themselves.
    fn try_links_without_path(&mut self, now: Instant) {
        for id in self.links.ids() {
            let session = self.session.as_ref().filter(|session| session.up);
            if session.is_some_and(|session| session.multipath.path_on(id).is_none()) {
                self.try_link(now, id);
            }
        }
    }

    pub(super) fn attempts_over(&mut self, now: Instant) {
        self.connector.wait_if_all_failed(now, self.session.is_some());
    }

    pub(super) fn expire_attempts(&mut self, now: Instant) {
        for attempt in self.connector.attempts().to_vec() {
            let id = attempt.connection;
            if Connector::replaces_at(&attempt, self.session.is_some()).is_some_and(|at| now >= at) {
                self.connector.take(id);
                return self.connected(now, id);
            }
            if now.saturating_duration_since(attempt.since) >= ATTEMPT {
                self.connector.take(id);
                self.connector.close(now, &mut self.endpoint, id, "took too long");
                continue;
            }
            if let Some(connection) = self.endpoint.get(id) {
                connection.handle_timeout(now);
            }
            self.drive_attempt(now, id);
        }
        self.attempts_over(now);
    }

    /// Looks what has happened to a connection that is not the one in use.
    pub(super) fn drive_attempt(&mut self, now: Instant, id: ConnectionHandle) {
        let waits = self.connector.attempt(id).is_some_and(|attempt| attempt.ready.is_none());
        while waits
            && let Some(event) = self.endpoint.get(id).and_then(|connection| connection.poll_event(now))
        {
            match event {
                // With the old connection its streams would end: it is asked once more.
                QuicEvent::Connected if self.session.is_some() && self.has_flows() => {
                    self.wait_for_session(now, id);
                    break;
                }
                QuicEvent::Connected => {
                    self.connector.take(id);
                    return self.connected(now, id);
                }
                QuicEvent::Lost(reason) => return self.attempt_failed(now, id, reason),
                _ => {}
            }
        }
        self.connector.settle(&mut self.endpoint, id);
    }

    /// A handshake succeeded, but the connection in use may still turn out to work.
    fn wait_for_session(&mut self, now: Instant, id: ConnectionHandle) {
        let (Some(attempt), Some(session)) = (self.connector.attempt(id), &mut self.session) else { return };
        attempt.ready = Some(now);
        session.multipath.send_heartbeats_on(attempt.link);
        self.links.on_connected(attempt.link);
        self.open_paths(now);
    }

    fn attempt_failed(&mut self, now: Instant, id: ConnectionHandle, reason: LostReason) {
        if let Some(attempt) = self.connector.take(id) {
            self.reports.changes.push(ClientChange::ConnectFailed(attempt.link, reason.to_string()));
        }
        self.connector.settle(&mut self.endpoint, id);
        if let LostReason::Tls(reason) = reason
            && !self.was_up
        {
            self.fail(now, ClientError::Tls(reason));
        }
        self.attempts_over(now);
    }

    /// Asks on links without a path whether the server can be reached, and opens a path where it
    /// can.
    pub(super) fn open_paths(&mut self, now: Instant) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        if session.accepted && connection.is_multipath() {
            self.links.open_paths(now, &session.multipath, connection);
        }
    }

    /// Tells the server what it does not know yet about the links under the paths.
    pub(super) fn tell_links(&mut self) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.tell_links(connection, &self.links, self.config.class.is_some());
    }

    /// Since when the connection has been of no use.
    pub(super) fn useless_since(&mut self, now: Instant) -> Option<Instant> {
        let session = self.session.as_ref()?;
        if session.up {
            let since = session.multipath.all_paths_dead_since(now)?;
            // Heartbeats come and no report does: the server may send no data on any path, because it could
            // not validate a change of this client's address, and will not try again.
            let mute = session.multipath.any_path_works();
            return Some(if mute { since.checked_sub(REVIVE - REVIVE_MUTE).unwrap_or(since) } else { since });
        }
        // A request takes two round trips, and heartbeats are not yet exchanged.
        let rtt = self.endpoint.get(session.connection).and_then(|connection| connection.rtt(PathId(0)));
        Some(session.since + (rtt.unwrap_or_default() * 4).saturating_sub(REVIVE))
    }

    /// When all paths are silent the server may have forgotten this client, or moved: a new
    /// connection is tried, and the old one is kept until that succeeds.
    pub(super) fn revive(&mut self, now: Instant) {
        if self.session.is_none() {
            return;
        }
        match self.useless_since(now) {
            Some(since) if now >= since + REVIVE => self.try_all_links(now),
            Some(_) => self.try_links_without_path(now),
            None => {
                let reason = "the old connection works again";
                self.connector.give_up(now, &mut self.endpoint, |_| true, reason);
            }
        }
    }
}
