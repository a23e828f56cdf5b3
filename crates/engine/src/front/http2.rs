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

use super::{Body, Judged, Visit, tcp_way};
use crate::h2_stream::poll_room;

/// Why an answer did not arrive.
type Failed = Box<dyn std::error::Error + Send + Sync>;

/// How long the client's preface may take.
const PREFACE_WITHIN: Duration = Duration::from_secs(10);
/// A connection on which nothing was asked for so long is closed.
const IDLE: Duration = Duration::from_secs(60);
/// How long a connection that is told to end may take for that.
const END_WITHIN: Duration = Duration::from_secs(5);
/// The client is asked so often whether it is still there, and may take so long to answer: Multipath TCP does not tell.
const ASKED_EVERY: Duration = Duration::from_secs(20);
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
/// Bytes under way on one stream; a stranger has no more than [`STRANGER`] on all of them.
const STREAM: u32 = 8 << 20;
const STRANGER: u32 = 64 << 10;
/// Bytes under way on a connection of a user.
const USER: u32 = 16 << 20;
/// Bytes that wait in memory to be sent on one stream.
const TO_SEND: usize = 256 << 10;
/// The longest head of a request, as HTTP/2 counts it (RFC 9113 §6.5.2).
const LONGEST_HEAD: u32 = 16 << 10;
/// Streams of a user at once, and of a stranger.
const STREAMS: u32 = 1000;
const STREAMS_OF_STRANGER: usize = 32;
/// Streams that a client resets before they were looked at, and that it makes us reset: more of them are an attack.
const RESETS: usize = 20;
const ERRORS: usize = 256;

/// Serves until the connection ends, or somebody else needs its place.
pub(super) async fn serve(io: impl AsyncRead + AsyncWrite + Unpin, visit: Arc<Visit>) {
    let peer = visit.peer;
    let handshake = h2::server::Builder::new()
        .enable_connect_protocol()
        .initial_window_size(STREAM)
        .initial_connection_window_size(STRANGER)
        .max_send_buffer_size(TO_SEND)
        .max_header_list_size(LONGEST_HEAD)
        .max_concurrent_streams(STREAMS)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(Some(ERRORS))
        .handshake::<_, Bytes>(io);
    let mut connection = match timeout(PREFACE_WITHIN, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "no HTTP/2 from a client"),
        Err(_) => return tracing::debug!(%peer, "no HTTP/2 from a client within {PREFACE_WITHIN:?}"),
    };
    let mut gone = pin!(is_gone(connection.ping_pong()));
    let mut answers = JoinSet::new();
    let mut stranger = true;
    let (mut idle, mut pushed_out) = (pin!(visit.idle_for(IDLE)), pin!(visit.pushed_out()));
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((_, mut respond))) if stranger && answers.len() >= STREAMS_OF_STRANGER => {
                    respond.send_reset(Reason::REFUSED_STREAM);
                }
                Some(Ok((request, respond))) => {
                    answers.spawn(answer(Arc::clone(&visit), request, respond));
                }
                Some(Err(error)) => {
                    tracing::debug!(%peer, %error, "a connection of HTTP/2 has broken");
                    return;
                }
                None => return,
            },
            () = visit.is_user(), if stranger => {
                stranger = false;
                connection.set_target_window_size(USER);
            }
            _ = answers.join_next(), if !answers.is_empty() => {}
            () = gone.as_mut() => return tracing::debug!(%peer, "a client does not answer any more"),
            () = idle.as_mut() => break,
            // At once, as another one has the place already.
            () = pushed_out.as_mut() => return,
        }
    }
    connection.graceful_shutdown();
    let end = async { while let Some(Ok(_)) = connection.accept().await {} };
    // A client that does not let go is left.
    let _ = timeout(END_WITHIN, end).await;
}

/// Waits until the client does not answer.
async fn is_gone(asking: Option<PingPong>) {
    // There is one for who asks first.
    let Some(mut asking) = asking else { return pending().await };
    loop {
        sleep(ASKED_EVERY).await;
        if !matches!(timeout(ANSWERED_WITHIN, asking.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

async fn answer(visit: Arc<Visit>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let _busy = visit.busy();
    let response = match visit.judge(&request) {
        Judged::Site => visit.house.site.answer(request.map(Upload), visit.peer).await,
        Judged::Refused(refusal) => visit.house.refuse(&refusal),
        Judged::TcpWay(user) => return tcp_way::over_http2(&visit, &user, request, respond).await,
        Judged::Elsewhere => return visit.guest.h2(request, respond).await,
    };
    if let Err(error) = send(response, respond).await {
        tracing::debug!(peer = %visit.peer, %error, "an answer did not arrive");
    }
}

async fn send(response: Response<Body>, mut respond: SendResponse<Bytes>) -> Result<(), Failed> {
    let (head, mut body) = response.into_parts();
    let empty = body.is_end_stream();
    let mut stream = respond.send_response(Response::from_parts(head, ()), empty)?;
    if empty {
        return Ok(());
    }
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        push(&mut stream, data).await?;
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
async fn push(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), Failed> {
    while !data.is_empty() {
        let room = poll_fn(|cx| poll_room(stream, cx, data.len())).await?;
        stream.send_data(data.split_to(room), false)?;
    }
    Ok(())
}
