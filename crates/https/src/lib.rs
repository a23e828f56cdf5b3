//! The server's TCP side: TLS with HTTP/1.1 and HTTP/2, at the addresses at which QUIC listens.
//!
//! In: TCP connections (Multipath TCP if the client asks for it). Out: for users, UDP datagrams to the
//! server's own QUIC socket (`tcp_transport`), or requests to its own HTTP/3 (`gateway`); for everybody
//! else a web site (`site`). Always holds: everything runs on the slow thread, for which no QUIC packet
//! waits; connections without credentials are bounded in number (in all and per network), time and memory
//! ([`limiter`](mpvpn_http::limiter)); the same [`Authenticator`] checks credentials as over QUIC.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod acme;
mod gateway;
mod http1;
mod http2;
mod http3_fields;
pub mod loopback_clients;
mod malformed;
mod masque_drafts;
mod plain;
mod proxy_protocol;
mod site;
mod tcp_transport;
pub mod untrusted;

use std::{
    future::pending,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use ipnet::IpNet;
use mpvpn_config::{AcmeChallenge, ServerConfig};
use mpvpn_error::RunError;
use mpvpn_http::limiter::{ClientNetwork, Limiter, RefusalLog, Slot};
use mpvpn_identity::tls::ACME_TLS_ALPN;
use mpvpn_masque::{
    connect,
    headers::{Headers, Section},
    request::Rejection,
};
use mpvpn_os::{
    OsError,
    tcp::{KeepAlive, ListenOptions, Protocol, TcpAcceptor, Tuning},
};
use mpvpn_tcp::congestion;
use mpvpn_users::{Denied, auth::Authenticator, credentials::Credentials};
use tokio::{
    net::TcpStream,
    sync::{Notify, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use gateway::{Gateway, GatewayClient};
use loopback_clients::LoopbackClients;
pub use site::{ConfiguredSite, Deliver, ResponsePart, Site};

/// The body of a response.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Longer: unfinished handshakes keep their slots. Shorter: slow networks fail. Chosen.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent TLS handshakes, in all and per client network. More: memory and descriptors for attackers.
/// Fewer: floods evict real clients sooner. Chosen (open question of docs/design/relay.md).
const MAX_HANDSHAKES: usize = 512;
const MAX_HANDSHAKES_PER_NETWORK: usize = 64;
/// Connections that have shown no credentials, in all and per client network. The trade-off is that of
/// [`MAX_HANDSHAKES`]. Chosen.
const MAX_UNAUTHENTICATED: usize = 512;
const MAX_UNAUTHENTICATED_PER_NETWORK: usize = 64;
/// TCP transports of all users, and of one user: one per link and class of a client. Each takes two
/// descriptors and up to 4 MiB of socket buffer. Chosen.
const MAX_TCP_TRANSPORTS: usize = 4096;
const MAX_TCP_TRANSPORTS_PER_USER: usize = 512;
/// How long TCP transports stay at the end of the process, so that QUIC's CONNECTION_CLOSE packets leave
/// through them. Shorter: clients notice the end by a timeout. Longer: the process ends later. Chosen.
const CLOSE_FLUSH_TIME: Duration = Duration::from_millis(100);
/// How long the TCP connections of a user stay after the end of the access: a client whose QUIC connection
/// was closed asks for another one over them, is refused, and ends instead of trying on. Shorter: clients
/// over long round trips are not told; longer: less than a second is left. Chosen.
const REFUSAL_TIME: Duration = Duration::from_millis(500);
/// The delay before the next accept when no descriptors are left. Shorter: busy waiting. Longer: clients
/// wait. Chosen.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The reason of a refusal: the slot of a connection went to a newer one.
const EVICTED: &str = "evicted by a newer connection";

/// These connections carry packets: TCP keeps few unsent bytes (a queue in TCP is a queue that nothing
/// overtakes), retransmits at least once a second (links that return are used soon), and gives up after 30 s.
/// Values as at the client (`mpvpn_tcp::connection`), but slower keep-alives, as HTTP clients also idle
/// here.
const TCP_TUNING: Tuning = Tuning {
    keep_alive: KeepAlive { idle: Duration::from_secs(20), interval: Duration::from_secs(5), probes: 4 },
    notsent_lowat: Some(128 << 10),
    user_timeout: Some(Duration::from_secs(30)),
    rto_max: Some(Duration::from_secs(1)),
    syn_retries: None,
    dscp: 0,
};

/// A complete body.
fn full_body(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// The listening sockets.
#[derive(Debug)]
pub struct HttpsServer {
    listeners: Vec<(TcpListener, Arc<Listener>)>,
}

/// State shared by all connections.
#[derive(Debug)]
struct ServerContext {
    tls: TlsConfig,
    authenticator: Authenticator,
    /// The site for clients without credentials; it may hide from those with wrong ones that there is more.
    site: Site,
    /// Networks of load balancers, whose connections begin with a PROXY protocol header, and the connections
    /// whose header has not come yet.
    load_balancers: Vec<IpNet>,
    awaiting_proxy_header: Arc<Limiter<ClientNetwork>>,
    handshakes: Arc<Limiter<ClientNetwork>>,
    unauthenticated: Arc<Limiter<ClientNetwork>>,
    tcp_transports: Arc<Limiter<String>>,
    loopback_clients: LoopbackClients,
    /// Changes when access of users or certificates has ended.
    access_ends: watch::Sender<()>,
    /// Whether clients of the first MASQUE drafts are served.
    draft_clients: bool,
    refusal_log: RefusalLog,
}

/// One listening address.
#[derive(Debug)]
struct Listener {
    context: Arc<ServerContext>,
    /// The address of the server's own QUIC socket, reachable from this machine.
    quic: SocketAddr,
    gateway: Arc<Gateway>,
}

#[derive(derive_more::Debug)]
#[debug("TlsConfig(…)")]
struct TlsConfig(TlsAcceptor);

impl HttpsServer {
    /// Listens at the addresses of `config`. `loopback_clients` learns which client is behind each loopback
    /// socket; each change of `access_ends` closes the connections of users without access.
    ///
    /// # Errors
    /// If an address cannot be bound, or TLS cannot be set up.
    pub fn bind(
        config: &ServerConfig,
        credentials: &Credentials,
        site: Site,
        loopback_clients: &LoopbackClients,
        access_ends: &watch::Sender<()>,
    ) -> Result<Self, RunError> {
        let context = ServerContext::new(config, credentials, site, loopback_clients, access_ends)?;
        let v4 = config.listen.iter().any(SocketAddr::is_ipv4);
        let mut listeners = Vec::new();
        for address in &config.listen {
            let listener =
                TcpAcceptor::listen(*address, ListenOptions { protocol: Protocol::Mptcp, v6only: v4 })
                    .map_err(listen_error)?;
            let quic = reachable_locally(*address);
            let gateway = Gateway::new(quic, &credentials.certificates, loopback_clients.clone())?;
            listeners
                .push((listener.into(), Arc::new(Listener { context: Arc::clone(&context), quic, gateway })));
        }
        Ok(Self { listeners })
    }

    /// Waits until the last QUIC packets have left through TCP transports. Called after QUIC has closed its
    /// connections, while [`Self::serve`] still runs.
    pub fn wait_for_close_frames(&self) -> impl Future<Output = ()> + use<> {
        let context = self.listeners.first().map(|(_, context)| Arc::clone(&context.context));
        async move {
            if context.is_some_and(|context| context.tcp_transports.in_use() > 0) {
                sleep(CLOSE_FLUSH_TIME).await;
            }
        }
    }

    /// Serves until dropped, in a tokio runtime with I/O and time.
    pub async fn serve(self) -> io::Result<()> {
        let mut listeners = JoinSet::new();
        for (listener, listener_context) in self.listeners {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            listeners.spawn(listener_context.serve(listener));
        }
        listeners.join_all().await;
        Ok(())
    }
}

/// Converts a bind error into one that names the next step.
fn listen_error(error: OsError) -> RunError {
    match error {
        OsError::Listen { local: address, source } => {
            mpvpn_input::Error::TcpAddress { address, source }.into()
        }
        error => error.into(),
    }
}

/// The address at which a local client reaches a socket that listens at `address`.
fn reachable_locally(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

impl Listener {
    async fn serve(self: Arc<Self>, listener: tokio::net::TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                    let source = ClientNetwork::of(peer.ip());
                    let limiter = match self.context.is_load_balancer(peer.ip()) {
                        true => &self.context.awaiting_proxy_header,
                        false => &self.context.handshakes,
                    };
                    match limiter.acquire_evicting(source) {
                        Ok(slot) => drop(connections.spawn(Arc::clone(&self).connection(stream, peer, slot))),
                        Err(limit) => self.context.log_refusal(peer.ip(), &limit),
                    }
                }
                Err(error) if concerns_one_connection(&error) => {}
                Err(error) => {
                    let source = ClientNetwork::of(self.quic.ip());
                    if self.context.refusal_log.on_refused(Instant::now(), source).is_some() {
                        tracing::warn!(%error, "cannot accept TCP connections (QUIC is not affected): raise the limit of open files if none are left");
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, mut stream: TcpStream, peer: SocketAddr, slot: Slot<ClientNetwork>) {
        if let Err(error) = TCP_TUNING.apply(&stream) {
            return tracing::debug!(%peer, %error, "a client disconnected before TLS");
        }
        let (peer, slot) = match self.context.is_load_balancer(peer.ip()) {
            false => (peer, slot),
            true => match self.context.read_proxy_header(&mut stream, peer, slot).await {
                Some(named) => named,
                None => return,
            },
        };
        let evicted = slot.evicted();
        let accepted = tokio::select! {
            accepted = timeout(TLS_HANDSHAKE_TIMEOUT, self.context.tls.0.accept(stream)) => accepted,
            () = evicted.notified() => return self.context.log_refusal(peer.ip(), &EVICTED),
        };
        let stream = match accepted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%peer, %error, "the TLS handshake of a client failed"),
            Err(_) => return self.context.log_refusal(peer.ip(), &"the TLS handshake took too long"),
        };
        let limiter = &self.context.unauthenticated;
        let unauthenticated = match limiter.acquire_evicting(ClientNetwork::of(peer.ip())) {
            Ok(unauthenticated) => unauthenticated,
            Err(limit) => return self.context.log_refusal(peer.ip(), &limit),
        };
        drop(slot);
        let (socket, session) = stream.get_ref();
        if session.alpn_protocol() == Some(ACME_TLS_ALPN) {
            // The handshake was the answer (RFC 8737 §3).
            return tracing::debug!(%peer, "a CA has validated a name of this server");
        }
        let agreed = session.alpn_protocol().map(|protocol| protocol == b"h2");
        let Ok(socket) = socket.as_fd().try_clone_to_owned() else {
            let why = "no descriptors are left: raise the limit of open files";
            return self.context.log_refusal(peer.ip(), &why);
        };
        let certificate =
            session.peer_certificates().and_then(|chain| chain.first()).map(|leaf| leaf.to_vec());
        let client = Arc::new(ClientConnection::new(&self, (socket, certificate), peer, unauthenticated));
        let served = Arc::clone(&client);
        let serve = async {
            match agreed {
                Some(true) => http2::serve(stream, served).await,
                None if self.context.draft_clients => masque_drafts::serve(stream, served).await,
                Some(false) | None => http1::serve(stream, served).await,
            }
        };
        tokio::select! {
            () = serve => {}
            () = client.access_ended() => {}
            never = congestion::adapt_congestion_control(&client.socket) => match never {},
        }
    }
}

/// Whether accepting failed because of one connection, so that the next accept may succeed.
fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    [ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

impl ServerContext {
    fn new(
        config: &ServerConfig,
        credentials: &Credentials,
        site: Site,
        loopback_clients: &LoopbackClients,
        access_ends: &watch::Sender<()>,
    ) -> Result<Arc<Self>, RunError> {
        let validates_by_tls =
            config.acme.as_ref().is_some_and(|acme| acme.challenge == AcmeChallenge::TlsAlpn01);
        let protocols: &[&[u8]] =
            if validates_by_tls { &[b"h2", b"http/1.1", ACME_TLS_ALPN] } else { &[b"h2", b"http/1.1"] };
        let tls = credentials.server_tls(protocols)?;
        Ok(Arc::new(Self {
            tls: TlsConfig(TlsAcceptor::from(Arc::new(tls))),
            authenticator: credentials.authenticator.clone(),
            site,
            load_balancers: config.proxy_protocol_from.clone(),
            awaiting_proxy_header: Limiter::new(MAX_HANDSHAKES, MAX_HANDSHAKES),
            handshakes: Limiter::new(MAX_HANDSHAKES, MAX_HANDSHAKES_PER_NETWORK),
            unauthenticated: Limiter::new(MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_PER_NETWORK),
            tcp_transports: Limiter::new(MAX_TCP_TRANSPORTS, MAX_TCP_TRANSPORTS_PER_USER),
            loopback_clients: loopback_clients.clone(),
            access_ends: access_ends.clone(),
            draft_clients: config.old_clients,
            refusal_log: RefusalLog::default(),
        }))
    }

    /// Logs a refusal and its reason, at most once a minute per network.
    fn log_refusal(&self, client: IpAddr, why: &dyn std::fmt::Display) {
        let source = ClientNetwork::of(client);
        if let Some(before) = self.refusal_log.on_refused(Instant::now(), source) {
            tracing::warn!(%source, %why, before, "refused a client on TCP");
        }
    }

    /// The response to a request that is refused.
    fn refuse(&self, refusal: &Rejection, version: Version, quic_port: u16) -> Response<Body> {
        let mut response = http3_fields::response_from(&refusal.headers()).map(|()| full_body(""));
        self.site.complete_headers(response.headers_mut(), version, Some(quic_port));
        response
    }

    /// Whether connections from this address begin with a PROXY protocol header.
    fn is_load_balancer(&self, ip: IpAddr) -> bool {
        self.load_balancers.iter().any(|net| net.contains(&ip))
    }

    /// Reads the PROXY protocol header of a load balancer's connection; returns the client's address, and a
    /// handshake slot for it.
    async fn read_proxy_header(
        &self,
        stream: &mut TcpStream,
        balancer: SocketAddr,
        slot: Slot<ClientNetwork>,
    ) -> Option<(SocketAddr, Slot<ClientNetwork>)> {
        let evicted = slot.evicted();
        let refuse = |client: IpAddr, why: &dyn std::fmt::Display| {
            self.log_refusal(client, why);
            None
        };
        let client = tokio::select! {
            client = timeout(TLS_HANDSHAKE_TIMEOUT, proxy_protocol::read_client_address(stream)) => client,
            () = evicted.notified() => return refuse(balancer.ip(), &EVICTED),
        };
        let client = match client {
            Ok(Ok(client)) => client?,
            Ok(Err(error)) => {
                tracing::debug!(%balancer, %error, "a load balancer sent no PROXY protocol header");
                return refuse(balancer.ip(), &"the load balancer sent no PROXY protocol header");
            }
            Err(_) => return refuse(balancer.ip(), &"the PROXY protocol header took too long"),
        };
        let client = SocketAddr::new(client.ip().to_canonical(), client.port());
        match self.handshakes.acquire_evicting(ClientNetwork::of(client.ip())) {
            Ok(slot) => Some((client, slot)),
            Err(limit) => refuse(client.ip(), &limit),
        }
    }
}

/// How a request is handled.
#[derive(Debug)]
enum RequestKind {
    /// The site answers, as for anybody.
    Site,
    /// The request has credentials, but is refused.
    Refused(Rejection),
    /// The request is the TCP transport of this user's QUIC packets.
    TcpTransport(String),
    /// Another request of a user, for the gateway.
    Gateway,
}

/// One TCP connection of a client.
struct ClientConnection {
    context: Arc<ServerContext>,
    socket: OwnedFd,
    /// The client's certificate (DER), if it has shown one.
    certificate: Option<Vec<u8>>,
    quic: SocketAddr,
    gateway_client: GatewayClient,
    peer: SocketAddr,
    /// The user whose valid credentials the client has shown first, and these.
    owner: Mutex<Option<(String, Option<String>)>>,
    /// The slot of an unauthenticated connection; released when the client shows valid credentials.
    slot: Mutex<Option<Slot<ClientNetwork>>>,
    evicted: Arc<Notify>,
    authenticated: Notify,
    /// The number of requests in progress.
    active_requests: watch::Sender<usize>,
}

impl ClientConnection {
    fn new(
        listener_context: &Listener,
        (socket, certificate): (OwnedFd, Option<Vec<u8>>),
        peer: SocketAddr,
        slot: Slot<ClientNetwork>,
    ) -> Self {
        let evicted = slot.evicted();
        let forwarded = match &listener_context.context.authenticator {
            Authenticator::Certificates(check) => {
                certificate.as_deref().and_then(|certificate| check.forward(certificate))
            }
            Authenticator::None | Authenticator::Tokens(_) => None,
        };
        Self {
            context: Arc::clone(&listener_context.context),
            socket,
            quic: listener_context.quic,
            certificate,
            gateway_client: listener_context.gateway.client(peer, forwarded),
            peer,
            owner: Mutex::default(),
            slot: Mutex::new(Some(slot)),
            evicted,
            authenticated: Notify::new(),
            active_requests: watch::Sender::new(0),
        }
    }

    /// Sets the DSCP (0 to 63) of packets sent on this connection.
    fn set_dscp(&self, dscp: u8) {
        if let Err(error) = (Tuning { dscp, ..TCP_TUNING }).apply(&self.socket) {
            tracing::debug!(peer = %self.peer, %error, "cannot set the DSCP that the client asks for");
        }
    }

    fn classify<B>(&self, request: &Request<B>) -> RequestKind {
        http3_fields::connect_headers(request)
            .map_or(RequestKind::Site, |headers| self.classify_headers(&headers))
    }

    fn classify_headers(&self, headers: &Headers) -> RequestKind {
        let shown = connect::credentials(headers);
        let authenticator = &self.context.authenticator;
        let user = match authenticator.authenticate(shown.as_deref(), self.certificate.as_deref()) {
            Ok((user, _)) => user.name,
            Err(Denied::Missing | Denied::NoCertificate) => return RequestKind::Site,
            Err(denied) if denied.status() == 401 && self.context.site.hides_credentials() => {
                return RequestKind::Site;
            }
            Err(denied) => {
                self.context.log_refusal(self.peer.ip(), &denied);
                return RequestKind::Refused(Rejection::new(denied.status(), denied.to_string()));
            }
        };
        if let Err(error) = headers.validate(Section::Request) {
            return RequestKind::Refused(Rejection::new(400, error.to_string()));
        }
        if !self.mark_authenticated(&user, shown) {
            return RequestKind::Refused(Rejection::new(421, "this connection belongs to another user"));
        }
        match tcp_transport::is_to_itself(headers) {
            true => RequestKind::TcpTransport(user),
            false => RequestKind::Gateway,
        }
    }

    /// Marks the client as authenticated and releases its slot. Returns false if the connection belongs to
    /// another user.
    fn mark_authenticated(&self, user: &str, shown: Option<String>) -> bool {
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        if owner.as_ref().is_some_and(|(owner, _)| owner != user) {
            return false;
        }
        owner.get_or_insert_with(|| (user.to_owned(), shown));
        let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        if slot.is_some() {
            self.authenticated.notify_one();
        }
        true
    }

    /// Waits until the access of the client has ended, and it could be told so.
    async fn access_ended(&self) {
        let mut access_ends = self.context.access_ends.subscribe();
        loop {
            let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some((user, shown)) = owner
                && let Err(reason) =
                    self.context.authenticator.authenticate(shown.as_deref(), self.certificate.as_deref())
            {
                tracing::debug!(peer = %self.peer, user, %reason, "closing a TCP connection of a user without access");
                return sleep(REFUSAL_TIME).await;
            }
            if access_ends.changed().await.is_err() {
                return pending().await;
            }
        }
    }

    /// Whether the client has shown no valid credentials.
    fn is_unauthenticated(&self) -> bool {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Waits until the client is authenticated; for one caller, once.
    async fn authenticated(&self) {
        self.authenticated.notified().await;
    }

    /// Waits until this connection's slot is given to a newer one; for ever after authentication.
    async fn evicted(&self) {
        self.evicted.notified().await;
        self.context.log_refusal(self.peer.ip(), &EVICTED);
    }

    /// Counts a request as in progress until the returned guard is dropped.
    fn begin_request(&self) -> ActiveRequest<'_> {
        self.active_requests.send_modify(|count| *count += 1);
        ActiveRequest(self)
    }

    /// Waits until no request has been in progress for `duration`.
    async fn idle_for(&self, duration: Duration) {
        let mut active = self.active_requests.subscribe();
        loop {
            let idle = active.wait_for(|count| *count == 0).await.is_ok();
            if idle && timeout(duration, active.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// A request in progress.
struct ActiveRequest<'a>(&'a ClientConnection);

impl Drop for ActiveRequest<'_> {
    fn drop(&mut self) {
        self.0.active_requests.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests;
