//! A small HTTP/1.1 server for the local API and for metrics.
//!
//! In: accepted connections, and a function that answers requests. Out: responses. Always holds: connections, sizes and
//! times are bounded; only a response marked [`NoTimeLimit`] may last.

use std::{
    convert::Infallible,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Semaphore, oneshot},
};

use crate::api::{ControlRequest, RequestHandler};

/// Connections at once. More wait in the backlog of the socket. Each takes about 16 kB; with fewer, one slow reader would
/// delay other programs.
const MAX_CONNECTIONS: usize = 32;
/// Time for a whole request and its response. Longer lets slow clients occupy all connections; shorter fails for the status
/// of a large server over a slow network.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the reply of the data plane, which answers between two batches of packets. Shorter fails on a busy machine;
/// longer than the client's timeout (5 s) would make the reason invisible.
const DATA_PLANE_TIMEOUT: Duration = Duration::from_secs(2);
/// Read buffer of a connection (bytes): the smallest that hyper accepts. Larger only costs memory, as requests have less
/// than 1 kB.
const READ_BUFFER_BYTES: usize = 8192;

/// A response.
pub(crate) type HttpResponse = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Extension of a response that has no time limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoTimeLimit;

/// A response with a complete body.
pub(crate) fn complete(body: impl Into<Bytes>) -> HttpResponse {
    Response::new(Full::new(body.into()).boxed_unsync())
}

/// Answers requests on the connections that `accept` returns, until dropped; inside a tokio runtime with I/O and time.
/// `server_name` names the server in the log.
pub(crate) async fn serve<S, F>(
    server_name: &'static str,
    accept: impl AsyncFn() -> io::Result<S>,
    answer: impl Fn(Request<Incoming>) -> F + Clone + Send + 'static,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = HttpResponse> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let stream = match accept().await {
            Ok(stream) => stream,
            Err(error) => {
                // Mostly a lack of file descriptors (EMFILE): the next attempt may find one free.
                tracing::debug!("{server_name}: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let answer = answer.clone();
        connections.spawn(async move {
            let is_endless = Arc::new(AtomicBool::new(false));
            let endless = Arc::clone(&is_endless);
            let service = service_fn(move |request| {
                let (answering, endless) = (answer(request), Arc::clone(&endless));
                async move {
                    let answer = answering.await;
                    endless.store(answer.extensions().get::<NoTimeLimit>().is_some(), Ordering::Relaxed);
                    Ok::<_, Infallible>(answer)
                }
            });
            let answering = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_TIMEOUT)
                .keep_alive(false)
                .max_buf_size(READ_BUFFER_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            tokio::pin!(answering);
            let ended = match tokio::time::timeout(REQUEST_TIMEOUT, &mut answering).await {
                Ok(ended) => ended,
                Err(_) if is_endless.load(Ordering::Relaxed) => answering.await,
                Err(_) => Ok(()),
            };
            if let Err(error) = ended {
                tracing::debug!("{server_name}: {error}");
            }
            drop(slot);
        });
    }
}

/// The reply of the data plane; `None` if it does not reply within [`DATA_PLANE_TIMEOUT`].
pub(crate) async fn ask_data_plane<T>(
    handler: &RequestHandler,
    request: impl FnOnce(oneshot::Sender<T>) -> ControlRequest,
) -> Option<T> {
    let (sender, receiver) = oneshot::channel();
    handler(request(sender));
    tokio::time::timeout(DATA_PLANE_TIMEOUT, receiver).await.ok()?.ok()
}
