//! Relays of the edge: TCP connections that the server opens for it by CONNECT.
//!
//! In: requests and bytes of the edge, events of streams. Out: CONNECT requests, bytes, [`ClientEvent`]s of
//! relays. Always holds: a relay is closed with its connection; after an abort no event follows.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    connect::{self, Authority, ProxyError},
    connect_ip::RefusalDetail,
    h3,
    headers::Headers,
};
use mpvpn_quic::{Connection, ConnectionHandle, StreamId};
use mpvpn_types::Instant;

use super::{Client, ClientError, ClientEvent, TunnelMode, in_use, session::Session};
use crate::{RelayId, RelayRead, relay::Relays};

type Events = VecDeque<ClientEvent>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The server has not responded yet.
    Requested,
    Open,
}

/// The relays of the edge on the connection in use.
#[derive(Debug, Default)]
pub(super) struct EdgeRelays {
    streams: BTreeMap<StreamId, Stage>,
    /// Streams whose response may have arrived.
    unread_responses: VecDeque<StreamId>,
    /// Whether the edge got no stream, and waits for [`ClientEvent::RelaysAllowed`].
    is_waiting: bool,
}

impl EdgeRelays {
    /// Number of relays.
    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// The edge opens a relay: it waits if that fails.
    pub(super) fn begin_open(&mut self) {
        self.is_waiting = true;
    }

    /// The relay was opened.
    pub(super) fn opened(&mut self) {
        self.is_waiting = false;
    }

    /// Whether a stream is a relay of the edge.
    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Reports a stream as readable. Returns whether it is a relay of the edge.
    pub(super) fn readable(&mut self, id: RelayId, events: &mut Events) -> bool {
        match self.streams.get(&id.stream) {
            Some(Stage::Requested) => self.unread_responses.push_back(id.stream),
            Some(Stage::Open) => events.push_back(ClientEvent::RelayReadable(id)),
            None => return false,
        }
        true
    }

    /// Reports a stream as writable. Returns whether it is a relay of the edge.
    pub(super) fn writable(&mut self, id: RelayId, events: &mut Events) -> bool {
        let stage = self.streams.get(&id.stream);
        if stage == Some(&Stage::Open) {
            events.push_back(ClientEvent::RelayWritable(id));
        }
        stage.is_some()
    }

    /// Streams may be opened again: notifies an edge that waits.
    pub(super) fn notify_if_waiting(&mut self, events: &mut Events) {
        if std::mem::take(&mut self.is_waiting) {
            events.push_back(ClientEvent::RelaysAllowed);
        }
    }

    /// Reports all relays as closed, because their connection is lost.
    pub(super) fn end(&mut self, connection: ConnectionHandle, events: &mut Events) {
        self.unread_responses.clear();
        let gone = std::mem::take(&mut self.streams).into_keys();
        events.extend(gone.map(|stream| ClientEvent::RelayGone(RelayId::new(connection, stream))));
    }

    /// Drops a relay of which both directions have ended.
    fn forget_if_over(&mut self, relays: &Relays, stream: StreamId) {
        if !relays.has(stream) {
            self.streams.remove(&stream);
        }
    }
}

impl Client {
    /// Asks the server to open a TCP connection to `to`. `None` while there is no session or stream for it:
    /// [`ClientEvent::RelaysAllowed`] reports when to retry. [`ClientEvent::RelayOpened`] or
    /// [`ClientEvent::RelayFailed`] reports the outcome.
    pub fn relay_open(&mut self, to: &Authority) -> Option<RelayId> {
        self.edge_relays.begin_open();
        let session = self.session.as_mut().filter(|session| session.up)?;
        let connection = self.endpoint.get(session.connection)?;
        let stream = connection.open_bi().ok()?;
        self.edge_relays.opened();
        session.relays.insert(connection, stream);
        connection.write(stream, h3::encode_headers(&connect::request(to, self.authorization.as_deref())));
        self.edge_relays.streams.insert(stream, Stage::Requested);
        Some(RelayId::new(session.connection, stream))
    }

    /// The next bytes from the target. Must be called until [`RelayRead::Blocked`] once the relay is open,
    /// and after each [`ClientEvent::RelayReadable`].
    pub fn relay_read(&mut self, now: Instant, relay: RelayId) -> RelayRead {
        let Some((session, connection)) =
            open_relay(&self.edge_relays, &mut self.session, &mut self.endpoint, relay)
        else {
            return RelayRead::Broken;
        };
        let read = match session.relays.read(connection, &mut session.http, relay.stream) {
            Ok(read) => read,
            Err(error) => {
                self.close_on_h3_error(now, &error);
                return RelayRead::Broken;
            }
        };
        match &read {
            RelayRead::Data(data) => session.multipath.on_data_received(now, data.len() as u64),
            RelayRead::Finished => self.edge_relays.forget_if_over(&session.relays, relay.stream),
            RelayRead::Broken => {
                session.relays.abort(
                    connection,
                    &mut session.http,
                    relay.stream,
                    h3::code::REQUEST_CANCELLED,
                );
                self.edge_relays.streams.remove(&relay.stream);
                self.reports.events.push_back(ClientEvent::RelayGone(relay));
            }
            RelayRead::Blocked => {}
        }
        read
    }

    /// Bytes that may be written now; after 0, [`ClientEvent::RelayWritable`] follows.
    pub fn relay_writable_bytes(&mut self, relay: RelayId) -> usize {
        open_relay(&self.edge_relays, &mut self.session, &mut self.endpoint, relay)
            .map_or(0, |(_, connection)| connection.writable_bytes(relay.stream))
    }

    /// Sends bytes to the target.
    pub fn relay_write(&mut self, relay: RelayId, data: Bytes) {
        if let Some((session, connection)) =
            open_relay(&self.edge_relays, &mut self.session, &mut self.endpoint, relay)
        {
            session.multipath.traffic.counters.tx_bytes += data.len() as u64;
            session.relays.write(connection, relay.stream, data);
        }
    }

    /// Ends the direction to the target (FIN).
    pub fn relay_finish(&mut self, relay: RelayId) {
        if let Some((session, connection)) =
            open_relay(&self.edge_relays, &mut self.session, &mut self.endpoint, relay)
        {
            session.relays.finish(connection, &mut session.http, relay.stream);
            self.edge_relays.forget_if_over(&session.relays, relay.stream);
        }
    }

    /// Aborts a relay, open or not. No event follows.
    pub fn relay_abort(&mut self, relay: RelayId) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        if session.connection == relay.connection && self.edge_relays.streams.remove(&relay.stream).is_some()
        {
            let code = h3::code::REQUEST_CANCELLED;
            session.relays.abort(connection, &mut session.http, relay.stream, code);
        }
    }

    /// The server sent STOP_SENDING for a relay.
    pub(super) fn on_relay_stopped(&mut self, stream: StreamId) {
        let Some(session) = &mut self.session else { return };
        let is_open = self.edge_relays.streams.get(&stream) == Some(&Stage::Open);
        // Before the response nothing is done: the response says why the request was refused.
        if is_open && session.relays.breaks_when_stopped(stream) {
            let relay = RelayId::new(session.connection, stream);
            self.relay_abort(relay);
            self.reports.events.push_back(ClientEvent::RelayGone(relay));
        }
    }

    /// Handles responses to CONNECT requests.
    pub(super) fn drive_edge_relays(&mut self, now: Instant) {
        while let Some(stream) = self.edge_relays.unread_responses.pop_front() {
            let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
            let relay = RelayId::new(session.connection, stream);
            if self.edge_relays.streams.get(&stream) != Some(&Stage::Requested) {
                continue;
            }
            let answer = match session.relays.answer(connection, &mut session.http, stream) {
                Ok(Some(headers)) => Some(headers),
                Ok(None) => match session.relays.read(connection, &mut session.http, stream) {
                    Ok(RelayRead::Blocked) => continue,
                    Ok(_) => None,
                    Err(error) => return self.close_on_h3_error(now, &error),
                },
                Err(error) => return self.close_on_h3_error(now, &error),
            };
            let refused = answer.as_ref().and_then(refuses_credentials);
            match answer.map_or(Err(ProxyError::Other), |headers| connect::check_response(&headers)) {
                Ok(()) => {
                    self.edge_relays.streams.insert(stream, Stage::Open);
                    self.reports.events.push_back(ClientEvent::RelayOpened(relay));
                }
                Err(failure) => {
                    self.relay_abort(relay);
                    self.reports.events.push_back(ClientEvent::RelayFailed(relay, failure));
                }
            }
            if let Some((status, detail)) = refused {
                return self.unauthorized(now, status, detail);
            }
        }
    }

    pub(super) fn unauthorized(&mut self, now: Instant, status: u16, detail: RefusalDetail) {
        // With packets, CONNECT-IP has already proved the credentials.
        if self.config.mode == TunnelMode::RelaysOnly {
            let error = self.refusal_of_credentials(status, detail);
            self.fail(now, error);
        }
    }

    /// The error for a response 401 or 407.
    pub(super) fn refusal_of_credentials(&self, status: u16, detail: RefusalDetail) -> ClientError {
        match self.authorization {
            Some(_) => ClientError::Unauthorized(status),
            None => ClientError::AccessDenied { status, detail },
        }
    }
}

/// The session and connection of an open relay.
fn open_relay<'a>(
    edge_relays: &EdgeRelays,
    session: &'a mut Option<Session>,
    endpoint: &'a mut mpvpn_quic::Endpoint,
    relay: RelayId,
) -> Option<(&'a mut Session, &'a mut Connection)> {
    let is_open = edge_relays.streams.get(&relay.stream) == Some(&Stage::Open);
    in_use(session, endpoint).filter(|(session, _)| is_open && session.connection == relay.connection)
}

/// The status and details of a response that refuses the credentials.
pub(super) fn refuses_credentials(headers: &Headers) -> Option<(u16, RefusalDetail)> {
    let status = headers.status().filter(|status| matches!(status, 401 | 407))?;
    Some((status, RefusalDetail::of(headers)))
}
