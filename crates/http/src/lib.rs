//! A small HTTP/1.1 server for the local API, metrics and the dashboard.
//!
//! In: accepted connections, and a function that answers requests. Out: responses. Always holds: connections,
//! sizes and times are bounded; only a response marked [`NoTimeLimit`] may last.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::StreamExt;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
};

use mpvpn_input::{Error, Result};

/// Connections at once. More wait in the backlog of the socket. Each takes about 16 kB; with fewer, one slow
/// reader would delay other programs.
const MAX_CONNECTIONS: usize = 32;
/// Time for a whole request and its response. Longer lets slow clients occupy all connections; shorter fails
/// for the status of a large server over a slow network.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Read buffer of a connection (bytes): the smallest that hyper accepts. Larger only costs memory, as
/// requests have less than 1 kB.
const READ_BUFFER_BYTES: usize = 8192;

/// A response.
pub type HttpResponse = Response<ResponseBody>;

/// Extension of a response that has no time limit.
#[derive(Clone, Copy, Debug)]
pub struct NoTimeLimit;

/// A response with a complete body.
pub fn complete(body: impl Into<Bytes>) -> HttpResponse {
    Response::new(Full::new(body.into()).boxed_unsync())
}

/// The body of a response.
pub type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

/// A body of what `pull` makes of `source`, again and again, until it makes nothing. The next part is made
/// when the connection can send it, so that a reader that does not read occupies no memory beyond one part.
pub fn pulled_body<S, F>(source: S, pull: fn(S) -> F) -> ResponseBody
where
    S: Send + 'static,
    F: Future<Output = Option<(Bytes, S)>> + Send + 'static,
{
    let parts = futures_util::stream::unfold(source, pull);
    StreamBody::new(parts.map(|part| Ok(Frame::data(part)))).boxed_unsync()
}

/// Listens at the TCP address that `option`, `metrics` or `dashboard`, names.
///
/// # Errors
/// If the kernel refuses the address.
pub fn listen(option: &'static str, address: SocketAddr) -> Result<TcpListener> {
    let failed = |source| Error::MonitoringAddress { option, address, source };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// The listener for the runtime of the caller.
///
/// # Errors
/// If the runtime refuses it.
pub fn into_tokio(option: &'static str, listener: TcpListener) -> Result<tokio::net::TcpListener> {
    let address = listener.local_addr().unwrap_or_else(|_| ([0; 4], 0).into());
    tokio::net::TcpListener::from_std(listener).map_err(|source| Error::MonitoringAddress {
        option,
        address,
        source,
    })
}

/// Answers requests on the connections that `accept` returns, each behind a value about its peer, until
/// dropped; inside a tokio runtime with I/O and time. `server_name` names the server in the log.
pub async fn serve<S, P, F>(
    server_name: &'static str,
    accept: impl AsyncFn() -> io::Result<(P, S)>,
    answer: impl Fn(Request<Incoming>, P) -> F + Clone + Send + Sync + 'static,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    P: Copy + Send + Sync + 'static,
    F: Future<Output = HttpResponse> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let (peer, stream) = match accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Mostly a lack of file descriptors (EMFILE): the next attempt may find one free.
                tracing::debug!("{server_name}: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let answer = answer.clone();
        let answer = move |request| answer(request, peer);
        connections.spawn(async move {
            if let Err(error) = serve_connection(stream, answer, || ()).await {
                tracing::debug!("{server_name}: {error}");
            }
            drop(slot);
        });
    }
}

/// Answers the request of a connection, within `REQUEST_TIMEOUT`. A response that is marked [`NoTimeLimit`]
/// lasts as long as its body; `on_lasting` is called when such a response begins.
///
/// # Errors
/// If the peer breaks the protocol, or the connection breaks.
pub async fn serve_connection<S, F>(
    stream: S,
    answer: impl Fn(Request<Incoming>) -> F,
    on_lasting: impl Fn(),
) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = HttpResponse>,
{
    let is_lasting = AtomicBool::new(false);
    let service = service_fn(|request| {
        let answering = answer(request);
        async {
            let answer = answering.await;
            if answer.extensions().get::<NoTimeLimit>().is_some() {
                is_lasting.store(true, Ordering::Relaxed);
                on_lasting();
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let answering = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(READ_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut answering = pin!(answering);
    match tokio::time::timeout(REQUEST_TIMEOUT, &mut answering).await {
        Ok(ended) => ended,
        Err(_) if is_lasting.load(Ordering::Relaxed) => answering.await,
        Err(_) => Ok(()),
    }
}
pub mod limiter;
pub mod untrusted;
