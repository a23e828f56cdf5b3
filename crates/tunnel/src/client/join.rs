//! Several connections of one session, each driven by a [`Client`] of its own: the initial connection makes
//! the session, the others join it.
//!
//! In: the secret of the session, responses of the server. Out: the role of a client in its session. Always
//! holds: a joined connection does not connect before it knows the secret, and is accepted only with the
//! session and number it asked for.

use mpvpn_types::{ClassId, Instant};

use super::{Assignment, Client, ClientConfig};
use crate::{ConnectionNumber, multipath::extensions::NegotiatedExtensions, shapers::Shapers};

/// The role of a client's connection in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionRole {
    /// The only connection of the session.
    Only,
    /// The initial connection, which makes the session. `agreed`: the server lets others join; `classes`:
    /// also those of other classes.
    Initial { agreed: bool, classes: bool },
    /// Joins the session as the connection with this number.
    Joined(ConnectionNumber),
}

impl SessionRole {
    pub(super) fn is_joined(self) -> bool {
        matches!(self, Self::Joined(_))
    }

    pub(super) fn allows_joins(self) -> bool {
        matches!(self, Self::Initial { agreed: true, .. })
    }

    pub(super) fn allows_class_joins(self) -> bool {
        matches!(self, Self::Initial { agreed: true, classes: true })
    }

    /// The class that its connection carries.
    pub(super) fn class(self) -> ClassId {
        match self {
            Self::Joined(number) => number.class(),
            Self::Only | Self::Initial { .. } => ClassId::DEFAULT,
        }
    }

    /// The number that the request carries (extension `connection`); the only connection sends none.
    pub(super) fn number(self) -> Option<ConnectionNumber> {
        match self {
            Self::Only => None,
            Self::Initial { .. } => Some(ConnectionNumber::INITIAL),
            Self::Joined(number) => Some(number),
        }
    }

    /// Takes the response. Returns whether the connection can be used: a joined one needs the number and
    /// session that it asked for.
    fn agreed(&mut self, server: &NegotiatedExtensions, asked: Option<&[u8]>) -> bool {
        match self {
            Self::Only => true,
            Self::Initial { agreed, classes } => {
                *agreed = server.number == Some(ConnectionNumber::INITIAL);
                *classes |= server.classes;
                true
            }
            Self::Joined(number) => {
                server.number == Some(*number) && asked.is_some() && server.secret.as_deref() == asked
            }
        }
    }
}

/// Role, secret and shapers of a client in its session.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) role: SessionRole,
    /// The secret of the session, from the server or the initial connection.
    pub(super) secret: Option<Vec<u8>>,
    /// The addresses that a process before had in the session, to be asked for until the server has assigned
    /// some.
    pub(super) wanted: Option<Assignment>,
    /// The shapers of the links, shared by all connections of the session.
    pub(super) shapers: Shapers,
}

impl Membership {
    pub(super) fn new(role: SessionRole) -> Self {
        Self { role, secret: None, wanted: None, shapers: Shapers::default() }
    }

    /// Whether a connection may be made: a joined one needs the secret.
    pub(super) fn may_connect(&self) -> bool {
        !self.role.is_joined() || self.secret.is_some()
    }

    /// The server has accepted the request. Returns whether the session was resumed; `None` if a joined
    /// connection did not get the session and number that it asked for.
    pub(super) fn accepted(&mut self, server: &NegotiatedExtensions) -> Option<bool> {
        if !self.role.agreed(server, self.secret.as_deref()) {
            return None;
        }
        let resumed = server.secret.is_some() && server.secret == self.secret;
        self.secret = server.secret.clone().or(self.secret.take());
        Some(resumed)
    }

    /// Leaves the session.
    pub(super) fn leave(&mut self) {
        (self.secret, self.wanted) = (None, None);
    }

    /// The initial connection is in the session with this secret. Returns whether this joined connection has
    /// to change its session.
    fn join(&mut self, secret: Vec<u8>) -> bool {
        if !self.role.is_joined() || self.secret.as_ref() == Some(&secret) {
            return false;
        }
        self.secret = Some(secret);
        true
    }
}

impl Client {
    /// Asks the server to let others join: [`super::ClientEvent::JoinsAllowed`] reports when they may. Must
    /// be called before the first link is up.
    pub fn allow_joins(&mut self) {
        self.membership.role = SessionRole::Initial { agreed: false, classes: false };
    }

    /// Resumes the session that a process before had, if the server knows it still, and asks for its
    /// addresses. Must be called before the first link is up. Does nothing for a client that joins a
    /// session.
    pub fn resume(&mut self, secret: Vec<u8>, wanted: Assignment) {
        if !self.membership.role.is_joined() {
            self.membership.secret = Some(secret);
            self.membership.wanted = Some(wanted);
        }
    }

    /// The secret of the session, if the server keeps sessions.
    pub fn session_secret(&self) -> Option<&[u8]> {
        self.membership.secret.as_deref()
    }

    /// A client that joins the session of another; it does nothing until [`Self::join`]. Its failures are
    /// never fatal: it retries.
    pub fn joining(now: Instant, config: ClientConfig, member: ConnectionNumber) -> Self {
        Self { membership: Membership::new(SessionRole::Joined(member)), ..Self::new(now, config) }
    }

    /// Uses shapers that all connections of the session share. Must be called before the first link is up.
    pub(crate) fn share_links(&mut self, shapers: Shapers) {
        self.membership.shapers = shapers;
    }

    /// Joins the session with this secret, and leaves any other. Does nothing for a client that does not
    /// join, or that is in this session already.
    pub fn join(&mut self, now: Instant, secret: Vec<u8>) {
        if self.membership.join(secret) {
            self.close_all(now, "the session is another one");
            self.reports.assignment = None;
            self.connector.backoff.reset(now);
        }
    }

    /// Closes the connection, and makes none until [`Self::wake`].
    pub(crate) fn sleep(&mut self, now: Instant) {
        self.connector.sleep();
        self.close_all(now, "nothing uses it");
        self.reports.clear_reason();
    }

    /// Connects again.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.connector.wake(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joined_connection_needs_the_session_and_number_that_it_asked_for() {
        let member = ConnectionNumber::new(17).unwrap();
        let agreed = |number, secret| NegotiatedExtensions {
            number: ConnectionNumber::new(number),
            secret: Some(vec![secret; 16]),
            ..NegotiatedExtensions::default()
        };
        let mut membership = Membership::new(SessionRole::Joined(member));
        assert!(!membership.may_connect(), "it does not know the session");
        assert!(membership.join(vec![1; 16]) && !membership.join(vec![1; 16]));
        assert!(membership.may_connect());
        assert_eq!(membership.accepted(&agreed(17, 2)), None, "another session");
        assert_eq!(membership.accepted(&agreed(0, 1)), None, "another number");
        assert_eq!(membership.accepted(&agreed(17, 1)), Some(true));
    }

    #[test]
    fn an_initial_connection_keeps_the_last_session() {
        let mut membership = Membership::new(SessionRole::Initial { agreed: false, classes: false });
        let server = NegotiatedExtensions {
            number: Some(ConnectionNumber::INITIAL),
            classes: true,
            secret: Some(vec![1; 16]),
            ..NegotiatedExtensions::default()
        };
        assert_eq!(membership.accepted(&server), Some(false));
        assert!(membership.role.allows_joins() && membership.role.allows_class_joins());
        assert!(!membership.join(vec![2; 16]), "it does not join");
        assert_eq!(membership.accepted(&NegotiatedExtensions::default()), Some(false));
        assert!(!membership.role.allows_joins(), "the server lets no others join now");
        assert_eq!(membership.secret, Some(vec![1; 16]));
    }
}
