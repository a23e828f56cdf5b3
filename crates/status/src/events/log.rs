//! The last events of each kind, in memory. Time is an argument.
//!
//! In: events with their times. Out: the entries after a number, in order. Always holds: each kind keeps at
//! most [`MAX_ENTRIES_PER_KIND`] entries, so that frequent events of one kind do not evict those of another;
//! an event that repeats a recent one of its kind is merged into its entry; a changed entry gets a new
//! number, so that readers see it again.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize, Serializer};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::{
    Event, EventKind,
    outages::{Outages, Verdict},
};

/// Entries kept of each kind. At about 300 bytes each, all twelve kinds together take 3.6 MB at most.
pub const MAX_ENTRIES_PER_KIND: usize = 1000;
/// Entries of its kind with which a new event is compared. A flapping link makes about four events each time,
/// so with fewer the events of several links would not be merged; with more, a rare event would be listed at
/// its last time only.
const MERGE_CANDIDATES: usize = 16;
/// An event is merged with one that happened at most this long before. A shorter time would list every retry
/// of what is tried every 15 to 30 s; a longer one would hide when the second event happened.
const MERGE_WINDOW: Duration = Duration::from_secs(60);

/// RFC 3339 in UTC, with ms.
const RFC_3339: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");

/// An event, with its times and its count.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Later entries have higher numbers.
    pub number: u64,
    /// Its kind.
    pub kind: EventKind,
    /// When it happened first (RFC 3339, UTC, ms).
    #[serde(serialize_with = "rfc_3339")]
    pub first: SystemTime,
    /// When it happened last.
    #[serde(serialize_with = "rfc_3339")]
    pub last: SystemTime,
    /// How often it happened.
    pub count: u64,
    /// Whether it follows from an event that is listed: people see it only if they ask for details.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub detail: bool,
    /// The event, and its sentence.
    #[serde(flatten)]
    pub sentence: Sentence,
}

/// An event with the end of its sentence. The sentence is made when someone reads it.
#[derive(Clone, Debug, derive_more::Display, PartialEq)]
#[display("{event}{end}")]
pub struct Sentence {
    /// The event, with the figures of the last time.
    pub event: Event,
    /// The outage that it ended, and how long that lasted; empty if it ended none.
    end: Box<str>,
}

impl Serialize for Sentence {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct WithText<'a> {
            #[serde(flatten)]
            event: &'a Event,
            text: String,
        }
        WithText { event: &self.event, text: self.to_string() }.serialize(serializer)
    }
}

/// An [`Entry`] as other programs read it. A newer process may report kinds and fields that are unknown here.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct LoggedEvent {
    /// Later entries have higher numbers.
    #[serde(default)]
    pub number: u64,
    /// Its kind.
    pub kind: String,
    /// When it happened first (RFC 3339, UTC, ms).
    #[serde(default)]
    pub first: String,
    /// When it happened last.
    #[serde(default)]
    pub last: String,
    /// How often it happened.
    #[serde(default = "once")]
    pub count: u64,
    /// Whether it follows from an event that is listed.
    #[serde(default)]
    pub detail: bool,
    /// The event as a sentence.
    pub text: String,
}

fn once() -> u64 {
    1
}

impl LoggedEvent {
    /// Reads a line of the log; `None` if it is none.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// The last events of each kind.
#[derive(Clone, Debug, Default)]
pub struct EventLog {
    /// By kind, each in the order of numbers.
    rings: [VecDeque<Entry>; EventKind::ALL.len()],
    /// The highest number.
    last: u64,
    /// The highest number of an evicted entry.
    evicted: u64,
    outages: Outages,
}

impl EventLog {
    /// Adds an event that happened at `at`.
    pub fn record(&mut self, at: SystemTime, event: Event) {
        let Verdict { is_detail, demoted, suffix } = self.outages.judge(at, &event);
        for event in demoted {
            let mut known = self.rings[event.kind() as usize].iter_mut().rev();
            known
                .find(|entry| entry.sentence.event == event)
                .into_iter()
                .for_each(|entry| entry.detail = true);
        }
        self.last += 1;
        let ring = &mut self.rings[event.kind() as usize];
        let earlier = ring.len().saturating_sub(MERGE_CANDIDATES)..ring.len();
        let is_soon = |entry: &Entry| at.duration_since(entry.last).unwrap_or_default() <= MERGE_WINDOW;
        let is_same = |entry: &Entry| is_soon(entry) && event.is_repetition_of(&entry.sentence.event);
        let same = earlier.rev().find(|place| is_same(&ring[*place]));
        let before = same.and_then(|place| ring.remove(place));
        if ring.len() >= MAX_ENTRIES_PER_KIND
            && let Some(oldest) = ring.pop_front()
        {
            self.evicted = self.evicted.max(oldest.number);
        }
        ring.push_back(Entry {
            number: self.last,
            kind: event.kind(),
            first: before.as_ref().map_or(at, |before| before.first),
            last: at,
            count: before.map_or(1, |before| before.count + 1),
            detail: is_detail,
            sentence: Sentence { event, end: suffix.into() },
        });
    }

    /// The highest number; 0 if the log is empty.
    pub fn last_number(&self) -> u64 {
        self.last
    }

    /// Up to `max_entries` entries with numbers above `number`, in order.
    pub fn after(&self, number: u64, max_entries: usize) -> Vec<&Entry> {
        let newer = |ring: &VecDeque<Entry>| ring.partition_point(|entry| entry.number <= number);
        let mut found: Vec<&Entry> =
            self.rings.iter().flat_map(|ring| ring.range(newer(ring)..).take(max_entries)).collect();
        found.sort_unstable_by_key(|entry| entry.number);
        found.truncate(max_entries);
        found
    }

    /// The latest entries that happened last at `since` or later, at most `max_entries`, in order; details
    /// are left out.
    pub fn latest(&self, since: SystemTime, max_entries: usize) -> Vec<Entry> {
        let is_wanted = |entry: &&Entry| entry.last >= since && !entry.detail;
        let mut found: Vec<&Entry> = self
            .rings
            .iter()
            .flat_map(|ring| ring.iter().rev().filter(is_wanted).take(max_entries))
            .collect();
        found.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.number));
        found.into_iter().take(max_entries).rev().cloned().collect()
    }

    /// The highest number of an evicted entry; 0 if none was evicted.
    pub fn last_evicted(&self) -> u64 {
        self.evicted
    }
}

fn rfc_3339<S: Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    // A time before 1970 is written as 1970.
    let known = at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_millis()).ok());
    let nanos = i128::from(known.unwrap_or_default()) * 1_000_000;
    let date = OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    match date.format(RFC_3339) {
        Ok(text) => to.serialize_str(&text),
        Err(error) => Err(serde::ser::Error::custom(error)),
    }
}

#[cfg(test)]
mod tests;
