//! Limits a panic to the client whose connection was handled.
//!
//! In: work for one connection. Out: its result, or nothing if it panicked. Always holds: after a panic the
//! connection is gone with its tunnel, relays and UDP flows, and nothing of its state is used again; all
//! other clients go on. The crate has no `unsafe`, so a panic leaves memory valid, and locks that it poisons
//! guard data that is replaced whole.

use mpvpn_quic::{ConnectionHandle, HandshakeResult};
use mpvpn_types::catch_panic;

use super::Server;

const REASON: &str = "a panic while its packets were handled";

impl Server {
    /// Calls `work`, which handles the connection `id`. If it panics, this connection ends.
    pub(super) fn isolated<T>(
        &mut self,
        id: ConnectionHandle,
        work: impl FnOnce(&mut Self) -> T,
    ) -> Option<T> {
        catch_panic(|| work(self)).map_err(|reason| self.on_panic(id, reason)).ok()
    }

    /// Drops a connection whose state is not to be trusted any more. Its counters are lost.
    #[cold]
    pub(super) fn on_panic(&mut self, id: ConnectionHandle, reason: String) {
        if let Some(connection) = self.endpoint.get(id) {
            connection.on_panic(reason);
        }
        self.end_flows(id);
        if let Some(peer) = self.peers.remove(id) {
            if let (Some(now), Some(authenticated)) = (self.last_time, &peer.authenticated) {
                self.remove_tunnel(now, id, authenticated, REASON);
            }
            if peer.handshaking {
                self.endpoint.on_handshake_ended(HandshakeResult::Failed);
            }
        }
        self.endpoint.process_endpoint_events(id);
    }
}
