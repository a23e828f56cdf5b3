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
    stage::{Place, Stage},
};

/// What G.711 sends in 20 ms (RFC 3551): 160 bytes of sound, with the headers of RTP, UDP and IPv4 200.
pub const G711: Pace = Pace { every: Duration::from_millis(20), bytes: 172 };
/// Often enough to see how long nothing comes through.
pub const DENSE: Pace = Pace { every: Duration::from_millis(10), bytes: 64 };

/// How long echoes are waited for at the end.
const LATE: Duration = Duration::from_secs(1);
/// How often a socket that hears nothing looks whether it is over.
const LOOK: Duration = Duration::from_millis(50);
/// A datagram begins with its number, and when it was sent.
const STAMP: usize = 2 * size_of::<u64>();

/// How often, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// From one datagram to the next.
    pub every: Duration,
    /// UDP payload of each, at least 16 bytes.
    pub bytes: usize,
}

/// A call from the client to the server that goes on until it is ended.
pub struct Call {
    stop: Arc<AtomicBool>,
    speaking: JoinHandle<io::Result<u64>>,
    hearing: JoinHandle<io::Result<Vec<Answer>>>,
    _echo: Echo,
}

/// The other end, until it is dropped.
struct Echo {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Call {
    /// Calls that address and port of the server, where this makes somebody answer.
    pub fn start(stage: &Stage, (to, port): (&str, u16), pace: Pace) -> Result<Self, String> {
        let place = |error: io::Error| format!("a call to {to}:{port}: {error}");
        let to: SocketAddr = format!("{to}:{port}").parse().map_err(|_| format!("{to} is no address"))?;
        let echo = Echo::start(stage, to).map_err(place)?;
        let socket = stage.inside(Place::Client, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(LOOK))?;
            Ok(socket)
        });
        let socket = Arc::new(socket.map_err(place)?);
        let stop = Arc::new(AtomicBool::new(false));
        let begin = (Instant::now(), SystemTime::now());
        let speaking = {
            let (socket, stop) = (Arc::clone(&socket), Arc::clone(&stop));
            thread::spawn(move || speak(&socket, pace, begin.0, &stop))
        };
        let hearing = {
            let stop = Arc::clone(&stop);
            thread::spawn(move || hear(&socket, begin, &stop))
        };
        Ok(Self { stop, speaking, hearing, _echo: echo })
    }

    /// Ends it, and waits for the last echoes.
    pub fn finish(self) -> Result<Pings, String> {
        self.stop.store(true, Ordering::Relaxed);
        let over = |_| io::Error::other("it panicked");
        let sent = self.speaking.join().map_err(over).and_then(|sent| sent);
        let answers = self.hearing.join().map_err(over).and_then(|answers| answers);
        let both = sent.and_then(|sent| Ok(Pings { sent, answers: answers? }));
        both.map_err(|error| format!("a call: {error}"))
    }
}

/// The programs under test shall not hold up who measures them. A refusal costs precision only.
fn hurry() {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -15);
}

fn speak(socket: &UdpSocket, pace: Pace, begin: Instant, stop: &AtomicBool) -> io::Result<u64> {
    hurry();
    let mut datagram = vec![0x55; pace.bytes.max(STAMP)];
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let due = begin + Duration::from_nanos(pace.every.as_nanos() as u64 * number);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        datagram[8..STAMP].copy_from_slice(&begin.elapsed().as_nanos().to_be_bytes()[8..]);
        number += 1;
        match socket.send(&datagram) {
            // While a link is gone there may be no way: such a datagram is lost like others.
            Ok(_) => {}
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(number)
}

fn hear(
    socket: &UdpSocket,
    (begin, wall): (Instant, SystemTime),
    stop: &AtomicBool,
) -> io::Result<Vec<Answer>> {
    hurry();
    let wall = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let (mut answers, mut heard, mut end) = (Vec::new(), Vec::new(), None);
    let mut datagram = [0; 2048];
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + LATE);
        }
        let len = match socket.recv(&mut datagram) {
            Ok(len) => len,
            Err(error) if is_passing(&error) => continue,
            Err(error) => return Err(error),
        };
        let now = begin.elapsed();
        let Some((number, sent)) = stamp(&datagram[..len]) else { continue };
        let at = number as usize;
        // A second echo of the same datagram is no echo of another one.
        if heard.get(at).copied().unwrap_or(false) {
            continue;
        }
        heard.resize(heard.len().max(at + 1), false);
        heard[at] = true;
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
fn is_passing(error: &io::Error) -> bool {
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

impl Echo {
    fn start(stage: &Stage, at: SocketAddr) -> io::Result<Self> {
        let socket = stage.inside(Place::Server, || UdpSocket::bind(at))?;
        socket.set_read_timeout(Some(LOOK))?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let give_back = move || {
            hurry();
            let mut datagram = [0; 2048];
            while !seen.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut datagram) {
                    let _ = socket.send_to(&datagram[..len], from);
                }
            }
        };
        Ok(Self { stop, thread: Some(thread::spawn(give_back)) })
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
