//! What a client changes on its machine so that packets go into the tunnel.

use std::path::Path;

use mpvpn_control::config::{ClientConfig, Routes};
use mpvpn_os::{
    Tun, TunConfig, Undo,
    tunnel_net::{self, ClientNet, ClientNetConfig, ShareNet, ShareSource, Wanted},
    undo::{self, Interface},
};
use mpvpn_tunnel::Assignment;

use crate::{
    EngineError,
    wire::{TUN_QUEUE, take_back},
};

/// Addresses, routes and rules of a machine.
pub(super) struct Machine {
    net: ClientNet,
    tun_name: String,
    /// The mark of the tunnel's own packets.
    pub(super) mark: u32,
    share: Option<ShareNet>,
    undo: Undo,
    pub(super) assignment: Option<Assignment>,
}

impl Machine {
    /// Opens the queues of the TUN. What an earlier process left behind is taken back first.
    pub(super) fn open(config: &ClientConfig) -> Result<(Self, Vec<Tun>), EngineError> {
        let undo = Undo::open(Path::new(undo::BASE), &config.tun_name)?;
        let queues = Tun::open_queues(
            TunConfig {
                name: Some(config.tun_name.clone()),
                queue_packets: Some(TUN_QUEUE),
                ..TunConfig::default()
            },
            // Flows of one client share links that no thread has to itself: one is right for most.
            config.shards.count(1),
        )?;
        let tun_name = queues[0].name().to_owned();
        let net_config =
            ClientNetConfig::new(Interface { name: tun_name.clone(), index: queues[0].ifindex() });
        let mark = net_config.mark;
        let net = ClientNet::new(net_config)?;
        Ok((Self { net, tun_name, mark, share: None, undo, assignment: None }, queues))
    }

    /// Makes a link fit to carry the tunnel.
    pub(super) fn prepare_link(&mut self, name: &str) {
        if let Err(error) = self.net.prepare_link(&mut self.undo, name) {
            tracing::warn!(link = %name, %error, "cannot prepare a link");
        }
    }

    /// Sets addresses, routes and the MTU (bytes), once there are addresses.
    pub(super) fn configure(&mut self, config: &ClientConfig, mtu: u32) -> Result<(), EngineError> {
        let Some(assignment) = &self.assignment else { return Ok(()) };
        let routes = match config.routes {
            Routes::All => tunnel_net::Routes::All,
            Routes::None => tunnel_net::Routes::None,
            Routes::Advertised => tunnel_net::Routes::Advertised(
                assignment.routes.iter().flat_map(|range| range.to_nets()).collect(),
            ),
        };
        let wanted = Wanted { addresses: assignment.addresses.clone(), routes, mtu };
        self.net.apply(&mut self.undo, &wanted)?;
        Ok(())
    }

    /// Lets others use the tunnel.
    pub(super) fn share(&mut self, config: &ClientConfig) -> Result<(), EngineError> {
        if config.share.is_empty() || self.share.is_some() {
            return Ok(());
        }
        let sources =
            config.share.iter().map(|text| text.parse()).collect::<Result<Vec<ShareSource>, _>>()?;
        self.share = Some(ShareNet::up(&mut self.undo, &self.tun_name, &sources)?);
        Ok(())
    }

    /// Takes back what was changed.
    pub(super) fn end(mut self) -> Result<(), EngineError> {
        take_back(&mut self.undo)
    }
}
