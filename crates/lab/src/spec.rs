//! The text form of a link: `100mbit,12ms,jitter=3ms,loss=1%,queue=60ms,mtu=1500`.
//!
//! A bare rate is `rate=`, a bare time is `delay=`; a setting holds for both directions unless `.up` or
//! `.down` follows its name (`loss.up=1%`), and `up=20mbit` is short for `rate.up=20mbit`. Up is from the
//! client to the server. The printed form of a link parses to the same link.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use mpvpn_types::BitRate;

use crate::{link::Direction, queue::Discipline};

/// Longest delay, jitter or queue. It bounds the memory of a link; with a shorter one slow links cannot be
/// emulated (`docs/design/lab.md`).
const MAX_DURATION: Duration = Duration::from_secs(10);
/// Largest MTU, in bytes: jumbo frames. It bounds the size of frame buffers.
const MAX_MTU_BYTES: u32 = 9000;
/// Smallest MTU, in bytes: every IPv4 link must carry packets of 68 bytes (RFC 791).
const MIN_MTU_BYTES: u32 = 68;
/// The names of the disciplines of a queue.
const DISCIPLINES: [(Discipline, &str); 4] = [
    (Discipline::TailDrop, "tail_drop"),
    (Discipline::CoDel, "codel"),
    (Discipline::FqCoDel, "fq_codel"),
    (Discipline::Policer, "policer"),
];

/// The settings of one direction of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelParams {
    /// The rate of the bottleneck; `None`: no limit.
    pub rate: Option<BitRate>,
    /// One-way delay, without queueing.
    pub delay: Duration,
    /// The delay of each packet varies, uniformly distributed, by up to this much in either direction, but
    /// without reordering.
    pub jitter: Duration,
    /// The share of packets that is lost at random behind the bottleneck, 0 to 1.
    pub loss: f64,
    /// The packets of a burst of random loss, on average; 0 or 1: each is lost by itself.
    pub burst: u32,
    /// The length of the queue in front of the bottleneck, as time at its rate; further packets are dropped.
    pub queue: Duration,
    /// The discipline of that queue.
    pub discipline: Discipline,
    /// IP packets larger than this many bytes are dropped without an ICMP error (a black hole).
    pub mtu: Option<u32>,
    /// The rate to which an operator's shaper limits each UDP flow (5-tuple), in front of the bottleneck;
    /// the queue of each flow has the length `queue`.
    pub session_rate: Option<BitRate>,
    /// The share of UDP packets from or to a port that is lost at random, 0 to 1, before everything else.
    pub port_loss: BTreeMap<u16, f64>,
}

impl Default for ChannelParams {
    fn default() -> Self {
        Self {
            rate: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            burst: 1,
            queue: Duration::from_millis(60),
            discipline: Discipline::TailDrop,
            mtu: None,
            session_rate: None,
            port_loss: BTreeMap::new(),
        }
    }
}

impl ChannelParams {
    /// Changes one setting by its name (`rate`, `delay`, `jitter`, `loss`, `burst`, `queue`, `discipline`,
    /// `mtu`, `session_rate`, `port_loss`).
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ParseSpecError> {
        match key {
            "rate" => self.rate = parse_rate(value)?,
            "delay" => self.delay = parse_time(value)?,
            "jitter" => self.jitter = parse_time(value)?,
            "loss" => self.loss = parse_share(value)?,
            "burst" => self.burst = value.parse().map_err(|_| ParseSpecError::Burst(value.to_owned()))?,
            "queue" => self.queue = parse_time(value)?,
            "discipline" => self.discipline = parse_discipline(value)?,
            "mtu" => self.mtu = Some(parse_mtu(value)?),
            "session_rate" => self.session_rate = parse_rate(value)?,
            "port_loss" => self.port_loss = parse_port_loss(value)?,
            _ => return Err(ParseSpecError::Key(key.to_owned())),
        }
        Ok(())
    }

    /// The names of all settings in the order of printing, with their values; `None` for a default value.
    fn settings(&self) -> [(&'static str, Option<String>); 10] {
        let default = Self::default();
        let of_port = |(port, share): (&u16, &f64)| format!("{port}:{share}");
        let discipline =
            DISCIPLINES.iter().find(|(own, _)| *own == self.discipline && *own != default.discipline);
        let ports: Vec<String> = self.port_loss.iter().map(of_port).collect();
        let time = |key, value: Duration, usual| (key, (value != usual).then(|| Time(value).to_string()));
        [
            ("rate", self.rate.map(|rate| rate.to_string())),
            time("delay", self.delay, default.delay),
            time("jitter", self.jitter, default.jitter),
            ("loss", (self.loss != 0.0).then(|| format!("{}", self.loss))),
            ("burst", (self.burst != default.burst).then(|| self.burst.to_string())),
            time("queue", self.queue, default.queue),
            ("discipline", discipline.map(|(_, name)| (*name).to_owned())),
            ("mtu", self.mtu.map(|mtu| mtu.to_string())),
            ("session_rate", self.session_rate.map(|rate| rate.to_string())),
            ("port_loss", (!ports.is_empty()).then(|| ports.join("+"))),
        ]
    }
}

/// The bytes of a packet that the rate of the bottleneck counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteCount {
    /// Those of the IP packet.
    #[default]
    Ip,
    /// Those of the Ethernet frame: 14 more.
    Ethernet,
}

impl ByteCount {
    /// Bytes that are counted for each packet in addition to the IP packet.
    pub fn overhead(self) -> u32 {
        match self {
            Self::Ip => 0,
            Self::Ethernet => 14,
        }
    }
}

/// The implementation of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkKind {
    /// Two TAP devices with the emulation between them.
    #[default]
    Emulated,
    /// A veth pair, as fast as the kernel.
    Veth,
}

/// The description of a link: both directions, and settings for both.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkSpec {
    /// The implementation.
    pub kind: LinkKind,
    /// From the client to the server.
    pub up: ChannelParams,
    /// From the server to the client.
    pub down: ChannelParams,
    /// The bytes that its rates count.
    pub count: ByteCount,
}

impl LinkSpec {
    /// A veth pair without emulation, to measure the highest rate of a system.
    pub fn unlimited() -> Self {
        Self { kind: LinkKind::Veth, ..Self::default() }
    }

    /// The MTU of the two devices, in bytes, at least 1500: a smaller `mtu` is a black hole behind the
    /// devices.
    pub fn device_mtu(&self) -> u32 {
        [self.up.mtu, self.down.mtu].into_iter().flatten().max().unwrap_or(0).max(1500)
    }

    /// The settings of one direction; for [`Direction::Both`] those of the direction up.
    pub fn towards(&self, direction: Direction) -> &ChannelParams {
        if direction == Direction::Down { &self.down } else { &self.up }
    }

    /// Changes settings, given in the text form: `loss=10%,delay.up=30ms`.
    pub fn change(&mut self, settings: &str) -> Result<(), ParseSpecError> {
        for word in settings.split(',').map(str::trim) {
            let (key, value) = word.split_once('=').ok_or_else(|| ParseSpecError::Word(word.to_owned()))?;
            self.apply(key.trim(), value.trim())?;
        }
        Ok(())
    }

    fn apply(&mut self, key: &str, value: &str) -> Result<(), ParseSpecError> {
        if key == "count" {
            self.count = match value {
                "ip" => ByteCount::Ip,
                "ethernet" => ByteCount::Ethernet,
                _ => return Err(ParseSpecError::Count(value.to_owned())),
            };
            return Ok(());
        }
        let (key, direction) = match key {
            "up" => ("rate", Some(Direction::Up)),
            "down" => ("rate", Some(Direction::Down)),
            _ => match key.split_once('.') {
                Some((name, "up")) => (name, Some(Direction::Up)),
                Some((name, "down")) => (name, Some(Direction::Down)),
                Some(_) => return Err(ParseSpecError::Key(key.to_owned())),
                None => (key, None),
            },
        };
        if direction != Some(Direction::Down) {
            self.up.set(key, value)?;
        }
        if direction != Some(Direction::Up) {
            self.down.set(key, value)?;
        }
        Ok(())
    }
}

/// A text that is no description of a link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSpecError {
    /// The text is empty.
    #[error("a link needs a description, as in 100mbit,12ms,loss=1%")]
    Empty,
    /// An unknown setting.
    #[error(
        "links have no setting `{0}`: use rate, delay, jitter, loss, burst, queue, discipline, mtu, session_rate and port_loss (each also with .up or .down), up, down or count"
    )]
    Key(String),
    /// A word that is neither a rate nor a time nor a setting.
    #[error("`{0}` is neither a rate (100mbit) nor a time (12ms) nor a setting (loss=1%)")]
    Word(String),
    /// An invalid rate.
    #[error("`{0}` is not a rate of 1 kbit/s or more, as in 100mbit")]
    Rate(String),
    /// An invalid time.
    #[error("`{0}` is not a time between 0 and 10 s, as in 12.5ms")]
    Time(String),
    /// An invalid share.
    #[error("`{0}` is not a share between 0 and 100 %, as in 1% or 0.01")]
    Share(String),
    /// An invalid length of bursts.
    #[error("`{0}` is not a number of packets, as in burst=8")]
    Burst(String),
    /// An unknown discipline of a queue.
    #[error("`{0}` is no discipline of a queue: use tail_drop, codel, fq_codel or policer")]
    Discipline(String),
    /// An invalid loss of ports.
    #[error("`{0}` is not PORT:SHARE, as in 40001:30%: join several by +, or write none to remove the loss")]
    PortLoss(String),
    /// An invalid packet size.
    #[error("`{0}` is not a packet size between 68 and 9000 bytes")]
    Mtu(String),
    /// An unknown way to count bytes.
    #[error("`{0}` is no way to count bytes: use ip or ethernet")]
    Count(String),
}

impl FromStr for LinkSpec {
    type Err = ParseSpecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim().to_ascii_lowercase();
        match text.as_str() {
            "" => return Err(ParseSpecError::Empty),
            "unlimited" | "veth" => return Ok(Self::unlimited()),
            _ => {}
        }
        let mut spec = Self::default();
        for word in text.split(',').map(str::trim) {
            if let Some((key, value)) = word.split_once('=') {
                spec.apply(key.trim(), value.trim())?;
            } else if let Ok(rate) = parse_rate(word) {
                (spec.up.rate, spec.down.rate) = (rate, rate);
            } else if let Ok(delay) = parse_time(word) {
                (spec.up.delay, spec.down.delay) = (delay, delay);
            } else {
                return Err(ParseSpecError::Word(word.to_owned()));
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == LinkKind::Veth {
            return f.write_str("unlimited");
        }
        let mut words = Vec::new();
        for ((key, up), (_, down)) in self.up.settings().into_iter().zip(self.down.settings()) {
            if up == down {
                words.extend(up.map(|value| match key {
                    "rate" | "delay" => value,
                    _ => format!("{key}={value}"),
                }));
                continue;
            }
            words.extend(up.map(|value| format!("{key}.up={value}")));
            words.extend(down.map(|value| format!("{key}.down={value}")));
        }
        if self.count == ByteCount::Ethernet {
            words.push("count=ethernet".to_owned());
        }
        if words.is_empty() {
            words.push("delay=0ms".to_owned());
        }
        f.write_str(&words.join(","))
    }
}

/// Prints a duration in s or ms, exact to the nanosecond.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.as_nanos();
        if ns.is_multiple_of(1_000_000_000) {
            return write!(f, "{}s", ns / 1_000_000_000);
        }
        let (whole, rest) = (ns / 1_000_000, ns % 1_000_000);
        if rest == 0 {
            return write!(f, "{whole}ms");
        }
        let fraction = format!("{rest:06}");
        write!(f, "{whole}.{}ms", fraction.trim_end_matches('0'))
    }
}

/// Parses a rate; `unlimited` means no limit.
fn parse_rate(text: &str) -> Result<Option<BitRate>, ParseSpecError> {
    if text == "unlimited" {
        return Ok(None);
    }
    let rate: BitRate = text.parse().map_err(|_| ParseSpecError::Rate(text.to_owned()))?;
    if rate.bps() < 1000 {
        return Err(ParseSpecError::Rate(text.to_owned()));
    }
    Ok(Some(rate))
}

fn parse_discipline(text: &str) -> Result<Discipline, ParseSpecError> {
    let found = DISCIPLINES.into_iter().find(|(_, name)| *name == text);
    found.map(|(discipline, _)| discipline).ok_or_else(|| ParseSpecError::Discipline(text.to_owned()))
}

fn parse_time(text: &str) -> Result<Duration, ParseSpecError> {
    let error = || ParseSpecError::Time(text.to_owned());
    let split = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(error)?;
    let (number, unit) = text.split_at(split);
    let ns_per_unit = match unit {
        "s" => 1e9,
        "ms" => 1e6,
        "us" => 1e3,
        "ns" => 1.0,
        _ => return Err(error()),
    };
    let value: f64 = number.trim().parse().map_err(|_| error())?;
    let ns = (value * ns_per_unit).round();
    if !(0.0..=MAX_DURATION.as_nanos() as f64).contains(&ns) {
        return Err(error());
    }
    Ok(Duration::from_nanos(ns as u64))
}

/// Parses a share: `30%` or `0.3`.
pub fn parse_share(text: &str) -> Result<f64, ParseSpecError> {
    let error = || ParseSpecError::Share(text.to_owned());
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text, 1.0),
    };
    let share = number.trim().parse::<f64>().map_err(|_| error())? / unit;
    if !(0.0..=1.0).contains(&share) {
        return Err(error());
    }
    Ok(share)
}

fn parse_port_loss(text: &str) -> Result<BTreeMap<u16, f64>, ParseSpecError> {
    if text == "none" {
        return Ok(BTreeMap::new());
    }
    let one = |word: &str| {
        let (port, share) = word.split_once(':')?;
        Some((port.parse().ok()?, parse_share(share).ok()?))
    };
    let all: Option<BTreeMap<_, _>> = text.split('+').map(one).collect();
    all.ok_or_else(|| ParseSpecError::PortLoss(text.to_owned()))
}

fn parse_mtu(text: &str) -> Result<u32, ParseSpecError> {
    let error = || ParseSpecError::Mtu(text.to_owned());
    let mtu = text.parse().map_err(|_| error())?;
    if !(MIN_MTU_BYTES..=MAX_MTU_BYTES).contains(&mtu) {
        return Err(error());
    }
    Ok(mtu)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(text: &str) -> LinkSpec {
        text.parse().unwrap()
    }

    #[test]
    fn a_link_is_described_in_one_line() {
        let link = spec("100mbit,12ms,jitter=3ms,loss=1%,queue=60ms,mtu=1500");
        assert_eq!(link.up, link.down);
        assert_eq!(link.up.rate, Some(BitRate::from_bps(100_000_000)));
        assert_eq!(link.up.delay, Duration::from_millis(12));
        assert_eq!(link.up.jitter, Duration::from_millis(3));
        assert_eq!(link.up.loss, 0.01);
        assert_eq!(link.up.queue, Duration::from_millis(60));
        assert_eq!(link.up.mtu, Some(1500));
        assert_eq!(spec("12.5ms").up.delay, Duration::from_micros(12_500));
        assert_eq!(
            spec("1gbit,session_rate.down=80mbit").down.session_rate,
            Some(BitRate::from_bps(80_000_000))
        );
    }

    #[test]
    fn directions_can_differ() {
        let link = spec("down=100mbit,up=20mbit,loss.up=1%,delay.down=30ms,count=ethernet");
        assert_eq!(link.down.rate, Some(BitRate::from_bps(100_000_000)));
        assert_eq!(link.up.rate, Some(BitRate::from_bps(20_000_000)));
        assert_eq!((link.up.loss, link.down.loss), (0.01, 0.0));
        assert_eq!((link.up.delay, link.down.delay), (Duration::ZERO, Duration::from_millis(30)));
        assert_eq!(link.count.overhead(), 14);
    }

    #[test]
    fn a_limit_below_1500_is_a_black_hole_and_one_above_needs_larger_devices() {
        assert_eq!(spec("mtu=1400").device_mtu(), 1500);
        assert_eq!(spec("mtu=9000").device_mtu(), 9000);
    }

    #[test]
    fn wrong_descriptions_say_what_is_wrong() {
        for (text, expected) in [
            ("", "needs a description"),
            ("100mbit,", "neither a rate"),
            ("100", "neither a rate"),
            ("speed=1mbit", "no setting `speed`"),
            ("loss.left=1%", "no setting `loss.left`"),
            ("loss=101%", "not a share"),
            ("loss=NaN", "not a share"),
            ("delay=-1ms", "not a time"),
            ("delay=11s", "not a time"),
            ("rate=0mbit", "not a rate"),
            ("mtu=67", "not a packet size"),
            ("port_loss=30%", "PORT:SHARE"),
            ("port_loss=1:30%+70000:1%", "PORT:SHARE"),
            ("count=atm", "no way to count"),
            ("burst=-1", "not a number of packets"),
            ("discipline=red", "no discipline of a queue"),
        ] {
            let error = text.parse::<LinkSpec>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_plain_veth_has_its_own_name() {
        assert_eq!(spec("unlimited"), LinkSpec::unlimited());
        assert_eq!(LinkSpec::unlimited().to_string(), "unlimited");
    }

    fn params() -> impl Strategy<Value = ChannelParams> {
        let time = || (0..=10_000_000_000u64).prop_map(Duration::from_nanos);
        (
            proptest::option::of((1000u64..1 << 40).prop_map(BitRate::from_bps)),
            time(),
            time(),
            prop_oneof![Just(0.0), 0.0..=1.0f64],
            time(),
            proptest::option::of(MIN_MTU_BYTES..=MAX_MTU_BYTES),
            proptest::option::of((1000u64..1 << 40).prop_map(BitRate::from_bps)),
            proptest::collection::btree_map(any::<u16>(), 0.0..=1.0f64, 0..3),
            any::<u32>(),
            prop::sample::select(DISCIPLINES.map(|(discipline, _)| discipline).to_vec()),
        )
            .prop_map(
                |(rate, delay, jitter, loss, queue, mtu, session_rate, port_loss, burst, discipline)| {
                    ChannelParams {
                        rate,
                        delay,
                        jitter,
                        loss,
                        burst,
                        queue,
                        discipline,
                        mtu,
                        session_rate,
                        port_loss,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_the_same(up in params(), down in params(), ethernet: bool) {
            let count = if ethernet { ByteCount::Ethernet } else { ByteCount::Ip };
            let link = LinkSpec { up, down, count, kind: LinkKind::Emulated };
            prop_assert_eq!(link.to_string().parse::<LinkSpec>(), Ok(link));
        }

        #[test]
        fn any_text_is_parsed_without_panic(text in ".{0,60}") {
            let _ = text.parse::<LinkSpec>();
        }
    }
}
