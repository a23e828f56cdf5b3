//! Limits a panic inside noq to the connection in which it happens, or to the received packet that belongs to no connection.

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
};

use mpvpn_types::panic_text;

use super::{Connection, Event, LostReason};
use crate::ConnectionHandle;

/// Calls noq; `Err` is the message of a panic inside it. noq has no unsafe code, so a panic leaves memory valid, and at most an
/// entry in a table that is never used again.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| describe(&*panic))
}

fn describe(panic: &(dyn Any + Send)) -> String {
    format!("a fault in the QUIC library: {}", panic_text(panic))
}

/// Whether noq has panicked in a connection.
#[derive(Debug, Default)]
pub(super) struct PanicGuard {
    panicked: bool,
}

impl PanicGuard {
    /// Calls noq for the connection `id`, as [`Connection::guarded`] does, while other parts of the connection are in use.
    pub(super) fn call<T>(
        &mut self,
        id: ConnectionHandle,
        events: &mut VecDeque<Event>,
        work: impl FnOnce() -> T,
    ) -> Option<T> {
        if self.panicked {
            return None;
        }
        catch_panic(work).map_err(|reason| self.note(id, events, reason)).ok()
    }

    /// Records a panic with this message: the connection is lost.
    fn note(&mut self, id: ConnectionHandle, events: &mut VecDeque<Event>, reason: String) {
        if std::mem::replace(&mut self.panicked, true) {
            return;
        }
        tracing::error!(
            connection = id.0,
            reason,
            "noq panicked: this connection is lost, other connections continue"
        );
        events.push_back(Event::Lost(LostReason::Transport(reason)));
    }

    /// Whether noq has panicked.
    pub(super) fn has_panicked(&self) -> bool {
        self.panicked
    }
}

impl Connection {
    /// Calls noq. A server has thousands of peers, and none of them may end the connections of others by making noq panic: if
    /// it does, this connection is lost, and `None` is returned from then on.
    pub(crate) fn guarded<T>(&mut self, work: impl FnOnce(&mut noq_proto::Connection) -> T) -> Option<T> {
        let Self { guard, id, inner, events, .. } = self;
        guard.call(*id, events, || work(inner))
    }

    /// Records that noq's endpoint panicked, with this message, while it handled an event of this connection.
    pub(crate) fn on_endpoint_panic(&mut self, reason: String) {
        self.guard.note(self.id, &mut self.events, reason);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mpvpn_types::{Instant, LinkId};

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
        let mut connect =
            || endpoint.connect(now, &setup, LocalAddress::link(LinkId(0)), remote, "mpvpn").unwrap();
        let (doomed, other) = (connect(), connect());

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

        let survivor = endpoint.get(other).unwrap();
        assert!(survivor.poll_transmit(now, &mut out).is_some_and(|hello| hello.size >= 1200));
        assert!(endpoint.process_endpoint_events(other));
    }
}
