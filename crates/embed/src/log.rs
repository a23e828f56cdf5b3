//! The log of a tunnel, line by line, for apps that have no subscriber of `tracing`.

use std::{
    fmt::{self, Write},
    sync::LazyLock,
};

use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
    subscriber::NoSubscriber,
};

pub use tracing::Level;

/// Receives a log line: level, target, and message with fields.
type Sink = Box<dyn Fn(Level, &str, &str) + Send + Sync>;

/// Passes log lines of a level up to `max_level` to `sink`.
struct LineSubscriber {
    max_level: Level,
    sink: Sink,
}

/// A second subscriber, which is interested in nothing and lives as long as the process.
///
/// With a single subscriber, `tracing` caches the interest of the first thread that reaches an event for all
/// threads: if that is a thread of the app without a subscriber, the event is disabled for the threads of
/// tunnels, too.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// Returns a subscriber that passes log lines of a level up to `max_level` to `sink`.
pub(crate) fn subscriber(max_level: Level, sink: Sink) -> Dispatch {
    LazyLock::force(&SECOND_SUBSCRIBER);
    Dispatch::new(LineSubscriber { max_level, sink })
}

impl Subscriber for LineSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.max_level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.max_level.into())
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        (self.sink)(*metadata.level(), metadata.target(), &(line.message + &line.fields));
    }

    // Spans are not enabled.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn an_event_that_a_thread_of_the_app_reaches_first_is_logged() {
        fn event() {
            tracing::info!("link up");
        }
        let got = Arc::new(Mutex::new(0));
        let count = got.clone();
        let log = subscriber(Level::INFO, Box::new(move |_, _, _| *count.lock().unwrap() += 1));
        std::thread::scope(|scope| {
            scope.spawn(event);
        });
        tracing::dispatcher::with_default(&log, event);
        assert_eq!(*got.lock().unwrap(), 1);
    }

    #[test]
    fn lines_have_their_fields_and_those_below_the_level_are_left_out() {
        let got = Arc::new(Mutex::new(Vec::new()));
        let put = got.clone();
        let sink = move |level: Level, target: &str, line: &str| {
            put.lock().unwrap().push(format!("{level} {target} {line}"));
        };
        tracing::dispatcher::with_default(&subscriber(Level::INFO, Box::new(sink)), || {
            tracing::info!(target: "here", link = %"eth0", mtu = 1400, "link up");
            tracing::debug!("a detail");
        });
        assert_eq!(*got.lock().unwrap(), ["INFO here link up link=eth0 mtu=1400"]);
    }
}
