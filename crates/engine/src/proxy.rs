//! Proxies for the apps of this machine: SOCKS5 and HTTP. Each connection of an app travels as a stream, and the server
//! makes the connection to where the app wants, whose name it resolves.
//!
//! UDP of apps (SOCKS5) travels as datagrams.
//!
//! In: where to listen, sockets that are ready, what the tunnel tells of streams ([`News`]), time. Out: calls of
//! [`Tunnel`]. `socks5` and `http` understand what apps want, [`Pipe`] moves bytes, `associate` datagrams.
//!
//! Always holds:
//! - An app gets one answer, which says why if there is no connection; what it sent before comes first of all bytes.
//! - It has 10 s and 16 KiB to say what it wants. Until it has, and while the tunnel makes the connection, nothing more
//!   is read from it.
//! - Connections are bounded; further ones wait in the kernel.
//! - A connection whose stream has broken is reset, and the other way round.

mod associate;
mod http;
mod leaving;
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
    pipe::{ByteStreams, Pipe, Scratch},
};
use associate::Associations;
pub(crate) use associate::Datagrams;
use leaving::words;
use socks5::{Reply, Socks5};

/// The tokens of its listeners are this or more.
pub(crate) const PROXY: u64 = 1 << 20;
/// Those of its connections are this or more …
const APPS: u64 = PROXY + (1 << 16);
/// … and less than this.
const END: u64 = 1 << 32;

/// An app that has not said after so long what it wants is left.
const ASKING: Duration = Duration::from_secs(10);
/// Bytes of what it says.
const HEAD: usize = 16 << 10;
/// A connection that does not stand after so long is given up. The server itself gives up earlier.
const CONNECTING: Duration = Duration::from_secs(30);
/// Between two looks for targets of an association that are silent.
const SWEEP: Duration = Duration::from_secs(30);
/// Connections at once.
const MOST_APPS: usize = 4096;
/// Descriptors for everything else.
const RESERVED: u64 = 64;
/// Connections that are accepted a turn.
const ACCEPTS: usize = 64;
/// With no descriptors left, it is tried again after this time.
const PAUSE: Duration = Duration::from_millis(200);

/// Between two lines of the log about that.
const COMPLAINTS: Duration = Duration::from_secs(30);

/// What a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Socks5,
    Http,
}

/// What carries the bytes of apps.
pub(crate) trait Tunnel: ByteStreams + Datagrams {
    /// Asks for a connection. `None` if there can be none now: [`News::Allowed`] follows.
    fn open(&mut self, to: &Authority) -> Option<Self::Id>;

    /// Breaks a stream off; nothing more is told about it.
    fn abort(&mut self, id: Self::Id);
}

/// What a tunnel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News<Id> {
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
enum Step {
    /// It has not said all yet.
    More,
    /// It waits for this.
    Say(Bytes),
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
    Asking(Asking),
    /// There is no stream for it yet.
    Waiting(Wish),
    Connecting(Id, Wish),
    Open(Id, Pipe),
    /// It has a socket for its datagrams, with this token, for as long as it does not close this connection.
    Associated(TcpSocket, u64),
    Leaving(Leaving),
}

/// It says what it wants.
struct Asking {
    socket: TcpSocket,
    socks5: Socks5,
    bytes: BytesMut,
}

/// What it wants.
struct Wish {
    socket: TcpSocket,
    /// What it hears when it is connected.
    answer: Bytes,
    /// What the destination gets first.
    early: Bytes,
}

/// It is refused, and reads that.
struct Leaving {
    socket: TcpSocket,
    answer: Bytes,
}

/// The connections of apps.
pub(crate) struct Proxy<Id, Flow> {
    listeners: Vec<Listener>,
    /// Whether listeners are watched.
    listens: bool,
    /// When they are again.
    resumes: Option<Instant>,
    /// When the log said last that none can be accepted.
    complained: Option<Instant>,
    most: usize,
    apps: HashMap<u64, App<Id>>,
    associations: Associations<Flow>,
    tokens: HashMap<Id, u64>,
    timers: BTreeSet<(Instant, u64)>,
    /// Those that wait for a stream, in order.
    waiting: VecDeque<u64>,
    last: u64,
    scratch: Scratch,
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
            RESERVED + MOST_APPS as u64
        });
        let room = usize::try_from(files.saturating_sub(RESERVED)).unwrap_or(usize::MAX);
        let mut listeners = Vec::with_capacity(listen.len());
        for ((protocol, local), token) in listen.iter().zip(PROXY..APPS) {
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
            listens: true,
            resumes: None,
            complained: None,
            most: room.clamp(1, MOST_APPS),
            apps: HashMap::new(),
            associations: Associations::new(),
            tokens: HashMap::new(),
            timers: BTreeSet::new(),
            waiting: VecDeque::new(),
            last: APPS,
            scratch: Scratch::default(),
        })
    }

    /// A socket with a token from [`PROXY`] upwards is ready.
    pub(crate) fn ready<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        event: Event,
    ) {
        if event.token < APPS {
            self.accept(now, poller, tunnel, (event.token - PROXY) as usize);
        } else if let Some(app) = self.apps.get_mut(&event.token) {
            match &mut app.stage {
                Stage::Asking(_) => self.listen_to(now, poller, tunnel, event.token),
                // Only errors and hang-ups are told: nobody waits for the answer any more.
                Stage::Waiting(_) | Stage::Connecting(..) => self.leave_now(tunnel, event.token),
                Stage::Open(id, _) => {
                    let id = *id;
                    self.pump(now, poller, tunnel, event.token, |pipe, tunnel, scratch| {
                        pipe.ready(now, event, tunnel, id, scratch)
                    });
                }
                Stage::Leaving(_) => self.say_good_bye(poller, tunnel, event.token),
                // It has nothing more to say, so it has closed, or is of no use.
                Stage::Associated(..) => self.leave_now(tunnel, event.token),
            }
        } else if self.associations.has(event.token) {
            self.associations.ready(now, tunnel, event.token);
        }
        self.watch_listeners(poller);
    }

    /// The connections of apps that have said what they want.
    pub(crate) fn flows(&self) -> impl Iterator<Item = Connection<'_>> {
        self.apps.values().filter_map(|app| {
            let (socket, moved) = match &app.stage {
                Stage::Waiting(wish) | Stage::Connecting(_, wish) => (&wish.socket, None),
                Stage::Open(_, pipe) => (pipe.socket(), Some(pipe.moved())),
                Stage::Asking(_) | Stage::Leaving(_) | Stage::Associated(..) => return None,
            };
            Some(Connection::of_app(socket, app.to.as_ref()?, app.since, moved))
        })
    }

    /// Takes what the tunnel tells.
    pub(crate) fn handle<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        news: News<Id>,
    ) {
        let token = |id| self.tokens.get(&id).copied();
        match news {
            News::Allowed => self.open_waiting(tunnel),
            News::Opened(id) => {
                if let Some(token) = token(id) {
                    self.opened(now, poller, tunnel, token);
                }
            }
            News::Failed(id, failure) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    self.refuse(now, poller, tunnel, token, failure, words(failure));
                }
            }
            News::Readable(id) => {
                if let Some(token) = token(id) {
                    self.pump(now, poller, tunnel, token, |pipe, tunnel, scratch| {
                        pipe.readable(now, tunnel, id, scratch)
                    });
                }
            }
            News::Writable(id) => {
                if let Some(token) = token(id) {
                    self.pump(now, poller, tunnel, token, |pipe, tunnel, scratch| {
                        pipe.fill_stream(now, tunnel, id, scratch)
                    });
                }
            }
            News::Gone(id) => {
                if let Some(token) = token(id) {
                    self.tokens.remove(&id);
                    let is_open =
                        self.apps.get(&token).is_some_and(|app| matches!(app.stage, Stage::Open(..)));
                    match is_open {
                        true => self.leave_now(tunnel, token),
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
    pub(crate) fn payload(&mut self, now: Instant, flow: Flow, payload: &[u8]) {
        self.associations.payload(now, flow, payload);
    }

    /// The server has refused a flow of datagrams, or ended it.
    pub(crate) fn flow_over(&mut self, now: Instant, flow: Flow, refused: bool) {
        self.associations.over(now, flow, refused);
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due).into_iter().chain(self.resumes).min()
    }

    /// Time has passed.
    pub(crate) fn handle_timeout<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
    ) {
        self.resumes = self.resumes.filter(|at| now < *at);
        while let Some(&(_, token)) = self.timers.first().filter(|(due, _)| *due <= now) {
            let Some(app) = self.apps.get(&token) else {
                self.timers.pop_first();
                continue;
            };
            match &app.stage {
                Stage::Asking(_) => match app.protocol {
                    Protocol::Socks5 => self.leave_now(tunnel, token),
                    Protocol::Http => {
                        let answer = http::answer(408, "no request came within 10 s");
                        self.see_off(now, poller, tunnel, token, answer);
                    }
                },
                Stage::Waiting(_) => {
                    let why = "the mpvpn server is not reached";
                    self.refuse(now, poller, tunnel, token, ProxyError::TimedOut, why);
                }
                Stage::Connecting(..) => {
                    let why = "the mpvpn server does not answer";
                    self.refuse(now, poller, tunnel, token, ProxyError::TimedOut, why);
                }
                Stage::Open(_, pipe) => match pipe.expires() {
                    expires if expires <= now => self.leave_now(tunnel, token),
                    expires => self.arm(token, expires),
                },
                Stage::Leaving(_) => self.leave_now(tunnel, token),
                Stage::Associated(_, socket) => {
                    let socket = *socket;
                    self.associations.sweep(now, tunnel, socket);
                    self.arm(token, now + SWEEP);
                }
            }
        }
        self.watch_listeners(poller);
    }

    /// Breaks all connections.
    pub(crate) fn end(&mut self) {
        for (_, app) in self.apps.drain() {
            if let Stage::Open(_, pipe) = app.stage {
                pipe.reset();
            }
        }
        self.associations.end();
        self.tokens.clear();
        self.timers.clear();
        self.waiting.clear();
    }

    fn accept<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        listener: usize,
    ) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get(listener) else { return };
            if self.apps.len() >= self.most {
                return;
            }
            let protocol = listener.protocol;
            let socket = match listener.acceptor.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    if self.complained.is_none_or(|at| now.saturating_duration_since(at) >= COMPLAINTS) {
                        self.complained = Some(now);
                        tracing::warn!(%error, "cannot accept connections of apps, they wait");
                    }
                    self.resumes = Some(now + PAUSE);
                    return;
                }
            };
            let token = self.free_token();
            if let Err(error) = poller.add(&socket, token, Interest::Read) {
                tracing::warn!(%error, "cannot watch a connection of an app");
                continue;
            }
            let asking = Asking { socket, socks5: Socks5::default(), bytes: BytesMut::new() };
            let due = now + ASKING;
            let app = App { due, since: now, protocol, to: None, stage: Stage::Asking(asking) };
            self.apps.insert(token, app);
            self.timers.insert((due, token));
            // Most have said it by now.
            self.listen_to(now, poller, tunnel, token);
        }
    }

    /// A token that nobody had for as long as possible: events of connections that are over may still come.
    fn free_token(&mut self) -> u64 {
        loop {
            self.last = if self.last + 1 < END { self.last + 1 } else { APPS };
            if !self.apps.contains_key(&self.last) && !self.associations.has(self.last) {
                return self.last;
            }
        }
    }

    /// While there is no place for another connection, those that come wait in the kernel.
    fn watch_listeners(&mut self, poller: &Poller) {
        let listens = self.apps.len() < self.most && self.resumes.is_none();
        if listens == self.listens {
            return;
        }
        self.listens = listens;
        let interest = if listens { Interest::Read } else { Interest::Nothing };
        for (listener, token) in self.listeners.iter().zip(PROXY..) {
            if let Err(error) = poller.modify(&listener.acceptor, token, interest) {
                tracing::warn!(%error, "cannot watch a listening socket");
            }
        }
    }

    /// Reads what an app wants.
    fn listen_to<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        loop {
            let Some(app) = self.apps.get_mut(&token) else { return };
            let Stage::Asking(asking) = &mut app.stage else { return };
            let room = HEAD - asking.bytes.len();
            if room == 0 {
                let why = "it takes more than 16 KiB to say what it wants";
                return match app.protocol {
                    Protocol::Socks5 => self.leave_now(tunnel, token),
                    Protocol::Http => self.see_off(now, poller, tunnel, token, http::answer(431, why)),
                };
            }
            asking.bytes.reserve(room.min(1024));
            match asking.socket.read(&mut asking.bytes, room) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => return self.leave_now(tunnel, token),
                Ok(_) => {}
            }
            loop {
                let step = match app.protocol {
                    Protocol::Socks5 => asking.socks5.step(&mut asking.bytes),
                    Protocol::Http => http::step(&mut asking.bytes),
                };
                match step {
                    Step::More => break,
                    Step::Say(words) => {
                        // A new connection takes a few bytes; else something is wrong with it.
                        let written = asking.socket.write(&[IoSlice::new(&words)]);
                        if !written.is_ok_and(|count| count == words.len()) {
                            return self.leave_now(tunnel, token);
                        }
                    }
                    Step::Connect { to, early } => {
                        return self.connect(now, poller, tunnel, token, to, early);
                    }
                    Step::Associate => return self.associate(now, poller, tunnel, token),
                    Step::Refuse { answer, why } => {
                        tracing::debug!(why, "an app is refused");
                        return self.see_off(now, poller, tunnel, token, answer);
                    }
                }
            }
        }
    }

    /// An app wants to send and receive datagrams.
    fn associate<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        let socket_token = self.free_token();
        let Some(mut app) = self.take(token) else { return };
        let Stage::Asking(asking) = app.stage else { return };
        let ends =
            asking.socket.local_addr().and_then(|local| Ok((local.ip(), asking.socket.peer_addr()?.ip())));
        let opened = ends.and_then(|(local, from)| {
            self.associations.open(socket_token, local.to_canonical(), from.to_canonical(), |socket| {
                poller.add(socket, socket_token, Interest::Read)
            })
        });
        let (answer, stays) = match opened {
            Ok(at) => (socks5::associated(at), true),
            Err(error) => {
                tracing::warn!(%error, "no socket for the datagrams of an app");
                (Reply::GeneralFailure.bytes(), false)
            }
        };
        if !stays {
            app.stage = Stage::Asking(asking);
            self.put(token, app);
            return self.see_off(now, poller, tunnel, token, answer);
        }
        let written = asking.socket.write(&[IoSlice::new(&answer)]);
        app.stage = Stage::Associated(asking.socket, socket_token);
        self.put(token, App { due: now + SWEEP, ..app });
        if !written.is_ok_and(|count| count == answer.len()) {
            self.leave_now(tunnel, token);
        }
    }

    /// It is known what an app wants.
    fn connect<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
        to: Authority,
        mut early: BytesMut,
    ) {
        let Some(mut app) = self.take(token) else { return };
        let Stage::Asking(asking) = app.stage else { return };
        let answer = match app.protocol {
            Protocol::Socks5 => Reply::Succeeded.bytes(),
            Protocol::Http if early.is_empty() => Bytes::from_static(http::ESTABLISHED),
            Protocol::Http => Bytes::new(),
        };
        early.unsplit(asking.bytes);
        app.to = Some(to);
        let wish = Wish { socket: asking.socket, answer, early: early.freeze() };
        if poller.modify(&wish.socket, token, Interest::Nothing).is_err() {
            return;
        }
        app.stage = Stage::Waiting(wish);
        self.put(token, App { due: now + CONNECTING, ..app });
        self.waiting.push_back(token);
        self.open_waiting(tunnel);
    }

    /// Opens streams for those that wait, as far as the tunnel allows it.
    fn open_waiting<T: Tunnel<Id = Id, Flow = Flow>>(&mut self, tunnel: &mut T) {
        while let Some(&token) = self.waiting.front() {
            let Some(app) = self.apps.get(&token) else {
                self.waiting.pop_front();
                continue;
            };
            if let (Stage::Waiting(_), Some(to)) = (&app.stage, &app.to) {
                let Some(id) = tunnel.open(to) else { return };
                tracing::debug!(?id, %to, "asked for a connection");
                let Some(mut app) = self.take(token) else { return };
                if let Stage::Waiting(wish) = app.stage {
                    app.stage = Stage::Connecting(id, wish);
                    self.tokens.insert(id, token);
                    self.put(token, app);
                }
            }
            self.waiting.pop_front();
        }
    }

    /// The connection that an app wants stands.
    fn opened<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
    ) {
        let Some(mut app) = self.take(token) else { return };
        let Stage::Connecting(id, wish) = app.stage else { return self.put(token, app) };
        let pipe = Pipe::new(now, wish.socket, token, Interest::Nothing).with(wish.answer, wish.early);
        app.due = pipe.expires();
        app.stage = Stage::Open(id, pipe);
        self.put(token, app);
        self.pump(now, poller, tunnel, token, |pipe, tunnel, scratch| {
            pipe.fill_socket(now, tunnel, id, scratch)?;
            pipe.fill_stream(now, tunnel, id, scratch)
        });
    }

    /// Moves bytes of a connection that stands, and sees what has become of it.
    fn pump<T: Tunnel<Id = Id, Flow = Flow>>(
        &mut self,
        now: Instant,
        poller: &Poller,
        tunnel: &mut T,
        token: u64,
        moves: impl FnOnce(&mut Pipe, &mut T, &mut Scratch) -> io::Result<()>,
    ) {
        let Some(app) = self.apps.get_mut(&token) else { return };
        let Stage::Open(id, pipe) = &mut app.stage else { return };
        let moved = moves(pipe, tunnel, &mut self.scratch).and_then(|()| pipe.watch(poller));
        match moved {
            Err(error) => {
                tracing::debug!(?id, %error, "a connection of an app broke");
                self.leave_now(tunnel, token);
            }
            Ok(()) if pipe.has_ended() => {
                self.tokens.remove(id);
                self.take(token);
            }
            Ok(()) => {
                // The timer that is set for a later time finds out by itself; half a connection has less.
                let (expires, due) = (pipe.expires(), app.due);
                if expires < due.max(now) {
                    self.arm(token, expires);
                }
            }
        }
    }

    fn take(&mut self, token: u64) -> Option<App<Id>> {
        let app = self.apps.remove(&token)?;
        self.timers.remove(&(app.due, token));
        Some(app)
    }

    fn put(&mut self, token: u64, app: App<Id>) {
        self.timers.insert((app.due, token));
        self.apps.insert(token, app);
    }

    /// Sets the timer of a connection.
    fn arm(&mut self, token: u64, due: Instant) {
        if let Some(app) = self.take(token) {
            self.put(token, App { due, ..app });
        }
    }
}

#[cfg(test)]
mod tests;
