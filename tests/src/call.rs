//! A voice call: numbered UDP datagrams at a fixed interval, and their echoes.
//!
//! In: destination, interval and size. Out: the same results as of pings. UDP ports allow rules to assign
//! calls to classes.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use crate::{
    ping::{Answer, Pings},
    testbed::{Host, Testbed},
};

/// G.711 with 20 ms per packet (RFC 3551): 160 bytes of sound and 12 of RTP header; 200 bytes with UDP and
/// IPv4.
pub const G711: CallProfile = CallProfile { interval: Duration::from_millis(20), payload_bytes: 172 };
/// An interval short enough to measure gaps of 10 ms and more.
pub const DENSE: CallProfile = CallProfile { interval: Duration::from_millis(10), payload_bytes: 64 };

/// How long the receiver waits for echoes after the last datagram. Shorter: delayed echoes count as lost.
/// Longer: every call takes longer.
const ECHO_TIMEOUT: Duration = Duration::from_secs(1);
/// Read timeout of the sockets: how soon their threads notice the stop flag.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Length of the header of a datagram: sequence number and sending time (ns since the start of the call),
/// both `u64`.
const STAMP_BYTES: usize = 2 * size_of::<u64>();

/// Interval and size of the datagrams of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallProfile {
    /// Time between datagrams.
    pub interval: Duration,
    /// UDP payload per datagram, at least 16 bytes.
    pub payload_bytes: usize,
}

/// A running call from the client to the server.
pub struct Call {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<io::Result<u64>>,
    receiver: JoinHandle<io::Result<Vec<Answer>>>,
    _echo_server: EchoServer,
}

/// The far end of a call; stopped when dropped.
struct EchoServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Call {
    /// Starts a call to that address and port of the server, and the echo server there.
    pub fn start(testbed: &Testbed, (to, port): (&str, u16), profile: CallProfile) -> Result<Self, String> {
        let describe = |error: io::Error| format!("a call to {to}:{port}: {error}");
        let to: SocketAddr = format!("{to}:{port}").parse().map_err(|_| format!("{to} is no address"))?;
        let echo_server = EchoServer::start(testbed, to).map_err(describe)?;
        let socket = testbed.in_namespace(Host::Client, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(STOP_POLL_INTERVAL))?;
            Ok(socket)
        });
        let socket = Arc::new(socket.map_err(describe)?);
        let stop = Arc::new(AtomicBool::new(false));
        let begin = (Instant::now(), SystemTime::now());
        let sender = {
            let (socket, stop) = (Arc::clone(&socket), Arc::clone(&stop));
            thread::spawn(move || send_datagrams(&socket, profile, begin.0, &stop))
        };
        let receiver = {
            let stop = Arc::clone(&stop);
            thread::spawn(move || receive_echoes(&socket, begin, &stop))
        };
        Ok(Self { stop, sender, receiver, _echo_server: echo_server })
    }

    /// Stops sending, and waits for the last echoes.
    pub fn finish(self) -> Result<Pings, String> {
        self.stop.store(true, Ordering::Relaxed);
        let over = |_| io::Error::other("it panicked");
        let sent = self.sender.join().map_err(over).and_then(|sent| sent);
        let answers = self.receiver.join().map_err(over).and_then(|answers| answers);
        let both = sent.and_then(|sent| Ok(Pings { sent, answers: answers? }));
        both.map_err(|error| format!("a call: {error}"))
    }
}

/// Raises the priority of this thread, so that the programs under test do not delay the measurement. If the
/// kernel refuses, the measurement is less precise.
fn raise_priority() {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -15);
}

fn send_datagrams(
    socket: &UdpSocket,
    profile: CallProfile,
    begin: Instant,
    stop: &AtomicBool,
) -> io::Result<u64> {
    raise_priority();
    let mut datagram = vec![0x55; profile.payload_bytes.max(STAMP_BYTES)];
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let due = begin + Duration::from_nanos(profile.interval.as_nanos() as u64 * number);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        datagram[8..STAMP_BYTES].copy_from_slice(&begin.elapsed().as_nanos().to_be_bytes()[8..]);
        number += 1;
        match socket.send(&datagram) {
            // While a link is down there may be no route: such a datagram counts as lost.
            Ok(_) => {}
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(number)
}

fn receive_echoes(
    socket: &UdpSocket,
    (begin, wall): (Instant, SystemTime),
    stop: &AtomicBool,
) -> io::Result<Vec<Answer>> {
    raise_priority();
    let wall = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let (mut answers, mut received, mut end) = (Vec::new(), Vec::new(), None);
    let mut datagram = [0; 2048];
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + ECHO_TIMEOUT);
        }
        let len = match socket.recv(&mut datagram) {
            Ok(len) => len,
            Err(error) if is_transient(&error) => continue,
            Err(error) => return Err(error),
        };
        let now = begin.elapsed();
        let Some((number, sent)) = stamp(&datagram[..len]) else { continue };
        let at = number as usize;
        // A duplicated echo counts once.
        if received.get(at).copied().unwrap_or(false) {
            continue;
        }
        received.resize(received.len().max(at + 1), false);
        received[at] = true;
        let rtt = now.saturating_sub(sent);
        answers.push(Answer {
            at: wall + now.as_secs_f64(),
            rtt_ms: rtt.as_secs_f64() * 1e3,
            number: number + 1,
        });
    }
    Ok(answers)
}

fn stamp(datagram: &[u8]) -> Option<(u64, Duration)> {
    let number = u64::from_be_bytes(*datagram.first_chunk()?);
    let sent = u64::from_be_bytes(*datagram.get(8..)?.first_chunk()?);
    Some((number, Duration::from_nanos(sent)))
}

/// Whether the socket can still be used after the error.
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionRefused, HostUnreachable, Interrupted, NetworkDown, NetworkUnreachable, PermissionDenied,
        TimedOut, WouldBlock,
    };
    matches!(
        error.kind(),
        ConnectionRefused
            | HostUnreachable
            | Interrupted
            | NetworkDown
            | NetworkUnreachable
            | PermissionDenied
            | TimedOut
            | WouldBlock
    )
}

impl EchoServer {
    fn start(testbed: &Testbed, at: SocketAddr) -> io::Result<Self> {
        let socket = testbed.in_namespace(Host::Server, || UdpSocket::bind(at))?;
        socket.set_read_timeout(Some(STOP_POLL_INTERVAL))?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let serve = move || {
            raise_priority();
            let mut datagram = [0; 2048];
            while !seen.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut datagram) {
                    let _ = socket.send_to(&datagram[..len], from);
                }
            }
        };
        Ok(Self { stop, thread: Some(thread::spawn(serve)) })
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
