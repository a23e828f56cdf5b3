//! Serves CONNECT, CONNECT-UDP and CONNECT-IP over TCP (except the TCP transport of the server's own QUIC).
//!
//! In: requests of HTTP/1.1 and HTTP/2. Out: the answers of this server's own HTTP/3 to the same requests,
//! and bytes in both directions. So one place decides what is allowed, to whom and how much. Always holds:
//! each TCP connection has its own connection to the server's QUIC, made when first needed; its requests and
//! their buffers are bounded; an abort on one side is an abort, never an end, on the other.

mod connection;
mod relay;

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, server::SendResponse};
use http::{Request, Response};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use mpvpn_error::RunError;
use mpvpn_http::limiter::{ClientNetwork, Limiter, Slot};
use mpvpn_identity::{
    random,
    tls::{self, ServerCertificates},
};
use mpvpn_masque::{
    extensions::{self, Extensions},
    h3::code,
    headers::{Headers, Section},
    request::{Rejection, RequestKind, classify},
};
use mpvpn_os::{UdpOptions, UdpSocket};
use mpvpn_quic::{ClientSetup, DATAGRAM_OVERHEAD, FlowControlWindows, TransportOptions};
use mpvpn_tcp::h2_stream::H2Stream;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

use super::{
    Body, full_body,
    http3_fields::{connect_headers, http1_acceptance, response_from},
    loopback_clients::LoopbackClients,
};
use connection::{GatewayConnection, GatewayRequest, IoBuffers};
use relay::{ClientSide, Content};

/// Connections to the server, in all and per client network. Each takes a descriptor. Chosen (open question
/// of docs/design/relay.md).
const MAX_CONNECTIONS: usize = 4096;
const MAX_CONNECTIONS_PER_NETWORK: usize = 1024;
/// Socket buffer of a connection in each direction (bytes). Smaller: losses on the loopback. Larger: memory.
/// Chosen.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;
/// Concurrent requests on one TCP connection. Chosen (open question of docs/design/relay.md).
const MAX_REQUESTS_PER_CONNECTION: usize = 128;
/// Receive windows of a stream and of the connection (bytes). They bound what waits here for a slow client;
/// smaller windows also bound the rate, which matters little on the loopback.
const RECEIVE_WINDOWS: FlowControlWindows =
    FlowControlWindows { stream: 256 << 10, connection: (256 << 10) * MAX_REQUESTS_PER_CONNECTION as u32 };
/// A UDP payload into which an IP packet of 1500 bytes fits, with the framing of DATAGRAM frames.
const MAX_UDP_PAYLOAD: u16 = 1500 + 2 + DATAGRAM_OVERHEAD as u16;
/// How long the server may take to answer; longer than the 20 s after which it gives up connecting to a
/// target.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest field section that is forwarded: the server's own limit (RFC 9114 §4.2.2).
const MAX_FIELD_SECTION_BYTES: usize = 16 << 10;
/// Fields that concern one connection, and so are not forwarded to another one.
const CONNECTION_FIELDS: [&[u8]; 4] = [b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding"];

/// Access to the server's own HTTP/3, for all connections that came to one address.
#[derive(derive_more::Debug)]
#[debug("Gateway({quic})")]
pub(super) struct Gateway {
    quic: SocketAddr,
    setup: ClientSetup,
    loopback_clients: LoopbackClients,
    limiter: Arc<Limiter<ClientNetwork>>,
    buffers: Arc<Mutex<IoBuffers>>,
}

impl Gateway {
    /// `quic` is the address of the server's QUIC socket on this machine, `certificates` those of the server;
    /// `loopback_clients` learns which client is behind each loopback socket.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub(super) fn new(
        quic: SocketAddr,
        certificates: &ServerCertificates,
        loopback_clients: LoopbackClients,
    ) -> Result<Arc<Self>, RunError> {
        let tls = Arc::new(tls::loopback_client_config(certificates, &[b"h3"])?);
        let options = TransportOptions {
            max_udp_payload: MAX_UDP_PAYLOAD,
            windows: RECEIVE_WINDOWS,
            ..TransportOptions::default()
        };
        let setup =
            ClientSetup::new(tls, &options, &random::<32>().map_err(RunError::io("get random numbers"))?)?;
        let (limiter, buffers) = (Limiter::new(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NETWORK), Arc::default());
        Ok(Arc::new(Self { quic, setup, loopback_clients, limiter, buffers }))
    }

    /// The gateway of one TCP connection, from `peer`. With `authorization`, this is the field of its
    /// requests instead of what the client sends.
    pub(super) fn client(self: &Arc<Self>, peer: SocketAddr, authorization: Option<String>) -> GatewayClient {
        GatewayClient { gateway: self.clone(), peer, authorization, connection: Mutex::default() }
    }
}

/// The gateway's state for one TCP connection.
#[derive(Debug)]
pub(super) struct GatewayClient {
    gateway: Arc<Gateway>,
    peer: SocketAddr,
    authorization: Option<String>,
    connection: Mutex<Option<Arc<GatewayConnection>>>,
}

impl GatewayClient {
    /// Answers an HTTP/2 request of an authenticated client, and returns when the request is complete.
    pub(super) async fn serve_http2(&self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (answer, accepted) = self.request(connect_headers(&request).unwrap_or_default()).await;
        // Fails only if the client has disconnected.
        let Ok(send) = respond.send_response(response_from(&answer), accepted.is_none()) else { return };
        if let Some(accepted) = accepted {
            accepted.relay(H2Stream::new(send, request.into_body())).await;
        }
    }

    /// Answers an HTTP/1.1 request of an authenticated client.
    pub(super) async fn serve_http1(&self, mut request: Request<Incoming>) -> Response<Body> {
        let (answer, accepted) = self.request(connect_headers(&request).unwrap_or_default()).await;
        let Some(accepted) = accepted else { return response_from(&answer).map(|()| full_body("")) };
        let response = http1_acceptance(&request, &answer);
        tokio::spawn(upgraded(hyper::upgrade::on(&mut request), accepted));
        response.map(|()| full_body(""))
    }

    /// Forwards a request to the server; returns the response, and the request's stream if it was accepted.
    pub(super) async fn request(&self, headers: Headers) -> (Headers, Option<AcceptedRequest>) {
        self.try_request(headers).await.unwrap_or_else(|refusal| (refusal.headers(), None))
    }

    async fn try_request(&self, headers: Headers) -> Result<(Headers, Option<AcceptedRequest>), Rejection> {
        let content = match classify(&headers)? {
            RequestKind::ConnectTcp => Content::Bytes,
            RequestKind::ConnectUdp | RequestKind::ConnectIp => Content::Capsules,
            RequestKind::Other | RequestKind::ConnectMpvpn => {
                return Err(Rejection::new(501, "not offered over TCP"));
            }
        };
        let headers = forwarded_request(headers, self.authorization.as_deref())?;
        let unreached = || Rejection::new(502, "the HTTP/3 server of this machine does not answer");
        let connection = self.connection()?;
        let request = connection.request(&headers).await.ok_or_else(unreached)?;
        let answer = timeout(RESPONSE_TIMEOUT, request.response()).await;
        let answer = answer.ok().flatten().ok_or_else(unreached)?;
        let accepted = answer.status().is_some_and(|status| (200..300).contains(&status));
        Ok((forwarded_fields(&answer), accepted.then_some(AcceptedRequest { request, content })))
    }

    /// The connection to the server, made if there is none.
    fn connection(&self) -> Result<Arc<GatewayConnection>, Rejection> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = connection.as_ref().filter(|connection| !connection.is_closed()) {
            return match connection.open_requests() < MAX_REQUESTS_PER_CONNECTION {
                true => Ok(connection.clone()),
                false => Err(Rejection::new(503, "too many requests on one connection")),
            };
        }
        let gateway = &*self.gateway;
        let slot = gateway.limiter.try_acquire(ClientNetwork::of(self.peer.ip())).map_err(|limit| {
            tracing::debug!(peer = %self.peer, %limit, "refused another connection to the gateway");
            Rejection::new(503, format!("too many connections: {limit}"))
        })?;
        let opened = gateway.open(self.peer, slot).map_err(|error| {
            tracing::warn!(%error, "cannot reach this server's QUIC socket for a client on TCP");
            Rejection::new(503, "this server cannot reach its own QUIC socket")
        })?;
        Ok(connection.insert(Arc::new(opened)).clone())
    }
}

impl Gateway {
    /// Opens a connection for the client at `peer`, which holds `slot`.
    fn open(&self, peer: SocketAddr, slot: Slot<ClientNetwork>) -> Result<GatewayConnection, RunError> {
        // The same address at both ends, so the packets stay on the loopback.
        let local = SocketAddr::new(self.quic.ip(), 0);
        let options = UdpOptions {
            recv_buffer: Some(SOCKET_BUFFER_BYTES),
            send_buffer: Some(SOCKET_BUFFER_BYTES),
            ..UdpOptions::new(local)
        };
        let socket = UdpSocket::bind(&options)?;
        let local_addr = socket.local_addr().map_err(RunError::io("look at a socket"))?;
        let guards = (slot, self.loopback_clients.insert(local_addr, peer));
        // With an IP address instead of a name in SNI, the server presents its own certificate, whatever
        // others it has.
        let name = self.quic.ip().to_string();
        let connection =
            GatewayConnection::open(&self.setup, self.quic, &name, socket, self.buffers.clone(), guards);
        connection.map_err(RunError::io("connect to this server's QUIC socket"))
    }
}

/// A request that the server accepted.
pub(super) struct AcceptedRequest {
    request: GatewayRequest,
    content: Content,
}

impl AcceptedRequest {
    /// Moves bytes in both directions until the request is complete.
    async fn relay(self, client: impl ClientSide) {
        relay::run(client, self.request, self.content).await;
    }

    /// The same for UDP payloads in chunks instead of capsules, on a connection without HTTP after the
    /// request.
    pub(super) async fn relay_chunks(self, client: impl AsyncRead + AsyncWrite + Unpin) {
        relay::run(WholeConnection(client), self.request, Content::Chunks).await;
    }
}

/// The request without connection-specific fields, if it is valid and small enough.
fn forwarded_request(headers: Headers, authorization: Option<&str>) -> Result<Headers, Rejection> {
    let is_replaced = |name: &[u8]| {
        authorization.is_some() && [&b"authorization"[..], b"proxy-authorization"].contains(&name)
    };
    let kept = headers.iter().filter(|field| !is_replaced(&field.name)).cloned();
    let mut headers = forwarded_fields(&kept.collect());
    if let Some(authorization) = authorization {
        headers.push("authorization", authorization.to_owned());
    }
    if headers.section_size() > MAX_FIELD_SECTION_BYTES {
        return Err(Rejection::new(431, "the fields of the request are too large"));
    }
    headers.validate(Section::Request).map_err(|error| Rejection::new(400, error.to_string()))?;
    Ok(headers)
}

/// The fields without connection-specific ones, and without extensions about the paths of a connection.
fn forwarded_fields(headers: &Headers) -> Headers {
    let is_replaced = |name: &[u8]| CONNECTION_FIELDS.contains(&name) || name == extensions::FIELD.as_bytes();
    let mut forwarded: Headers = headers.iter().filter(|field| !is_replaced(&field.name)).cloned().collect();
    if let Some(mut extensions) = Extensions::of(headers) {
        extensions.retain(mpvpn_tunnel::passes_gateways);
        forwarded.push(extensions::FIELD, extensions.value());
    }
    forwarded
}

/// Relays bytes once the client has switched protocols.
async fn upgraded(upgrade: OnUpgrade, accepted: AcceptedRequest) {
    match upgrade.await {
        Ok(stream) => accepted.relay(WholeConnection(TokioIo::new(stream))).await,
        Err(error) => tracing::debug!(%error, "a client disconnected before its request was accepted"),
    }
}

/// A client's connection that carries a single request.
struct WholeConnection<T>(T);

impl<T: AsyncRead + AsyncWrite + Unpin> ClientSide for WholeConnection<T> {
    type Stream = T;

    fn stream(&mut self) -> Pin<&mut T> {
        Pin::new(&mut self.0)
    }

    /// Dropping the connection omits TLS's close_notify (RFC 8446 §6.1), so the client sees a truncation.
    fn abort(&mut self, _: u64) {}

    fn poll_closed(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        // Reads and writes report it.
        Poll::Pending
    }
}

impl ClientSide for H2Stream {
    type Stream = Self;

    fn stream(&mut self) -> Pin<&mut Self> {
        Pin::new(self)
    }

    fn abort(&mut self, code: u64) {
        self.reset(match code {
            code::MESSAGE_ERROR | code::DATAGRAM_ERROR => Reason::PROTOCOL_ERROR,
            code::EXCESSIVE_LOAD => Reason::ENHANCE_YOUR_CALM,
            _ => Reason::CONNECT_ERROR,
        });
    }

    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.poll_reset(cx)
    }
}
