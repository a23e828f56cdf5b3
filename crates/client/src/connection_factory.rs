//! Makes the configurations of a client's connections from TLS, transport options and the settings of the
//! classes.

use mpvpn_config::ClientConfig;
use mpvpn_flow::rules::{FlowMode, Rules};
use mpvpn_quic::ClientSetup;
use mpvpn_tunnel::{ClassSetup, ClientConfig as TunnelConfig};
use mpvpn_types::CongestionControl;

use super::classes::Classes;

/// One [`ClientSetup`] for each congestion controller.
#[derive(Clone)]
pub(super) struct ClientSetups(Vec<ClientSetup>);

impl ClientSetups {
    /// Calls `make` for each congestion controller.
    pub(super) fn try_new<E>(
        make: impl FnMut(CongestionControl) -> Result<ClientSetup, E>,
    ) -> Result<Self, E> {
        CongestionControl::ALL.iter().copied().map(make).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn of(&self, cc: CongestionControl) -> &ClientSetup {
        &self.0[cc as usize]
    }
}

/// Makes the setups of connections, for any class and shard.
#[derive(Clone)]
pub(super) struct ConnectionFactory {
    pub(super) setups: ClientSetups,
    /// The settings that all connections share.
    pub(super) tunnel: TunnelConfig,
    /// The number of shards: there is one connection per class in each.
    pub(super) shards: u8,
    /// The steering bits (low bits of the first byte of the connection ID) of shard 0's first packets; the
    /// other shards have the following values.
    pub(super) first_steering_bits: u8,
}

impl ConnectionFactory {
    /// The setups of a shard's connections. Each shard steers to another shard of the server (if it has
    /// several), and always to the same one: over all links, and after reconnecting.
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

/// The flow mode for a number of shards. With several shards it is `datagram`: the kernel moves flows between
/// TUN queues when queues come and go, and so to a shard that lacks the proxied connection. A reloaded file
/// may be checked with fewer shards than there are.
pub(super) fn flow_mode(option: FlowMode, shards: u8) -> FlowMode {
    if shards > 1 { FlowMode::Datagram } else { option }
}
