//! TCP on streams: over the links of scenarios, compared with another VPN, with many connections, and with
//! stalled readers.

mod peak_memory;
mod readers;
mod short;

use mpvpn_scenarios::FlowMode;

use crate::{options::Options, parts, paths, peers, report::Outcome};

const RIG: &str = "stream";
/// Client option: TCP on streams.
pub(crate) const STREAM: [&str; 2] = ["--lane", "stream"];

/// Parts of the rig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The scenarios.
    Links,
    /// A link without a rate limit, compared with another VPN.
    Veth,
    /// Many concurrent and many short connections.
    Short,
    /// Downloads whose readers stop reading.
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
