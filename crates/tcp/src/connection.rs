//! One TCP connection of a client to its server that carries QUIC packets.
//!
//! In: a link, and the data plane's loopback sockets, one per class. Out: events of the connection. Always
//! holds: each socket has an HTTP/2 stream (extended CONNECT, RFC 8441; CONNECT-UDP, RFC 9298, to the server
//! itself); the loopback sockets on this side stay the same from one TCP connection to the next, so that to
//! QUIC a new connection is only a change of the client's address; the end of one stream ends the connection.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
};

use bytes::Bytes;
use h2::{
    SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use mpvpn_config::{ClientConfig, ViaProxy};
use mpvpn_error::RunError;
use mpvpn_identity::{
    tls::{self, LastRefusal},
    token::Token,
};
use mpvpn_masque::{
    connect_ip::RefusalDetail,
    connect_udp,
    extensions::{self, Extensions},
};
use mpvpn_names::lookup::{Resolve, look_up};
use mpvpn_os::tcp::{KeepAlive, MptcpState, Protocol, Tuning};
use mpvpn_sockets::bind_options::BindOptions;
use mpvpn_types::Duration;
use rustls::pki_types::ServerName;
use tokio::{
    net::TcpStream,
    runtime::Handle,
    task::AbortHandle,
    time::{sleep, timeout},
};
use tokio_rustls::client::TlsStream;

use super::{
    DSCP_KEY, congestion,
    pump::{LoopbackSocket, PumpCounters, pump},
};
use crate::{
    dial::{ALPN, DialError, DialOptions, DialStep, ProxyTarget, dial, first_ready},
    h2_stream::H2Stream,
};

/// The timeout of each step, which doubles with each failure up to the maximum. Short at first: after an
/// interruption a new attempt gets through sooner than one whose SYN retransmissions back off. Shorter: slow
/// networks fail. Longer: longer gaps.
const INITIAL_STEP_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of parallel sockets after a failed attempt or when a connection has gone silent, and the last
/// attempt that uses them. More: load. Fewer: back later after an interruption.
const PARALLEL_CONNECTS: usize = 4;
const LAST_PARALLEL_ATTEMPT: u32 = 6;
/// How often a SYN is repeated after that, a second apart ([`RTO_MAX`]). More: a link that leads nowhere
/// costs more. Fewer: losses and round trips of seconds are in the way.
const LATE_SYN_RETRIES: u8 = 2;
/// How long the server may take to answer a request. Chosen (open question of docs/design/transport.md).
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The flow-control windows of a stream and of the connection (bytes): what a fast link with a long delay
/// holds (8 MiB are 640 Mbit/s at 100 ms). Smaller: slow. Larger: memory.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Bytes buffered in h2 for one stream. Larger: packets wait where no scheduler sees them. Smaller: TCP runs
/// dry.
const MAX_SEND_BUFFER: usize = 128 << 10;
/// TCP_NOTSENT_LOWAT: unsent bytes in the kernel. Larger: packets wait where no scheduler sees them. Smaller:
/// TCP runs dry.
const NOTSENT_LOWAT: u32 = 128 << 10;
/// TCP_USER_TIMEOUT, and the keep-alives that fit it: a dead peer is detected within this time. Chosen (open
/// question of docs/design/transport.md).
const USER_TIMEOUT: Duration = Duration::from_secs(20);
const KEEP_ALIVE: KeepAlive =
    KeepAlive { idle: Duration::from_secs(10), interval: Duration::from_secs(3), probes: 3 };
/// The longest retransmission timeout (TCP_RTO_MAX_MS). Longer: lost segments wait. Shorter: load on dead
/// links. Chosen (open question of docs/design/transport.md).
const RTO_MAX: Duration = Duration::from_secs(1);
/// How long the process waits at its end for the last packets to leave through TCP. Chosen (open question of
/// docs/design/transport.md).
pub const CLOSE_LINGER: Duration = Duration::from_millis(150);

/// Configuration shared by all TCP connections of a client.
pub struct TcpTransportConfig {
    runtime: Handle,
    tls: Arc<rustls::ClientConfig>,
    refusal: LastRefusal,
    name: ServerName<'static>,
    request: (Uri, Option<String>),
    via: Option<ViaProxy>,
    /// Resolves the proxy's name; `None` where the system does it.
    proxy_resolver: Option<Resolve>,
    proxy_target: Option<ProxyTarget>,
}

impl TcpTransportConfig {
    /// # Errors
    /// If the server's name is not valid, or its CA cannot be read.
    pub fn new(
        config: &ClientConfig,
        token: Option<&Token>,
        runtime: Handle,
        proxy_resolver: Option<Resolve>,
    ) -> Result<Self, RunError> {
        let invalid = |what| {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, config.server.to_string());
            RunError::io(what)(error)
        };
        let refusal = LastRefusal::default();
        let tls = tls::client_config_reporting(&config.trust, config.cert.as_ref(), &[ALPN], &refusal)?;
        let name = ServerName::try_from(config.server.host.clone());
        let authority = config.server.to_string();
        let target = authority.parse().map_err(|_| invalid("ask for the server by its name"))?;
        let path = connect_udp::path(&target);
        let uri = Uri::builder().scheme("https").authority(authority).path_and_query(path).build();
        let token = token.map(|token| format!("Bearer {}", token.reveal()));
        let via = config.via.clone();
        Ok(Self {
            runtime,
            tls: Arc::new(tls),
            refusal,
            name: name.map_err(|_| invalid("recognise the server by its name"))?,
            request: (uri.map_err(|_| invalid("ask for the server by its name"))?, token),
            proxy_target: via.as_ref().map(|via| ProxyTarget {
                server: config.server.clone(),
                credentials: via.credentials.clone(),
            }),
            via,
            proxy_resolver,
        })
    }

    /// Whether connections use a proxy.
    pub fn has_proxy(&self) -> bool {
        self.via.is_some()
    }
}

/// The loopback sockets on this side of a link's connections, by the address of the data plane's socket to
/// which each is connected.
pub type LoopbackSockets = Arc<Mutex<BTreeMap<SocketAddr, Arc<LoopbackSocket>>>>;

/// The parameters of a connection attempt.
pub struct ConnectRequest {
    /// The link.
    pub bind_options: BindOptions,
    /// The server's addresses.
    pub to: Vec<SocketAddr>,
    /// The addresses of the data plane's sockets.
    pub data_plane_addrs: Vec<SocketAddr>,
    /// The loopback sockets on this side.
    pub sockets: LoopbackSockets,
    /// The number of failed attempts before.
    pub failures: u32,
    /// The DSCP of its packets.
    pub dscp: u8,
}

/// An event of a connection.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// The connection carries packets.
    Established(EstablishedConnection),
    /// The attempt failed, for this reason, and whether something answered it: a captive portal, say, or a
    /// server that refuses the connection.
    Failed(RequestError, bool),
    /// The connection has closed, for this reason.
    Closed(String),
}

/// An established connection.
#[derive(Clone, Debug)]
pub struct EstablishedConnection {
    /// Its own address.
    pub local: SocketAddr,
    /// The server's address.
    pub remote: SocketAddr,
    /// Whether it uses Multipath TCP.
    pub multipath: bool,
    /// The loopback addresses to which the data plane's sockets send, in the order of the request.
    pub loopback_addrs: Vec<SocketAddr>,
}

/// A connection or an attempt. Dropping it closes it.
#[derive(Debug)]
pub struct TcpConnection(AbortHandle);

impl TcpConnection {
    /// Starts an attempt; `tell` is called on another thread. `before` is aborted when this connection is
    /// established.
    pub fn start(
        stable: &Arc<TcpTransportConfig>,
        request: ConnectRequest,
        before: Option<AbortHandle>,
        tell: impl Fn(ConnectionEvent) + Send + 'static,
    ) -> Self {
        let stable = Arc::clone(stable);
        let runtime = stable.runtime.clone();
        let run = async move {
            let mut is_answered = true;
            match Box::pin(connect(&stable, request, &mut is_answered)).await {
                Ok(connected) => {
                    if let Some(before) = before {
                        before.abort();
                    }
                    tell(ConnectionEvent::Established(connected.info.clone()));
                    let reason = connected.run().await;
                    tell(ConnectionEvent::Closed(reason));
                }
                Err(error) => tell(ConnectionEvent::Failed(error, is_answered)),
            }
        };
        Self(runtime.spawn(run).abort_handle())
    }

    /// Lets the connection that replaces this one abort it.
    pub fn abort_handle(&self) -> AbortHandle {
        self.0.clone()
    }
}

impl Drop for TcpConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A request that was not answered yet.
pub(crate) type PendingResponse = (ResponseFuture, SendStream<Bytes>);

/// The task that reads and writes an HTTP/2 connection.
pub(crate) type Driver = Pin<Box<dyn Future<Output = Result<(), h2::Error>> + Send>>;

struct EstablishedStreams {
    info: EstablishedConnection,
    tcp_socket: OwnedFd,
    /// The task of the connection.
    driver: Driver,
    streams: Vec<(Arc<LoopbackSocket>, H2Stream)>,
}

impl EstablishedStreams {
    /// Relays packets until something ends; returns the reason.
    async fn run(self) -> String {
        let pumps = self.streams.into_iter().map(|(socket, stream)| async move {
            match pump(&socket, stream, &PumpCounters::default()).await {
                Ok(()) => "the server has ended it".to_owned(),
                Err(error) => error.to_string(),
            }
        });
        let mut pumps: Vec<_> = pumps.map(Box::pin).collect();
        tokio::select! {
            biased;
            reason = first_ready(&mut pumps) => reason,
            ended = self.driver => match ended {
                Ok(()) => "the server has closed the connection".to_owned(),
                Err(error) => error.to_string(),
            },
            never = congestion::adapt_congestion_control(self.tcp_socket) => match never {},
        }
    }
}

impl TcpTransportConfig {
    /// The options for connecting over a link. `to` are the server's addresses, `limit` is the timeout of
    /// each step.
    pub(crate) async fn dial(
        &self,
        bind_options: BindOptions,
        to: Vec<SocketAddr>,
        protocol: Protocol,
        dscp: u8,
        limit: Duration,
    ) -> Result<DialOptions, String> {
        let to = match &self.via {
            None => to,
            Some(via) => {
                let found = look_up(via.proxy.clone(), self.proxy_resolver.clone()).await;
                found.map_err(|error| format!("the proxy {}: {error}", via.proxy))?
            }
        };
        Ok(DialOptions {
            bind_options,
            to,
            via: self.proxy_target.clone(),
            protocol,
            sockets: 1,
            tuning: Tuning {
                keep_alive: KEEP_ALIVE,
                notsent_lowat: Some(NOTSENT_LOWAT),
                user_timeout: Some(USER_TIMEOUT),
                rto_max: Some(RTO_MAX),
                syn_retries: None,
                dscp,
            },
            tls: Arc::clone(&self.tls),
            refusal: self.refusal.clone(),
            name: self.name.clone(),
            limit,
        })
    }
}

async fn connect(
    stable: &TcpTransportConfig,
    request: ConnectRequest,
    is_answered: &mut bool,
) -> Result<EstablishedStreams, RequestError> {
    let limit = INITIAL_STEP_TIMEOUT.saturating_mul(1 << request.failures.min(4)).min(MAX_STEP_TIMEOUT);
    // After a failure plain TCP, because some networks drop unknown TCP options, and because its
    // retransmissions can be made frequent.
    let protocol = if request.failures == 0 { Protocol::Mptcp } else { Protocol::Tcp };
    let mut what = stable.dial(request.bind_options, request.to, protocol, request.dscp, limit).await?;
    if (1..=LAST_PARALLEL_ATTEMPT).contains(&request.failures) {
        what.sockets = PARALLEL_CONNECTS;
    }
    what.tuning.syn_retries = (request.failures > LAST_PARALLEL_ATTEMPT).then_some(LATE_SYN_RETRIES);
    let dialled = dial(&what).await.map_err(|error: DialError| {
        *is_answered =
            !matches!(error, DialError::Connect { .. } | DialError::TimedOut { step: DialStep::Connect, .. });
        error.to_string()
    })?;
    let (local, remote) = (dialled.local, dialled.peer);
    let multipath = dialled.multipath == MptcpState::Active;
    let tcp_socket = dialled.stream.get_ref().0.as_fd().try_clone_to_owned();
    let tcp_socket = tcp_socket.map_err(|error| error.to_string())?;
    let asking = async {
        let (mut requests, mut driver) = start_http2(dialled.stream).await?;
        let mut all = Vec::new();
        for _ in &request.data_plane_addrs {
            all.push(drive_while(&mut driver, send_connect_udp(&mut requests, stable, request.dscp)).await??);
        }
        let mut streams = Vec::new();
        for (data_plane_addr, pending) in request.data_plane_addrs.iter().zip(all) {
            let stream = drive_while(&mut driver, await_response(pending)).await??;
            streams.push((loopback_socket(&request.sockets, *data_plane_addr)?, stream));
        }
        Ok::<_, RequestError>((driver, streams))
    };
    let (driver, streams) = timeout(limit.max(RESPONSE_TIMEOUT), asking)
        .await
        .map_err(|_| "the server does not answer in HTTP/2".to_owned())??;
    let loopback_addrs = streams.iter().map(|(socket, _)| socket.local_addr());
    let loopback_addrs = loopback_addrs.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    Ok(EstablishedStreams {
        info: EstablishedConnection { local, remote, multipath, loopback_addrs },
        tcp_socket,
        driver,
        streams,
    })
}

/// Starts HTTP/2, and waits until extended CONNECT is allowed.
pub(crate) async fn start_http2(
    stream: TlsStream<TcpStream>,
) -> Result<(SendRequest<Bytes>, Driver), String> {
    let (requests, connection) = h2::client::Builder::new()
        .enable_push(false)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .handshake::<_, Bytes>(stream)
        .await
        .map_err(|error| error.to_string())?;
    let mut driver: Driver = Box::pin(connection);
    wait_for_extended_connect(&mut driver, &requests).await?;
    Ok((requests, driver))
}

/// Waits for the server's SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 8441 §3).
async fn wait_for_extended_connect(driver: &mut Driver, requests: &SendRequest<Bytes>) -> Result<(), String> {
    let said = poll_fn(|cx| {
        let ended = driver.as_mut().poll(cx);
        match ended {
            _ if requests.is_extended_connect_protocol_enabled() => Poll::Ready(Ok(())),
            Poll::Ready(ended) => Poll::Ready(Err(closed(ended))),
            Poll::Pending => Poll::Pending,
        }
    });
    let patience = async {
        sleep(RESPONSE_TIMEOUT).await;
        Err("the server does not know extended CONNECT: it is not mpvpn, or an older version".to_owned())
    };
    tokio::select! { said = said => said, late = patience => late }
}

/// Runs a future while driving the connection.
pub(crate) async fn drive_while<T>(driver: &mut Driver, what: impl Future<Output = T>) -> Result<T, String> {
    let mut what = pin!(what);
    poll_fn(|cx| {
        if let Poll::Ready(done) = what.as_mut().poll(cx) {
            return Poll::Ready(Ok(done));
        }
        driver.as_mut().poll(cx).map(|ended| Err(closed(ended)))
    })
    .await
}

fn closed(ended: Result<(), h2::Error>) -> String {
    ended.map_or_else(|error| error.to_string(), |()| "the server has closed the connection".to_owned())
}

/// Why the server accepts no packets.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The token is wrong.
    #[error("the server refuses the token (HTTP status 401)")]
    Unauthorized,
    /// The server knows this client and refuses it, for this reason.
    #[error("the server refuses this client: {0}")]
    Refused(String),
    /// Another status.
    #[error("the server refuses QUIC inside HTTP/2 (HTTP status {0})")]
    Status(u16),
    /// The connection or HTTP/2 failed.
    #[error("{0}")]
    Http2(String),
}

impl From<String> for RequestError {
    fn from(reason: String) -> Self {
        Self::Http2(reason)
    }
}

/// Sends a CONNECT-UDP request to the server itself. The server marks its packets of this connection with
/// `dscp`; 0 asks for nothing.
pub async fn send_connect_udp(
    requests: &mut SendRequest<Bytes>,
    stable: &TcpTransportConfig,
    dscp: u8,
) -> Result<PendingResponse, RequestError> {
    let failed = |error: &dyn ToString| RequestError::Http2(error.to_string());
    let (uri, authorization) = &stable.request;
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .uri(uri.clone())
        .header("capsule-protocol", "?1")
        .extension(h2::ext::Protocol::from_static("connect-udp"));
    if let Some(authorization) = authorization {
        request = request.header("authorization", sensitive(authorization)?);
    }
    if dscp != 0 {
        let mut offered = Extensions::default();
        offered.set(DSCP_KEY, dscp.into());
        request = request.header(extensions::FIELD, sensitive(&offered.value())?);
    }
    let request = request.body(()).map_err(|error| failed(&error))?;
    poll_fn(|cx| requests.poll_ready(cx)).await.map_err(|error| failed(&error))?;
    requests.send_request(request, false).map_err(|error| failed(&error))
}

/// A value that HPACK never indexes (RFC 7541 §7.1.3).
fn sensitive(value: &str) -> Result<HeaderValue, RequestError> {
    let mut value = HeaderValue::from_str(value).map_err(|error| RequestError::Http2(error.to_string()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Waits for the response; returns the stream if the request was accepted.
pub(crate) async fn await_response((answer, send): PendingResponse) -> Result<H2Stream, RequestError> {
    let answer = answer.await.map_err(|error| RequestError::Http2(error.to_string()))?;
    match answer.status() {
        status if status.is_success() => Ok(H2Stream::new(send, answer.into_body())),
        StatusCode::UNAUTHORIZED => Err(RequestError::Unauthorized),
        status => Err(match answer.headers().get("proxy-status") {
            Some(field) if status == StatusCode::FORBIDDEN => {
                RequestError::Refused(RefusalDetail::of_field(field.as_bytes()).text().to_owned())
            }
            _ => RequestError::Status(status.as_u16()),
        }),
    }
}

/// The loopback socket for a socket of the data plane, made if necessary.
fn loopback_socket(
    sockets: &LoopbackSockets,
    data_plane_addr: SocketAddr,
) -> Result<Arc<LoopbackSocket>, String> {
    let mut sockets = sockets.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(socket) = sockets.get(&data_plane_addr) {
        return Ok(Arc::clone(socket));
    }
    let socket = Arc::new(LoopbackSocket::connect(data_plane_addr).map_err(|error| error.to_string())?);
    sockets.insert(data_plane_addr, Arc::clone(&socket));
    Ok(socket)
}
