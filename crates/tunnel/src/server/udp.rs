//! CONNECT-UDP flows of a server (RFC 9298): UDP payloads between clients and their targets.
//!
//! In: CONNECT-UDP requests, payloads of both sides. Out: [`ServerEvent`]s and payloads. Always holds: a flow
//! is closed with the connection of its client.

use bytes::Bytes;
use mpvpn_masque::{
    connect::ProxyError,
    connect_udp,
    h3::{self, Event as HttpEvent, code},
    headers::Headers,
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{Peer, Server, ServerEvent, packets::pass_payload_on};
use crate::UdpId;

impl Server {
    /// Handles a CONNECT-UDP request.
    pub(super) fn connect_udp(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        headers: &Headers,
    ) {
        let asked = connect_udp::parse_request(headers).and_then(|request| self.user_and_target(id, request));
        let (user, to) = match asked {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse(id, stream, &refusal),
        };
        let Some((peer, _)) = self.authenticate_peer(now, id, &user) else { return };
        peer.udp.insert(now, stream);
        let early = peer.early.take(stream);
        let udp = UdpId::new(id, stream);
        self.events.push_back(ServerEvent::ConnectUdp { udp, user, to });
        let Some(Peer { limits, .. }) = self.peers.get_mut(id) else { return };
        for payload in early {
            pass_payload_on(now, limits.as_deref_mut(), &mut self.udp_in, udp, payload);
        }
        self.release_limited(now, id);
    }

    /// Handles an HTTP/3 event of the stream of a flow.
    pub(super) fn on_udp_stream_event(
        &mut self,
        now: Instant,
        id: ConnectionHandle,
        stream: StreamId,
        event: HttpEvent,
    ) {
        let Some(Peer { udp: flows, limits, .. }) = self.peers.get_mut(id) else { return };
        let udp = UdpId::new(id, stream);
        let ended = match event {
            HttpEvent::Data { data, .. } => {
                let inbox = &mut self.udp_in;
                let taken = flows.take_capsules(stream, &data, |payload| {
                    pass_payload_on(now, limits.as_deref_mut(), inbox, udp, payload);
                });
                match taken {
                    Ok(()) => return self.release_limited(now, id),
                    Err(code) => Err(code),
                }
            }
            HttpEvent::Finished { .. } => flows.finish(stream),
            HttpEvent::StreamError { code, .. } => Err(code),
            _ => Err(code::REQUEST_CANCELLED),
        };
        self.end_udp_flow(udp, ended);
        self.events.push_back(ServerEvent::UdpGone(udp));
    }

    /// The client sent STOP_SENDING for a flow, or a malformed capsule or datagram.
    pub(super) fn on_udp_stream_broken(&mut self, id: ConnectionHandle, stream: StreamId, code: u64) {
        let udp = UdpId::new(id, stream);
        if self.end_udp_flow(udp, Err(code)) {
            self.events.push_back(ServerEvent::UdpGone(udp));
        }
    }

    /// Ends the stream of a flow, cleanly or with an HTTP/3 error code. Returns whether the flow existed.
    fn end_udp_flow(&mut self, udp: UdpId, ended: Result<(), u64>) -> bool {
        let over = self.on_udp(udp, |peer, connection| {
            peer.udp.remove(udp.stream);
            let code = match ended {
                Ok(()) => {
                    connection.finish(udp.stream);
                    code::NO_ERROR
                }
                Err(code) => {
                    connection.reset(udp.stream, code);
                    code
                }
            };
            connection.stop(udp.stream, code);
            if let Some(http) = &mut peer.http {
                http.forget(udp.stream);
            }
        });
        over.is_some()
    }

    /// Runs `work` on a flow, if it exists, and marks its connection as having data to send.
    fn on_udp<T>(&mut self, udp: UdpId, work: impl FnOnce(&mut Peer, &mut Connection) -> T) -> Option<T> {
        let done = self.isolated(udp.connection, |server| {
            let peer = server.peers.get_mut(udp.connection).filter(|peer| peer.udp.has(udp.stream))?;
            Some(work(peer, server.endpoint.get(udp.connection)?))
        });
        self.peers.mark_sends(udp.connection);
        done.flatten()
    }

    /// The edge has a socket for the flow: accepts the request.
    pub fn udp_opened(&mut self, udp: UdpId) {
        self.on_udp(udp, |_, connection| {
            connection.write(udp.stream, h3::encode_headers(&connect_udp::accept()));
        });
    }

    /// The edge could not open the flow; `reason` is a sentence for people.
    pub fn udp_failed(&mut self, udp: UdpId, failure: ProxyError, reason: String) {
        self.on_udp(udp, |_, connection| {
            connection.write(udp.stream, h3::encode_headers(&failure.rejection(reason).headers()));
        });
        self.end_udp_flow(udp, Ok(()));
    }

    /// Sends a payload to the client. One that is too large for its paths is dropped and counted.
    pub fn udp_send(&mut self, now: Instant, udp: UdpId, payload: &[u8]) {
        self.on_udp(udp, |peer, connection| {
            if let Some(authenticated) = &mut peer.authenticated {
                peer.udp.send(now, connection, &mut authenticated.multipath, udp.stream, payload);
            }
        });
    }

    /// Closes a flow. No event follows.
    pub fn udp_close(&mut self, udp: UdpId) {
        self.end_udp_flow(udp, Ok(()));
    }

    /// The next payload from a client. Must be polled after the events, which announce its flow.
    pub fn poll_udp(&mut self) -> Option<(UdpId, Bytes)> {
        self.udp_in.pop()
    }
}
