//! Scenarios: emulated links, events on the links, traffic, and the required results.
//!
//! In: the TOML files of `tests/scenarios/files`; the file's name is the scenario's name. Out: checked
//! [`Scenario`]s: every list has the required length and every event names an existing link. `./dev bench
//! paths` runs all scenarios with real traffic, `./dev bench stream` runs those with a `[stream]` table, and
//! `tunnel/tests/simulation/paths.rs` runs them in simulated time.

#![forbid(unsafe_code)]
// Edge: events are applied to a running lab.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod random_cuts;

use std::time::Duration;

use mpvpn_lab::{Direction, LabError, LinkHandle, LinkSpec, ParseSpecError};
use mpvpn_types::BitRate;
use serde::{Deserialize, Deserializer, de::Error as _};

pub use self::random_cuts::RandomCuts;

/// MTU of a link, bytes: that of Ethernet (RFC 894). Rates of links count IP packets of this size.
const LINK_MTU: u32 = 1500;
/// Header bytes in a packet of [`LINK_MTU`] when inner TCP travels in datagrams: outer IPv4 (20), UDP (8),
/// QUIC with HTTP datagram framing and AEAD tag (about 40), inner IPv4 (20) and TCP with timestamps (32). A
/// larger value lowers [`Scenario::payload_ceiling`] and hides lost throughput; a smaller one demands more
/// than a link can carry.
const DATAGRAM_MODE_HEADERS: u32 = 120;
/// Header bytes in a packet of [`LINK_MTU`] when inner TCP travels on streams: outer IPv4 (20), UDP (8), and
/// QUIC with STREAM frame and AEAD tag (about 35). Larger and smaller: as for [`DATAGRAM_MODE_HEADERS`].
const STREAM_MODE_HEADERS: u32 = 63;

macro_rules! files {
    ($($name:literal)*) => {
        /// Names and contents of the scenario files.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../files/", $name, ".toml")))),*];
    };
}

files! {
    "two_100" "two_100_far" "fast_slow" "two_10"
    "equal" "asym_bw" "jitter" "asym_jitter" "lossy" "dual_lte"
    "wifi_lte" "lte_leo" "high_orbit" "lte_geo" "wifi_leo" "dual_leo"
    "loss_10" "loss_30"
    "cut_carrier" "cut_silent" "redundant_cut" "random_cuts"
    "pipes_shaped" "pipes_unshaped"
}

/// Links, events on them, traffic, and required results.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The name on the command line and of the file.
    #[serde(skip)]
    pub name: &'static str,
    /// Description in one sentence.
    pub story: String,
    /// The links between client and server.
    #[serde(deserialize_with = "links")]
    pub links: Vec<LinkSpec>,
    /// Numbers of parallel inner TCP flows; each number is a separate run.
    pub flows: Vec<u32>,
    /// Whether an additional run downloads over one inner QUIC connection; it has the bars of the first
    /// entry of `flows`.
    #[serde(default)]
    pub quic: bool,
    /// Rate of an additional run with inner UDP datagrams, Mbit/s. Bars of goodput do not apply to it.
    pub udp_mbit: Option<u32>,
    /// Directions of the data; each direction is a separate run.
    #[serde(default = "only_down")]
    pub directions: Vec<Direction>,
    /// Duration of a run, seconds. Runs without events may be shorter or longer.
    #[serde(default = "default_seconds")]
    pub seconds: u32,
    /// How often the events are repeated in one run under the same load.
    #[serde(default = "default_repeat")]
    pub repeat: u32,
    /// Changes of links, ordered by time.
    #[serde(default)]
    pub event: Vec<Event>,
    /// Random events in place of `event`; they also determine `seconds`.
    pub random_cuts: Option<RandomCuts>,
    /// Options with which the client is started.
    #[serde(default)]
    pub client: ClientOptions,
    /// Required results.
    pub bars: Bars,
    /// Required results when TCP travels on streams. `None`: the scenario does not run with streams.
    pub stream: Option<Bars>,
    /// How inner TCP travels. Files describe [`FlowMode::Datagram`]; see [`Scenario::for_flow_mode`].
    #[serde(skip)]
    pub flow_mode: FlowMode,
}

/// How inner TCP flows travel through the tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowMode {
    /// As IP packets in QUIC datagrams.
    #[default]
    Datagram,
    /// As bytes on QUIC streams; the TCP connection ends at the client.
    Stream,
}

/// A change of one link at one time.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Seconds since the start of the run, or of its repetition.
    pub at_s: f64,
    /// Number of the link, from 1.
    pub link: usize,
    /// The change.
    #[serde(deserialize_with = "change")]
    pub change: Change,
}

/// A change of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// `cut`: the client's interface loses its carrier.
    Cut,
    /// `silent`, `silent.up`, `silent.down`: all packets are lost while the carrier stays on.
    Silent(Direction),
    /// `restore`: the link returns to its description.
    Restore,
    /// New settings in the syntax of a link description, for example `loss=10%,delay.up=30ms`.
    Set(String),
}

/// Client options of a scenario; `None` leaves the client's default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientOptions {
    /// Value of `--scheduler`.
    pub scheduler: Option<String>,
    /// Value of `--cc`.
    pub cc: Option<String>,
    /// Value of `--pipes`: paths per link.
    pub pipes: Option<u32>,
}

/// The rate that counts as 100 % for `min_share`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub enum ShareOf {
    /// `sum`: see [`Scenario::usable_rate`].
    #[default]
    #[serde(rename = "sum")]
    UsableRate,
    /// `ceiling`: see [`Scenario::payload_ceiling`].
    #[serde(rename = "ceiling")]
    PayloadCeiling,
    /// `left`: see [`Scenario::payload_after_loss`].
    #[serde(rename = "left")]
    PayloadAfterLoss,
}

/// Bars: limits that the measured values of a run must meet. Lists have one element per entry of
/// [`Scenario::flows`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bars {
    /// The rate to which the shares below refer.
    #[serde(default)]
    pub share_of: ShareOf,
    /// Minimum goodput as a share of [`Scenario::reference_rate`].
    #[serde(default)]
    pub min_share: Vec<f64>,
    /// Minimum goodput in the simulation, as a share. The simulated TCP is a coarse model, so this is below
    /// `min_share`.
    #[serde(default)]
    pub sim_min_share: Vec<f64>,
    /// Minimum goodput before the first impairment, Mbit/s.
    pub min_mbit: Option<f64>,
    /// Minimum goodput over the best single link, Mbit/s.
    pub min_single_mbit: Option<f64>,
    /// The goodput over all links must be at least that over the best single link.
    #[serde(default)]
    pub not_below_best_single: bool,
    /// Maximum of the median gap between ping replies around an impairment, over all repetitions, ms.
    pub max_gap_ms: Option<f64>,
    /// Maximum of the longest such gap, ms.
    pub max_worst_gap_ms: Option<f64>,
    /// Maximum gap between deliveries in the simulation, ms.
    pub sim_max_gap_ms: Option<f64>,
    /// Maximum number of unanswered pings, and of lost datagrams of `udp_mbit`.
    pub max_lost_packets: Option<u64>,
    /// Maximum of the extra bytes that a sender sends because of loss, as a multiple of p ÷ (1 − p), the
    /// minimum that makes up for a loss rate p.
    pub max_repair: Option<f64>,
    /// Maximum time from `restore` until the links carry 80 % of the rate before the impairment, seconds.
    pub max_back_s: Option<f64>,
}

impl Scenario {
    /// All scenarios in their order of execution.
    pub fn all() -> Result<Vec<Self>, LabError> {
        FILES.iter().map(|(name, text)| Self::parse(name, text)).collect()
    }

    /// The names of all scenarios.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// Parses and checks a scenario file.
    fn parse(name: &'static str, text: &str) -> Result<Self, LabError> {
        let invalid = |reason: String| LabError::Scenario { name, reason };
        let mut scenario: Self = toml::from_str(text).map_err(|error| invalid(error.to_string()))?;
        scenario.name = name;
        if let Some(cuts) = &scenario.random_cuts {
            if !scenario.event.is_empty() {
                return Err(invalid("event and random_cuts exclude each other".to_owned()));
            }
            cuts.check().map_err(invalid)?;
            let count = cuts.count;
            scenario = scenario.with_cuts(count);
        }
        scenario.check().map_err(invalid)?;
        Ok(scenario)
    }

    fn check(&self) -> Result<(), String> {
        let bars = std::iter::once(&self.bars).chain(&self.stream);
        let lists =
            bars.flat_map(|bars| [("min_share", &bars.min_share), ("sim_min_share", &bars.sim_min_share)]);
        for (key, list) in lists {
            if !list.is_empty() && list.len() != self.flows.len() {
                return Err(format!("{key} has {} elements, flows {}", list.len(), self.flows.len()));
            }
        }
        if self.flows.is_empty() || self.directions.is_empty() || self.links.is_empty() {
            return Err("it needs at least one link, one direction and one number of flows".to_owned());
        }
        if self.quic && self.directions != only_down() {
            return Err("quic is a download: directions must be [\"down\"]".to_owned());
        }
        if self.bars.max_repair.is_some() && !self.event.is_empty() {
            return Err("max_repair compares with a run without loss: it excludes events".to_owned());
        }
        if self.links.iter().any(|link| link.up.rate.is_none() || link.down.rate.is_none()) {
            return Err("every link needs a rate: shares refer to it".to_owned());
        }
        let mut last = 0.0;
        for event in &self.event {
            let link = event.link.checked_sub(1).and_then(|index| self.links.get(index));
            let Some(link) = link else {
                return Err(format!("an event names link {}, of {}", event.link, self.links.len()));
            };
            if !(last..f64::from(self.seconds)).contains(&event.at_s) {
                return Err(format!("the event at {} s is out of order or after the end", event.at_s));
            }
            if let Change::Set(settings) = &event.change {
                link.clone().change(settings).map_err(|error| error.to_string())?;
            }
            last = event.at_s;
        }
        Ok(())
    }

    /// The scenario with inner TCP in that mode. In stream mode QUIC and UDP runs are left out, because they
    /// always travel in datagrams. `None`: the file has no bars for the mode.
    pub fn for_flow_mode(self, flow_mode: FlowMode) -> Option<Self> {
        match flow_mode {
            FlowMode::Datagram => Some(Self { flow_mode, ..self }),
            FlowMode::Stream => {
                let bars = self.stream.clone()?;
                Some(Self { flow_mode, bars, quic: false, udp_mbit: None, ..self })
            }
        }
    }

    /// Sum of (1 − loss) × rate over all links in a direction.
    pub fn usable_rate(&self, direction: Direction) -> BitRate {
        total(self.links.iter().map(|link| usable_rate_of_link(link, direction)))
    }

    /// Loss rate of all links together in a direction, weighted by their rates, 0 to 1.
    pub fn loss(&self, direction: Direction) -> f64 {
        let carried: u64 =
            self.links.iter().map(|link| link.towards(direction).rate.unwrap_or_default().bps()).sum();
        1.0 - self.usable_rate(direction).bps() as f64 / carried.max(1) as f64
    }

    /// Upper bound of inner TCP goodput without loss: Σ rate × TCP payload ÷ bytes that the link counts.
    pub fn payload_ceiling(&self, direction: Direction) -> BitRate {
        let rate = |link: &LinkSpec| link.towards(direction).rate.unwrap_or_default();
        total(self.links.iter().map(|link| self.payload_rate(link, rate(link))))
    }

    /// Upper bound of inner TCP goodput with loss: Σ (1 − loss) × rate × TCP payload ÷ bytes that the link
    /// counts.
    pub fn payload_after_loss(&self, direction: Direction) -> BitRate {
        total(self.links.iter().map(|link| self.payload_rate(link, usable_rate_of_link(link, direction))))
    }

    /// Rate of inner TCP payload that fits into `rate` of a link.
    fn payload_rate(&self, link: &LinkSpec, rate: BitRate) -> BitRate {
        let headers = match self.flow_mode {
            FlowMode::Datagram => DATAGRAM_MODE_HEADERS,
            FlowMode::Stream => STREAM_MODE_HEADERS,
        };
        let counted = u64::from(LINK_MTU + link.count.overhead());
        BitRate::from_bps(rate.bps() * u64::from(LINK_MTU - headers) / counted)
    }

    /// The rate that counts as 100 % for the shares of [`Bars`].
    pub fn reference_rate(&self, direction: Direction) -> BitRate {
        match self.bars.share_of {
            ShareOf::UsableRate => self.usable_rate(direction),
            ShareOf::PayloadCeiling => self.payload_ceiling(direction),
            ShareOf::PayloadAfterLoss => self.payload_after_loss(direction),
        }
    }

    /// Indices (from 0) of the links that have to be measured alone to find the best one. Left out are links
    /// with less than half of the highest usable rate, and copies of an earlier link.
    pub fn best_link_candidates(&self, direction: Direction) -> Vec<usize> {
        let rates: Vec<u64> =
            self.links.iter().map(|link| usable_rate_of_link(link, direction).bps()).collect();
        let most = rates.iter().copied().max().unwrap_or(0);
        let is_new = |index: usize| !self.links[..index].contains(&self.links[index]);
        (0..rates.len()).filter(|index| rates[*index] * 2 >= most && is_new(*index)).collect()
    }

    /// Start and end of every impairment within a repetition.
    pub fn impairments(&self) -> Vec<(Duration, Duration)> {
        let end = Duration::from_secs(self.seconds.into());
        let impairments = self.event.iter().enumerate().filter(|(_, event)| event.change != Change::Restore);
        let until = |from: usize, link: usize| {
            let mut later = self.event[from..].iter();
            later.find(|event| event.link == link && event.change == Change::Restore).map(Event::at)
        };
        impairments.map(|(n, event)| (event.at(), until(n, event.link).unwrap_or(end))).collect()
    }
}

impl Event {
    /// Time since the start of the run or of its repetition.
    pub fn at(&self) -> Duration {
        Duration::from_secs_f64(self.at_s)
    }
}

impl Change {
    /// Applies the change to a link of a running lab; `spec` is the link's description.
    pub fn apply(&self, link: &LinkHandle, spec: &LinkSpec) -> Result<(), LabError> {
        let mut spec = spec.clone();
        match self {
            Self::Cut => return link.down(),
            Self::Silent(direction) => return link.loss(*direction, 1.0),
            // An `up` of an interface that is up would announce the end of a silent period to the client.
            Self::Restore if link.is_down()? => link.up()?,
            Self::Restore => {}
            Self::Set(settings) => {
                spec.change(settings).map_err(|error| LabError::Refused(error.to_string()))?
            }
        }
        for (direction, params) in [(Direction::Up, spec.up), (Direction::Down, spec.down)] {
            link.set(direction, move |now| *now = params.clone())?;
        }
        Ok(())
    }
}

fn usable_rate_of_link(link: &LinkSpec, direction: Direction) -> BitRate {
    let params = link.towards(direction);
    BitRate::from_bps((params.rate.unwrap_or_default().bps() as f64 * (1.0 - params.loss)).round() as u64)
}

fn total(rates: impl Iterator<Item = BitRate>) -> BitRate {
    BitRate::from_bps(rates.map(BitRate::bps).sum())
}

fn only_down() -> Vec<Direction> {
    vec![Direction::Down]
}

fn default_seconds() -> u32 {
    10
}

fn default_repeat() -> u32 {
    1
}

fn links<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<LinkSpec>, D::Error> {
    let texts = Vec::<String>::deserialize(input)?;
    texts.iter().map(|text| text.parse()).collect::<Result<_, ParseSpecError>>().map_err(D::Error::custom)
}

fn change<'de, D: Deserializer<'de>>(input: D) -> Result<Change, D::Error> {
    let text = String::deserialize(input)?;
    match text.as_str() {
        "cut" => Ok(Change::Cut),
        "silent" => Ok(Change::Silent(Direction::Both)),
        "silent.up" => Ok(Change::Silent(Direction::Up)),
        "silent.down" => Ok(Change::Silent(Direction::Down)),
        "restore" => Ok(Change::Restore),
        _ if text.contains('=') => Ok(Change::Set(text)),
        _ => Err(D::Error::custom(format!(
            "`{text}` is no change: there are cut, silent, silent.up, silent.down, restore, and settings as in loss=10%"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "story = 's'\nlinks = ['100mbit', '50mbit,loss=10%']\nflows = [1]\n";

    fn parse_error(more: &str) -> String {
        match Scenario::parse("made_up", &format!("{TWO}{more}")) {
            Err(error) => error.to_string(),
            Ok(scenario) => panic!("it was accepted: {scenario:?}"),
        }
    }

    #[test]
    fn every_file_is_a_scenario_and_every_scenario_is_listed() {
        let all = Scenario::all().unwrap();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/files");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        let mut listed: Vec<&str> = all.iter().map(|scenario| scenario.name).collect();
        files.sort();
        listed.sort_unstable();
        assert_eq!(files, listed);
    }

    #[test]
    fn the_usable_rate_excludes_losses_and_the_ceiling_excludes_headers() {
        let text =
            format!("{}[bars]\nshare_of = 'ceiling'", TWO.replace("'100mbit'", "'100mbit,count=ethernet'"));
        let scenario = Scenario::parse("made_up", &text).unwrap();
        assert_eq!(scenario.usable_rate(Direction::Down).bps(), 145_000_000);
        assert!((scenario.loss(Direction::Down) - 5.0 / 150.0).abs() < 1e-9);
        assert_eq!(scenario.payload_ceiling(Direction::Up).bps(), 100_000_000 * 1380 / 1514 + 46_000_000);
        assert_eq!(scenario.reference_rate(Direction::Up), scenario.payload_ceiling(Direction::Up));
    }

    #[test]
    fn streams_have_bars_and_headers_of_their_own() {
        let text = format!(
            "{}udp_mbit = 5\n[bars]\n[stream]\nshare_of = 'left'\nmin_share = [0.9]",
            TWO.replace("'100mbit'", "'100mbit,count=ethernet'")
        );
        let scenario = Scenario::parse("made_up", &text).unwrap();
        let streams = scenario.clone().for_flow_mode(FlowMode::Stream).unwrap();
        assert_eq!(
            (streams.flow_mode, streams.udp_mbit, &streams.bars.min_share[..]),
            (FlowMode::Stream, None, &[0.9][..])
        );
        assert_eq!(streams.payload_ceiling(Direction::Up).bps(), 100_000_000 * 1437 / 1514 + 47_900_000);
        assert_eq!(streams.reference_rate(Direction::Up).bps(), 100_000_000 * 1437 / 1514 + 43_110_000);
        assert_eq!(scenario.for_flow_mode(FlowMode::Datagram).unwrap().udp_mbit, Some(5));
        assert!(
            Scenario::parse("made_up", &format!("{TWO}[bars]"))
                .unwrap()
                .for_flow_mode(FlowMode::Stream)
                .is_none()
        );
    }

    #[test]
    fn links_that_cannot_be_the_best_are_not_measured_alone() {
        let best_link_candidates = |links: &str| {
            let text = format!("story = 's'\nlinks = [{links}]\nflows = [1]\n[bars]");
            Scenario::parse("made_up", &text).unwrap().best_link_candidates(Direction::Down)
        };
        assert_eq!(best_link_candidates("'50mbit', '50mbit'"), [0]);
        assert_eq!(best_link_candidates("'50mbit', '50mbit,loss=1%'"), [0, 1]);
        assert_eq!(best_link_candidates("'30mbit', '80mbit'"), [1]);
    }

    #[test]
    fn an_impairment_lasts_until_its_link_is_restored() {
        let text = format!(
            "{TWO}event = [{{ at_s = 1, link = 1, change = 'cut' }}, {{ at_s = 2, link = 2, change = 'loss.up=3%' }}, \
             {{ at_s = 3.5, link = 1, change = 'restore' }}]\n[bars]"
        );
        let scenario = Scenario::parse("made_up", &text).unwrap();
        let seconds = |pair: &(Duration, Duration)| (pair.0.as_secs_f64(), pair.1.as_secs_f64());
        assert_eq!(scenario.impairments().iter().map(seconds).collect::<Vec<_>>(), [(1.0, 3.5), (2.0, 10.0)]);
    }

    #[test]
    fn errors_name_the_mistake() {
        for (more, said) in [
            ("", "missing field `bars`"),
            ("colour = 'red'\n[bars]", "colour"),
            ("[bars]\nmin_shares = [1]", "min_shares"),
            ("[bars]\nmin_share = [0.5, 0.5]", "min_share has 2 elements, flows 1"),
            ("[bars]\n[stream]\nmin_share = [0.5, 0.5]", "min_share has 2 elements, flows 1"),
            ("event = [{ at_s = 1, link = 3, change = 'cut' }]\n[bars]", "link 3, of 2"),
            ("event = [{ at_s = 11, link = 1, change = 'cut' }]\n[bars]", "after the end"),
            ("event = [{ at_s = 1, link = 1, change = 'broken' }]\n[bars]", "`broken` is no change"),
            ("event = [{ at_s = 1, link = 1, change = 'loss=2' }]\n[bars]", "not a share"),
            ("quic = true\ndirections = ['up']\n[bars]", "quic is a download"),
            ("[random_cuts]\ncount = 1\nseed = 0\nlast_s = [1, 2]\npause_s = [1, 2]\n[bars]", "seed"),
        ] {
            let error = parse_error(more);
            assert!(error.contains(said) && error.contains("made_up"), "{more}: {error}");
        }
    }
}
