//! A speed test for browsers in the LAN: a page, and the bytes of its transfers to and from the responder of
//! the server.
//!
//! In: HTTP/1.1 requests of browsers. Out: the page; bytes from the responder, through the tunnel; bytes to
//! it; answers after an echo of the responder. Always holds: connections, transfers, sizes of requests and
//! times are bounded; pages of other origins are refused; nothing is read from disk.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use mpvpn_status::measure::{Datagram, DatagramKind, Order, ResponderReport};

use super::{
    Interrupt, POLL_INTERVAL,
    responder::{Orders, Responder, Target},
    run::{MeasureError, reach},
};

/// Connections of browsers: each browser has six, and one for each ping. More take more threads.
const MAX_CONNECTIONS: usize = 48;
/// Transfers at a time: those of two browsers. The responder has places for 24 connections of a client.
const MAX_TRANSFERS: usize = 16;
/// Longest head of a request (bytes), as most servers have it.
const MAX_HEAD_BYTES: usize = 8192;
/// Longest body of an upload (bytes): the page sends 4 MiB at a time.
const MAX_BODY_BYTES: u64 = 64 << 20;
/// Longest time of a download: the page ends it after 8 s.
const MAX_DOWNLOAD: Duration = Duration::from_secs(30);
/// Time without a byte after which a connection ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Time after which an echo counts as lost.
const ECHO_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes that are passed on at a time.
const CHUNK_BYTES: usize = 64 << 10;

const HTML: &str = include_str!("lan_page/page.html");
const SCRIPT: &str = include_str!("lan_page/page.js");
const STYLE: &str = include_str!("lan_page/page.css");
/// Headers of every response: no other origin may be asked, and no other page may show this one.
const SAFE_HEADERS: &str = "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
    Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n";

/// State shared by all connections.
struct Shared {
    target: Target,
    connections: AtomicUsize,
    transfers: AtomicUsize,
    interrupt: Interrupt,
}

/// A place among a bounded number, which is free again when this is dropped.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(count: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let taken = count.fetch_add(1, Relaxed);
        let place = Self(count);
        (taken < limit).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The listening page.
pub struct LanPage {
    listener: TcpListener,
    shared: Arc<Shared>,
    /// Keeps the counters of the responder, and its leave to answer datagrams.
    orders: Orders,
}

impl LanPage {
    /// Listens at `address`. `device` is the TUN device of the client, `responders` are the addresses of its
    /// server.
    ///
    /// # Errors
    /// If the address cannot be listened at, or the responder does not answer.
    pub fn bind(
        address: SocketAddr,
        device: &str,
        responders: &[SocketAddr],
        interrupt: &Interrupt,
    ) -> Result<Self, MeasureError> {
        let Responder { target, orders } = reach(device, responders)?;
        let bound = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = bound.map_err(|source| MeasureError::Listen { address, source })?;
        let shared = Arc::new(Shared {
            target,
            connections: AtomicUsize::new(0),
            transfers: AtomicUsize::new(0),
            interrupt: interrupt.clone(),
        });
        Ok(Self { listener, shared, orders })
    }

    /// The address where it listens.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves browsers until a signal comes.
    pub fn serve(self) {
        let mut next_report = Instant::now();
        while !self.shared.interrupt.is_set() {
            if Instant::now() >= next_report {
                next_report = Instant::now() + IDLE_TIMEOUT;
                // The responder forgets clients that order nothing for a minute.
                let _ = self.orders.ask::<ResponderReport>(Order::Report);
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let shared = Arc::clone(&self.shared);
                    let started = thread::Builder::new().name("browser".to_owned()).spawn(move || {
                        let Some(_place) = Place::take(&shared.connections, MAX_CONNECTIONS) else { return };
                        // A browser that goes away in the middle is no failure.
                        let _ = serve_connection(stream, &shared);
                    });
                    if started.is_err() {
                        thread::sleep(POLL_INTERVAL);
                    }
                }
                Err(_) => thread::sleep(POLL_INTERVAL),
            }
        }
    }
}

/// A parsed request.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    method: String,
    path: String,
    body_bytes: u64,
    is_of_other_origin: bool,
    closes: bool,
}

fn serve_connection(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let mut echo = None;
    let mut received = Vec::new();
    while !shared.interrupt.is_set() {
        let Some((request, head_bytes)) = read_head(&mut stream, &mut received)? else { return Ok(()) };
        received.drain(..head_bytes);
        if request.is_of_other_origin {
            return respond_text(
                &mut stream,
                "403 Forbidden",
                "a page of another origin may not measure here",
            );
        }
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/") => respond(&mut stream, "200 OK", "text/html; charset=utf-8", HTML)?,
            ("GET", "/page.js") => respond(&mut stream, "200 OK", "text/javascript; charset=utf-8", SCRIPT)?,
            ("GET", "/page.css") => respond(&mut stream, "200 OK", "text/css; charset=utf-8", STYLE)?,
            ("GET", "/ping") => match ask_echo(&shared.target, &mut echo) {
                Ok(()) => respond_text(&mut stream, "200 OK", "")?,
                Err(error) => respond_text(&mut stream, "504 Gateway Timeout", &error.to_string())?,
            },
            ("GET", "/down") | ("POST", "/up") => {
                let Some(_place) = Place::take(&shared.transfers, MAX_TRANSFERS) else {
                    return respond_text(
                        &mut stream,
                        "503 Service Unavailable",
                        "others measure now: try again later",
                    );
                };
                match request.method.as_str() {
                    "GET" => return send_download(&mut stream, shared),
                    _ if request.body_bytes > MAX_BODY_BYTES => {
                        return respond_text(&mut stream, "413 Content Too Large", "the body is too long");
                    }
                    _ => {
                        let early =
                            received.len().min(usize::try_from(request.body_bytes).unwrap_or(usize::MAX));
                        take_upload(&mut stream, shared, &received[..early], request.body_bytes)?;
                        received.drain(..early);
                        respond_text(&mut stream, "200 OK", "")?;
                    }
                }
            }
            _ => return respond_text(&mut stream, "404 Not Found", "there is nothing here"),
        }
        if request.closes {
            return Ok(());
        }
    }
    Ok(())
}

/// Reads until the head of a request is whole; `None` at the end of the connection. Returns it with its
/// length.
fn read_head(stream: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<Option<(Request, usize)>> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(found) = parse(received).map_err(|why| io::Error::new(ErrorKind::InvalidData, why))? {
            return Ok(Some(found));
        }
        if received.len() > MAX_HEAD_BYTES {
            return Err(ErrorKind::InvalidData.into());
        }
        match stream.read(&mut buffer)? {
            0 => return Ok(None),
            length => received.extend_from_slice(&buffer[..length]),
        }
    }
}

/// Parses the head of a request with its length; `None` if it is not whole.
fn parse(received: &[u8]) -> Result<Option<(Request, usize)>, String> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Request::new(&mut headers);
    let parsed = head.parse(received).map_err(|error| error.to_string())?;
    let httparse::Status::Complete(length) = parsed else { return Ok(None) };
    let header = |name: &str| {
        let found = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        found.and_then(|header| std::str::from_utf8(header.value).ok()).map(str::trim)
    };
    if header("transfer-encoding").is_some() {
        return Err("a body without a length".to_owned());
    }
    let body_bytes = header("content-length").map_or(Ok(0), str::parse);
    let is_of_other_origin =
        header("sec-fetch-site").is_some_and(|site| !matches!(site, "same-origin" | "none"));
    let request = Request {
        method: head.method.unwrap_or_default().to_owned(),
        path: head.path.unwrap_or_default().to_owned(),
        body_bytes: body_bytes.map_err(|_| "a length that is no number".to_owned())?,
        is_of_other_origin,
        closes: head.version != Some(1)
            || header("connection").is_some_and(|word| word.eq_ignore_ascii_case("close")),
    };
    Ok(Some((request, length)))
}

fn respond_text(stream: &mut TcpStream, status: &str, text: &str) -> io::Result<()> {
    respond(stream, status, "text/plain", text)
}

fn respond(stream: &mut TcpStream, status: &str, kind: &str, body: &str) -> io::Result<()> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{SAFE_HEADERS}\r\n"
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())
}

/// Sends what the responder sends, until the browser has enough.
fn send_download(stream: &mut TcpStream, shared: &Shared) -> io::Result<()> {
    let mut flow = shared.target.flow(Order::Send)?;
    flow.set_read_timeout(Some(IDLE_TIMEOUT))?;
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n{SAFE_HEADERS}\r\n"
    );
    stream.write_all(head.as_bytes())?;
    let (mut buffer, end) = (vec![0; CHUNK_BYTES], Instant::now() + MAX_DOWNLOAD);
    while Instant::now() < end && !shared.interrupt.is_set() {
        match flow.read(&mut buffer)? {
            0 => break,
            length => stream.write_all(&buffer[..length])?,
        }
    }
    Ok(())
}

/// Passes a body on to the responder. `early`: its bytes that came with the head.
fn take_upload(stream: &mut TcpStream, shared: &Shared, early: &[u8], body_bytes: u64) -> io::Result<()> {
    let mut flow = shared.target.flow(Order::Receive)?;
    flow.set_write_timeout(Some(IDLE_TIMEOUT))?;
    flow.write_all(early)?;
    let mut left = body_bytes - early.len() as u64;
    let mut buffer = vec![0; CHUNK_BYTES];
    while left > 0 && !shared.interrupt.is_set() {
        let limit = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match stream.read(&mut buffer[..limit])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            length => {
                flow.write_all(&buffer[..length])?;
                left -= length as u64;
            }
        }
    }
    Ok(())
}

/// Waits for an echo of the responder; `socket` is that of the connection, once it is used.
fn ask_echo(target: &Target, socket: &mut Option<(UdpSocket, u32)>) -> io::Result<()> {
    if socket.is_none() {
        *socket = Some((target.datagrams(ECHO_TIMEOUT)?, 0));
    }
    let Some((socket, sequence)) = socket else { return Ok(()) };
    *sequence = sequence.wrapping_add(1);
    let header = Datagram { kind: DatagramKind::EchoRequest, run: 0, sequence: *sequence, sent_us: 0 };
    socket.send(&header.encode())?;
    let (mut buffer, end) = ([0; 2048], Instant::now() + ECHO_TIMEOUT);
    while Instant::now() < end {
        match socket.recv(&mut buffer) {
            Ok(length) => {
                let reply = Datagram::parse(&buffer[..length]);
                if reply
                    .is_some_and(|reply| reply.kind == DatagramKind::EchoReply && reply.sequence == *sequence)
                {
                    return Ok(());
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(ErrorKind::TimedOut, "the server does not answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<Option<(Request, usize)>, String> {
        parse(text.as_bytes())
    }

    #[test]
    fn requests_are_read_whole_and_others_are_refused() {
        let text = "POST /up HTTP/1.1\r\nHost: 192.168.1.1:8080\r\nContent-Length: 7\r\nSec-Fetch-Site: same-origin\r\n\r\n1234567";
        let (found, length) = request(text).unwrap().unwrap();
        assert_eq!((found.method.as_str(), found.path.as_str(), found.body_bytes), ("POST", "/up", 7));
        assert!(!found.is_of_other_origin && !found.closes && &text[length..] == "1234567");
        assert_eq!(request("GET /down HTTP/1.1\r\nHost"), Ok(None));
        let (found, _) = request("GET / HTTP/1.0\r\nSec-Fetch-Site: cross-site\r\n\r\n").unwrap().unwrap();
        assert!(found.is_of_other_origin && found.closes);
        for bad in [
            "\u{0}\u{1}",
            "GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            "POST /up HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ] {
            assert!(request(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_page_asks_no_other_host() {
        for text in [HTML, SCRIPT, STYLE] {
            assert!(!text.contains("://") && !text.contains("style=") && !text.contains("onclick="));
        }
        for name in ["page.js", "page.css"] {
            assert!(HTML.contains(&format!("\"{name}\"")));
        }
    }

    #[test]
    fn places_are_bounded_and_come_back() {
        let count = AtomicUsize::new(0);
        let places: Vec<_> = (0..3).filter_map(|_| Place::take(&count, 2)).collect();
        assert_eq!((places.len(), count.load(Relaxed)), (2, 2));
        drop(places);
        assert!(Place::take(&count, 1).is_some() && count.load(Relaxed) == 0);
    }
}
