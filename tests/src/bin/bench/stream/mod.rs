//! TCP whose bytes travel on streams: over links of all kinds, beside another VPN, with many connections, and with
//! readers that stop reading.

mod peak_memory;
mod readers;
mod short;

use mpvpn_scenarios::FlowMode;

use crate::{options::Options, parts, paths, peers, report::Outcome};

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
            Self::Links => Ok(paths::for_flow_mode(FlowMode::Stream, options)),
            Self::Veth => Ok(peers::streams(options)),
            Self::Short => short::run(options),
            Self::Readers => readers::run(options),
        }
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    parts::run_parts(RIG, &options.parts, Part::name, |part| part.run(options))
}
