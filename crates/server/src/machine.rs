//! The changes of a server to its machine: the TUN device, addresses, forwarding, the filter of clients'
//! packets and address translation.

use ipnet::IpNet;
use mpvpn_config::{Nat as NatOption, ServerConfig};
use mpvpn_error::RunError;
use mpvpn_os::{
    OsError, Tun, TunConfig, UndoJournal,
    firewall::Profile,
    netlink::Interface,
    tunnel_net::{Nat, PacketAccess, ServerNet, ServerNetConfig},
};
use mpvpn_packet::public::MACHINE_ONLY_NETWORKS;
use mpvpn_sockets::packet_io::{TUN_QUEUE_PACKETS, undo_changes};
use mpvpn_threads::shards::Outbox;
use mpvpn_tunnel::Registry;

use super::{
    data_plane::ShardMessage,
    forwards::{self, ForwardTable},
    packet_filter::{FilterMessage, FilterThread, UserProfiles},
};

/// The TUN device's MTU before the paths of a client are known (bytes). Chosen: fits most paths.
const INITIAL_MTU: u32 = 1400;

/// The network configuration of a server.
pub(super) struct Machine {
    /// Ends first: it installs rules again that are removed.
    filter: Option<FilterThread>,
    net: ServerNet,
    undo: UndoJournal,
}

impl Machine {
    /// Opens one TUN queue per shard, and applies the configuration. `profiles`: the rules for packets of
    /// each user.
    pub(super) fn up(
        config: &ServerConfig,
        profiles: &[Profile],
        mut undo: UndoJournal,
        shards: u8,
    ) -> Result<(Self, Vec<Tun>), RunError> {
        let queues = Tun::open_queues(
            TunConfig {
                name: Some(config.tun_name.clone()),
                mtu: Some(INITIAL_MTU),
                queue_packets: Some(TUN_QUEUE_PACKETS),
                ..TunConfig::default()
            },
            shards,
        )?;
        let nat = match config.nat {
            NatOption::On => Nat::Masquerade,
            NatOption::Off => Nat::None,
        };
        let v6 = config.subnet6.map(IpNet::V6);
        let net = ServerNetConfig {
            tun: Interface { name: queues[0].name().to_owned(), index: queues[0].ifindex() },
            subnets: std::iter::once(IpNet::V4(config.subnet)).chain(v6).collect(),
            mtu: INITIAL_MTU,
            nat,
            access: PacketAccess {
                is_isolated: config.isolate,
                blocked: MACHINE_ONLY_NETWORKS.clone(),
                forwarded: forwards::ports(&config.forwards),
                profiles: profiles.to_vec(),
            },
        };
        let net = ServerNet::configure(&mut undo, &net)?;
        Ok((Self { filter: None, net, undo }, queues))
    }

    /// Starts to filter sessions by the rules of their users. `shards`: the mailboxes of all shards, in
    /// order.
    pub(super) fn start_filter(
        &mut self,
        (users, forwards): (UserProfiles, ForwardTable),
        registry: &Registry,
        shards: Vec<Outbox<ShardMessage>>,
    ) -> Result<Outbox<FilterMessage>, RunError> {
        let (profiles, sites) = (self.net.session_profiles(), self.net.sites()?);
        let filter = self.filter.insert(FilterThread::start(
            (profiles, forwards),
            sites,
            users,
            registry.clone(),
            shards,
        )?);
        Ok(filter.messages())
    }

    /// The server's addresses in the tunnel, with the subnets' prefix lengths.
    pub(super) fn addresses(&self) -> &[IpNet] {
        self.net.addresses()
    }

    /// Sets the TUN device's MTU (bytes).
    pub(super) fn set_mtu(&mut self, mtu: usize) -> Result<(), OsError> {
        self.net.set_mtu(mtu as u32)
    }

    /// Undoes all changes.
    pub(super) fn end(mut self) -> Result<(), RunError> {
        drop(self.filter.take());
        undo_changes(&mut self.undo)
    }
}
