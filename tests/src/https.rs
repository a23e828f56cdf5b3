//! An HTTPS server with pages of known bytes, and a name server that resolves its name.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};

use crate::{
    http::KnownBytes,
    testbed::{Host, Testbed},
};

/// Read and write timeout of a connection: longer than the outages in the tests.
const IO_TIMEOUT: Duration = Duration::from_secs(30);

/// An HTTPS server: `GET /N` returns the first N bytes of [`KnownBytes`].
pub struct HttpsPages {
    name: String,
    port: u16,
    certificate: String,
    progress: Arc<Progress>,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// Bytes that were sent, and the byte count at which sending pauses.
struct Progress {
    sent: AtomicU64,
    pause: AtomicU64,
}

impl HttpsPages {
    /// Listens on every address of that host, with a certificate for `name`. Sending pauses after `pause`
    /// bytes until [`Self::resume`].
    pub fn start(testbed: &Testbed, host: Host, name: &str, pause: u64) -> Self {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("a certificate");
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a certificate and its key");
        let config = Arc::new(config);
        let listener = testbed.in_namespace(host, || TcpListener::bind("[::]:0").expect("a free port"));
        let port = listener.local_addr().expect("a bound socket").port();
        listener.set_nonblocking(true).expect("a socket can be nonblocking");
        let progress = Arc::new(Progress { sent: AtomicU64::new(0), pause: AtomicU64::new(pause) });
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (Arc::clone(&progress), Arc::clone(&stop));
        let acceptor = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let (config, progress) = (Arc::clone(&config), Arc::clone(&shared));
                        // The client reports errors of the connection.
                        thread::spawn(move || drop(serve(stream, config, &progress)));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        let certificate = made.cert.pem();
        Self { name: name.to_owned(), port, certificate, progress, stop, acceptor: Some(acceptor) }
    }

    /// URL of a page with `size` bytes.
    pub fn url(&self, size: u64) -> String {
        format!("https://{}:{}/{size}", self.name, self.port)
    }

    /// The server's certificate (PEM).
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Bytes of pages written to sockets so far.
    pub fn sent(&self) -> u64 {
        self.progress.sent.load(Ordering::Relaxed)
    }

    /// Ends the pause of all pages.
    pub fn resume(&self) {
        self.progress.pause.store(u64::MAX, Ordering::Relaxed);
    }
}

impl Drop for HttpsPages {
    fn drop(&mut self) {
        self.resume();
        self.stop.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn serve(stream: TcpStream, config: Arc<ServerConfig>, progress: &Progress) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut reader = BufReader::new(StreamOwned::new(connection, stream));
    let (mut line, mut request) = (String::new(), String::new());
    while reader.read_line(&mut line)? > 2 {
        if request.is_empty() {
            request.clone_from(&line);
        }
        line.clear();
    }
    let path = request.split_whitespace().nth(1).unwrap_or("/");
    let size: u64 = path.trim_start_matches('/').parse().unwrap_or(0);
    let mut tls = reader.into_inner();
    write!(tls, "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n")?;
    let mut rest = KnownBytes::default().take(size);
    let mut chunk = [0; 16 << 10];
    loop {
        let length = rest.read(&mut chunk)?;
        if length == 0 {
            break;
        }
        tls.write_all(&chunk[..length])?;
        let sent = progress.sent.fetch_add(length as u64, Ordering::Relaxed) + length as u64;
        while sent >= progress.pause.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
    }
    tls.conn.send_close_notify();
    tls.flush()
}

/// A name server that answers every question with one address.
pub struct NameServer {
    address: SocketAddr,
    question_count: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Listens at `own` on that host. Every answer has the address `answer`.
    pub fn start(testbed: &Testbed, host: Host, own: Ipv4Addr, answer: Ipv4Addr) -> Self {
        let socket = testbed.in_namespace(host, || UdpSocket::bind((own, 0)).expect("a free port"));
        let address = socket.local_addr().expect("a bound socket");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket can be patient");
        let (question_count, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counter, stopped) = (Arc::clone(&question_count), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut question = [0; 512];
            while !stopped.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut question) else { continue };
                counter.fetch_add(1, Ordering::Relaxed);
                if let Some(reply) = reply(&question[..length], answer) {
                    let _ = socket.send_to(&reply, from);
                }
            }
        });
        Self { address, question_count, stop, thread: Some(thread) }
    }

    /// Address of the name server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of questions received.
    pub fn question_count(&self) -> u64 {
        self.question_count.load(Ordering::Relaxed)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The response: the question and one A record (RFC 1035 §4.1).
fn reply(question: &[u8], answer: Ipv4Addr) -> Option<Vec<u8>> {
    let mut bytes = question.to_vec();
    let header = bytes.get_mut(..12)?;
    header[2] |= 0x80;
    header[6..8].copy_from_slice(&1_u16.to_be_bytes());
    // A pointer to the name in the question, type A, class IN, TTL 60 s, 4 bytes of data.
    bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
    bytes.extend(answer.octets());
    Some(bytes)
}
