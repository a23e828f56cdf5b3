//! TCP whose bytes travel on streams: over links of all kinds, beside another VPN, with many connections, and with
//! readers that stop reading.

use mpvpn_lab::scenario::Lane;
use serde_json::{Map, Value};

use crate::{options::Options, paths, report::Outcome};

/// What the rig consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Links,
}

impl Part {
    pub(crate) const ALL: [Self; 1] = [Self::Links];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Links => "links",
        }
    }

    fn run(self, options: &Options) -> Outcome {
        match self {
            Self::Links => paths::over(Lane::Stream, options),
        }
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    let mut whole = Outcome::default();
    let mut raw = Map::new();
    for part in &options.parts {
        let outcome = part.run(options);
        whole.figures.extend(outcome.figures);
        whole.chapter += &outcome.chapter;
        whole.plots.extend(outcome.plots);
        raw.insert(part.name().to_owned(), outcome.raw);
    }
    whole.raw = Value::Object(raw);
    whole
}
