//! Carries events from the threads that report them to the log, and from the log to its readers.
//!
//! In: events of all threads. Out: log lines, and lines of JSON for the local API. Always holds: reporting
//! neither blocks nor locks; the queue to the log is bounded, and events that find it full are counted; a
//! reader holds one batch of lines and a number, however slowly it reads.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use tokio::sync::{mpsc, watch};

use super::{Entry, Event, EventLog};

/// Events in the queue to the log, about 200 bytes each. The log takes them within 1 ms unless its thread is
/// busy. With fewer, events are dropped when many clients of a server disconnect at once; more take more
/// memory.
const MAX_QUEUED_EVENTS: usize = 1024;

/// The target of the log lines.
const TARGET: &str = "mpvpn::events";

/// Reports events. Clones report to the same log.
#[derive(Clone, Debug)]
pub struct EventSender {
    /// `None`: log lines only.
    sender: Option<mpsc::Sender<(SystemTime, Event)>>,
    dropped: Arc<AtomicU64>,
}

/// Fills the log.
#[derive(Debug)]
pub struct EventReceiver {
    receiver: mpsc::Receiver<(SystemTime, Event)>,
    dropped: Arc<AtomicU64>,
}

/// A queue of events for a log.
pub fn event_channel() -> (EventSender, EventReceiver) {
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_EVENTS);
    let dropped = Arc::new(AtomicU64::new(0));
    (EventSender { sender: Some(sender), dropped: Arc::clone(&dropped) }, EventReceiver { receiver, dropped })
}

impl Default for EventSender {
    fn default() -> Self {
        Self::to_log_lines()
    }
}

impl EventSender {
    /// For a process without an event log: events become log lines only.
    pub fn to_log_lines() -> Self {
        Self { sender: None, dropped: Arc::default() }
    }

    /// Reports an event that happens now.
    pub fn report(&self, event: Event) {
        write_line(&event);
        let Some(sender) = &self.sender else { return };
        if let Err(mpsc::error::TrySendError::Full(_)) = sender.try_send((SystemTime::now(), event)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Writes the log line.
fn write_line(event: &Event) {
    let kind = event.kind().as_str();
    match event.level() {
        tracing::Level::WARN => tracing::warn!(target: TARGET, kind, "{event}"),
        tracing::Level::DEBUG => tracing::debug!(target: TARGET, kind, "{event}"),
        _ => tracing::info!(target: TARGET, kind, "{event}"),
    }
}

impl EventReceiver {
    /// Fills a log until all senders are dropped.
    pub async fn fill(mut self, log: SharedEventLog) {
        while let Some((at, event)) = self.receiver.recv().await {
            log.record(at, event);
            let count = self.dropped.swap(0, Ordering::Relaxed);
            if count > 0 {
                let event = Event::EventsDropped { count };
                write_line(&event);
                log.record(SystemTime::now(), event);
            }
        }
    }
}

/// An event log that is read while it is filled. Clones are the same log.
#[derive(Clone, Debug, Default)]
pub struct SharedEventLog {
    log: Arc<Mutex<EventLog>>,
    /// The last number.
    last: watch::Sender<u64>,
}

impl SharedEventLog {
    fn lock(&self) -> MutexGuard<'_, EventLog> {
        // Nothing here panics half-way.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event that happened at `at`.
    pub fn record(&self, at: SystemTime, event: Event) {
        let mut log = self.lock();
        log.record(at, event);
        self.last.send_replace(log.last_number());
    }

    /// A reader that starts at the oldest entry. With `follows` it waits for further entries at the end.
    pub fn read(&self, follows: bool) -> EventReader {
        let last = self.last.subscribe();
        EventReader { log: self.clone(), last, number: 0, evicted: None, follows }
    }

    /// A reader that waits for entries after those of now.
    pub fn follow(&self) -> EventReader {
        let number = self.lock().last_number();
        EventReader { number, ..self.read(true) }
    }

    /// The latest entries that happened at `since` or later, at most `max_entries`, in order.
    pub fn latest(&self, since: SystemTime, max_entries: usize) -> Vec<Entry> {
        self.lock().latest(since, max_entries)
    }
}

/// A reader of an event log.
#[derive(Debug)]
pub struct EventReader {
    log: SharedEventLog,
    last: watch::Receiver<u64>,
    /// The number of the last entry read.
    number: u64,
    /// [`EventLog::last_evicted`] at the last read.
    evicted: Option<u64>,
    follows: bool,
}

impl EventReader {
    /// Entries of a batch, about 20 kB, which are copied while the log is locked. More delay the thread that
    /// records events; fewer make a reader lock more often.
    const BATCH_ENTRIES: usize = 64;

    /// The next batch of whole lines of JSON; `None` at the end. If entries were evicted before they were
    /// read, the batch begins with a line that says so.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            self.last.borrow_and_update();
            let lines = self.lines();
            if !lines.is_empty() {
                return Some(lines);
            }
            if !self.follows || self.last.changed().await.is_err() {
                return None;
            }
        }
    }

    fn lines(&mut self) -> Vec<u8> {
        let mut lines = Vec::new();
        let log = self.log.lock();
        let evicted = log.last_evicted();
        if self.evicted.replace(evicted).is_some_and(|known| evicted > known.max(self.number)) {
            lines.extend_from_slice(MISSED_LINE.as_bytes());
        }
        for entry in log.after(self.number, Self::BATCH_ENTRIES) {
            self.number = entry.number;
            let before = lines.len();
            if serde_json::to_writer(&mut lines, entry).is_err() {
                // A time that cannot be formatted.
                lines.truncate(before);
                continue;
            }
            lines.push(b'\n');
        }
        lines
    }
}

/// The line for a reader that missed entries.
const MISSED_LINE: &str = concat!(
    r#"{"kind":"log","event":"missed","#,
    r#""text":"events are missing here: they were evicted before they were read"}"#,
    "\n"
);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::events::MAX_ENTRIES_PER_KIND;

    fn link(name: &str) -> Event {
        Event::LinkDown { link: name.into(), reason: "no carrier".into() }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    #[test]
    fn reported_events_are_read_and_followed() {
        block_on(async {
            let (events, receiver) = event_channel();
            let log = SharedEventLog::default();
            tokio::spawn(receiver.fill(log.clone()));
            events.report(link("eth0"));
            let mut follower = log.read(true);
            let first = String::from_utf8(follower.next().await.unwrap()).unwrap();
            assert!(first.contains(r#""event":"link_down","link":"eth0""#), "{first}");
            let mut reader = log.read(false);
            assert_eq!(reader.next().await.unwrap(), first.as_bytes());
            assert_eq!(reader.next().await, None);
            events.clone().report(link("eth1"));
            let second = String::from_utf8(follower.next().await.unwrap()).unwrap();
            assert!(second.contains(r#""link":"eth1""#) && second.lines().count() == 1, "{second}");
            let silence = tokio::time::timeout(Duration::from_millis(20), follower.next());
            assert!(silence.await.is_err(), "no event was reported");
        });
    }

    #[test]
    fn events_beyond_the_queue_are_counted_and_reporting_never_blocks() {
        block_on(async {
            let (events, receiver) = event_channel();
            for number in 0..MAX_QUEUED_EVENTS + 7 {
                events.report(link(&format!("eth{number}")));
            }
            drop(events);
            let log = SharedEventLog::default();
            receiver.fill(log.clone()).await;
            let kept: Vec<Event> =
                log.lock().after(0, usize::MAX).iter().map(|entry| entry.sentence.event.clone()).collect();
            assert!(kept.contains(&Event::EventsDropped { count: 7 }), "{kept:?}");
        });
    }

    #[test]
    fn a_slow_reader_gets_one_batch_at_a_time_and_learns_that_it_missed_entries() {
        block_on(async {
            let log = SharedEventLog::default();
            let mut reader = log.read(true);
            let fill = |from: usize, to: usize| {
                (from..to).for_each(|number| {
                    log.record(SystemTime::now(), link(&format!("eth{number}")));
                });
            };
            fill(0, 100);
            let first = String::from_utf8(reader.next().await.unwrap()).unwrap();
            assert_eq!(first.lines().count(), EventReader::BATCH_ENTRIES);
            fill(100, 100 + 2 * MAX_ENTRIES_PER_KIND);
            let next = String::from_utf8(reader.next().await.unwrap()).unwrap();
            assert_eq!(next.lines().next().unwrap().to_owned() + "\n", MISSED_LINE);
            assert_eq!(next.lines().count(), EventReader::BATCH_ENTRIES + 1);
            let rest = reader.next().await.unwrap();
            assert!(!rest.starts_with(MISSED_LINE.as_bytes()), "the gap is reported once");
            assert_eq!(log.lock().after(0, usize::MAX).len(), MAX_ENTRIES_PER_KIND);
        });
    }
}
