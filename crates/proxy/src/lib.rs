//! Local proxies for apps: SOCKS5 and HTTP. Each TCP connection of an app travels as a stream of the tunnel;
//! the server resolves the name and connects. UDP of apps (SOCKS5) travels as datagrams.
//!
//! In: listening addresses, ready sockets, events of the tunnel's streams ([`StreamEvent`]), time. Out: calls
//! of [`ProxyTunnel`]. `socks5` and `http` parse requests, a [`Splice`] moves bytes, `associations` move
//! datagrams.
//!
//! Always holds:
//! - An app gets one response, with the reason if there is no connection; bytes that it sent early are
//!   forwarded first.
//! - A request may take 10 s and 16 KiB. Until it is complete, and while the tunnel connects, nothing more is
//!   read from the app.
//! - Connections are bounded; further ones wait in the kernel's backlog.
//! - A reset on one side is a reset on the other.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod associations;
mod http;
mod refusal;
mod socks5;
pub mod untrusted;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fmt,
    hash::Hash,
    io::{self, IoSlice},
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mpvpn_error::RunError;
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_os::{
    TcpAcceptor, TcpSocket, limits,
    poll::{Event, Interest, Poller},
};
use mpvpn_report::flows::Connection;
use mpvpn_sockets::splice::{ByteStreams, Context, Splice, SpliceBuffers};

use associations::Associations;
pub use associations::DatagramFlows;
use refusal::failure_text;
use socks5::{Reply, Socks5};

/// Poller tokens of the listeners begin here.
pub const FIRST_PROXY_TOKEN: u64 = 1 << 20;
/// Poller tokens of the apps' connections begin here …
const FIRST_APP_TOKEN: u64 = FIRST_PROXY_TOKEN + (1 << 16);
/// … and end before this.
const TOKENS_END: u64 = 1 << 32;

/// How long an app may take to send its request. Longer: silent apps keep their slots. Chosen.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest request (bytes). Chosen, as for HTTP elsewhere.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// How long the tunnel and the server may take to connect; the server itself gives up after 20 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of checks for idle UDP targets. Longer: they stay for longer. Chosen.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Concurrent connections of apps. More: descriptors and memory. Chosen.
const MAX_APPS: usize = 4096;
/// Descriptors kept free for everything else. Chosen.
const RESERVED_FDS: u64 = 64;
/// Connections accepted for one event. More: longer iterations. Chosen.
const MAX_ACCEPTS_PER_EVENT: usize = 64;
/// The delay before the next accept when no descriptors are left. Shorter: busy waiting. Longer: apps wait.
/// Chosen.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// The shortest interval of warnings about that.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(30);

/// The protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// SOCKS5 (RFC 1928).
    Socks5,
    /// HTTP/1.1.
    Http,
}

/// The tunnel's streams and flows for apps.
pub trait ProxyTunnel: ByteStreams + DatagramFlows {
    /// Opens a stream to a target. Returns `None` if none can be opened now; [`StreamEvent::Allowed`]
    /// follows.
    fn open(&mut self, to: &Authority) -> Option<Self::Id>;

    /// Resets a stream; no events of it follow.
    fn abort(&mut self, id: Self::Id);
}

/// An event of the tunnel's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEvent<Id> {
    /// Streams can be opened again.
    Allowed,
    /// The server has connected.
    Opened(Id),
    /// The server could not connect.
    Failed(Id, ProxyError),
    /// The stream has bytes, or has ended.
    Readable(Id),
    /// The stream accepts bytes again.
    Writable(Id),
    /// The stream was reset.
    Gone(Id),
}

/// The result of parsing what an app sent.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestStep {
    /// The request is incomplete.
    Incomplete,
    /// Send these bytes and continue.
    Send(Bytes),
    /// Connect to `to`, and send `early` first.
    Connect {
        /// The target.
        to: Authority,
        /// The bytes for the target.
        early: BytesMut,
    },
    /// Open a UDP association.
    Associate,
    /// Send this answer, if not empty, and close. `why` is for the log.
    Refuse {
        /// The bytes for the app.
        answer: Bytes,
        /// The reason.
        why: String,
    },
}

struct Listener {
    acceptor: TcpAcceptor,
    protocol: Protocol,
}

struct App<Id> {
    /// The time of its timer; also in `timers`.
    due: Instant,
    since: Instant,
    /// The protocol of its responses.
    protocol: Protocol,
    /// The target, once the request is complete.
    to: Option<Authority>,
    stage: Stage<Id>,
}

enum Stage<Id> {
    ReadingRequest(RequestReader),
    /// Waits until the tunnel can open a stream.
    AwaitingStream(PendingConnect),
    Connecting(Id, PendingConnect),
    Open(Id, Splice),
    /// Has a UDP association with this socket token, as long as this connection is open.
    Associated(TcpSocket, u64),
    Refusing(Refusal),
}

/// Reads the request.
struct RequestReader {
    socket: TcpSocket,
    socks5: Socks5,
    bytes: BytesMut,
}

/// A request whose connection is not established.
struct PendingConnect {
    socket: TcpSocket,
    /// Sent to the app when connected.
    answer: Bytes,
    /// Sent to the target first.
    early: Bytes,
}

/// Sends a refusal.
struct Refusal {
    socket: TcpSocket,
    answer: Bytes,
}

/// The connections of apps.
pub struct Proxy<Id, Flow> {
    listeners: Vec<Listener>,
    /// Whether the poller watches the listeners.
    is_accepting: bool,
    /// When to accept again after descriptors ran out.
    accept_again_at: Option<Instant>,
    /// When the log last warned that none can be accepted.
    last_accept_warning: Option<Instant>,
    max_apps: usize,
    apps: HashMap<u64, App<Id>>,
    associations: Associations<Flow>,
    tokens: HashMap<Id, u64>,
    timers: BTreeSet<(Instant, u64)>,
    /// Connections that wait for a stream, in order.
    awaiting_stream: VecDeque<u64>,
    last_token: u64,
    buffers: SpliceBuffers,
}

impl<Id, Flow> Proxy<Id, Flow>
where
    Id: Copy + Eq + Hash + fmt::Debug,
    Flow: Copy + Eq + Hash + fmt::Debug,
{
    /// Opens the listeners.
    ///
    /// # Errors
    /// If an address is in use, or not of this machine.
    pub fn bind(listen: &[(Protocol, SocketAddr)], poller: &Poller) -> Result<Self, RunError> {
        let files = limits::raise_open_file_limit().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot raise the limit of open files");
            RESERVED_FDS + MAX_APPS as u64
        });
        let available_fds = usize::try_from(files.saturating_sub(RESERVED_FDS)).unwrap_or(usize::MAX);
        let mut listeners = Vec::with_capacity(listen.len());
        for ((protocol, local), token) in listen.iter().zip(FIRST_PROXY_TOKEN..FIRST_APP_TOKEN) {
            let acceptor = TcpAcceptor::bind(*local)?;
            let local = acceptor.local_addr().unwrap_or(*local);
            poller.add(&acceptor, token, Interest::Read).map_err(RunError::io("watch a listening socket"))?;
            tracing::info!(%local, ?protocol, "listening for apps");
            if !local.ip().is_loopback() {
                tracing::warn!(
                    %local,
                    "every host that reaches this address may use the tunnel: listen on 127.0.0.1 to allow only this machine"
                );
            }
            listeners.push(Listener { acceptor, protocol: *protocol });
        }
        Ok(Self {
            listeners,
            is_accepting: true,
            accept_again_at: None,
            last_accept_warning: None,
            max_apps: available_fds.clamp(1, MAX_APPS),
            apps: HashMap::new(),
            associations: Associations::new(),
            tokens: HashMap::new(),
            timers: BTreeSet::new(),
            awaiting_stream: VecDeque::new(),
            last_token: FIRST_APP_TOKEN,
            buffers: SpliceBuffers::default(),
        })
    }

    /// Handles an event of a socket, whose token is at least [`FIRST_PROXY_TOKEN`].
    pub fn on_socket_ready<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        event: Event,
    ) {
        if event.token < FIRST_APP_TOKEN {
            self.accept(cx, (event.token - FIRST_PROXY_TOKEN) as usize);
        } else if let Some(app) = self.apps.get_mut(&event.token) {
            match &mut app.stage {
                Stage::ReadingRequest(_) => self.read_request(cx, event.token),
                // Only errors and hang-ups are reported here: the app does not wait any more.
                Stage::AwaitingStream(_) | Stage::Connecting(..) => self.close_app(cx.streams, event.token),
                Stage::Open(id, _) => {
                    let id = *id;
                    self.move_bytes(cx, event.token, |splice, cx, buffers| {
                        splice.on_socket_ready(cx, event, id, buffers)
                    });
                }
                Stage::Refusing(_) => self.continue_refusal(cx, event.token),
                // SOCKS5 allows no further bytes on this connection, so the app has closed it or misbehaves.
                Stage::Associated(..) => self.close_app(cx.streams, event.token),
            }
        } else if self.associations.has(event.token) {
            self.associations.on_socket_ready(cx.now, cx.streams, event.token);
        }
        self.watch_listeners(cx.poller);
    }

    /// The connections whose request is complete.
    pub fn flows(&self) -> impl Iterator<Item = Connection<'_>> {
        self.apps.values().filter_map(|app| {
            let (socket, moved) = match &app.stage {
                Stage::AwaitingStream(pending) | Stage::Connecting(_, pending) => (&pending.socket, None),
                Stage::Open(_, splice) => (splice.socket(), Some(splice.transfer_state())),
                Stage::ReadingRequest(_) | Stage::Refusing(_) | Stage::Associated(..) => return None,
            };
            Some(Connection::of_app(socket, app.to.as_ref()?, app.since, moved))
        })
    }

    /// Handles an event of the tunnel.
    pub fn on_stream_event<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        event: StreamEvent<Id>,
    ) {
        let token = |id| self.tokens.get(&id).copied();
        match event {
            StreamEvent::Allowed => self.open_streams(cx.streams),
            StreamEvent::Opened(id) => {
                if let Some(token) = token(id) {
                    self.on_stream_opened(cx, token);
                }
            }
            StreamEvent::Failed(id, failure) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    self.refuse(cx, token, failure, failure_text(failure));
                }
            }
            StreamEvent::Readable(id) => {
                if let Some(token) = token(id) {
                    self.move_bytes(cx, token, |splice, cx, buffers| {
                        splice.on_stream_readable(cx, id, buffers)
                    });
                }
            }
            StreamEvent::Writable(id) => {
                if let Some(token) = token(id) {
                    self.move_bytes(cx, token, |splice, cx, buffers| splice.move_to_stream(cx, id, buffers));
                }
            }
            StreamEvent::Gone(id) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    let is_open =
                        self.apps.get(&token).is_some_and(|app| matches!(app.stage, Stage::Open(..)));
                    match is_open {
                        true => self.close_app(cx.streams, token),
                        false => {
                            let why = "the connection to the mpvpn server was lost";
                            self.refuse(cx, token, ProxyError::Other, why);
                        }
                    }
                }
            }
        }
        self.watch_listeners(cx.poller);
    }

    /// Delivers a payload from a target to its app.
    pub fn deliver_payload(&mut self, now: Instant, flow: Flow, payload: &[u8]) {
        self.associations.deliver_payload(now, flow, payload);
    }

    /// The server has refused or closed a UDP flow.
    pub fn on_flow_closed(&mut self, now: Instant, flow: Flow, refused: bool) {
        self.associations.on_flow_closed(now, flow, refused);
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due).into_iter().chain(self.accept_again_at).min()
    }

    /// Handles expired timers.
    pub fn handle_timeout<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, cx: &mut Context<'_, T>) {
        self.accept_again_at = self.accept_again_at.filter(|at| cx.now < *at);
        while let Some(&(_, token)) = self.timers.first().filter(|(due, _)| *due <= cx.now) {
            let Some(app) = self.apps.get(&token) else {
                self.timers.pop_first();
                continue;
            };
            match &app.stage {
                Stage::ReadingRequest(_) => match app.protocol {
                    Protocol::Socks5 => self.close_app(cx.streams, token),
                    Protocol::Http => {
                        let answer = http::response(408, "no request came within 10 s");
                        self.send_refusal(cx, token, answer);
                    }
                },
                Stage::AwaitingStream(_) => {
                    let why = "the mpvpn server is not reached";
                    self.refuse(cx, token, ProxyError::TimedOut, why);
                }
                Stage::Connecting(..) => {
                    let why = "the mpvpn server does not answer";
                    self.refuse(cx, token, ProxyError::TimedOut, why);
                }
                Stage::Open(_, splice) => match splice.expires() {
                    expires if expires <= cx.now => self.close_app(cx.streams, token),
                    expires => self.set_timer(token, expires),
                },
                Stage::Refusing(_) => self.close_app(cx.streams, token),
                Stage::Associated(_, socket) => {
                    let socket = *socket;
                    self.associations.close_idle_targets(cx.now, cx.streams, socket);
                    self.set_timer(token, cx.now + IDLE_CHECK_INTERVAL);
                }
            }
        }
        self.watch_listeners(cx.poller);
    }

    /// Resets all connections.
    pub fn end(&mut self) {
        for (_, app) in self.apps.drain() {
            if let Stage::Open(_, splice) = app.stage {
                splice.reset();
            }
        }
        self.associations.end();
        self.tokens.clear();
        self.timers.clear();
        self.awaiting_stream.clear();
    }

    fn accept<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, cx: &mut Context<'_, T>, listener: usize) {
        for _ in 0..MAX_ACCEPTS_PER_EVENT {
            let Some(listener) = self.listeners.get(listener) else { return };
            if self.apps.len() >= self.max_apps {
                return;
            }
            let protocol = listener.protocol;
            let socket = match listener.acceptor.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    if self
                        .last_accept_warning
                        .is_none_or(|at| cx.now.saturating_duration_since(at) >= ACCEPT_WARNING_INTERVAL)
                    {
                        self.last_accept_warning = Some(cx.now);
                        tracing::warn!(%error, "cannot accept connections of apps, which wait until descriptors are free");
                    }
                    self.accept_again_at = Some(cx.now + ACCEPT_RETRY_DELAY);
                    return;
                }
            };
            let token = self.free_token();
            if let Err(error) = cx.poller.add(&socket, token, Interest::Read) {
                tracing::warn!(%error, "cannot register the connection of an app with the poller");
                continue;
            }
            let reader = RequestReader { socket, socks5: Socks5::default(), bytes: BytesMut::new() };
            let due = cx.now + REQUEST_TIMEOUT;
            let app = App { due, since: cx.now, protocol, to: None, stage: Stage::ReadingRequest(reader) };
            self.apps.insert(token, app);
            self.timers.insert((due, token));
            // Most apps have sent their request by now.
            self.read_request(cx, token);
        }
    }

    /// The token that was unused for longest: stale events of closed connections may still arrive.
    fn free_token(&mut self) -> u64 {
        loop {
            self.last_token =
                if self.last_token + 1 < TOKENS_END { self.last_token + 1 } else { FIRST_APP_TOKEN };
            if !self.apps.contains_key(&self.last_token) && !self.associations.has(self.last_token) {
                return self.last_token;
            }
        }
    }

    /// Stops watching the listeners while no connection can be accepted, so that new ones wait in the kernel.
    fn watch_listeners(&mut self, poller: &Poller) {
        let is_accepting = self.apps.len() < self.max_apps && self.accept_again_at.is_none();
        if is_accepting == self.is_accepting {
            return;
        }
        self.is_accepting = is_accepting;
        let interest = if is_accepting { Interest::Read } else { Interest::Nothing };
        for (listener, token) in self.listeners.iter().zip(FIRST_PROXY_TOKEN..) {
            if let Err(error) = poller.modify(&listener.acceptor, token, interest) {
                tracing::warn!(%error, "cannot register a listening socket with the poller");
            }
        }
    }

    /// Reads an app's request.
    fn read_request<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, cx: &mut Context<'_, T>, token: u64) {
        loop {
            let Some(app) = self.apps.get_mut(&token) else { return };
            let Stage::ReadingRequest(reader) = &mut app.stage else { return };
            let free_bytes = MAX_REQUEST_BYTES - reader.bytes.len();
            if free_bytes == 0 {
                let why = "the request is larger than 16 KiB";
                return match app.protocol {
                    Protocol::Socks5 => self.close_app(cx.streams, token),
                    Protocol::Http => self.send_refusal(cx, token, http::response(431, why)),
                };
            }
            reader.bytes.reserve(free_bytes.min(1024));
            match reader.socket.read(&mut reader.bytes, free_bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => return self.close_app(cx.streams, token),
                Ok(_) => {}
            }
            loop {
                let step = match app.protocol {
                    Protocol::Socks5 => reader.socks5.step(&mut reader.bytes),
                    Protocol::Http => http::step(&mut reader.bytes),
                };
                match step {
                    RequestStep::Incomplete => break,
                    RequestStep::Send(bytes) => {
                        // A new connection accepts a few bytes; otherwise close it.
                        let written = reader.socket.write(&[IoSlice::new(&bytes)]);
                        if !written.is_ok_and(|count| count == bytes.len()) {
                            return self.close_app(cx.streams, token);
                        }
                    }
                    RequestStep::Connect { to, early } => {
                        return self.connect(cx, token, to, early);
                    }
                    RequestStep::Associate => return self.associate(cx, token),
                    RequestStep::Refuse { answer, why } => {
                        tracing::debug!(why, "refused an app");
                        return self.send_refusal(cx, token, answer);
                    }
                }
            }
        }
    }

    /// Opens a UDP association for an app.
    fn associate<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, cx: &mut Context<'_, T>, token: u64) {
        let socket_token = self.free_token();
        let Some(mut app) = self.remove(token) else { return };
        let Stage::ReadingRequest(reader) = app.stage else { return };
        let ends =
            reader.socket.local_addr().and_then(|local| Ok((local.ip(), reader.socket.peer_addr()?.ip())));
        let opened = ends.and_then(|(local, from)| {
            self.associations.open(socket_token, local.to_canonical(), from.to_canonical(), |socket| {
                cx.poller.add(socket, socket_token, Interest::Read)
            })
        });
        let (answer, stays) = match opened {
            Ok(at) => (socks5::associate_reply(at), true),
            Err(error) => {
                tracing::warn!(%error, "cannot open a UDP socket for an app");
                (Reply::GeneralFailure.bytes(), false)
            }
        };
        if !stays {
            app.stage = Stage::ReadingRequest(reader);
            self.insert(token, app);
            return self.send_refusal(cx, token, answer);
        }
        let written = reader.socket.write(&[IoSlice::new(&answer)]);
        app.stage = Stage::Associated(reader.socket, socket_token);
        self.insert(token, App { due: cx.now + IDLE_CHECK_INTERVAL, ..app });
        if !written.is_ok_and(|count| count == answer.len()) {
            self.close_app(cx.streams, token);
        }
    }

    /// Waits for a stream to the target of a complete request.
    fn connect<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
        to: Authority,
        mut early: BytesMut,
    ) {
        let Some(mut app) = self.remove(token) else { return };
        let Stage::ReadingRequest(reader) = app.stage else { return };
        let answer = match app.protocol {
            Protocol::Socks5 => Reply::Succeeded.bytes(),
            Protocol::Http if early.is_empty() => Bytes::from_static(http::ESTABLISHED),
            Protocol::Http => Bytes::new(),
        };
        early.unsplit(reader.bytes);
        app.to = Some(to);
        let pending = PendingConnect { socket: reader.socket, answer, early: early.freeze() };
        if cx.poller.modify(&pending.socket, token, Interest::Nothing).is_err() {
            return;
        }
        app.stage = Stage::AwaitingStream(pending);
        self.insert(token, App { due: cx.now + CONNECT_TIMEOUT, ..app });
        self.awaiting_stream.push_back(token);
        self.open_streams(cx.streams);
    }

    /// Opens streams for waiting connections, as far as the tunnel permits.
    fn open_streams<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, tunnel: &mut T) {
        while let Some(&token) = self.awaiting_stream.front() {
            let Some(app) = self.apps.get(&token) else {
                self.awaiting_stream.pop_front();
                continue;
            };
            if let (Stage::AwaitingStream(_), Some(to)) = (&app.stage, &app.to) {
                let Some(id) = tunnel.open(to) else { return };
                tracing::debug!(?id, %to, "requested a connection");
                let Some(mut app) = self.remove(token) else { return };
                if let Stage::AwaitingStream(pending) = app.stage {
                    app.stage = Stage::Connecting(id, pending);
                    self.tokens.insert(id, token);
                    self.insert(token, app);
                }
            }
            self.awaiting_stream.pop_front();
        }
    }

    /// Starts to move bytes of an established connection.
    fn on_stream_opened<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
    ) {
        let Some(mut app) = self.remove(token) else { return };
        let Stage::Connecting(id, pending) = app.stage else { return self.insert(token, app) };
        let splice = Splice::new(cx.now, pending.socket, token, Interest::Nothing)
            .with_prefix(pending.answer, pending.early);
        app.due = splice.expires();
        app.stage = Stage::Open(id, splice);
        self.insert(token, app);
        self.move_bytes(cx, token, |splice, cx, buffers| {
            splice.move_to_socket(cx, id, buffers)?;
            splice.move_to_stream(cx, id, buffers)
        });
    }

    /// Moves bytes with `transfer`, then updates poller and timer, or closes the connection.
    fn move_bytes<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        cx: &mut Context<'_, T>,
        token: u64,
        transfer: impl FnOnce(&mut Splice, &mut Context<'_, T>, &mut SpliceBuffers) -> io::Result<()>,
    ) {
        let Some(app) = self.apps.get_mut(&token) else { return };
        let Stage::Open(id, splice) = &mut app.stage else { return };
        let moved = transfer(splice, cx, &mut self.buffers).and_then(|()| splice.update_interest(cx.poller));
        match moved {
            Err(error) => {
                tracing::debug!(?id, %error, "the connection of an app broke");
                self.close_app(cx.streams, token);
            }
            Ok(()) if splice.has_ended() => {
                self.tokens.remove(id);
                self.remove(token);
            }
            Ok(()) => {
                // A timer that is set too early is set again when it fires; only an earlier deadline (after
                // one half has closed) must be set now.
                let (expires, due) = (splice.expires(), app.due);
                if expires < due.max(cx.now) {
                    self.set_timer(token, expires);
                }
            }
        }
    }

    fn remove(&mut self, token: u64) -> Option<App<Id>> {
        let app = self.apps.remove(&token)?;
        self.timers.remove(&(app.due, token));
        Some(app)
    }

    fn insert(&mut self, token: u64, app: App<Id>) {
        self.timers.insert((app.due, token));
        self.apps.insert(token, app);
    }

    /// Sets the timer of a connection.
    fn set_timer(&mut self, token: u64, due: Instant) {
        if let Some(app) = self.remove(token) {
            self.insert(token, App { due, ..app });
        }
    }
}

#[cfg(test)]
mod tests;
