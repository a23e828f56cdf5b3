//! Limits a panic inside noq to the connection in which it happens.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use mpvpn_types::panic_text;

use super::{Connection, Event, LostReason};

/// Whether noq has panicked in a connection.
#[derive(Debug, Default)]
pub(super) struct PanicGuard {
    panicked: bool,
}

impl PanicGuard {
    /// Records a panic; returns its message.
    fn note(&mut self, panic: &(dyn Any + Send)) -> String {
        self.panicked = true;
        format!("a fault in the QUIC library: {}", panic_text(panic))
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
        if self.guard.has_panicked() {
            return None;
        }
        let inner = &mut self.inner;
        // noq has no unsafe code, and its inconsistent state is only dropped from now on.
        match catch_unwind(AssertUnwindSafe(|| work(inner))) {
            Ok(done) => Some(done),
            Err(panic) => {
                let reason = self.guard.note(&*panic);
                tracing::error!(
                    connection = self.id.0,
                    reason,
                    "noq panicked: this connection is lost, other connections continue"
                );
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
