//! Requests of others, passed on over a connection to a server.
//!
//! In: header sections as somebody else has received them, bytes and datagrams of their streams, UDP payloads. Out: the
//! server's answers, bytes and datagrams. What is asked for is nobody's business here: the server grants or refuses it.

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

/// Bytes of datagrams that wait for the one that a request is for.
const MOST_WAITING: usize = 256 << 10;
/// What one of them counts beyond its bytes.
const EACH: usize = 64;
/// They wait for no longer: what carries them on is too slow then, and old ones are worth less than new ones.
const STALE: Duration = Duration::from_millis(250);

/// Something that whoever forwards must act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardEvent {
    /// [`Forwarder::request`] may be called, also where it said no before.
    Ready,
    /// A request has an answer, bytes, datagrams or an end.
    Readable(RelayId),
    /// [`Forwarder::room`] is there again.
    Writable(RelayId),
    /// The connection is over, and all of its requests with it.
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

/// Datagrams of one request that came.
#[derive(Debug, Default)]
struct Inbox {
    waiting: VecDeque<(Instant, Bytes)>,
    bytes: usize,
    /// Whoever they are for found none, and was not told that there are some since.
    starved: bool,
}

impl Inbox {
    /// Keeps a datagram, or drops it as a full queue of a router would; whether somebody is to be told.
    fn push(&mut self, now: Instant, value: &[u8]) -> bool {
        self.drop_stale(now);
        if self.bytes + value.len() + EACH > MOST_WAITING {
            return false;
        }
        self.bytes += value.len() + EACH;
        // A copy: the buffer behind it is of many packets.
        self.waiting.push_back((now, Bytes::copy_from_slice(value)));
        std::mem::take(&mut self.starved)
    }

    fn pop(&mut self, now: Instant) -> Option<Bytes> {
        self.drop_stale(now);
        let next = self.waiting.pop_front().map(|(_, value)| value);
        match &next {
            Some(value) => self.bytes -= value.len() + EACH,
            None => self.starved = true,
        }
        next
    }

    fn drop_stale(&mut self, now: Instant) {
        while let Some((_, value)) =
            self.waiting.pop_front_if(|(came, _)| now.saturating_duration_since(*came) > STALE)
        {
            self.bytes -= value.len() + EACH;
        }
    }
}

/// A connection that carries requests of others.
#[derive(Debug)]
pub struct Forwarder {
    endpoint: Endpoint,
    id: ConnectionHandle,
    /// `None` until the handshake is over.
    session: Option<(Http, MultipathConnection)>,
    relays: Relays,
    inboxes: BTreeMap<StreamId, Inbox>,
    /// [`ForwardEvent::Ready`] was said, and no request refused since.
    ready: bool,
    events: VecDeque<ForwardEvent>,
    over: bool,
}

impl Forwarder {
    /// Begins a connection to `remote`, whose certificate `setup` judges by `name`.
    ///
    /// # Errors
    /// If the address or the name cannot be connected to.
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
            over: false,
        })
    }

    /// Takes a UDP payload. After each batch of them comes [`Self::handle_batch`].
    pub fn handle_datagram(&mut self, now: Instant, remote: SocketAddr, ecn: u8, data: BytesMut) {
        let local = Some(LocalAddress::link(LinkId(0)));
        if self.endpoint.handle(now, local, remote, ecn, data) == Handled::Nothing {
            tracing::trace!(%remote, "a packet of no connection");
        }
    }

    /// To be called after every batch of [`Self::handle_datagram`].
    pub fn handle_batch(&mut self, now: Instant) {
        if let Err(error) = self.drive(now) {
            self.broken(now, &error);
        }
        self.endpoint.process_endpoint_events(self.id);
    }

    fn drive(&mut self, now: Instant) -> Result<(), H3Error> {
        let Some(connection) = self.endpoint.get(self.id) else {
            self.lost(LostReason::TimedOut);
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
                // A server that refuses reads no more of the request (H3_NO_ERROR), and its answer says why.
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
            self.lost(reason);
            return Ok(());
        }
        let Some((http, multipath)) = &mut self.session else { return Ok(()) };
        let (inboxes, events, id) = (&mut self.inboxes, &mut self.events, self.id);
        let mut problem = None;
        connection.receive_datagrams(|datagram| match value_of(&datagram) {
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
        // Nothing on other streams than those of requests needs an answer.
        while http.next(connection, &self.relays)?.is_some() {}
        if !self.ready && http.masque_allowed() {
            self.ready = true;
            self.events.push_back(ForwardEvent::Ready);
        }
        Ok(())
    }

    /// The server said what HTTP/3 does not allow.
    fn broken(&mut self, now: Instant, error: &H3Error) {
        if let Some(connection) = self.endpoint.get(self.id) {
            connection.close(now, error.code, &error.reason);
        }
        self.lost(LostReason::Transport(error.to_string()));
    }

    fn lost(&mut self, reason: LostReason) {
        if !std::mem::replace(&mut self.over, true) {
            self.relays = Relays::default();
            self.inboxes.clear();
            self.events.push_back(ForwardEvent::Lost(reason));
        }
    }

    /// Whether the connection has ended or is ending.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Requests now.
    pub fn requests(&self) -> usize {
        self.inboxes.len()
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<ForwardEvent> {
        self.events.pop_front()
    }

    /// Sends a request whose header section is valid. `None` while the server is not reached, or allows no more streams:
    /// [`ForwardEvent::Ready`] says when to ask again.
    pub fn request(&mut self, headers: &Headers) -> Option<RelayId> {
        let wanted = self.session.as_ref().filter(|(http, _)| !self.over && http.masque_allowed());
        let connection = wanted.and_then(|_| self.endpoint.get(self.id));
        let Some((connection, stream)) = connection.and_then(|c| c.open_bi().ok().map(|id| (c, id))) else {
            self.ready = false;
            return None;
        };
        self.relays.insert(connection, stream);
        self.inboxes.insert(stream, Inbox { starved: true, ..Inbox::default() });
        connection.write(stream, h3::encode_headers(headers));
        Some(RelayId::new(self.id, stream))
    }

    /// The answer to a request; its headers come once. Then [`Self::read`] has what follows.
    pub fn answer(&mut self, now: Instant, request: RelayId) -> ResponseStatus {
        let Some((http, _)) = &mut self.session else { return ResponseStatus::Failed };
        let Some(connection) = self.endpoint.get(self.id) else { return ResponseStatus::Failed };
        match self.relays.answer(connection, http, request.stream) {
            Ok(Some(headers)) => ResponseStatus::Received(headers),
            Ok(None) if self.relays.is_broken_or_over(request.stream) => ResponseStatus::Failed,
            Ok(None) => ResponseStatus::Pending,
            Err(error) => {
                self.broken(now, &error);
                ResponseStatus::Failed
            }
        }
    }

    /// The next bytes of the server's content.
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
                self.broken(now, &error);
                RelayRead::Broken
            }
        }
    }

    /// Bytes that may be written now; after 0, [`ForwardEvent::Writable`] follows.
    pub fn available_window(&mut self, request: RelayId) -> usize {
        if !self.relays.has(request.stream) {
            return 0;
        }
        self.endpoint.get(self.id).map_or(0, |connection| connection.writable_bytes(request.stream))
    }

    /// Whether the request is still there; one that is not takes no bytes.
    pub fn is_open(&self, request: RelayId) -> bool {
        self.relays.has(request.stream) && !self.relays.is_broken(request.stream)
    }

    /// Sends bytes as content of the request.
    pub fn write(&mut self, request: RelayId, data: Bytes) {
        if let Some(connection) = self.endpoint.get(self.id) {
            self.relays.write(connection, request.stream, data);
        }
    }

    /// Sends nothing more.
    pub fn finish(&mut self, request: RelayId) {
        if let (Some(connection), Some((http, _))) = (self.endpoint.get(self.id), &mut self.session) {
            self.relays.finish(connection, http, request.stream);
        }
    }

    /// Gives a request up, in both directions, with an HTTP/3 code for what is not over yet. Also to be called for one
    /// that is: nothing is kept of it then.
    pub fn end(&mut self, request: RelayId, code: u64) {
        self.inboxes.remove(&request.stream);
        if let (Some(connection), Some((http, _))) = (self.endpoint.get(self.id), &mut self.session) {
            self.relays.abort(connection, http, request.stream, code);
        }
    }

    /// Sends a datagram, context ID and payload, outside of the stream. `false` if that cannot be: it is too large for
    /// now, or begins with no context ID. Then a capsule in the stream may carry it.
    pub fn send_datagram(&mut self, now: Instant, request: RelayId, value: &[u8]) -> bool {
        let Some((http, multipath)) = &mut self.session else { return false };
        let Some(connection) = self.endpoint.get(self.id) else { return false };
        let Some((context, at)) = varint::decode(value) else { return false };
        let (prefix, payload) = (datagram::prefix(request.stream, context), &value[at..]);
        let room = connection.max_datagram_size().unwrap_or(0);
        if !http.datagrams_allowed() || prefix.as_ref().len() + payload.len() > room {
            return false;
        }
        // Packets of one request are of many flows, payloads of one.
        let flow = match ip::parse(payload) {
            Ok(packet) => FlowKey::of(&packet).hash32(),
            Err(_) => request.stream as u32,
        };
        multipath.send_payload(now, &prefix, payload, flow, true);
        true
    }

    /// The next datagram that came: context ID and payload. What nobody takes in time is dropped.
    pub fn next_datagram(&mut self, now: Instant, request: RelayId) -> Option<Bytes> {
        self.inboxes.get_mut(&request.stream)?.pop(now)
    }

    /// Ends the connection; what [`Self::poll_transmit`] still gives tells the server.
    pub fn close(&mut self, now: Instant, reason: &str) {
        if let Some(connection) = self.endpoint.get(self.id) {
            connection.close(now, code::NO_ERROR, reason);
        }
        self.lost(LostReason::LocallyClosed);
    }

    /// The next UDP payload to send, at the end of `buf`, which must be empty.
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
            // Room on a stream shows as its bytes leave.
            if !connection.has_events() {
                self.endpoint.process_endpoint_events(self.id);
                return None;
            }
            self.handle_batch(now);
        }
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let connection = self.endpoint.get(self.id)?;
        let own = self.session.as_ref().and_then(|(_, multipath)| multipath.poll_timeout(now, connection));
        own.into_iter().chain(connection.poll_timeout()).min()
    }

    /// Lets time pass.
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

/// Why a connection could not be begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no connection can be made: {0}")]
pub struct ForwardError(String);

/// The stream that a received QUIC DATAGRAM frame belongs to, and what follows its number.
fn value_of(frame: &[u8]) -> Result<(StreamId, &[u8]), H3Error> {
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
