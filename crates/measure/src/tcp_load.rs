//! TCP connections that carry as much as they can, or as much as they may.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mpvpn_os::tcp::SegmentCounters;
use mpvpn_status::measure::{LoadDirection, Order};

use super::responder::Target;

/// Bytes that are read or written at a time. Larger costs memory for each flow, smaller costs system calls.
const CHUNK_BYTES: usize = 128 << 10;
/// How often a flow that carries nothing looks whether it has to end.
const STOP_INTERVAL: Duration = Duration::from_millis(200);

static ZEROES: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

/// State shared by all flows.
#[derive(Debug)]
struct Shared {
    began: Instant,
    stop: AtomicBool,
    /// Bytes that were read or written here.
    bytes: AtomicU64,
    /// When bytes were moved last, and the longest time without any (µs after `began`, µs).
    last_us: AtomicU64,
    longest_silence_us: AtomicU64,
    segments: AtomicU64,
    retransmitted: AtomicU64,
    /// Flows that ended by themselves.
    failed: AtomicU64,
}

/// Running connections.
#[derive(Debug)]
pub(super) struct TcpLoad {
    shared: Arc<Shared>,
    flows: Vec<JoinHandle<()>>,
}

/// The counters of the flows at this end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LocalCounters {
    /// Segments sent by this end.
    pub(super) segments: u64,
    /// Those retransmitted.
    pub(super) retransmitted: u64,
    pub(super) longest_silence: Duration,
    /// Connections that broke.
    pub(super) failed: u64,
}

impl TcpLoad {
    /// Opens the connections and starts them. `rate` (bytes/s) limits all of them together.
    ///
    /// # Errors
    /// If a connection cannot be opened.
    pub(super) fn start(
        target: &Target,
        direction: LoadDirection,
        flows: u32,
        rate: Option<f64>,
    ) -> io::Result<Self> {
        let order = match direction {
            LoadDirection::Down => Order::Send,
            LoadDirection::Up => Order::Receive,
        };
        let streams: Vec<TcpStream> = (0..flows).map(|_| target.flow(order)).collect::<io::Result<_>>()?;
        let shared = Arc::new(Shared {
            began: Instant::now(),
            stop: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            last_us: AtomicU64::new(0),
            longest_silence_us: AtomicU64::new(0),
            segments: AtomicU64::new(0),
            retransmitted: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let rate = rate.map(|rate| rate / f64::from(flows.max(1)));
        let start = |stream: TcpStream| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name("flow".to_owned()).spawn(move || {
                let moved = run(&stream, direction, rate, &shared);
                if moved.is_err() && !shared.stop.load(Relaxed) {
                    shared.failed.fetch_add(1, Relaxed);
                }
                if let Ok(counters) = SegmentCounters::of(&stream) {
                    shared.segments.fetch_add(counters.segments.into(), Relaxed);
                    shared.retransmitted.fetch_add(counters.retransmitted.into(), Relaxed);
                }
            })
        };
        let flows = streams.into_iter().map(start).collect::<io::Result<_>>()?;
        Ok(Self { shared, flows })
    }

    /// Bytes that were read, or written, here since the start.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Relaxed)
    }

    /// Whether no connection carries anything any more.
    pub(super) fn has_failed(&self) -> bool {
        self.flows.iter().all(JoinHandle::is_finished)
    }

    /// Ends the connections.
    pub(super) fn stop(mut self) -> LocalCounters {
        self.end();
        let shared = &self.shared;
        LocalCounters {
            segments: shared.segments.load(Relaxed),
            retransmitted: shared.retransmitted.load(Relaxed),
            longest_silence: Duration::from_micros(shared.longest_silence_us.load(Relaxed)),
            failed: shared.failed.load(Relaxed),
        }
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Relaxed);
        for flow in self.flows.drain(..) {
            // A panic there was printed already.
            let _ = flow.join();
        }
    }
}

impl Drop for TcpLoad {
    fn drop(&mut self) {
        self.end();
    }
}

fn run(stream: &TcpStream, direction: LoadDirection, rate: Option<f64>, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(STOP_INTERVAL))?;
    stream.set_write_timeout(Some(STOP_INTERVAL))?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let (began, mut own) = (Instant::now(), 0u64);
    let mut stream = stream;
    while !shared.stop.load(Relaxed) {
        let moved = match direction {
            LoadDirection::Down => stream.read(&mut buffer),
            LoadDirection::Up => stream.write(&ZEROES),
        };
        match moved {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                own += bytes as u64;
                shared.note(bytes as u64);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if let Some(rate) = rate {
            let due = Duration::try_from_secs_f64(own as f64 / rate).unwrap_or_default();
            thread::sleep(due.saturating_sub(began.elapsed()).min(STOP_INTERVAL));
        }
    }
    Ok(())
}

impl Shared {
    fn note(&self, bytes: u64) {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let before = self.last_us.swap(now, Relaxed);
        self.longest_silence_us.fetch_max(now.saturating_sub(before), Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }
}
