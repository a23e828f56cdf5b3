//! Rates, round-trip times and losses of the last five minutes and of the last day. Time is an argument.
//!
//! In: a [`Sample`] each second. Out: a [`Series`] for each link, class and session, and for the whole.
//! Always holds: what is kept is bounded (`MAX_BYTES`): five minutes in steps of a second, a day in steps of
//! a minute, each for the things that were there in that time.

mod track;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use track::Track;

/// The two spans that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// Five minutes in steps of a second.
    Minutes,
    /// A day in steps of a minute.
    Day,
}

impl Span {
    pub(crate) const fn step(self) -> Duration {
        match self {
            Self::Minutes => Duration::from_secs(1),
            Self::Day => Duration::from_secs(60),
        }
    }

    /// Steps of the whole span.
    const fn steps(self) -> usize {
        match self {
            Self::Minutes => 300,
            Self::Day => 1440,
        }
    }
}

/// Links, classes and sessions of which a history is kept; further ones have none. A client has at most 32
/// links and 8 classes, a server tells 32 classes apart. A browser shows up to 100 sessions. More: memory;
/// fewer: what is shown has no history.
const MAX_LINKS: usize = 64;
const MAX_CLASSES: usize = 32;
const MAX_SESSIONS: usize = 512;

/// Most memory of all histories together (bytes): the values of each step, of four bytes each. Names and maps
/// add some 100 bytes for each thing.
#[cfg(test)]
const MAX_BYTES: usize = 4
    * ((2 + 4 * MAX_LINKS + 2 * MAX_CLASSES) * (Span::Minutes.steps() + Span::Day.steps())
        + 2 * MAX_SESSIONS * Span::Minutes.steps());

/// Rates towards the client and from the client, in bit/s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) down: f32,
    pub(crate) up: f32,
}

/// A link now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinkSample {
    pub(crate) rates: Rates,
    /// Smoothed round-trip time (ms), where it is known.
    pub(crate) rtt_ms: Option<f32>,
    /// Loss (percent), where it is known.
    pub(crate) loss: Option<f32>,
}

/// The values of one second.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) total: Rates,
    pub(crate) links: Vec<(String, LinkSample)>,
    pub(crate) classes: Vec<(String, Rates)>,
    /// Identifier, user, and rates of sessions that are shown.
    pub(crate) sessions: Vec<(u64, String, Rates)>,
}

/// All that is kept.
#[derive(Debug, Default)]
pub(crate) struct History {
    minutes: Tracks,
    day: Tracks,
    /// Five minutes only.
    sessions: BTreeMap<u64, (String, Track<2>)>,
}

/// The history of one span.
#[derive(Debug, Default)]
struct Tracks {
    total: Track<2>,
    links: BTreeMap<String, Track<4>>,
    classes: BTreeMap<String, Track<2>>,
}

impl Tracks {
    fn take(&mut self, span: Span, slot: u64, sample: &Sample) {
        self.total.add(span, slot, sample.total.values());
        for (name, link) in &sample.links {
            if let Some(track) = entry(&mut self.links, name, MAX_LINKS) {
                let [down, up] = link.rates.values();
                track.add(span, slot, [down, up, link.rtt_ms, link.loss]);
            }
        }
        for (name, rates) in &sample.classes {
            if let Some(track) = entry(&mut self.classes, name, MAX_CLASSES) {
                track.add(span, slot, rates.values());
            }
        }
        self.links.retain(|_, track| track.is_within(span, slot));
        self.classes.retain(|_, track| track.is_within(span, slot));
    }
}

impl Rates {
    fn values(self) -> [Option<f32>; 2] {
        [Some(self.down), Some(self.up)]
    }
}

/// The track of a name, new if there is a place for it.
fn entry<'a, K: Clone + Ord, T: Default>(
    all: &'a mut BTreeMap<K, T>,
    key: &K,
    max: usize,
) -> Option<&'a mut T> {
    if all.len() >= max && !all.contains_key(key) {
        return None;
    }
    Some(all.entry(key.clone()).or_default())
}

impl History {
    /// Takes a sample that was measured `age` after the start of the process.
    pub(crate) fn take(&mut self, age: Duration, sample: &Sample) {
        let slot = |span: Span| age.as_secs() / span.step().as_secs();
        self.minutes.take(Span::Minutes, slot(Span::Minutes), sample);
        self.day.take(Span::Day, slot(Span::Day), sample);
        let second = slot(Span::Minutes);
        for (id, user, rates) in &sample.sessions {
            if let Some((name, track)) = entry(&mut self.sessions, id, MAX_SESSIONS) {
                name.clone_from(user);
                track.add(Span::Minutes, second, rates.values());
            }
        }
        self.sessions.retain(|_, (_, track)| track.is_within(Span::Minutes, second));
    }

    /// The history of a span up to the step before the present one, whose end is `age` after the start of the
    /// process or later. `now` is the time of day.
    pub(crate) fn answer(&self, span: Span, age: Duration, now: SystemTime) -> Answer<'_> {
        let step = span.step().as_secs();
        let end = age.as_secs() / step;
        let begin = end.saturating_sub(span.steps() as u64);
        let slots = Slots { begin, end };
        let since_begin = age.saturating_sub(Duration::from_secs(begin * step));
        let begin_ms =
            now.checked_sub(since_begin).unwrap_or(now).duration_since(UNIX_EPOCH).unwrap_or_default();
        let tracks = if span == Span::Day { &self.day } else { &self.minutes };
        let sessions = (span == Span::Minutes).then_some(&self.sessions).into_iter().flatten();
        Answer {
            begin_ms: begin_ms.as_millis() as u64,
            step_ms: step * 1000,
            total: Series::of(&tracks.total, slots),
            links: tracks
                .links
                .iter()
                .map(|(name, track)| (name.as_str(), LinkSeries::of(track, slots)))
                .collect(),
            classes: tracks
                .classes
                .iter()
                .map(|(name, track)| (name.as_str(), Series::of(track, slots)))
                .collect(),
            sessions: sessions
                .map(|(id, (user, track))| {
                    (id.to_string(), SessionSeries { user, series: Series::of(track, slots) })
                })
                .collect(),
        }
    }
}

/// Numbers of steps since the start of the process; `end` is not one of them.
#[derive(Clone, Copy, Debug)]
struct Slots {
    begin: u64,
    end: u64,
}

/// The answer of `GET /api/history`, without events. All lists are equally long; `null` stands where nothing
/// is known.
#[derive(Debug, Serialize)]
pub(crate) struct Answer<'a> {
    /// Time of the first values (Unix time, ms).
    begin_ms: u64,
    step_ms: u64,
    total: Series,
    links: BTreeMap<&'a str, LinkSeries>,
    classes: BTreeMap<&'a str, Series>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sessions: BTreeMap<String, SessionSeries<'a>>,
}

#[derive(Debug, Serialize)]
struct Series {
    down_bps: Vec<Option<f32>>,
    up_bps: Vec<Option<f32>>,
}

#[derive(Debug, Serialize)]
struct LinkSeries {
    #[serde(flatten)]
    series: Series,
    rtt_ms: Vec<Option<f32>>,
    loss: Vec<Option<f32>>,
}

#[derive(Debug, Serialize)]
struct SessionSeries<'a> {
    user: &'a str,
    #[serde(flatten)]
    series: Series,
}

impl Series {
    fn of<const N: usize>(track: &Track<N>, slots: Slots) -> Self {
        Self { down_bps: track.values(0, slots, 1.0), up_bps: track.values(1, slots, 1.0) }
    }
}

impl LinkSeries {
    fn of(track: &Track<4>, slots: Slots) -> Self {
        Self {
            series: Series::of(track, slots),
            rtt_ms: track.values(2, slots, 100.0),
            loss: track.values(3, slots, 100.0),
        }
    }
}

#[cfg(test)]
mod tests;
