//! TCP connections that the server makes because the edge asks for them.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mpvpn_masque::{
    connect::{self, Authority, ProxyError},
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
    /// The server has not answered yet.
    Asked,
    Open,
}

/// The streams of the connection in use that the edge has opened.
#[derive(Debug, Default)]
pub(super) struct Own {
    streams: BTreeMap<StreamId, Stage>,
    /// Streams that may have their answer.
    woken: VecDeque<StreamId>,
    /// The edge did not get a stream, and was not told since that it may ask again.
    wants: bool,
}

impl Own {
    /// Streams now.
    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// The edge wants a stream.
    pub(super) fn want(&mut self) {
        self.wants = true;
    }

    /// It got one.
    pub(super) fn got(&mut self) {
        self.wants = false;
    }

    /// Whether a stream is one of these.
    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// A stream has something to read; whether it is one of these.
    pub(super) fn readable(&mut self, id: RelayId, events: &mut Events) -> bool {
        match self.streams.get(&id.stream) {
            Some(Stage::Asked) => self.woken.push_back(id.stream),
            Some(Stage::Open) => events.push_back(ClientEvent::RelayReadable(id)),
            None => return false,
        }
        true
    }

    /// A stream has room again; whether it is one of these.
    pub(super) fn writable(&mut self, id: RelayId, events: &mut Events) -> bool {
        let stage = self.streams.get(&id.stream);
        if stage == Some(&Stage::Open) {
            events.push_back(ClientEvent::RelayWritable(id));
        }
        stage.is_some()
    }

    /// Streams may be opened.
    pub(super) fn allowed(&mut self, events: &mut Events) {
        if std::mem::take(&mut self.wants) {
            events.push_back(ClientEvent::RelaysAllowed);
        }
    }

    /// The connection is over.
    pub(super) fn end(&mut self, connection: ConnectionHandle, events: &mut Events) {
        self.woken.clear();
        let gone = std::mem::take(&mut self.streams).into_keys();
        events.extend(gone.map(|stream| ClientEvent::RelayGone(RelayId::new(connection, stream))));
    }

    /// Forgets a stream whose halves have both ended.
    fn forget_if_over(&mut self, relays: &Relays, stream: StreamId) {
        if !relays.has(stream) {
            self.streams.remove(&stream);
        }
    }
}

impl Client {
    /// Asks the server for a TCP connection. `None` while the server is not reached or allows no more streams:
    /// [`ClientEvent::RelaysAllowed`] says when to ask again. What comes of it is told by [`ClientEvent::RelayOpened`]
    /// or [`ClientEvent::RelayFailed`].
    pub fn relay_open(&mut self, to: &Authority) -> Option<RelayId> {
        self.own.want();
        let session = self.session.as_mut().filter(|session| session.up)?;
        let connection = self.endpoint.get(session.connection)?;
        let stream = connection.open_bi().ok()?;
        self.own.got();
        session.relays.insert(connection, stream);
        connection.write(stream, h3::encode_headers(&connect::request(to, self.authorization.as_deref())));
        self.own.streams.insert(stream, Stage::Asked);
        Some(RelayId::new(session.connection, stream))
    }

    /// The next bytes from the destination, once the relay was opened. To be called until nothing is left then, and
    /// after each [`ClientEvent::RelayReadable`].
    pub fn relay_read(&mut self, now: Instant, relay: RelayId) -> RelayRead {
        let Some((session, connection)) = open_relay(&self.own, &mut self.session, &mut self.endpoint, relay)
        else {
            return RelayRead::Broken;
        };
        let read = match session.relays.read(connection, &mut session.http, relay.stream) {
            Ok(read) => read,
            Err(error) => {
                self.broken(now, &error);
                return RelayRead::Broken;
            }
        };
        match &read {
            RelayRead::Data(data) => session.multipath.on_data_received(now, data.len() as u64),
            RelayRead::Finished => self.own.forget_if_over(&session.relays, relay.stream),
            RelayRead::Broken => {
                session.relays.abort(
                    connection,
                    &mut session.http,
                    relay.stream,
                    h3::code::REQUEST_CANCELLED,
                );
                self.own.streams.remove(&relay.stream);
                self.reports.events.push_back(ClientEvent::RelayGone(relay));
            }
            RelayRead::Blocked => {}
        }
        read
    }

    /// Bytes that may be written now; after 0, [`ClientEvent::RelayWritable`] follows.
    pub fn relay_room(&mut self, relay: RelayId) -> usize {
        open_relay(&self.own, &mut self.session, &mut self.endpoint, relay)
            .map_or(0, |(_, connection)| connection.writable_bytes(relay.stream))
    }

    /// Sends bytes to the destination.
    pub fn relay_write(&mut self, relay: RelayId, data: Bytes) {
        if let Some((session, connection)) =
            open_relay(&self.own, &mut self.session, &mut self.endpoint, relay)
        {
            session.multipath.count_sent(data.len() as u64);
            session.relays.write(connection, relay.stream, data);
        }
    }

    /// Nothing more comes for the destination.
    pub fn relay_finish(&mut self, relay: RelayId) {
        if let Some((session, connection)) =
            open_relay(&self.own, &mut self.session, &mut self.endpoint, relay)
        {
            session.relays.finish(connection, &mut session.http, relay.stream);
            self.own.forget_if_over(&session.relays, relay.stream);
        }
    }

    /// Breaks a relay off, whether it stands or not. Nothing more is told about it.
    pub fn relay_abort(&mut self, relay: RelayId) {
        let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
        if session.connection == relay.connection && self.own.streams.remove(&relay.stream).is_some() {
            let code = h3::code::REQUEST_CANCELLED;
            session.relays.abort(connection, &mut session.http, relay.stream, code);
        }
    }

    /// The server reads a stream no more.
    pub(super) fn own_stopped(&mut self, stream: StreamId) {
        let Some(session) = &mut self.session else { return };
        let is_open = self.own.streams.get(&stream) == Some(&Stage::Open);
        // The answer to a request says why it was refused.
        if is_open && session.relays.breaks_when_stopped(stream) {
            let relay = RelayId::new(session.connection, stream);
            self.relay_abort(relay);
            self.reports.events.push_back(ClientEvent::RelayGone(relay));
        }
    }

    /// Reads the answers to requests for connections.
    pub(super) fn drive_own(&mut self, now: Instant) {
        while let Some(stream) = self.own.woken.pop_front() {
            let Some((session, connection)) = in_use(&mut self.session, &mut self.endpoint) else { return };
            let relay = RelayId::new(session.connection, stream);
            if self.own.streams.get(&stream) != Some(&Stage::Asked) {
                continue;
            }
            let answer = match session.relays.answer(connection, &mut session.http, stream) {
                Ok(Some(headers)) => Some(headers),
                Ok(None) => match session.relays.read(connection, &mut session.http, stream) {
                    Ok(RelayRead::Blocked) => continue,
                    Ok(_) => None,
                    Err(error) => return self.broken(now, &error),
                },
                Err(error) => return self.broken(now, &error),
            };
            let refused = answer.as_ref().and_then(refuses_credentials);
            match answer.map_or(Err(ProxyError::Other), |headers| connect::check_response(&headers)) {
                Ok(()) => {
                    self.own.streams.insert(stream, Stage::Open);
                    self.reports.events.push_back(ClientEvent::RelayOpened(relay));
                }
                Err(failure) => {
                    self.relay_abort(relay);
                    self.reports.events.push_back(ClientEvent::RelayFailed(relay, failure));
                }
            }
            if let Some(status) = refused {
                return self.unauthorized(now, status);
            }
        }
    }

    pub(super) fn unauthorized(&mut self, now: Instant, status: u16) {
        // Beside packets the session has shown that they are right.
        if self.config.mode == TunnelMode::RelaysOnly {
            self.fail(now, ClientError::Unauthorized(status));
        }
    }
}

/// The parts of a relay that stands.
fn open_relay<'a>(
    own: &Own,
    session: &'a mut Option<Session>,
    endpoint: &'a mut mpvpn_quic::Endpoint,
    relay: RelayId,
) -> Option<(&'a mut Session, &'a mut Connection)> {
    let is_open = own.streams.get(&relay.stream) == Some(&Stage::Open);
    in_use(session, endpoint).filter(|(session, _)| is_open && session.connection == relay.connection)
}

pub(super) fn refuses_credentials(headers: &Headers) -> Option<u16> {
    headers.status().filter(|status| matches!(status, 401 | 407))
}
