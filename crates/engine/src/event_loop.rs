//! What the loops of client and server have in common: what to wait for, and noticing that this
//! process did not run.

use std::{
    io::{self, IsTerminal},
    thread,
    time::{Duration, Instant},
};

use mpvpn_control::{config::ReloadReport, events::Event as ControlEvent};
use mpvpn_os::{
    memory,
    poll::{Event, Events, Interest, PollWaker, Poller, Signal, Signals, reduce_timer_slack},
};

use crate::{EngineError, memory_trimmer::MemoryTrimmer, wakeup_coalescer::WakeupCoalescer};

/// The TUN device.
pub(crate) const TUN_TOKEN: u64 = 0;
/// Another thread has a message.
pub(crate) const WAKE_TOKEN: u64 = 1;
/// A signal arrived.
const SIGNAL_TOKEN: u64 = 2;
/// News about links.
pub(crate) const MONITOR_TOKEN: u64 = 3;
/// The TUN devices of classes have tokens from here on, as many as there are classes.
pub(crate) const FIRST_CLASS_TUN_TOKEN: u64 = 4;
/// UDP sockets have tokens from here on.
pub(crate) const FIRST_SOCKET_TOKEN: u64 = 16;

/// A wait that ended this much later than asked, or work that took as long, means that silence of
/// others may have been our own.
const MIN_LOCAL_STALL: Duration = Duration::from_millis(40);
/// The longest wait: what nobody foresaw is found after it.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Waiting for events.
pub(crate) struct EventLoop {
    pub(crate) poller: Poller,
    events: Events,
    /// Only the main thread has them.
    signals: Option<Signals>,
    has_terminal: bool,
    pub(crate) wake: PollWaker,
    previous_end: Instant,
    wakeup_coalescer: WakeupCoalescer,
    memory_trimmer: MemoryTrimmer,
}

/// What a signal asks for.
pub(crate) enum SignalRequest {
    End(Signal),
    /// To read the configuration again.
    Reload,
}

/// The event for a reload of the configuration.
pub(crate) fn reload_event(reloaded: &Result<ReloadReport, String>) -> ControlEvent {
    match reloaded {
        Ok(ReloadReport { links, classes, restart }) => {
            ControlEvent::ConfigurationRead { links: *links, classes: *classes, restart: restart.clone() }
        }
        Err(reason) => ControlEvent::ConfigurationRefused { reason: reason.as_str().into() },
    }
}

/// The event for a signal that ends this process.
pub(crate) fn signal_event(signal: Signal) -> ControlEvent {
    let signal = match signal {
        Signal::Interrupt => "SIGINT",
        Signal::Terminate => "SIGTERM",
        Signal::Hangup => "SIGHUP",
        // Other signals are not waited for.
        _ => "a signal",
    };
    ControlEvent::Ending { signal: signal.into() }
}

/// What a turn starts with.
pub(crate) struct Iteration {
    pub(crate) now: Instant,
    /// This process did not run for a while.
    pub(crate) stalled: bool,
    pub(crate) ready: Vec<Event>,
}

impl EventLoop {
    /// For the main thread. To be called before any other is started, so that all of them leave
    /// signals to this one.
    pub(crate) fn new() -> Result<Self, EngineError> {
        reduce_timer_slack();
        let signals = Signals::new(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup])
            .map_err(EngineError::io("take over signals"))?;
        let mut event_loop = Self::without_signals()?;
        event_loop
            .poller
            .add(&signals, SIGNAL_TOKEN, Interest::Read)
            .map_err(EngineError::io("watch a descriptor"))?;
        event_loop.signals = Some(signals);
        Ok(event_loop)
    }

    /// For another thread; may be made before that is started.
    pub(crate) fn without_signals() -> Result<Self, EngineError> {
        let wake = PollWaker::new().map_err(EngineError::io("make an eventfd"))?;
        let poller = Poller::new().map_err(EngineError::io("make an epoll instance"))?;
        poller.add(&wake, WAKE_TOKEN, Interest::Read).map_err(EngineError::io("watch a descriptor"))?;
        Ok(Self {
            poller,
            events: Events::with_capacity(64),
            signals: None,
            has_terminal: io::stdin().is_terminal(),
            wake,
            previous_end: Instant::now(),
            wakeup_coalescer: WakeupCoalescer::default(),
            memory_trimmer: MemoryTrimmer::new(Instant::now()),
        })
    }

    /// Waits for something to do, at most until `deadline`.
    pub(crate) fn wait(
        &mut self,
        deadline: Option<Instant>,
        iteration: &mut Iteration,
    ) -> Result<(), EngineError> {
        let mut start = Instant::now();
        let mut busy = start.saturating_duration_since(self.previous_end);
        // Where this is not the main thread the memory may be that of an app.
        if self.signals.is_some() && self.memory_trimmer.on_iteration(start, busy) {
            memory::trim_heap();
            let end = Instant::now();
            tracing::debug!(took = ?end.saturating_duration_since(start), "gave memory back");
            (start, busy) = (end, end.saturating_duration_since(self.previous_end));
        }
        if let Some(delay) = self.wakeup_coalescer.delay(start) {
            thread::sleep(delay);
            start = Instant::now();
        }
        let wait = deadline.map_or(MAX_WAIT, |at| at.saturating_duration_since(start).min(MAX_WAIT));
        self.poller.wait(&mut self.events, Some(wait)).map_err(EngineError::io("wait for events"))?;
        iteration.now = Instant::now();
        let waited = iteration.now.saturating_duration_since(start);
        self.wakeup_coalescer.on_wakeup(start, iteration.now);
        iteration.stalled = busy > MIN_LOCAL_STALL || waited > wait + MIN_LOCAL_STALL;
        iteration.ready.clear();
        iteration.ready.extend(self.events.iter());
        self.previous_end = iteration.now;
        Ok(())
    }

    /// What a signal that has arrived in this turn asks for.
    pub(crate) fn signal_request(&self, iteration: &Iteration) -> Option<SignalRequest> {
        if iteration.ready.iter().all(|event| event.token != SIGNAL_TOKEN) {
            return None;
        }
        match self.signals.as_ref()?.next().ok().flatten()? {
            // Of a terminal that is closed it is the end of all that runs in it.
            Signal::Hangup if !self.has_terminal => Some(SignalRequest::Reload),
            signal => Some(SignalRequest::End(signal)),
        }
    }
}

impl Iteration {
    pub(crate) fn new() -> Self {
        Self { now: Instant::now(), stalled: false, ready: Vec::new() }
    }
}
