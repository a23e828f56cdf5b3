//! Forwards HTTP requests of other clients over one QUIC connection to a server (the TCP gateway of the
//! server uses it).
//!
//! In: header sections that were received elsewhere, bytes and datagrams of their streams, UDP payloads. Out:
//! the server's responses, bytes and datagrams, UDP payloads. Always holds: requests are not interpreted, the
//! server grants or refuses them; at most [`MAX_INBOX_BYTES`] of datagrams wait for each request.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::{
    datagram,
    h3::{self, Event as HttpEvent, H3Error, Side, code},
    headers::Headers,
    varint,
};
use mpvpn_packet::{FlowKey, ip};
use mpvpn_path::Scheduler;
use mpvpn_quic::{
    ClientSetup, ConnectionHandle, Endpoint, Event as QuicEvent, Handled, LocalAddress, LostReason, StreamId,
    Transmit,
};
use mpvpn_types::{Duration, Instant, LinkId, PathId};

use crate::{
    RelayId, RelayRead,
    http::Http,
    multipath::{MultipathConnection, Role},
    relay::Relays,
};

/// Maximum bytes of datagrams that wait for the reader of one request, for example 250 ms of 8 Mbit/s.
/// Smaller: bursts are dropped. Larger: memory of readers that do not read.
const MAX_INBOX_BYTES: usize = 256 << 10;
/// Bytes that a waiting datagram counts beyond its payload, about the size of its queue entry.
const DATAGRAM_OVERHEAD_BYTES: usize = 64;
/// Age at which a waiting datagram is dropped: the TCP connection behind is too slow then, and older
/// datagrams are worth less than new ones. Smaller: a stall of TCP loses datagrams. Larger: delay. Value:
/// chosen.
const MAX_DATAGRAM_AGE: Duration = Duration::from_millis(250);

/// An event of a [`Forwarder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardEvent {
    /// [`Forwarder::request`] can be called (again).
    Ready,
    /// A response, bytes, datagrams or the end of a request have arrived.
    Readable(RelayId),
    /// [`Forwarder::available_window`] is no longer 0.
    Writable(RelayId),
    /// The connection has ended, and all requests with it.
    Lost(LostReason),
}

/// The state of the server's response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseStatus {
    /// No response has arrived yet.
    Pending,
    /// The header section of the response.
    Received(Headers),
    /// No response will arrive: the stream or the connection is broken.
    Failed,
}

/// The received datagrams of one request.
#[derive(Debug, Default)]
struct Inbox {
    waiting: VecDeque<(Instant, Bytes)>,
    bytes: usize,
    /// The reader found no datagram, and no event has been produced since.
    reader_waiting: bool,
}

impl Inbox {
    /// Queues a datagram, or drops it if the queue is full (tail drop). Returns whether an event is due.
    fn push(&mut self, now: Instant, value: &[u8]) -> bool {
        self.drop_stale(now);
        if self.bytes + value.len() + DATAGRAM_OVERHEAD_BYTES > MAX_INBOX_BYTES {
            return false;
        }
        self.bytes += value.len() + DATAGRAM_OVERHEAD_BYTES;
        // Copied, because the receive buffer that it refers to contains many packets.
        self.waiting.push_back((now, Bytes::copy_from_slice(value)));
        std::mem::take(&mut self.reader_waiting)
    }

    fn pop(&mut self, now: Instant) -> Option<Bytes> {
        self.drop_stale(now);
        let next = self.waiting.pop_front().map(|(_, value)| value);
        match &next {
            Some(value) => self.bytes -= value.len() + DATAGRAM_OVERHEAD_BYTES,
            None => self.reader_waiting = true,
        }
        next
    }

    fn drop_stale(&mut self, now: Instant) {
        while let Some((_, value)) =
            self.waiting.pop_front_if(|(came, _)| now.saturating_duration_since(*came) > MAX_DATAGRAM_AGE)
        {
            self.bytes -= value.len() + DATAGRAM_OVERHEAD_BYTES;
        }
    }
}

/// A connection to a server that carries the requests of other clients.
#[derive(Debug)]
pub struct Forwarder {
    endpoint: Endpoint,
    id: ConnectionHandle,
    /// `None` until the handshake is complete.
    session: Option<(Http, MultipathConnection)>,
    relays: Relays,
    inboxes: BTreeMap<StreamId, Inbox>,
    /// [`ForwardEvent::Ready`] was produced, and no request was refused since.
    ready: bool,
    events: VecDeque<ForwardEvent>,
    closed: bool,
}

impl Forwarder {
    /// Starts a connection to `remote`; `setup` verifies its certificate for `name`.
    ///
    /// # Errors
    /// If QUIC rejects the address or the name.
    pub fn connect(
        now: Instant,
        setup: &ClientSetup,
        remote: SocketAddr,
        name: &str,
    ) -> Result<Self, ForwardError> {
        let mut endpoint = Endpoint::client(setup);
        let connected = endpoint.connect(now, setup, LocalAddress::link(LinkId(0)), remote, name);
        let id = connected.map_err(|error| ForwardError(error.to_string()))?;
        Ok(Self {
            endpoint,
            id,
            session: None,
            relays: Relays::default(),
            inboxes: BTreeMap::new(),
            ready: false,
            events: VecDeque::new(),
            closed: false,
        })
    }

    /// Takes a UDP payload. Call [`Self::handle_batch`] after each batch.
    pub fn handle_datagram(&mut self, now: Instant, remote: SocketAddr, ecn: u8, data: BytesMut) {
        let local = Some(LocalAddress::link(LinkId(0)));
        if self.endpoint.handle(now, local, remote, ecn, data) == Handled::Nothing {
            tracing::trace!(%remote, "a packet was dropped: it belongs to no connection");
        }
    }

    /// Processes a batch of UDP payloads; to be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        if let Err(error) = self.drive(now) {
            self.close_on_error(now, &error);
        }
        self.endpoint.process_endpoint_events(self.id);
    }

    fn drive(&mut self, now: Instant) -> Result<(), H3Error> {
        let Some(connection) = self.endpoint.get(self.id) else {
            self.on_lost(LostReason::TimedOut);
            return Ok(());
        };
        if let Some((_, multipath)) = &mut self.session {
            multipath.note_path_arrivals(now, connection);
        }
        let mut lost = None;
        while let Some(event) = connection.poll_event(now) {
            match (event, &mut self.session) {
                (QuicEvent::Connected, session @ None) => match Http::start(Side::Client, connection) {
                    Ok(http) => {
                        let mut multipath =
                            MultipathConnection::new(now, Role::Client, None, Scheduler::default());
                        multipath.path_opened(now, connection, PathId(0));
                        *session = Some((http, multipath));
                    }
                    Err(error) => return Err(internal(&error.to_string())),
                },
                (QuicEvent::Lost(reason), _) => lost = Some(reason),
                (QuicEvent::StreamReadable(stream), _) if self.relays.has(stream) => {
                    let news = ForwardEvent::Readable(RelayId::new(self.id, stream));
                    self.events.extend(self.relays.wake(stream).then_some(news));
                }
                (QuicEvent::StreamReadable(stream), Some((http, _))) => http.readable(stream),
                (QuicEvent::StreamWritable(stream), _) => {
                    self.events.push_back(ForwardEvent::Writable(RelayId::new(self.id, stream)));
                }
                // A server that refuses a request stops reading with H3_NO_ERROR (RFC 9114 §4.1); the
                // response follows.
                (QuicEvent::StreamStopped(stream, stop), _)
                    if stop != code::NO_ERROR && self.relays.breaks_when_stopped(stream) =>
                {
                    self.relays.handle(HttpEvent::Reset { stream, code: stop });
                    self.events.push_back(ForwardEvent::Readable(RelayId::new(self.id, stream)));
                }
                (QuicEvent::PathOpened(path), Some((_, multipath))) => {
                    multipath.path_opened(now, connection, path);
                }
                (QuicEvent::PathClosed(path), Some((_, multipath))) => {
                    multipath.path_closed(now, path);
                }
                (QuicEvent::PeerStatus(path, status), Some((_, multipath))) => {
                    multipath.on_peer_status(now, path, status);
                }
                (QuicEvent::StreamsAvailable, _) => self.ready = false,
                _ => {}
            }
        }
        if let Some(reason) = lost {
            self.on_lost(reason);
            return Ok(());
        }
        let Some((http, multipath)) = &mut self.session else { return Ok(()) };
        let (inboxes, events, id) = (&mut self.inboxes, &mut self.events, self.id);
        let mut problem = None;
        connection.receive_datagrams(|_, datagram| match http_datagram(&datagram) {
            Ok((stream, value)) => {
                multipath.on_data_received(now, value.len() as u64);
                if inboxes.get_mut(&stream).is_some_and(|inbox| inbox.push(now, value)) {
                    events.push_back(ForwardEvent::Readable(RelayId::new(id, stream)));
                }
            }
            Err(error) => problem = Some(error),
        });
        if let Some(error) = problem {
            return Err(error);
        }
        // Events of other streams need no action.
        while http.poll_event(connection, &self.relays)?.is_some() {}
        if !self.ready && http.masque_allowed() {
            self.ready = true;
            self.events.push_back(ForwardEvent::Ready);
        }
        Ok(())
    }

    /// Closes the connection after a violation of HTTP/3 by the server.
    fn close_on_error(&mut self, now: Instant, error: &H3Error) {
        if let Some(connection) = self.endpoint.get(self.id) {
            connection.close(now, error.code, &error.reason);
        }
        self.on_lost(LostReason::Transport(error.to_string()));
    }

    fn on_lost(&mut self, reason: LostReason) {
        if !std::mem::replace(&mut self.closed, true) {
            self.relays = Relays::default();
            self.inboxes.clear();
            self.events.push_back(ForwardEvent::Lost(reason));
        }
    }

    /// Whether the connection has ended or is ending.
    pub fn is_over(&self) -> bool {
        self.closed
    }

    /// Returns the number of open requests.
    pub fn requests(&self) -> usize {
        self.inboxes.len()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<ForwardEvent> {
        self.events.pop_front()
    }

    /// Sends a request; `headers` must be a valid header section. Returns `None` if the connection is not
    /// established or the server allows no further stream; retry after [`ForwardEvent::Ready`].
    pub fn request(&mut self, headers: &Headers) -> Option<RelayId> {
        let ready_session = self.session.as_ref().filter(|(http, _)| !self.closed && http.masque_allowed());
        let connection = ready_session.and_then(|_| self.endpoint.get(self.id));
        let Some((connection, stream)) = connection.and_then(|c| c.open_bi().ok().map(|id| (c, id))) else {
            self.ready = false;
            return None;
        };
        self.relays.insert(connection, stream);
        self.inboxes.insert(stream, Inbox { reader_waiting: true, ..Inbox::default() });
        connection.write(stream, h3::encode_headers(headers));
        Some(RelayId::new(self.id, stream))
    }

    /// Returns the status of the response to a request. The header section is returned once; read the content
    /// with [`Self::read`] then.
    pub fn answer(&mut self, now: Instant, request: RelayId) -> ResponseStatus {
        let Some((http, _)) = &mut self.session else { return ResponseStatus::Failed };
        let Some(connection) = self.endpoint.get(self.id) else { return ResponseStatus::Failed };
        match self.relays.answer(connection, http, request.stream) {
            Ok(Some(headers)) => ResponseStatus::Received(headers),
            Ok(None) if self.relays.is_broken_or_over(request.stream) => ResponseStatus::Failed,
            Ok(None) => ResponseStatus::Pending,
            Err(error) => {
                self.close_on_error(now, &error);
                ResponseStatus::Failed
            }
        }
    }

    /// Returns the next bytes of the response content.
    pub fn read(&mut self, now: Instant, request: RelayId) -> RelayRead {
        let Some((http, multipath)) = &mut self.session else { return RelayRead::Broken };
        let Some(connection) = self.endpoint.get(self.id) else { return RelayRead::Broken };
        match self.relays.read(connection, http, request.stream) {
            Ok(read) => {
                if let RelayRead::Data(data) = &read {
                    multipath.on_data_received(now, data.len() as u64);
                }
                read
            }
            Err(error) => {
                self.close_on_error(now, &error);
                RelayRead::Broken
            }
        }
    }

    /// Returns the available window of a request's stream in bytes; after 0, [`ForwardEvent::Writable`]
    /// follows.
    pub fn available_window(&mut self, request: RelayId) -> usize {
        if !self.relays.has(request.stream) {
            return 0;
        }
        self.endpoint.get(self.id).map_or(0, |connection| connection.writable_bytes(request.stream))
    }

    /// Whether the request is open, so that it takes bytes.
    pub fn is_open(&self, request: RelayId) -> bool {
        self.relays.has(request.stream) && !self.relays.is_broken(request.stream)
    }

    /// Sends bytes as request content.
    pub fn write(&mut self, request: RelayId, data: Bytes) {
        if let Some(connection) = self.endpoint.get(self.id) {
            self.relays.write(connection, request.stream, data);
        }
    }

    /// Ends the request content.
    pub fn finish(&mut self, request: RelayId) {
        if let (Some(connection), Some((http, _))) = (self.endpoint.get(self.id), &mut self.session) {
            self.relays.finish(connection, http, request.stream);
        }
    }

    /// Ends a request in both directions; directions that are still open are reset with an HTTP/3 error code.
    /// To be called for finished requests as well, to release their state.
    pub fn end(&mut self, request: RelayId, code: u64) {
        self.inboxes.remove(&request.stream);
        if let (Some(connection), Some((http, _))) = (self.endpoint.get(self.id), &mut self.session) {
            self.relays.abort(connection, http, request.stream, code);
        }
    }

    /// Sends an HTTP datagram (context ID and payload) as a QUIC DATAGRAM frame. Returns `false` if it is too
    /// large at present or does not begin with a context ID; it can be sent as a capsule then.
    pub fn send_datagram(&mut self, now: Instant, request: RelayId, value: &[u8]) -> bool {
        let Some((http, multipath)) = &mut self.session else { return false };
        let Some(connection) = self.endpoint.get(self.id) else { return false };
        let Some((context, at)) = varint::decode(value) else { return false };
        let (prefix, payload) = (datagram::prefix(request.stream, context), &value[at..]);
        let max_bytes = connection.max_datagram_size().unwrap_or(0);
        if !http.datagrams_allowed() || prefix.as_ref().len() + payload.len() > max_bytes {
            return false;
        }
        // IP packets of one request belong to many flows; UDP payloads of one request are one flow.
        let flow = match ip::parse(payload) {
            Ok(packet) => FlowKey::of(&packet).hash32(),
            Err(_) => request.stream as u32,
        };
        multipath.send_payload(now, &prefix, payload, flow, true);
        true
    }

    /// Returns the next received datagram: context ID and payload. Datagrams older than `MAX_DATAGRAM_AGE`
    /// are dropped.
    pub fn next_datagram(&mut self, now: Instant, request: RelayId) -> Option<Bytes> {
        self.inboxes.get_mut(&request.stream)?.pop(now)
    }

    /// Closes the connection; [`Self::poll_transmit`] returns the packets that inform the server.
    pub fn close(&mut self, now: Instant, reason: &str) {
        if let Some(connection) = self.endpoint.get(self.id) {
            connection.close(now, code::NO_ERROR, reason);
        }
        self.on_lost(LostReason::LocallyClosed);
    }

    /// Writes the next UDP payload to send to `buf`, which must be empty; `None` if there is nothing to send.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        loop {
            let connection = self.endpoint.get(self.id)?;
            let transmit = match &mut self.session {
                Some((_, multipath)) => multipath.poll_transmit(now, connection, buf),
                None => connection.poll_transmit(now, buf),
            };
            if transmit.is_some() {
                return transmit;
            }
            // Sending may have opened the window of a stream, which is an event.
            if !connection.has_events() {
                self.endpoint.process_endpoint_events(self.id);
                return None;
            }
            self.handle_batch(now);
        }
    }

    /// Returns when [`Self::handle_timeout`] has to be called.
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let connection = self.endpoint.get(self.id)?;
        let own = self.session.as_ref().and_then(|(_, multipath)| multipath.poll_timeout(now, connection));
        own.into_iter().chain(connection.poll_timeout()).min()
    }

    /// Processes timers that have expired at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(connection) = self.endpoint.get(self.id) {
            connection.handle_timeout(now);
            if let Some((_, multipath)) = &mut self.session {
                multipath.handle_timeout(now, connection);
            }
        }
        self.handle_batch(now);
    }
}

/// The reason why a connection could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection to the server cannot be started: {0}")]
pub struct ForwardError(String);

/// Splits a received QUIC DATAGRAM frame into the request stream that it belongs to and the HTTP datagram.
fn http_datagram(frame: &[u8]) -> Result<(StreamId, &[u8]), H3Error> {
    match datagram::parse(frame) {
        Ok(parsed) => {
            let at = varint::decode(frame).map_or(frame.len(), |(_, at)| at);
            Ok((parsed.stream_id, &frame[at..]))
        }
        Err(error) => Err(h3_error(error.code(), error.to_string())),
    }
}

fn internal(reason: &str) -> H3Error {
    h3_error(code::INTERNAL_ERROR, reason.to_owned())
}

fn h3_error(code: u64, reason: String) -> H3Error {
    H3Error { code, reason: reason.into() }
}
