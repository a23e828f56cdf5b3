//! Keeps a fault of the library from ending more than the connection that it happens in.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use mpvpn_types::panic_text;

use super::{Connection, Event, LostReason};

/// Whether the library has panicked in a connection.
#[derive(Debug, Default)]
pub(super) struct PanicGuard {
    panicked: bool,
}

impl PanicGuard {
    /// Notes a panic; returns what it said.
    fn note(&mut self, panic: &(dyn Any + Send)) -> String {
        self.panicked = true;
        format!("a fault in the QUIC library: {}", panic_text(panic))
    }

    /// Whether something has panicked.
    pub(super) fn has_panicked(&self) -> bool {
        self.panicked
    }
}

impl Connection {
    /// Lets the library work on what a peer sent or is to be sent. A server has thousands of peers, and none of
    /// them may end the others' connections by finding a case that the library has not thought of: if it panics,
    /// this connection is lost, and `None` is returned from then on.
    pub(crate) fn guarded<T>(&mut self, work: impl FnOnce(&mut noq_proto::Connection) -> T) -> Option<T> {
        if self.guard.has_panicked() {
            return None;
        }
        let inner = &mut self.inner;
        // The library has no unsafe code, and what it left half done is only dropped from now on.
        match catch_unwind(AssertUnwindSafe(|| work(inner))) {
            Ok(done) => Some(done),
            Err(panic) => {
                let reason = self.guard.note(&*panic);
                tracing::error!(connection = self.id.0, reason, "this connection is given up, others go on");
                self.events.push_back(Event::Lost(LostReason::Transport(reason)));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mpvpn_types::{Instant, LinkId};

    use super::*;
    use crate::{ClientSetup, Endpoint, LocalAddress, TransportOptions};

    /// A client that trusts nobody.
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
    fn a_panic_costs_the_connection_in_which_it_happens_and_no_other() {
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
            panic!("the loss is not told");
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
