//! How a client reaches the server: handshakes over all links while no connection works, and new paths over
//! links without one.
//!
//! In: links, their policies, events of handshakes, the time. Out: handshakes, paths, the connection in use.
//! Always holds: a connection with silent paths is kept until a new one is established
//! (docs/design/liveness.md).

use std::net::SocketAddr;

use mpvpn_masque::capsule::LinkPolicy;
use mpvpn_path::{LONG_SILENCE, TransportHealth};
use mpvpn_quic::{ConnectionHandle, Event as QuicEvent, HandshakeResult, LostReason};
use mpvpn_types::{Duration, Instant, LinkId, PathId, Tier, target::LIVENESS};

use super::{
    Client, ClientError, Session,
    connector::{Connector, DesiredState},
    in_use,
    links::local_policy,
};
use crate::events::ClientChange;

/// A new connection is tried beside the old one if every path was silent for this long while data moves, or
/// if a request has no response: longer than the silence after which a path is dead
/// (docs/design/liveness.md). Larger: a longer outage when the server restarted; smaller: handshakes during
/// short outages.
pub(super) const RECONNECT_AFTER: Duration = Duration::from_millis(1200);
/// The same if packets of the server arrive without heartbeat reports: the server may be unable to validate a
/// changed address. Chosen (docs/design/liveness.md). Larger: a longer outage after a NAT rebinding; smaller:
/// handshakes while reports are late.
const RECONNECT_AFTER_NO_REPORTS: Duration = Duration::from_millis(200);

impl Client {
    /// A link can reach the server at `remote`. Must also be called when the address of the link or the
    /// server changes.
    pub fn link_up(&mut self, now: Instant, id: LinkId, remote: SocketAddr) {
        if self.links.up(now, id, remote) {
            self.abandon_handshakes_on(now, id, "the server has another address");
        }
        if let Some(session) = &mut self.session {
            session.multipath.on_link_carrier(now, id, true);
        }
        self.probe_anew(now);
        self.try_if_none_works(now, id);
        if id.is_tcp() {
            self.open_paths(now);
        }
    }

    /// A link is down: no carrier, no address, or removed.
    pub fn link_down(&mut self, now: Instant, id: LinkId) {
        if !self.links.down(id) {
            return;
        }
        if let Some(session) = &mut self.session {
            session.multipath.on_link_carrier(now, id, false);
        }
        self.abandon_handshakes_on(now, id, "the link is down");
        self.back_off_if_all_failed(now);
    }

    /// Sets the policy of a link, which need not exist yet.
    /// A link of the tier `never` loses its path. If no other path works, the client reconnects over other
    /// links.
    pub fn set_link(&mut self, now: Instant, id: LinkId, policy: LinkPolicy) {
        let before = self.links.set_policy(id, policy);
        if before == policy {
            return;
        }
        if let Some(session) = &mut self.session {
            session.multipath.set_link(now, id, local_policy(&policy, session.agreed.links));
            session.notices_due = true;
        }
        match (before.tier, policy.tier) {
            (Tier::Never, Tier::Never) => {}
            (_, Tier::Never) => self.leave_link(now, id),
            (Tier::Never, _) if self.links.probe_again(now, id) => self.try_if_none_works(now, id),
            _ => {}
        }
        self.send_link_notices();
    }

    /// How well packets from the server arrive over a link.
    pub fn heard_on(&self, id: LinkId) -> TransportHealth {
        let works = self.session.as_ref().and_then(|session| session.multipath.paths.works_on(id));
        let handshakes = self.connector.handshakes.iter();
        let tried =
            || handshakes.clone().any(|handshake| handshake.link == id && handshake.last_received.is_some());
        match works {
            Some(true) => TransportHealth::Working,
            Some(false) => TransportHealth::Dead,
            None if self.links.has_answered(id) || tried() => TransportHealth::Answering,
            // A TCP link counts as answered once it is connected; it was probed again, so its path was
            // closed.
            None if id.is_tcp() && self.session.is_some() && self.links.usable(id).is_some() => {
                TransportHealth::Dead
            }
            None => TransportHealth::Unknown,
        }
    }

    /// Whether a path over this link is alive, whatever the server receives there.
    pub(crate) fn hears_on(&self, id: LinkId) -> bool {
        self.session.as_ref().is_some_and(|session| session.multipath.hears_on(id))
    }

    fn leave_link(&mut self, now: Instant, id: LinkId) {
        self.links.stop_using(id);
        self.abandon_handshakes_on(now, id, "the link is not to be used");
        if let Some(session) = &self.session
            && let Some(path) = session.multipath.paths.path_on(id)
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if session.multipath.paths.works_besides(id) {
                connection.close_path(now, path);
            } else {
                let reason = "the only link that worked is not to be used any more".to_owned();
                self.on_lost(now, &LostReason::Transport(reason));
                self.connector.backoff.reset(now);
            }
        }
        self.back_off_if_all_failed(now);
    }

    fn abandon_handshakes_on(&mut self, now: Instant, id: LinkId, reason: &str) {
        self.connector.abandon(now, &mut self.endpoint, |link| link == id, reason);
    }

    pub(super) fn may_connect(&self) -> bool {
        self.connector.desired == DesiredState::Connected && self.membership.may_connect()
    }

    /// The network or the wishes of the user have changed: the server is asked for as at the begin of a
    /// silence.
    pub(super) fn probe_anew(&mut self, now: Instant) {
        self.silence.probe_anew(now);
        if let Some(session) = &mut self.session {
            session.multipath.probe_anew(now);
        }
    }

    /// Whether this client has heard nothing for so long that it asks over its links with single packets.
    pub(crate) fn is_asking(&self, now: Instant) -> bool {
        self.silence.is_probing && self.asks_links(now)
    }

    /// Whether a path of this client is dead, or nothing is heard at all.
    pub(crate) fn has_questions(&self, now: Instant) -> bool {
        self.questions(now).next().is_some() || self.is_asking(now)
    }

    /// The links over which a path is dead, so that heartbeats ask there, and whether data could use it.
    pub(crate) fn questions(&self, now: Instant) -> impl Iterator<Item = (LinkId, bool)> {
        self.session.iter().flat_map(move |session| session.multipath.questions(now))
    }

    /// Whether there is a connection on which nothing has been heard for [`LONG_SILENCE`].
    pub(crate) fn has_long_silent_connection(&self, now: Instant) -> bool {
        self.session.is_some() && now >= self.silence.since() + LONG_SILENCE
    }

    /// Whether another client asks over all links of this one.
    pub(crate) fn may_leave_to(&self, now: Instant, other: &Self) -> bool {
        other.is_asking(now) && self.links.are_among(&other.links)
    }

    /// Whether the paths of this client died after another client, whose links are among its own, heard the
    /// server for the last time, and later than that one.
    pub(crate) fn found_silence_after(&self, other: &Self) -> bool {
        let heard = other.silence.heard;
        let died_since = |session: &Session| {
            let paths = &session.multipath.paths;
            session.up && !paths.any_works() && paths.dead_since().is_some_and(|at| at > heard)
        };
        self.silence.heard > heard
            && self.session.as_ref().is_some_and(died_since)
            && other.links.are_among(&self.links)
    }

    /// Leaves questions to other clients of the same server: all if `shared`, else those on dead paths over
    /// links for which `asks_over` holds; it is told whether data could use the path. When that ends, this
    /// client asks at once. Returns whether something has changed.
    pub(crate) fn share_questions(
        &mut self,
        now: Instant,
        shared: bool,
        asks_over: impl Fn(LinkId, bool) -> bool,
    ) -> bool {
        let own = self.session.as_mut().map(|session| &mut session.multipath);
        let changed = own.is_some_and(|own| {
            own.share_questions(now, |link, is_dense| shared || asks_over(link, is_dense))
        });
        if std::mem::replace(&mut self.silence.is_shared, shared) == shared {
            return changed;
        }
        tracing::debug!(target: LIVENESS, class = self.class_name(), shared, "who asks for the server has changed");
        if !shared {
            self.probe_anew(now);
            self.connector.backoff.reset(now);
        }
        true
    }

    /// Asks over all links with single packets, once nothing has been heard for long.
    pub(super) fn probe_if_silent(&mut self, now: Instant) {
        if !self.asks_links(now) || !self.silence.is_long(now) {
            return;
        }
        if !std::mem::replace(&mut self.silence.is_probing, true) {
            let since = self.silence.since();
            tracing::debug!(
                target: LIVENESS,
                silence = ?now.saturating_duration_since(since),
                "nothing of the server arrives: links are asked ever less often"
            );
            self.links.probe_all_again(now, since);
        }
        self.links.probe(now);
    }

    pub(super) fn try_if_none_works(&mut self, now: Instant, id: LinkId) {
        if self.session.as_ref().is_none_or(|session| !session.multipath.paths.any_works()) {
            self.try_link(now, id);
        }
    }

    fn try_link(&mut self, now: Instant, id: LinkId) {
        // One path of each transport is enough to find out whether a link reaches the server; the others join
        // as paths.
        if id.path_index() > 0 && !id.is_tcp() || !self.may_connect() || self.silence.is_shared {
            return;
        }
        let Some(remote) = self.links.usable(id) else { return };
        // If UDP fails on a link, the connection itself works: a path inside TCP comes first.
        if id.is_tcp() && self.session.is_some() && self.links.age(now, id) < RECONNECT_AFTER {
            return;
        }
        let answers = id.is_tcp() || !self.silence.is_probing || self.links.has_answered(id);
        let (last, metered) = (self.links.last_handshake(id), self.links.policy(id).metered);
        if !answers && now < self.silence.next_handshake(now, last, metered) {
            return;
        }
        if self.connector.connect(now, &mut self.endpoint, &self.config, &self.links, (id, remote)) {
            self.links.on_handshake(now, id);
        }
    }

    pub(super) fn try_all_links(&mut self, now: Instant) {
        self.links.ids().into_iter().for_each(|id| self.try_link(now, id));
    }

    /// Starts handshakes over links without a path; existing paths may recover by themselves.
    fn try_links_without_path(&mut self, now: Instant) {
        for id in self.links.ids() {
            let session = self.session.as_ref().filter(|session| session.up);
            if session.is_some_and(|session| session.multipath.paths.path_on(id).is_none()) {
                self.try_link(now, id);
            }
        }
    }

    pub(super) fn back_off_if_all_failed(&mut self, now: Instant) {
        let (in_use, since) = (self.session.is_some(), self.silence.since());
        self.connector.back_off_if_all_failed(now, in_use, since);
    }

    pub(super) fn expire_handshakes(&mut self, now: Instant) {
        for handshake in self.connector.handshakes.clone() {
            let id = handshake.connection;
            if Connector::replaces_at(&handshake, self.session.is_some()).is_some_and(|at| now >= at) {
                self.connector.take(id);
                return self.use_connection(now, id);
            }
            let limit = self.silence.handshake_limit(now, handshake.last_received);
            if now.saturating_duration_since(handshake.started_at) >= limit {
                self.connector.take(id);
                self.connector.close(now, &mut self.endpoint, id, "took too long");
                self.endpoint.on_handshake_ended(HandshakeResult::Failed);
                continue;
            }
            if let Some(connection) = self.endpoint.get(id) {
                connection.handle_timeout(now);
            }
            self.drive_handshake(now, id);
        }
        self.back_off_if_all_failed(now);
    }

    /// Handles events of a handshake.
    pub(super) fn drive_handshake(&mut self, now: Instant, id: ConnectionHandle) {
        let waits = self.connector.handshake(id).is_some_and(|handshake| handshake.completed_at.is_none());
        while waits
            && let Some(event) = self.endpoint.get(id).and_then(|connection| connection.poll_event(now))
        {
            match event {
                // The streams of the old connection would end with it: heartbeats test it once more.
                QuicEvent::Connected if self.session.is_some() && self.has_flows() => {
                    self.endpoint.on_handshake_ended(HandshakeResult::Completed);
                    self.keep_as_replacement(now, id);
                    break;
                }
                QuicEvent::Connected => {
                    self.endpoint.on_handshake_ended(HandshakeResult::Completed);
                    self.connector.take(id);
                    return self.use_connection(now, id);
                }
                QuicEvent::Lost(reason) => return self.on_handshake_failed(now, id, reason),
                _ => {}
            }
        }
        self.connector.reap(&mut self.endpoint, id);
    }

    /// A handshake completed, but the connection in use may recover: it has
    /// [`REPLACEMENT_DELAY`](crate::handshake::REPLACEMENT_DELAY) to do so.
    fn keep_as_replacement(&mut self, now: Instant, id: ConnectionHandle) {
        let (Some(handshake), Some(session)) = (self.connector.handshake(id), &mut self.session) else {
            return;
        };
        handshake.completed_at = Some(now);
        session.multipath.send_heartbeats_on(handshake.link);
        self.links.on_connected(handshake.link);
        self.open_paths(now);
    }

    fn on_handshake_failed(&mut self, now: Instant, id: ConnectionHandle, reason: LostReason) {
        self.endpoint.on_handshake_ended(HandshakeResult::Failed);
        if let Some(handshake) = self.connector.take(id) {
            self.reports.changes.push(ClientChange::ConnectFailed(handshake.link, reason.to_string()));
        }
        self.connector.reap(&mut self.endpoint, id);
        match reason {
            LostReason::Tls(reason) if !self.was_up => self.fail(now, ClientError::Tls(reason)),
            LostReason::CertificateRefused(reason) => {
                self.fail(now, ClientError::CertificateRefused(reason));
            }
            _ => {}
        }
        self.back_off_if_all_failed(now);
    }

    /// Probes links without a path, and opens paths where the server answers.
    pub(super) fn open_paths(&mut self, now: Instant) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        if session.accepted && connection.is_multipath() {
            self.links.open_paths(now, &session.multipath, connection);
        }
    }

    /// Sends a LINK capsule for each path whose link changed.
    pub(super) fn send_link_notices(&mut self) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        session.send_link_notices(connection, &self.links, self.config.class.is_some());
    }

    /// Since when the connection has been unusable; `None` if it works.
    pub(super) fn unusable_since(&mut self, now: Instant) -> Option<Instant> {
        let session = self.session.as_ref()?;
        if session.up {
            let since = session.multipath.all_paths_dead_since(now)?;
            // Heartbeats arrive without reports: the server may be unable to send data on any path, because
            // it could not validate a changed address of this client, and does not retry.
            let mute = session.multipath.paths.any_works();
            return Some(if mute {
                since.checked_sub(RECONNECT_AFTER - RECONNECT_AFTER_NO_REPORTS).unwrap_or(since)
            } else {
                since
            });
        }
        // Four round trips: a request takes two, and heartbeats are not exchanged yet.
        let rtt = self.endpoint.get(session.connection).and_then(|connection| connection.rtt(PathId(0)));
        Some(session.since + (rtt.unwrap_or_default() * 4).saturating_sub(RECONNECT_AFTER))
    }

    /// Tries a new connection when all paths are silent: the server may have restarted or moved. The old
    /// connection is kept until the new one is established.
    pub(super) fn reconnect_if_unusable(&mut self, now: Instant) {
        if self.session.is_none() {
            return;
        }
        match self.unusable_since(now) {
            Some(since) if now >= since + RECONNECT_AFTER => self.try_all_links(now),
            Some(_) => self.try_links_without_path(now),
            None => {
                let reason = "the old connection works again";
                self.connector.abandon(now, &mut self.endpoint, |_| true, reason);
            }
        }
    }
}
