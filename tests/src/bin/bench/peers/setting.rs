//! The links on which systems are compared.

use mpvpn_tests::testbed::{Host, Testbed};
use serde_json::Value;

/// The two ends of the link.
const ENDS: [(Host, &str); 2] = [(Host::Client, "eth1"), (Host::Server, "up1")];
/// The offloads by which super-packets could cross a veth pair unsegmented.
const OFFLOADS: [&str; 4] = ["tso", "gso", "gro", "tx-udp-segmentation"];
/// Largest Ethernet frame without checksum, bytes.
const MAX_FRAME_BYTES: f64 = 1514.0;

/// A kind of link.
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

    /// Builds a testbed with this link.
    pub(crate) fn testbed(self) -> Testbed {
        if self == Self::Slow {
            return Testbed::new(&["100mbit,5ms,queue=60ms"]);
        }
        let testbed = Testbed::unlimited();
        for (host, device) in ENDS {
            if matches!(self, Self::Plain | Self::Gigabit) {
                let mut args = vec!["ethtool", "-K", device];
                args.extend(OFFLOADS.iter().flat_map(|offload| [offload, "off"]));
                testbed.run(host, &args);
            }
            if self == Self::Gigabit {
                let shape = ["rate", "1gbit", "burst", "64kb", "latency", "20ms"];
                testbed
                    .run(host, &[&["tc", "qdisc", "add", "dev", device, "root", "tbf"], &shape[..]].concat());
            }
        }
        testbed
    }

    /// Fails if the mean frame size shows unsegmented super-packets although offloads are off.
    pub(crate) fn check_frames(self, mean: f64) -> Result<(), String> {
        let whole = matches!(self, Self::Plain | Self::Gigabit) && mean > MAX_FRAME_BYTES;
        if whole {
            Err(format!("frames of {mean:.0} bytes on the link, although its offloads are off"))
        } else {
            Ok(())
        }
    }
}

/// Number and bytes of frames that the server's end has received and sent.
pub(crate) fn frames(testbed: &Testbed) -> (f64, f64) {
    let (host, device) = ENDS[1];
    let listing = testbed.run(host, &["ip", "-j", "-s", "link", "show", "dev", device]);
    let stats: Value = serde_json::from_str(&listing).unwrap_or_default();
    let count = |what: &str| {
        ["rx", "tx"].iter().filter_map(|direction| stats[0]["stats64"][direction][what].as_f64()).sum::<f64>()
    };
    (count("packets"), count("bytes"))
}
