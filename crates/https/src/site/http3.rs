//! Answers requests over HTTP/3, whose connections belong to other threads.
//!
//! In: a header section, and the content of the request. Out: the parts of the response, in their order.
//! Always holds: the next piece of content is read only when the thread of the connection has passed on the
//! one before, and content of the request is asked for only when the site reads it. So a visit holds one
//! piece in each direction, however slow the visitor is.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::Frame;
use mpvpn_identity::random;
use mpvpn_masque::headers::{Headers, Section};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::{Site, status_answer};
use crate::Body;

/// A part of a response, or a wish.
#[derive(Debug)]
pub enum ResponsePart {
    /// The header section.
    Head(Headers),
    /// Content. The next piece follows when the permit is dropped.
    Content(Bytes, OwnedSemaphorePermit),
    /// The response is complete.
    End,
    /// The response cannot be completed.
    Aborted,
    /// The site reads the content of the request: one piece of it is wanted.
    WantsContent,
}

/// Takes the parts of a response to the thread of the connection.
pub type Deliver = Arc<dyn Fn(ResponsePart) + Send + Sync>;

impl Site {
    /// Answers a request from `peer`. `upload` is its content, `None` if it has none: each
    /// [`ResponsePart::WantsContent`] asks for a piece, and the sender is dropped at the end.
    pub async fn answer_http3(
        self,
        headers: Headers,
        upload: Option<mpsc::Receiver<Bytes>>,
        peer: SocketAddr,
        deliver: Deliver,
    ) {
        let upload = Upload { pieces: upload, deliver: Arc::clone(&deliver), requested: false };
        let response = match request_from(&headers) {
            Some(request) => self.answer(request.map(|()| upload), peer, None).await,
            None => self.bad_request(),
        };
        let (head, mut body) = response.into_parts();
        deliver(ResponsePart::Head(header_section(&head)));
        let room = Arc::new(Semaphore::new(1));
        while let Ok(permit) = Arc::clone(&room).acquire_owned().await {
            match body.frame().await {
                None => return deliver(ResponsePart::End),
                Some(Err(error)) => {
                    tracing::debug!(%peer, %error, "a page could not be delivered over HTTP/3");
                    return deliver(ResponsePart::Aborted);
                }
                Some(Ok(frame)) => {
                    if let Ok(content) = frame.into_data() {
                        deliver(ResponsePart::Content(content, permit));
                    }
                }
            }
        }
    }

    fn bad_request(&self) -> Response<Body> {
        let mut response = status_answer(StatusCode::BAD_REQUEST);
        self.complete_headers(response.headers_mut(), Version::HTTP_3, None);
        response
    }
}

/// The request of a header section, if that is valid.
fn request_from(headers: &Headers) -> Option<Request<()>> {
    headers.validate(Section::Request).ok()?;
    let authority = headers.authority().unwrap_or_default();
    let uri = match headers.path() {
        Some(path) if path.starts_with('/') => {
            Uri::builder().scheme("https").authority(authority).path_and_query(path).build().ok()?
        }
        Some(path) => path.parse().ok()?,
        None => Uri::builder().authority(authority).build().ok()?,
    };
    let request = Request::builder().version(Version::HTTP_3).method(headers.method()?).uri(uri);
    let mut request = request.body(()).ok()?;
    for field in headers.iter().filter(|field| !field.name.starts_with(b":")) {
        let (name, value) = (HeaderName::from_bytes(&field.name), HeaderValue::from_bytes(&field.value));
        request.headers_mut().append(name.ok()?, value.ok()?);
    }
    Some(request)
}

fn header_section(head: &http::response::Parts) -> Headers {
    let mut headers = Headers::response(head.status.as_u16());
    let mut fields: Vec<_> = head.headers.iter().collect();
    // Caddy begins at any of them: the iteration of Go's maps.
    let first = usize::from(random::<1>().map_or(0, |[byte]| byte));
    let first = first % fields.len().max(1);
    fields.rotate_left(first);
    for (name, value) in fields {
        headers.push(name.as_str().to_owned(), value.as_bytes().to_vec());
    }
    headers
}

/// The content of a request.
struct Upload {
    pieces: Option<mpsc::Receiver<Bytes>>,
    deliver: Deliver,
    /// Whether a piece was requested that has not come.
    requested: bool,
}

impl hyper::body::Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !std::mem::replace(&mut self.requested, true) {
            (self.deliver)(ResponsePart::WantsContent);
        }
        let Some(pieces) = &mut self.pieces else { return Poll::Ready(None) };
        let piece = ready!(pieces.poll_recv(cx));
        self.requested = false;
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_none()
    }
}
