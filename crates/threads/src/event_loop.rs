//! The event loop that client and server share.
//!
//! In: a deadline. Out: an [`Iteration`] with the time and the sockets that are ready. It delays busy loops
//! (`WakeupCoalescer`), returns memory after busy times (`MemoryTrimmer`), and reports when this process
//! got no processor for a while.

use std::{
    io::{self, IsTerminal},
    thread,
    time::{Duration, Instant},
};

use mpvpn_error::RunError;
use mpvpn_os::{
    memory,
    poll::{
        Event, Events, Interest, PollTimer, PollWaker, Poller, SIGNAL_TOKEN, Signal, Signals, TIMER_TOKEN,
        WAKE_TOKEN, reduce_timer_slack,
    },
};
use mpvpn_status::{Memory, events::Event as ControlEvent, reload_report::ReloadReport};

use crate::{
    loop_timer::LoopTimer, memory_trimmer::MemoryTrimmer, service_manager::LoopActivity,
    wakeup_coalescer::WakeupCoalescer,
};

/// A wait that ends this much later than its timeout, an iteration that takes longer than this, or a datagram
/// that waited longer in our own socket is a local stall: missing heartbeats may then be waiting there, too.
/// Smaller: ordinary scheduling delays restart liveness timers and delay failover. Larger: a stalled process
/// declares healthy paths dead. Chosen (open question of docs/design/threads.md).
const MIN_LOCAL_STALL: Duration = Duration::from_millis(40);
/// The longest wait. It bounds the effect of a timer that somebody forgot to report; a longer wait only saves
/// an idle wake-up.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Waits for events of sockets, timers, signals and other threads.
pub struct EventLoop {
    /// Waits for sockets.
    pub poller: Poller,
    events: Events,
    /// Only in the main thread.
    signals: Option<Signals>,
    has_terminal: bool,
    /// Wakes this loop from other threads.
    pub wake: PollWaker,
    /// Counts the iterations.
    pub activity: LoopActivity,
    previous_end: Instant,
    wakeup_coalescer: WakeupCoalescer,
    /// The timer for deadlines, and what it is set for.
    timer: PollTimer,
    timer_state: LoopTimer,
    memory_trimmer: MemoryTrimmer,
}

/// Whether a datagram that arrived at `arrived` waited in our own socket so long that missing heartbeats may
/// wait there, too.
pub fn has_waited_long(arrived: Instant, now: Instant) -> bool {
    now.saturating_duration_since(arrived) > MIN_LOCAL_STALL
}

/// The memory of this process, for the status.
pub fn memory() -> Option<Memory> {
    memory::memory_use().map(|memory| Memory { resident_bytes: memory.resident, heap_bytes: memory.in_use })
}

/// The request of a signal.
pub enum SignalRequest {
    /// End the process.
    End(Signal),
    /// Read the configuration again.
    Reload,
}

/// The event that reports a reload of the configuration.
pub fn reload_event(reloaded: &Result<ReloadReport, String>) -> ControlEvent {
    match reloaded {
        Ok(ReloadReport { links, classes, applied, restart }) => {
            let (applied, restart) = (applied.clone(), restart.clone());
            ControlEvent::ConfigurationRead { links: *links, classes: *classes, applied, restart }
        }
        Err(reason) => ControlEvent::ConfigurationRefused { reason: reason.as_str().into() },
    }
}

/// The event that reports a signal which ends this process.
pub fn signal_event(signal: Signal) -> ControlEvent {
    let signal = match signal {
        Signal::Interrupt => "SIGINT",
        Signal::Terminate => "SIGTERM",
        Signal::Hangup => "SIGHUP",
        // The process does not wait for other signals.
        _ => "a signal",
    };
    ControlEvent::Ending { signal: signal.into() }
}

/// The state at the start of an event-loop iteration.
pub struct Iteration {
    /// The time.
    pub now: Instant,
    /// This process got no processor for at least `MIN_LOCAL_STALL`.
    pub stalled: bool,
    /// The sockets that are ready.
    pub ready: Vec<Event>,
}

impl EventLoop {
    /// For the main thread. Must be called before other threads start, so that all threads inherit the
    /// blocked signals.
    pub fn new() -> Result<Self, RunError> {
        reduce_timer_slack();
        let signals = Signals::new(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup])
            .map_err(RunError::io("take over signals"))?;
        let mut event_loop = Self::without_signals()?;
        event_loop
            .poller
            .add(&signals, SIGNAL_TOKEN, Interest::Read)
            .map_err(RunError::io("watch a descriptor"))?;
        event_loop.signals = Some(signals);
        Ok(event_loop)
    }

    /// For another thread; may be made before that thread starts.
    pub fn without_signals() -> Result<Self, RunError> {
        let wake = PollWaker::new().map_err(RunError::io("make an eventfd"))?;
        let poller = Poller::new().map_err(RunError::io("make an epoll instance"))?;
        poller.add(&wake, WAKE_TOKEN, Interest::Read).map_err(RunError::io("watch a descriptor"))?;
        let timer = PollTimer::new().map_err(RunError::io("make a timer"))?;
        poller.add(&timer, TIMER_TOKEN, Interest::Read).map_err(RunError::io("watch a timer"))?;
        Ok(Self {
            poller,
            events: Events::with_capacity(64),
            signals: None,
            has_terminal: io::stdin().is_terminal(),
            wake,
            activity: LoopActivity::default(),
            previous_end: Instant::now(),
            wakeup_coalescer: WakeupCoalescer::default(),
            timer,
            timer_state: LoopTimer::default(),
            memory_trimmer: MemoryTrimmer::new(Instant::now()),
        })
    }

    /// Waits for something to do, at most until `deadline`, and stores it in `iteration`. Packets and timers
    /// may be late by `max_delay`, so that those that are close together are handled together.
    pub fn wait(
        &mut self,
        deadline: Option<Instant>,
        max_delay: Duration,
        iteration: &mut Iteration,
    ) -> Result<(), RunError> {
        let mut start = Instant::now();
        let mut busy = start.saturating_duration_since(self.previous_end);
        // Only the main thread trims. A client inside an app has no such thread, and its process's memory is
        // the app's.
        if self.signals.is_some() && self.memory_trimmer.is_look_due(start) {
            self.return_memory(start);
            let end = Instant::now();
            (start, busy) = (end, end.saturating_duration_since(self.previous_end));
        }
        let delay = self.wakeup_coalescer.delay(start, max_delay);
        if let Some(delay) = delay {
            thread::sleep(delay);
            start = Instant::now();
        }
        let wait = deadline.map_or(MAX_WAIT, |at| at.saturating_duration_since(start).min(MAX_WAIT));
        self.poll(start, deadline)?;
        iteration.now = Instant::now();
        self.timer_state.on_woken(iteration.now);
        self.activity.mark();
        let waited = iteration.now.saturating_duration_since(start);
        self.wakeup_coalescer.on_wakeup(start, iteration.now, delay.is_some(), max_delay);
        iteration.stalled = busy > MIN_LOCAL_STALL || waited > wait + MIN_LOCAL_STALL;
        iteration.ready.clear();
        iteration.ready.extend(self.events.iter().filter(|event| event.token != TIMER_TOKEN));
        self.previous_end = iteration.now;
        Ok(())
    }

    /// Waits for events until `deadline`, at most for [`MAX_WAIT`].
    fn poll(&mut self, now: Instant, deadline: Option<Instant>) -> Result<(), RunError> {
        let deadline = deadline.filter(|at| at.saturating_duration_since(now) <= MAX_WAIT);
        let wait = self.timer_state.before_wait(now, deadline);
        if let Some(delay) = wait.timer {
            self.timer.set(delay).map_err(RunError::io("set a timer"))?;
        }
        let timeout = wait.timeout.unwrap_or(MAX_WAIT);
        self.poller.wait(&mut self.events, Some(timeout)).map_err(RunError::io("wait for events"))?;
        Ok(())
    }

    /// Returns free memory to the kernel if there is enough of it.
    fn return_memory(&mut self, now: Instant) {
        let Some(before) = memory::memory_use().filter(|memory| self.memory_trimmer.look(now, *memory))
        else {
            return;
        };
        memory::trim_heap();
        let end = Instant::now();
        let took = end.saturating_duration_since(now);
        let after = memory::memory_use().unwrap_or(before);
        tracing::debug!(
            ?took,
            resident_before = before.resident,
            resident = after.resident,
            in_use = after.in_use,
            "returned free memory to the kernel"
        );
        self.memory_trimmer.on_trimmed(end, took, after);
    }

    /// The request of a signal that has arrived in this iteration.
    pub fn signal_request(&self, iteration: &Iteration) -> Option<SignalRequest> {
        if iteration.ready.iter().all(|event| event.token != SIGNAL_TOKEN) {
            return None;
        }
        match self.signals.as_ref()?.next().ok().flatten()? {
            // A closed terminal sends SIGHUP to end its processes; otherwise SIGHUP means reload.
            Signal::Hangup if !self.has_terminal => Some(SignalRequest::Reload),
            signal => Some(SignalRequest::End(signal)),
        }
    }
}

impl Iteration {
    /// The first one: nothing is ready.
    pub fn first() -> Self {
        Self { now: Instant::now(), stalled: false, ready: Vec::new() }
    }
}
