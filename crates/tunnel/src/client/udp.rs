//! UDP payloads that the server carries because the edge asks for it.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    connect::{Authority, ProxyError},
    connect_udp,
    h3::{self, Event as HttpEvent, code},
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{Client, ClientEvent, in_use, relays::refuses_credentials, session::Session, udp_lane::UdpLane};
use crate::{
    UdpId,
    udp::{PayloadInbox, UdpFlows},
};

/// Bytes of a flow before the server has granted it. "Clients MAY optimistically start sending UDP packets in HTTP
/// Datagrams before receiving the response" (RFC 9298 §5), but a server may throw them away. One of ours keeps them; for
/// others they wait here.
const UNANSWERED: usize = 32 << 10;

/// What becomes of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpFlowEvent {
    /// The server carries its payloads.
    Opened,
    /// The server does not; the flow is over.
    Refused(ProxyError),
    /// The server has ended it, or is lost; the flow is over.
    Closed,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// The server has not answered yet; so many bytes may still come until it has, and these wait for it.
    Asked(usize, Vec<Bytes>),
    Open,
}

/// The flows of the connection in use.
#[derive(Debug, Default)]
pub(super) struct Udp {
    pub(super) flows: UdpFlows,
    stages: BTreeMap<StreamId, Stage>,
}

impl Udp {
    /// The connection is over.
    pub(super) fn end(
        self,
        connection: ConnectionHandle,
        of_apps: &UdpLane,
        events: &mut VecDeque<ClientEvent>,
    ) {
        let gone = self.stages.into_keys().map(|stream| UdpId::new(connection, stream));
        let gone = gone.filter(|id| !of_apps.has(*id));
        events.extend(gone.map(|id| ClientEvent::Udp(id, UdpFlowEvent::Closed)));
    }

    /// A payload came on a stream.
    pub(super) fn arrived(&self, id: UdpId, payload: Bytes, inbox: &mut PayloadInbox) {
        if self.flows.has(id.stream) {
            inbox.push(id, payload);
        }
    }
}

impl Client {
    /// Whether the server has said that it can carry UDP payloads: it takes extended CONNECT (RFC 9220) and HTTP
    /// datagrams (RFC 9297).
    pub fn udp_possible(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.up && session.http.masque_allowed())
    }

    /// Whether the server carries UDP payloads to every address to which it would translate packets.
    pub fn has_udp_extension(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.agreed.udp)
    }

    /// Asks the server to carry UDP payloads to `target` and back. `None` while the server is not reached or allows no
    /// more streams ([`ClientEvent::RelaysAllowed`] says when to ask again), and where it cannot
    /// ([`Self::udp_possible`]). What comes of it is told by [`ClientEvent::Udp`]; payloads may be sent at once.
    pub fn udp_open(&mut self, now: Instant, target: &Authority) -> Option<UdpId> {
        self.own.want();
        if !self.udp_possible() {
            return None;
        }
        let session = self.session.as_mut()?;
        let connection = self.endpoint.get(session.connection)?;
        let stream = connection.open_bi().ok()?;
        self.own.got();
        let path = connect_udp::path(&self.udp_template, target);
        let request = connect_udp::request(&self.config.authority, &path, self.authorization.as_deref());
        connection.write(stream, h3::encode_headers(&request));
        session.udp.flows.insert(now, stream);
        session.udp.stages.insert(stream, Stage::Asked(UNANSWERED, Vec::new()));
        Some(UdpId::new(session.connection, stream))
    }

    /// Bytes of the largest payload that can be sent now; 0 if there is no such flow.
    pub fn udp_room(&mut self, id: UdpId) -> usize {
        let Some((session, connection)) = self.udp_session(id) else { return 0 };
        session.udp.flows.max_payload_bytes(connection, id.stream)
    }

    /// Sends a payload. What is larger than [`Self::udp_room`] is dropped and counted, and so is what is too much before
    /// the server has answered.
    pub fn udp_send(&mut self, now: Instant, id: UdpId, payload: &[u8]) {
        let Some((session, connection)) = self.udp_session(id) else { return };
        if let Some(Stage::Asked(left, waiting)) = session.udp.stages.get_mut(&id.stream) {
            // An empty one takes memory, too.
            let Some(rest) = left.checked_sub(payload.len().max(64)) else { return };
            *left = rest;
            if !session.agreed.udp {
                return waiting.push(Bytes::copy_from_slice(payload));
            }
        }
        session.udp.flows.send(now, connection, &mut session.multipath, id.stream, payload);
    }

    /// Ends a flow. Nothing more is told about it.
    pub fn udp_close(&mut self, id: UdpId) {
        self.udp_over(id, Ok(()));
    }

    /// The next payload from a target, and the flow that it came in.
    pub fn poll_udp(&mut self) -> Option<(UdpId, Bytes)> {
        self.udp_in.pop()
    }

    /// What came on the stream of a flow.
    pub(super) fn udp_said(&mut self, now: Instant, stream: StreamId, event: HttpEvent) {
        let Some(session) = &mut self.session else { return };
        let id = UdpId::new(session.connection, stream);
        let is_open = session.udp.stages.get(&stream) == Some(&Stage::Open);
        let (news, ended) = match event {
            HttpEvent::Headers { headers, .. } if !is_open => match connect_udp::check_response(&headers) {
                Ok(()) => {
                    if let Some(Stage::Asked(_, waiting)) = session.udp.stages.insert(stream, Stage::Open)
                        && let Some(connection) = self.endpoint.get(session.connection)
                    {
                        for payload in waiting {
                            session.udp.flows.send(now, connection, &mut session.multipath, stream, &payload);
                        }
                    }
                    self.udp_news(now, id, UdpFlowEvent::Opened);
                    return;
                }
                Err(failure) => {
                    self.udp_over(id, Ok(()));
                    self.udp_news(now, id, UdpFlowEvent::Refused(failure));
                    if let Some(status) = refuses_credentials(&headers) {
                        self.unauthorized(now, status);
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
        self.udp_over(id, ended);
        self.udp_news(now, id, news);
    }

    /// Ends the stream of a flow, in peace or with a code.
    pub(super) fn udp_over(&mut self, id: UdpId, ended: Result<(), u64>) {
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

    /// The session of a flow that is there.
    fn udp_session(&mut self, id: UdpId) -> Option<(&mut Session, &mut Connection)> {
        in_use(&mut self.session, &mut self.endpoint)
            .filter(|(session, _)| session.connection == id.connection && session.udp.flows.has(id.stream))
    }
}
