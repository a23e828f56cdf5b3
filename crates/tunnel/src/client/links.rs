//! How a client uses each of its links, and what it tells the server about them.

use bytes::BytesMut;
use mpvpn_masque::{
    capsule::{Capsule, LinkNotice, LinkPolicy},
    h3,
};
use mpvpn_path::Heard;
use mpvpn_quic::LostReason;
use mpvpn_types::{Instant, LinkId, Tier};

use super::{Client, Session};

/// What a policy means at this end, whose packets get their mark from the socket; `agreed`: the far end sends heartbeats
/// accordingly.
pub(crate) fn at_this_end(policy: &LinkPolicy, agreed: bool) -> LinkPolicy {
    LinkPolicy { metered: policy.metered && agreed, dscp: 0, ..*policy }
}

impl Client {
    /// Sets how a link is to be used, from now on and whether it is there yet or not.
    ///
    /// A link of the tier `never` loses its path. If that was the only one, the connection is made anew
    /// over other links.
    pub fn set_link(&mut self, now: Instant, id: LinkId, policy: LinkPolicy) {
        let before = self.policies.insert(id, policy).unwrap_or_default();
        if before == policy {
            return;
        }
        if let Some(session) = &mut self.session {
            session.carrier.set_link(now, id, at_this_end(&policy, session.agreed.links));
        }
        match (before.tier, policy.tier) {
            (Tier::Never, Tier::Never) => {}
            (_, Tier::Never) => self.leave_link(now, id),
            (Tier::Never, _) => self.enter_link(now, id),
            _ => {}
        }
        self.tell_links();
    }

    /// Whether the server has said that it knows this client, by the answer to what it was asked first.
    pub fn is_recognised(&self) -> bool {
        let answered = |session: &Session| session.accepted && session.request.is_some();
        self.session.as_ref().is_some_and(answered)
    }

    /// Whether the link may have a path.
    pub(super) fn allows(&self, id: LinkId) -> bool {
        self.policies.get(&id).is_none_or(|policy| policy.tier != Tier::Never)
    }

    /// Whether the server is reached: the tunnel is up, and a path works.
    pub fn reaches_server(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.carrier.any_alive())
    }

    /// What is heard of the server over a link.
    pub fn heard_on(&self, id: LinkId) -> Heard {
        let works = self.session.as_ref().and_then(|session| session.carrier.works_on(id));
        let tried = || self.attempts.iter().any(|attempt| attempt.link == id && attempt.heard.is_some());
        match works {
            Some(true) => Heard::Works,
            Some(false) => Heard::Dead,
            None if self.links.get(&id).is_some_and(|link| link.probe.answered()) || tried() => {
                Heard::Answers
            }
            // Whoever has taken the TCP connection answers at first: a path has been given up there.
            None if id.is_tcp() && self.session.is_some() && self.has_up(id) => Heard::Dead,
            None => Heard::Nothing,
        }
    }

    fn has_up(&self, id: LinkId) -> bool {
        self.allows(id) && self.links.get(&id).is_some_and(|link| link.up)
    }

    /// Gives up the handshakes over a link.
    pub(super) fn drop_attempts(&mut self, now: Instant, id: LinkId, why: &str) {
        let lost: Vec<_> = self.attempts.extract_if(.., |attempt| attempt.link == id).collect();
        for attempt in lost {
            self.close_connection(now, attempt.connection, why);
        }
    }

    fn leave_link(&mut self, now: Instant, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.opening = None;
        }
        self.drop_attempts(now, id, "the link is not to be used");
        if let Some(session) = &self.session
            && let Some(path) = session.carrier.path_on(id)
            && let Some(connection) = self.endpoint.get(session.connection)
        {
            if session.carrier.works_without(id) {
                connection.close_path(now, path);
            } else {
                let reason = "the only link that worked is not to be used any more".to_owned();
                self.lost(now, &LostReason::Transport(reason));
                self.backoff.now(now);
            }
        }
        self.attempts_over(now);
    }

    fn enter_link(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.probe.restart(now);
        link.opening = None;
        if self.session.as_ref().is_none_or(|session| !session.carrier.any_alive()) {
            self.try_link(now, id);
        }
    }

    /// Tells the server what it does not know yet about the links under the paths.
    pub(super) fn tell_links(&mut self) {
        let Some(session) = &mut self.session else { return };
        let Some(connection) = self.endpoint.get(session.connection) else { return };
        let (told, Some(stream)) = (&mut session.told, session.request) else { return };
        if !session.agreed.links {
            return;
        }
        told.retain(|path, _| session.carrier.has_path(*path));
        for (path, link) in session.carrier.links() {
            let is_same = |other: LinkId| other.uplink() == link.uplink() && other.is_tcp() == link.is_tcp();
            let mut same = session.carrier.links().filter(|(_, other)| is_same(*other));
            let with =
                same.next().map(|(first, _)| first).filter(|first| *first != path || same.next().is_some());
            let policy = self.policies.get(&link).copied().unwrap_or_default();
            let number = self.config.class.is_some().then_some(link.uplink().0);
            let notice = LinkNotice { path, policy: policy.of_far_end(), with, link: number };
            let known = told.get(&path).copied().unwrap_or(LinkNotice::unsaid(path));
            if policy.tier == Tier::Never || known == notice {
                continue;
            }
            told.insert(path, notice);
            let mut capsule = BytesMut::new();
            Capsule::Link(notice).encode(&mut capsule);
            connection.write(stream, h3::encode_data(&capsule));
        }
    }
}
