//! Serves HTTP/1.1 on one connection.

use std::{convert::Infallible, pin::pin, sync::Arc, time::Duration};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Body, ClientConnection, RequestKind, malformed, tcp_transport};

/// How long a request's head may take, and how long a connection may idle between requests. Longer: slow
/// clients keep their slots. Chosen.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest head of a request (bytes); hyper's read buffer.
pub(super) const MAX_HEAD_BYTES: usize = 16 << 10;

/// Serves until the connection ends, or its slot is given to a newer connection.
pub(super) async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    client: Arc<ClientConnection>,
) {
    let answering = Arc::clone(&client);
    let service = service_fn(move |request| {
        let client = Arc::clone(&answering);
        async move { Ok::<_, Infallible>(answer(&client, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(malformed::Refusing::new(io, Arc::clone(&client))), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(peer = %client.peer, %error, "an HTTP/1.1 connection failed");
            }
        }
        () = client.evicted() => {}
    }
}

async fn answer(client: &Arc<ClientConnection>, request: Request<Incoming>) -> Response<Body> {
    match client.classify(&request) {
        RequestKind::Site => match malformed::answer(&request) {
            Some(answer) => answer,
            None => client.context.site.answer(request, client.peer, Some(client.quic.port())).await,
        },
        RequestKind::Refused(refusal) => {
            client.context.refuse(&refusal, request.version(), client.quic.port())
        }
        RequestKind::TcpTransport(user) => tcp_transport::over_http1(client, &user, request),
        RequestKind::Gateway => client.gateway_client.serve_http1(request).await,
    }
}
