//! Several connections of one session, each driven by a [`Client`] of its own: the home makes the
//! session, the members join it.

use mpvpn_types::{ClassId, Instant};

use super::{Client, ClientConfig};
use crate::{Member, carrier::extensions::Agreed, shapers::Shapers};

/// What a client is in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It has the only connection.
    Only,
    /// It makes the session; `agreed`: the server lets others join, and `classes`: those of other classes as well.
    Home { agreed: bool, classes: bool },
    /// It joins.
    Member(Member),
}

impl Part {
    pub(super) fn is_member(self) -> bool {
        matches!(self, Self::Member(_))
    }

    pub(super) fn has_members(self) -> bool {
        matches!(self, Self::Home { agreed: true, .. })
    }

    pub(super) fn knows_classes(self) -> bool {
        matches!(self, Self::Home { agreed: true, classes: true })
    }

    /// The class that its connection carries.
    pub(super) fn class(self) -> ClassId {
        match self {
            Self::Member(member) => member.class(),
            Self::Only | Self::Home { .. } => ClassId::DEFAULT,
        }
    }

    /// Which of the session's connections it says that it has; it says nothing of the only one.
    pub(super) fn member(self) -> Option<Member> {
        match self {
            Self::Only => None,
            Self::Home { .. } => Some(Member::HOME),
            Self::Member(member) => Some(member),
        }
    }

    /// Takes the response. A member must have got what it asked for; a home does without.
    pub(super) fn agreed(&mut self, server: &Agreed, got: Option<&[u8]>, asked: Option<&[u8]>) -> bool {
        match self {
            Self::Only => true,
            Self::Home { agreed, classes } => {
                *agreed = server.member == Some(Member::HOME.number());
                *classes |= server.classes;
                true
            }
            Self::Member(member) => server.member == Some(member.number()) && got.is_some() && got == asked,
        }
    }
}

impl Client {
    /// Asks the server to let others join: [`super::ClientEvent::Members`] says when they may. To be
    /// called before the first link is up.
    pub fn allow_members(&mut self) {
        self.part = Part::Home { agreed: false, classes: false };
    }

    /// A client that joins the session of another; it does nothing until [`Self::join`]. Its failures
    /// are never fatal: it tries again.
    pub fn member(now: Instant, config: ClientConfig, member: Member) -> Self {
        Self { part: Part::Member(member), ..Self::new(now, config) }
    }

    /// Shares the shapers of links with the others of its session. To be called before the first link is up.
    pub(crate) fn share_links(&mut self, shapers: Shapers) {
        self.shapers = shapers;
    }

    /// Joins the session with this secret, and leaves any other. Nothing happens to a client that is no
    /// member, or belongs to this session already.
    pub fn join(&mut self, now: Instant, secret: Vec<u8>) {
        if !self.part.is_member() || self.secret.as_ref() == Some(&secret) {
            return;
        }
        self.secret = Some(secret);
        self.close_session(now, "the session is another one");
        for attempt in std::mem::take(&mut self.attempts) {
            self.close_connection(now, attempt.connection, "the session is another one");
        }
        self.assignment = None;
        self.backoff.now(now);
    }

    /// Closes the connection, and makes none until [`Self::wake`].
    pub(crate) fn sleep(&mut self, now: Instant) {
        const REASON: &str = "nothing uses it";
        self.asleep = true;
        self.close_session(now, REASON);
        for attempt in std::mem::take(&mut self.attempts) {
            self.close_connection(now, attempt.connection, REASON);
        }
        self.down.clear();
        self.backoff.trying();
    }

    /// A connection is wanted again.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.asleep = false;
        self.backoff.now(now);
    }

    pub(super) fn may_connect(&self) -> bool {
        !self.ended && !self.asleep && (!self.part.is_member() || self.secret.is_some())
    }
}
