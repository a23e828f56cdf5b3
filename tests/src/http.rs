//! An HTTP server with pages of known bytes, and downloads and uploads by curl that compare every byte.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, ChildStdout, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::testbed::{Host, Testbed};

/// A megabyte, bytes.
pub const MB: u64 = 1_000_000;

/// `GET /N` returns the first N bytes of [`KnownBytes`]; `PUT` compares its content with them and answers
/// with the result.
pub struct TestPages {
    port: u16,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl TestPages {
    /// Listens on every address of that host.
    pub fn start(testbed: &Testbed, host: Host) -> Self {
        let listener = testbed.in_namespace(host, || {
            let any: SocketAddr = "[::]:0".parse().expect("an address");
            TcpListener::bind(any).expect("a free port")
        });
        let port = listener.local_addr().expect("a bound socket").port();
        listener.set_nonblocking(true).expect("a socket can be nonblocking");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let acceptor = thread::spawn(move || accept(&listener, &stopped));
        Self { port, stop, acceptor: Some(acceptor) }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// URL of a page.
    pub fn url(&self, host: &str, path: &str) -> String {
        let port = self.port;
        if host.contains(':') {
            format!("http://[{host}]:{port}/{path}")
        } else {
            format!("http://{host}:{port}/{path}")
        }
    }
}

impl Drop for TestPages {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, stop: &Arc<AtomicBool>) {
    let mut connections = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                let stopped = Arc::clone(stop);
                // curl reports errors of the connection.
                connections.push(thread::spawn(move || drop(serve(&stream, &stopped))));
            }
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
    for connection in connections {
        let _ = connection.join();
    }
}

fn serve(stream: &TcpStream, stop: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    stream.set_write_timeout(Some(Duration::from_millis(200)))?;
    let mut reader = BufReader::new(StoppableSocket { stream, stop });
    let mut writer = StoppableSocket { stream, stop };
    let (mut head, mut request, mut length) = (String::new(), String::new(), 0_u64);
    loop {
        head.clear();
        reader.read_line(&mut head)?;
        let line = head.trim();
        if line.is_empty() {
            break;
        }
        if request.is_empty() {
            request = line.to_owned();
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    if request.starts_with("PUT") {
        let verdict = match compare(&mut reader.take(length), length) {
            Ok(()) => "right\n".to_owned(),
            Err(complaint) => format!("{complaint}\n"),
        };
        return write!(writer, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{verdict}", verdict.len());
    }
    let path = request.split_whitespace().nth(1).unwrap_or("/");
    let size: u64 = path.trim_start_matches('/').parse().unwrap_or(0);
    write!(writer, "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n")?;
    io::copy(&mut KnownBytes::default().take(size), &mut writer).map(drop)
}

/// A socket whose read and write timeouts only serve to check the stop flag.
struct StoppableSocket<'a> {
    stream: &'a TcpStream,
    stop: &'a AtomicBool,
}

impl StoppableSocket<'_> {
    fn retry_until_stopped<T>(&self, mut attempt: impl FnMut(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        loop {
            match attempt(self.stream) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && !self.stop.load(Ordering::Relaxed) => {}
                other => return other,
            }
        }
    }
}

impl Read for StoppableSocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.retry_until_stopped(|mut stream| stream.read(buffer))
    }
}

impl Write for StoppableSocket<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.retry_until_stopped(|mut stream| stream.write(buffer))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An endless byte sequence in which every 8-byte block differs, so that lost, duplicated and moved data is
/// detected.
#[derive(Default)]
pub struct KnownBytes {
    position: u64,
}

impl Read for KnownBytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut rest = &mut *buffer;
        while !rest.is_empty() {
            let (block, skipped) = (mix(self.position / 8).to_le_bytes(), (self.position % 8) as usize);
            let length = rest.len().min(block.len() - skipped);
            let (now, later) = rest.split_at_mut(length);
            now.copy_from_slice(&block[skipped..skipped + length]);
            self.position += length as u64;
            rest = later;
        }
        Ok(buffer.len())
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(counter: u64) -> u64 {
    let mut x = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Reads to the end and compares with the first `size` bytes of [`KnownBytes`].
pub fn compare(reader: &mut impl Read, size: u64) -> Result<(), String> {
    let (mut got, mut expected) = (vec![0; 65536], vec![0; 65536]);
    let (mut stream, mut total) = (KnownBytes::default(), 0_u64);
    loop {
        let n = reader.read(&mut got).map_err(|error| format!("after {total} of {size} bytes: {error}"))?;
        if n == 0 {
            break;
        }
        stream.read_exact(&mut expected[..n]).map_err(|error| error.to_string())?;
        if got[..n] != expected[..n] {
            return Err(format!("wrong bytes after {total} of {size}"));
        }
        total += n as u64;
    }
    if total == size { Ok(()) } else { Err(format!("{total} of {size} bytes")) }
}

/// A running download by curl.
pub struct Download {
    child: Child,
    checker: Option<JoinHandle<Result<(), String>>>,
    url: String,
}

impl Download {
    /// Starts downloading `size` bytes from `host`. curl ends after `limit`; `args` are further options of
    /// curl.
    pub fn start(
        testbed: &Testbed,
        site: &TestPages,
        host: &str,
        size: u64,
        limit: Duration,
        args: &[&str],
    ) -> Self {
        let url = site.url(host, &size.to_string());
        let mut command = testbed.command(Host::Client, "curl");
        command.args(["-gsS", "--max-time", &limit.as_secs().to_string()]).args(args).arg(&url);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("curl runs");
        let mut body: ChildStdout = child.stdout.take().expect("a pipe");
        let checker = thread::spawn(move || compare(&mut body, size));
        Self { child, checker: Some(checker), url }
    }

    /// Waits for the download, and panics unless every byte arrived unchanged.
    pub fn finish(mut self) {
        let verdict = self.checker.take().expect("finished once").join().expect("the checker does not panic");
        let mut complaint = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut complaint);
        }
        let status = self.child.wait().expect("our own child");
        assert!(status.success() && verdict.is_ok(), "curl {}: {status}, {verdict:?}, {complaint}", self.url);
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Uploads `size` bytes by curl within `limit`, and panics unless the server received them unchanged.
pub fn upload(testbed: &Testbed, site: &TestPages, host: &str, size: u64, limit: Duration) {
    let url = site.url(host, "");
    let mut command = testbed.command(Host::Client, "curl");
    let (time, length) = (limit.as_secs().to_string(), format!("Content-Length: {size}"));
    command.args(["-gsS", "--max-time", &time, "-X", "PUT", "-H", &length, "-H", "Expect:"]);
    command.args(["-H", "Transfer-Encoding:", "-T", "-", &url]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("curl runs");
    let mut input = child.stdin.take().expect("a pipe");
    let feeder = thread::spawn(move || io::copy(&mut KnownBytes::default().take(size), &mut input));
    let output = child.wait_with_output().expect("our own child");
    let _ = feeder.join();
    let (answer, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && answer == "right\n",
        "curl {url}: {}, {answer}, {complaint}",
        output.status
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_known_bytes_are_accepted() {
        let mut bytes = vec![0; 100_000];
        KnownBytes::default().read_exact(&mut bytes).expect("an endless stream");
        assert_eq!(compare(&mut bytes.as_slice(), 100_000), Ok(()));
        assert_eq!(compare(&mut &bytes[..99_999], 100_000), Err("99999 of 100000 bytes".to_owned()));
        bytes.swap(70_000, 70_001);
        assert!(
            compare(&mut bytes.as_slice(), 100_000).is_err_and(|complaint| complaint.contains("wrong bytes"))
        );
        let doubled = [&bytes[..8], &bytes[..8]].concat();
        assert!(compare(&mut doubled.as_slice(), 16).is_err());
    }
}
