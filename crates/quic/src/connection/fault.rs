//! Limits a panic inside noq to the connection in which it happens, or to the received packet that belongs to
//! no connection.

use std::{cell::OnceCell, collections::VecDeque};

use super::{Connection, Event, LostReason};
use crate::ConnectionHandle;

/// Calls noq; `Err` is the message of a panic inside it. noq has no unsafe code, so a panic leaves memory
/// valid, and at most an entry in a table that is never used again.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    mpvpn_types::catch_panic(work).map_err(|reason| format!("a fault in the QUIC library: {reason}"))
}

/// Whether noq, or what handles its connection, has panicked.
#[derive(Debug, Default)]
pub(super) struct PanicGuard {
    /// The message of the first panic.
    reason: OnceCell<String>,
    /// Whether there is an event about it.
    reported: bool,
}

impl PanicGuard {
    /// Calls noq for the connection `id`, as [`Connection::guarded_read`] does.
    fn call<T>(
        &mut self,
        id: ConnectionHandle,
        events: &mut VecDeque<Event>,
        work: impl FnOnce() -> T,
    ) -> Option<T> {
        if self.has_panicked() {
            return None;
        }
        let done = catch_panic(work).map_err(|reason| self.note(id, reason)).ok();
        self.report(events);
        done
    }

    /// Asks noq about the connection `id`, as [`Connection::ask`] does, while other parts of the connection
    /// are in use.
    pub(super) fn ask<T>(&self, id: ConnectionHandle, work: impl FnOnce() -> T) -> Option<T> {
        if self.has_panicked() {
            return None;
        }
        catch_panic(work).map_err(|reason| self.note(id, reason)).ok()
    }

    /// Records a panic with this message: the connection is lost.
    fn note(&self, id: ConnectionHandle, reason: String) {
        if self.reason.set(reason.clone()).is_ok() {
            tracing::error!(
                connection = id.0,
                reason,
                "a panic: this connection is lost, other connections continue"
            );
        }
    }

    /// Adds the event about a panic, once.
    pub(super) fn report(&mut self, events: &mut VecDeque<Event>) {
        if let Some(reason) = self.reason.get()
            && !std::mem::replace(&mut self.reported, true)
        {
            events.push_back(Event::Lost(LostReason::Transport(reason.clone())));
        }
    }

    /// Whether there was a panic.
    pub(super) fn has_panicked(&self) -> bool {
        self.reason.get().is_some()
    }

    /// Whether there was a panic about which there is no event yet.
    pub(super) fn is_unreported(&self) -> bool {
        self.has_panicked() && !self.reported
    }
}

impl Connection {
    /// Calls noq, which may have more to send afterwards. A server has thousands of peers, and none of them
    /// may end the connections of others by making noq panic: if it does, this connection is lost, and
    /// `None` is returned from then on.
    pub(crate) fn guarded<T>(&mut self, work: impl FnOnce(&mut noq_proto::Connection) -> T) -> Option<T> {
        self.note_change();
        self.guarded_read(work)
    }

    /// As [`Self::guarded`], for what gives noq nothing to send: results and measurements.
    pub(crate) fn guarded_read<T>(
        &mut self,
        work: impl FnOnce(&mut noq_proto::Connection) -> T,
    ) -> Option<T> {
        let Self { guard, id, inner, events, .. } = self;
        guard.call(*id, events, || work(inner))
    }

    /// As [`Self::guarded`], for a part of this connection that calls noq in many places.
    pub(super) fn contained<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.note_change();
        self.contained_read(work)
    }

    /// As [`Self::guarded_read`], for a part of this connection that calls noq in many places.
    pub(super) fn contained_read<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.guard.has_panicked() {
            return None;
        }
        catch_panic(|| work(self)).map_err(|reason| self.on_panic(reason)).ok()
    }

    /// As [`Self::guarded`], for a call that changes nothing. [`Event::Lost`] follows a panic.
    pub(crate) fn ask<T>(&self, work: impl FnOnce(&noq_proto::Connection) -> T) -> Option<T> {
        self.guard.ask(self.id, || work(&self.inner))
    }

    /// Whether noq, or what handles this connection, has panicked.
    pub fn has_panicked(&self) -> bool {
        self.guard.has_panicked()
    }

    /// Records that what handles this connection panicked with this message: noq is not called any more, and
    /// the connection is lost without a CONNECTION_CLOSE frame. Its peer learns it by a stateless reset
    /// (RFC 9000 §10.3).
    pub fn on_panic(&mut self, reason: String) {
        self.guard.note(self.id, reason);
        self.guard.report(&mut self.events);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mpvpn_types::{Instant, LinkId, PathId};

    use super::*;
    use crate::{ClientSetup, Endpoint, LocalAddress, TransportOptions};

    /// A client without root certificates.
    fn setup() -> ClientSetup {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        ClientSetup::new(Arc::new(tls), &TransportOptions::default(), b"key").unwrap()
    }

    #[test]
    fn a_panic_ends_only_the_connection_in_which_it_happens() {
        let setup = setup();
        let mut endpoint = Endpoint::client(&setup);
        let (now, remote) = (Instant::now(), "192.0.2.1:443".parse().unwrap());
        let connect = |endpoint: &mut Endpoint| {
            endpoint.connect(now, &setup, LocalAddress::link(LinkId(0)), remote, "mpvpn").unwrap()
        };
        let (doomed, other) = (connect(&mut endpoint), connect(&mut endpoint));

        let connection = endpoint.get(doomed).unwrap();
        assert_eq!(connection.guarded(|_| panic!("no room for a frame")), None::<()>);
        assert!(connection.is_closed());
        let Some(Event::Lost(LostReason::Transport(reason))) = connection.poll_event(now) else {
            panic!("no event about the loss");
        };
        assert!(reason.contains("no room for a frame"), "{reason}");
        let mut out = Vec::new();
        assert_eq!(connection.poll_transmit(now, &mut out), None);
        assert_eq!((connection.poll_timeout(), connection.poll_event(now)), (None, None));
        assert!(!endpoint.process_endpoint_events(doomed));
        assert!(endpoint.get(doomed).is_none());

        // The event of a call that panics follows later.
        let asked = connect(&mut endpoint);
        let connection = endpoint.get(asked).unwrap();
        assert_eq!(connection.ask(|_| panic!("no round-trip time")), None::<()>);
        assert!(connection.is_closed() && connection.has_events());
        assert_eq!((connection.rtt(PathId(0)), connection.remote_of(PathId(0))), (None, None));
        assert!(matches!(connection.poll_event(now), Some(Event::Lost(_))));
        assert_eq!((connection.poll_event(now), connection.has_events()), (None, false));
        assert!(!endpoint.process_endpoint_events(asked));

        let survivor = endpoint.get(other).unwrap();
        assert!(survivor.poll_transmit(now, &mut out).is_some_and(|hello| hello.size >= 1200));
        assert!(endpoint.process_endpoint_events(other));
    }
}
