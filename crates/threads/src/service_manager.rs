//! Notifications to the service manager (systemd): that this process is ready, its state, and that it lives.
//!
//! In: changes of the state, time, and how far the event loops of all threads have come. Out: lines for the
//! service manager. Always holds: nothing here waits; the service manager gets no sign of life while an event
//! loop of this process is stuck, so that it starts the process again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mpvpn_os::service_manager::{NotifySocket, monotonic_microseconds, watchdog_interval};

/// How long a thread may take for one iteration before it counts as stuck. Three times the longest wait of an
/// event loop: less would end processes on machines that are only busy, more starts a stuck process again
/// later.
const STUCK_AFTER: Duration = Duration::from_secs(15);
/// How soon lines are sent again that the service manager had no room for.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Signs of life in the interval of the watchdog. Fewer: one that is late ends a process that lives; more:
/// wake-ups for nothing.
const SIGNS_PER_INTERVAL: u32 = 3;
/// How often a state that changes often is set. More often costs time beside the packets; less often people
/// see an old one.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// The longest text of a state (bytes), so that what a server or an operator wrote fills no datagram.
const MAX_STATUS_BYTES: usize = 256;

/// Counts the iterations of a thread's event loop.
#[derive(Clone, Debug, Default)]
pub struct LoopActivity(Arc<AtomicU64>);

impl LoopActivity {
    /// An iteration has begun.
    pub fn mark(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A thread whose event loop must go on.
struct WatchedLoop {
    name: String,
    activity: LoopActivity,
    count: u64,
    changed_at: Instant,
}

impl WatchedLoop {
    fn is_stuck(&mut self, now: Instant) -> bool {
        let count = self.activity.count();
        if self.count != count {
            (self.count, self.changed_at) = (count, now);
        }
        now.saturating_duration_since(self.changed_at) >= STUCK_AFTER
    }
}

/// The signs of life that the service manager wants.
struct Watchdog {
    interval: Duration,
    next: Instant,
    loops: Vec<WatchedLoop>,
}

impl Watchdog {
    /// Whether a sign of life is due, and every event loop goes on.
    fn update(&mut self, now: Instant) -> bool {
        if now < self.next {
            return false;
        }
        self.next = now + self.interval;
        let mut all_go_on = true;
        for watched in &mut self.loops {
            if watched.is_stuck(now) {
                all_go_on = false;
                tracing::error!(
                    thread = watched.name,
                    "a thread is stuck: the service manager gets no sign of life, so that it starts this process again"
                );
            }
        }
        all_go_on
    }
}

/// The service manager that has started this process, if one has.
#[derive(Default)]
pub struct ServiceManager {
    socket: Option<NotifySocket>,
    watchdog: Option<Watchdog>,
    is_ready: bool,
    status: String,
    /// When a state that changes often is set again.
    status_at: Option<Instant>,
    /// Lines that could not be sent yet.
    unsent: String,
    retry_at: Option<Instant>,
}

impl ServiceManager {
    /// The service manager of this process, from its environment.
    pub fn of_process() -> Self {
        let socket = NotifySocket::from_environment().unwrap_or_else(|error| {
            tracing::warn!(%error, "the service manager of NOTIFY_SOCKET cannot be told anything");
            None
        });
        let interval = watchdog_interval().filter(|_| socket.is_some());
        Self { socket, ..Self::new(interval, Instant::now()) }
    }

    /// None: nothing is sent.
    pub fn none() -> Self {
        Self::new(None, Instant::now())
    }

    fn new(watchdog: Option<Duration>, now: Instant) -> Self {
        let watchdog = watchdog.map(|interval| Watchdog {
            interval: interval / SIGNS_PER_INTERVAL,
            next: now,
            loops: Vec::new(),
        });
        Self { watchdog, ..Self::default() }
    }

    /// Signs of life depend on this thread, too, from now on.
    pub fn watch(&mut self, name: impl Into<String>, activity: impl FnOnce() -> LoopActivity) {
        if let Some(watchdog) = &mut self.watchdog {
            let activity = activity();
            let count = activity.count();
            watchdog.loops.push(WatchedLoop {
                name: name.into(),
                activity,
                count,
                changed_at: Instant::now(),
            });
        }
    }

    /// Devices, firewall and local API are there; the tunnel may not be yet.
    pub fn ready(&mut self) {
        self.is_ready = true;
        self.send("READY=1\n");
    }

    /// The state as people read it in `systemctl status`. Does nothing where it is the same as before.
    pub fn set_status(&mut self, status: impl FnOnce() -> String) {
        if self.socket.is_none() {
            return;
        }
        let mut status = status().replace(['\n', '\0'], " ");
        status.truncate(status.floor_char_boundary(MAX_STATUS_BYTES));
        if self.status != status {
            self.send(&format!("STATUS={status}\n"));
            self.status = status;
        }
    }

    /// Whether a state that changes often is to be set now.
    pub fn is_status_due(&mut self, now: Instant) -> bool {
        let is_due = self.socket.is_some() && self.status_at.is_none_or(|at| at <= now);
        if is_due {
            self.status_at = Some(now + STATUS_INTERVAL);
        }
        is_due
    }

    /// The configuration is read again, until [`Self::ready`] is called again.
    pub fn reloading(&mut self) {
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}\n", monotonic_microseconds()));
    }

    /// The process ends.
    pub fn stopping(&mut self) {
        self.send("STOPPING=1\n");
    }

    /// When [`Self::update`] must be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let watchdog = self.watchdog.as_ref().filter(|_| self.is_ready).map(|watchdog| watchdog.next);
        watchdog.into_iter().chain(self.retry_at).min()
    }

    /// Sends what is due.
    pub fn update(&mut self, now: Instant) {
        if self.retry_at.take_if(|at| *at <= now).is_some() {
            self.send("");
        }
        if self.is_ready && self.watchdog.as_mut().is_some_and(|watchdog| watchdog.update(now)) {
            self.send("WATCHDOG=1\n");
        }
    }

    fn send(&mut self, lines: &str) {
        let Some(socket) = &self.socket else { return };
        self.unsent += lines;
        match socket.send(&self.unsent) {
            Ok(()) => self.unsent.clear(),
            Err(error) => {
                tracing::debug!(%error, "the service manager is not told yet");
                // The last state and sign of life suffice of the waiting lines.
                self.unsent = latest(&self.unsent);
                self.retry_at = Some(Instant::now() + RETRY_INTERVAL);
            }
        }
    }
}

/// The lines of which no later one says the same again.
fn latest(lines: &str) -> String {
    let key = |line: &str| line.split('=').next().unwrap_or_default().to_owned();
    let all: Vec<&str> = lines.lines().collect();
    let is_last = |at: usize| all[at + 1..].iter().all(|later| key(later) != key(all[at]));
    (0..all.len()).filter(|at| is_last(*at)).map(|at| format!("{}\n", all[at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_of_life_come_three_times_in_an_interval_and_end_when_a_thread_is_stuck() {
        let start = Instant::now();
        let mut manager = ServiceManager::new(Some(Duration::from_secs(30)), start);
        let activity = LoopActivity::default();
        manager.watch("shard 1", || activity.clone());
        let watchdog = manager.watchdog.as_mut().unwrap();
        let mut signs = |from: u64, to: u64, goes_on: bool| {
            let at = |second| start + Duration::from_secs(second);
            let is_sign = |second: &u64| {
                if goes_on {
                    activity.mark();
                }
                watchdog.update(at(*second))
            };
            (from..to).filter(is_sign).count()
        };
        assert_eq!(signs(0, 60, true), 6);
        assert_eq!(signs(60, 75, false), 2, "a thread that is only slow is not stuck");
        assert_eq!(signs(75, 200, false), 0);
        assert_eq!(signs(200, 260, true), 6, "it goes on again");
    }

    #[test]
    fn nothing_is_due_before_the_process_is_ready_or_without_a_service_manager() {
        let now = Instant::now();
        let mut manager = ServiceManager::new(Some(Duration::from_secs(30)), now);
        assert_eq!(manager.poll_timeout(), None);
        manager.ready();
        assert_eq!(manager.poll_timeout(), Some(now));
        assert_eq!(ServiceManager::none().poll_timeout(), None);
    }

    #[test]
    fn of_lines_that_wait_the_latest_of_each_kind_are_kept() {
        let lines = "STATUS=a\nREADY=1\nWATCHDOG=1\nSTATUS=b\nWATCHDOG=1\n";
        assert_eq!(latest(lines), "READY=1\nSTATUS=b\nWATCHDOG=1\n");
    }
}
