//! Files in the format qlog, which tell what happened on the paths of each connection.
//!
//! In: events of connections, from the packet threads. Out: files in one folder, written by a thread of its own. Always
//! holds: a packet thread never waits, and what does not fit into the queue is dropped and counted; the files together stay
//! below [`MAX_TOTAL_BYTES`]. The format and the reasons are in `docs/design/qlog.md`.

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

use mpvpn_control::{Error, status::Role};
use mpvpn_quic::{QlogEvent, QlogSink};

use self::{folder::Folder, trace::Trace};
use crate::EngineError;

/// The size of all files of a process together (bytes): about an hour at 10 Mbit/s, as 3 s at 25 Mbit/s take 2.1 MB. With less,
/// what led to a failure may be gone before somebody looks; more may be missed on a small disk.
const MAX_TOTAL_BYTES: u64 = 1 << 30;
/// Events that wait for the thread, of about 100 bytes each. Fewer would be dropped while a disk writes for 100 ms at
/// 1 Gbit/s; more would only take memory.
const MAX_QUEUED_EVENTS: usize = 16_384;
/// How often everything is written. More often costs system calls, less often loses more if the process is killed.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// A connection without events for this long has ended, and the event that says so was dropped. Shorter than the idle timeout
/// of a connection (180 s) would split files.
const FORGET_AFTER: Duration = Duration::from_secs(600);

#[derive(Debug)]
enum Message {
    Event(Instant, u64, QlogEvent),
    End,
}

/// The side of the packet threads.
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

/// The thread that writes. Dropping this writes what is left and ends the thread.
#[derive(Debug)]
pub(crate) struct Qlog {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Qlog {
    /// Starts it for the process with this role and name.
    pub(crate) fn start(folder: &Path, role: Role, name: &str) -> Result<Self, EngineError> {
        let error = |source| Error::File { doing: "write qlog files to", path: folder.to_owned(), source };
        let files =
            Folder::open(folder.to_owned(), &format!("{role}-{name}-"), MAX_TOTAL_BYTES).map_err(error)?;
        let (messages, receiver) = sync_channel(MAX_QUEUED_EVENTS);
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer { files, role, traces: BTreeMap::new(), dropped: dropped.clone(), warned: false };
        let thread = Builder::new().name("qlog".to_owned()).spawn(move || writer.run(&receiver));
        let thread = Some(thread.map_err(EngineError::io("start a thread"))?);
        Ok(Self { queue: Arc::new(Queue { messages, dropped }), thread })
    }

    /// As [`Self::start`], if there is a folder.
    pub(crate) fn start_if(
        folder: Option<&PathBuf>,
        role: Role,
        name: &str,
    ) -> Result<Option<Self>, EngineError> {
        folder.map(|folder| Self::start(folder, role, name)).transpose()
    }

    /// Where connections record.
    pub(crate) fn sink(&self) -> Arc<dyn QlogSink> {
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

/// The side of the thread.
struct Writer {
    files: Folder,
    role: Role,
    traces: BTreeMap<u64, Trace>,
    dropped: Arc<AtomicU64>,
    /// The log has said that events are dropped.
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
                "qlog: events come faster than they can be written; the files say how many"
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

/// Writes what a trace has gathered. A trace that cannot be written ends.
fn write(files: &mut Folder, trace: &mut Trace) {
    if let Err(error) = files.write(trace) {
        let folder = files.path().display();
        tracing::warn!(%error, %folder, "qlog: cannot write; this connection is not recorded any more");
        trace.end();
    }
}

#[cfg(test)]
mod tests;
