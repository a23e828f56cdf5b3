//! What a connection is called in the log, and the spans around decisions about it.
//!
//! A span has the target of the decisions in it, so that a filter that shows a decision also shows whose it
//! is. Spans cost a comparison while their target is filtered out. There is none around a packet, but where
//! every turn is traced.

use mpvpn_types::{LinkId, SessionId};
use tracing::span::EnteredSpan;

use super::Role;

/// What distinguishes this connection from others of this process.
#[derive(Debug)]
pub(super) struct LogContext {
    role: Role,
    /// At a server: the session that it belongs to.
    session: Option<SessionId>,
    /// What its class is called, where there are several.
    class: Option<Box<str>>,
}

impl LogContext {
    pub(super) fn new(role: Role) -> Self {
        Self { role, session: None, class: None }
    }

    pub(super) fn set_session(&mut self, session: SessionId) {
        self.session = Some(session);
    }

    pub(super) fn set_class(&mut self, class: Option<&str>) {
        self.class = class.map(Into::into);
    }

    pub(super) fn class(&self) -> Option<&str> {
        self.class.as_deref()
    }

    pub(super) fn session(&self) -> Option<u32> {
        self.session.map(|session| session.0)
    }

    /// The link of a path, at a client: at a server links have no numbers that mean anything to people.
    pub(super) fn link(&self, link: LinkId) -> Option<u16> {
        (self.role == Role::Client).then_some(link.0)
    }

    pub(super) fn role(&self) -> &'static str {
        match self.role {
            Role::Client => "client",
            Role::Server => "server",
        }
    }
}

/// The spans of a connection, and of its session where it has one, until they are dropped.
#[must_use]
pub(super) struct ConnectionSpans {
    /// The inner one ends first.
    pub(super) _connection: EnteredSpan,
    pub(super) _session: Option<EnteredSpan>,
}

/// Enters the spans of a connection around decisions of one level with these targets, under the first of them
/// that is not filtered out.
macro_rules! enter_connection {
    ($log:expr, $level:ident, [$($target:expr),+]) => {
        'spans: {
            $(if tracing::enabled!(target: $target, tracing::Level::$level) {
                let log: &$crate::multipath::log_context::LogContext = $log;
                let session = log.session();
                let session = session.map(|id| tracing::debug_span!(target: $target, "session", id).entered());
                let connection =
                    tracing::debug_span!(
                        target: $target,
                        "connection",
                        end = log.role(),
                        class = log.class()
                    );
                break 'spans Some($crate::multipath::log_context::ConnectionSpans {
                    _connection: connection.entered(),
                    _session: session,
                });
            })+
            None
        }
    };
}

/// Enters the span of a path for decisions with this target.
macro_rules! enter_path {
    ($target:expr, $log:expr, $id:expr, $path:expr) => {
        tracing::debug_span!(target: $target, "path", id = $id.0, link = $log.link($path.link())).entered()
    };
}

pub(super) use {enter_connection, enter_path};
