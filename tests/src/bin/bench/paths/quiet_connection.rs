//! A TCP connection with little traffic: the client sends a byte at intervals, and the server echoes it. It
//! must survive all events on the links.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mpvpn_tests::testbed::{Host, Testbed};

/// Timeout of an answer: TCP's retransmission timer has doubled to several seconds after a few losses.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A running quiet connection.
pub(crate) struct QuietConnection {
    stop: Arc<AtomicBool>,
    requests: JoinHandle<io::Result<Vec<Duration>>>,
}

impl QuietConnection {
    /// Connects the client to `address` of the server; `pause` is the time between an answer and the next
    /// request.
    pub(crate) fn start(testbed: &Testbed, address: &str, pause: Duration) -> Result<Self, String> {
        let ip: IpAddr = address.parse().map_err(|error| format!("{address}: {error}"))?;
        let listener = testbed.in_namespace(Host::Server, || TcpListener::bind((ip, 0)));
        let connect = |listener: TcpListener| {
            let to = listener.local_addr()?;
            thread::spawn(move || echo(&listener));
            let stream = testbed
                .in_namespace(Host::Client, || TcpStream::connect_timeout(&to, Duration::from_secs(5)))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            Ok::<_, io::Error>((stream, to))
        };
        let (stream, _): (TcpStream, SocketAddr) =
            listener.and_then(connect).map_err(|error| format!("a TCP connection to talk over: {error}"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        Ok(Self { stop, requests: thread::spawn(move || send_requests(stream, pause, &seen)) })
    }

    /// Stops, and returns the duration of each answer, or the error that ended the connection.
    pub(crate) fn finish(self) -> Result<Vec<Duration>, String> {
        self.stop.store(true, Ordering::Relaxed);
        let asked = self.requests.join().unwrap_or_else(|_| Err(io::Error::other("it panicked")));
        asked.map_err(|error| format!("the quiet TCP connection: {error}"))
    }
}

fn send_requests(mut stream: TcpStream, pause: Duration, stop: &AtomicBool) -> io::Result<Vec<Duration>> {
    let mut times = Vec::new();
    for number in (0u8..=255).cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let (asked, mut answer) = (Instant::now(), [0]);
        stream.write_all(&[number])?;
        stream.read_exact(&mut answer)?;
        if answer != [number] {
            return Err(io::Error::other(format!("{} came back for {number}", answer[0])));
        }
        times.push(asked.elapsed());
        thread::sleep(pause);
    }
    Ok(times)
}

/// Echoes the bytes of one connection until the client closes it.
fn echo(listener: &TcpListener) -> io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
}
