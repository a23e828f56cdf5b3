//! Networks that block UDP: goodput of links inside TCP, alone and beside QUIC links, and the effect of cuts
//! and of blocking UDP in mid-flow.
//!
//! Blocked packets are dropped silently at the receiver, so that no end gets an error.

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
/// How long links may take to use the expected transport.
const TRANSPORT_TIMEOUT: Duration = Duration::from_secs(40);

/// Parts of the rig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Two slow links without UDP, compared with the kernel's Multipath TCP.
    Lab,
    /// Links that strip the options of Multipath TCP.
    Stripped,
    /// UDP blocked on one of two links, and on both in mid-flow.
    Mixed,
    /// A link without a rate limit, compared with another VPN over TCP.
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

/// A server and a client behind a firewall that is active before they start.
struct TunnelPair {
    // Dropped before the testbed.
    client: MpvpnProcess,
    _server: MpvpnProcess,
}

impl TunnelPair {
    /// `more_args` are additional arguments of the client.
    fn start(testbed: &Testbed, firewall: Firewall<'_>, more_args: &[&str]) -> Self {
        firewall.apply(testbed);
        let server = testbed.server(&[]);
        Self { client: testbed.client(more_args), _server: server }
    }

    /// Waits until both links use these transports.
    fn wait_for_transports(&self, how: [Transport; 2]) {
        for (device, how) in DEVICES.iter().zip(how) {
            wait_for_transport(&self.client, device, how, TRANSPORT_TIMEOUT);
        }
    }
}

/// Mean rate between two times of a run, s; NaN without steps there.
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
