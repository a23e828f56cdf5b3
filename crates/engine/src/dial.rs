//! Connections of TCP to the server, encrypted, over one link.
//!
//! In: a link, the addresses of the server or of a proxy, and how the server is recognised. Out: a connection that speaks HTTP/2, with
//! what it is and how long each step took; or which step failed, and why. Always holds: each step has a limit of time;
//! the app, if there is one, sees the socket before anything is sent; what a proxy answers is bounded.

mod proxy;

use std::{
    future::poll_fn,
    io,
    net::{SocketAddr, TcpStream as StdTcpStream},
    os::fd::AsFd,
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Instant,
};

use mpvpn_control::{
    config::{ProxyCredentials, ServerAddr},
    tls::{CertificateRefusal, LastRefusal},
};
use mpvpn_os::{
    TcpOptions, TcpSocket,
    tcp::{ConnectFailure, MptcpState, Protocol, Tuning},
};
use mpvpn_types::Duration;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    time::{error::Elapsed, sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

pub(crate) use proxy::ProxyError;

use crate::links::BindOptions;

/// Addresses that are tried.
const MAX_ADDRESSES: usize = 4;
/// From one attempt at the same address to the next, where there may be several.
const PARALLEL_CONNECT_INTERVAL: Duration = Duration::from_millis(250);
/// HTTP/2 over TLS (RFC 9113, section 3.2).
pub(crate) const ALPN: &[u8] = b"h2";

/// Where to and how.
pub(crate) struct DialOptions {
    /// The link.
    pub(crate) bind_options: BindOptions,
    /// Addresses of the server, or of the proxy; the first that takes the connection counts.
    pub(crate) to: Vec<SocketAddr>,
    /// What the proxy is asked for, if there is one.
    pub(crate) via: Option<ProxyTarget>,
    /// What the connection is tried as.
    pub(crate) protocol: Protocol,
    /// Sockets that try it beside each other, each [`PARALLEL_CONNECT_INTERVAL`] after the one before: the kernel repeats a SYN once a
    /// second at most, and a link that is away may be back at any time.
    pub(crate) sockets: usize,
    /// How it is kept.
    pub(crate) tuning: Tuning,
    /// How the server is recognised; offers [`ALPN`].
    pub(crate) tls: Arc<ClientConfig>,
    /// Where `tls` leaves why it refused a certificate.
    pub(crate) refusal: LastRefusal,
    /// The name that the server has to prove.
    pub(crate) name: ServerName<'static>,
    /// How long each step may take. The kernel asks for TCP after two SYNs for Multipath TCP without an answer, 3 to 7 s
    /// after the first.
    pub(crate) limit: Duration,
}

/// A server proxy_target a proxy.
#[derive(Clone, Debug)]
pub(crate) struct ProxyTarget {
    /// The server, whose name the proxy resolves.
    pub(crate) server: ServerAddr,
    /// Who asks.
    pub(crate) credentials: Option<ProxyCredentials>,
}

/// A connection to the server.
#[derive(Debug)]
pub(crate) struct DialedConnection {
    /// What is written there reaches the server.
    pub(crate) stream: TlsStream<TcpStream>,
    /// Which address took the connection: the server's, or the proxy's.
    pub(crate) peer: SocketAddr,
    /// This end.
    pub(crate) local: SocketAddr,
    /// What the connection to there was when TLS stood.
    pub(crate) multipath: MptcpState,
    /// How long TCP took to that address.
    pub(crate) connect: Duration,
    /// How long the proxy took.
    pub(crate) proxy: Option<Duration>,
    /// How long TLS took.
    pub(crate) tls: Duration,
}

/// A part of the way to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DialStep {
    /// TCP, to the server or the proxy.
    Connect,
    /// The proxy, until it has a connection to the server.
    Proxy,
    /// TLS with the server.
    Tls,
}

impl std::fmt::Display for DialStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting",
            Self::Proxy => "the answer of the proxy",
            Self::Tls => "TLS",
        })
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// No address to connect to is of a family that the link has.
    #[error("the link has no address from which {0} can be reached")]
    NoAddress(String),
    /// The socket could not be made as the link needs it.
    #[error("a TCP socket cannot be bound to {link}: {source}")]
    Bind {
        /// The link.
        link: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The app in which the client runs does not let the socket be used.
    #[error("the app does not let the socket be used")]
    Unprotected,
    /// The far end, or somebody on the way, refused the connection.
    #[error("TCP {to}: {}", connect_failure_text(.source))]
    Connect {
        /// Where to.
        to: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// A step took too long.
    #[error("{step} took longer than {} s", .limit.as_secs())]
    TimedOut {
        /// The step.
        step: DialStep,
        /// How long it may take.
        limit: Duration,
    },
    /// The proxy does not help.
    #[error("{0}")]
    Proxy(#[from] ProxyError),
    /// The certificate of the server was not accepted.
    #[error("{0}")]
    Refused(#[from] CertificateRefusal),
    /// TLS failed otherwise.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The far end does not speak HTTP/2.
    #[error("who answers does not speak HTTP/2: it is not mpvpn, or a version that takes no TCP")]
    NoHttp2,
}

fn connect_failure_text(error: &io::Error) -> String {
    match ConnectFailure::of(error) {
        ConnectFailure::Refused => "refused: nobody listens there, or a firewall is in between".to_owned(),
        ConnectFailure::Unroutable => "no route leads there".to_owned(),
        ConnectFailure::TimedOut => "no answer".to_owned(),
        ConnectFailure::Forbidden => "a firewall of this machine forbids it".to_owned(),
        ConnectFailure::Exhausted => "this machine has no descriptors or no memory left".to_owned(),
        ConnectFailure::Other => error.to_string(),
    }
}

/// Connects. Runs in a tokio runtime; dropping the future ends the attempt.
///
/// # Errors
/// Those of the last address that was tried.
pub(crate) async fn dial(dial: &DialOptions) -> Result<DialedConnection, DialError> {
    let is_from_app = dial.bind_options.is_from_app && dial.bind_options.addresses.is_empty();
    let reached = |to: &&SocketAddr| {
        is_from_app || dial.bind_options.addresses.iter().any(|ip| ip.is_ipv4() == to.is_ipv4())
    };
    let mut last =
        DialError::NoAddress(dial.to.first().map_or_else(|| "the server".to_owned(), ToString::to_string));
    for to in dial.to.iter().filter(reached).take(MAX_ADDRESSES) {
        let begun = Instant::now();
        match connect(dial, *to).await {
            Ok(stream) => return handshake(dial, stream, *to, begun.elapsed()).await,
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The first of the sockets for which anything comes out counts.
async fn connect(dial: &DialOptions, to: SocketAddr) -> Result<TcpStream, DialError> {
    let race = async {
        let mut all = vec![Box::pin(connect_one(dial, to))];
        loop {
            let more = all.len() < dial.sockets;
            tokio::select! {
                biased;
                done = first_ready(&mut all) => return done,
                () = sleep(PARALLEL_CONNECT_INTERVAL), if more => {}
            }
            all.push(Box::pin(connect_one(dial, to)));
        }
    };
    with_timeout(dial.limit, DialStep::Connect, race).await?
}

/// What the first of several that is done comes to; none of them may be waited for again then.
pub(crate) async fn first_ready<F: Future>(all: &mut [Pin<Box<F>>]) -> F::Output {
    poll_fn(|cx| {
        let done = all.iter_mut().find_map(|one| match one.as_mut().poll(cx) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        });
        done.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

async fn connect_one(dial: &DialOptions, to: SocketAddr) -> Result<TcpStream, DialError> {
    let socket = |device: Option<&str>, local| {
        TcpSocket::open(
            to,
            &TcpOptions {
                local,
                device: device.map(str::to_owned),
                mark: dial.bind_options.mark,
                protocol: dial.protocol,
                tuning: dial.tuning,
            },
        )
    };
    let (socket, _) = dial
        .bind_options
        .bind_socket(to, socket, io::Error::raw_os_error)
        .map_err(|source| DialError::Bind { link: dial.bind_options.name.clone(), source })?;
    if !dial.bind_options.is_protected(socket.as_fd()) {
        return Err(DialError::Unprotected);
    }
    let failed = |source| DialError::Connect { to, source };
    socket.start_connect(to).map_err(failed)?;
    let stream = TcpStream::from_std(StdTcpStream::from(socket)).map_err(failed)?;
    stream.writable().await.map_err(failed)?;
    match stream.take_error().map_err(failed)? {
        Some(error) => Err(failed(error)),
        None => Ok(stream),
    }
}

async fn handshake(
    dial: &DialOptions,
    mut stream: TcpStream,
    peer: SocketAddr,
    connect: Duration,
) -> Result<DialedConnection, DialError> {
    let local = stream.local_addr().map_err(|source| DialError::Connect { to: peer, source })?;
    let mut proxy = None;
    if let Some(proxy_target) = &dial.via {
        let begun = Instant::now();
        with_timeout(dial.limit, DialStep::Proxy, proxy::send_connect(&mut stream, proxy_target)).await??;
        proxy = Some(begun.elapsed());
    }
    let begun = Instant::now();
    let connector = TlsConnector::from(Arc::clone(&dial.tls));
    let stream =
        with_timeout(dial.limit, DialStep::Tls, connector.connect(dial.name.clone(), stream)).await?;
    let stream = stream.map_err(|error| match dial.refusal.take() {
        Some(refusal) => DialError::Refused(refusal),
        None => DialError::Tls(error),
    })?;
    let tls = begun.elapsed();
    let (socket, session) = stream.get_ref();
    if session.alpn_protocol() != Some(ALPN) {
        return Err(DialError::NoHttp2);
    }
    let multipath = MptcpState::of(socket.as_fd()).unwrap_or(MptcpState::NotUsed);
    Ok(DialedConnection { stream, peer, local, multipath, connect, proxy, tls })
}

async fn with_timeout<T>(
    limit: Duration,
    step: DialStep,
    what: impl Future<Output = T>,
) -> Result<T, DialError> {
    timeout(limit, what).await.map_err(|_: Elapsed| DialError::TimedOut { step, limit })
}

#[cfg(test)]
mod tests;
