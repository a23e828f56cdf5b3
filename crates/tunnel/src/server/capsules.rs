//! The request streams of clients: capsules, and the end of the stream.
//!
//! In: HTTP/3 events of a request stream. Out: address assignments, policies of links, networks behind
//! clients. Always holds: with its request stream a tunnel and its negotiated extensions end.

use mpvpn_masque::{
    capsule::{Capsule, CapsuleError, CapsuleReader},
    h3::{self, Event as HttpEvent},
};
use mpvpn_quic::{ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{Server, peer::MAX_UNSENT_REPLIES};

/// The stream of an accepted CONNECT-IP or `connect-mpvpn` request.
#[derive(Debug)]
pub(super) struct RequestStream {
    pub(super) id: StreamId,
    capsules: CapsuleReader,
}

impl RequestStream {
    pub(super) fn new(id: StreamId) -> Self {
        Self { id, capsules: CapsuleReader::new() }
    }

    /// Bytes of an incomplete capsule.
    pub(super) fn held_bytes(&self) -> usize {
        self.capsules.buffered()
    }
}

impl Server {
    /// Handles an HTTP/3 event of the client's request stream.
    pub(super) fn on_request_stream_event(&mut self, now: Instant, id: ConnectionHandle, event: HttpEvent) {
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
                self.reset_stream(id, stream, code);
                self.end_request(now, id, "an error on the stream of its tunnel");
            }
            _ => {}
        }
    }

    fn take_capsules(&mut self, now: Instant, id: ConnectionHandle) -> Result<(), CapsuleError> {
        // Looked up anew each time: without a free address the connection is closed. Where too many answers
        // wait, it is closed before the next event.
        while let Some(peer) = self.peers.get_mut(id)
            && let Some(request) = peer.request_mut()
            && self.endpoint.get(id).is_some_and(|it| it.unsent_replies() <= MAX_UNSENT_REPLIES)
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
                Some(Capsule::RouteAdvertisement(ranges)) => self.on_announcement(now, id, &ranges),
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn malformed(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, error: &CapsuleError) {
        tracing::info!(%error, "a client sent a malformed capsule");
        self.reset_stream(id, stream, error.code());
        self.end_request(now, id, "the client sent a malformed capsule");
    }

    /// Ends both directions of a stream with an HTTP/3 error code.
    pub(super) fn reset_stream(&mut self, id: ConnectionHandle, stream: StreamId, code: u64) {
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
        // Relays of a client without packets continue.
        if let Some(authenticated) = self.peers.get_mut(id).and_then(|peer| peer.authenticated.as_mut())
            && let Some(connection) = self.endpoint.get(id)
        {
            authenticated.restart(now, connection);
            self.attach_account(now, id);
        }
    }
}
