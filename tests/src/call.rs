//! A call: numbered datagrams at a steady pace, and their echoes.
//!
//! In: where to and how often. Out: what came back, as with pings, but of UDP, so that rules can tell calls apart by
//! their port.

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

/// What G.711 sends in 20 ms (RFC 3551): 160 bytes of sound, with the headers of RTP, UDP and IPv4 200.
pub const G711: CallProfile = CallProfile { interval: Duration::from_millis(20), payload_bytes: 172 };
/// Often enough to see how long nothing comes through.
pub const DENSE: CallProfile = CallProfile { interval: Duration::from_millis(10), payload_bytes: 64 };

/// How long echoes are waited for at the end.
const ECHO_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a socket that hears nothing looks whether it is over.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A datagram begins with its number, and when it was sent.
const STAMP_BYTES: usize = 2 * size_of::<u64>();

/// How often, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallProfile {
    /// From one datagram to the next.
    pub interval: Duration,
    /// UDP payload of each, at least 16 bytes.
    pub payload_bytes: usize,
}

/// A call from the client to the server that goes on until it is ended.
pub struct Call {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<io::Result<u64>>,
    receiver: JoinHandle<io::Result<Vec<Answer>>>,
    _echo_server: EchoServer,
}

/// The other end, until it is dropped.
struct EchoServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Call {
    /// Calls that address and port of the server, where this makes somebody answer.
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

    /// Ends it, and waits for the last echoes.
    pub fn finish(self) -> Result<Pings, String> {
        self.stop.store(true, Ordering::Relaxed);
        let over = |_| io::Error::other("it panicked");
        let sent = self.sender.join().map_err(over).and_then(|sent| sent);
        let answers = self.receiver.join().map_err(over).and_then(|answers| answers);
        let both = sent.and_then(|sent| Ok(Pings { sent, answers: answers? }));
        both.map_err(|error| format!("a call: {error}"))
    }
}

/// The programs under test shall not hold up who measures them. A refusal costs precision only.
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
            // While a link is gone there may be no way: such a datagram is lost like others.
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
        // A second echo of the same datagram is no echo of another one.
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

/// Whether the socket may be used on.
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
