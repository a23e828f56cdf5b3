//! What clients say on the stream of their request, with packets or without them: capsules, and its end.

use mpvpn_masque::{
    capsule::{Capsule, CapsuleError, CapsuleReader},
    h3::{self, Event as HttpEvent},
};
use mpvpn_quic::{ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::Server;

/// The stream of a request that was granted.
#[derive(Debug)]
pub(super) struct RequestStream {
    pub(super) id: StreamId,
    capsules: CapsuleReader,
}

impl RequestStream {
    pub(super) fn new(id: StreamId) -> Self {
        Self { id, capsules: CapsuleReader::new() }
    }
}

impl Server {
    /// Takes what came on the stream of the client's request. With its end everything that was agreed on there ends.
    pub(super) fn request_said(&mut self, now: Instant, id: ConnectionHandle, event: HttpEvent) {
        let Some(request) = self.peers.get_mut(id).and_then(|peer| peer.request_mut()) else { return };
        let stream = request.id;
        match event {
            HttpEvent::Data { data, .. } => {
                request.capsules.push(&data);
                if let Err(error) = self.take_capsules(now, id) {
                    self.malformed(now, id, stream, &error);
                }
            }
            HttpEvent::Finished { .. } => {
                if let Err(error) = request.capsules.finish() {
                    return self.malformed(now, id, stream, &error);
                }
                if let Some(connection) = self.endpoint.get(id) {
                    connection.finish(stream);
                }
                self.end_request(now, id, "the client has ended its tunnel");
            }
            HttpEvent::Reset { .. } => {
                if let Some(connection) = self.endpoint.get(id) {
                    connection.reset(stream, h3::code::REQUEST_CANCELLED);
                }
                self.end_request(now, id, "the client has broken its tunnel off");
            }
            HttpEvent::StreamError { code, .. } => {
                self.break_off(id, stream, code);
                self.end_request(now, id, "an error on the stream of its tunnel");
            }
            _ => {}
        }
    }

    fn take_capsules(&mut self, now: Instant, id: ConnectionHandle) -> Result<(), CapsuleError> {
        // An address that is not free ends the tunnel.
        while let Some(peer) = self.peers.get_mut(id)
            && let Some(request) = peer.request_mut()
        {
            match request.capsules.next()? {
                None => break,
                Some(Capsule::AddressRequest(requests)) => {
                    let asked: Vec<_> =
                        requests.iter().map(|request| (request.request_id, request.net)).collect();
                    self.address(now, id, &asked);
                }
                Some(Capsule::Link(notice)) => {
                    if let Some(multipath) = peer.multipath() {
                        multipath.set_path(now, notice);
                    }
                }
                // Routes behind a client are not supported (see docs/protocol.md, ROUTE_ADVERTISEMENT).
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn malformed(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, error: &CapsuleError) {
        tracing::info!(%error, "a client sent a malformed capsule");
        self.break_off(id, stream, error.code());
        self.end_request(now, id, "the client sent a malformed capsule");
    }

    /// Ends a stream in both directions with an HTTP/3 error code.
    pub(super) fn break_off(&mut self, id: ConnectionHandle, stream: StreamId, code: u64) {
        if let Some(connection) = self.endpoint.get(id) {
            connection.reset(stream, code);
            connection.stop(stream, code);
        }
        if let Some(http) = self.peers.get_mut(id).and_then(|peer| peer.http.as_mut()) {
            http.forget(stream);
        }
    }

    fn end_request(&mut self, now: Instant, id: ConnectionHandle, reason: &str) {
        self.end_tunnel(now, id, reason);
        // Relays of a client without packets go on.
        if let Some(granted) = self.peers.get_mut(id).and_then(|peer| peer.granted.as_mut())
            && let Some(connection) = self.endpoint.get(id)
        {
            granted.restart(now, connection);
        }
    }
}
