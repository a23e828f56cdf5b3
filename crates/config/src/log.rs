//! Logging: set up once, written to stderr. Its level may change later.

use std::{io::IsTerminal, sync::OnceLock};

use tracing_subscriber::EnvFilter;

use crate::LogLevel;

/// Replaces the filter of the log.
type SetFilter = Box<dyn Fn(EnvFilter) + Send + Sync>;

/// Empty until the log is set up, and where `RUST_LOG` is the filter.
static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

/// Sends the log to stderr, filtered by `level`; the environment variable `RUST_LOG` overrides it, and lines
/// then show their target. Colours only on a terminal. A second call changes nothing.
pub fn init(level: LogLevel) {
    let asked = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let parsed = asked.as_ref().map(EnvFilter::try_new);
    let (filter, mistake) = match parsed {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(directives(level)), Some(error)),
        None => (EnvFilter::new(directives(level)), None),
    };
    let is_fixed = asked.is_some() && mistake.is_none();
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // The library would report a line that cannot be written by `eprintln!`, which panics for the same
        // reason: a full disk would end the process.
        .log_internal_errors(false)
        .with_ansi(colours)
        .with_target(asked.is_some() || matches!(level, LogLevel::Debug | LogLevel::Trace))
        .with_filter_reloading();
    let filter = log.reload_handle();
    let set = log.try_init();
    if set.is_ok() && !is_fixed {
        let _ = SET_FILTER.set(Box::new(move |new| {
            // Fails only after the log has gone.
            let _ = filter.reload(new);
        }));
    }
    if let (Ok(()), Some(error)) = (set, mistake) {
        tracing::warn!(
            "the environment variable RUST_LOG is not understood, so the level is `{level}`: {error}"
        );
    }
}

/// Changes the level of the log. Does nothing where `RUST_LOG` says what is logged.
pub fn set_level(level: LogLevel) {
    if let Some(set) = SET_FILTER.get() {
        set(EnvFilter::new(directives(level)));
    }
}

/// The filter for a level: at INFO, libraries log warnings only.
fn directives(level: LogLevel) -> String {
    match level {
        LogLevel::Info => "warn,mpvpn=info".into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_makes_a_filter() {
        for level in [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace] {
            assert!(EnvFilter::try_new(directives(level)).is_ok(), "{level}");
        }
    }
}
