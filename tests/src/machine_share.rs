//! Shares of the machine's processors for tests and rigs, so that those that run at the same time do not make
//! each other fail.
//!
//! In: the processor time that a test needs. Out: a guard. Always holds: the shares of all threads and
//! processes together do not exceed `SHARED_PERCENT` of the processors; the holder of [`Share::Whole`] runs
//! alone, and the steps of `./dev test` that run in idle time pause meanwhile; threads of a process are
//! served in the order of their requests, so a large share waits for a bounded number of small ones; every
//! wait is bounded; a killed process releases its shares (flock(2)).

use std::{
    cell::Cell,
    collections::VecDeque,
    fs::{self, File},
    marker::PhantomData,
    path::{Path, PathBuf},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};

use crate::eventually;

/// Percentage of each processor that is shared out. The rest is for the kernel and the tests' own threads,
/// and for variation of what a test needs. Larger: tests miss bounds because they get no processor. Smaller:
/// processors idle.
const SHARED_PERCENT: u32 = 80;
/// Percentage of a processor per lock file. Smaller: more lock files to open. Larger: shares are rounded up
/// more.
const LOCK_PERCENT: u32 = 10;
/// How long a thread waits for its share. All tests that take the whole machine last a few minutes together,
/// and a rig holds it for a few minutes per testbed. Shorter: tests fail that only wait their turn. Longer: a
/// hanging run is noticed late.
const WAIT_LIMIT: Duration = Duration::from_secs(1800);

/// Environment variable with the process group of the steps that run in idle time, set by `./dev test`.
const IDLE_STEPS_GROUP: &str = "MPVPN_IDLE_STEPS_GROUP";

/// Whether every share of this process is the whole machine.
static ALWAYS_WHOLE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Number of locks that this thread holds.
    static HELD_LOCKS: Cell<usize> = const { Cell::new(0) };
}

/// A share of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Percent of one processor: the peak use of all processes of a test together.
    Percent(u32),
    /// All processors: for measurements of time or throughput that other load would disturb.
    Whole,
}

impl Share {
    /// The share of every testbed whose thread holds none yet: about the use of building and removing a
    /// testbed; in between most tests wait.
    pub const LIGHT: Self = Self::Percent(20);

    fn locks(self, all: usize) -> usize {
        match self {
            Self::Percent(percent) => (percent.div_ceil(LOCK_PERCENT) as usize).clamp(1, all),
            Self::Whole => all,
        }
    }
}

/// A held share; released when dropped.
pub struct MachineShare {
    /// Empty if the thread held a share before.
    locks: Vec<File>,
    /// Whether the steps that run in idle time pause until this share is released.
    idle_steps_pause: bool,
    /// Not `Send`: the number of held locks is kept per thread.
    _not_send: PhantomData<*const ()>,
}

impl MachineShare {
    /// Waits until the share is free.
    ///
    /// # Panics
    ///
    /// If this thread already holds a smaller share: it would wait for itself.
    pub fn take(share: Share) -> Self {
        let processors = thread::available_parallelism().map_or(1, |count| count.get());
        let all = processors * (SHARED_PERCENT / LOCK_PERCENT) as usize;
        let share = if ALWAYS_WHOLE.load(Ordering::Relaxed) { Share::Whole } else { share };
        let (wanted, held) = (share.locks(all), HELD_LOCKS.get());
        assert!(
            held == 0 || held >= wanted,
            "this thread has {held} of {all} locks and wants {wanted}: it has to ask for the larger share first"
        );
        let locks = if held == 0 { acquire_locks(wanted, all) } else { Vec::new() };
        HELD_LOCKS.set(held.max(wanted));
        let idle_steps_pause = locks.len() == all && signal_idle_steps(Signal::STOP);
        Self { locks, idle_steps_pause, _not_send: PhantomData }
    }

    /// From now on every share that this process takes is the whole machine. For programs that only measure.
    pub fn always_whole() {
        ALWAYS_WHOLE.store(true, Ordering::Relaxed);
    }
}

impl Drop for MachineShare {
    fn drop(&mut self) {
        if self.idle_steps_pause {
            signal_idle_steps(Signal::CONT);
        }
        if !self.locks.is_empty() {
            HELD_LOCKS.set(0);
        }
    }
}

/// Signals the steps that run in idle time; `false` if there are none.
fn signal_idle_steps(signal: Signal) -> bool {
    let group = std::env::var(IDLE_STEPS_GROUP).ok().and_then(|group| Pid::from_raw(group.parse().ok()?));
    group.is_some_and(|group| kill_process_group(group, signal).is_ok())
}

/// The folder of the lock files. It is never removed: removing a file that others wait for would allow two
/// holders.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join("mpvpn-tests");
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// A position in this process's queue: threads collect locks in the order of their requests. Otherwise a
/// thread that needs all locks could wait for minutes for one that asked later.
struct Ticket(u64);

struct Queue {
    next: u64,
    waiting: VecDeque<u64>,
}

/// The threads of this process that wait for a share.
static QUEUE: Mutex<Queue> = Mutex::new(Queue { next: 0, waiting: VecDeque::new() });
/// Signals that a ticket has left the queue.
static QUEUE_CHANGED: Condvar = Condvar::new();

impl Ticket {
    /// Joins the queue and waits until the ticket is the first.
    fn wait() -> Self {
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = Self(queue.next);
        queue.next += 1;
        queue.waiting.push_back(ticket.0);
        let is_waiting = |queue: &mut Queue| queue.waiting.front() != Some(&ticket.0);
        let waited = QUEUE_CHANGED
            .wait_timeout_while(queue, WAIT_LIMIT, is_waiting)
            .unwrap_or_else(PoisonError::into_inner);
        let is_first = !waited.1.timed_out();
        drop(waited);
        assert!(is_first, "other threads have waited for a share of the machine for {WAIT_LIMIT:?}");
        ticket
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        QUEUE.lock().unwrap_or_else(PoisonError::into_inner).waiting.retain(|waiting| *waiting != self.0);
        QUEUE_CHANGED.notify_all();
    }
}

fn open(path: &Path) -> File {
    File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Tries to take the lock; `false` if another holder has it.
fn try_lock(file: &File) -> bool {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => true,
        Err(Errno::WOULDBLOCK) => false,
        Err(error) => panic!("a lock of the tests cannot be taken: {error}"),
    }
}

/// Takes the next `wanted` locks that become free.
fn acquire_locks(wanted: usize, all: usize) -> Vec<File> {
    let _ticket = Ticket::wait();
    // Only the holder of this lock collects others, so two processes never each hold a part of what the other
    // needs.
    let folder = folder();
    let turn = open(&folder.join("turn"));
    eventually(WAIT_LIMIT, "a share of the machine", || {
        if try_lock(&turn) {
            Ok(())
        } else {
            Err(format!("other processes wait for a share, see {}", folder.display()))
        }
    });
    let mut free: Vec<File> = (0..all).map(|number| open(&folder.join(number.to_string()))).collect();
    let mut taken = Vec::new();
    eventually(WAIT_LIMIT, "a share of the machine", || {
        let mut at = 0;
        while at < free.len() && taken.len() < wanted {
            if try_lock(&free[at]) { taken.push(free.swap_remove(at)) } else { at += 1 }
        }
        if taken.len() == wanted {
            Ok(())
        } else {
            Err(format!("{} of {wanted} locks are free", taken.len()))
        }
    });
    taken
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    const LOCK_TIMEOUT: Duration = Duration::from_secs(600);
    const STILL_WAITING_AFTER: Duration = Duration::from_millis(300);

    /// A thread that takes a share, signals that it has it, and keeps it until this is dropped.
    struct Holder {
        has_it: mpsc::Receiver<()>,
        _end: mpsc::Sender<()>,
    }

    impl Holder {
        fn new(share: Share) -> Self {
            let ((has, has_it), (end, ends)) = (mpsc::channel(), mpsc::channel());
            thread::spawn(move || {
                let _guard = MachineShare::take(share);
                // A further share of the same thread does not wait.
                drop(MachineShare::take(Share::LIGHT));
                let _ = has.send(());
                let _ = ends.recv();
            });
            Self { has_it, _end: end }
        }

        fn waits(&self) -> bool {
            self.has_it.recv_timeout(STILL_WAITING_AFTER).is_err()
        }

        fn has_it(&self) {
            self.has_it.recv_timeout(LOCK_TIMEOUT).expect("a share");
        }
    }

    #[test]
    fn small_shares_are_held_together_and_the_whole_machine_exclusively_in_turn() {
        let (first, second) = (Holder::new(Share::LIGHT), Holder::new(Share::LIGHT));
        first.has_it();
        second.has_it();
        let whole = Holder::new(Share::Whole);
        assert!(whole.waits(), "the whole machine beside shares of it");
        let late = Holder::new(Share::LIGHT);
        assert!(late.waits(), "the whole machine is overtaken");
        drop((first, second));
        whole.has_it();
        assert!(late.waits(), "a share beside the whole machine");
        drop(whole);
        late.has_it();
    }

    #[test]
    fn a_share_has_at_least_one_lock_and_at_most_all() {
        let locks =
            [Share::Percent(0), Share::LIGHT, Share::Percent(101), Share::Whole].map(|it| it.locks(8));
        assert_eq!(locks, [1, 2, 8, 8]);
    }
}
