//! Serves HTTP/2 (RFC 9113) on one connection, with extended CONNECT (RFC 8441).
//!
//! Always holds: an unauthenticated connection has a flow-control window of 64 KiB in all; an authenticated
//! one has a window that fills a fast path with a long delay.

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
use mpvpn_tcp::h2_stream::poll_capacity;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{Body, ClientConnection, RequestKind, tcp_transport};

/// Why a response was not delivered.
type SendError = Box<dyn std::error::Error + Send + Sync>;

/// How long the client's connection preface may take. Chosen.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without requests for this long is closed. Chosen.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a graceful shutdown may take. Chosen.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval of PINGs, and how long the client may take to answer one: Multipath TCP does not report that
/// a client is gone. Longer: dead connections. Shorter: wake-ups of idle clients. Chosen.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// The flow-control windows of an unauthenticated connection and of its streams (bytes): that of streams is
/// the one of Caddy. Larger: memory for strangers.
const UNAUTHENTICATED_WINDOW: u32 = 64 << 10;
const UNAUTHENTICATED_STREAM_WINDOW: u32 = 1 << 20;
/// The flow-control windows of an authenticated connection and of its streams (bytes). Smaller: slow on long
/// fast links (8 MiB are 640 Mbit/s at 100 ms). Larger: memory.
const USER_WINDOW: u32 = 16 << 20;
const STREAM_WINDOW: u32 = 8 << 20;
/// Bytes buffered to be sent on one stream. Larger: memory, and delay behind them. Smaller: idle links.
/// Chosen.
const MAX_SEND_BUFFER: usize = 256 << 10;
/// The largest header list of a request, as RFC 9113 §6.5.2 counts it, and the table of HPACK (bytes), as
/// those of Caddy. Its largest frame of 1 MiB would be memory for strangers, as each is read completely.
const MAX_HEADER_LIST_BYTES: u32 = 16_704;
const HEADER_TABLE_BYTES: u32 = 4096;
/// Concurrent streams of an authenticated connection, as Caddy's, and of an unauthenticated one. Chosen (open
/// question of docs/design/relay.md).
const MAX_STREAMS: u32 = 250;
const MAX_UNAUTHENTICATED_STREAMS: usize = 32;
/// Streams that a client may reset before they were processed, or make us reset by errors; more close the
/// connection as an attack (rapid reset). Chosen (open question of docs/design/relay.md).
const MAX_PENDING_RESETS: usize = 20;
const MAX_LOCAL_ERROR_RESETS: usize = 256;

/// Serves until the connection ends, or its slot is given to a newer connection.
pub(super) async fn serve(io: impl AsyncRead + AsyncWrite + Unpin, client: Arc<ClientConnection>) {
    let peer = client.peer;
    let handshake = h2::server::Builder::new()
        .enable_connect_protocol()
        .initial_window_size(UNAUTHENTICATED_STREAM_WINDOW)
        .initial_connection_window_size(UNAUTHENTICATED_WINDOW)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .header_table_size(HEADER_TABLE_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(Some(MAX_LOCAL_ERROR_RESETS))
        .handshake::<_, Bytes>(io);
    let mut connection = match timeout(PREFACE_TIMEOUT, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "the HTTP/2 handshake of a client failed"),
        Err(_) => return tracing::debug!(%peer, "no HTTP/2 preface from a client within {PREFACE_TIMEOUT:?}"),
    };
    let mut unresponsive = pin!(ping_fails(connection.ping_pong()));
    let mut answers = JoinSet::new();
    let (mut is_unauthenticated, mut has_small_streams) = (true, true);
    let (mut idle, mut evicted) = (pin!(client.idle_for(IDLE_TIMEOUT)), pin!(client.evicted()));
    loop {
        if !is_unauthenticated && has_small_streams {
            // Fails until the client has acknowledged the first SETTINGS; the next request tries again.
            has_small_streams = connection.set_initial_window_size(STREAM_WINDOW).is_err();
        }
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((_, mut respond)))
                    if is_unauthenticated && answers.len() >= MAX_UNAUTHENTICATED_STREAMS =>
                {
                    respond.send_reset(Reason::REFUSED_STREAM);
                }
                Some(Ok((request, respond))) => {
                    answers.spawn(answer(Arc::clone(&client), request, respond));
                }
                Some(Err(error)) => {
                    tracing::debug!(%peer, %error, "an HTTP/2 connection failed");
                    return;
                }
                None => return,
            },
            () = client.authenticated(), if is_unauthenticated => {
                is_unauthenticated = false;
                connection.set_target_window_size(USER_WINDOW);
            }
            _ = answers.join_next(), if !answers.is_empty() => {}
            () = unresponsive.as_mut() => return tracing::debug!(%peer, "a client does not answer PINGs"),
            () = idle.as_mut() => break,
            // Immediately: the newer connection already has the slot.
            () = evicted.as_mut() => return,
        }
    }
    connection.graceful_shutdown();
    let end = async { while let Some(Ok(_)) = connection.accept().await {} };
    // A client that keeps its streams open is disconnected.
    let _ = timeout(SHUTDOWN_TIMEOUT, end).await;
}

/// Waits until the client does not answer a PING.
async fn ping_fails(ping_pong: Option<PingPong>) {
    // h2 hands out one `PingPong`, to the first caller.
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
        RequestKind::Site => {
            let (site, port) = (&client.context.site, client.quic.port());
            site.answer(request.map(Upload), client.peer, Some(port)).await
        }
        RequestKind::Refused(refusal) => {
            client.context.refuse(&refusal, request.version(), client.quic.port())
        }
        RequestKind::TcpTransport(user) => {
            return tcp_transport::over_http2(&client, &user, request, respond).await;
        }
        RequestKind::Gateway => return client.gateway_client.serve_http2(request, respond).await,
    };
    if let Err(error) = send(response, respond).await {
        tracing::debug!(peer = %client.peer, %error, "a response could not be delivered");
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

/// The content of a request. Reading it opens the flow-control window.
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

/// Sends data as the client's flow-control window allows.
async fn send_data(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), SendError> {
    while !data.is_empty() {
        let capacity = poll_fn(|cx| poll_capacity(stream, cx, data.len())).await?;
        stream.send_data(data.split_to(capacity), false)?;
    }
    Ok(())
}
