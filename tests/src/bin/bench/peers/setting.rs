//! The links on which systems are compared.

use mpvpn_tests::stage::{Place, Stage};
use serde_json::Value;

/// The two ends of the link.
const ENDS: [(Place, &str); 2] = [(Place::Client, "eth1"), (Place::Server, "up1")];
/// Everything by which packets could cross a veth pair in one piece.
const OFFLOADS: [&str; 4] = ["tso", "gso", "gro", "tx-udp-segmentation"];
/// The largest frame that Ethernet carries, without its checksum: bytes.
const FRAME: f64 = 1514.0;

/// One link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Setting {
    Veth,
    Plain,
    Gigabit,
    Slow,
}

impl Setting {
    pub(crate) const ALL: [Self; 4] = [Self::Veth, Self::Plain, Self::Gigabit, Self::Slow];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Plain => "plain",
            Self::Gigabit => "gigabit",
            Self::Slow => "slow",
        }
    }

    pub(crate) fn about(self) -> &'static str {
        match self {
            Self::Veth => "a veth pair as it is: no limit, large packets cross whole",
            Self::Plain => "a veth pair without segmentation offloads: no limit, no frame above 1514 bytes",
            Self::Gigabit => "the same with 1 Gbit/s each way (tbf, 20 ms of queue)",
            Self::Slow => "emulated: 100 Mbit/s, 5 ms each way, 60 ms of queue",
        }
    }

    /// Builds it.
    pub(crate) fn stage(self) -> Stage {
        if self == Self::Slow {
            return Stage::new(&["100mbit,5ms,queue=60ms"]);
        }
        let stage = Stage::unlimited();
        for (place, device) in ENDS {
            if matches!(self, Self::Plain | Self::Gigabit) {
                let mut words = vec!["ethtool", "-K", device];
                words.extend(OFFLOADS.iter().flat_map(|offload| [offload, "off"]));
                stage.run(place, &words);
            }
            if self == Self::Gigabit {
                let shape = ["rate", "1gbit", "burst", "64kb", "latency", "20ms"];
                stage.run(
                    place,
                    &[&["tc", "qdisc", "add", "dev", device, "root", "tbf"], &shape[..]].concat(),
                );
            }
        }
        stage
    }

    /// Complains if frames of that mean size show that packets crossed whole where they should not.
    pub(crate) fn check_frames(self, mean: f64) -> Result<(), String> {
        let whole = matches!(self, Self::Plain | Self::Gigabit) && mean > FRAME;
        if whole {
            Err(format!("frames of {mean:.0} bytes on the link, although its offloads are off"))
        } else {
            Ok(())
        }
    }
}

/// Frames and their bytes that the server's end has received and sent.
pub(crate) fn frames(stage: &Stage) -> (f64, f64) {
    let (place, device) = ENDS[1];
    let listing = stage.run(place, &["ip", "-j", "-s", "link", "show", "dev", device]);
    let stats: Value = serde_json::from_str(&listing).unwrap_or_default();
    let count = |what: &str| {
        ["rx", "tx"].iter().filter_map(|way| stats[0]["stats64"][way][what].as_f64()).sum::<f64>()
    };
    (count("packets"), count("bytes"))
}
