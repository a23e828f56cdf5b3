//! The source of links: the kernel, or the app in which the client runs.

use std::net::{IpAddr, SocketAddr};

use mpvpn_error::RunError;
use mpvpn_os::{
    netlink::{AddressInfo, LinkInfo, Monitor, Netlink},
    poll::{Interest, MONITOR_TOKEN, Poller},
};

/// A link that an app provides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenLink {
    /// The interface's name, or any other unique name.
    pub name: String,
    /// The local address to send from; `None` for any.
    pub address: Option<IpAddr>,
    /// The MTU (bytes).
    pub mtu: u32,
}

impl GivenLink {
    /// A link with any address and an MTU of 1500.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), address: None, mtu: 1500 }
    }
}

/// Where links come from.
#[derive(Debug)]
pub(super) enum LinkSource {
    Kernel { netlink: Netlink, monitor: Monitor },
    App(Vec<GivenLink>),
}

/// The interfaces and addresses at one moment.
pub(super) struct InterfaceSnapshot {
    pub(super) infos: Vec<LinkInfo>,
    addresses: Vec<AddressInfo>,
    given: Option<Vec<GivenLink>>,
}

impl LinkSource {
    /// The kernel; also registers its monitor with the poller.
    pub(super) fn kernel(poller: &Poller) -> Result<Self, RunError> {
        let netlink = Netlink::open().map_err(RunError::NoLinks)?;
        let monitor = Monitor::open().map_err(RunError::NoLinks)?;
        poller.add(&monitor, MONITOR_TOKEN, Interest::Read).map_err(RunError::io("watch the network"))?;
        Ok(Self::Kernel { netlink, monitor })
    }

    /// Whether an app provides the links.
    pub(super) fn is_from_app(&self) -> bool {
        matches!(self, Self::App(_))
    }

    pub(super) fn snapshot(&mut self) -> Result<InterfaceSnapshot, RunError> {
        match self {
            Self::Kernel { netlink, .. } => {
                let infos = netlink.links().map_err(RunError::NoLinks)?;
                let addresses = netlink.addresses().map_err(RunError::NoLinks)?;
                Ok(InterfaceSnapshot { infos, addresses, given: None })
            }
            Self::App(given) => {
                let infos = given.iter().map(interface_info).collect();
                Ok(InterfaceSnapshot { infos, addresses: Vec::new(), given: Some(given.clone()) })
            }
        }
    }

    /// Removes unresolved neighbour entries of a link that has come up, so that its first packets resolve the
    /// router at once. Without privilege the link works a little later.
    pub(super) fn flush_unresolved_neighbours(&mut self, index: Option<u32>) {
        if let (Self::Kernel { netlink, .. }, Some(index)) = (self, index)
            && let Err(error) = netlink.flush_unresolved_neighbours(index)
        {
            tracing::debug!(%error, "cannot flush unresolved neighbour entries");
        }
    }
}

/// A link of an app counts as up.
fn interface_info(given: &GivenLink) -> LinkInfo {
    LinkInfo { name: given.name.clone(), up: true, carrier: true, mtu: given.mtu, ..LinkInfo::default() }
}

impl InterfaceSnapshot {
    /// The interface of this name.
    pub(super) fn info(&self, name: &str) -> Option<&LinkInfo> {
        self.infos.iter().find(|info| info.name == name)
    }

    /// The addresses that the interface may send from.
    pub(super) fn addresses(&self, info: &LinkInfo) -> Vec<IpAddr> {
        let usable = |entry: &&AddressInfo| entry.index == info.index && entry.usable && !entry.link_local;
        match self.given(&info.name) {
            Some(given) => given.address.into_iter().collect(),
            None => self.addresses.iter().filter(usable).map(|entry| entry.address.addr()).collect(),
        }
    }

    /// Whether a link may reach an address: it has an address of the same family, or any.
    pub(super) fn reaches(&self, info: &LinkInfo, own: &[IpAddr], remote: SocketAddr) -> bool {
        let any = self.given(&info.name).is_some_and(|given| given.address.is_none());
        any || own.iter().any(|ip| ip.is_ipv4() == remote.is_ipv4())
    }

    /// Whether an app provides the links.
    pub(super) fn is_from_app(&self) -> bool {
        self.given.is_some()
    }

    fn given(&self, name: &str) -> Option<&GivenLink> {
        self.given.as_ref()?.iter().find(|given| given.name == name)
    }
}
