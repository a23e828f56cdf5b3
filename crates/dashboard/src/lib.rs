//! The dashboard: a page for browsers that shows a running client or server live, with the last 24 hours, and
//! changes links and users.
//!
//! In: HTTP requests, the status and the events of the process. Out: the page, JSON and server-sent events.
//! Always holds: a request without a session learns nothing but the page; a session needs a code that `mpvpn
//! dashboard` gets over the local API, and that works once; connections, sessions, streams, sizes and times
//! are bounded, and a slow reader gets less and holds up nobody; while nobody looks, the process is asked for
//! its counters once a second.
//!
//! Pure: `history`, `logins`, `origin`, `view`. The rest is the edge.
#![forbid(unsafe_code)]
// This crate is at the edge: sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod actions;
mod api;
mod event_stream;
mod frame;
mod history;
mod live;
mod logins;
mod origin;
mod page;
mod response;
mod secret;
mod stalled_writes;
mod view;

use std::{
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use mpvpn_api::{DashboardLink, RequestHandler};
use mpvpn_config::{ClientConfig, ServerConfig};
use mpvpn_http::limiter::{ClientNetwork, Limiter, RefusalLog, Slot};
use mpvpn_identity::{
    identity::Identity,
    tls::{self, ServerCertificates},
};
use mpvpn_input::{Error, Result, role::Role};
use mpvpn_status::events::{EventSender, SharedEventLog};
use mpvpn_users::credentials::guess_address;
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use history::History;
use live::Live;
use logins::Logins;
use stalled_writes::{MAX_WRITE_WAIT, limited};

/// Connections that wait for an answer, at once. When there are more, the oldest is closed. More: memory of
/// 16 kB each for strangers; fewer: a browser that loads the page is disturbed by others. Chosen.
const MAX_CONNECTIONS: usize = 64;
/// Time of a TLS handshake. Longer: unfinished handshakes keep their places; shorter: slow networks fail.
/// Chosen.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The delay before the next accept when no descriptors are left. Shorter: busy waiting; longer: browsers
/// wait. Chosen.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A bound address with all that answers need.
#[derive(Debug)]
pub struct Dashboard {
    listener: TcpListener,
    tls: Option<Tls>,
    shared: Arc<Shared>,
}

/// The certificates that are shown, and what shows them.
#[derive(derive_more::Debug)]
#[debug("Tls(…)")]
struct Tls {
    acceptor: TlsAcceptor,
    certificates: ServerCertificates,
}

/// State shared by all connections before the process can be asked.
#[derive(Debug)]
struct Shared {
    /// The configuration of a server; `None` at a client.
    server: Option<Box<ServerConfig>>,
    /// The name of the instance.
    name: String,
    address: SocketAddr,
    /// Host and port in links.
    authority: String,
    logins: Mutex<Logins>,
}

impl Shared {
    fn logins(&self) -> MutexGuard<'_, Logins> {
        // It is consistent even after a panic elsewhere.
        self.logins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes links that log in. Clones make links for the same dashboard.
#[derive(Clone, Debug)]
pub struct LoginLinks {
    shared: Arc<Shared>,
    scheme: &'static str,
}

impl LoginLinks {
    /// A new link.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn create(&self) -> Result<DashboardLink> {
        let code = secret::Secret::generate()?;
        let url = format!("{}://{}/#login={}", self.scheme, self.shared.authority, code.reveal());
        self.shared.logins().add_code(Instant::now(), code);
        Ok(DashboardLink { url, expires_s: logins::CODE_LIFETIME.as_secs() })
    }
}

impl Dashboard {
    /// Listens at the address that a client's configuration names, if it names one.
    ///
    /// # Errors
    /// If the kernel refuses the address, or the certificate cannot be used.
    pub fn of_client(config: &ClientConfig) -> Result<Option<Self>> {
        let Some(dashboard) = &config.dashboard else { return Ok(None) };
        let identity =
            dashboard.cert.as_ref().map(|files| Identity::load(&files.cert, &files.key)).transpose()?;
        Self::bind(dashboard.address, identity.map(ServerCertificates::from), None, &config.name).map(Some)
    }

    /// Listens at the address that a server's configuration names, if it names one. Outside of the loopback
    /// it shows these `certificates`.
    ///
    /// # Errors
    /// If the kernel refuses the address, or TLS cannot be set up.
    pub fn of_server(config: &ServerConfig, certificates: &ServerCertificates) -> Result<Option<Self>> {
        let Some(address) = config.dashboard else { return Ok(None) };
        let is_loopback = address.ip().to_canonical().is_loopback();
        let certificates = (!is_loopback).then(|| certificates.clone());
        Self::bind(address, certificates, Some(config), &config.name).map(Some)
    }

    fn bind(
        address: SocketAddr,
        certificates: Option<ServerCertificates>,
        server: Option<&ServerConfig>,
        name: &str,
    ) -> Result<Self> {
        let listener = mpvpn_http::listen("dashboard", address)?;
        let address = listener.local_addr().unwrap_or(address);
        let tls = certificates.map(|certificates| {
            let config = tls::server_config(&certificates, &[b"http/1.1"])?;
            Ok::<_, Error>(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), certificates })
        });
        let shared = Shared {
            server: server.map(|config| Box::new(config.clone())),
            name: name.to_owned(),
            address,
            authority: authority(address, server),
            logins: Mutex::default(),
        };
        Ok(Self { listener, tls: tls.transpose()?, shared: Arc::new(shared) })
    }

    /// The maker of login links.
    pub fn login_links(&self) -> LoginLinks {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        LoginLinks { shared: Arc::clone(&self.shared), scheme }
    }

    /// Answers browsers until dropped; inside a tokio runtime with I/O and time. Browsers see `events`;
    /// log-ins are reported by `reporter`.
    ///
    /// # Errors
    /// If the runtime refuses the listener.
    pub async fn serve(
        self,
        source: RequestHandler,
        events: SharedEventLog,
        reporter: EventSender,
    ) -> Result<()> {
        let listener = mpvpn_http::into_tokio("dashboard", self.listener)?;
        let role = if self.shared.server.is_some() { Role::Server } else { Role::Client };
        let site = Arc::new(Site {
            live: Live::new(role, Arc::clone(&source)),
            history: Arc::default(),
            refusals: RefusalLog::default(),
            role,
            shared: self.shared,
            source,
            events,
            reporter,
            tls: self.tls,
        });
        // All browsers of a machine have one address: each connection counts for itself, and the oldest makes
        // room.
        let limiter = Limiter::new(MAX_CONNECTIONS, 1);
        let mut connections = JoinSet::new();
        connections.spawn({
            let site = Arc::clone(&site);
            async move { site.live.run(&site.history).await }
        });
        loop {
            while connections.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let Ok(slot) = limiter.acquire_evicting(peer) else { continue };
                    connections.spawn(Arc::clone(&site).connection(stream, peer, slot));
                }
                Err(error) => {
                    tracing::debug!("dashboard: {error}");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// Host and port in links: an address that stands for all of the machine is replaced by one at which browsers
/// reach it.
fn authority(address: SocketAddr, server: Option<&ServerConfig>) -> String {
    if !address.ip().is_unspecified() {
        return address.to_string();
    }
    let public = server.and_then(|config| config.public.as_ref()).map(|public| public.host.clone());
    let host = public.or_else(|| guess_address(&[address]).map(|ip| ip.to_string()));
    match host {
        Some(host) if host.contains(':') => format!("[{host}]:{}", address.port()),
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    }
}

/// State shared by all connections.
struct Site {
    role: Role,
    shared: Arc<Shared>,
    tls: Option<Tls>,
    source: RequestHandler,
    events: SharedEventLog,
    reporter: EventSender,
    live: Live,
    history: Arc<Mutex<History>>,
    refusals: RefusalLog,
}

/// The far end of a connection, and this one.
#[derive(Clone, Copy, Debug)]
struct Ends {
    network: ClientNetwork,
    local: SocketAddr,
}

impl Site {
    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr, slot: Slot<SocketAddr>) {
        let Ok(local) = stream.local_addr() else { return };
        let ends = Ends { network: ClientNetwork::of(peer.ip()), local };
        let evicted = slot.evicted();
        let slot = Mutex::new(Some(slot));
        // A stream is counted by its session, no longer by its connection.
        let on_lasting = || drop(slot.lock().unwrap_or_else(PoisonError::into_inner).take());
        let answer = |request| api::answer(Arc::clone(&self), ends, request);
        let served = async {
            match &self.tls {
                None => {
                    mpvpn_http::serve_connection(limited(stream, MAX_WRITE_WAIT), answer, on_lasting).await
                }
                Some(tls) => match timeout(TLS_HANDSHAKE_TIMEOUT, tls.acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => {
                        mpvpn_http::serve_connection(limited(stream, MAX_WRITE_WAIT), answer, on_lasting)
                            .await
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(%peer, %error, "dashboard: the TLS handshake of a browser failed");
                        Ok(())
                    }
                    Err(_) => Ok(()),
                },
            }
        };
        tokio::select! {
            ended = served => {
                if let Err(error) = ended {
                    tracing::debug!(%peer, "dashboard: {error}");
                }
            }
            () = evicted.notified() => tracing::debug!(%peer, "dashboard: closed for a newer connection"),
        }
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The name of the cookie: browsers send the cookies of a host to all its ports.
    fn cookie_name(&self) -> String {
        let prefix = if self.tls.is_some() { "__Host-" } else { "" };
        format!("{prefix}mpvpn-dashboard-{}", self.shared.address.port())
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
