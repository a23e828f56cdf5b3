//! Logging: set up once, written to stderr.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::LogLevel;

/// Sends the log to stderr, filtered by `level`; the environment variable `RUST_LOG` overrides it, and lines then show their
/// target. Colours only on a terminal. A second call changes nothing.
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
        tracing::warn!(
            "the environment variable RUST_LOG is not understood, so the level is `{level}`: {error}"
        );
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
