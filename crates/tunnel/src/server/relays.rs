//! Relays of a server: TCP connections that the edge opens for clients by CONNECT, and visits of its site.
//!
//! In: CONNECT requests, bytes from the edge. Out: [`ServerEvent`]s and bytes for the edge. Always holds: a
//! relay is closed with the connection of its client.

use bytes::Bytes;
use mpvpn_masque::{
    connect::{self, Authority, Connect, ProxyError},
    h3::{self, H3Error},
    headers::Headers,
    request::Rejection,
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{Peer, Server, ServerEvent, peer::MAX_VISITS};
use crate::{RelayId, RelayRead, http::Http};

impl Server {
    /// Handles a CONNECT request.
    pub(super) fn connect(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) {
        let asked = connect::parse_request(headers).and_then(|request| self.user_and_target(id, request));
        let (user, to) = match asked {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse(id, stream, &refusal),
        };
        let Some((peer, connection)) = self.authenticate_peer(now, id, &user) else { return };
        peer.relays.insert(connection, stream);
        self.events.push_back(ServerEvent::Connect { relay: RelayId::new(id, stream), user, to });
    }

    /// The user who sends a request for a TCP connection or a UDP flow, and its target.
    pub(super) fn user_and_target(
        &mut self,
        id: ConnectionHandle,
        request: Connect,
    ) -> Result<(String, Authority), Rejection> {
        Ok((self.user_of(id, request.credentials.as_deref())?, request.target))
    }

    /// Handles a request that the site answers.
    pub(super) fn visit(&mut self, now: Instant, id: ConnectionHandle, stream: StreamId, headers: Headers) {
        let Some((peer, connection)) = self.peers.get_mut(id).zip(self.endpoint.get(id)) else { return };
        if peer.relays.visits() >= MAX_VISITS {
            return self.reset_stream(id, stream, h3::code::REQUEST_REJECTED);
        }
        peer.since = now;
        peer.relays.insert_visit(stream);
        let from = connection.paths().next().and_then(|path| connection.remote_of(path));
        self.events.push_back(ServerEvent::Visit { visit: RelayId::new(id, stream), headers, from });
    }

    /// Begins the response to a visit. Its content follows by [`Self::relay_write`].
    pub fn visit_respond(&mut self, visit: RelayId, headers: &Headers) {
        self.on_relay(visit, |_, connection| connection.write(visit.stream, h3::encode_headers(headers)));
    }

    /// Ends the response to a visit.
    pub fn visit_finish(&mut self, now: Instant, visit: RelayId) {
        self.with_http(visit, |peer, connection, http| {
            peer.since = now;
            peer.relays.refuse(connection, http, visit.stream);
        });
    }

    /// The response to a visit cannot be completed.
    pub fn visit_abort(&mut self, now: Instant, visit: RelayId) {
        self.with_http(visit, |peer, connection, http| {
            peer.since = now;
            peer.relays.abort(connection, http, visit.stream, h3::code::INTERNAL_ERROR);
        });
    }

    /// The peer and connection of a relay, if it exists.
    fn relay(&mut self, relay: RelayId) -> Option<(&mut Peer, &mut Connection)> {
        let peer = self.peers.get_mut(relay.connection).filter(|peer| peer.relays.has(relay.stream))?;
        Some((peer, self.endpoint.get(relay.connection)?))
    }

    /// Runs `work` on a relay, and marks its connection as having data to send.
    fn on_relay<T>(
        &mut self,
        relay: RelayId,
        work: impl FnOnce(&mut Peer, &mut Connection) -> T,
    ) -> Option<T> {
        let done = self.isolated(relay.connection, |server| {
            let (peer, connection) = server.relay(relay)?;
            Some(work(peer, connection))
        });
        self.peers.mark_sends(relay.connection);
        done.flatten()
    }

    /// The edge has connected to the target.
    pub fn relay_opened(&mut self, relay: RelayId) {
        self.on_relay(relay, |_, connection| {
            connection.write(relay.stream, h3::encode_headers(&connect::accept()));
        });
    }

    /// The edge could not connect; `reason` is a sentence for people.
    pub fn relay_failed(&mut self, relay: RelayId, failure: ProxyError, reason: String) {
        self.on_relay(relay, |peer, connection| {
            connection.write(relay.stream, h3::encode_headers(&failure.rejection(reason).headers()));
            if let Some(http) = &mut peer.http {
                peer.relays.refuse(connection, http, relay.stream);
            }
        });
    }

    /// The next bytes from the client.
    pub fn relay_read(&mut self, now: Instant, relay: RelayId) -> RelayRead {
        let mut waits = false;
        let read = |peer: &mut Peer, connection: &mut Connection| -> Result<RelayRead, H3Error> {
            if let Some(limits) = &mut peer.limits
                && limits.reads.available_bytes(now, relay.stream) == 0
            {
                waits = true;
                return Ok(RelayRead::Blocked);
            }
            let Some(http) = &mut peer.http else { return Ok(RelayRead::Broken) };
            let read = peer.relays.read(connection, http, relay.stream)?;
            if let (Some(limits), true) = (&mut peer.limits, !matches!(read, RelayRead::Data(_))) {
                waits = limits.reads.give_up(relay.stream);
            }
            if let RelayRead::Data(data) = &read {
                let bytes = data.len() as u64;
                if let Some(limits) = &mut peer.limits {
                    limits.reads.on_moved(now, relay.stream, bytes);
                }
                if let Some(multipath) = peer.multipath() {
                    multipath.on_data_received(now, bytes);
                }
            }
            Ok(read)
        };
        let read = self.on_relay(relay, read);
        if waits {
            self.call_reader(now, relay.connection);
        }
        match read {
            Some(Ok(RelayRead::Broken)) => {
                self.on_relay_broken(relay.connection, relay.stream);
                RelayRead::Broken
            }
            Some(Ok(read)) => read,
            Some(Err(error)) => {
                self.close_peer(now, relay.connection, error.code, &error.reason);
                RelayRead::Broken
            }
            None => RelayRead::Broken,
        }
    }

    /// Bytes that may be written now; after 0, [`ServerEvent::RelayWritable`] follows.
    pub fn relay_writable_bytes(&mut self, now: Instant, relay: RelayId) -> usize {
        let Some((peer, connection)) = self.relay(relay) else { return 0 };
        let writable = peer.relays.writable_bytes(connection, relay.stream);
        let Some(limits) = peer.limits.as_mut().filter(|_| writable > 0) else { return writable };
        let allowed = limits.writes.available_bytes(now, relay.stream);
        if allowed == 0 {
            self.peers.mark_sends(relay.connection);
            self.call_writer(now, relay.connection);
        }
        usize::try_from(allowed).map_or(writable, |allowed| writable.min(allowed))
    }

    /// Sends bytes to the client.
    pub fn relay_write(&mut self, now: Instant, relay: RelayId, data: Bytes) {
        self.on_relay(relay, |peer, connection| {
            if let Some(limits) = &mut peer.limits {
                limits.writes.on_moved(now, relay.stream, data.len() as u64);
            }
            if let Some(multipath) = peer.multipath() {
                multipath.traffic.counters.tx_bytes += data.len() as u64;
            }
            peer.relays.write(connection, relay.stream, data);
        });
        self.end_if_too_much_is_held(now, relay.connection);
    }

    /// The kernel holds so many bytes for a relay: they count for its user.
    pub fn relay_in_kernel(&mut self, now: Instant, relay: RelayId, bytes: usize) {
        self.on_relay(relay, |peer, connection| {
            peer.relays.set_in_kernel(relay.stream, bytes);
            connection.count_in_kernel(peer.relays.in_kernel());
        });
        self.end_if_too_much_is_held(now, relay.connection);
    }

    /// Ends a connection if the process holds more than it may, and for nobody more than for its user.
    pub(super) fn end_if_too_much_is_held(&mut self, now: Instant, id: ConnectionHandle) {
        if !self.process_bytes.is_exceeded() {
            return;
        }
        let owner = self.peers.get(id).and_then(|peer| peer.owner.as_ref());
        if owner.is_some_and(|owner| self.registry.holds_most(&owner.name)) {
            let why = "the server has no more memory, and this user holds most of it";
            self.isolated(id, |server| server.close_peer(now, id, h3::code::EXCESSIVE_LOAD, why));
        }
    }

    /// Ends the direction to the client (FIN).
    pub fn relay_finish(&mut self, relay: RelayId) {
        let finish = |peer: &mut Peer, connection: &mut Connection, http: &mut Http| {
            peer.relays.finish(connection, http, relay.stream);
        };
        self.with_http(relay, finish);
    }

    /// The connection to the target was reset.
    pub fn relay_abort(&mut self, relay: RelayId) {
        self.with_http(relay, |peer, connection, http| {
            peer.relays.abort(connection, http, relay.stream, h3::code::CONNECT_ERROR);
        });
    }

    fn with_http(&mut self, relay: RelayId, work: impl FnOnce(&mut Peer, &mut Connection, &mut Http)) {
        self.on_relay(relay, |peer, connection| {
            if let Some(mut http) = peer.http.take() {
                work(peer, connection, &mut http);
                peer.http = Some(http);
            }
        });
    }

    /// The client has reset a relay.
    pub(super) fn on_relay_broken(&mut self, id: ConnectionHandle, stream: StreamId) {
        let relay = RelayId::new(id, stream);
        self.with_http(relay, |peer, connection, http| {
            peer.relays.abort(connection, http, stream, h3::code::REQUEST_CANCELLED);
        });
        self.events.push_back(ServerEvent::RelayGone(relay));
    }
}
