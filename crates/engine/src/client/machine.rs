//! What a client changes on its machine so that packets go into the tunnel.

use std::{net::IpAddr, path::Path};

use mpvpn_control::config::{ClientConfig, Dns, Routes};
use mpvpn_os::{
    Tun, TunConfig, Undo,
    dns::Resolver,
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
    resolver: Resolver,
    /// The resolvers that were wanted last.
    wanted: Option<Vec<IpAddr>>,
    /// Where names are asked past the tunnel, and what to do about it.
    pub(super) leak: Option<String>,
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
        let machine = Self {
            net,
            resolver: Resolver::new(&tun_name),
            tun_name,
            mark,
            share: None,
            wanted: None,
            leak: None,
            undo,
            assignment: None,
        };
        Ok((machine, queues))
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
        self.ask_resolvers(config)
    }

    /// Has programs ask the resolvers that are wanted.
    fn ask_resolvers(&mut self, config: &ClientConfig) -> Result<(), EngineError> {
        let Some(assignment) = &self.assignment else { return Ok(()) };
        let is_reachable =
            |ip: &&IpAddr| assignment.addresses.iter().any(|own| own.addr().is_ipv4() == ip.is_ipv4());
        let servers: Vec<IpAddr> = match &config.dns {
            Dns::Servers(servers) => servers.clone(),
            Dns::Suggested if config.routes == Routes::All => {
                assignment.dns.iter().filter(is_reachable).copied().collect()
            }
            Dns::Suggested | Dns::Untouched => Vec::new(),
        };
        if self.wanted.as_ref() == Some(&servers) {
            return Ok(());
        }
        match self.resolver.apply(&mut self.undo, &servers) {
            Ok(()) if servers.is_empty() => {}
            Ok(()) => tracing::info!(?servers, "names are asked in the tunnel"),
            Err(error) if config.dns == Dns::Suggested => {
                tracing::warn!(?servers, %error, "the resolvers that the server suggests are not asked");
            }
            Err(error) => return Err(error.into()),
        }
        self.wanted = Some(servers);
        self.find_leak(config);
        Ok(())
    }

    /// Names that are asked past the tunnel although everything goes into it tell others what is done there.
    fn find_leak(&mut self, config: &ClientConfig) {
        self.leak = None;
        if config.routes != Routes::All || config.dns == Dns::Untouched {
            return;
        }
        match self.resolver.past_tunnel() {
            Ok(servers) if servers.is_empty() => {}
            Ok(servers) => {
                let list = servers.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
                let leak = format!(
                    "names are asked past the tunnel, at {list}: give --dns ADDR with a resolver beyond the tunnel, \
                     or --dns off if that is meant"
                );
                tracing::warn!("{leak}");
                self.leak = Some(leak);
            }
            Err(error) => tracing::debug!(%error, "cannot tell where names are asked"),
        }
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
