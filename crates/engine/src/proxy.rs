//! Proxies for the apps of this machine: SOCKS5 and HTTP. Each connection of an app travels as a stream, and the server
//! makes the connection to where the app wants, whose name it resolves.
//!
//! UDP of apps (SOCKS5) travels as datagrams.
//!
//! In: where to listen, sockets that are ready, what the tunnel tells of streams ([`StreamEvent`]), time. Out: calls of
//! [`ProxyTunnel`]. `socks5` and `http` understand what apps want, [`Splice`] moves bytes, `associate` datagrams.
//!
//! Always holds:
//! - An app gets one answer, which says why if there is no connection; what it sent before comes first of all bytes.
//! - It has 10 s and 16 KiB to say what it wants. Until it has, and while the tunnel makes the connection, nothing more
//!   is read from it.
//! - Connections are bounded; further ones wait in the kernel.
//! - A connection whose stream has broken is reset, and the other way round.

mod associations;
mod http;
mod refusal;
mod socks5;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fmt,
    hash::Hash,
    io::{self, IoSlice},
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mpvpn_masque::connect::{Authority, ProxyError};
use mpvpn_os::{
    TcpAcceptor, TcpSocket, limits,
    poll::{Event, Interest, Poller},
};

use crate::{
    EngineError,
    flows::Connection,
    splice::{ByteStreams, Splice, SpliceBuffers},
};
use associations::Associations;
pub(crate) use associations::DatagramFlows;
use refusal::failure_text;
use socks5::{Reply, Socks5};

/// The tokens of its listeners are this or more.
pub(crate) const FIRST_PROXY_TOKEN: u64 = 1 << 20;
/// Those of its connections are this or more …
const FIRST_APP_TOKEN: u64 = FIRST_PROXY_TOKEN + (1 << 16);
/// … and less than this.
const TOKENS_END: u64 = 1 << 32;

/// An app that has not said after so long what it wants is left.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of what it says.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// A connection that does not stand after so long is given up. The server itself gives up earlier.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks for targets of an association that are silent.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Connections at once.
const MAX_APPS: usize = 4096;
/// Descriptors for everything else.
const RESERVED_FDS: u64 = 64;
/// Connections that are accepted a turn.
const MAX_ACCEPTS_PER_EVENT: usize = 64;
/// With no descriptors left, it is tried again after this time.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Between two lines of the log about that.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(30);

/// What a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Socks5,
    Http,
}

/// What carries the bytes of apps.
pub(crate) trait ProxyTunnel: ByteStreams + DatagramFlows {
    /// Asks for a connection. `None` if there can be none now: [`StreamEvent::Allowed`] follows.
    fn open(&mut self, to: &Authority) -> Option<Self::Id>;

    /// Breaks a stream off; nothing more is told about it.
    fn abort(&mut self, id: Self::Id);
}

/// What a tunnel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEvent<Id> {
    /// Streams that could not be opened may be now.
    Allowed,
    /// The connection stands.
    Opened(Id),
    /// There is none.
    Failed(Id, ProxyError),
    /// The stream has something to read.
    Readable(Id),
    /// It has room again.
    Writable(Id),
    /// It has broken.
    Gone(Id),
}

/// What is to be done about what an app said.
#[derive(Debug, PartialEq, Eq)]
enum RequestStep {
    /// It has not said all yet.
    Incomplete,
    /// It waits for this.
    Send(Bytes),
    /// It wants to be connected, and `early` is what the destination gets first.
    Connect { to: Authority, early: BytesMut },
    /// It wants to send and receive datagrams.
    Associate,
    /// It gets this answer, if any, and is left.
    Refuse { answer: Bytes, why: String },
}

struct Listener {
    acceptor: TcpAcceptor,
    protocol: Protocol,
}

struct App<Id> {
    /// The same time is in the timers.
    due: Instant,
    since: Instant,
    /// How a refusal is said.
    protocol: Protocol,
    /// What it wants, once it has said so.
    to: Option<Authority>,
    stage: Stage<Id>,
}

enum Stage<Id> {
    ReadingRequest(RequestReader),
    /// There is no stream for it yet.
    AwaitingStream(PendingConnect),
    Connecting(Id, PendingConnect),
    Open(Id, Splice),
    /// It has a socket for its datagrams, with this token, for as long as it does not close this connection.
    Associated(TcpSocket, u64),
    Refusing(Refusal),
}

/// It says what it wants.
struct RequestReader {
    socket: TcpSocket,
    socks5: Socks5,
    bytes: BytesMut,
}

/// What it wants.
struct PendingConnect {
    socket: TcpSocket,
    /// What it hears when it is connected.
    answer: Bytes,
    /// What the destination gets first.
    early: Bytes,
}

/// It is refused, and reads that.
struct Refusal {
    socket: TcpSocket,
    answer: Bytes,
}

/// The connections of apps.
pub(crate) struct Proxy<Id, Flow> {
    listeners: Vec<Listener>,
    /// Whether listeners are watched.
    is_accepting: bool,
    /// When they are again.
    accept_again_at: Option<Instant>,
    /// When the log said last that none can be accepted.
    last_accept_warning: Option<Instant>,
    max_apps: usize,
    apps: HashMap<u64, App<Id>>,
    associations: Associations<Flow>,
    tokens: HashMap<Id, u64>,
    timers: BTreeSet<(Instant, u64)>,
    /// Those that wait for a stream, in order.
    awaiting_stream: VecDeque<u64>,
    last_token: u64,
    buffers: SpliceBuffers,
}

impl<Id, Flow> Proxy<Id, Flow>
where
    Id: Copy + Eq + Hash + fmt::Debug,
    Flow: Copy + Eq + Hash + fmt::Debug,
{
    /// Listens.
    ///
    /// # Errors
    /// If an address is taken, or not of this machine.
    pub(crate) fn bind(listen: &[(Protocol, SocketAddr)], poller: &Poller) -> Result<Self, EngineError> {
        let files = limits::raise_open_file_limit().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot raise the limit of open files");
            RESERVED_FDS + MAX_APPS as u64
        });
        let available_fds = usize::try_from(files.saturating_sub(RESERVED_FDS)).unwrap_or(usize::MAX);
        let mut listeners = Vec::with_capacity(listen.len());
        for ((protocol, local), token) in listen.iter().zip(FIRST_PROXY_TOKEN..FIRST_APP_TOKEN) {
            let acceptor = TcpAcceptor::bind(*local)?;
            let local = acceptor.local_addr().unwrap_or(*local);
            poller
                .add(&acceptor, token, Interest::Read)
                .map_err(EngineError::io("watch a listening socket"))?;
            tracing::info!(%local, ?protocol, "listening for apps");
            if !local.ip().is_loopback() {
                tracing::warn!(
                    %local,
                    "everybody who reaches this address may use the tunnel; 127.0.0.1 is for this machine only"
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

    /// A socket with a token from [`FIRST_PROXY_TOKEN`] upwards is ready.
    pub(crate) fn on_socket_ready<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        event: Event,
    ) {
        if event.token < FIRST_APP_TOKEN {
            self.accept(now, poller, tunnel, (event.token - FIRST_PROXY_TOKEN) as usize);
        } else if let Some(app) = self.apps.get_mut(&event.token) {
            match &mut app.stage {
                Stage::ReadingRequest(_) => self.read_request(now, poller, tunnel, event.token),
                // Only errors and hang-ups are told: nobody waits for the answer any more.
                Stage::AwaitingStream(_) | Stage::Connecting(..) => self.close_app(tunnel, event.token),
                Stage::Open(id, _) => {
                    let id = *id;
                    self.move_bytes(now, poller, tunnel, event.token, |splice, tunnel, buffers| {
                        splice.on_socket_ready(now, event, tunnel, id, buffers)
                    });
                }
                Stage::Refusing(_) => self.continue_refusal(poller, tunnel, event.token),
                // It has nothing more to say, so it has closed, or is of no use.
                Stage::Associated(..) => self.close_app(tunnel, event.token),
            }
        } else if self.associations.has(event.token) {
            self.associations.on_socket_ready(now, tunnel, event.token);
        }
        self.watch_listeners(poller);
    }

    /// The connections of apps that have said what they want.
    pub(crate) fn flows(&self) -> impl Iterator<Item = Connection<'_>> {
        self.apps.values().filter_map(|app| {
            let (socket, moved) = match &app.stage {
                Stage::AwaitingStream(pending) | Stage::Connecting(_, pending) => (&pending.socket, None),
                Stage::Open(_, splice) => (splice.socket(), Some(splice.transfer_state())),
                Stage::ReadingRequest(_) | Stage::Refusing(_) | Stage::Associated(..) => return None,
            };
            Some(Connection::of_app(socket, app.to.as_ref()?, app.since, moved))
        })
    }

    /// Takes what the tunnel tells.
    pub(crate) fn on_stream_event<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        event: StreamEvent<Id>,
    ) {
        let token = |id| self.tokens.get(&id).copied();
        match event {
            StreamEvent::Allowed => self.open_streams(tunnel),
            StreamEvent::Opened(id) => {
                if let Some(token) = token(id) {
                    self.on_stream_opened(now, poller, tunnel, token);
                }
            }
            StreamEvent::Failed(id, failure) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    self.refuse(now, poller, tunnel, token, failure, failure_text(failure));
                }
            }
            StreamEvent::Readable(id) => {
                if let Some(token) = token(id) {
                    self.move_bytes(now, poller, tunnel, token, |splice, tunnel, buffers| {
                        splice.on_stream_readable(now, tunnel, id, buffers)
                    });
                }
            }
            StreamEvent::Writable(id) => {
                if let Some(token) = token(id) {
                    self.move_bytes(now, poller, tunnel, token, |splice, tunnel, buffers| {
                        splice.move_to_stream(now, tunnel, id, buffers)
                    });
                }
            }
            StreamEvent::Gone(id) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    let is_open =
                        self.apps.get(&token).is_some_and(|app| matches!(app.stage, Stage::Open(..)));
                    match is_open {
                        true => self.close_app(tunnel, token),
                        false => {
                            let why = "the connection to the mpvpn server was lost";
                            self.refuse(now, poller, tunnel, token, ProxyError::Other, why);
                        }
                    }
                }
            }
        }
        self.watch_listeners(poller);
    }

    /// A payload has come from a target.
    pub(crate) fn deliver_payload(&mut self, now: Instant, flow: Flow, payload: &[u8]) {
        self.associations.deliver_payload(now, flow, payload);
    }

    /// The server has refused a flow of datagrams, or ended it.
    pub(crate) fn on_flow_closed(&mut self, now: Instant, flow: Flow, refused: bool) {
        self.associations.on_flow_closed(now, flow, refused);
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due).into_iter().chain(self.accept_again_at).min()
    }

    /// Time has passed.
    pub(crate) fn handle_timeout<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
    ) {
        self.accept_again_at = self.accept_again_at.filter(|at| now < *at);
        while let Some(&(_, token)) = self.timers.first().filter(|(due, _)| *due <= now) {
            let Some(app) = self.apps.get(&token) else {
                self.timers.pop_first();
                continue;
            };
            match &app.stage {
                Stage::ReadingRequest(_) => match app.protocol {
                    Protocol::Socks5 => self.close_app(tunnel, token),
                    Protocol::Http => {
                        let answer = http::response(408, "no request came within 10 s");
                        self.send_refusal(now, poller, tunnel, token, answer);
                    }
                },
                Stage::AwaitingStream(_) => {
                    let why = "the mpvpn server is not reached";
                    self.refuse(now, poller, tunnel, token, ProxyError::TimedOut, why);
                }
                Stage::Connecting(..) => {
                    let why = "the mpvpn server does not answer";
                    self.refuse(now, poller, tunnel, token, ProxyError::TimedOut, why);
                }
                Stage::Open(_, splice) => match splice.expires() {
                    expires if expires <= now => self.close_app(tunnel, token),
                    expires => self.set_timer(token, expires),
                },
                Stage::Refusing(_) => self.close_app(tunnel, token),
                Stage::Associated(_, socket) => {
                    let socket = *socket;
                    self.associations.close_idle_targets(now, tunnel, socket);
                    self.set_timer(token, now + IDLE_CHECK_INTERVAL);
                }
            }
        }
        self.watch_listeners(poller);
    }

    /// Breaks all connections.
    pub(crate) fn end(&mut self) {
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

    fn accept<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        listener: usize,
    ) {
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
                        .is_none_or(|at| now.saturating_duration_since(at) >= ACCEPT_WARNING_INTERVAL)
                    {
                        self.last_accept_warning = Some(now);
                        tracing::warn!(%error, "cannot accept connections of apps, they wait");
                    }
                    self.accept_again_at = Some(now + ACCEPT_RETRY_DELAY);
                    return;
                }
            };
            let token = self.free_token();
            if let Err(error) = poller.add(&socket, token, Interest::Read) {
                tracing::warn!(%error, "cannot watch a connection of an app");
                continue;
            }
            let reader = RequestReader { socket, socks5: Socks5::default(), bytes: BytesMut::new() };
            let due = now + REQUEST_TIMEOUT;
            let app = App { due, since: now, protocol, to: None, stage: Stage::ReadingRequest(reader) };
            self.apps.insert(token, app);
            self.timers.insert((due, token));
            // Most have said it by now.
            self.read_request(now, poller, tunnel, token);
        }
    }

    /// A token that nobody had for as long as possible: events of connections that are over may still come.
    fn free_token(&mut self) -> u64 {
        loop {
            self.last_token =
                if self.last_token + 1 < TOKENS_END { self.last_token + 1 } else { FIRST_APP_TOKEN };
            if !self.apps.contains_key(&self.last_token) && !self.associations.has(self.last_token) {
                return self.last_token;
            }
        }
    }

    /// While there is no place for another connection, those that come wait in the kernel.
    fn watch_listeners(&mut self, poller: &Poller) {
        let is_accepting = self.apps.len() < self.max_apps && self.accept_again_at.is_none();
        if is_accepting == self.is_accepting {
            return;
        }
        self.is_accepting = is_accepting;
        let interest = if is_accepting { Interest::Read } else { Interest::Nothing };
        for (listener, token) in self.listeners.iter().zip(FIRST_PROXY_TOKEN..) {
            if let Err(error) = poller.modify(&listener.acceptor, token, interest) {
                tracing::warn!(%error, "cannot watch a listening socket");
            }
        }
    }

    /// Reads what an app wants.
    fn read_request<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        loop {
            let Some(app) = self.apps.get_mut(&token) else { return };
            let Stage::ReadingRequest(reader) = &mut app.stage else { return };
            let free_bytes = MAX_REQUEST_BYTES - reader.bytes.len();
            if free_bytes == 0 {
                let why = "it takes more than 16 KiB to say what it wants";
                return match app.protocol {
                    Protocol::Socks5 => self.close_app(tunnel, token),
                    Protocol::Http => self.send_refusal(now, poller, tunnel, token, http::response(431, why)),
                };
            }
            reader.bytes.reserve(free_bytes.min(1024));
            match reader.socket.read(&mut reader.bytes, free_bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => return self.close_app(tunnel, token),
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
                        // A new connection takes a few bytes; else something is wrong with it.
                        let written = reader.socket.write(&[IoSlice::new(&bytes)]);
                        if !written.is_ok_and(|count| count == bytes.len()) {
                            return self.close_app(tunnel, token);
                        }
                    }
                    RequestStep::Connect { to, early } => {
                        return self.connect(now, poller, tunnel, token, to, early);
                    }
                    RequestStep::Associate => return self.associate(now, poller, tunnel, token),
                    RequestStep::Refuse { answer, why } => {
                        tracing::debug!(why, "an app is refused");
                        return self.send_refusal(now, poller, tunnel, token, answer);
                    }
                }
            }
        }
    }

    /// An app wants to send and receive datagrams.
    fn associate<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        let socket_token = self.free_token();
        let Some(mut app) = self.remove(token) else { return };
        let Stage::ReadingRequest(reader) = app.stage else { return };
        let ends =
            reader.socket.local_addr().and_then(|local| Ok((local.ip(), reader.socket.peer_addr()?.ip())));
        let opened = ends.and_then(|(local, from)| {
            self.associations.open(socket_token, local.to_canonical(), from.to_canonical(), |socket| {
                poller.add(socket, socket_token, Interest::Read)
            })
        });
        let (answer, stays) = match opened {
            Ok(at) => (socks5::associate_reply(at), true),
            Err(error) => {
                tracing::warn!(%error, "no socket for the datagrams of an app");
                (Reply::GeneralFailure.bytes(), false)
            }
        };
        if !stays {
            app.stage = Stage::ReadingRequest(reader);
            self.insert(token, app);
            return self.send_refusal(now, poller, tunnel, token, answer);
        }
        let written = reader.socket.write(&[IoSlice::new(&answer)]);
        app.stage = Stage::Associated(reader.socket, socket_token);
        self.insert(token, App { due: now + IDLE_CHECK_INTERVAL, ..app });
        if !written.is_ok_and(|count| count == answer.len()) {
            self.close_app(tunnel, token);
        }
    }

    /// It is known what an app wants.
    fn connect<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
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
        if poller.modify(&pending.socket, token, Interest::Nothing).is_err() {
            return;
        }
        app.stage = Stage::AwaitingStream(pending);
        self.insert(token, App { due: now + CONNECT_TIMEOUT, ..app });
        self.awaiting_stream.push_back(token);
        self.open_streams(tunnel);
    }

    /// Opens streams for those that wait, as far as the tunnel allows it.
    fn open_streams<T: ProxyTunnel<Id = Id, Flow = Flow>>(&mut self, tunnel: &mut T) {
        while let Some(&token) = self.awaiting_stream.front() {
            let Some(app) = self.apps.get(&token) else {
                self.awaiting_stream.pop_front();
                continue;
            };
            if let (Stage::AwaitingStream(_), Some(to)) = (&app.stage, &app.to) {
                let Some(id) = tunnel.open(to) else { return };
                tracing::debug!(?id, %to, "asked for a connection");
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

    /// The connection that an app wants stands.
    fn on_stream_opened<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        let Some(mut app) = self.remove(token) else { return };
        let Stage::Connecting(id, pending) = app.stage else { return self.insert(token, app) };
        let splice = Splice::new(now, pending.socket, token, Interest::Nothing)
            .with_prefix(pending.answer, pending.early);
        app.due = splice.expires();
        app.stage = Stage::Open(id, splice);
        self.insert(token, app);
        self.move_bytes(now, poller, tunnel, token, |splice, tunnel, buffers| {
            splice.move_to_socket(now, tunnel, id, buffers)?;
            splice.move_to_stream(now, tunnel, id, buffers)
        });
    }

    /// Moves bytes of a connection that stands, and sees what has become of it.
    fn move_bytes<T: ProxyTunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
        transfer: impl FnOnce(&mut Splice, &mut T, &mut SpliceBuffers) -> io::Result<()>,
    ) {
        let Some(app) = self.apps.get_mut(&token) else { return };
        let Stage::Open(id, splice) = &mut app.stage else { return };
        let moved = transfer(splice, tunnel, &mut self.buffers).and_then(|()| splice.update_interest(poller));
        match moved {
            Err(error) => {
                tracing::debug!(?id, %error, "a connection of an app broke");
                self.close_app(tunnel, token);
            }
            Ok(()) if splice.has_ended() => {
                self.tokens.remove(id);
                self.remove(token);
            }
            Ok(()) => {
                // The timer that is set for a later time finds out by itself; half a connection has less.
                let (expires, due) = (splice.expires(), app.due);
                if expires < due.max(now) {
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
