//! Signals that end a measurement.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use mpvpn_os::poll::{Events, Interest, Poller, Signal, Signals};

use super::POLL_INTERVAL;

/// Whether SIGINT, SIGTERM or SIGHUP has come.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on these signals are recorded instead of ending the process. Call it before other threads
    /// exist.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn catch() -> io::Result<Self> {
        let signals = Signals::new(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup])?;
        let poller = Poller::new()?;
        poller.add(&signals, 0, Interest::Read)?;
        let interrupt = Self::default();
        let flag = Arc::clone(&interrupt.0);
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            let mut events = Events::with_capacity(1);
            while !matches!(signals.next(), Ok(Some(_)) | Err(_)) {
                if poller.wait(&mut events, None).is_err() {
                    break;
                }
            }
            flag.store(true, Relaxed);
        })?;
        Ok(interrupt)
    }

    /// Whether a signal has come.
    pub fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Sleeps until `until`, or until a signal comes. Returns whether the time is over.
    pub fn sleep_until(&self, until: Instant) -> bool {
        while !self.is_set() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
        false
    }

    /// Sleeps for `time`, or until a signal comes. Returns whether the time is over.
    pub fn sleep(&self, time: Duration) -> bool {
        self.sleep_until(Instant::now() + time)
    }
}
