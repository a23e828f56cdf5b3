//! Serves the pages of another HTTP server, usually on the same machine, as a reverse proxy.
//!
//! Always holds: connection-specific fields are not forwarded (RFC 9110 §7.6.1), nor what a visitor claims
//! about its own address; an upstream that does not answer costs one request, nothing else.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{
        CONNECTION, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
};
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, sync::Semaphore, time::timeout};

use super::{BoxError, status_answer};
use crate::Body;

/// How long connecting to the upstream may take. Chosen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the upstream may take to answer, including the client's upload. Chosen, as nginx's
/// `proxy_read_timeout`.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest head of a response (bytes).
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Answers with the response of the server at `authority`.
pub(super) async fn answer<B>(
    authority: &str,
    request: Request<B>,
    peer: SocketAddr,
    answer_slots: &Arc<Semaphore>,
) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let Ok(permit) = Arc::clone(answer_slots).try_acquire_owned() else {
        return status_answer(StatusCode::SERVICE_UNAVAILABLE);
    };
    match timeout(RESPONSE_TIMEOUT, forward(authority, request, peer)).await {
        Ok(Ok(response)) => response.map(|body| {
            let held = body.map_frame(move |frame| {
                // Holds the permit until the whole body has been read.
                let _held = &permit;
                frame
            });
            held.boxed_unsync()
        }),
        Ok(Err(error)) => {
            tracing::debug!(%error, authority, "the upstream of the site does not answer");
            status_answer(StatusCode::BAD_GATEWAY)
        }
        Err(_) => status_answer(StatusCode::GATEWAY_TIMEOUT),
    }
}

async fn forward<B>(
    authority: &str,
    request: Request<B>,
    peer: SocketAddr,
) -> Result<Response<Body>, BoxError>
where
    B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(authority)).await??;
    let (mut client, connection) =
        http1::Builder::new().max_buf_size(MAX_HEAD_BYTES).handshake(TokioIo::new(stream)).await?;
    // The connection ends when its response has been read.
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "the connection to the upstream of the site failed");
        }
    });
    let mut response = client.send_request(forwarded_request(request, peer)?).await?;
    remove_connection_fields(response.headers_mut());
    Ok(response.map(|body| body.map_err(std::io::Error::other).boxed_unsync()))
}

/// The request as it is sent to the upstream.
fn forwarded_request<B>(request: Request<B>, peer: SocketAddr) -> Result<Request<B>, BoxError> {
    let (mut head, body) = request.into_parts();
    let host = match (head.uri.authority(), head.headers.get(HOST)) {
        (Some(authority), _) => HeaderValue::from_str(authority.as_str())?,
        (None, Some(host)) => host.clone(),
        (None, None) => HeaderValue::from_static(""),
    };
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    head.uri = match (&head.method, path) {
        (&Method::OPTIONS, "*") => Uri::from_static("*"),
        (_, path) => path.parse()?,
    };
    head.version = http::Version::HTTP_11;
    head.extensions = http::Extensions::new();
    remove_connection_fields(&mut head.headers);
    head.headers.insert(HOST, host);
    for claim in ["forwarded", "x-real-ip"] {
        head.headers.remove(claim);
    }
    head.headers.insert("x-forwarded-for", HeaderValue::from_str(&peer.ip().to_string())?);
    head.headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    Ok(Request::from_parts(head, body))
}

/// Removes connection-specific fields.
fn remove_connection_fields(headers: &mut HeaderMap) {
    let named = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let named: Vec<HeaderName> =
        named.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok()).collect();
    let known = [
        CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    for name in named.iter().chain(&known) {
        headers.remove(name);
    }
}
