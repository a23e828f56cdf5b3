//! Scenarios: links, what happens to them, the load on them, and what is asked of a tunnel there.
//!
//! In: the files of `tests/scenarios/files`, one a scenario, named after it. Out: [`Scenario`]s, checked: every list has
//! the length that it must have, every event is about a link that exists. `./dev bench paths` plays them with real
//! traffic, `./dev bench stream` those that have bars for streams, a test of `tunnel` with simulated time.

#![forbid(unsafe_code)]
// What is played at a running lab talks to it.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod random_cuts;

use std::time::Duration;

use mpvpn_lab::{Direction, LabError, LinkHandle, LinkSpec, ParseSpecError};
use mpvpn_types::BitRate;
use serde::{Deserialize, Deserializer, de::Error as _};

pub use self::random_cuts::RandomCuts;

/// Bytes of a full packet on a link: the usual MTU.
const FULL_PACKET: u32 = 1500;
/// Bytes of those that are no payload of the inner TCP: outer IP, UDP, QUIC, and inner IP and TCP with timestamps.
const HEADERS: u32 = 120;
/// The same where bytes travel without the packets they were in: outer IP, UDP and QUIC.
const HEADERS_OF_STREAMS: u32 = 63;

macro_rules! files {
    ($($name:literal)*) => {
        /// Names and contents of the files.
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

/// A setting, what happens in it, and what is asked there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// As people choose it; the name of its file.
    #[serde(skip)]
    pub name: &'static str,
    /// What it is about, in one sentence.
    pub story: String,
    /// The links between client and server.
    #[serde(deserialize_with = "links")]
    pub links: Vec<LinkSpec>,
    /// Numbers of inner TCP flows, each a run of its own.
    pub flows: Vec<u32>,
    /// Whether one inner QUIC connection downloads as well, in a run of its own with the bars of the first of `flows`.
    #[serde(default)]
    pub quic: bool,
    /// Rate of inner UDP datagrams in Mbit/s, in a run of its own without bars of goodput.
    pub udp_mbit: Option<u32>,
    /// Which ways the data goes, each a run of its own.
    #[serde(default = "downwards")]
    pub directions: Vec<Direction>,
    /// How long a run takes, in seconds; without events it may be shorter or longer than this.
    #[serde(default = "ten")]
    pub seconds: u32,
    /// How often the run is repeated under the same load, with its events.
    #[serde(default = "one")]
    pub repeat: u32,
    /// What happens to the links, in the order of time.
    #[serde(default)]
    pub event: Vec<Event>,
    /// Events that are drawn instead, and `seconds` with them.
    pub random_cuts: Option<RandomCuts>,
    /// How the client is started.
    #[serde(default)]
    pub client: ClientOptions,
    /// What is asked.
    pub bars: Bars,
    /// What is asked where TCP travels as streams.
    pub stream: Option<Bars>,
    /// How TCP travels; a file is about packets, see [`Scenario::over`].
    #[serde(skip)]
    pub lane: Lane,
}

/// How the bytes of TCP flows travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lane {
    /// In the packets they came in.
    #[default]
    Datagram,
    /// On streams, without these packets.
    Stream,
}

/// Something that happens to a link.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Seconds since the start of the run, or of its repetition.
    pub at_s: f64,
    /// Which link, counted from 1.
    pub link: usize,
    /// What happens.
    #[serde(deserialize_with = "change")]
    pub change: Change,
}

/// What can happen to a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// `cut`: the client's cable is pulled.
    Cut,
    /// `silent`, `silent.up`, `silent.down`: everything is lost, and the carrier stays on.
    Silent(Direction),
    /// `restore`: the link is again as it was described.
    Restore,
    /// Settings as in a link's description, as in `loss=10%,delay.up=30ms`.
    Set(String),
}

/// Options of the client that a scenario is about; what is not given is the client's default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientOptions {
    /// How packets are spread over the paths.
    pub scheduler: Option<String>,
    /// Congestion control of every path.
    pub cc: Option<String>,
    /// Paths a link.
    pub pipes: Option<u32>,
}

/// What shares are shares of.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ShareOf {
    /// (1 − loss) × rate of every link, added up.
    #[default]
    Sum,
    /// What headers leave of the rates: Σ rate × inner TCP payload ÷ bytes that the link counts.
    Ceiling,
    /// What headers and losses leave: the same with (1 − loss) × rate.
    Left,
}

/// What is asked of a tunnel. Lists have an element for each number of flows.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bars {
    /// What the following shares are shares of.
    #[serde(default)]
    pub share_of: ShareOf,
    /// Smallest goodput, as a share.
    #[serde(default)]
    pub min_share: Vec<f64>,
    /// Smallest goodput of the simulated run, as a share. Its TCP is a coarse model, so it is less than `min_share`.
    #[serde(default)]
    pub sim_min_share: Vec<f64>,
    /// Smallest goodput while no link is harmed, Mbit/s.
    pub min_mbit: Option<f64>,
    /// Smallest goodput over the best link alone, Mbit/s.
    pub min_single_mbit: Option<f64>,
    /// No less than over the best link alone.
    #[serde(default)]
    pub not_below_best_single: bool,
    /// Longest time without an answer to pings around an event that harms a link: the median of all repetitions, ms.
    pub max_gap_ms: Option<f64>,
    /// The longest of these, ms.
    pub max_worst_gap_ms: Option<f64>,
    /// The same in the simulated run, ms.
    pub sim_max_gap_ms: Option<f64>,
    /// How many pings may stay without an answer, and how many datagrams of `udp_mbit` may be lost.
    pub max_lost_packets: Option<u64>,
    /// What a sender may send more than without loss, as a multiple of what the loss takes: p ÷ (1 − p) for a loss p.
    pub max_repair: Option<f64>,
    /// How soon after `restore` the goodput is at 80 % of what it was before the harm, seconds.
    pub max_back_s: Option<f64>,
}

impl Scenario {
    /// All scenarios, in the order in which they are run.
    pub fn all() -> Result<Vec<Self>, LabError> {
        FILES.iter().map(|(name, text)| Self::parse(name, text)).collect()
    }

    /// The names of all scenarios.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// Reads a scenario, and checks it.
    fn parse(name: &'static str, text: &str) -> Result<Self, LabError> {
        let wrong = |why: String| LabError::Scenario { name, why };
        let mut scenario: Self = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        scenario.name = name;
        if let Some(cuts) = &scenario.random_cuts {
            if !scenario.event.is_empty() {
                return Err(wrong("event and random_cuts exclude each other".to_owned()));
            }
            cuts.check().map_err(wrong)?;
            let count = cuts.count;
            scenario = scenario.with_cuts(count);
        }
        scenario.check().map_err(wrong)?;
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
        if self.quic && self.directions != downwards() {
            return Err("quic is a download: directions must be [\"down\"]".to_owned());
        }
        if self.bars.max_repair.is_some() && !self.event.is_empty() {
            return Err("max_repair compares with a run without loss: it cannot be with events".to_owned());
        }
        if self.links.iter().any(|link| link.up.rate.is_none() || link.down.rate.is_none()) {
            return Err("every link needs a rate, or shares mean nothing".to_owned());
        }
        let mut last = 0.0;
        for event in &self.event {
            let link = event.link.checked_sub(1).and_then(|index| self.links.get(index));
            let Some(link) = link else {
                return Err(format!("an event is about link {}, of {}", event.link, self.links.len()));
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

    /// The scenario as it is played over that lane, which only TCP has a choice of; `None` where nothing is asked of it.
    pub fn over(self, lane: Lane) -> Option<Self> {
        match lane {
            Lane::Datagram => Some(Self { lane, ..self }),
            Lane::Stream => {
                let bars = self.stream.clone()?;
                Some(Self { lane, bars, quic: false, udp_mbit: None, ..self })
            }
        }
    }

    /// (1 − loss) × rate of every link in a direction, added up.
    pub fn sum(&self, direction: Direction) -> BitRate {
        add_up(self.links.iter().map(|link| usable(link, direction)))
    }

    /// The share of what all links carry that they lose in a direction.
    pub fn loss(&self, direction: Direction) -> f64 {
        let carried: u64 =
            self.links.iter().map(|link| link.towards(direction).rate.unwrap_or_default().bps()).sum();
        1.0 - self.sum(direction).bps() as f64 / carried.max(1) as f64
    }

    /// The goodput of inner TCP that headers and the rates leave, whatever the loss.
    pub fn ceiling(&self, direction: Direction) -> BitRate {
        let rate = |link: &LinkSpec| link.towards(direction).rate.unwrap_or_default();
        add_up(self.links.iter().map(|link| self.payload(link, rate(link))))
    }

    /// The goodput of inner TCP that headers, rates and losses leave.
    pub fn left(&self, direction: Direction) -> BitRate {
        add_up(self.links.iter().map(|link| self.payload(link, usable(link, direction))))
    }

    /// What a rate of a link is worth in payload of inner TCP.
    fn payload(&self, link: &LinkSpec, rate: BitRate) -> BitRate {
        let headers = match self.lane {
            Lane::Datagram => HEADERS,
            Lane::Stream => HEADERS_OF_STREAMS,
        };
        let counted = u64::from(FULL_PACKET + link.count.overhead());
        BitRate::from_bps(rate.bps() * u64::from(FULL_PACKET - headers) / counted)
    }

    /// What shares are shares of.
    pub fn whole(&self, direction: Direction) -> BitRate {
        match self.bars.share_of {
            ShareOf::Sum => self.sum(direction),
            ShareOf::Ceiling => self.ceiling(direction),
            ShareOf::Left => self.left(direction),
        }
    }

    /// The links of which one may be the best alone, counted from 0: the others have less than half of the usable rate
    /// of one of these, or are like one of these.
    pub fn candidates(&self, direction: Direction) -> Vec<usize> {
        let rates: Vec<u64> = self.links.iter().map(|link| usable(link, direction).bps()).collect();
        let most = rates.iter().copied().max().unwrap_or(0);
        let is_new = |index: usize| !self.links[..index].contains(&self.links[index]);
        (0..rates.len()).filter(|index| rates[*index] * 2 >= most && is_new(*index)).collect()
    }

    /// When links are harmed and when they are as they should be again, within a repetition: pairs of times.
    pub fn harms(&self) -> Vec<(Duration, Duration)> {
        let end = Duration::from_secs(self.seconds.into());
        let harms = self.event.iter().enumerate().filter(|(_, event)| event.change != Change::Restore);
        let until = |from: usize, link: usize| {
            let mut later = self.event[from..].iter();
            later.find(|event| event.link == link && event.change == Change::Restore).map(Event::at)
        };
        harms.map(|(n, event)| (event.at(), until(n, event.link).unwrap_or(end))).collect()
    }
}

impl Event {
    /// When it happens, since the start of the run or of its repetition.
    pub fn at(&self) -> Duration {
        Duration::from_secs_f64(self.at_s)
    }
}

impl Change {
    /// Lets it happen to a link of a running lab, which was described by `spec`.
    pub fn apply(&self, link: &LinkHandle, spec: &LinkSpec) -> Result<(), LabError> {
        let mut spec = spec.clone();
        match self {
            Self::Cut => return link.down(),
            Self::Silent(direction) => return link.loss(*direction, 1.0),
            // Plugging in what is plugged in would tell the client of the end of a silence.
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

fn usable(link: &LinkSpec, direction: Direction) -> BitRate {
    let params = link.towards(direction);
    BitRate::from_bps((params.rate.unwrap_or_default().bps() as f64 * (1.0 - params.loss)).round() as u64)
}

fn add_up(rates: impl Iterator<Item = BitRate>) -> BitRate {
    BitRate::from_bps(rates.map(BitRate::bps).sum())
}

fn downwards() -> Vec<Direction> {
    vec![Direction::Down]
}

fn ten() -> u32 {
    10
}

fn one() -> u32 {
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

    fn wrong(more: &str) -> String {
        match Scenario::parse("made_up", &format!("{TWO}{more}")) {
            Err(error) => error.to_string(),
            Ok(scenario) => panic!("it was taken: {scenario:?}"),
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
    fn sums_leave_out_losses_and_ceilings_leave_out_headers() {
        let text =
            format!("{}[bars]\nshare_of = 'ceiling'", TWO.replace("'100mbit'", "'100mbit,count=ethernet'"));
        let scenario = Scenario::parse("made_up", &text).unwrap();
        assert_eq!(scenario.sum(Direction::Down).bps(), 145_000_000);
        assert!((scenario.loss(Direction::Down) - 5.0 / 150.0).abs() < 1e-9);
        assert_eq!(scenario.ceiling(Direction::Up).bps(), 100_000_000 * 1380 / 1514 + 46_000_000);
        assert_eq!(scenario.whole(Direction::Up), scenario.ceiling(Direction::Up));
    }

    #[test]
    fn streams_have_bars_and_headers_of_their_own() {
        let text = format!(
            "{}udp_mbit = 5\n[bars]\n[stream]\nshare_of = 'left'\nmin_share = [0.9]",
            TWO.replace("'100mbit'", "'100mbit,count=ethernet'")
        );
        let scenario = Scenario::parse("made_up", &text).unwrap();
        let streams = scenario.clone().over(Lane::Stream).unwrap();
        assert_eq!(
            (streams.lane, streams.udp_mbit, &streams.bars.min_share[..]),
            (Lane::Stream, None, &[0.9][..])
        );
        assert_eq!(streams.ceiling(Direction::Up).bps(), 100_000_000 * 1437 / 1514 + 47_900_000);
        assert_eq!(streams.whole(Direction::Up).bps(), 100_000_000 * 1437 / 1514 + 43_110_000);
        assert_eq!(scenario.over(Lane::Datagram).unwrap().udp_mbit, Some(5));
        assert!(Scenario::parse("made_up", &format!("{TWO}[bars]")).unwrap().over(Lane::Stream).is_none());
    }

    #[test]
    fn links_that_cannot_be_the_best_are_not_tried_alone() {
        let candidates = |links: &str| {
            let text = format!("story = 's'\nlinks = [{links}]\nflows = [1]\n[bars]");
            Scenario::parse("made_up", &text).unwrap().candidates(Direction::Down)
        };
        assert_eq!(candidates("'50mbit', '50mbit'"), [0]);
        assert_eq!(candidates("'50mbit', '50mbit,loss=1%'"), [0, 1]);
        assert_eq!(candidates("'30mbit', '80mbit'"), [1]);
    }

    #[test]
    fn a_harm_lasts_until_its_link_is_restored() {
        let text = format!(
            "{TWO}event = [{{ at_s = 1, link = 1, change = 'cut' }}, {{ at_s = 2, link = 2, change = 'loss.up=3%' }}, \
             {{ at_s = 3.5, link = 1, change = 'restore' }}]\n[bars]"
        );
        let scenario = Scenario::parse("made_up", &text).unwrap();
        let seconds = |pair: &(Duration, Duration)| (pair.0.as_secs_f64(), pair.1.as_secs_f64());
        assert_eq!(scenario.harms().iter().map(seconds).collect::<Vec<_>>(), [(1.0, 3.5), (2.0, 10.0)]);
    }

    #[test]
    fn mistakes_are_named() {
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
            let error = wrong(more);
            assert!(error.contains(said) && error.contains("made_up"), "{more}: {error}");
        }
    }
}
