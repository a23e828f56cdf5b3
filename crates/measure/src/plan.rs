//! The steps of a measurement, and the data that they use.

use std::{path::PathBuf, time::Duration};

use mpvpn_types::{BitRate, FlowMode};

/// Duration of a TCP load without other wishes: several times the slow start over links of 100 ms. With 12
/// loads and the steps of UDP two links take less than five minutes.
pub const DEFAULT_LOAD_SECONDS: u32 = 6;
/// Numbers of TCP connections.
pub(super) const FLOWS: [u32; 2] = [1, 8];
/// Longest time in which the latency without load is measured (s): 200 requests, of which two exceed the 99th
/// percentile.
const MAX_IDLE_SECONDS: u32 = 5;
/// Time between two echo requests without load: rare enough not to count as load. Chosen.
pub(super) const IDLE_INTERVAL: Duration = Duration::from_millis(25);
/// Time between two echo requests under load: rare enough not to count as load. Chosen.
pub(super) const LOADED_INTERVAL: Duration = Duration::from_millis(50);
/// Steps of the UDP sweep over all links, as parts of the highest TCP rate: far below it, around it, and
/// above. Chosen.
pub(super) const UDP_STEPS: &[f64] = &[0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25];
/// The same over one link, fewer because there are several. Chosen.
pub(super) const UDP_STEPS_OF_LINK: &[f64] = &[0.25, 0.5, 0.8, 0.9, 1.0, 1.1];
/// Bisections between the highest rate without and the lowest with 1 % loss. Chosen.
pub(super) const UDP_BISECTIONS: u32 = 1;
/// Loss from which a rate counts as too high (percent).
pub(super) const MAX_LOSS_PCT: f64 = 1.0;
/// Rate of the highest UDP step where no TCP rate is known (bit/s). Chosen.
pub(super) const UDP_RATE_WITHOUT_TCP: f64 = 50e6;
/// When the link of `--cut` is used no more, when it is again, and the end (s).
pub const CUT_SECONDS: [u32; 3] = [20, 40, 60];
/// Connections of a load over hours.
pub(super) const HOURS_FLOWS: u32 = 8;

/// The plan of a measurement.
#[derive(Clone, Debug)]
pub struct MeasurePlan {
    /// The socket of the client.
    pub socket: PathBuf,
    /// The links; all that the client uses if it is empty.
    pub links: Vec<String>,
    /// How TCP connections travel; `None`: as others to this address.
    pub lane: Option<FlowMode>,
    /// Duration of each TCP load (s).
    pub load_seconds: u32,
    /// The link that is not used for a while.
    pub cut: Option<String>,
    /// Duration of the load over hours.
    pub hours: Option<f64>,
    /// Limit of the rate of the load over hours.
    pub rate: Option<BitRate>,
    /// Whether only the cut or the hours are measured.
    pub only_long: bool,
}

impl MeasurePlan {
    /// Duration of a step of the UDP sweep without its warm-up: a quarter of a load, and 2 s at most.
    pub(super) fn udp_step(&self) -> Duration {
        (Duration::from_secs(self.load_seconds.into()) / 4).min(Duration::from_secs(2))
    }

    /// Number of echo requests without load.
    pub(super) fn idle_requests(&self) -> u32 {
        self.load_seconds.min(MAX_IDLE_SECONDS) * 1000 / IDLE_INTERVAL.as_millis() as u32
    }

    /// Seconds for which one of `links` links carries what it can.
    pub fn full_seconds(&self, links: u32) -> f64 {
        let loads = FLOWS.len() as u32 * 2;
        let sets = if links > 1 { 2 } else { 1 };
        let load = f64::from(loads * sets * self.load_seconds);
        let of_link = if links > 1 { UDP_STEPS_OF_LINK.len() as u32 + UDP_BISECTIONS } else { 0 };
        let steps = UDP_STEPS.len() as u32 + UDP_BISECTIONS + of_link;
        let udp = f64::from(steps) * 2.0 * 1.5 * self.udp_step().as_secs_f64();
        let short = if self.only_long { 0.0 } else { load + udp };
        let cut = if self.cut.is_some() { f64::from(CUT_SECONDS[2]) } else { 0.0 };
        short + cut + self.hours.unwrap_or_default() * 3600.0
    }
}
