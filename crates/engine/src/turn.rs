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

use crate::{EngineError, moderation::Moderation, thrift::Thrift};

/// The TUN device.
pub(crate) const TUN: u64 = 0;
/// Another thread has a message.
pub(crate) const WAKE: u64 = 1;
/// A signal arrived.
const SIGNAL: u64 = 2;
/// News about links.
pub(crate) const MONITOR: u64 = 3;
/// The TUN devices of classes have tokens from here on, as many as there are classes.
pub(crate) const CLASS_TUNS: u64 = 4;
/// UDP sockets have tokens from here on.
pub(crate) const SOCKETS: u64 = 16;

/// A wait that ended this much later than asked, or work that took as long, means that silence of
/// others may have been our own.
const OVERSLEPT: Duration = Duration::from_millis(40);
/// The longest wait: what nobody foresaw is found after it.
const LONGEST: Duration = Duration::from_secs(5);

/// Waiting for events.
pub(crate) struct Turns {
    pub(crate) poller: Poller,
    events: Events,
    /// Only the main thread has them.
    signals: Option<Signals>,
    in_terminal: bool,
    pub(crate) wake: PollWaker,
    before: Instant,
    moderation: Moderation,
    thrift: Thrift,
}

/// What a signal asks for.
pub(crate) enum Told {
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
pub(crate) fn end_event(signal: Signal) -> ControlEvent {
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
pub(crate) struct Turn {
    pub(crate) now: Instant,
    /// This process did not run for a while.
    pub(crate) overslept: bool,
    pub(crate) ready: Vec<Event>,
}

impl Turns {
    /// For the main thread. To be called before any other is started, so that all of them leave
    /// signals to this one.
    pub(crate) fn new() -> Result<Self, EngineError> {
        reduce_timer_slack();
        let signals = Signals::new(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup])
            .map_err(EngineError::io("take over signals"))?;
        let mut turns = Self::without_signals()?;
        turns.poller.add(&signals, SIGNAL, Interest::Read).map_err(EngineError::io("watch a descriptor"))?;
        turns.signals = Some(signals);
        Ok(turns)
    }

    /// For another thread; may be made before that is started.
    pub(crate) fn without_signals() -> Result<Self, EngineError> {
        let wake = PollWaker::new().map_err(EngineError::io("make an eventfd"))?;
        let poller = Poller::new().map_err(EngineError::io("make an epoll instance"))?;
        poller.add(&wake, WAKE, Interest::Read).map_err(EngineError::io("watch a descriptor"))?;
        Ok(Self {
            poller,
            events: Events::with_capacity(64),
            signals: None,
            in_terminal: io::stdin().is_terminal(),
            wake,
            before: Instant::now(),
            moderation: Moderation::default(),
            thrift: Thrift::new(Instant::now()),
        })
    }

    /// Waits for something to do, at most until `deadline`.
    pub(crate) fn next(&mut self, deadline: Option<Instant>, turn: &mut Turn) -> Result<(), EngineError> {
        let mut start = Instant::now();
        let mut worked = start.saturating_duration_since(self.before);
        // Where this is not the main thread the memory may be that of an app.
        if self.signals.is_some() && self.thrift.worked(start, worked) {
            memory::trim_heap();
            let end = Instant::now();
            tracing::debug!(took = ?end.saturating_duration_since(start), "gave memory back");
            (start, worked) = (end, end.saturating_duration_since(self.before));
        }
        if let Some(rest) = self.moderation.rest(start) {
            thread::sleep(rest);
            start = Instant::now();
        }
        let wait = deadline.map_or(LONGEST, |at| at.saturating_duration_since(start).min(LONGEST));
        self.poller.wait(&mut self.events, Some(wait)).map_err(EngineError::io("wait for events"))?;
        turn.now = Instant::now();
        let waited = turn.now.saturating_duration_since(start);
        self.moderation.turn(start, turn.now);
        turn.overslept = worked > OVERSLEPT || waited > wait + OVERSLEPT;
        turn.ready.clear();
        turn.ready.extend(self.events.iter());
        self.before = turn.now;
        Ok(())
    }

    /// What a signal that has arrived in this turn asks for.
    pub(crate) fn told(&self, turn: &Turn) -> Option<Told> {
        if turn.ready.iter().all(|event| event.token != SIGNAL) {
            return None;
        }
        match self.signals.as_ref()?.next().ok().flatten()? {
            // Of a terminal that is closed it is the end of all that runs in it.
            Signal::Hangup if !self.in_terminal => Some(Told::Reload),
            signal => Some(Told::End(signal)),
        }
    }
}

impl Turn {
    pub(crate) fn new() -> Self {
        Self { now: Instant::now(), overslept: false, ready: Vec::new() }
    }
}
