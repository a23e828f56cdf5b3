//! What a client is for: the packets of its machine, those of an app, or proxies.
//!
//! In: what the server gave, links that come, the end. Out: the machine's addresses and routes, or what the app is told.
//! Always holds: nothing of the machine is changed but by the first kind.

use mpvpn_control::config::ClientConfig;
use mpvpn_tunnel::{Assignment, RelayId, UdpId};

use super::{embedded::AppHost, machine::Machine};
use crate::{EngineError, proxy::Proxy};

/// The kinds of a client.
pub(super) enum ClientKind {
    /// Packets of this machine come by a TUN.
    Machine(Box<Machine>),
    /// An app has the packets.
    Embedded(AppHost),
    /// ProxyStreams connect to proxies; there are no packets.
    Proxy(Box<Proxy<RelayId, UdpId>>),
}

impl ClientKind {
    /// Makes a link fit to carry the tunnel.
    pub(super) fn prepare_link(&mut self, name: &str) {
        if let Self::Machine(machine) = self {
            machine.prepare_link(name);
        }
    }

    /// There is news about interfaces.
    pub(super) fn interfaces_changed(&mut self) {
        if let Self::Machine(machine) = self {
            machine.interfaces_changed();
        }
    }

    /// Takes what the server gave; [`Self::configure`] then acts on it.
    pub(super) fn assign(&mut self, config: &ClientConfig, assignment: Assignment) {
        match self {
            Self::Machine(machine) => machine.assign(config, assignment),
            Self::Embedded(host) => host.assignment = Some(assignment),
            Self::Proxy(_) => {}
        }
    }

    /// Sets addresses, routes and the MTU (bytes), once there are addresses.
    pub(super) fn configure(&mut self, config: &ClientConfig, mtu: u32) -> Result<(), EngineError> {
        match self {
            Self::Machine(machine) => machine.configure(config, mtu)?,
            Self::Embedded(host) => host.configure(mtu),
            Self::Proxy(_) => {}
        }
        Ok(())
    }

    /// Lets others use the tunnel, as configured.
    pub(super) fn share(&mut self, config: &ClientConfig) -> Result<(), EngineError> {
        match self {
            Self::Machine(machine) => machine.share(config),
            Self::Embedded(_) | Self::Proxy(_) => Ok(()),
        }
    }

    /// The connection is lost.
    pub(super) fn connection_lost(&mut self, reason: String) {
        if let Self::Embedded(host) = self {
            host.report_down(reason);
        }
    }

    /// Where names are asked past the tunnel, and what to do about it.
    pub(super) fn dns_leak(&self) -> Option<String> {
        match self {
            Self::Machine(machine) => machine.dns_leak.clone(),
            Self::Embedded(_) | Self::Proxy(_) => None,
        }
    }

    /// The proxies, where there are any.
    pub(super) fn proxy(&self) -> Option<&Proxy<RelayId, UdpId>> {
        match self {
            Self::Proxy(proxy) => Some(proxy),
            Self::Machine(_) | Self::Embedded(_) => None,
        }
    }

    /// The proxies, where there are any.
    pub(super) fn proxy_mut(&mut self) -> Option<&mut Proxy<RelayId, UdpId>> {
        match self {
            Self::Proxy(proxy) => Some(proxy),
            Self::Machine(_) | Self::Embedded(_) => None,
        }
    }

    /// Takes back what was changed.
    pub(super) fn end(self) -> Result<(), EngineError> {
        match self {
            Self::Machine(machine) => machine.end(),
            Self::Embedded(_) | Self::Proxy(_) => Ok(()),
        }
    }
}
