//! The `status` messages of a stream: the status of the process as JSON, with rates.
//!
//! In: statuses, with the time of the process. Out: the data of a message for each view, and a [`Sample`] for
//! the history. Always holds: rates are measured over at least [`MIN_RATE_INTERVAL_S`].

use std::collections::{BTreeMap, BTreeSet};

use mpvpn_input::role::Role;
use mpvpn_status::{
    Client, Link, Overview, Path, PathState, Status,
    rates::{Counters, Rate, Rates, class_key, link_key, path_key},
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{
    history::{self, LinkSample, Sample},
    view::{RatedSession, Shown},
};

/// Time over which rates are measured (s), at least. Shorter: rates of single bursts; longer: the rate of a
/// link that was cut goes down later. Chosen.
const MIN_RATE_INTERVAL_S: f64 = 0.45;

/// Rates of everything that a status has counters of.
#[derive(Debug)]
pub(crate) struct RateMeter {
    rates: Rates,
    /// Time of the process at the last measurement (s).
    measured: f64,
    /// Least time between two measurements (s).
    interval: f64,
}

impl RateMeter {
    /// Rates over the interval of live views.
    pub(crate) fn live() -> Self {
        Self { rates: Rates::new(1), measured: 0.0, interval: MIN_RATE_INTERVAL_S }
    }

    /// Measures between any two statuses.
    pub(crate) fn between_all() -> Self {
        Self { interval: 0.0, ..Self::live() }
    }

    /// Takes the counters of a client.
    pub(crate) fn take_status(&mut self, status: &Status) {
        self.take(status.uptime_s, Counters::of_status(status));
    }

    /// Takes the counters of a server.
    pub(crate) fn take_overview(&mut self, overview: &Overview) {
        let sessions = overview.sessions.iter().map(|session| {
            Counters::new(Role::Server, session.id.to_string(), session.tx_bytes, session.rx_bytes)
        });
        let paths = overview.shown.iter().zip(&overview.status.clients).flat_map(|(id, client)| {
            let owner = id.to_string();
            Counters::of_paths(Role::Server, &owner, &client.paths).collect::<Vec<_>>()
        });
        self.take(
            overview.status.uptime_s,
            sessions.chain(paths).chain(Counters::of_status(&overview.status)),
        );
    }

    fn take(&mut self, uptime: f64, counters: impl Iterator<Item = Counters>) {
        let passed = uptime - self.measured;
        // Another process counts from 0.
        if passed < 0.0 || passed >= self.interval {
            self.measured = uptime;
            self.rates.take(uptime, counters);
        }
    }

    fn session(&self, id: u64) -> Rate {
        self.now(&id.to_string())
    }

    fn now(&self, key: &str) -> Rate {
        self.rates.now(key).unwrap_or_default()
    }

    /// The sum over all links of a client, or over all classes of a server.
    fn total(&self, status: &Status) -> Rate {
        let total = match status.role {
            Role::Client => self.rates.total(status.links.iter().map(|link| link_key(&link.name))),
            Role::Server => self.rates.total(status.classes.iter().map(|class| class_key(&class.name))),
        };
        total.unwrap_or_default()
    }

    /// All sessions with their rates.
    pub(crate) fn rated<'a>(&'a self, overview: &'a Overview) -> impl Iterator<Item = RatedSession<'a>> {
        overview.sessions.iter().map(|session| {
            let rate = self.session(session.id);
            RatedSession { session, down_bps: rate.down, up_bps: rate.up }
        })
    }

    /// The part of a status that the history keeps.
    pub(crate) fn sample(&self, status: &Status) -> Sample {
        let link = |link: &Link| {
            let best = status
                .paths
                .iter()
                .filter(|path| path.link == link.name && path.state == PathState::Active)
                .min_by(|a, b| a.rtt_ms.total_cmp(&b.rtt_ms));
            let sample = LinkSample {
                rates: stored(self.now(&link_key(&link.name))),
                rtt_ms: best.map(|path| path.rtt_ms as f32),
                loss: best.and_then(Path::loss).map(|loss| loss as f32),
            };
            (link.name.clone(), sample)
        };
        Sample {
            total: stored(self.total(status)),
            links: status.links.iter().map(link).collect(),
            classes: status
                .classes
                .iter()
                .map(|class| (class.name.clone(), stored(self.now(&class_key(&class.name)))))
                .collect(),
            sessions: Vec::new(),
        }
    }

    /// The part of a server's status that the history keeps: of its sessions those in `kept`.
    pub(crate) fn server_sample(&self, overview: &Overview, kept: &BTreeSet<u64>) -> Sample {
        let sessions = overview
            .sessions
            .iter()
            .filter(|session| kept.contains(&session.id))
            .map(|session| (session.id, session.user.clone(), stored(self.session(session.id))));
        Sample { sessions: sessions.collect(), ..self.sample(&overview.status) }
    }

    /// The frame of a client.
    pub(crate) fn client_frame(&self, mut status: Status) -> serde_json::Result<Vec<u8>> {
        let total = self.total(&status);
        let (links, paths) = (std::mem::take(&mut status.links), std::mem::take(&mut status.paths));
        let links = links.iter().map(|link| with_rates(link, self.now(&link_key(&link.name)), Role::Client));
        let paths = paths.iter().map(|path| with_rates(path, self.now(&path_key("", path)), Role::Client));
        let frame = Frame {
            total: total.into(),
            links: links.collect(),
            paths: paths.collect(),
            clients: Vec::new(),
            sessions_total: None,
            sessions_found: None,
            rest: rest_of(status)?,
        };
        serde_json::to_vec(&frame)
    }

    /// The frames of a server, one for each of `views`.
    pub(crate) fn server_frames(
        &self,
        mut overview: Overview,
        views: &[&Shown],
    ) -> serde_json::Result<Vec<Vec<u8>>> {
        let total = self.total(&overview.status);
        let clients = std::mem::take(&mut overview.status.clients);
        let by_id: BTreeMap<u64, &Client> = overview.shown.iter().copied().zip(&clients).collect();
        let rest = rest_of(overview.status)?;
        let frame = |shown: &&Shown| {
            let client = |id: &u64| by_id.get(id).map(|client| self.shown_client(*id, client));
            let frame = Frame {
                total: total.into(),
                links: Vec::new(),
                paths: Vec::new(),
                clients: shown.ids.iter().filter_map(client).collect::<serde_json::Result<_>>()?,
                sessions_total: Some(overview.sessions.len()),
                sessions_found: Some(shown.found),
                rest: rest.clone(),
            };
            serde_json::to_vec(&frame)
        };
        views.iter().map(frame).collect()
    }

    fn shown_client(&self, id: u64, client: &Client) -> serde_json::Result<ShownClient> {
        let owner = id.to_string();
        let rate = |path: &Path| self.now(&path_key(&owner, path));
        let paths = client.paths.iter().map(|path| {
            let with_rates = with_rates(path, rate(path), Role::Server);
            serde_json::to_value(with_rates)
        });
        let paths = paths.collect::<serde_json::Result<Vec<_>>>()?;
        let mut fields = object(&Client { paths: Vec::new(), ..client.clone() })?;
        fields.insert("paths".to_owned(), paths.into());
        let rate = self.session(id);
        Ok(ShownClient { id: owner, tx_bps: rate.down as u64, rx_bps: rate.up as u64, fields })
    }
}

fn stored(rate: Rate) -> history::Rates {
    history::Rates { down: rate.down as f32, up: rate.up as f32 }
}

#[derive(Serialize)]
struct Frame<'a> {
    total: Total,
    links: Vec<WithRates<'a, Link>>,
    paths: Vec<WithRates<'a, Path>>,
    clients: Vec<ShownClient>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions_total: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions_found: Option<usize>,
    /// The other fields of the status.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Copy, Serialize)]
struct Total {
    down_bps: u64,
    up_bps: u64,
}

impl From<Rate> for Total {
    fn from(rate: Rate) -> Self {
        Self { down_bps: rate.down as u64, up_bps: rate.up as u64 }
    }
}

#[derive(Serialize)]
struct WithRates<'a, T> {
    #[serde(flatten)]
    of: &'a T,
    tx_bps: u64,
    rx_bps: u64,
}

fn with_rates<T>(of: &T, rate: Rate, role: Role) -> WithRates<'_, T> {
    let (down, up) = (rate.down as u64, rate.up as u64);
    let (tx_bps, rx_bps) = if role == Role::Server { (down, up) } else { (up, down) };
    WithRates { of, tx_bps, rx_bps }
}

#[derive(Serialize)]
struct ShownClient {
    id: String,
    tx_bps: u64,
    rx_bps: u64,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// The fields of a status but those that a frame has itself.
fn rest_of(status: Status) -> serde_json::Result<Map<String, Value>> {
    let mut rest = object(&status)?;
    for field in ["links", "paths", "clients"] {
        rest.remove(field);
    }
    Ok(rest)
}

fn object(value: &impl Serialize) -> serde_json::Result<Map<String, Value>> {
    match serde_json::to_value(value)? {
        Value::Object(fields) => Ok(fields),
        _ => Ok(Map::new()),
    }
}

#[cfg(test)]
mod tests;
