//! Readiness of descriptors (epoll), wake-ups from other threads (eventfd), timers (timerfd), and signals as
//! a descriptor (signalfd).
//!
//! In: descriptors, each with a token. Out: the tokens of those that are ready. Always holds: polling is
//! level-triggered, so a descriptor that was not read to its end is reported again.

use std::{
    io,
    num::NonZeroU64,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Timer slack of threads that send packets, in nanoseconds. A larger one makes timeouts late: with the
/// kernel's default of 50 µs fewer packets arrive under load (`docs/design/threads.md`, "What was tried").
/// With a smaller one the kernel merges fewer timer interrupts.
const TIMER_SLACK_NS: Option<NonZeroU64> = NonZeroU64::new(1000);

/// Most events that one wait can return. A larger buffer takes memory (12 bytes an event), a smaller one more
/// system calls.
const MAX_EVENTS: usize = 4096;

/// Poller token of the TUN device.
pub const TUN_TOKEN: u64 = 0;
/// Poller token of the wake-up call: another thread has sent a message.
pub const WAKE_TOKEN: u64 = 1;
/// Poller token of signals.
pub const SIGNAL_TOKEN: u64 = 2;
/// Poller token of the netlink monitor of links and addresses.
pub const MONITOR_TOKEN: u64 = 3;
/// Poller tokens of the classes' own TUN devices begin here; there are as many as classes.
pub const FIRST_CLASS_TUN_TOKEN: u64 = 4;
/// Poller token of a server's watch of its files.
pub const FILES_TOKEN: u64 = MONITOR_TOKEN;
/// Poller token of the timer of the loop; after those of TUN devices.
pub const TIMER_TOKEN: u64 = 14;
/// Poller token of the files that are read again when they change, beside those of users; after those of TUN
/// devices.
pub const WATCH_TOKEN: u64 = 15;
/// Poller tokens of UDP sockets begin here.
pub const FIRST_SOCKET_TOKEN: u64 = 16;

/// Reduces the timer slack (PR_SET_TIMERSLACK) of this thread and of threads that it starts, so that timeouts
/// end within 1 µs instead of up to 50 µs late.
pub fn reduce_timer_slack() {
    // If the kernel refuses, timeouts are less exact.
    let _ = rustix::thread::set_current_timer_slack(TIMER_SLACK_NS);
}

/// The readiness to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable.
    Read,
    /// Writable.
    Write,
    /// Readable or writable.
    ReadWrite,
    /// Errors and hang-ups only.
    Nothing,
}

impl Interest {
    fn bits(self) -> u32 {
        let bits = match self {
            Self::Read => libc::EPOLLIN,
            Self::Write => libc::EPOLLOUT,
            Self::ReadWrite => libc::EPOLLIN | libc::EPOLLOUT,
            Self::Nothing => 0,
        };
        bits as u32
    }
}

/// One descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token given at [`Poller::add`].
    pub token: u64,
    /// Reading will not block: it returns data, the end, or an error.
    pub readable: bool,
    /// Writing will not block: it takes data, or returns an error.
    pub writable: bool,
    /// The peer hung up, or the descriptor has failed (EPOLLHUP, EPOLLERR).
    pub closed: bool,
}

/// The buffer for the events of one wait.
pub struct Events {
    list: Vec<libc::epoll_event>,
}

impl Events {
    /// A buffer for at most `capacity` events a wait (1 to 4096).
    pub fn with_capacity(capacity: usize) -> Self {
        Self { list: Vec::with_capacity(capacity.clamp(1, MAX_EVENTS)) }
    }

    /// The events of the last wait.
    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        self.list.iter().map(|raw| {
            let bits = raw.events;
            let has = |mask: i32| bits & mask as u32 != 0;
            let closed = has(libc::EPOLLERR | libc::EPOLLHUP);
            Event {
                token: raw.u64,
                readable: closed || has(libc::EPOLLIN),
                writable: closed || has(libc::EPOLLOUT),
                closed,
            }
        })
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    fd: OwnedFd,
    /// Whether the kernel (before Linux 5.11) has no `epoll_pwait2`; timeouts are then whole milliseconds,
    /// rounded up.
    whole_milliseconds: AtomicBool,
}

impl Poller {
    /// An epoll instance that watches nothing yet.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes no pointer; the result is checked before use.
        let fd = unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))? };
        Ok(Self { fd, whole_milliseconds: AtomicBool::new(false) })
    }

    /// Starts watching `fd`. A duplicated descriptor must be removed before it is closed: epoll watches the
    /// open file.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_fd(), token, interest)
    }

    /// Changes the token and the interest of `fd`.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_fd(), token, interest)
    }

    /// Stops watching `fd`.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd.as_fd(), 0, Interest::Nothing)
    }

    /// Waits until a descriptor is ready or `timeout` has passed (`None`: without limit) and returns the
    /// number of events; a wait that a signal interrupts returns 0.
    pub fn wait(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<usize> {
        events.list.clear();
        let count = match self.wait_raw(events, timeout) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        // SAFETY: the kernel wrote `count` events into the spare capacity, whose size was passed.
        unsafe { events.list.set_len(count) };
        Ok(count)
    }

    fn wait_raw(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<usize> {
        let room = events.list.capacity() as libc::c_int;
        let pointer = events.list.as_mut_ptr();
        if !self.whole_milliseconds.load(Ordering::Relaxed) {
            let time = timeout.map(kernel_timespec);
            let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            let mask: *const libc::sigset_t = std::ptr::null();
            // SAFETY: `pointer` has room for `room` events, `time` is null or lives until the call
            // returns, and a null signal mask is allowed, whatever its size.
            let count = unsafe {
                libc::syscall(libc::SYS_epoll_pwait2, self.fd.as_raw_fd(), pointer, room, time, mask, 0_usize)
            };
            let result = usize::try_from(count).map_err(|_| io::Error::last_os_error());
            if !matches!(&result, Err(e) if e.raw_os_error() == Some(libc::ENOSYS)) {
                return result;
            }
            self.whole_milliseconds.store(true, Ordering::Relaxed);
        }
        // SAFETY: `pointer` has room for `room` events.
        count_or_errno(unsafe { libc::epoll_wait(self.fd.as_raw_fd(), pointer, room, milliseconds(timeout)) })
    }

    fn control(&self, operation: i32, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.bits(), u64: token };
        // SAFETY: both descriptors are open, and `event` outlives the call.
        let code = unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd.as_raw_fd(), &raw mut event) };
        count_or_errno(code).map(drop)
    }
}

crate::as_fd!(Poller, fd);

/// Wakes a poller from any thread (eventfd). Clones wake the same poller.
#[derive(Clone, Debug)]
pub struct PollWaker(Arc<OwnedFd>);

impl PollWaker {
    /// Creates the eventfd; add it to the poller with [`Interest::Read`].
    pub fn new() -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Makes the descriptor readable. Never blocks; several calls before the next [`PollWaker::drain`] cause
    /// one wake-up.
    pub fn wake(&self) {
        // The only failure is a full counter, and then it is readable already.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable again; returns whether [`PollWaker::wake`] was called since the last
    /// time.
    pub fn drain(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0_u8; 8]).is_ok()
    }
}

crate::as_fd!(PollWaker, 0);

/// A timer that makes a descriptor readable (timerfd). Unlike the timeout of a wait it stays set from one
/// wait to the next.
#[derive(Debug)]
pub struct PollTimer(OwnedFd);

impl PollTimer {
    /// A timer that is not set; add it to the poller with [`Interest::Read`].
    pub fn new() -> io::Result<Self> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Makes the descriptor readable after `delay` (`None`: never), and not readable until then.
    pub fn set(&self, delay: Option<Duration>) -> io::Result<()> {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
        // A delay of zero would unset it.
        let delay = delay.map_or(Duration::ZERO, |delay| delay.max(Duration::from_nanos(1)));
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(delay).map_err(|_| io::ErrorKind::InvalidInput)?;
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: zero, it_value })?;
        Ok(())
    }
}

crate::as_fd!(PollTimer, 0);

/// A signal that this program can handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT, Ctrl-C.
    Interrupt,
    /// SIGTERM: end in good order.
    Terminate,
    /// SIGHUP, by convention of daemons: read the configuration again.
    Hangup,
    /// SIGQUIT.
    Quit,
    /// SIGUSR1.
    User1,
    /// SIGUSR2.
    User2,
}

impl Signal {
    const ALL: [Self; 6] =
        [Self::Interrupt, Self::Terminate, Self::Hangup, Self::Quit, Self::User1, Self::User2];

    fn number(self) -> i32 {
        match self {
            Self::Interrupt => libc::SIGINT,
            Self::Terminate => libc::SIGTERM,
            Self::Hangup => libc::SIGHUP,
            Self::Quit => libc::SIGQUIT,
            Self::User1 => libc::SIGUSR1,
            Self::User2 => libc::SIGUSR2,
        }
    }
}

/// Signals that are read from a descriptor (signalfd) instead of interrupting the program.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in the calling thread and in all threads that it starts from now on, and delivers
    /// them here. Call it in `main` before any other thread exists. The signals stay blocked after the
    /// drop, so that a second Ctrl-C does not interrupt the cleaning up.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is a valid object, and sigemptyset initialises it in any case.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a valid, writable signal set, and the numbers are valid signals.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, signal.number());
            }
        }
        // SAFETY: `set` is initialised; a null old set is allowed.
        let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        // SAFETY: `set` is initialised; the result is checked before use.
        let fd =
            unsafe { owned(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))? };
        Ok(Self(fd))
    }

    /// The next pending signal, if any.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut info) {
            Ok(length) if length >= 4 => {
                let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
                Ok(Signal::ALL.into_iter().find(|signal| signal.number() == number))
            }
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

crate::as_fd!(Signals, 0);

/// `struct __kernel_timespec`: seconds and nanoseconds, 64 bits each on every machine.
fn kernel_timespec(duration: Duration) -> [i64; 2] {
    [i64::try_from(duration.as_secs()).unwrap_or(i64::MAX), duration.subsec_nanos().into()]
}

/// The timeout for `epoll_wait`: whole milliseconds, rounded up; -1 without limit.
fn milliseconds(timeout: Option<Duration>) -> libc::c_int {
    let Some(timeout) = timeout else { return -1 };
    libc::c_int::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
}

/// Turns the result of a system call, a count or -1, into a `Result`.
fn count_or_errno(result: libc::c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Takes ownership of the descriptor that a system call returned; a negative `fd` is an error in `errno`.
///
/// # Safety
/// `fd` is negative, or a new descriptor without another owner.
unsafe fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    count_or_errno(fd)?;
    // SAFETY: `fd` is not negative, and the caller guarantees that it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_reported_from_when_it_expires_until_it_is_set_again() {
        let (poller, timer) = (Poller::new().unwrap(), PollTimer::new().unwrap());
        poller.add(&timer, 5, Interest::Read).unwrap();
        let mut events = Events::with_capacity(8);
        let mut wait = |time| poller.wait(&mut events, time).unwrap();
        assert_eq!(wait(Some(Duration::from_millis(2))), 0, "it is not set");
        for delay in [Duration::ZERO, Duration::from_millis(2)] {
            timer.set(Some(delay)).unwrap();
            assert_eq!((wait(None), wait(None)), (1, 1));
        }
        timer.set(Some(Duration::from_secs(3600))).unwrap();
        assert_eq!(wait(Some(Duration::ZERO)), 0);
        timer.set(Some(Duration::ZERO)).unwrap();
        timer.set(None).unwrap();
        assert_eq!(wait(Some(Duration::from_millis(2))), 0);
    }

    #[test]
    fn a_wake_up_from_another_thread_ends_the_wait() {
        let poller = Poller::new().unwrap();
        let wake = PollWaker::new().unwrap();
        poller.add(&wake, 7, Interest::Read).unwrap();
        let mut events = Events::with_capacity(8);
        assert_eq!(poller.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);

        let other = wake.clone();
        let thread = std::thread::spawn(move || other.wake());
        assert_eq!(poller.wait(&mut events, None).unwrap(), 1);
        let event = events.iter().next().unwrap();
        assert_eq!((event.token, event.readable, event.closed), (7, true, false));
        thread.join().unwrap();

        assert!(wake.drain());
        assert!(!wake.drain(), "drained twice");
        assert_eq!(poller.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
        poller.remove(&wake).unwrap();
        wake.wake();
        assert_eq!(poller.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
    }

    #[test]
    fn interest_can_be_changed() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&a, 1, Interest::Read).unwrap();
        let mut events = Events::with_capacity(1);
        assert_eq!(poller.wait(&mut events, Some(Duration::ZERO)).unwrap(), 0);
        poller.modify(&a, 2, Interest::ReadWrite).unwrap();
        assert_eq!(poller.wait(&mut events, Some(Duration::ZERO)).unwrap(), 1);
        let event = events.iter().next().unwrap();
        assert_eq!((event.token, event.readable, event.writable), (2, false, true));
    }

    #[test]
    fn a_hang_up_is_reported_whatever_the_interest() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&a, 3, Interest::Nothing).unwrap();
        drop(b);
        let mut events = Events::with_capacity(1);
        assert_eq!(poller.wait(&mut events, None).unwrap(), 1);
        assert!(events.iter().next().unwrap().closed);
    }

    #[test]
    fn a_wait_can_be_shorter_than_a_millisecond_and_ends() {
        let poller = Poller::new().unwrap();
        let mut events = Events::with_capacity(1);
        assert_eq!(poller.wait(&mut events, Some(Duration::from_micros(50))).unwrap(), 0);
        assert_eq!(kernel_timespec(Duration::from_nanos(1_000_000_050)), [1, 50]);
        assert_eq!(kernel_timespec(Duration::MAX)[0], i64::MAX);
    }

    #[test]
    fn timeouts_in_milliseconds_are_rounded_up() {
        assert_eq!(milliseconds(None), -1);
        assert_eq!(milliseconds(Some(Duration::ZERO)), 0);
        assert_eq!(milliseconds(Some(Duration::from_nanos(1))), 1);
        assert_eq!(milliseconds(Some(Duration::from_micros(1001))), 2);
        assert_eq!(milliseconds(Some(Duration::MAX)), i32::MAX);
    }

    #[test]
    fn a_blocked_signal_is_read_from_the_descriptor() {
        let thread = std::thread::spawn(|| {
            let signals = Signals::new(&[Signal::User1]).unwrap();
            assert_eq!(signals.next().unwrap(), None);
            // SAFETY: sends a signal, blocked above, to this very thread.
            let code = unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
            assert_eq!(code, 0);
            assert_eq!(signals.next().unwrap(), Some(Signal::User1));
            assert_eq!(signals.next().unwrap(), None);
        });
        thread.join().unwrap();
    }
}
