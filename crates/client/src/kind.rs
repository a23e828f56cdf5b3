//! The kinds of clients: for the packets of a machine, for those of an app, or for proxies.
//!
//! In: the server's assignment, link names, the end. Out: addresses and routes of the machine, or events of
//! the app. Always holds: only [`ClientKind::Machine`] changes the machine.

use std::{net::SocketAddr, time::Instant};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_proxy::Proxy;
use mpvpn_status::ForwardedPort;
use mpvpn_tunnel::{AddressesInUse, Assignment, RelayId, UdpId};

use super::{embedded::AppHost, kill_switch::ClientKillSwitch, machine::Machine};

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
    /// The machine; `None` if this client leaves it as it is.
    pub(super) fn machine(&self) -> Option<&Machine> {
        if let Self::Machine(machine) = self { Some(machine) } else { None }
    }

    /// The kill switch, if it is on.
    pub(super) fn kill_switch(&self) -> Option<&ClientKillSwitch> {
        self.machine()?.kill_switch.as_ref()
    }

    /// The tunnel works, or not any more.
    pub(super) fn set_up(&mut self, is_up: bool) {
        if let Self::Machine(machine) = self {
            machine.set_up(is_up);
        }
    }

    /// Takes the rules for packets past the tunnel.
    pub(super) fn set_bypass(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        if let Self::Machine(machine) = self { machine.set_bypass(config) } else { Ok(()) }
    }

    /// Takes the links that work, the best first; they are listed only if they are needed.
    pub(super) fn set_working_links(&mut self, working: impl FnOnce() -> Vec<String>) {
        if let Self::Machine(machine) = self {
            machine.set_working_links(working);
        }
    }

    /// The addresses that the machine has outside of the tunnel; none where the client does not change the
    /// machine.
    pub(super) fn addresses_in_use(&self) -> AddressesInUse {
        self.machine().map(|machine| machine.addresses_in_use.clone()).unwrap_or_default()
    }

    /// The server has these addresses now.
    pub(super) fn set_servers(&mut self, servers: &[SocketAddr]) -> Result<(), RunError> {
        if let Self::Machine(machine) = self { machine.set_servers(servers) } else { Ok(()) }
    }

    /// Lets other machines use the tunnel, as configured.
    pub(super) fn share(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        if let Self::Machine(machine) = self { machine.share(config) } else { Ok(()) }
    }

    /// Lets packets pass between the tunnel and the networks behind this machine, as configured.
    pub(super) fn set_site(&mut self, config: &ClientConfig) -> Result<(), RunError> {
        if let Self::Machine(machine) = self { machine.set_site(config) } else { Ok(()) }
    }

    /// The ports that lead to hosts behind this machine.
    pub(super) fn forwards(&mut self, config: &ClientConfig) -> Vec<ForwardedPort> {
        if let Self::Machine(machine) = self { machine.forwards(config) } else { Vec::new() }
    }

    /// The proxies, if this is the kind of client.
    pub(super) fn proxy(&self) -> Option<&Proxy<RelayId, UdpId>> {
        if let Self::Proxy(proxy) = self { Some(proxy) } else { None }
    }

    /// The proxies, if this is the kind of client.
    pub(super) fn proxy_mut(&mut self) -> Option<&mut Proxy<RelayId, UdpId>> {
        if let Self::Proxy(proxy) = self { Some(proxy) } else { None }
    }

    /// Prepares a link to carry the tunnel's packets.
    pub(super) fn prepare_link(&mut self, name: &str) {
        if let Self::Machine(machine) = self {
            machine.prepare_link(name);
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

    /// The server's assignment, once there is one.
    pub(super) fn assignment(&self) -> Option<&Assignment> {
        match self {
            Self::Machine(machine) => machine.assignment.as_ref(),
            Self::Embedded(host) => host.assignment.as_ref(),
            Self::Proxy(_) => None,
        }
    }

    /// Whether addresses, routes or resolvers differ from those that are stored.
    pub(super) fn differs(&self, assignment: &Assignment) -> bool {
        let of_this_client = |given: &Assignment| Assignment { sites: None, ..given.clone() };
        self.assignment().map(of_this_client) != Some(of_this_client(assignment))
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

    /// Handles the loss of the connection.
    pub(super) fn connection_lost(&mut self, reason: String) {
        match self {
            Self::Machine(_) => self.set_up(false),
            Self::Embedded(host) => host.report_down(reason),
            Self::Proxy(_) => {}
        }
    }

    /// Takes back what was changed; the kill switch only if the client was told to end.
    pub(super) fn end(self, is_orderly: bool) -> Result<(), RunError> {
        if let Self::Machine(machine) = self { machine.end(is_orderly) } else { Ok(()) }
    }
}
