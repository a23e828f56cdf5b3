//! The live screen of `mpvpn top`.
//!
//! In: the status, the flows and the events of a running process, and keys. Out: a screen drawn on the
//! terminal. Always holds: everything but this file is pure, so that each screen is a function of what
//! arrived and which keys were pressed; what is kept is bounded; when the process goes away, the screen
//! stays, says so, and goes on when the process is back.

mod draw;
mod event_list;
mod screen;
mod sheet;
mod views;

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use mpvpn_status::{FlowList, Status};
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use self::screen::{Effect, Screen};
use crate::failure::Failure;

/// Time between two attempts to follow the events of a process that is away.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time in which keys are looked for before the screen is drawn again: longer delays what arrives, shorter
/// costs CPU.
const KEY_INTERVAL: Duration = Duration::from_millis(50);

/// An arrival from the process.
enum Arrival {
    Status(Box<Status>),
    Flows(FlowList),
    /// A line of the event log.
    Event(String),
    /// Why there is no status.
    Away(String),
}

/// Shows the process at `socket` until a key ends it; measures every `interval`.
pub(crate) fn run(socket: &Path, interval: Duration) -> Result<ExitCode, Failure> {
    // A process that cannot be asked at all is an error, not a screen.
    let first = mpvpn_api::fetch_status(socket)?;
    let (sender, arrivals) = mpsc::channel();
    let wants_flows = Arc::new(AtomicBool::new(false));
    start_reader(socket.into(), interval, Arc::clone(&wants_flows), sender.clone());
    start_follower(socket.into(), sender);

    let mut screen = Screen::new(draws_blocks(), std::env::var_os("NO_COLOR").is_none());
    screen.on_status(first);
    let mut terminal = ratatui::try_init().map_err(|error| terminal_failure(&error))?;
    let outcome = loop {
        wants_flows.store(screen.shows_flows(), Ordering::Relaxed);
        if let Err(error) = terminal.draw(|frame| draw::draw(&screen, frame)) {
            break Err(terminal_failure(&error));
        }
        match next_change(&arrivals, &mut screen) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break Ok(ExitCode::SUCCESS),
            Err(error) => break Err(terminal_failure(&error)),
        }
    };
    ratatui::restore();
    outcome
}

/// Waits until a key or an arrival changes the screen.
fn next_change(arrivals: &mpsc::Receiver<Arrival>, screen: &mut Screen) -> std::io::Result<ControlFlow<()>> {
    loop {
        let mut changed = false;
        while event::poll(Duration::ZERO)? {
            changed = true;
            if let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && screen.on_key(key) == Effect::End
            {
                return Ok(ControlFlow::Break(()));
            }
        }
        let mut wait = if changed { Duration::ZERO } else { KEY_INTERVAL };
        loop {
            match arrivals.recv_timeout(wait) {
                Ok(Arrival::Status(status)) => screen.on_status(*status),
                Ok(Arrival::Flows(flows)) => screen.on_flows(flows),
                Ok(Arrival::Event(line)) => screen.on_event(&line),
                Ok(Arrival::Away(why)) => screen.on_away(why),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Ok(ControlFlow::Break(())),
            }
            (changed, wait) = (true, Duration::ZERO);
        }
        if changed {
            return Ok(ControlFlow::Continue(()));
        }
    }
}

/// Asks for the status every `interval`, and for the flows while the screen shows them.
fn start_reader(socket: PathBuf, interval: Duration, wants_flows: Arc<AtomicBool>, to: Sender<Arrival>) {
    thread::spawn(move || {
        loop {
            let started = Instant::now();
            let arrived = match mpvpn_api::fetch_status(&socket) {
                Ok(status) => Arrival::Status(Box::new(status)),
                Err(error) => Arrival::Away(error.to_string()),
            };
            if to.send(arrived).is_err() {
                return;
            }
            if wants_flows.load(Ordering::Relaxed)
                && let Ok(flows) = mpvpn_api::fetch_flows(&socket)
            {
                let _ = to.send(Arrival::Flows(flows));
            }
            thread::sleep(interval.saturating_sub(started.elapsed()));
        }
    });
}

/// Follows the events; when the process goes away, again after [`RETRY_INTERVAL`].
fn start_follower(socket: PathBuf, to: Sender<Arrival>) {
    thread::spawn(move || {
        loop {
            let take = |line: &str| match to.send(Arrival::Event(line.to_owned())) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            let _ = mpvpn_api::follow_events(&socket, take);
            thread::sleep(RETRY_INTERVAL);
        }
    });
}

/// Whether the terminal shows block characters: its locale is UTF-8, and it is not the console of a PC.
fn draws_blocks() -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .map(std::env::var)
        .into_iter()
        .flatten()
        .find(|value| !value.is_empty());
    let is_utf8 = locale.is_some_and(|locale| locale.to_lowercase().replace('-', "").contains("utf8"));
    is_utf8 && std::env::var("TERM").is_ok_and(|terminal| terminal != "linux")
}

fn terminal_failure(error: &std::io::Error) -> Failure {
    Failure::runtime(format!("the terminal: {error}"), "run it in another terminal, or see `mpvpn status`")
}

#[cfg(test)]
mod tests;
