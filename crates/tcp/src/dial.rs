//! Makes a TCP and TLS connection to the server over one link, directly or through an HTTP proxy.
//!
//! In: a link, the addresses of the server or of the proxy, and how to verify the server. Out: a TLS
//! connection for HTTP/2 with the time of each step, or the step that failed and why. Always holds: each step
//! has a timeout; the app, if there is one, sees the socket before its first packet; a proxy's response is
//! bounded.

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

use derive_more::Display;
use mpvpn_config::ProxyCredentials;
use mpvpn_identity::tls::{CertificateRefusal, LastRefusal};
use mpvpn_input::values::ServerAddr;
use mpvpn_os::{
    TcpOptions, TcpSocket,
    tcp::{ConnectFailure, MptcpState, Protocol, Tuning},
};
use mpvpn_sockets::bind_options::BindOptions;
use mpvpn_types::Duration;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    time::{error::Elapsed, sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

pub use proxy::ProxyError;

/// Addresses of a name that are tried. More: longer until the failure. Chosen.
const MAX_ADDRESSES: usize = 4;
/// The interval between parallel attempts at one address. Equals RFC 8305's Connection Attempt Delay.
/// Shorter: load. Longer: a link that returns is used later.
const PARALLEL_CONNECT_INTERVAL: Duration = Duration::from_millis(250);
/// HTTP/2 over TLS (RFC 9113 §3.2).
pub const ALPN: &[u8] = b"h2";

/// Where to connect, and how.
pub struct DialOptions {
    /// The link's socket options.
    pub bind_options: BindOptions,
    /// Addresses of the server or of the proxy, tried in order.
    pub to: Vec<SocketAddr>,
    /// The server behind the proxy, if there is one.
    pub via: Option<ProxyTarget>,
    /// Multipath TCP or TCP.
    pub protocol: Protocol,
    /// The number of parallel sockets, each started `PARALLEL_CONNECT_INTERVAL` after the one before: the
    /// kernel retransmits a SYN after 1 s at the earliest, and an interrupted link may return at any
    /// time.
    pub sockets: usize,
    /// TCP options of the connection.
    pub tuning: Tuning,
    /// The TLS configuration; its ALPN is [`ALPN`].
    pub tls: Arc<ClientConfig>,
    /// Where `tls` stores why it refused a certificate.
    pub refusal: LastRefusal,
    /// The server's name for certificate verification.
    pub name: ServerName<'static>,
    /// The timeout of each step. The kernel falls back to TCP after two SYNs with Multipath TCP options were
    /// not answered, 3 to 7 s after the first.
    pub limit: Duration,
}

/// A server that is reached through a proxy.
#[derive(Clone, Debug)]
pub struct ProxyTarget {
    /// The server; the proxy resolves its name.
    pub server: ServerAddr,
    /// The credentials for the proxy.
    pub credentials: Option<ProxyCredentials>,
}

/// An established connection.
#[derive(Debug)]
pub struct DialedConnection {
    /// The TLS stream to the server.
    pub stream: TlsStream<TcpStream>,
    /// The peer of the TCP connection: the server or the proxy.
    pub peer: SocketAddr,
    /// The local address.
    pub local: SocketAddr,
    /// Whether the connection was Multipath TCP when TLS was complete.
    pub multipath: MptcpState,
    /// The duration of the TCP handshake.
    pub connect: Duration,
    /// The duration of the proxy's CONNECT, if there is a proxy.
    pub proxy: Option<Duration>,
    /// The duration of the TLS handshake.
    pub tls: Duration,
}

/// A step of making a connection.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum DialStep {
    /// The TCP handshake, with the server or the proxy.
    #[display("connecting")]
    Connect,
    /// CONNECT at the proxy.
    #[display("the answer of the proxy")]
    Proxy,
    /// The TLS handshake with the server.
    #[display("TLS")]
    Tls,
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The link has no address of the family of any server address.
    #[error("the link has no address from which {0} can be reached")]
    NoAddress(String),
    /// The socket could not be created or bound.
    #[error("a TCP socket cannot be bound to {link}: {source}")]
    Bind {
        /// The link's name.
        link: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The app in which the client runs refused the socket.
    #[error("the app does not let the socket be used")]
    Unprotected,
    /// The peer, or a firewall, refused the connection.
    #[error("TCP {to}: {}", connect_failure_text(.source))]
    Connect {
        /// The peer.
        to: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// A step took too long.
    #[error("{step} took longer than {} s", .limit.as_secs())]
    TimedOut {
        /// The step.
        step: DialStep,
        /// Its timeout.
        limit: Duration,
    },
    /// The proxy refused or failed.
    #[error("{0}")]
    Proxy(#[from] ProxyError),
    /// The server's certificate was refused.
    #[error("{0}")]
    Refused(#[from] CertificateRefusal),
    /// TLS failed for another reason.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The peer did not select HTTP/2 by ALPN.
    #[error("the peer does not select HTTP/2: it is not mpvpn, or runs with --tcp off")]
    NoHttp2,
    /// The attempt could not begin, or HTTP/2 failed.
    #[error("{0}")]
    Other(String),
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

/// Makes a connection, in a tokio runtime; dropping the future aborts it.
///
/// # Errors
/// The error of the last address tried.
pub async fn dial(dial: &DialOptions) -> Result<DialedConnection, DialError> {
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

/// Connects with one or several sockets; the first result counts.
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

/// The first result of several futures; the others must not be polled again.
pub async fn first_ready<F: Future>(all: &mut [Pin<Box<F>>]) -> F::Output {
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
