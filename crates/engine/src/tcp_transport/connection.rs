//! One TCP connection of a client to its server, and what travels in it.
//!
//! In: a link, and sockets of the data data_plane_addr on this machine, one for each class. Out: news whether the connection stands. Always
//! holds: a stream of HTTP/2 for each socket (extended CONNECT, RFC 8441, for CONNECT-UDP, RFC 9298, to the server
//! itself); the sockets on this side stay the same from one connection to the next, so that a new one is no more to
//! QUIC than a client with another address; when one of the streams ends, all of it does.

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
use http::{Method, Request, StatusCode, Uri};
use mpvpn_control::{
    config::{ClientConfig, Trust, ViaProxy},
    tls::{self, LastRefusal},
};
use mpvpn_masque::connect_udp;
use mpvpn_os::tcp::{KeepAlive, MptcpState, Protocol, Tuning};
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
    DSCP_HEADER, congestion,
    pump::{LoopbackSocket, PumpCounters, pump},
};
use crate::{
    EngineError,
    dial::{ALPN, DialError, DialOptions, ProxyTarget, dial, first_ready},
    h2_stream::H2Stream,
    links::BindOptions,
};

/// How long each step to a connection may take at first, and at most: after a cut a new attempt gets through sooner than
/// one that repeats its packets ever less often.
const INITIAL_STEP_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// LoopbackSockets that try to connect at the same time where the first attempt failed, or a connection has gone silent; and up to
/// which attempt.
const PARALLEL_CONNECTS: usize = 4;
const LAST_PARALLEL_ATTEMPT: u32 = 6;
/// The server answers a request within this time.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes under way from the server on a stream, and on all of them: what a fast link with a long delay holds.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Bytes that wait in memory to be sent on one stream: less than would delay a packet for long.
const MAX_SEND_BUFFER: usize = 128 << 10;
/// Bytes that wait in the kernel and were not sent yet.
const NOTSENT_LOWAT: u32 = 128 << 10;
/// A far end that is gone is found after so long.
const USER_TIMEOUT: Duration = Duration::from_secs(20);
const KEEP_ALIVE: KeepAlive =
    KeepAlive { idle: Duration::from_secs(10), interval: Duration::from_secs(3), probes: 3 };
/// What was lost is sent again after at most so long.
const RTO_MAX: Duration = Duration::from_secs(1);
/// Good-byes to the server have so long to leave.
pub(crate) const CLOSE_LINGER: Duration = Duration::from_millis(150);

/// What is the same for all connections of a client.
pub(crate) struct TcpTransportConfig {
    runtime: Handle,
    tls: Arc<rustls::ClientConfig>,
    refusal: LastRefusal,
    name: ServerName<'static>,
    request: (Uri, Option<String>),
    via: Option<ViaProxy>,
    proxy_target: Option<ProxyTarget>,
}

impl TcpTransportConfig {
    /// # Errors
    /// If the name of the server is none, or its credentials cannot be read.
    pub(crate) fn new(config: &ClientConfig, runtime: Handle) -> Result<Self, EngineError> {
        let invalid = |what| {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, config.server.to_string());
            EngineError::io(what)(error)
        };
        let refusal = LastRefusal::default();
        let tls = tls_of(&config.trust, &refusal)?;
        let name = ServerName::try_from(config.server.host.clone());
        let authority = config.server.to_string();
        let target = authority.parse().map_err(|_| invalid("ask for the server by its name"))?;
        let path = connect_udp::path(&connect_udp::default_template(), &target);
        let uri = Uri::builder().scheme("https").authority(authority).path_and_query(path).build();
        let token = config.load_token()?.map(|token| format!("Bearer {}", token.reveal()));
        let via = config.via.clone();
        Ok(Self {
            runtime,
            tls,
            refusal,
            name: name.map_err(|_| invalid("recognise the server by its name"))?,
            request: (uri.map_err(|_| invalid("ask for the server by its name"))?, token),
            proxy_target: via.as_ref().map(|via| ProxyTarget {
                server: config.server.clone(),
                credentials: via.credentials.clone(),
            }),
            via,
        })
    }

    /// Whether connections are made through a proxy.
    pub(crate) fn has_proxy(&self) -> bool {
        self.via.is_some()
    }
}

fn tls_of(trust: &Trust, refusal: &LastRefusal) -> Result<Arc<rustls::ClientConfig>, EngineError> {
    Ok(Arc::new(tls::client_config_reporting(trust, &[ALPN], refusal)?))
}

/// The sockets on this side of a link's connections, by those of the data data_plane_addr that they are connected to.
pub(crate) type LoopbackSockets = Arc<Mutex<BTreeMap<SocketAddr, Arc<LoopbackSocket>>>>;

/// A connection to make.
pub(crate) struct ConnectRequest {
    pub(crate) bind_options: BindOptions,
    /// Addresses of the server.
    pub(crate) to: Vec<SocketAddr>,
    /// The sockets of the data data_plane_addr.
    pub(crate) data_plane_addrs: Vec<SocketAddr>,
    pub(crate) sockets: LoopbackSockets,
    /// How many attempts have failed before.
    pub(crate) failures: u32,
    /// The DSCP of its packets.
    pub(crate) dscp: u8,
}

/// What becomes of a connection.
#[derive(Debug)]
pub(crate) enum ConnectionEvent {
    /// It carries packets.
    Established(EstablishedConnection),
    /// It could not be made.
    Failed(String),
    /// It is over.
    Closed(String),
}

/// A connection that stands.
#[derive(Clone, Debug)]
pub(crate) struct EstablishedConnection {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// Whether it is one of Multipath TCP.
    pub(crate) multipath: bool,
    /// Where the data data_plane_addr's sockets reach it, in the order in which they were named.
    pub(crate) loopback_addrs: Vec<SocketAddr>,
}

/// A connection, or an attempt at one. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct TcpConnection(AbortHandle);

impl TcpConnection {
    /// Starts to connect; `tell` is called in another thread. `before` ends as soon as this one stands.
    pub(crate) fn start(
        stable: &Arc<TcpTransportConfig>,
        request: ConnectRequest,
        before: Option<AbortHandle>,
        tell: impl Fn(ConnectionEvent) + Send + 'static,
    ) -> Self {
        let stable = Arc::clone(stable);
        let runtime = stable.runtime.clone();
        let run = async move {
            match Box::pin(connect(&stable, request)).await {
                Ok(connected) => {
                    if let Some(before) = before {
                        before.abort();
                    }
                    tell(ConnectionEvent::Established(connected.info.clone()));
                    let reason = connected.run().await;
                    tell(ConnectionEvent::Closed(reason));
                }
                Err(reason) => tell(ConnectionEvent::Failed(reason)),
            }
        };
        Self(runtime.spawn(run).abort_handle())
    }

    /// For the one that takes its place.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.0.clone()
    }
}

impl Drop for TcpConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A request without an answer yet.
pub(super) type PendingResponse = (ResponseFuture, SendStream<Bytes>);

/// Reads and writes a connection of HTTP/2.
pub(super) type Driver = Pin<Box<dyn Future<Output = Result<(), h2::Error>> + Send>>;

struct EstablishedStreams {
    info: EstablishedConnection,
    tcp_socket: OwnedFd,
    /// Reads and writes the connection.
    driver: Driver,
    streams: Vec<(Arc<LoopbackSocket>, H2Stream)>,
}

impl EstablishedStreams {
    /// Moves packets until something ends; why it did.
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
    /// How to connect over a link; `to` are addresses of the server, and `limit` is for each step.
    pub(super) async fn dial(
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
                let found = tokio::net::lookup_host((via.proxy.host.as_str(), via.proxy.port)).await;
                found.map_err(|error| format!("the proxy {}: {error}", via.proxy))?.collect()
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
                dscp,
            },
            tls: Arc::clone(&self.tls),
            refusal: self.refusal.clone(),
            name: self.name.clone(),
            limit,
        })
    }
}

async fn connect(stable: &TcpTransportConfig, request: ConnectRequest) -> Result<EstablishedStreams, String> {
    let limit = INITIAL_STEP_TIMEOUT.saturating_mul(1 << request.failures.min(4)).min(MAX_STEP_TIMEOUT);
    // Some networks drop what they do not know, and TCP can be told to repeat soon.
    let protocol = if request.failures == 0 { Protocol::Mptcp } else { Protocol::Tcp };
    let mut what = stable.dial(request.bind_options, request.to, protocol, request.dscp, limit).await?;
    if (1..=LAST_PARALLEL_ATTEMPT).contains(&request.failures) {
        what.sockets = PARALLEL_CONNECTS;
    }
    let dialled = dial(&what).await.map_err(|error: DialError| error.to_string())?;
    let (local, remote) = (dialled.local, dialled.peer);
    let multipath = matches!(dialled.multipath, MptcpState::Active(_));
    let tcp_socket = dialled.stream.get_ref().0.as_fd().try_clone_to_owned();
    let tcp_socket = tcp_socket.map_err(|error| error.to_string())?;
    let asking = async {
        let (mut requests, mut driver) = start_http2(dialled.stream).await?;
        let denied = |denied: RequestError| denied.to_string();
        let mut all = Vec::new();
        for _ in &request.data_plane_addrs {
            all.push(
                drive_while(&mut driver, send_connect_udp(&mut requests, stable, request.dscp))
                    .await?
                    .map_err(denied)?,
            );
        }
        let mut streams = Vec::new();
        for (data_plane_addr, pending) in request.data_plane_addrs.iter().zip(all) {
            let stream = drive_while(&mut driver, await_response(pending)).await?.map_err(denied)?;
            streams.push((loopback_socket(&request.sockets, *data_plane_addr)?, stream));
        }
        Ok::<_, String>((driver, streams))
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

/// Begins HTTP/2, and waits until requests may be sent.
pub(super) async fn start_http2(
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

/// Waits until the server has said that it knows extended CONNECT (RFC 8441 §3).
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

/// Does something on a connection that goes on meanwhile.
pub(super) async fn drive_while<T>(driver: &mut Driver, what: impl Future<Output = T>) -> Result<T, String> {
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

/// Why the server gives no stream of packets.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error("the server refuses the token (HTTP status 401)")]
    Unauthorized,
    #[error("the server refuses QUIC inside HTTP/2 (HTTP status {0})")]
    Status(u16),
    #[error("{0}")]
    Http2(String),
}

/// Asks for a stream of packets to the server itself, which is to mark its packets of this connection with a DSCP; 0 asks for
/// none.
pub(super) async fn send_connect_udp(
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
        request = request.header("authorization", authorization);
    }
    if dscp != 0 {
        request = request.header(DSCP_HEADER, u16::from(dscp));
    }
    let request = request.body(()).map_err(|error| failed(&error))?;
    poll_fn(|cx| requests.poll_ready(cx)).await.map_err(|error| failed(&error))?;
    requests.send_request(request, false).map_err(|error| failed(&error))
}

/// What came of it.
pub(super) async fn await_response((answer, send): PendingResponse) -> Result<H2Stream, RequestError> {
    let answer = answer.await.map_err(|error| RequestError::Http2(error.to_string()))?;
    match answer.status() {
        status if status.is_success() => Ok(H2Stream::new(send, answer.into_body())),
        StatusCode::UNAUTHORIZED => Err(RequestError::Unauthorized),
        status => Err(RequestError::Status(status.as_u16())),
    }
}

/// The socket that talks to one of the data data_plane_addr.
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

#[cfg(test)]
mod tests;
