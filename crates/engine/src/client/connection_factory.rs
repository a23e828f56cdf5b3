//! What the connections of a client are made of: TLS and transport, and what the configuration says of each class.

use mpvpn_control::config::ClientConfig;
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_quic::ClientSetup;
use mpvpn_tunnel::{ClassSetup, ClientConfig as TunnelConfig};
use mpvpn_types::CongestionControl;

use super::classes::Classes;

/// TLS and transport, with each congestion controller.
#[derive(Clone)]
pub(super) struct ClientSetups(Vec<ClientSetup>);

impl ClientSetups {
    /// One of each, made by `make`.
    pub(super) fn try_new<E>(
        make: impl FnMut(CongestionControl) -> Result<ClientSetup, E>,
    ) -> Result<Self, E> {
        CongestionControl::ALL.iter().copied().map(make).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn of(&self, cc: CongestionControl) -> &ClientSetup {
        &self.0[cc as usize]
    }
}

/// Makes connections, of whatever class.
#[derive(Clone)]
pub(super) struct ConnectionFactory {
    pub(super) setups: ClientSetups,
    /// What is the same for all.
    pub(super) tunnel: TunnelConfig,
    /// How many there are of each class.
    pub(super) shards: u8,
    /// The low bits of the first connection IDs of the first shard; the next ones follow.
    pub(super) first_steering_bits: u8,
}

impl ConnectionFactory {
    /// The connections of a shard. Each shard's go to another shard of the server, if that has several, and to the same one
    /// over all links and when they are made anew.
    pub(super) fn connections(&self, config: &ClientConfig, classes: &Classes, shard: u8) -> Vec<ClassSetup> {
        classes.setups(|class| {
            let setup = self.setups.of(class.cc.unwrap_or(config.cc));
            let lane = flow_mode(class.lane.unwrap_or(config.lane), self.shards);
            TunnelConfig {
                setup: setup.clone().steered(self.first_steering_bits + shard),
                scheduler: class.scheduler.unwrap_or(config.scheduler),
                fec: class.fec,
                copies: class.copies,
                flow_rules: Rules { mode: lane, ..self.tunnel.flow_rules.clone() },
                ..self.tunnel.clone()
            }
        })
    }
}

/// The kernel moves a flow to another queue of the TUN when queues come and go, and so to another thread, which does
/// not have its end. A file that is read again may count on fewer threads than there are.
pub(super) fn flow_mode(option: FlowMode, shards: u8) -> FlowMode {
    if shards > 1 { FlowMode::Datagram } else { option }
}
