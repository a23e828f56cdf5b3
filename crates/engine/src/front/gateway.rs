//! What clients ask for over TCP that is not this server's own QUIC: CONNECT, CONNECT-UDP and CONNECT-IP.
//!
//! In: requests of HTTP/1.1 and HTTP/2. Out: the answers of this server's own HTTP/3 to the same requests, and bytes both
//! ways. So what is granted, to whom and how much, is decided in one place. Always holds: each TCP connection has a
//! connection of its own to the server's QUIC, made when it is needed first; its requests, and what waits in them, are
//! bounded; what breaks is broken at the other side, and never ended.

mod line;
mod tunnel;

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
use mpvpn_control::{config::Trust, identity::Fingerprint, tls};
use mpvpn_masque::{
    h3::code,
    headers::{Headers, Section},
    request::{Rejection, RequestKind, classify},
};
use mpvpn_os::{UdpOptions, UdpSocket};
use mpvpn_quic::{ClientSetup, DATAGRAM_OVERHEAD, TransportOptions, Windows};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

use super::{
    Body,
    fields::{granted_by_http1, headers_of, response_of},
    fronted::Fronted,
    limits::{Place, Room, Source},
    plain,
};
use crate::{EngineError, client::random, h2_stream::H2Stream};
use line::{Line, Passage, Scratch};
use tunnel::{ClientSide, Content};

/// Connections to the server: of all clients, and of those that come from one source.
const LINES: usize = 4096;
const LINES_OF_ONE: usize = 1024;
/// Bytes that the kernel should hold for a connection's socket in each direction.
const SOCKET_BUFFER: usize = 1 << 20;
/// Requests of one TCP connection at a time.
const MOST_REQUESTS: usize = 128;
/// Bytes that the server may send on one request, and on all, before the client has taken them.
const WINDOWS: Windows = Windows { stream: 256 << 10, all: (256 << 10) * MOST_REQUESTS as u32 };
/// UDP payload in which an IP packet of 1500 bytes fits, with all that is around it.
const LARGEST: u16 = 1500 + 2 + DATAGRAM_OVERHEAD as u16;
/// The server answers within this time: longer than it takes to give a destination up.
const ANSWERED: Duration = Duration::from_secs(60);
/// As much may come of a request's fields: no more than the server would take (RFC 9114 §4.2.2).
const MOST_FIELDS: usize = 16 << 10;
/// What concerns the QUIC connection that a request comes on, and so is not passed on to another one.
const HOP_BY_HOP: [&[u8]; 8] = [
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"transfer-encoding",
    b"mpvpn-heartbeats",
    b"mpvpn-rescue",
    b"mpvpn-progress",
    b"mpvpn-links",
];

/// The way to the server's own HTTP/3, for all connections that came to one address.
pub(super) struct Gateway {
    quic: SocketAddr,
    setup: ClientSetup,
    fronted: Fronted,
    lines: Arc<Room<Source>>,
    scratch: Arc<Mutex<Scratch>>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("quic", &self.quic).finish_non_exhaustive()
    }
}

impl Gateway {
    /// `quic` is where the server's QUIC is reached on this machine, `pin` its certificate's; `fronted` learns who is behind
    /// the connections.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub(super) fn new(
        quic: SocketAddr,
        pin: Fingerprint,
        fronted: Fronted,
    ) -> Result<Arc<Self>, EngineError> {
        let tls = Arc::new(tls::client_config(&Trust::Pin(pin), &[b"h3"])?);
        let options =
            TransportOptions { max_udp_payload: LARGEST, windows: WINDOWS, ..TransportOptions::default() };
        let setup = ClientSetup::new(tls, &options, &random::<32>()?)?;
        let (lines, scratch) = (Room::new(LINES, LINES_OF_ONE), Arc::default());
        Ok(Arc::new(Self { quic, setup, fronted, lines, scratch }))
    }

    /// That of one connection, from `peer`.
    pub(super) fn guest(self: &Arc<Self>, peer: SocketAddr) -> Guest {
        Guest { gateway: self.clone(), peer, line: Mutex::default() }
    }
}

/// One connection of a client.
#[derive(Debug)]
pub(super) struct Guest {
    gateway: Arc<Gateway>,
    peer: SocketAddr,
    line: Mutex<Option<Arc<Line>>>,
}

impl Guest {
    /// Answers a request of HTTP/2, of a client whose credentials are good, and stays until it is over.
    pub(super) async fn h2(&self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (answer, granted) = self.ask(headers_of(&request).unwrap_or_default()).await;
        // A client that is gone misses nothing.
        let Ok(send) = respond.send_response(response_of(&answer), granted.is_none()) else { return };
        if let Some(granted) = granted {
            granted.carry(H2Stream::new(send, request.into_body())).await;
        }
    }

    /// Answers a request of HTTP/1.1, of a client whose credentials are good.
    pub(super) async fn h1(&self, mut request: Request<Incoming>) -> Response<Body> {
        let (answer, granted) = self.ask(headers_of(&request).unwrap_or_default()).await;
        let Some(granted) = granted else { return response_of(&answer).map(|()| plain("")) };
        let response = granted_by_http1(&request, &answer);
        tokio::spawn(upgraded(hyper::upgrade::on(&mut request), granted));
        response.map(|()| plain(""))
    }

    /// Asks the server: its answer, and the stream of the request if that is granted.
    pub(super) async fn ask(&self, headers: Headers) -> (Headers, Option<Granted>) {
        self.try_ask(headers).await.unwrap_or_else(|refusal| (refusal.headers(), None))
    }

    async fn try_ask(&self, headers: Headers) -> Result<(Headers, Option<Granted>), Rejection> {
        let content = match classify(&headers)? {
            RequestKind::ConnectTcp => Content::Bytes,
            RequestKind::ConnectUdp | RequestKind::ConnectIp => Content::Capsules,
            RequestKind::Other | RequestKind::ConnectMpvpn => {
                return Err(Rejection::new(501, "not offered over TCP"));
            }
        };
        let headers = passed_on(headers)?;
        let unreached = || Rejection::new(502, "the server does not answer itself");
        let line = self.line()?;
        let passage = line.request(&headers).await.ok_or_else(unreached)?;
        let answer = timeout(ANSWERED, passage.answer()).await;
        let answer = answer.ok().flatten().ok_or_else(unreached)?;
        let granted = answer.status().is_some_and(|status| (200..300).contains(&status));
        Ok((passed_back(&answer), granted.then_some(Granted { passage, content })))
    }

    /// The connection to the server; a new one if there is none.
    fn line(&self) -> Result<Arc<Line>, Rejection> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = line.as_ref().filter(|line| !line.is_over()) {
            return match line.requests() < MOST_REQUESTS {
                true => Ok(line.clone()),
                false => Err(Rejection::new(503, "too many requests on one connection")),
            };
        }
        let gateway = &*self.gateway;
        let place = gateway.lines.enter(Source::of(self.peer.ip())).map_err(|crowded| {
            tracing::debug!(peer = %self.peer, %crowded, "no room for another connection of the gateway");
            Rejection::new(503, format!("too many connections: {crowded}"))
        })?;
        let opened = gateway.open(self.peer, place).map_err(|error| {
            tracing::warn!(%error, "cannot reach the own QUIC socket for a client on TCP");
            Rejection::new(503, "this server cannot reach its own QUIC socket")
        })?;
        Ok(line.insert(Arc::new(opened)).clone())
    }
}

impl Gateway {
    /// A connection for a client that comes from `peer`, which has this place.
    fn open(&self, peer: SocketAddr, place: Place<Source>) -> Result<Line, EngineError> {
        // An address of this machine, as the other one: what is said between them stays inside.
        let local = SocketAddr::new(self.quic.ip(), 0);
        let options = UdpOptions {
            recv_buffer: Some(SOCKET_BUFFER),
            send_buffer: Some(SOCKET_BUFFER),
            ..UdpOptions::new(local)
        };
        let socket = UdpSocket::bind(&options)?;
        let inner = socket.local_addr().map_err(EngineError::io("look at a socket"))?;
        let known = (place, self.fronted.enter(inner, peer));
        // Without a name it is the server's own certificate that comes, whatever others it has.
        let name = self.quic.ip().to_string();
        let line = Line::open(&self.setup, self.quic, &name, socket, self.scratch.clone(), known);
        line.map_err(EngineError::io("connect to the own QUIC socket"))
    }
}

/// A request that the server has granted.
pub(super) struct Granted {
    passage: Passage,
    content: Content,
}

impl Granted {
    /// Carries what the request is for both ways, until that is over.
    async fn carry(self, client: impl ClientSide) {
        tunnel::run(client, self.passage, self.content).await;
    }

    /// The same for UDP payloads on a connection of their own, in chunks instead of capsules.
    pub(super) async fn carry_chunks(self, client: impl AsyncRead + AsyncWrite + Unpin) {
        tunnel::run(Plain(client), self.passage, Content::Chunks).await;
    }
}

/// The request as the server gets it.
fn passed_on(headers: Headers) -> Result<Headers, Rejection> {
    let kept = headers.iter().filter(|field| !HOP_BY_HOP.contains(&&field.name[..])).cloned();
    let headers: Headers = kept.collect();
    if headers.section_size() > MOST_FIELDS {
        return Err(Rejection::new(431, "the fields of the request are too large"));
    }
    headers.validate(Section::Request).map_err(|error| Rejection::new(400, error.to_string()))?;
    Ok(headers)
}

/// The answer as the client gets it: what was not passed on cannot have been agreed on.
fn passed_back(headers: &Headers) -> Headers {
    headers.iter().filter(|field| !HOP_BY_HOP.contains(&&field.name[..])).cloned().collect()
}

/// Carries bytes both ways as soon as the client knows that it may.
async fn upgraded(upgrade: OnUpgrade, granted: Granted) {
    match upgrade.await {
        Ok(stream) => granted.carry(Plain(TokioIo::new(stream))).await,
        Err(error) => tracing::debug!(%error, "a client was gone before its request was granted"),
    }
}

/// A whole connection of a client that carries one request.
struct Plain<T>(T);

impl<T: AsyncRead + AsyncWrite + Unpin> ClientSide for Plain<T> {
    type Stream = T;

    fn stream(&mut self) -> Pin<&mut T> {
        Pin::new(&mut self.0)
    }

    /// Without the end that TLS has (RFC 8446 §6.1), which dropping it leaves out, the client knows that it was cut off.
    fn break_off(&mut self, _: u64) {}

    fn poll_gone(&mut self, _: &mut Context<'_>) -> Poll<io::Error> {
        // Reading and writing tell.
        Poll::Pending
    }
}

impl ClientSide for H2Stream {
    type Stream = Self;

    fn stream(&mut self) -> Pin<&mut Self> {
        Pin::new(self)
    }

    fn break_off(&mut self, code: u64) {
        self.reset(match code {
            code::MESSAGE_ERROR | code::DATAGRAM_ERROR => Reason::PROTOCOL_ERROR,
            code::EXCESSIVE_LOAD => Reason::ENHANCE_YOUR_CALM,
            _ => Reason::CONNECT_ERROR,
        });
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.poll_reset(cx)
    }
}
