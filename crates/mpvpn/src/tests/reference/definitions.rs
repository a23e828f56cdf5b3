//! The definitions of configuration, status, metrics, events and errors as data, for the generator of
//! `docs/reference`.
//!
//! In: the definitions themselves, through `schemars` and the tables of metrics. Out: JSON schemas (draft
//! 2020-12) of files and of answers of the local API, metrics, events, and each error as it is printed.
//! Always holds: this module defines nothing itself.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::Value;

use mpvpn_config::{ClientOptions, ServerOptions};
use mpvpn_status::{
    Class, FlowList, ForwardedPort, Link, Path, Status,
    check::CheckReport,
    events::{Event, EventKind},
    measure::{EchoReport, MeasureReport},
    metrics,
};

use crate::tests::errors as examples;

/// The schema of a server's configuration file.
pub(crate) fn server() -> Value {
    schema::<ServerOptions>(SchemaSettings::for_deserialize)
}

/// The schema of a client's configuration file, which a proxy and an app read, too.
pub(crate) fn client() -> Value {
    schema::<ClientOptions>(SchemaSettings::for_deserialize)
}

/// The schema of a server's configuration file in the draft that most editors know.
pub(crate) fn server_for_editors() -> Value {
    schema::<ServerOptions>(draft_07)
}

/// The schema of a client's configuration file in the draft that most editors know.
pub(crate) fn client_for_editors() -> Value {
    schema::<ClientOptions>(draft_07)
}

/// The schema of a file of users.
pub(crate) fn users() -> Value {
    schema::<mpvpn_users::UserTables>(SchemaSettings::for_deserialize)
}

/// The schema of the status.
pub(crate) fn status() -> Value {
    schema::<Status>(SchemaSettings::for_serialize)
}

/// The schema of a list of flows.
pub(crate) fn flows() -> Value {
    schema::<FlowList>(SchemaSettings::for_serialize)
}

/// The schema of the result of a check.
pub(crate) fn check() -> Value {
    schema::<CheckReport>(SchemaSettings::for_serialize)
}

/// The schema of the paths of pings.
pub(crate) fn echoes() -> Value {
    schema::<EchoReport>(SchemaSettings::for_serialize)
}

/// The schema of the results of a measurement.
pub(crate) fn measure() -> Value {
    schema::<MeasureReport>(SchemaSettings::for_serialize)
}

/// The schema of an event, without what every event has.
pub(crate) fn event() -> Value {
    schema::<Event>(SchemaSettings::for_serialize)
}

fn draft_07(_: SchemaSettings) -> SchemaSettings {
    SchemaSettings::draft07()
}

fn schema<T: JsonSchema>(settings: fn(SchemaSettings) -> SchemaSettings) -> Value {
    settings(SchemaSettings::draft2020_12()).into_generator().into_root_schema_for::<T>().to_value()
}

/// A metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    /// Its name.
    pub(crate) name: String,
    /// `counter` or `gauge`.
    pub(crate) kind: &'static str,
    /// Its meaning, in a sentence.
    pub(crate) help: &'static str,
    /// The names of its labels.
    pub(crate) labels: &'static [&'static str],
}

/// All metrics, in the order of the exposition.
pub(crate) fn all_metrics() -> Vec<Metric> {
    let single =
        metrics::SINGLE_METRICS.iter().map(|head| metric(head.name, head.kind, head.help, head.labels));
    single
        .chain(per_item(Class::METRICS, &["class"]))
        .chain(per_item(Link::METRICS, &["link"]))
        .chain(per_item(Path::METRICS, &["class", "link", "path"]))
        .chain(per_item(ForwardedPort::METRICS, &["port"]))
        .chain(per_item(metrics::UserFigures::METRICS, &["user"]))
        .collect()
}

fn per_item<T>(
    table: &[metrics::Metric<T>],
    labels: &'static [&'static str],
) -> impl Iterator<Item = Metric> {
    table.iter().map(move |one| metric(one.name, one.kind, one.help, labels))
}

fn metric(name: &str, kind: metrics::Kind, help: &'static str, labels: &'static [&'static str]) -> Metric {
    let kind = match kind {
        metrics::Kind::Counter => "counter",
        metrics::Kind::Gauge => "gauge",
    };
    Metric { name: format!("mpvpn_{name}"), kind, help, labels }
}

/// The name of each event, its subject, and the level of its log line.
pub(crate) fn event_kinds() -> Vec<(String, EventKind, String)> {
    Event::ALL.iter().map(|(name, kind, level)| (snake_case(name), *kind, level.to_string())).collect()
}

/// As serde writes names of variants.
fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for (at, c) in name.char_indices() {
        if c.is_ascii_uppercase() && at > 0 {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

/// Errors as they are printed, each with its next step; what differs from case to case is in capitals.
pub(crate) fn errors() -> Vec<(String, String)> {
    let errors = examples::errors().into_iter().map(|error| (error.to_string(), error.next_step()));
    let refusals = examples::certificate_refusals().into_iter().map(|refusal| {
        let next = refusal.next_step().to_owned();
        (refusal.to_string(), next)
    });
    errors.chain(refusals).collect()
}

#[cfg(test)]
mod tests;
