//! `mpvpn events`: prints the event log of a running server or client, and runs a program for each event.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use mpvpn_os::program::run_with_facts;
use mpvpn_status::events::{EventKind, LoggedEvent};
use serde_json::Value;
use time::{
    Date, Duration, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset,
    format_description::{BorrowedFormatItem, well_known::Rfc3339},
    macros::format_description,
};

use super::Command;
use crate::{
    failure::Failure,
    output::print,
    process_selector::{ProcessSelector, help_for_any_role},
};

/// How long a program for an event may take. Longer: a program that hangs holds the later events up for
/// longer; shorter: a message by a slow link does not leave. Chosen.
const RUN_TIME: std::time::Duration = std::time::Duration::from_secs(30);

const EXAMPLES: &str = "\
Examples:
  mpvpn events
      the last 1,000 events of each kind, the latest at the end
  mpvpn events --since 14:02 --until 14:03
      the events of the minute 14:02
  mpvpn events --kind path,transport --since 10m --follow
      events of paths and transport since ten minutes ago, and new ones until Ctrl-C
  mpvpn events --verbose
      also the details of each event: paths, TCP connections, classes, capacities
  mpvpn events --json
      all of them, one JSON object a line, with times in UTC
  mpvpn events --follow --kind link --run /usr/local/bin/tell-me
      run a program for each new event of a link; `env` as the program shows what it is told
  curl -N --unix-socket /run/mpvpn/client-mpvpn0.sock 'http://localhost/v1/events?follow'

An event that repeats another one within a minute is merged with it: `(5 times since 14:02:03.120)`.
TIME is local: `14:02`, `14:02:30`, `2026-01-31`, or `2026-01-31 14:02`; as in RFC 3339; or a time
ago: `90s`, `10m`, `2h`, `3d`. A time without a date is the latest such time before now.";

/// Show what changed and why: links, paths, transport, classes, capacity, sessions
#[derive(Debug, Parser)]
#[command(name = "events", after_help = EXAMPLES, mut_arg("name", help_for_any_role))]
pub(crate) struct Events {
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Print new events as they happen, until Ctrl-C or the end of the process
    #[arg(long)]
    follow: bool,
    /// Run a program for each event, with what is known of it in the environment: MPVPN_EVENT, MPVPN_TEXT,
    /// MPVPN_LINK and so on, as --json names it. Only for new events, unless --since is given. One runs at a
    /// time, for 30 s at most
    #[arg(long, value_name = "FILE", requires = "follow", conflicts_with = "json")]
    run: Option<PathBuf>,
    /// Print details, too: events that follow from others, and those of paths, TCP connections, classes and
    /// capacities; they are also printed with --kind and in JSON
    #[arg(long)]
    verbose: bool,
    /// Only events at this time or later
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<OffsetDateTime>,
    /// Only events before this time
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "follow")]
    until: Option<OffsetDateTime>,
    /// Only events of these kinds, separated by commas: link, path, transport, pipes, class, capacity,
    /// session, kill_switch, certificate, configuration, dashboard, log
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    kind: Vec<EventKind>,
    #[command(flatten)]
    target: ProcessSelector,
}

impl Command for Events {
    const SUMMARY: &str = "cannot show the events";

    fn run(mut self) -> Result<ExitCode, Failure> {
        let socket = self.target.socket()?;
        if self.run.is_some() {
            self.since.get_or_insert_with(OffsetDateTime::now_utc);
        }
        if !self.follow {
            let lines = mpvpn_api::fetch_events(&socket)?;
            let shown: String = lines.lines().filter_map(|line| self.show(line)).collect();
            return print(&shown);
        }
        let mut outcome = Ok(ExitCode::SUCCESS);
        let take = |line: &str| {
            let Some(shown) = self.show(line) else { return ControlFlow::Continue(()) };
            outcome = print(&shown);
            if let Some(program) = &self.run {
                run_for(program, line);
            }
            if outcome.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        mpvpn_api::follow_events(&socket, take)?;
        outcome?;
        let why = format!("the process at {} has ended", socket.display());
        Err(Failure::runtime(why, "start the process again, then this command").about("no more events"))
    }
}

impl Events {
    /// The output for a line of the event log; `None` if it is filtered out.
    fn show(&self, line: &str) -> Option<String> {
        let event = LoggedEvent::parse(line)?;
        let at = |time: &str| OffsetDateTime::parse(time, &Rfc3339).ok();
        let (first, last) = (at(&event.first), at(&event.last));
        let is_early = |since: OffsetDateTime| last.is_some_and(|last| last < since);
        let is_late = |until: OffsetDateTime| first.is_some_and(|first| first >= until);
        if self.since.is_some_and(is_early)
            || self.until.is_some_and(is_late)
            || !self.kind.is_empty() && self.kind.iter().all(|wanted| wanted.as_str() != event.kind)
        {
            return None;
        }
        if self.json {
            return Some(format!("{line}\n"));
        }
        // Where kinds are asked for, nothing else tells of them.
        if event.detail && !self.verbose && self.kind.is_empty() {
            return None;
        }
        let LoggedEvent { kind, count, text, .. } = event;
        let repeated = match first {
            Some(first) if count > 1 => format!(" ({count} times since {})", format_local(first, last)),
            _ => String::new(),
        };
        let last = last.map_or_else(String::new, |last| format_local(last, None));
        Some(format!("{last:23}  {kind:13}  {text}{repeated}\n"))
    }
}

/// Runs a program of the user for an event; a failure is said and nothing more.
fn run_for(program: &Path, line: &str) {
    if let Err(why) = run_with_facts(program, facts(line), RUN_TIME) {
        eprintln!("mpvpn: {}: {why}", program.display());
    }
}

/// The facts about an event as variables of the environment; those that cannot be one are left out.
fn facts(line: &str) -> Vec<(String, String)> {
    let fact = |(key, value): (String, Value)| {
        let value = match value {
            Value::String(text) => text.replace('\0', ""),
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            Value::Null | Value::Array(_) | Value::Object(_) => return None,
        };
        Some((format!("MPVPN_{}", key.to_ascii_uppercase()), value))
    };
    let fields = serde_json::from_str::<serde_json::Map<_, _>>(line).unwrap_or_default();
    fields.into_iter().filter_map(fact).collect()
}

const DATE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
const MINUTE: &[BorrowedFormatItem<'_>] = format_description!("[hour]:[minute]");
const SECOND: &[BorrowedFormatItem<'_>] = format_description!("[hour]:[minute]:[second]");
const MILLISECOND: &[BorrowedFormatItem<'_>] =
    format_description!("[hour]:[minute]:[second].[subsecond digits:3]");

/// A time of an event (RFC 3339) as local time of day; the text itself if it is no time.
pub(crate) fn format_local_time(at: &str) -> String {
    let parsed = OffsetDateTime::parse(at, &Rfc3339).ok();
    parsed.and_then(|at| to_local(at).format(MILLISECOND).ok()).unwrap_or_else(|| at.to_owned())
}

/// A time as local time of day, to the second.
pub(crate) fn local_time_of_day(at: std::time::SystemTime) -> String {
    to_local(at.into()).format(SECOND).unwrap_or_default()
}

/// Formats a time as local time, without the date if `beside` has the same date.
fn format_local(at: OffsetDateTime, beside: Option<OffsetDateTime>) -> String {
    let (at, beside) = (to_local(at), beside.map(to_local));
    let time = at.format(MILLISECOND).unwrap_or_default();
    match beside.is_some_and(|beside| beside.date() == at.date()) {
        true => time,
        false => format!("{} {time}", at.format(DATE).unwrap_or_default()),
    }
}

/// Converts a time to the time zone of this machine, or to UTC if that is unknown.
fn to_local(at: OffsetDateTime) -> OffsetDateTime {
    at.to_offset(UtcOffset::local_offset_at(at).unwrap_or(UtcOffset::UTC))
}

fn parse_time(text: &str) -> Result<OffsetDateTime, String> {
    parse_time_at(OffsetDateTime::now_utc(), text, to_local)
}

/// Parses a time that was given at `now`; `to_local` converts to local time.
fn parse_time_at(
    now: OffsetDateTime,
    text: &str,
    to_local: impl Fn(OffsetDateTime) -> OffsetDateTime,
) -> Result<OffsetDateTime, String> {
    if let Ok(exact) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(exact);
    }
    if let Some(ago) = parse_duration(text) {
        return now.checked_sub(ago).ok_or_else(|| format!("`{text}` is too long ago"));
    }
    let time_of_day = |text: &str| Time::parse(text, SECOND).or_else(|_| Time::parse(text, MINUTE)).ok();
    // The offset of a local time is taken from a moment at most some hours away: it is wrong only while
    // clocks change.
    let local_time = |date: Date, time: Time| {
        let guess = PrimitiveDateTime::new(date, time).assume_offset(to_local(now).offset());
        PrimitiveDateTime::new(date, time).assume_offset(to_local(guess).offset())
    };
    if let Some(time) = time_of_day(text) {
        let today = to_local(now).date();
        let at = local_time(today, time);
        let yesterday = today.previous_day().filter(|_| at > now);
        return Ok(yesterday.map_or(at, |yesterday| local_time(yesterday, time)));
    }
    let (date, time) = text.split_once([' ', 'T']).unwrap_or((text, "00:00"));
    match (Date::parse(date, DATE), time_of_day(time)) {
        (Ok(date), Some(time)) => Ok(local_time(date, time)),
        _ => Err(format!("`{text}` is not a time: expected one as in 14:02, \"2026-01-31 14:02:30\" or 10m")),
    }
}

/// Parses a duration: `90s`, `10m`, `2h`, `3d`.
fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    let number: u32 = number.parse().ok()?;
    Some(Duration::seconds(i64::from(number) * seconds))
}

#[cfg(test)]
mod tests {
    use time::macros::{datetime, offset};

    use super::*;

    const LINE: &str = concat!(
        r#"{"number":7,"kind":"path","first":"2026-09-21T14:02:03.120Z","last":"2026-09-21T14:02:09.007Z","#,
        r#""count":5,"event":"path_failed","colour":"blue","text":"eth1 failed"}"#
    );

    fn events(words: &[&str]) -> Events {
        Events::try_parse_from([&["events"], words].concat()).unwrap()
    }

    #[test]
    fn times_are_parsed_as_people_write_them() {
        let now = datetime!(2026-09-21 14:30:00 UTC);
        let of = |text: &str| parse_time_at(now, text, |at| at.to_offset(offset!(+2)));
        for (text, expected) in [
            ("16:02", datetime!(2026-09-21 14:02 UTC)),
            ("16:02:30", datetime!(2026-09-21 14:02:30 UTC)),
            // Later than now: yesterday.
            ("17:00", datetime!(2026-09-20 15:00 UTC)),
            ("2026-09-01", datetime!(2026-08-31 22:00 UTC)),
            ("2026-09-01 10:15", datetime!(2026-09-01 08:15 UTC)),
            ("2026-09-01T10:15:01", datetime!(2026-09-01 08:15:01 UTC)),
            ("2026-09-01T10:15:00Z", datetime!(2026-09-01 10:15 UTC)),
            ("90s", datetime!(2026-09-21 14:28:30 UTC)),
            ("10m", datetime!(2026-09-21 14:20 UTC)),
            ("2h", datetime!(2026-09-21 12:30 UTC)),
            ("3d", datetime!(2026-09-18 14:30 UTC)),
        ] {
            assert_eq!(of(text), Ok(expected), "{text}");
        }
        for text in ["", "m", "noon", "25:00", "2026-13-01", "-5m", "10m 2s", "é", "99999999999s"] {
            assert!(of(text).unwrap_err().contains("is not a time"), "{text}");
        }
    }

    #[test]
    fn events_are_filtered_by_time_and_kind() {
        let shown = |words: &[&str]| events(words).show(LINE);
        // The local time depends on the machine.
        let line = shown(&[]).unwrap();
        assert!(line.contains("  path           eth1 failed (5 times since "), "{line}");
        assert_eq!(shown(&["--json"]), Some(format!("{LINE}\n")));
        for (words, expected) in [
            (&["--since", "2026-09-21T14:02:09Z"][..], true),
            (&["--since", "2026-09-21T14:02:10Z"], false),
            (&["--until", "2026-09-21T14:02:04Z"], true),
            (&["--until", "2026-09-21T14:02:03.120Z"], false),
            (&["--kind", "link,path"], true),
            (&["--kind", "link", "--kind", "session"], false),
        ] {
            assert_eq!(shown(words).is_some(), expected, "{words:?}");
        }
        assert_eq!(events(&[]).show("no JSON"), None);
        let missed = r#"{"kind":"log","event":"missed","text":"events are missing here"}"#;
        let text = events(&["--since", "2h"]).show(missed).unwrap();
        assert_eq!(text.trim(), "log            events are missing here");
    }

    #[test]
    fn a_program_is_told_what_is_known_of_an_event() {
        let told = facts(LINE);
        let of = |name: &str| told.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        assert_eq!(of("MPVPN_EVENT"), Some("path_failed"));
        assert_eq!(of("MPVPN_COUNT"), Some("5"));
        assert_eq!(
            facts(r#"{"text":"a\u0000b","paths":[1],"rtt":null}"#),
            [("MPVPN_TEXT".to_owned(), "ab".to_owned())]
        );
        assert!(facts("no JSON").is_empty());
        assert!(Events::try_parse_from(["events", "--run", "/bin/true"]).is_err(), "without --follow");
    }

    #[test]
    fn an_unknown_kind_is_answered_with_the_known_ones() {
        let error = Events::try_parse_from(["events", "--kind", "colour"]).unwrap_err().to_string();
        assert!(error.contains("`colour` is none of: link, path, transport, pipes, class"), "{error}");
    }
}
