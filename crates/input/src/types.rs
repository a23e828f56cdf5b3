//! How the types that all crates share are written in options and files.

use mpvpn_path::Scheduler;
use mpvpn_types::{
    BitRate, ByteSize, ClassName, CongestionControl, Domain, Fec, FlowMode, Portion, Tier, Transport, Weight,
};

use crate::values::Text;

/// Lowest limit of a link. With less, heartbeats and acknowledgements would leave nothing for data; more
/// would exclude slow links.
const MIN_LINK_RATE: BitRate = BitRate::from_bps(64_000);
/// Highest limit of a link, 1 Tbit/s: above any interface of today, and low enough that no arithmetic on
/// rates overflows.
const MAX_LINK_RATE: BitRate = BitRate::from_bps(1_000_000_000_000);
/// Lowest quota of a month, 1 MB: less would be used up by heartbeats within minutes, and is most likely a
/// wrong unit.
const MIN_QUOTA: ByteSize = ByteSize::from_bytes(1_000_000);

crate::text_of_words!(CongestionControl, FlowMode, Scheduler, Tier, Transport);

crate::text_of_parsed! {
    ClassName: "the name of a class in quotes", as in "voice";
    Domain: "a domain in quotes, as in \"home.arpa\"", as in "home.arpa";
    Fec: "\"off\", \"auto\", or packets and repair packets as in \"10+2\"", as in "10+2";
    Portion: "a part of a link in quotes, as in \"10mbit\" or \"20%\"", as in "20%";
    Weight: "a weight in quotes, as in \"3\"", as in "3";
}

impl Text for BitRate {
    const EXPECTED: &'static str = "a rate in quotes, as in \"20mbit\"";
    const EXAMPLE: &'static str = "20mbit";

    fn read(text: &str) -> Result<Self, String> {
        let rate: Self = text.parse().map_err(|error: mpvpn_types::ParseBitRateError| error.to_string())?;
        match rate {
            rate if rate < MIN_LINK_RATE => {
                Err(format!("{rate} is too little: expected at least {MIN_LINK_RATE}"))
            }
            rate if rate > MAX_LINK_RATE => {
                Err(format!("{rate} is too much: expected at most {MAX_LINK_RATE}"))
            }
            rate => Ok(rate),
        }
    }
}

impl Text for ByteSize {
    const EXPECTED: &'static str = "an amount of data in quotes, as in \"50GB\"";
    const EXAMPLE: &'static str = "50GB";

    fn read(text: &str) -> Result<Self, String> {
        let size: Self = text.parse().map_err(|error: mpvpn_types::ParseByteSizeError| error.to_string())?;
        match size < MIN_QUOTA {
            true => Err(format!("{size} is too little: expected at least {MIN_QUOTA}")),
            false => Ok(size),
        }
    }
}
