//! Writes qlog files, which record what happens on the paths of each connection.
//!
//! In: events of connections, from the packet threads. Out: files in one folder, written by another thread.
//! Always holds: a packet thread never waits; events that do not fit into the queue are dropped and counted;
//! all files together stay below `MAX_TOTAL_BYTES`. Format and reasons: `docs/design/qlog.md`.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod folder;
mod trace;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use mpvpn_error::RunError;
use mpvpn_input::{Error, role::Role};
use mpvpn_quic::{QlogEvent, QlogSink};

use self::{folder::Folder, trace::Trace};

/// The size of all files of a process together (bytes): about an hour at 10 Mbit/s (3 s at 25 Mbit/s take 2.1
/// MB). Smaller: the records of a failure may be gone before somebody looks. Larger: a small disk fills up.
const MAX_TOTAL_BYTES: u64 = 1 << 30;
/// Events in the queue to the writing thread, of about 100 bytes each. Fewer: events are dropped while a disk
/// stalls for 100 ms at 1 Gbit/s. More: memory.
const MAX_QUEUED_EVENTS: usize = 16_384;
/// The interval of writes. Shorter: system calls. Longer: more is lost if the process is killed.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// A connection without events for this long has ended, and its last event was dropped. Shorter than a
/// connection's idle timeout (180 s): files are split.
const FORGET_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
enum Message {
    Event(Instant, u64, QlogEvent),
    End,
}

/// The packet threads' end of the queue.
#[derive(Debug)]
struct Queue {
    messages: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl QlogSink for Queue {
    fn record(&self, now: Instant, connection: u64, event: QlogEvent) {
        if let Err(TrySendError::Full(_)) = self.messages.try_send(Message::Event(now, connection, event)) {
            self.dropped.fetch_add(1, Relaxed);
        }
    }
}

/// The writing thread. Dropping this writes what is left and ends the thread.
#[derive(Debug)]
pub struct Qlog {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Qlog {
    /// Starts the thread for a process with this role and name.
    pub fn start(folder: &Path, role: Role, name: &str) -> Result<Self, RunError> {
        let error = |source| Error::File { doing: "write qlog files to", path: folder.to_owned(), source };
        let files =
            Folder::open(folder.to_owned(), &format!("{role}-{name}-"), MAX_TOTAL_BYTES).map_err(error)?;
        let (messages, receiver) = sync_channel(MAX_QUEUED_EVENTS);
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer { files, role, traces: BTreeMap::new(), dropped: dropped.clone(), warned: false };
        let thread = Builder::new().name("qlog".to_owned()).spawn(move || writer.run(&receiver));
        let thread = Some(thread.map_err(RunError::io("start a thread"))?);
        Ok(Self { queue: Arc::new(Queue { messages, dropped }), thread })
    }

    /// Like [`Self::start`], if a folder is configured.
    pub fn start_if(folder: Option<&PathBuf>, role: Role, name: &str) -> Result<Option<Self>, RunError> {
        folder.map(|folder| Self::start(folder, role, name)).transpose()
    }

    /// The sink for the events of connections.
    pub fn sink(&self) -> Arc<dyn QlogSink> {
        self.queue.clone()
    }
}

impl Drop for Qlog {
    fn drop(&mut self) {
        // Fails only if the thread has panicked, which was reported when it happened.
        let _ = self.queue.messages.send(Message::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of the writing thread.
struct Writer {
    files: Folder,
    role: Role,
    traces: BTreeMap<u64, Trace>,
    dropped: Arc<AtomicU64>,
    /// Whether the log already says that events are dropped.
    warned: bool,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut flushed = Instant::now();
        loop {
            match messages.recv_timeout(FLUSH_INTERVAL) {
                Ok(Message::Event(now, connection, event)) => self.take(now, connection, event),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => break,
            }
            if flushed.elapsed() >= FLUSH_INTERVAL {
                flushed = Instant::now();
                self.flush(flushed);
            }
        }
        self.flush(Instant::now());
    }

    fn take(&mut self, now: Instant, connection: u64, event: QlogEvent) {
        let trace = self.traces.entry(connection).or_insert_with(|| Trace::new(self.role, connection, now));
        trace.record(now, event);
        if trace.is_buffer_full() {
            write(&mut self.files, trace);
        }
    }

    fn flush(&mut self, now: Instant) {
        let dropped = self.dropped.swap(0, Relaxed);
        if dropped > 0 && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                dropped,
                "qlog: dropped events because writing is too slow; the files say how many"
            );
        }
        for trace in self.traces.values_mut() {
            if dropped > 0 {
                trace.record_dropped(dropped);
            }
            write(&mut self.files, trace);
        }
        self.traces.retain(|_, trace| !trace.is_over(now));
    }
}

/// Writes what a trace has buffered. A trace that cannot be written ends.
fn write(files: &mut Folder, trace: &mut Trace) {
    if let Err(error) = files.write(trace) {
        let folder = files.path().display();
        tracing::warn!(%error, %folder, "qlog: cannot write; recording of this connection ends");
        trace.end();
    }
}

#[cfg(test)]
mod tests;
