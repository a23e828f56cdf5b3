//! HTTP downloads over persistent connections (RFC 9112 §9.3): measures the time from the request to the last
//! byte.
//!
//! In: a testbed, an address of the server, sizes. Out: durations. Both ends are threads of this process with
//! sockets in the namespaces. The content is constant and not checked, so that it costs no time.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::testbed::{Host, Testbed};

/// Size of one read or write call, bytes: larger than the socket buffers fill at once, so that system calls
/// do not limit.
const CHUNK_BYTES: usize = 256 << 10;
/// Read and connect timeout: longer than any outage that a connection must survive.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// An HTTP server on the testbed's server: `GET /N` returns N bytes. Stops accepting when dropped.
pub struct PersistentServer {
    port: u16,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// A persistent connection from the client.
pub struct PersistentConnection {
    stream: BufReader<TcpStream>,
    chunk: Vec<u8>,
}

impl PersistentServer {
    /// Listens on every IPv4 address.
    pub fn start(testbed: &Testbed) -> Result<Self, String> {
        let bound = testbed.in_namespace(Host::Server, || {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>((listener.local_addr()?.port(), listener))
        });
        let (port, listener) = bound.map_err(|error| format!("an HTTP server: {error}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let acceptor = thread::spawn(move || accept(&listener, &seen));
        Ok(Self { port, stop, acceptor: Some(acceptor) })
    }

    /// Connects from the client to the server at `address`.
    pub fn connect(&self, testbed: &Testbed, address: Ipv4Addr) -> Result<PersistentConnection, String> {
        let to = SocketAddr::from((address, self.port));
        let stream = testbed.in_namespace(Host::Client, || TcpStream::connect_timeout(&to, READ_TIMEOUT));
        stream.and_then(PersistentConnection::new).map_err(|error| format!("a connection to {to}: {error}"))
    }
}

impl Drop for PersistentServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl PersistentConnection {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream), chunk: vec![0; CHUNK_BYTES] })
    }

    /// Downloads `size` bytes and returns the duration.
    pub fn get(&mut self, size: u64) -> Result<Duration, String> {
        let began = Instant::now();
        self.fetch(size).map_err(|error| format!("{size} bytes by HTTP: {error}"))?;
        Ok(began.elapsed())
    }

    fn fetch(&mut self, size: u64) -> io::Result<()> {
        let request = format!("GET /{size} HTTP/1.1\r\nHost: shelf\r\n\r\n");
        self.stream.get_mut().write_all(request.as_bytes())?;
        let head = head(&mut self.stream)?;
        let length = head.iter().find_map(|line| line.strip_prefix("Content-Length: ")?.parse::<u64>().ok());
        if length != Some(size) {
            return Err(io::Error::other(format!("the answer begins with {head:?}")));
        }
        let mut left = size;
        while left > 0 {
            let length = self.chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match self.stream.read(&mut self.chunk[..length])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => left -= count as u64,
            }
        }
        Ok(())
    }
}

fn accept(listener: &TcpListener, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            // The client reports errors of the connection. The thread ends with the connection.
            Ok((stream, _)) => drop(thread::spawn(move || drop(serve(stream)))),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn serve(stream: TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let (mut stream, chunk) = (BufReader::new(stream), vec![0x55; CHUNK_BYTES]);
    loop {
        let head = head(&mut stream)?;
        let path = head.first().and_then(|line| line.strip_prefix("GET /")?.split(' ').next());
        let size: u64 = path.and_then(|path| path.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
        let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n").into_bytes();
        // The first chunk leaves in one write with the header section.
        let with_head = usize::try_from(size).unwrap_or(usize::MAX).min(chunk.len());
        answer.extend_from_slice(&chunk[..with_head]);
        let out = stream.get_mut();
        out.write_all(&answer)?;
        let mut left = size - with_head as u64;
        while left > 0 {
            let length = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            out.write_all(&chunk[..length])?;
            left -= length as u64;
        }
    }
}

/// The lines of a header section.
fn head(stream: &mut impl BufRead) -> io::Result<Vec<String>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end() {
            "" => return Ok(lines),
            text => lines.push(text.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_serves_several_requests() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
        let served = thread::spawn(move || serve(listener.accept()?.0));
        let mut reader = PersistentConnection::new(stream).expect("a connected socket");
        for size in [0, 1, 10_000, CHUNK_BYTES as u64, CHUNK_BYTES as u64 + 1, 1_000_000] {
            assert!(reader.get(size).is_ok(), "{size} bytes");
        }
        drop(reader);
        assert!(
            served.join().expect("no panic").is_err_and(|end| end.kind() == io::ErrorKind::UnexpectedEof)
        );
    }
}
