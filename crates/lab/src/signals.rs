//! Noticing that the user wants to stop, so that everything can be cleaned up first.

use std::{
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{error::LabError, leftovers};

static STOP: AtomicBool = AtomicBool::new(false);
/// How often it is looked whether a signal has come.
const LOOK: Duration = Duration::from_millis(20);
/// What a shell says of a program that SIGINT has ended.
const INTERRUPTED: i32 = 130;

/// From now on SIGINT, SIGTERM and SIGHUP do not end the process but are answered by [`check`].
pub(crate) fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler: extern "C" fn(libc::c_int) = note;
        // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

extern "C" fn note(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// An error once a signal has come.
pub(crate) fn check() -> Result<(), LabError> {
    if STOP.load(Ordering::Relaxed) { Err(LabError::Interrupted) } else { Ok(()) }
}

/// Sleeps, but not on after a signal.
pub(crate) fn sleep(time: Duration) -> Result<(), LabError> {
    let end = Instant::now() + time;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(LOOK));
    }
}

/// From now on SIGINT, SIGTERM and SIGHUP end the process only when its labs, with all programs in them, have been removed.
/// For programs that run labs one after the other or side by side and wait in many places. Later calls change nothing.
pub fn remove_labs_when_interrupted() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        catch();
        thread::spawn(|| {
            while check().is_ok() {
                thread::sleep(LOOK);
            }
            eprintln!("interrupted: the labs are being removed");
            leftovers::remove_own();
            std::process::exit(INTERRUPTED);
        });
    });
}
