//! Limits a panic to the connection to the server.
//!
//! In: work for the connection in use or for handshakes. Out: its result, or nothing if it panicked. Always
//! holds: after a panic no state of a connection is used again; streams and UDP flows of apps end, and the
//! client connects anew.

use mpvpn_types::{Instant, catch_panic};

use super::Client;

impl Client {
    /// Calls `work`, which handles what the server sent or what it gets. If it panics, all connections are
    /// lost.
    pub(super) fn isolated<T: Default>(&mut self, now: Instant, work: impl FnOnce(&mut Self) -> T) -> T {
        catch_panic(|| work(self)).unwrap_or_else(|reason| {
            self.on_panic(now, &reason);
            T::default()
        })
    }

    /// Drops all connections, whose state is not to be trusted any more. Their counters are lost.
    #[cold]
    fn on_panic(&mut self, now: Instant, reason: &str) {
        tracing::error!(
            class = self.class_name(),
            reason,
            "a panic while the server was handled: the connection is lost, the client connects anew"
        );
        let mut lost = self.connector.take_all();
        if let Some(session) = self.session.take() {
            lost.push(session.connection);
            self.apps.tcp.end_streams();
            self.edge_relays.end(session.connection, &mut self.reports.events);
            let flows = std::mem::take(&mut self.apps.udp);
            session.udp.end(session.connection, &flows, &mut self.reports.events);
        }
        for id in lost {
            if let Some(connection) = self.endpoint.get(id) {
                connection.on_panic(reason.to_owned());
            }
            self.endpoint.process_endpoint_events(id);
        }
        self.reports.down(format!("a panic while the server was handled: {reason}"));
        self.connector.backoff.failed(now, self.silence.since());
    }
}
