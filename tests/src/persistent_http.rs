//! HTTP downloads over connections that are kept: how long one takes, from the question to the last byte.
//!
//! In: a stage, an address of the server, sizes. Out: times. Both ends are threads of this process with sockets inside
//! the namespaces; the bytes themselves say nothing, so that making and checking them takes no time.

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

/// What is read or written at once, bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// How long nothing may come.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// A server at the lab's server that answers `GET /N` with N bytes; takes no more connections once dropped.
pub struct PersistentServer {
    port: u16,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// A connection to it from the client.
pub struct PersistentConnection {
    stream: BufReader<TcpStream>,
    chunk: Vec<u8>,
}

impl PersistentServer {
    /// Serves on every IPv4 address.
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

    /// Connects to it at `address`.
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

    /// Asks for so many bytes: how long it took until all of them were there.
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
            // A connection that ends badly shows at the other end. Its thread ends with it.
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
        // What is small leaves with its head.
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

/// The lines before the empty one.
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
    fn a_connection_is_kept_for_one_size_after_the_other() {
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
