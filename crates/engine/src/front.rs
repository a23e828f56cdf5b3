//! The server's TCP side: TLS with HTTP/1.1 and HTTP/2, at the addresses at which QUIC listens.
//!
//! In: TCP connections (Multipath TCP where the client asks for it). Out: for users, datagrams handed to the server's own QUIC
//! over the loopback ([`tcp_way`]), or what they ask for through its own HTTP/3 ([`gateway`]); for everybody else what
//! any site answers ([`site`]). Always holds: one thread, that of slow things, which no packet of QUIC waits for; who has not
//! shown credentials is bounded in number, in all and by source, in time and in memory ([`limits`]); credentials are checked by
//! the same [`Authenticator`] as those that come over QUIC.

mod balancer;
mod fields;
pub(crate) mod fronted;
mod gateway;
mod http1;
mod http2;
mod limits;
mod old;
mod site;
mod tcp_way;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use ipnet::IpNet;
use mpvpn_control::{
    auth::{Authenticator, Denied},
    config::ServerConfig,
    credentials::Credentials,
    tls,
};
use mpvpn_masque::{
    connect, connect_udp,
    headers::{Headers, Section},
    request::Rejection,
    template::Template,
};
use mpvpn_os::{
    OsError,
    tcp::{KeepAlive, ListenOptions, Protocol, TcpAcceptor, Tuning},
};
use tokio::{
    net::TcpStream,
    sync::{Notify, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use crate::{EngineError, tcp_way::control};
use fronted::Fronted;
use gateway::{Gateway, Guest};
use limits::{Complaints, Place, Room, Source};
pub(crate) use site::Site;

/// The content of an answer.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// How long TLS may take.
const TLS_WITHIN: Duration = Duration::from_secs(10);
/// Connections in the middle of TLS: in all, and of one source.
const ARRIVING: usize = 512;
const ARRIVING_OF_ONE: usize = 64;
/// Connections of strangers, whom nobody has to know.
const STRANGERS: usize = 512;
const STRANGERS_OF_ONE: usize = 64;
/// TCP ways of all users, and of one.
const WAYS: usize = 4096;
const WAYS_OF_ONE: usize = 512;
/// How long what is said last may take to leave.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Rest before connections are taken again, where the machine has no descriptors left.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// Connections carry packets: what waits in the kernel is overtaken by nothing, and links that come back are used soon.
const TUNING: Tuning = Tuning {
    keep_alive: KeepAlive { idle: Duration::from_secs(20), interval: Duration::from_secs(5), probes: 4 },
    notsent_lowat: Some(128 << 10),
    user_timeout: Some(Duration::from_secs(30)),
    rto_max: Some(Duration::from_secs(1)),
    dscp: 0,
};

/// A content that is there at once.
fn plain(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// Bound addresses.
#[derive(Debug)]
pub(crate) struct Front {
    doors: Vec<(TcpListener, Arc<Door>)>,
}

/// What is the same for all connections.
#[derive(Debug)]
struct House {
    tls: TlsConfig,
    authenticator: Authenticator,
    /// What strangers see, and whether those with wrong credentials do, too.
    site: Site,
    hide: bool,
    /// Where connections begin with the client's address, and those of which it did not come yet.
    balancers: Vec<IpNet>,
    unnamed: Arc<Room<Source>>,
    /// The paths of requests for UDP.
    template: Template,
    arriving: Arc<Room<Source>>,
    strangers: Arc<Room<Source>>,
    ways: Arc<Room<String>>,
    fronted: Fronted,
    /// Clients of the first drafts are served, too.
    old_clients: bool,
    complaints: Complaints,
}

/// An address.
#[derive(Debug)]
struct Door {
    house: Arc<House>,
    /// Where the own QUIC is reached on this machine.
    quic: SocketAddr,
    gateway: Arc<Gateway>,
}

struct TlsConfig(TlsAcceptor);

impl std::fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsConfig(…)")
    }
}

impl Front {
    /// Listens at the addresses of `config`; `fronted` learns who is behind connections to the own QUIC.
    ///
    /// # Errors
    /// If one of them cannot be had, or TLS cannot be set up.
    pub(crate) fn bind(
        config: &ServerConfig,
        credentials: &Credentials,
        site: Site,
        fronted: &Fronted,
    ) -> Result<Self, EngineError> {
        let tls = tls::server_config(&credentials.identity, &credentials.others, &[b"h2", b"http/1.1"])?;
        let house = Arc::new(House {
            tls: TlsConfig(TlsAcceptor::from(Arc::new(tls))),
            authenticator: credentials.authenticator.clone(),
            site,
            hide: config.site.hide,
            balancers: config.proxy_protocol_from.clone(),
            unnamed: Room::new(ARRIVING, ARRIVING),
            template: connect_udp::default_template(),
            arriving: Room::new(ARRIVING, ARRIVING_OF_ONE),
            strangers: Room::new(STRANGERS, STRANGERS_OF_ONE),
            ways: Room::new(WAYS, WAYS_OF_ONE),
            fronted: fronted.clone(),
            old_clients: config.old_clients,
            complaints: Complaints::new(),
        });
        let v4 = config.listen.iter().any(SocketAddr::is_ipv4);
        let mut doors = Vec::new();
        for address in &config.listen {
            let listener =
                TcpAcceptor::listen(*address, ListenOptions { protocol: Protocol::Mptcp, v6only: v4 })
                    .map_err(refused)?;
            let quic = on_this_machine(*address);
            let gateway = Gateway::new(quic, credentials.identity.fingerprint(), fronted.clone())?;
            doors.push((listener.into(), Arc::new(Door { house: Arc::clone(&house), quic, gateway })));
        }
        Ok(Self { doors })
    }

    /// To be waited for, with [`Self::serve`] still running, when QUIC has said its last words: those on TCP ways are on their
    /// way then.
    pub(crate) fn last_words(&self) -> impl Future<Output = ()> + use<> {
        let house = self.doors.first().map(|(_, door)| Arc::clone(&door.house));
        async move {
            if house.is_some_and(|house| house.ways.len() > 0) {
                sleep(LAST_WORDS).await;
            }
        }
    }

    /// Serves until dropped; inside a tokio runtime with I/O and time.
    pub(crate) async fn serve(self) -> io::Result<()> {
        let mut doors = JoinSet::new();
        for (listener, door) in self.doors {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            doors.spawn(door.serve(listener));
        }
        doors.join_all().await;
        Ok(())
    }
}

/// The same error, which knows what to do next.
fn refused(error: OsError) -> EngineError {
    match error {
        OsError::Listen { local: address, source } => {
            mpvpn_control::Error::TcpAddress { address, source }.into()
        }
        error => error.into(),
    }
}

/// Where something that listens at `address` is reached from the same machine.
fn on_this_machine(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

impl Door {
    async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                    let source = Source::of(peer.ip());
                    let room = match self.house.is_balancer(peer.ip()) {
                        true => &self.house.unnamed,
                        false => &self.house.arriving,
                    };
                    match room.push_in(source) {
                        Ok(place) => {
                            drop(connections.spawn(Arc::clone(&self).connection(stream, peer, place)))
                        }
                        Err(crowded) => self.house.complain(source, &crowded),
                    }
                }
                Err(error) if is_of_one(&error) => {}
                Err(error) => {
                    if self.house.complaints.tell(Instant::now(), Source::of(self.quic.ip())).is_some() {
                        tracing::warn!(%error, "cannot take TCP connections: those of QUIC go on");
                    }
                    sleep(EXHAUSTED).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, mut stream: TcpStream, peer: SocketAddr, place: Place<Source>) {
        if let Err(error) = TUNING.apply(&stream) {
            return tracing::debug!(%peer, %error, "a client is gone again");
        }
        let (peer, place) = match self.house.is_balancer(peer.ip()) {
            false => (peer, place),
            true => match self.house.named(&mut stream, peer, place).await {
                Some(named) => named,
                None => return,
            },
        };
        let pushed_out = place.pushed_out();
        let accepted = tokio::select! {
            accepted = timeout(TLS_WITHIN, self.house.tls.0.accept(stream)) => accepted,
            () = pushed_out.notified() => return self.house.complain(Source::of(peer.ip()), &"others came"),
        };
        let stream = match accepted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%peer, %error, "no TLS from a client"),
            Err(_) => return self.house.complain(Source::of(peer.ip()), &"no TLS in time"),
        };
        let source = Source::of(peer.ip());
        let stranger = match self.house.strangers.push_in(source) {
            Ok(stranger) => stranger,
            Err(crowded) => return self.house.complain(source, &crowded),
        };
        drop(place);
        let (socket, session) = stream.get_ref();
        let agreed = session.alpn_protocol().map(|protocol| protocol == b"h2");
        let Ok(socket) = socket.as_fd().try_clone_to_owned() else {
            return self.house.complain(source, &"no descriptors are left");
        };
        let visit = Arc::new(Visit::new(&self, socket, peer, stranger));
        let served = Arc::clone(&visit);
        let serve = async {
            match agreed {
                Some(true) => http2::serve(stream, served).await,
                None if self.house.old_clients => old::serve(stream, served).await,
                Some(false) | None => http1::serve(stream, served).await,
            }
        };
        tokio::select! {
            () = serve => {}
            never = control::watch(&visit.socket) => match never {},
        }
    }
}

/// Whether accepting failed because of the connection, and the next one may be fine.
fn is_of_one(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    [ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

impl House {
    /// Tells that something was refused, and why.
    fn complain(&self, source: Source, why: &dyn std::fmt::Display) {
        if let Some(before) = self.complaints.tell(Instant::now(), source) {
            tracing::warn!(%source, %why, before, "refused what came over TCP");
        }
    }

    /// The answer to a request that shows something that is not good.
    fn refuse(&self, refusal: &Rejection) -> Response<Body> {
        let mut response = fields::response_of(&refusal.headers()).map(|()| plain(""));
        self.site.sign(response.headers_mut());
        response
    }

    /// Whether connections from there begin with the client's address.
    fn is_balancer(&self, ip: IpAddr) -> bool {
        self.balancers.iter().any(|net| net.contains(&ip))
    }

    /// Takes the client's address from the connection of a load balancer, and a place for it.
    async fn named(
        &self,
        stream: &mut TcpStream,
        balancer: SocketAddr,
        place: Place<Source>,
    ) -> Option<(SocketAddr, Place<Source>)> {
        let pushed_out = place.pushed_out();
        let client = tokio::select! {
            client = timeout(TLS_WITHIN, balancer::client_of(stream)) => client,
            () = pushed_out.notified() => {
                self.complain(Source::of(balancer.ip()), &"others came");
                return None;
            }
        };
        let client = match client {
            Ok(Ok(client)) => client?,
            Ok(Err(error)) => {
                tracing::debug!(%balancer, %error, "no client's address from a load balancer");
                self.complain(Source::of(balancer.ip()), &"no client's address (PROXY protocol) in front");
                return None;
            }
            Err(_) => {
                self.complain(Source::of(balancer.ip()), &"no client's address (PROXY protocol) in time");
                return None;
            }
        };
        let client = SocketAddr::new(client.ip().to_canonical(), client.port());
        match self.arriving.push_in(Source::of(client.ip())) {
            Ok(place) => Some((client, place)),
            Err(crowded) => {
                self.complain(Source::of(client.ip()), &crowded);
                None
            }
        }
    }
}

/// What becomes of a request.
#[derive(Debug)]
enum Judged {
    /// It is as those of anybody.
    Site,
    /// It shows something that is not good.
    Refused(Rejection),
    /// This user's QUIC is inside.
    TcpWay(String),
    /// A user wants something else.
    Elsewhere,
}

/// One TCP connection.
struct Visit {
    house: Arc<House>,
    socket: OwnedFd,
    quic: SocketAddr,
    guest: Guest,
    peer: SocketAddr,
    /// Where strangers are; given back as soon as credentials were shown.
    place: Mutex<Option<Place<Source>>>,
    pushed_out: Arc<Notify>,
    user: Notify,
    /// Requests that are not over.
    busy: watch::Sender<usize>,
}

impl Visit {
    fn new(door: &Door, socket: OwnedFd, peer: SocketAddr, place: Place<Source>) -> Self {
        let pushed_out = place.pushed_out();
        Self {
            house: Arc::clone(&door.house),
            socket,
            quic: door.quic,
            guest: door.gateway.guest(peer),
            peer,
            place: Mutex::new(Some(place)),
            pushed_out,
            user: Notify::new(),
            busy: watch::Sender::new(0),
        }
    }

    /// Marks what is sent on the connection with this DSCP (0 to 63).
    fn mark(&self, dscp: u8) {
        if let Err(error) = (Tuning { dscp, ..TUNING }).apply(&self.socket) {
            tracing::debug!(peer = %self.peer, %error, "cannot mark packets as the client asks");
        }
    }

    fn judge<B>(&self, request: &Request<B>) -> Judged {
        fields::headers_of(request).map_or(Judged::Site, |headers| self.judge_headers(&headers))
    }

    fn judge_headers(&self, headers: &Headers) -> Judged {
        let shown = connect::credentials(headers);
        let user = match self.house.authenticator.check(shown.as_deref()) {
            Ok(user) => user.name,
            Err(Denied::Missing) => return Judged::Site,
            Err(_) if self.house.hide => return Judged::Site,
            Err(denied) => {
                self.house.complain(Source::of(self.peer.ip()), &denied);
                return Judged::Refused(Rejection::unauthorized(denied.to_string()));
            }
        };
        if let Err(error) = headers.validate(Section::Request) {
            return Judged::Refused(Rejection::new(400, error.to_string()));
        }
        self.recognise();
        match tcp_way::is_to_itself(headers, &self.house.template) {
            true => Judged::TcpWay(user),
            false => Judged::Elsewhere,
        }
    }

    /// The client has shown credentials: it is none of the strangers any more.
    fn recognise(&self) {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
        if place.is_some() {
            self.user.notify_one();
        }
    }

    /// Waits until the client has shown credentials; for one caller, once.
    async fn is_user(&self) {
        self.user.notified().await;
    }

    /// Waits until the place of this stranger is needed; for ever at a user's.
    async fn pushed_out(&self) {
        self.pushed_out.notified().await;
        self.house.complain(Source::of(self.peer.ip()), &"others came");
    }

    /// Marks a request as not over.
    fn busy(&self) -> Busy<'_> {
        self.busy.send_modify(|count| *count += 1);
        Busy(self)
    }

    /// Waits until no request has been there for so long.
    async fn idle_for(&self, duration: Duration) {
        let mut busy = self.busy.subscribe();
        loop {
            let idle = busy.wait_for(|count| *count == 0).await.is_ok();
            if idle && timeout(duration, busy.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// A request that is not over.
struct Busy<'a>(&'a Visit);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
pub(crate) mod tests;
