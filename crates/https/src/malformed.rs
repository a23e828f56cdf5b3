//! Refusals of malformed requests over HTTP/1.1, in the words of Caddy's HTTP library instead of those of
//! ours, which has no setting for them.
//!
//! In: a connection of somebody without credentials. Out: the same bytes, but for the bare refusal, instead
//! of which the visitor gets that of the other library. Always holds: at most [`MAX_HEAD_BYTES`] are copied.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, DATE, EXPECT, HOST},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Body, ClientConnection, full_body, http1::MAX_HEAD_BYTES, site::date};

/// How hyper refuses what it cannot read: a date follows.
const BARE_REFUSAL: &[u8] = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\nDate: ";
/// Bytes of a date (RFC 9110 §5.6.7) and the end of a head.
const DATE_LEN: usize = 33;

/// A connection on which [`BARE_REFUSAL`] is replaced.
pub(super) struct Refusing<S> {
    stream: S,
    client: Arc<ClientConnection>,
    /// Bytes that were read since the last answer.
    read: Vec<u8>,
    /// The rest of the refusal that is written instead.
    instead: Bytes,
}

impl<S> Refusing<S> {
    pub(super) fn new(stream: S, client: Arc<ClientConnection>) -> Self {
        Self { stream, client, read: Vec::new(), instead: Bytes::new() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Refusing<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if self.client.is_unauthenticated() {
            let some = (MAX_HEAD_BYTES - self.read.len()).min(buf.filled().len() - before);
            self.read.extend_from_slice(&buf.filled()[before..before + some]);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Refusing<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.instead.is_empty() {
            let read = std::mem::take(&mut self.read);
            let is_bare = buf.len() == BARE_REFUSAL.len() + DATE_LEN && buf.starts_with(BARE_REFUSAL);
            if !is_bare || !self.client.is_unauthenticated() {
                return Pin::new(&mut self.stream).poll_write(cx, buf);
            }
            self.instead = refusal(&String::from_utf8_lossy(&read)).into();
        }
        while self.instead.has_remaining() {
            let Self { stream, instead, .. } = &mut *self;
            match ready!(Pin::new(stream).poll_write(cx, instead))? {
                0 => return Poll::Ready(Ok(0)),
                written => instead.advance(written),
            }
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The refusal of what was read.
fn refusal(read: &str) -> String {
    let mut lines = read.split("\r\n").take_while(|line| !line.is_empty());
    let version = lines.next().and_then(|line| line.split(' ').nth(2)).unwrap_or_default();
    let fields: Vec<_> = lines.map(|line| line.split_once(':')).collect();
    let has = |wanted: &str| fields.iter().flatten().any(|(name, _)| name.eq_ignore_ascii_case(wanted));
    let (status, content) = match version {
        version if !version.starts_with("HTTP/") => ("400 Bad Request", None),
        version if !version.starts_with("HTTP/1.") => {
            ("505 HTTP Version Not Supported: unsupported protocol version", None)
        }
        _ if fields.contains(&None) => ("400 Bad Request", None),
        _ if fields.iter().flatten().any(|(name, _)| name.contains(' ')) => {
            ("400 Bad Request: invalid header name", None)
        }
        // One that is known would not have been refused.
        _ if has("transfer-encoding") => ("501 Not Implemented", Some("Unsupported transfer encoding")),
        "HTTP/1.1" if !has("host") => ("400 Bad Request: missing required Host header", None),
        _ => ("400 Bad Request", None),
    };
    let content = content.unwrap_or(status);
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{content}"
    )
}

/// The answer to a request that hyper takes and Caddy's library answers by itself.
pub(super) fn answer<B>(request: &Request<B>) -> Option<Response<Body>> {
    let headers = request.headers();
    let hosts = headers.get_all(HOST).iter().count();
    let is_known = |expectation: &HeaderValue| expectation.as_bytes().eq_ignore_ascii_case(b"100-continue");
    let close = (CONNECTION, HeaderValue::from_static("close"));
    let (no_content, date) = ((CONTENT_LENGTH, HeaderValue::from_static("0")), (DATE, date()));
    let (status, fields) = if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
        // It is replaced by the refusal that says why.
        (StatusCode::BAD_REQUEST, vec![close, no_content])
    } else if headers.get(EXPECT).is_some_and(|expectation| !is_known(expectation)) {
        (StatusCode::EXPECTATION_FAILED, vec![close, date, no_content])
    } else if request.method() == Method::OPTIONS && request.uri() == "*" {
        (StatusCode::OK, vec![no_content])
    } else {
        return None;
    };
    let mut response = Response::new(full_body(""));
    *response.status_mut() = status;
    response.headers_mut().extend(fields);
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_what_is_wrong_as_the_other_library_does() {
        for (read, status) in [
            ("nonsense\r\n\r\n", "400 Bad Request"),
            ("POST /\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n", "400 Bad Request"),
            (
                "GET / HTTP/2.0\r\nHost: a\r\n\r\n",
                "505 HTTP Version Not Supported: unsupported protocol version",
            ),
            ("GET / HTTP/1.1\r\nHost: a\r\nb c: d\r\n\r\n", "400 Bad Request: invalid header name"),
            ("GET / HTTP/1.1\r\nHost: a\r\nb\r\n\r\n", "400 Bad Request"),
            ("GET / HTTP/1.1\r\na: b\r\n\r\n", "400 Bad Request: missing required Host header"),
            ("GET / HTTP/1.1\r\nhOST: a\r\nContent-Length: x\r\n\r\nhost", "400 Bad Request"),
            ("\u{fffd}", "400 Bad Request"),
            ("", "400 Bad Request"),
        ] {
            let refusal = refusal(read);
            assert!(refusal.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{read:?}: {refusal}");
            assert!(refusal.ends_with(&format!("\r\n\r\n{status}")), "{read:?}: {refusal}");
        }
        let unknown = refusal("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n");
        assert!(
            unknown.starts_with("HTTP/1.1 501 ")
                && unknown.ends_with("\r\n\r\nUnsupported transfer encoding")
        );
    }
}
