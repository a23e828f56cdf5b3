//! HTTP/1.1 on one connection.

use std::{convert::Infallible, pin::pin, sync::Arc, time::Duration};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Body, Judged, Visit, tcp_way};

/// How long a request's head may take, and how long a connection may be without one.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// Bytes read ahead, and so the longest head.
const READ_AHEAD: usize = 16 << 10;

/// Serves until the connection ends, or somebody else needs its place.
pub(super) async fn serve(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, visit: Arc<Visit>) {
    let answering = Arc::clone(&visit);
    let service = service_fn(move |request| {
        let visit = Arc::clone(&answering);
        async move { Ok::<_, Infallible>(answer(&visit, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(READ_AHEAD)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(peer = %visit.peer, %error, "a connection of HTTP/1.1 has broken");
            }
        }
        () = visit.pushed_out() => {}
    }
}

async fn answer(visit: &Arc<Visit>, request: Request<Incoming>) -> Response<Body> {
    match visit.judge(&request) {
        Judged::Site => visit.house.site.answer(request, visit.peer).await,
        Judged::Refused(refusal) => visit.house.refuse(&refusal),
        Judged::TcpWay(user) => tcp_way::over_http1(visit, &user, request),
        Judged::Elsewhere => visit.guest.h1(request).await,
    }
}
