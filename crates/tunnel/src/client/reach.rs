//! How a client reaches the server: handshakes over all links while there is no connection that works, and
//! paths of the connection over links that have none.

use mpvpn_quic::{Local, PathStatus};
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier};

use super::Client;
use crate::attempt::{ATTEMPT, Attempt, GRACE};

/// With every path silent for this long while data moves, or no answer to the request, a new connection is
/// tried beside the old one.
pub(super) const REVIVE: Duration = Duration::from_millis(1200);
/// The same if the server is heard, but not a word about what it hears.
const REVIVE_MUTE: Duration = Duration::from_millis(200);
/// A handshake that is not answered within this time gets another one beside it: the library repeats lost
/// packets ever less often, and a link may work again at any moment.
const RENEW: Duration = Duration::from_secs(1);
/// The same where every packet costs.
const RENEW_METERED: Duration = Duration::from_secs(4);
/// Handshakes on one link at a time: the oldest, for links on which answers take long, and the newest.
const MOST_ATTEMPTS: usize = 3;
/// A path that is not validated after this time is opened anew.
const OPENING: Duration = Duration::from_secs(30);
/// After this time it is tried again to open a path that could not be opened.
const NOT_YET: Duration = Duration::from_millis(30);

impl Client {
    /// When the handshake is old enough for another one on its link.
    pub(super) fn renewal(&self, attempt: &Attempt) -> Instant {
        let metered = self.policies.get(&attempt.link).is_some_and(|policy| policy.metered);
        attempt.heard.unwrap_or(attempt.since) + if metered { RENEW_METERED } else { RENEW }
    }

    pub(super) fn try_link(&mut self, now: Instant, id: LinkId) {
        let own = self.attempts.iter().filter(|attempt| attempt.link == id);
        // One pipe of each kind is enough to find out whether a link leads to the server; the others join as paths.
        if id.pipe() > 0 && !id.is_tcp()
            || !self.may_connect()
            || own.clone().any(|attempt| now < self.renewal(attempt))
        {
            return;
        }
        // Neither the first, which has waited longest, nor the last.
        let superfluous = own.clone().nth(1).filter(|_| own.count() >= MOST_ATTEMPTS);
        if let Some(connection) = superfluous.map(|attempt| attempt.connection) {
            self.attempts.retain(|attempt| attempt.connection != connection);
            self.close_connection(now, connection, "tried anew");
        }
        let allowed = self.allows(id);
        let Some(link) = self.links.get(&id).filter(|link| link.up && allowed) else { return };
        // Where UDP died, the connection is not to blame: a path for it comes first.
        if id.is_tcp() && self.session.is_some() && link.probe.age(now) < REVIVE {
            return;
        }
        let local = Local::link(id);
        match self.endpoint.connect(now, &self.config.setup, local, link.remote, &self.config.server_name) {
            Ok(connection) => {
                self.attempts.push(Attempt { connection, link: id, since: now, heard: None, ready: None });
                self.backoff.trying();
            }
            Err(error) => tracing::warn!(class = self.class_name(), %error, link = id.0, "cannot connect"),
        }
    }

    pub(super) fn try_all_links(&mut self, now: Instant) {
        let ids: Vec<_> = self.links.keys().copied().collect();
        for id in ids {
            self.try_link(now, id);
        }
    }

    /// What paths there are may work again by themselves.
    fn try_links_without_path(&mut self, now: Instant) {
        let Some(session) = self.session.as_ref().filter(|session| session.up) else { return };
        let without = self.links.keys().filter(|id| session.carrier.path_on(**id).is_none());
        for id in without.copied().collect::<Vec<_>>() {
            self.try_link(now, id);
        }
    }

    pub(super) fn attempts_over(&mut self, now: Instant) {
        if self.attempts.is_empty() && self.session.is_none() && self.backoff.next.is_none() {
            self.backoff.failed(now);
        }
    }

    /// When an attempt that succeeded takes the place of the connection in use.
    pub(super) fn replaces_at(&self, attempt: &Attempt) -> Option<Instant> {
        attempt.ready.map(|at| if self.session.is_some() { at + GRACE } else { at })
    }

    pub(super) fn expire_attempts(&mut self, now: Instant) {
        for attempt in self.attempts.clone() {
            if self.replaces_at(&attempt).is_some_and(|at| now >= at) {
                self.attempts.retain(|other| other.connection != attempt.connection);
                return self.connected(now, attempt);
            }
            if now.saturating_duration_since(attempt.since) >= ATTEMPT {
                self.attempts.retain(|other| other.connection != attempt.connection);
                self.close_connection(now, attempt.connection, "took too long");
                continue;
            }
            if let Some(connection) = self.endpoint.get(attempt.connection) {
                connection.handle_timeout(now);
            }
            self.drive_attempt(now, attempt.connection);
        }
        self.attempts_over(now);
    }

    /// Asks on links without a path whether the server can be reached, and opens a path where it
    /// can.
    pub(super) fn open_paths(&mut self, now: Instant) {
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        if !session.accepted || !connection.is_multipath() {
            return;
        }
        for (id, link) in &mut self.links {
            let allowed = self.policies.get(id).is_none_or(|policy| policy.tier != Tier::Never);
            if !link.up || !allowed || session.carrier.path_on(*id).is_some() {
                continue;
            }
            let mut probe = Vec::new();
            if link.probe.poll(now, *id, &mut probe) {
                self.probes.push_back((*id, probe));
            }
            if !link.probe.answered() || link.opening.is_some_and(|at| now < at) {
                continue;
            }
            if let Some(path) = link.path.take() {
                connection.close_path(now, path);
            }
            match connection.open_path(now, Local::link(*id), link.remote, PathStatus::Available) {
                // The path is there when it is validated; until then it must not be opened twice.
                Ok(path) => (link.opening, link.path) = (Some(now + OPENING), Some(path)),
                Err(error) => {
                    tracing::debug!(%error, link = id.0, "cannot open a path yet");
                    link.opening = Some(now + NOT_YET);
                }
            }
        }
    }

    /// Since when the connection has been of no use.
    pub(super) fn useless_since(&mut self, now: Instant) -> Option<Instant> {
        let session = self.session.as_ref()?;
        if session.up {
            let since = session.carrier.dead_since(now)?;
            // Heartbeats come and no report does: the server may send no data on any path, because it could
            // not validate a change of this client's address, and will not try again.
            let mute = session.carrier.any_alive();
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
                for attempt in std::mem::take(&mut self.attempts) {
                    self.close_connection(now, attempt.connection, "the old connection works again");
                }
            }
        }
    }
}
