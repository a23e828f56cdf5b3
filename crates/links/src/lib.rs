//! The links of a client: finds their interfaces, opens their sockets, and reports when they can or cannot
//! carry packets.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod policies;
mod source;
mod tcp_sockets;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    time::Instant,
};

use mpvpn_config::is_match;
use mpvpn_error::RunError;
use mpvpn_input::short_text::ShortText;
use mpvpn_os::{
    OsError, UdpOptions, UdpSocket,
    netlink::Event,
    poll::{FIRST_SOCKET_TOKEN, Interest, Poller},
};
use mpvpn_sockets::{
    bind_options::{BindOptions, Protect},
    packet_io::{BufferedUdpSocket, SOCKET_BUFFER_BYTES},
    payload::{IPV4_UDP_HEADER_BYTES, max_udp_payload},
};
use mpvpn_status::events::{self, EventSender};
use mpvpn_types::{ClassId, LinkId};

use crate::policies::{LinkMeter, LinkMeters, LinkPolicies};
pub use source::GivenLink;
use source::{InterfaceSnapshot, LinkSource};

/// The keyword for "every interface with a default route".
const AUTO: &str = "auto";
/// A link, or one of its pipes or classes: each has its own socket.
#[derive(Debug)]
pub struct Link {
    /// The name of its interface, or the app's name for it.
    pub name: String,
    index: Option<u32>,
    /// The addresses that it may send from.
    pub addresses: Vec<IpAddr>,
    /// The MTU of its interface (bytes).
    pub mtu: u32,
    /// The server's address over this link; `None` while the link cannot carry packets.
    pub remote: Option<SocketAddr>,
    /// Its socket, once it has one.
    pub socket: Option<BufferedUdpSocket>,
    /// The local address to which the socket is bound, if it is not bound to the device.
    bound: Option<IpAddr>,
    /// Counts what the link carries.
    pub meter: LinkMeter,
    /// Why the link cannot be used; empty if it can.
    pub reason: &'static str,
    /// Since when this is so.
    pub reason_since: Instant,
    /// The number of pipes over UDP.
    pub pipes: u8,
    /// Whether the interface is up and has an address, whether or not the server's address is known.
    pub has_carrier: bool,
}

impl Link {
    fn set_reason(&mut self, reason: &'static str) {
        if std::mem::replace(&mut self.reason, reason) != reason {
            self.reason_since = Instant::now();
        }
    }
}

/// A change of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkChange {
    /// It can carry packets to this address, or its own address has changed.
    Up(LinkId, SocketAddr),
    /// It cannot carry packets any more.
    Down(LinkId),
    /// It is a pipe that is no longer wanted.
    Gone(LinkId),
}

/// Options common to all links' sockets, and the source of links.
#[derive(Clone, Default)]
pub struct LinkSocketOptions {
    /// Interfaces that must not be links: our own TUN devices.
    pub tuns: Vec<String>,
    /// The firewall mark of the tunnel's own packets; setting it needs privilege.
    pub mark: Option<u32>,
    /// The app's function for sockets, if there is one.
    pub protect: Option<Protect>,
    /// The links that an app provides; `None` uses the kernel's interfaces.
    pub given: Option<Vec<GivenLink>>,
    /// Reports links that cannot be used.
    pub events: EventSender,
}

impl LinkSocketOptions {
    /// The bind options of a link with these addresses.
    fn bind_options(&self, name: &str, addresses: &[IpAddr], is_from_app: bool) -> BindOptions {
        BindOptions {
            name: name.to_owned(),
            addresses: addresses.to_vec(),
            mark: self.mark,
            protect: self.protect.clone(),
            is_from_app,
        }
    }
}

/// All links of a client.
pub struct Links {
    names: Vec<String>,
    meters: LinkMeters,
    socket_options: LinkSocketOptions,
    source: LinkSource,
    /// The links, pipes and classes.
    pub links: BTreeMap<LinkId, Link>,
    remotes: Vec<SocketAddr>,
    /// The classes, each with its own sockets; the default class first.
    classes: Vec<LinkClass>,
}

/// The properties of a class that its sockets need.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkClass {
    /// The class.
    pub id: ClassId,
    /// The DSCP of its packets, if it is not the link's.
    pub dscp: Option<u8>,
}

impl Links {
    /// `names` are interface names, patterns, or the keyword `auto`, which means all links if an app provides
    /// them.
    pub fn new(
        names: &[String],
        classes: Vec<LinkClass>,
        meters: &LinkMeters,
        mut socket_options: LinkSocketOptions,
        poller: &Poller,
    ) -> Result<Self, RunError> {
        let source = match socket_options.given.take() {
            Some(given) => LinkSource::App(given),
            None => LinkSource::kernel(poller)?,
        };
        let mut links = Self {
            names: names.to_vec(),
            meters: meters.clone(),
            socket_options,
            source,
            links: BTreeMap::new(),
            remotes: Vec::new(),
            classes,
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
        // With a pattern, interfaces can come and go without limit.
        if number < LinkId::MAX_UPLINKS && !self.uplinks().any(|(_, link)| link.name == name) {
            self.insert(LinkId(number), name, 1);
            self.insert_class_sockets(LinkId(number), name);
        }
    }

    /// Adds a socket for each class that has none on a link.
    fn insert_class_sockets(&mut self, uplink: LinkId, name: &str) {
        for class in self.classes.clone() {
            let id = uplink.with_class(class.id);
            if !self.links.contains_key(&id) {
                self.insert(id, name, 1);
            }
        }
    }

    /// Replaces the classes. Sockets of removed classes and of changed DSCPs close; the next rescan opens new
    /// ones.
    pub fn set_classes(&mut self, classes: Vec<LinkClass>) {
        let mark = |all: &[LinkClass], id| all.iter().find(|class| class.id == id).map(|class| class.dscp);
        self.links.retain(|id, _| mark(&classes, id.class()).is_some());
        for (id, link) in &mut self.links {
            if !id.is_tcp() && mark(&self.classes, id.class()) != mark(&classes, id.class()) {
                link.socket = None;
            }
        }
        self.classes = classes;
        let uplinks: Vec<_> = self.uplinks().map(|(id, link)| (id, link.name.clone())).collect();
        for (id, name) in uplinks {
            self.insert_class_sockets(id, &name);
        }
    }

    fn insert(&mut self, id: LinkId, name: &str, pipes: u8) {
        let link = Link {
            name: name.to_owned(),
            index: None,
            addresses: Vec::new(),
            mtu: 1500,
            remote: None,
            socket: None,
            bound: None,
            meter: self.meters.of(name),
            reason: "not looked at yet",
            reason_since: Instant::now(),
            pipes,
            has_carrier: false,
        };
        self.links.insert(id, link);
    }

    /// The links, each by its first pipe of the default class.
    pub fn uplinks(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.links.iter().map(|(id, link)| (*id, link)).take_while(|(id, _)| id.0 < LinkId::MAX_UPLINKS)
    }

    /// Whether a link still has this path.
    pub fn has_path(&self, id: LinkId) -> bool {
        self.links.get(&id.uplink()).is_some_and(|link| id.path_index() < link.pipes || id.is_tcp())
    }

    /// The bind options for further sockets of a link.
    pub fn bind_options(&self, id: LinkId) -> Option<BindOptions> {
        let link = self.links.get(&id.uplink())?;
        Some(self.socket_options.bind_options(&link.name, &link.addresses, self.source.is_from_app()))
    }

    /// The server's addresses in the order of preference.
    pub fn remotes(&self) -> &[SocketAddr] {
        &self.remotes
    }

    /// Replaces the server's addresses.
    pub fn set_remotes(&mut self, remotes: Vec<SocketAddr>) {
        self.remotes = remotes;
    }

    /// Replaces all links by those that the app provides.
    pub fn set_app_links(&mut self, poller: &Poller, given: Vec<GivenLink>) -> Result<(), RunError> {
        if let LinkSource::Kernel { monitor, .. } = &self.source {
            poller.remove(monitor).map_err(RunError::io("stop watching the network"))?;
        }
        self.source = LinkSource::App(given);
        Ok(())
    }

    /// Reads all kernel events. Returns whether any concerns links.
    pub fn read_kernel_events(&mut self) -> bool {
        let is_auto = self.is_auto();
        let LinkSource::Kernel { monitor, .. } = &mut self.source else { return false };
        let mut matters = false;
        while let Ok(Some(event)) = monitor.next() {
            matters |= match event {
                Event::Link { name, .. } => !self.socket_options.tuns.contains(&name),
                Event::Route { route, .. } => is_auto && route.is_default(),
                Event::Address { .. } | Event::Overrun => true,
            };
        }
        matters
    }

    /// Updates all links from the present interfaces; returns the changes.
    pub fn rescan(&mut self, poller: &Poller, policies: &LinkPolicies) -> Result<Vec<LinkChange>, RunError> {
        if self.is_auto()
            && let LinkSource::Kernel { netlink, .. } = &mut self.source
        {
            let tuns: Vec<&str> = self.socket_options.tuns.iter().map(String::as_str).collect();
            for name in netlink.default_route_interfaces(&tuns)? {
                self.add(&name);
            }
        }
        let snapshot = self.source.snapshot()?;
        for info in snapshot.infos.iter().filter(|info| !info.loopback) {
            let is_selected = |name: &String| {
                is_pattern(name) && is_match(name, &info.name) || snapshot.is_from_app() && name == AUTO
            };
            if !self.socket_options.tuns.contains(&info.name) && self.names.iter().any(is_selected) {
                self.add(&info.name);
            }
        }
        let uplinks: Vec<LinkId> = self.uplinks().map(|(id, _)| id).collect();
        let mut changes = Vec::new();
        for id in uplinks {
            let change = self.update_link(id, &snapshot, poller, policies);
            if matches!(change, Some(LinkChange::Up(..))) {
                let index = self.links.get(&id).and_then(|link| link.index);
                self.source.flush_unresolved_neighbours(index);
            }
            changes.extend(change);
            self.apply_path_count(id, policies);
        }
        let is_further_path = |id: &LinkId| *id != id.uplink() && !id.is_tcp();
        let further: Vec<LinkId> = self.links.keys().copied().filter(is_further_path).collect();
        for id in further {
            changes.extend(match self.has_path(id) {
                true => self.update_link(id, &snapshot, poller, policies),
                false => self.close_path(id),
            });
        }
        Ok(changes)
    }

    /// Adds the sockets for a link's number of paths, once the link has an address.
    fn apply_path_count(&mut self, id: LinkId, policies: &LinkPolicies) {
        let Some(link) = self.links.get_mut(&id).filter(|link| link.remote.is_some()) else { return };
        link.pipes = policies.path_count(&link.name).open;
        let (name, count) = (link.name.clone(), link.pipes);
        let further = (1..count).map(|index| id.with_path_index(index));
        let all = further.flat_map(|path| self.classes.iter().map(move |class| path.with_class(class.id)));
        for path in all.collect::<Vec<_>>() {
            if !self.links.contains_key(&path) {
                self.insert(path, &name, count);
            }
        }
    }

    fn close_path(&mut self, id: LinkId) -> Option<LinkChange> {
        let link = self.links.get_mut(&id)?;
        link.socket = None;
        link.remote.take().map(|_| LinkChange::Gone(id))
    }

    fn update_link(
        &mut self,
        id: LinkId,
        snapshot: &InterfaceSnapshot,
        poller: &Poller,
        policies: &LinkPolicies,
    ) -> Option<LinkChange> {
        let link = self.links.get_mut(&id)?;
        let info = snapshot.info(&link.name);
        let own = info.map(|info| snapshot.addresses(info)).unwrap_or_default();
        let reached = |remote: &&SocketAddr| info.is_some_and(|info| snapshot.reaches(info, &own, **remote));
        let own_server = policies.of(&link.name).server;
        let remotes = own_server.as_ref().map_or(&self.remotes[..], std::slice::from_ref);
        let remote = remotes.iter().find(reached).copied();
        link.has_carrier = info.is_some_and(|info| info.up && info.carrier) && !own.is_empty();
        let reason = match (info, remote) {
            (None, _) => "no such interface",
            (Some(info), _) if !info.up => "switched off",
            (Some(info), _) if !info.carrier => "no carrier",
            _ if remotes.is_empty() => "the server's address is not known yet",
            (_, None) => "no address",
            _ => "",
        };
        let before = (link.index, link.remote, std::mem::replace(&mut link.addresses, own));
        if let Some(info) = info {
            link.mtu = info.mtu;
        }
        if !reason.is_empty() {
            link.set_reason(reason);
            let was_up = link.remote.take().is_some();
            if info.is_none() {
                // The socket is bound to a device that no longer exists.
                link.index = None;
                link.socket = None;
            }
            return was_up.then_some(LinkChange::Down(id));
        }
        let index = info.map(|info| info.index);
        let remote = remote?;
        let family = |remote: SocketAddr| remote.is_ipv4();
        let rebind = link.socket.is_none()
            || link.index != index
            || snapshot.is_from_app() && before.2 != link.addresses
            || link.bound.is_some_and(|ip| !link.addresses.contains(&ip))
            || before.1.is_some_and(|old| family(old) != family(remote));
        if rebind {
            link.socket = None;
            let class = self.classes.iter().find(|class| class.id == id.class());
            let dscp = class.and_then(|class| class.dscp).unwrap_or(policies.of(&link.name).dscp);
            let bind_options =
                self.socket_options.bind_options(&link.name, &link.addresses, snapshot.is_from_app());
            match bind(&bind_options, remote, dscp, poller, id) {
                Ok((socket, bound)) => (link.socket, link.bound) = (Some(socket), bound),
                Err(error) => {
                    self.socket_options.events.report(events::Event::LinkUnusable {
                        link: link.name.as_str().into(),
                        reason: ShortText::of(&error),
                    });
                    link.set_reason(match error {
                        RunError::Unprotected => "the app does not let its socket be used",
                        _ => "its socket cannot be bound",
                    });
                    return link.remote.take().is_some().then_some(LinkChange::Down(id));
                }
            }
        }
        link.set_reason("");
        link.index = index;
        link.remote = Some(remote);
        let after = (link.index, link.remote, &link.addresses);
        (rebind || (before.0, before.1, &before.2) != after).then_some(LinkChange::Up(id, remote))
    }

    /// The largest UDP payload that any link could carry (bytes).
    pub fn max_udp_payload(&mut self) -> u16 {
        let infos = self.source.snapshot().map(|snapshot| snapshot.infos).unwrap_or_default();
        let auto = self.is_auto();
        let max_mtu = infos
            .iter()
            .filter(|info| {
                if auto {
                    !info.loopback && !self.socket_options.tuns.contains(&info.name) && info.up
                } else {
                    self.names.iter().any(|name| is_match(name, &info.name))
                }
            })
            .map(|info| info.mtu)
            .max()
            .unwrap_or(1500);
        // Over IPv6 the smaller limit is found by probing.
        max_udp_payload(max_mtu, IPV4_UDP_HEADER_BYTES)
    }
}

fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// Opens a link's UDP socket. Also returns the address to which it is bound, if it is not bound to the
/// device.
fn bind(
    bind_options: &BindOptions,
    remote: SocketAddr,
    dscp: u8,
    poller: &Poller,
    id: LinkId,
) -> Result<(BufferedUdpSocket, Option<IpAddr>), RunError> {
    let any =
        if remote.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = |device: Option<&str>, local: Option<IpAddr>| {
        UdpSocket::bind(&UdpOptions {
            device: device.map(str::to_owned),
            mark: bind_options.mark,
            recv_buffer: Some(SOCKET_BUFFER_BYTES),
            send_buffer: Some(SOCKET_BUFFER_BYTES),
            dscp,
            ..UdpOptions::new(SocketAddr::new(local.unwrap_or(any), 0))
        })
    };
    let (socket, bound) = bind_options.bind_socket(remote, socket, OsError::errno)?;
    if !bind_options.is_protected(socket.as_fd()) {
        return Err(RunError::Unprotected);
    }
    poller
        .add(&socket, FIRST_SOCKET_TOKEN + u64::from(id.0), Interest::Read)
        .map_err(RunError::io("watch a socket"))?;
    Ok((BufferedUdpSocket::new(socket), bound))
}
