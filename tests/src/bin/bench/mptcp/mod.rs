//! Networks that let no UDP through: what links give inside TCP, alone and beside QUIC, and what it costs when they are cut
//! or blocked in mid-flow.
//!
//! What a network does not let through is dropped where it arrives, so neither end is told.

mod lab;
mod mixed;
mod stripped;

use std::time::Duration;

use mpvpn_tests::{
    firewall::{Firewall, Transport, wait_for_transport},
    testbed::{MpvpnProcess, Testbed},
};

use crate::{options::Options, parts, peers, report::Outcome};

const RIG: &str = "mptcp";
/// The links of all parts that have two.
const DEVICES: [&str; 2] = ["eth1", "eth2"];
/// How long links may take until they travel as they should.
const TRANSPORT_TIMEOUT: Duration = Duration::from_secs(40);

/// What the rig consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Two slow links without UDP, beside Multipath TCP of the kernel.
    Lab,
    /// Without the options of Multipath TCP.
    Stripped,
    /// UDP blocked on one of two links, and on both in mid-flow.
    Mixed,
    /// One link without a limit, beside another VPN over TCP.
    Tcp,
}

impl Part {
    pub(crate) const ALL: [Self; 4] = [Self::Lab, Self::Stripped, Self::Mixed, Self::Tcp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lab => "lab",
            Self::Stripped => "stripped",
            Self::Mixed => "mixed",
            Self::Tcp => "tcp",
        }
    }

    fn run(self, options: &Options) -> Result<Outcome, String> {
        match self {
            Self::Lab => lab::run(options),
            Self::Stripped => stripped::run(options),
            Self::Mixed => mixed::run(options),
            Self::Tcp => Ok(peers::inside_tcp(options)),
        }
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    parts::run_parts(RIG, &options.mptcp_parts, Part::name, |part| part.run(options))
}

/// A server and a client that meet a wall from their start.
struct TunnelPair {
    // Dropped before the stage that is borrowed for them.
    client: MpvpnProcess,
    _server: MpvpnProcess,
}

impl TunnelPair {
    /// `more_args` are words for the client.
    fn start(testbed: &Testbed, firewall: Firewall<'_>, more_args: &[&str]) -> Self {
        firewall.apply(testbed);
        let server = testbed.server(&[]);
        Self { client: testbed.client(more_args), _server: server }
    }

    /// Waits until both links travel like that.
    fn wait_for_transports(&self, how: [Transport; 2]) {
        for (device, how) in DEVICES.iter().zip(how) {
            wait_for_transport(&self.client, device, how, TRANSPORT_TIMEOUT);
        }
    }
}

/// Mbit/s on average between two times of a run, in seconds from its beginning; not a number without steps there.
fn mean(steps: &[f64], from: f64, to: f64) -> f64 {
    let index = |at: f64| (at * 10.0).round() as usize;
    let part = steps.get(index(from)..index(to).min(steps.len())).unwrap_or_default();
    part.iter().sum::<f64>() / part.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_of_the_steps_between() {
        let steps = [1.0, 2.0, 3.0, 4.0];
        assert_eq!((mean(&steps, 0.1, 0.3), mean(&steps, 0.2, 9.0)), (2.5, 3.5));
        assert!(mean(&steps, 0.4, 0.9).is_nan() && mean(&[], 0.0, 1.0).is_nan());
    }
}
