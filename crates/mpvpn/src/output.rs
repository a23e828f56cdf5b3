//! Output of commands.

use std::{
    io::{ErrorKind, IsTerminal, Write},
    ops::{ControlFlow, RangeInclusive},
    process::ExitCode,
    time::Duration,
};

use crate::failure::Failure;

/// Returns a line of JSON.
pub(crate) fn json_line(written: serde_json::Result<String>) -> Result<String, Failure> {
    let json = written
        .map_err(|error| Failure::runtime(error.to_string(), "this is a bug: report it to the project"))?;
    Ok(format!("{json}\n"))
}

/// Columns of the terminal; no limit where the output goes elsewhere.
pub(crate) fn width() -> usize {
    if !std::io::stdout().is_terminal() {
        return usize::MAX;
    }
    terminal_size::terminal_size().map_or(usize::MAX, |(width, _)| usize::from(width.0))
}

/// Writes to stdout. A closed pipe is not a failure.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    print_part(text).map(|_| ExitCode::SUCCESS)
}

/// Writes a part of an output without end. [`ControlFlow::Break`] if the pipe is closed, so that nobody reads
/// the rest.
pub(crate) fn print_part(text: &str) -> Result<ControlFlow<()>, Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(Failure::runtime(error.to_string(), "check where the output goes")
            .about("cannot write to stdout")),
    }
}

/// Parses a number of seconds within bounds.
pub(crate) fn parse_seconds(text: &str, bounds: RangeInclusive<f64>) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| bounds.contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("`{text}` is not a number from {} to {}", bounds.start(), bounds.end()))
}

/// Asks a question at the terminal. Anything else than yes is no.
pub(crate) fn confirm(question: &str) -> std::io::Result<bool> {
    let answer = ask(question, "y/N")?;
    Ok(matches!(answer.to_lowercase().as_str(), "y" | "yes"))
}

/// Asks a question at the terminal; no answer is `default`.
pub(crate) fn ask(question: &str, default: &str) -> std::io::Result<String> {
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{question} [{default}] ")?;
    stdout.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    let answer = answer.trim();
    Ok(if answer.is_empty() { default } else { answer }.to_owned())
}
