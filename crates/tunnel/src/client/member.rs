//! Several connections of one session, each driven by a [`Client`] of its own: the home makes the
//! session, the members join it.

use mpvpn_types::{ClassId, Instant};

use super::{Client, ClientConfig};
use crate::{ConnectionNumber, multipath::extensions::NegotiatedExtensions, shapers::Shapers};

/// What a client is in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It has the only connection.
    Only,
    /// It makes the session; `agreed`: the server lets others join, and `classes`: those of other classes as well.
    Home { agreed: bool, classes: bool },
    /// It joins.
    Member(ConnectionNumber),
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
    pub(super) fn member(self) -> Option<ConnectionNumber> {
        match self {
            Self::Only => None,
            Self::Home { .. } => Some(ConnectionNumber::INITIAL),
            Self::Member(member) => Some(member),
        }
    }

    /// Takes the response. A member must have got what it asked for; a home does without.
    fn agreed(&mut self, server: &NegotiatedExtensions, got: Option<&[u8]>, asked: Option<&[u8]>) -> bool {
        match self {
            Self::Only => true,
            Self::Home { agreed, classes } => {
                *agreed = server.member == Some(ConnectionNumber::INITIAL.number());
                *classes |= server.classes;
                true
            }
            Self::Member(member) => server.member == Some(member.number()) && got.is_some() && got == asked,
        }
    }
}

/// A client's place in its session.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) part: Part,
    /// That of the session, once the server has said it, or the home.
    pub(super) secret: Option<Vec<u8>>,
    /// Those of the links, which all connections of the session share.
    pub(super) shapers: Shapers,
}

impl Membership {
    pub(super) fn new(part: Part) -> Self {
        Self { part, secret: None, shapers: Shapers::default() }
    }

    /// Whether there is a session for a connection.
    pub(super) fn may_connect(&self) -> bool {
        !self.part.is_member() || self.secret.is_some()
    }

    /// The server has granted a tunnel, in the session with the secret `got` if it keeps sessions. Returns whether that is
    /// the session of before; `None` if a member did not get what it asked for.
    pub(super) fn accepted(&mut self, server: &NegotiatedExtensions, got: Option<Vec<u8>>) -> Option<bool> {
        if !self.part.agreed(server, got.as_deref(), self.secret.as_deref()) {
            return None;
        }
        let resumed = got.is_some() && got == self.secret;
        self.secret = got.or(self.secret.take());
        Some(resumed)
    }

    /// The home is in the session with this secret. Returns whether that is another one for a member.
    fn join(&mut self, secret: Vec<u8>) -> bool {
        if !self.part.is_member() || self.secret.as_ref() == Some(&secret) {
            return false;
        }
        self.secret = Some(secret);
        true
    }
}

impl Client {
    /// Asks the server to let others join: [`super::ClientEvent::JoinsAllowed`] says when they may. To be
    /// called before the first link is up.
    pub fn allow_joins(&mut self) {
        self.membership.part = Part::Home { agreed: false, classes: false };
    }

    /// A client that joins the session of another; it does nothing until [`Self::join`]. Its failures
    /// are never fatal: it tries again.
    pub fn joining(now: Instant, config: ClientConfig, member: ConnectionNumber) -> Self {
        Self { membership: Membership::new(Part::Member(member)), ..Self::new(now, config) }
    }

    /// Shares the shapers of links with the others of its session. To be called before the first link is up.
    pub(crate) fn share_links(&mut self, shapers: Shapers) {
        self.membership.shapers = shapers;
    }

    /// Joins the session with this secret, and leaves any other. Nothing happens to a client that is no
    /// member, or belongs to this session already.
    pub fn join(&mut self, now: Instant, secret: Vec<u8>) {
        if self.membership.join(secret) {
            self.close_all(now, "the session is another one");
            self.reports.assignment = None;
            self.connector.backoff.now(now);
        }
    }

    /// Closes the connection, and makes none until [`Self::wake`].
    pub(crate) fn sleep(&mut self, now: Instant) {
        self.connector.sleep();
        self.close_all(now, "nothing uses it");
        self.reports.clear_reason();
    }

    /// A connection is wanted again.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.connector.wake(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_needs_the_session_and_the_number_that_it_asked_for() {
        let member = ConnectionNumber::new(17).unwrap();
        let agreed =
            |number| NegotiatedExtensions { member: Some(number), ..NegotiatedExtensions::default() };
        let mut membership = Membership::new(Part::Member(member));
        assert!(!membership.may_connect(), "it does not know the session");
        assert!(membership.join(vec![1; 16]) && !membership.join(vec![1; 16]));
        assert!(membership.may_connect());
        assert_eq!(membership.accepted(&agreed(17), Some(vec![2; 16])), None, "another session");
        assert_eq!(membership.accepted(&agreed(0), Some(vec![1; 16])), None, "another number");
        assert_eq!(membership.accepted(&agreed(17), Some(vec![1; 16])), Some(true));
    }

    #[test]
    fn a_home_keeps_the_session_that_the_server_said_last() {
        let mut membership = Membership::new(Part::Home { agreed: false, classes: false });
        let server =
            NegotiatedExtensions { member: Some(0), classes: true, ..NegotiatedExtensions::default() };
        assert_eq!(membership.accepted(&server, Some(vec![1; 16])), Some(false));
        assert!(membership.part.has_members() && membership.part.knows_classes());
        assert!(!membership.join(vec![2; 16]), "it is no member");
        assert_eq!(membership.accepted(&NegotiatedExtensions::default(), None), Some(false));
        assert!(!membership.part.has_members(), "the server lets no others join now");
        assert_eq!(membership.secret, Some(vec![1; 16]));
    }
}
