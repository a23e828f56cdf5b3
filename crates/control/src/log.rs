//! Logging: set up once, written to stderr, and never flooded.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use tracing_subscriber::EnvFilter;

use crate::config::LogLevel;

/// Sends the log to stderr: what `level` says, unless `RUST_LOG` says otherwise, which also shows the targets
/// that can be written there. Colours only on a terminal. A second call changes nothing.
pub fn init(level: LogLevel) {
    let asked = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let parsed = asked.as_ref().map(EnvFilter::try_new);
    let (filter, mistake) = match parsed {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(directives(level)), Some(error)),
        None => (EnvFilter::new(directives(level)), None),
    };
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let set = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .with_target(asked.is_some() || matches!(level, LogLevel::Debug | LogLevel::Trace))
        .try_init();
    if let (Ok(()), Some(error)) = (set, mistake) {
        tracing::warn!("RUST_LOG is not understood, `{level}` is used: {error}");
    }
}

/// Libraries say more than a person wants to know: below debug only their warnings count.
fn directives(level: LogLevel) -> String {
    match level {
        LogLevel::Info => "warn,mpvpn=info".into(),
        other => other.to_string(),
    }
}

/// Lets one of many equal warnings through per period.
#[derive(Debug)]
pub struct RateLimit {
    period: Duration,
    last: Option<Instant>,
    held_back: u64,
}

impl RateLimit {
    /// One warning per `period`.
    pub const fn new(period: Duration) -> Self {
        Self { period, last: None, held_back: 0 }
    }

    /// Whether to warn at `now`; if so, how many warnings were held back since the last one.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < self.period) {
            self.held_back += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_a_period_passes_and_counts_the_others() {
        let mut limit = RateLimit::new(Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limit.pass(at(0)), Some(0));
        assert_eq!(limit.pass(at(1)), None);
        assert_eq!(limit.pass(at(9)), None);
        assert_eq!(limit.pass(at(10)), Some(2));
        assert_eq!(limit.pass(at(5)), None, "time that runs backwards is no reason to warn");
        assert_eq!(limit.pass(at(20)), Some(1));
    }

    #[test]
    fn every_level_makes_a_filter() {
        for level in [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace] {
            assert!(EnvFilter::try_new(directives(level)).is_ok(), "{level}");
        }
    }
}
