//! CONNECT-UDP flows of a client (RFC 9298), for the edge and for apps.
//!
//! In: payloads to send, responses and payloads of the server. Out: [`UdpFlowEvent`]s and payloads. Always
//! holds: at most [`MAX_UNANSWERED_BYTES`] are sent or kept for a flow before the server has responded.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    connect::{Authority, ProxyError},
    connect_udp,
    h3::{self, Event as HttpEvent, code},
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{
    Client, ClientEvent, UdpFlowEvent, app_udp::AppUdp, in_use, relays::refuses_credentials, session::Session,
};
use crate::{
    UdpId,
    udp::{PayloadInbox, UdpFlows},
};

/// Bytes of a flow before the server has responded. "Clients MAY optimistically start sending UDP packets in
/// HTTP Datagrams before receiving the response" (RFC 9298 §5), but a server may drop them. A server with the
/// extension `udp` keeps them; for other servers the client keeps them. Chosen. Larger: memory;
/// smaller: first packets are lost.
const MAX_UNANSWERED_BYTES: usize = 32 << 10;

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// The server has not responded yet: bytes that may still be sent until it does, and payloads that wait
    /// for it.
    Requested(usize, Vec<Bytes>),
    Open,
}

/// The flows of the connection in use.
#[derive(Debug, Default)]
pub(super) struct ConnectionUdp {
    pub(super) flows: UdpFlows,
    stages: BTreeMap<StreamId, Stage>,
}

impl ConnectionUdp {
    /// Reports all flows of the edge as closed, because their connection is lost.
    pub(super) fn end(
        self,
        connection: ConnectionHandle,
        app_udp: &AppUdp,
        events: &mut VecDeque<ClientEvent>,
    ) {
        let gone = self.stages.into_keys().map(|stream| UdpId::new(connection, stream));
        let gone = gone.filter(|id| !app_udp.flows.contains(*id));
        events.extend(gone.map(|id| ClientEvent::Udp(id, UdpFlowEvent::Closed)));
    }

    /// Takes a payload of the server.
    pub(super) fn arrived(&self, id: UdpId, payload: Bytes, inbox: &mut PayloadInbox) {
        if self.flows.has(id.stream) {
            inbox.push(id, payload);
        }
    }
}

impl Client {
    /// Whether CONNECT-UDP is possible: the server accepts extended CONNECT (RFC 9220) and HTTP datagrams
    /// (RFC 9297).
    pub fn udp_possible(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.http.masque_allowed())
    }

    /// Whether the server agreed to the extension `udp`: it accepts CONNECT-UDP for every target for
    /// which it would translate addresses.
    pub fn has_udp_extension(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.agreed.udp)
    }

    /// Opens a CONNECT-UDP flow to `target`. `None` while there is no session or stream for it
    /// ([`ClientEvent::RelaysAllowed`] reports when to retry), and if [`Self::udp_possible`] is `false`.
    /// [`ClientEvent::Udp`] reports the outcome; payloads may be sent at once.
    pub fn udp_open(&mut self, now: Instant, target: &Authority) -> Option<UdpId> {
        self.edge_relays.begin_open();
        if !self.udp_possible() {
            return None;
        }
        let session = self.session.as_mut()?;
        let connection = self.endpoint.get(session.connection)?;
        let stream = connection.open_bi().ok()?;
        self.edge_relays.opened();
        let path = connect_udp::path(target);
        let request = connect_udp::request(&self.config.authority, &path, self.authorization.as_deref());
        connection.write(stream, h3::encode_headers(&request));
        session.udp.flows.insert(now, stream);
        session.udp.stages.insert(stream, Stage::Requested(MAX_UNANSWERED_BYTES, Vec::new()));
        Some(UdpId::new(session.connection, stream))
    }

    /// The largest payload that can be sent now (bytes); 0 if there is no such flow.
    pub fn max_udp_payload(&mut self, id: UdpId) -> usize {
        let Some((session, connection)) = self.udp_session(id) else { return 0 };
        session.udp.flows.max_payload_bytes(connection, id.stream)
    }

    /// Sends a payload. It is dropped and counted if it is larger than [`Self::max_udp_payload`], and dropped
    /// beyond `MAX_UNANSWERED_BYTES` before the server has responded.
    pub fn udp_send(&mut self, now: Instant, id: UdpId, payload: &[u8]) {
        let Some((session, connection)) = self.udp_session(id) else { return };
        if let Some(Stage::Requested(left, waiting)) = session.udp.stages.get_mut(&id.stream) {
            // An empty payload takes memory, too.
            let Some(rest) = left.checked_sub(payload.len().max(64)) else { return };
            *left = rest;
            if !session.agreed.udp {
                return waiting.push(Bytes::copy_from_slice(payload));
            }
        }
        session.udp.flows.send(now, connection, &mut session.multipath, id.stream, payload);
    }

    /// Closes a flow. No event follows.
    pub fn udp_close(&mut self, id: UdpId) {
        self.end_udp_flow(id, Ok(()));
    }

    /// The next payload from a target, and its flow.
    pub fn poll_udp(&mut self) -> Option<(UdpId, Bytes)> {
        self.udp_in.pop()
    }

    /// Handles an HTTP/3 event of the stream of a flow.
    pub(super) fn on_udp_stream_event(&mut self, now: Instant, stream: StreamId, event: HttpEvent) {
        let Some(session) = &mut self.session else { return };
        let id = UdpId::new(session.connection, stream);
        let is_open = session.udp.stages.get(&stream) == Some(&Stage::Open);
        let (news, ended) = match event {
            HttpEvent::Headers { headers, .. } if !is_open => match connect_udp::check_response(&headers) {
                Ok(()) => {
                    if let Some(Stage::Requested(_, waiting)) = session.udp.stages.insert(stream, Stage::Open)
                        && let Some(connection) = self.endpoint.get(session.connection)
                    {
                        for payload in waiting {
                            session.udp.flows.send(now, connection, &mut session.multipath, stream, &payload);
                        }
                    }
                    self.on_udp_flow_event(now, id, UdpFlowEvent::Opened);
                    return;
                }
                Err(failure) => {
                    self.end_udp_flow(id, Ok(()));
                    self.on_udp_flow_event(now, id, UdpFlowEvent::Refused(failure));
                    if let Some((status, detail)) = refuses_credentials(&headers) {
                        self.unauthorized(now, status, detail);
                    }
                    return;
                }
            },
            HttpEvent::Data { data, .. } => {
                let inbox = &mut self.udp_in;
                match session.udp.flows.take_capsules(stream, &data, |payload| inbox.push(id, payload)) {
                    Ok(()) => return,
                    Err(code) => (UdpFlowEvent::Closed, Err(code)),
                }
            }
            HttpEvent::Finished { .. } if is_open => (UdpFlowEvent::Closed, session.udp.flows.finish(stream)),
            HttpEvent::StreamError { code, .. } => (UdpFlowEvent::Closed, Err(code)),
            HttpEvent::Reset { .. } | HttpEvent::Finished { .. } => {
                let news =
                    if is_open { UdpFlowEvent::Closed } else { UdpFlowEvent::Refused(ProxyError::Other) };
                (news, Err(code::REQUEST_CANCELLED))
            }
            _ => return,
        };
        self.end_udp_flow(id, ended);
        self.on_udp_flow_event(now, id, news);
    }

    /// Ends the stream of a flow: cleanly, or with an HTTP/3 error code.
    pub(super) fn end_udp_flow(&mut self, id: UdpId, ended: Result<(), u64>) {
        let Some((session, connection)) = self.udp_session(id) else { return };
        session.udp.stages.remove(&id.stream);
        session.udp.flows.remove(id.stream);
        match ended {
            Ok(()) => connection.finish(id.stream),
            Err(code) => connection.reset(id.stream, code),
        }
        connection.stop(id.stream, ended.err().unwrap_or(code::NO_ERROR));
        session.http.forget(id.stream);
    }

    /// The session and connection of a flow, if the flow exists.
    fn udp_session(&mut self, id: UdpId) -> Option<(&mut Session, &mut Connection)> {
        in_use(&mut self.session, &mut self.endpoint)
            .filter(|(session, _)| session.connection == id.connection && session.udp.flows.has(id.stream))
    }
}
