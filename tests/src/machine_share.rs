//! How much of the machine tests and rigs take, so that those that run side by side do not make each other fail.
//!
//! In: how much of a processor a test needs. Out: a guard. What always holds: the shares that are held on a machine, by all
//! threads and processes together, do not exceed `SHARED_PERCENT` of its processors; who holds [`Share::Whole`] runs alone; threads
//! of a process are served in turn, so a large share is not overtaken by small ones for ever; every wait is bounded; what a
//! killed process held is free (flock(2)).

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
};

use crate::eventually;

/// What is shared of each processor, percent. The rest is for the kernel, for the tests' own threads, and because nobody needs
/// the same at all times: with more, tests miss bounds because they get no processor; with less, processors idle.
const SHARED_PERCENT: u32 = 80;
/// What one lock stands for, percent of a processor.
const LOCK_PERCENT: u32 = 10;
/// How long a guard is waited for. All tests that want the whole machine take a few minutes together, and a rig takes a few
/// minutes a stage. Less would fail tests that only wait their turn; more would hide a run that hangs.
const WAIT_LIMIT: Duration = Duration::from_secs(1800);

static ALWAYS_WHOLE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// How many locks this thread holds.
    static HELD_LOCKS: Cell<usize> = const { Cell::new(0) };
}

/// How much of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// So many percent of a processor: what all processes of a test together use while most is to do.
    Percent(u32),
    /// All processors, for what measures time or throughput so closely that nothing may run beside it.
    Whole,
}

impl Share {
    /// What every stage has, unless its thread holds more already. It comes and goes with about that much, and in between
    /// most of them wait.
    pub const LIGHT: Self = Self::Percent(20);

    fn locks(self, all: usize) -> usize {
        match self {
            Self::Percent(percent) => (percent.div_ceil(LOCK_PERCENT) as usize).clamp(1, all),
            Self::Whole => all,
        }
    }
}

/// A guard; dropping it gives the share back.
pub struct MachineShare {
    /// Empty where the thread held one already.
    locks: Vec<File>,
    /// The thread that takes it is the one that gives it back.
    _not_send: PhantomData<*const ()>,
}

impl MachineShare {
    /// Waits until so much is free.
    ///
    /// # Panics
    ///
    /// If this thread holds less already, because it would wait for itself.
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
        Self { locks, _not_send: PhantomData }
    }

    /// From now on every guard that this process asks for is the whole machine. For programs that only measure.
    pub fn always_whole() {
        ALWAYS_WHOLE.store(true, Ordering::Relaxed);
    }
}

impl Drop for MachineShare {
    fn drop(&mut self) {
        if !self.locks.is_empty() {
            HELD_LOCKS.set(0);
        }
    }
}

/// The folder of the locks, which stays: who removes a lock that others wait for lets two hold it.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join("mpvpn-tests");
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// A place in the queue of this process: threads collect locks in the order in which they asked. Otherwise one that wants all
/// locks could wait for another that asked after it, and holds them for minutes.
struct Ticket(u64);

struct Queue {
    next: u64,
    waiting: VecDeque<u64>,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { next: 0, waiting: VecDeque::new() });
static QUEUE_CHANGED: Condvar = Condvar::new();

impl Ticket {
    /// Waits until it is the first.
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

/// Whether the lock is taken; `false` where another one holds it.
fn try_lock(file: &File) -> bool {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => true,
        Err(Errno::WOULDBLOCK) => false,
        Err(error) => panic!("a lock of the tests cannot be taken: {error}"),
    }
}

/// Takes `wanted` locks, the next that become free.
fn acquire_locks(wanted: usize, all: usize) -> Vec<File> {
    let _ticket = Ticket::wait();
    // Whoever holds this one is the only one that collects, so nobody waits for what another process collects.
    let folder = folder();
    let turn = open(&folder.join("turn"));
    eventually(WAIT_LIMIT, "a share of the machine", || {
        if try_lock(&turn) { Ok(()) } else { Err(format!("others wait for one, see {}", folder.display())) }
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

    /// A thread that takes a share, tells it, and keeps it until the answer is dropped.
    struct Holder {
        has_it: mpsc::Receiver<()>,
        _end: mpsc::Sender<()>,
    }

    impl Holder {
        fn new(share: Share) -> Self {
            let ((has, has_it), (end, ends)) = (mpsc::channel(), mpsc::channel());
            thread::spawn(move || {
                let _guard = MachineShare::take(share);
                // More of the same thread waits for nothing.
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
    fn shares_are_held_side_by_side_and_the_whole_alone_and_in_turn() {
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
    fn no_share_is_nothing_or_larger_than_the_machine() {
        let locks =
            [Share::Percent(0), Share::LIGHT, Share::Percent(101), Share::Whole].map(|it| it.locks(8));
        assert_eq!(locks, [1, 2, 8, 8]);
    }
}
