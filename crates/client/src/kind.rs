//! The kinds of clients: for the packets of a machine, for those of an app, or for proxies.
//!
//! In: the server's assignment, link names, the end. Out: addresses and routes of the machine, or events of
//! the app. Always holds: only [`ClientKind::Machine`] changes the machine.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_names::lookup::Resolve;
use mpvpn_proxy::Proxy;
use mpvpn_status::{KillSwitchState, events::EventSender};
use mpvpn_tunnel::{AddressesInUse, Assignment, RelayId, UdpId};

use super::{embedded::AppHost, machine::Machine};

/// The kinds of clients.
pub(super) enum ClientKind {
    /// The machine's packets, through a TUN device.
    Machine(Box<Machine>),
    /// An app's packets.
    Embedded(AppHost),
    /// SOCKS5 and HTTP proxies, without packets.
    Proxy(Box<Proxy<RelayId, UdpId>>),
}

impl ClientKind {
    /// Prepares a link to carry the tunnel's packets.
    pub(super) fn prepare_link(&mut self, name: &str) {
        if let Self::Machine(machine) = self {
            machine.prepare_link(name);
        }
    }

    /// The addresses that the machine has outside of the tunnel; none where the client does not change the
    /// machine.
    pub(super) fn addresses_in_use(&self) -> AddressesInUse {
        match self {
            Self::Machine(machine) => machine.addresses_in_use.clone(),
            Self::Embedded(_) | Self::Proxy(_) => AddressesInUse::default(),
        }
    }

    /// Whether there is a TUN device.
    pub(super) fn has_tun(&self) -> bool {
        matches!(self, Self::Machine(_))
    }

    /// The server has these addresses now.
    pub(super) fn set_servers(&mut self, servers: &[SocketAddr]) -> Result<(), RunError> {
        match self {
            Self::Machine(machine) => machine.set_servers(servers),
            Self::Embedded(_) | Self::Proxy(_) => Ok(()),
        }
    }

    /// How the name of a proxy with this port is to be resolved; `None` where the system does it.
    pub(super) fn proxy_resolver(&self, port: u16) -> Option<Resolve> {
        match self {
            Self::Machine(machine) => machine.proxy_resolver(port),
            Self::Embedded(_) | Self::Proxy(_) => None,
        }
    }

    /// Where events of the machine are reported.
    pub(super) fn set_events(&self, events: EventSender) {
        if let Self::Machine(machine) = self {
            machine.set_events(events);
        }
    }

    /// The tunnel works.
    pub(super) fn connected(&self) {
        if let Self::Machine(machine) = self {
            machine.set_up(true);
        }
    }

    /// The state of the kill switch; `None` where there is nothing that it could block.
    pub(super) fn kill_switch_state(&self, is_up: bool) -> Option<KillSwitchState> {
        match self {
            Self::Machine(machine) => Some(machine.kill_switch_state(is_up)),
            Self::Embedded(_) | Self::Proxy(_) => None,
        }
    }

    /// Handles changes of the interfaces and routes.
    pub(super) fn interfaces_changed(&mut self, now: Instant) {
        if let Self::Machine(machine) = self {
            machine.interfaces_changed(now);
        }
    }

    /// Adapts the tunnel's routes to those of the machine, when due.
    pub(super) fn refresh_routes(&mut self, now: Instant) {
        if let Self::Machine(machine) = self {
            machine.refresh_routes(now);
        }
    }

    /// When [`Self::refresh_routes`] is due.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        match self {
            Self::Machine(machine) => machine.refresh_at,
            Self::Proxy(proxy) => proxy.poll_timeout(),
            Self::Embedded(_) => None,
        }
    }

    /// Stores the server's assignment; [`Self::configure`] applies it.
    pub(super) fn assign(&mut self, config: &ClientConfig, assignment: Assignment) {
        match self {
            Self::Machine(machine) => machine.assign(config, assignment),
            Self::Embedded(host) => host.assignment = Some(assignment),
            Self::Proxy(_) => {}
        }
    }

    /// Applies addresses, routes and the MTU (bytes), once there are addresses.
    pub(super) fn configure(&mut self, config: &ClientConfig, mtu: u32) -> Result<(), RunError> {
        match self {
            Self::Machine(machine) => machine.configure(config, mtu)?,
            Self::Embedded(host) => host.configure(mtu),
            Self::Proxy(_) => {}
        }
        Ok(())
    }

    /// Lets other machines use the tunnel, as configured.
    pub(super) fn share(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        match self {
            Self::Machine(machine) => machine.share(config),
            Self::Embedded(_) | Self::Proxy(_) => Ok(()),
        }
    }

    /// Handles the loss of the connection.
    pub(super) fn connection_lost(&mut self, reason: String) {
        match self {
            Self::Machine(machine) => machine.set_up(false),
            Self::Embedded(host) => host.report_down(reason),
            Self::Proxy(_) => {}
        }
    }

    /// The resolvers that answer inside the tunnel; none where the client has no TUN device or `dns` is off.
    pub(super) fn tunnel_resolvers(&self, config: &ClientConfig) -> Vec<IpAddr> {
        match self {
            Self::Machine(machine) => machine.tunnel_resolvers(config),
            Self::Embedded(_) | Self::Proxy(_) => Vec::new(),
        }
    }

    /// Which name servers are asked outside of the tunnel, and what to do about it.
    pub(super) fn dns_leak(&self) -> Option<String> {
        match self {
            Self::Machine(machine) => machine.dns_leak.clone(),
            Self::Embedded(_) | Self::Proxy(_) => None,
        }
    }

    /// Why names of the local network fail, and what to do about it.
    pub(super) fn local_names_fail(&self) -> Option<String> {
        match self {
            Self::Machine(machine) => machine.local_names_fail.clone(),
            Self::Embedded(_) | Self::Proxy(_) => None,
        }
    }

    /// The proxies, if this is the kind of client.
    pub(super) fn proxy(&self) -> Option<&Proxy<RelayId, UdpId>> {
        match self {
            Self::Proxy(proxy) => Some(proxy),
            Self::Machine(_) | Self::Embedded(_) => None,
        }
    }

    /// The proxies, if this is the kind of client.
    pub(super) fn proxy_mut(&mut self) -> Option<&mut Proxy<RelayId, UdpId>> {
        match self {
            Self::Proxy(proxy) => Some(proxy),
            Self::Machine(_) | Self::Embedded(_) => None,
        }
    }

    /// Takes back what was changed; the kill switch only if the client was told to end.
    pub(super) fn end(self, is_orderly: bool) -> Result<(), RunError> {
        match self {
            Self::Machine(machine) => machine.end(is_orderly),
            Self::Embedded(_) | Self::Proxy(_) => Ok(()),
        }
    }
}
