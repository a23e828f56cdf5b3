//! Serves clients of the first MASQUE drafts, which use TLS without ALPN.
//!
//! They speak HTTP/2 with CONNECT, and for UDP one HTTP/1.1 request per connection: `CONNECT-UDP
//! masque://ADDRESS:PORT/`, after which both sides send chunks (draft-ietf-masque-connect-udp-03). In: a
//! connection from which nothing was read. Out: the same services as for other clients. Always holds: any
//! other client is served as an HTTP/1.1 client.

use std::{io, sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use http::StatusCode;
use mpvpn_masque::{connect::Authority, connect_udp, headers::Headers};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf},
    time::timeout,
};

use super::{ClientConnection, RequestKind, http1, http2};

/// Limits of the first request's head: time, and bytes. Chosen, as for HTTP/1.1.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HEAD_BYTES: usize = 16 << 10;
/// The largest number of fields in that head.
const MAX_FIELDS: usize = 64;
/// The part of the HTTP/2 connection preface (RFC 9113 §3.4) that tells it from HTTP/1.1.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";
/// The start of a request for UDP.
const CONNECT_UDP_METHOD: &[u8] = b"CONNECT-UDP ";

/// Any connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for T {}

/// The halves of a connection.
type Halves<T> = (ReadHalf<T>, WriteHalf<T>);

/// Serves a connection without ALPN.
pub(super) async fn serve(io: impl Stream, client: Arc<ClientConnection>) {
    let mut halves = tokio::io::split(io);
    let begun = tokio::select! {
        begun = timeout(HEAD_TIMEOUT, read_first_request(&mut halves.0)) => begun,
        () = client.evicted() => return,
    };
    match begun {
        Ok(Ok((FirstRequest::Http2, read))) => http2::serve(with_prefix(read, halves), client).await,
        Ok(Ok((FirstRequest::ConnectUdp(request), read))) => serve_udp(read, halves, client, request).await,
        Ok(Ok((FirstRequest::Other, read))) => http1::serve(with_prefix(read, halves), client).await,
        Ok(Err(error)) => {
            tracing::debug!(peer = %client.peer, %error, "a client disconnected before its first request")
        }
        Err(_) => tracing::debug!(peer = %client.peer, "a client sent no request in time"),
    }
}

/// Serves a request for UDP, whose head is at the start of `read`, and relays its chunks.
async fn serve_udp<T: Stream>(
    mut read: Bytes,
    halves: Halves<T>,
    client: Arc<ClientConnection>,
    request: Request,
) {
    let headers = request.headers(&client);
    match headers.as_ref().map(|headers| client.classify_headers(headers)) {
        // The site does not know this method either.
        None | Some(RequestKind::Site) => return http1::serve(with_prefix(read, halves), client).await,
        Some(RequestKind::Refused(refusal)) => return send_refusal(halves.1, &refusal.headers()).await,
        Some(RequestKind::TcpTransport(_) | RequestKind::Gateway) => {}
    }
    let _busy = client.begin_request();
    read.advance(request.length.min(read.len()));
    let (answer, accepted) = client.gateway_client.request(headers.unwrap_or_default()).await;
    let mut io = with_prefix(read, halves);
    let Some(accepted) = accepted else { return send_refusal(io, &answer).await };
    if io.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.is_ok() {
        accepted.relay_chunks(io).await;
    }
}

/// Sends a refusal and closes the connection.
async fn send_refusal(mut io: impl AsyncWrite + Unpin, answer: &Headers) {
    let status = answer.status().and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.unwrap_or(StatusCode::BAD_GATEWAY);
    let mut head =
        format!("HTTP/1.1 {} {}\r\n", status.as_str(), status.canonical_reason().unwrap_or_default());
    for field in answer.iter().filter(|field| !field.name.starts_with(b":")) {
        head += &format!("{}: {}\r\n", field.name.escape_ascii(), String::from_utf8_lossy(&field.value));
    }
    head += "content-length: 0\r\nconnection: close\r\n\r\n";
    // Fails only if the client has disconnected.
    if io.write_all(head.as_bytes()).await.is_ok() {
        let _ = io.shutdown().await;
    }
}

/// The kind of the first request.
#[derive(Debug, PartialEq, Eq)]
enum FirstRequest {
    Http2,
    ConnectUdp(Request),
    Other,
}

/// The head of a request for UDP.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    target: Authority,
    /// The fields with credentials: name and value.
    credentials: Vec<(&'static str, String)>,
    /// The length of the head (bytes).
    length: usize,
}

impl Request {
    /// Parses a complete head; `None` if it is not such a request.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        let Ok(httparse::Status::Complete(length)) = request.parse(bytes) else { return None };
        let target = request.path?.strip_prefix("masque://")?.trim_end_matches('/').parse().ok()?;
        let is = |name: &str, wanted: &str| name.eq_ignore_ascii_case(wanted);
        let credentials = request.headers.iter().filter_map(|field| {
            let wanted = ["proxy-authorization", "authorization"];
            let name = wanted.into_iter().find(|wanted| is(field.name, wanted))?;
            Some((name, std::str::from_utf8(field.value).ok()?.to_owned()))
        });
        Some(Self { target, credentials: credentials.collect(), length })
    }

    /// The same request as RFC 9298 has it.
    fn headers(&self, client: &ClientConnection) -> Option<Headers> {
        let path = connect_udp::path(&self.target);
        let mut headers = connect_udp::request(&client.quic.to_string(), &path, None);
        for (name, value) in &self.credentials {
            headers.push(*name, value.clone());
        }
        headers.validate(mpvpn_masque::headers::Section::Request).is_ok().then_some(headers)
    }
}

/// Reads until the kind of the first request is known; returns it and the bytes read.
async fn read_first_request(io: &mut (impl AsyncRead + Unpin)) -> io::Result<(FirstRequest, Bytes)> {
    let mut read = BytesMut::new();
    let begins = |read: &[u8], with: &[u8]| read.iter().zip(with).all(|(one, other)| one == other);
    let first_request = loop {
        let is_long = |with: &[u8]| read.len() >= with.len();
        match (begins(&read, HTTP2_PREFACE), begins(&read, CONNECT_UDP_METHOD)) {
            (false, false) => break FirstRequest::Other,
            (true, _) if is_long(HTTP2_PREFACE) => break FirstRequest::Http2,
            (_, true) if is_long(CONNECT_UDP_METHOD) => {
                if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                    let request = Request::parse(&read[..end + 4]);
                    break request.map_or(FirstRequest::Other, FirstRequest::ConnectUdp);
                }
                if is_long(&[0; MAX_HEAD_BYTES]) {
                    break FirstRequest::Other;
                }
            }
            _ => {}
        }
        if io.read_buf(&mut read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    Ok((first_request, read.freeze()))
}

/// A connection that yields the bytes `read` again, then the rest.
fn with_prefix<T: Stream>(read: Bytes, (reader, writer): Halves<T>) -> impl Stream {
    tokio::io::join(AsyncReadExt::chain(io::Cursor::new(read), reader), writer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONNECT_UDP_REQUEST: &str = "CONNECT-UDP masque://[2001:db8::7]:53/ HTTP/1.1\r\nHost: x\r\n\
        Proxy-Authorization: PrivacyToken token=abc\r\n\r\n";

    async fn first_request_of(pieces: &[&[u8]]) -> (io::Result<FirstRequest>, Vec<u8>) {
        let (mut theirs, ours) = tokio::io::duplex(1 << 16);
        for piece in pieces {
            theirs.write_all(piece).await.unwrap();
        }
        drop(theirs);
        let mut halves = tokio::io::split(ours);
        let (first_request, read) = match read_first_request(&mut halves.0).await {
            Ok((first_request, read)) => (Ok(first_request), read),
            Err(error) => (Err(error), Bytes::new()),
        };
        let mut all = Vec::new();
        with_prefix(read, halves).read_to_end(&mut all).await.unwrap();
        (first_request, all)
    }

    #[tokio::test]
    async fn what_it_begins_with_says_what_it_is_and_is_read_again() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let (first_request, all) = first_request_of(&[preface]).await;
        assert_eq!((first_request.unwrap(), &all[..]), (FirstRequest::Http2, &preface[..]));
        let (first_request, all) = first_request_of(&[b"GET / HTTP/1.1\r\n\r\n"]).await;
        assert_eq!((first_request.unwrap(), &all[..4]), (FirstRequest::Other, &b"GET "[..]));
        let (first_request, all) =
            first_request_of(&[b"CONNECT-", &CONNECT_UDP_REQUEST.as_bytes()[8..], b"\0\x01x"]).await;
        let FirstRequest::ConnectUdp(request) = first_request.unwrap() else { panic!("no request") };
        assert_eq!(request.target.to_string(), "[2001:db8::7]:53");
        assert_eq!(request.credentials, [("proxy-authorization", "PrivacyToken token=abc".to_owned())]);
        assert_eq!((request.length, all.len()), (CONNECT_UDP_REQUEST.len(), CONNECT_UDP_REQUEST.len() + 3));
    }

    #[tokio::test]
    async fn what_never_becomes_a_request_is_nobodys() {
        assert!(first_request_of(&[b"CONNECT-UDP masque://1.2.3.4:5/ HT"]).await.0.is_err());
        let endless = [b"CONNECT-UDP ".to_vec(), vec![b'x'; MAX_HEAD_BYTES]].concat();
        assert_eq!(first_request_of(&[&endless]).await.0.unwrap(), FirstRequest::Other);
        for head in ["masque://1.2.3.4/", "http://1.2.3.4:5/", "masque://1.2.3.4:5/path", "*"] {
            let head = format!("CONNECT-UDP {head} HTTP/1.1\r\n\r\n");
            assert_eq!(first_request_of(&[head.as_bytes()]).await.0.unwrap(), FirstRequest::Other, "{head}");
        }
    }
}
