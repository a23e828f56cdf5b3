//! Records SIGINT, SIGTERM and SIGHUP, so that labs are removed before the process ends.

use std::{
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{cleanup, error::LabError};

static SIGNAL_RECEIVED: AtomicBool = AtomicBool::new(false);
/// How often a sleeping thread checks for a signal. Longer delays the end after Ctrl-C, shorter costs
/// wake-ups.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The exit code that shells report for a program ended by SIGINT: 128 + 2.
const EXIT_CODE_INTERRUPTED: i32 = 130;

/// From now on SIGINT, SIGTERM and SIGHUP do not end the process but are recorded for [`check_interrupted`].
pub fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler: extern "C" fn(libc::c_int) = on_signal;
        // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

extern "C" fn on_signal(_: libc::c_int) {
    SIGNAL_RECEIVED.store(true, Ordering::Relaxed);
}

/// Returns an error once a signal has been received.
pub fn check_interrupted() -> Result<(), LabError> {
    if SIGNAL_RECEIVED.load(Ordering::Relaxed) { Err(LabError::Interrupted) } else { Ok(()) }
}

/// Sleeps for `time`, or until a signal is received, which is an error.
pub fn sleep(time: Duration) -> Result<(), LabError> {
    let end = Instant::now() + time;
    loop {
        check_interrupted()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(POLL_INTERVAL));
    }
}

/// From now on SIGINT, SIGTERM and SIGHUP end the process only after its labs and all programs in them have
/// been removed. For programs that run many labs and wait in many places. Further calls have no effect.
pub fn remove_labs_when_interrupted() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        catch_signals();
        thread::spawn(|| {
            while check_interrupted().is_ok() {
                thread::sleep(POLL_INTERVAL);
            }
            eprintln!("interrupted: the labs are being removed");
            cleanup::remove_own();
            std::process::exit(EXIT_CODE_INTERRUPTED);
        });
    });
}
