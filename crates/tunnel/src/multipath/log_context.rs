//! Log spans of a connection, its session and its paths.
//!
//! In: the role, session and class of a connection. Out: `tracing` spans around its decisions. A span has the
//! target of the decisions in it, so a filter that shows a decision also shows the connection and path it is
//! about. A span costs one comparison while its target is filtered out. Always holds: no span is entered for
//! each packet, unless every event-loop iteration is traced.

use mpvpn_types::{LinkId, SessionId};
use tracing::span::EnteredSpan;

use super::Role;

/// The fields that distinguish a connection from others of the process.
#[derive(Debug)]
pub(super) struct LogContext {
    role: Role,
    /// At a server: the session of the connection.
    session: Option<SessionId>,
    /// The name of the connection's class, if there are several.
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

    /// Returns the link number for the log; `None` at a server, where links have no numbers known to people.
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

/// The entered spans of a connection and of its session, if it has one; dropping the value exits them.
pub(super) struct ConnectionSpans {
    /// Declared first, as the inner span must be exited first.
    pub(super) _connection: EnteredSpan,
    pub(super) _session: Option<EnteredSpan>,
}

/// Enters the spans of a connection, with the first of the given targets that is enabled at the given level.
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

/// Enters the span of a path, with the given target.
macro_rules! enter_path {
    ($target:expr, $log:expr, $id:expr, $path:expr) => {
        tracing::debug_span!(target: $target, "path", id = $id.0, link = $log.link($path.link())).entered()
    };
}

pub(super) use {enter_connection, enter_path};
