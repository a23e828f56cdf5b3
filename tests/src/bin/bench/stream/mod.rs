//! TCP whose bytes travel on streams: over links of all kinds, beside another VPN, with many connections, and with
//! readers that stop reading.

mod peaks;
mod readers;
mod short;

use mpvpn_lab::scenario::Lane;
use serde_json::{Map, Value, json};

use crate::{
    figure::{Bar, figure},
    options::Options,
    paths::{self, plan::caught},
    peers,
    report::Outcome,
};

const RIG: &str = "stream";
/// The option of a client whose TCP travels on streams.
pub(crate) const STREAM: [&str; 2] = ["--lane", "stream"];

/// What the rig consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The scenarios.
    Links,
    /// One link without a limit, beside another VPN.
    Veth,
    /// Many connections.
    Short,
    /// Readers that stop reading.
    Readers,
}

impl Part {
    pub(crate) const ALL: [Self; 4] = [Self::Links, Self::Veth, Self::Short, Self::Readers];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Links => "links",
            Self::Veth => "veth",
            Self::Short => "short",
            Self::Readers => "readers",
        }
    }

    fn run(self, options: &Options) -> Result<Outcome, String> {
        match self {
            Self::Links => Ok(paths::over(Lane::Stream, options)),
            Self::Veth => Ok(peers::streams(options)),
            Self::Short => short::run(options),
            Self::Readers => readers::run(options),
        }
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    let mut whole = Outcome::default();
    let mut raw = Map::new();
    for part in &options.parts {
        // One part that fails is a figure that is missing, not the end of the others.
        let outcome = caught(|| part.run(options)).unwrap_or_else(|why| {
            eprintln!("  {}: {why}", part.name());
            let name = format!("{}: it cannot be measured", part.name());
            let figures = vec![figure(RIG, name, f64::NAN, "", Bar::AtLeast(0.0))];
            Outcome { figures, raw: json!({ "error": why }), ..Outcome::default() }
        });
        whole.figures.extend(outcome.figures);
        whole.chapter += &outcome.chapter;
        whole.plots.extend(outcome.plots);
        raw.insert(part.name().to_owned(), outcome.raw);
    }
    whole.raw = Value::Object(raw);
    whole
}
