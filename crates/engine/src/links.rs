//! The links of a client: which interfaces they are, and whether they can carry packets.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use mpvpn_control::config::is_match;
use mpvpn_os::{
    OsError, UdpOptions, UdpSocket,
    netlink::{AddressInfo, Event, LinkInfo, Monitor, Netlink},
    poll::{Interest, Poller},
};
use mpvpn_types::LinkId;

use crate::{
    EngineError,
    policies::{Meter, Meters, Policies},
    turn::{MONITOR, SOCKETS},
    wire::{SOCKET_BUFFER, Wire},
};

/// The word for "every interface with a default route".
const AUTO: &str = "auto";

/// One link, or one of several pipes of a link: they differ in their sockets only.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) name: String,
    index: Option<u32>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) mtu: u32,
    /// Where the server is, seen from here; set while the link can carry packets.
    pub(crate) remote: Option<SocketAddr>,
    pub(crate) wire: Option<Wire>,
    /// The address that the socket is bound to, where it could not be bound to the device.
    bound: Option<IpAddr>,
    pub(crate) meter: Meter,
    /// Why it cannot be used.
    pub(crate) reason: &'static str,
    /// How many pipes the link has.
    pub(crate) pipes: u8,
}

/// What changed about a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkChange {
    /// It can carry packets to this address, or its own address has changed.
    Up(LinkId, SocketAddr),
    /// It cannot carry packets.
    Down(LinkId),
    /// It is a pipe that is not wanted any more.
    Gone(LinkId),
}

/// All links of a client.
#[derive(Debug)]
pub(crate) struct Links {
    names: Vec<String>,
    meters: Meters,
    tun: String,
    mark: Option<u32>,
    netlink: Netlink,
    monitor: Monitor,
    pub(crate) links: BTreeMap<LinkId, Link>,
    remotes: Vec<SocketAddr>,
}

impl Links {
    /// `names` are interfaces or patterns of their names, or the one word `auto`; `tun` is none of them, empty if there
    /// is none. Sockets get the mark, which needs privilege.
    pub(crate) fn new(
        names: &[String],
        meters: &Meters,
        tun: &str,
        mark: Option<u32>,
        poller: &Poller,
    ) -> Result<Self, EngineError> {
        let monitor = Monitor::open()?;
        poller.add(&monitor, MONITOR, Interest::Read).map_err(EngineError::io("watch the network"))?;
        let mut links = Self {
            names: names.to_vec(),
            meters: meters.clone(),
            tun: tun.to_owned(),
            mark,
            netlink: Netlink::open()?,
            monitor,
            links: BTreeMap::new(),
            remotes: Vec::new(),
        };
        if !links.is_auto() {
            for name in names.iter().filter(|name| !is_pattern(name)) {
                links.add(name);
            }
        }
        Ok(links)
    }

    fn is_auto(&self) -> bool {
        self.names.iter().any(|name| name == AUTO)
    }

    fn add(&mut self, name: &str) {
        let number = self.uplinks().count() as u16;
        // Names may come and go without end where a pattern fits them all.
        if number < LinkId::UPLINKS && !self.uplinks().any(|(_, link)| link.name == name) {
            self.insert(LinkId(number), name, 1);
        }
    }

    fn insert(&mut self, id: LinkId, name: &str, pipes: u8) {
        let link = Link {
            name: name.to_owned(),
            index: None,
            addresses: Vec::new(),
            mtu: 1500,
            remote: None,
            wire: None,
            bound: None,
            meter: self.meters.of(name),
            reason: "not looked at yet",
            pipes,
        };
        self.links.insert(id, link);
    }

    /// The links, each by its first pipe.
    pub(crate) fn uplinks(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.links.iter().map(|(id, link)| (*id, link)).take_while(|(id, _)| id.pipe() == 0)
    }

    /// Whether a link still has this pipe.
    pub(crate) fn has(&self, id: LinkId) -> bool {
        self.links.get(&id.uplink()).is_some_and(|link| id.pipe() < link.pipes)
    }

    /// The server's addresses, best first.
    pub(crate) fn set_remotes(&mut self, remotes: Vec<SocketAddr>) {
        self.remotes = remotes;
    }

    /// Reads all news; returns whether anything has changed that matters.
    pub(crate) fn news(&mut self) -> bool {
        let mut matters = false;
        while let Ok(Some(event)) = self.monitor.next() {
            matters |= match event {
                Event::Link { name, .. } => name != self.tun,
                Event::Route { route, .. } => self.is_auto() && route.is_default(),
                Event::Address { .. } | Event::Overrun => true,
            };
        }
        matters
    }

    /// Looks at the interfaces anew.
    pub(crate) fn rescan(
        &mut self,
        poller: &Poller,
        policies: &Policies,
    ) -> Result<Vec<LinkChange>, EngineError> {
        if self.is_auto() {
            for name in self.netlink.default_route_interfaces(&[&self.tun])? {
                self.add(&name);
            }
        }
        let infos = self.netlink.links()?;
        for info in infos.iter().filter(|info| !info.loopback) {
            let meant = |name: &String| is_pattern(name) && is_match(name, &info.name);
            if info.name != self.tun && self.names.iter().any(meant) {
                self.add(&info.name);
            }
        }
        let addresses = self.netlink.addresses()?;
        let uplinks: Vec<LinkId> = self.uplinks().map(|(id, _)| id).collect();
        let mut changes = Vec::new();
        for id in uplinks {
            changes.extend(self.look_at(id, &infos, &addresses, poller, policies));
            self.count_pipes(id, policies);
        }
        let pipes: Vec<LinkId> = self.links.keys().copied().filter(|id| id.pipe() > 0).collect();
        for id in pipes {
            changes.extend(match self.has(id) {
                true => self.look_at(id, &infos, &addresses, poller, policies),
                false => self.close(id),
            });
        }
        Ok(changes)
    }

    /// Gives a link the pipes that it is to have. Without an address nothing can be said about that.
    fn count_pipes(&mut self, id: LinkId, policies: &Policies) {
        let Some(link) = self.links.get_mut(&id).filter(|link| link.remote.is_some()) else { return };
        link.pipes = policies.of(&link.name).pipes.unwrap_or_default().count(&link.addresses);
        let (name, count) = (link.name.clone(), link.pipes);
        for pipe in (1..count).map(|pipe| id.with_pipe(pipe)) {
            if !self.links.contains_key(&pipe) {
                self.insert(pipe, &name, count);
            }
        }
    }

    fn close(&mut self, id: LinkId) -> Option<LinkChange> {
        let link = self.links.get_mut(&id)?;
        link.wire = None;
        link.remote.take().map(|_| LinkChange::Gone(id))
    }

    fn look_at(
        &mut self,
        id: LinkId,
        infos: &[LinkInfo],
        addresses: &[AddressInfo],
        poller: &Poller,
        policies: &Policies,
    ) -> Option<LinkChange> {
        let link = self.links.get_mut(&id)?;
        let info = infos.iter().find(|info| info.name == link.name);
        let own: Vec<IpAddr> = addresses
            .iter()
            .filter(|entry| info.is_some_and(|info| info.index == entry.index))
            .filter(|entry| entry.usable && !entry.link_local)
            .map(|entry| entry.address.addr())
            .collect();
        let remote = self.remotes.iter().find(|remote| own.iter().any(|ip| ip.is_ipv4() == remote.is_ipv4()));
        link.reason = match (info, remote) {
            (None, _) => "no such interface",
            (Some(info), _) if !info.up => "switched off",
            (Some(info), _) if !info.carrier => "no carrier",
            _ if self.remotes.is_empty() => "the server's address is not known yet",
            (_, None) => "no address",
            _ => "",
        };
        let before = (link.index, link.remote, std::mem::replace(&mut link.addresses, own));
        let usable = link.reason.is_empty();
        if let Some(info) = info {
            link.mtu = info.mtu;
        }
        if !usable {
            let was_up = link.remote.take().is_some();
            if info.is_none() {
                // The socket is bound to a device that is gone.
                link.index = None;
                link.wire = None;
            }
            return was_up.then_some(LinkChange::Down(id));
        }
        let index = info.map(|info| info.index);
        let remote = *remote?;
        let family = |remote: SocketAddr| remote.is_ipv4();
        let rebind = link.wire.is_none()
            || link.index != index
            || link.bound.is_some_and(|ip| !link.addresses.contains(&ip))
            || before.1.is_some_and(|old| family(old) != family(remote));
        if rebind {
            link.wire = None;
            let dscp = policies.of(&link.name).dscp;
            match bind(&link.name, &link.addresses, remote, self.mark, dscp, poller, id) {
                Ok((wire, bound)) => (link.wire, link.bound) = (Some(wire), bound),
                Err(error) => {
                    tracing::warn!(link = %link.name, %error, "cannot use a link");
                    link.reason = "its socket cannot be bound";
                    return link.remote.take().is_some().then_some(LinkChange::Down(id));
                }
            }
        }
        link.index = index;
        link.remote = Some(remote);
        let after = (link.index, link.remote, &link.addresses);
        (rebind || (before.0, before.1, &before.2) != after).then_some(LinkChange::Up(id, remote))
    }

    /// The largest UDP payload that any link could carry (bytes).
    pub(crate) fn max_payload(&mut self) -> u16 {
        let infos = self.netlink.links().unwrap_or_default();
        let auto = self.is_auto();
        let largest = infos
            .iter()
            .filter(|info| {
                if auto {
                    !info.loopback && info.name != self.tun && info.up
                } else {
                    self.names.iter().any(|name| is_match(name, &info.name))
                }
            })
            .map(|info| info.mtu)
            .max()
            .unwrap_or(1500);
        // IPv4 and UDP headers; IPv6 finds its lower limit by probing.
        u16::try_from(largest.saturating_sub(28)).unwrap_or(u16::MAX).clamp(1200, 65_000)
    }
}

fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// A socket for a link, and its address if it is bound to that: old kernels let nobody but root bind to a device.
fn bind(
    name: &str,
    addresses: &[IpAddr],
    remote: SocketAddr,
    mark: Option<u32>,
    dscp: u8,
    poller: &Poller,
    id: LinkId,
) -> Result<(Wire, Option<IpAddr>), EngineError> {
    let any =
        if remote.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let options = UdpOptions {
        device: Some(name.to_owned()),
        mark,
        recv_buffer: Some(SOCKET_BUFFER),
        send_buffer: Some(SOCKET_BUFFER),
        dscp,
        ..UdpOptions::new(SocketAddr::new(any, 0))
    };
    let own = addresses.iter().copied().find(|ip| ip.is_ipv4() == remote.is_ipv4());
    let (socket, bound) = match (UdpSocket::bind(&options), own) {
        (Err(OsError::Bind { source, .. }), Some(ip))
            if mark.is_none() && source.kind() == io::ErrorKind::PermissionDenied =>
        {
            let local = SocketAddr::new(ip, 0);
            (UdpSocket::bind(&UdpOptions { device: None, local, ..options })?, Some(ip))
        }
        (result, _) => (result?, None),
    };
    poller
        .add(&socket, SOCKETS + u64::from(id.0), Interest::Read)
        .map_err(EngineError::io("watch a socket"))?;
    Ok((Wire::new(socket), bound))
}
