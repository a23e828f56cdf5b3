//! HTTP/2 (RFC 9113) on one connection, with extended CONNECT (RFC 8441).
//!
//! Always holds: what a stranger sends is held in a window of 64 KiB for the whole connection; who has shown credentials
//! gets one that fills a fast path with a long delay.

use std::{
    future::{pending, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{Ping, PingPong, Reason, RecvStream, SendStream, server::SendResponse};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Frame};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{Body, ClientConnection, RequestKind, tcp_transport};
use crate::h2_stream::poll_capacity;

/// Why an answer did not arrive.
type SendError = Box<dyn std::error::Error + Send + Sync>;

/// How long the client's preface may take.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection on which nothing was asked for so long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a connection that is told to end may take for that.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// The client is asked so often whether it is still there, and may take so long to answer: Multipath TCP does not tell.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes under way on one stream; a stranger has no more than [`UNAUTHENTICATED_WINDOW`] on all of them.
const STREAM_WINDOW: u32 = 8 << 20;
const UNAUTHENTICATED_WINDOW: u32 = 64 << 10;
/// Bytes under way on a connection of a user.
const USER_WINDOW: u32 = 16 << 20;
/// Bytes that wait in memory to be sent on one stream.
const MAX_SEND_BUFFER: usize = 256 << 10;
/// The longest head of a request, as HTTP/2 counts it (RFC 9113 §6.5.2).
const MAX_HEADER_LIST_BYTES: u32 = 16 << 10;
/// Streams of a user at once, and of a stranger.
const MAX_STREAMS: u32 = 1000;
const MAX_UNAUTHENTICATED_STREAMS: usize = 32;
/// Streams that a client resets before they were looked at, and that it makes us reset: more of them are an attack.
const MAX_PENDING_RESETS: usize = 20;
const MAX_LOCAL_ERROR_RESETS: usize = 256;

/// Serves until the connection ends, or somebody else needs its place.
pub(super) async fn serve(io: impl AsyncRead + AsyncWrite + Unpin, client: Arc<ClientConnection>) {
    let peer = client.peer;
    let handshake = h2::server::Builder::new()
        .enable_connect_protocol()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(UNAUTHENTICATED_WINDOW)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(Some(MAX_LOCAL_ERROR_RESETS))
        .handshake::<_, Bytes>(io);
    let mut connection = match timeout(PREFACE_TIMEOUT, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "no HTTP/2 from a client"),
        Err(_) => return tracing::debug!(%peer, "no HTTP/2 from a client within {PREFACE_TIMEOUT:?}"),
    };
    let mut unresponsive = pin!(ping_fails(connection.ping_pong()));
    let mut answers = JoinSet::new();
    let mut is_unauthenticated = true;
    let (mut idle, mut evicted) = (pin!(client.idle_for(IDLE_TIMEOUT)), pin!(client.evicted()));
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((_, mut respond))) if is_unauthenticated && answers.len() >= MAX_UNAUTHENTICATED_STREAMS => {
                    respond.send_reset(Reason::REFUSED_STREAM);
                }
                Some(Ok((request, respond))) => {
                    answers.spawn(answer(Arc::clone(&client), request, respond));
                }
                Some(Err(error)) => {
                    tracing::debug!(%peer, %error, "a connection of HTTP/2 has broken");
                    return;
                }
                None => return,
            },
            () = client.authenticated(), if is_unauthenticated => {
                is_unauthenticated = false;
                connection.set_target_window_size(USER_WINDOW);
            }
            _ = answers.join_next(), if !answers.is_empty() => {}
            () = unresponsive.as_mut() => return tracing::debug!(%peer, "a client does not answer any more"),
            () = idle.as_mut() => break,
            // At once, as another one has the place already.
            () = evicted.as_mut() => return,
        }
    }
    connection.graceful_shutdown();
    let end = async { while let Some(Ok(_)) = connection.accept().await {} };
    // A client that does not let go is left.
    let _ = timeout(SHUTDOWN_TIMEOUT, end).await;
}

/// Waits until the client does not answer.
async fn ping_fails(ping_pong: Option<PingPong>) {
    // There is one for who asks first.
    let Some(mut ping_pong) = ping_pong else { return pending().await };
    loop {
        sleep(PING_INTERVAL).await;
        if !matches!(timeout(PING_TIMEOUT, ping_pong.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

async fn answer(client: Arc<ClientConnection>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let _busy = client.begin_request();
    let response = match client.classify(&request) {
        RequestKind::Site => client.context.site.answer(request.map(Upload), client.peer).await,
        RequestKind::Refused(refusal) => client.context.refuse(&refusal),
        RequestKind::TcpTransport(user) => {
            return tcp_transport::over_http2(&client, &user, request, respond).await;
        }
        RequestKind::Gateway => return client.gateway_client.serve_http2(request, respond).await,
    };
    if let Err(error) = send(response, respond).await {
        tracing::debug!(peer = %client.peer, %error, "an answer did not arrive");
    }
}

async fn send(response: Response<Body>, mut respond: SendResponse<Bytes>) -> Result<(), SendError> {
    let (head, mut body) = response.into_parts();
    let empty = body.is_end_stream();
    let mut stream = respond.send_response(Response::from_parts(head, ()), empty)?;
    if empty {
        return Ok(());
    }
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        send_data(&mut stream, data).await?;
    }
    Ok(stream.send_data(Bytes::new(), true)?)
}

/// What a client sends with a request, as fast as it is wanted.
struct Upload(RecvStream);

impl hyper::body::Body for Upload {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let data = ready!(self.0.poll_data(cx)).transpose()?;
        if let Some(data) = &data {
            self.0.flow_control().release_capacity(data.len())?;
        }
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

/// Sends as the client takes it.
async fn send_data(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), SendError> {
    while !data.is_empty() {
        let capacity = poll_fn(|cx| poll_capacity(stream, cx, data.len())).await?;
        stream.send_data(data.split_to(capacity), false)?;
    }
    Ok(())
}
