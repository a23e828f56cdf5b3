//! Echo requests in datagrams, at a fixed interval, in a thread of their own.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mpvpn_status::measure::{Datagram, DatagramKind, LatencySamples};

use super::responder::Target;

/// Bytes of a request: those of ping(8).
const REQUEST_BYTES: usize = 64;
/// Time after which a request counts as lost.
pub(super) const ECHO_TIMEOUT: Duration = Duration::from_secs(2);

/// Running requests.
#[derive(Debug)]
pub(super) struct EchoProbe {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<Echo>>>,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Echo {
    pub(super) sent: Instant,
    pub(super) rtt: Option<Duration>,
}

impl EchoProbe {
    /// Starts to ask each `interval`, `count` times at most.
    ///
    /// # Errors
    /// If there is no socket.
    pub(super) fn start(target: &Target, interval: Duration, count: Option<u32>) -> io::Result<Self> {
        let socket = target.datagrams(Duration::from_millis(1))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("echo".to_owned());
        let thread = thread.spawn(move || run(&socket, interval, count, &stopped))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Whether all requests were answered or are lost.
    pub(super) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends it; requests that wait then are left out.
    pub(super) fn stop(mut self) -> Vec<Echo> {
        self.stop.store(true, Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for EchoProbe {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// The figures of requests.
pub(super) fn samples(echoes: &[Echo]) -> LatencySamples {
    let mut samples = LatencySamples::default();
    echoes.iter().for_each(|echo| samples.add(echo.rtt));
    samples
}

fn run(socket: &UdpSocket, interval: Duration, count: Option<u32>, stop: &AtomicBool) -> Vec<Echo> {
    let mut done = Vec::new();
    let mut waiting: VecDeque<(u32, Instant)> = VecDeque::new();
    let (mut sequence, mut next) = (0u32, Instant::now());
    let mut buffer = [0; 2048];
    while !stop.load(Relaxed) {
        let now = Instant::now();
        let is_more = count.is_none_or(|count| sequence < count);
        if is_more && now >= next {
            let header = Datagram { kind: DatagramKind::EchoRequest, run: 0, sequence, sent_us: 0 };
            let mut request = [0; REQUEST_BYTES];
            request[..Datagram::HEADER_BYTES].copy_from_slice(&header.encode());
            // A request that cannot be sent is lost.
            let _ = socket.send(&request);
            waiting.push_back((sequence, now));
            sequence = sequence.wrapping_add(1);
            next = (next + interval).max(now);
            continue;
        }
        while let Some((_, sent)) =
            waiting.pop_front_if(|(_, sent)| now.saturating_duration_since(*sent) >= ECHO_TIMEOUT)
        {
            done.push(Echo { sent, rtt: None });
        }
        if !is_more && waiting.is_empty() {
            break;
        }
        let wait = if is_more { next.saturating_duration_since(now) } else { interval };
        let _ = socket.set_read_timeout(Some(wait.max(Duration::from_micros(100))));
        match socket.recv(&mut buffer) {
            Ok(length) => {
                let at = Instant::now();
                let reply = Datagram::parse(&buffer[..length]);
                let found = reply
                    .filter(|reply| reply.kind == DatagramKind::EchoReply)
                    .and_then(|reply| waiting.iter().position(|(sequence, _)| *sequence == reply.sequence));
                if let Some((_, sent)) = found.and_then(|at| waiting.remove(at)) {
                    done.push(Echo { sent, rtt: Some(at.saturating_duration_since(sent)) });
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            // An ICMP error about a request, or no route for a moment.
            Err(_) => thread::sleep(wait.min(Duration::from_millis(10))),
        }
    }
    done
}
