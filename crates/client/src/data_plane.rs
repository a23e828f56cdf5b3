//! The data plane of one shard of a client: it moves packets and events between the links' sockets, the
//! packet device (if there is one) and the connections.

use std::{net::SocketAddr, time::Instant};

use mpvpn_config::ClientConfig;
use mpvpn_error::RunError;
use mpvpn_links::{Link, LinkChange, policies::LinkPolicies};
use mpvpn_os::{
    PacketFd,
    poll::{FIRST_CLASS_TUN_TOKEN, FIRST_SOCKET_TOKEN, MONITOR_TOKEN, TUN_TOKEN, WAKE_TOKEN},
};
use mpvpn_path::TransportHealth;
use mpvpn_report::flows;
use mpvpn_status::{FlowList, Status, events::Event};
use mpvpn_threads::event_loop::{EventLoop, Iteration, has_waited_long};
use mpvpn_tunnel::{Assignment, ClassConnections, ConnectionNumber, Heard, LinkPolicy, OtherServers};
use mpvpn_types::{LinkId, Tier};

use super::{
    classes::Classes,
    connection_factory::ConnectionFactory,
    device::Devices,
    events::ShardEvents,
    servers::ServerAccess,
    sockets::LinkSockets,
    transports::{LinkTransports, TransportChange},
};
use crate::status;

/// The data plane of one shard.
pub(super) struct DataPlane {
    pub(super) shard: u8,
    pub(super) connections: ClassConnections,
    pub(super) classes: Classes,
    pub(super) connection_factory: ConnectionFactory,
    /// In shard 0 of a client with several servers.
    pub(super) other_servers: Option<OtherServers>,
    pub(super) sockets: LinkSockets,
    pub(super) policies: LinkPolicies,
    pub(super) transports: LinkTransports,
    pub(super) events: ShardEvents,
    /// Those that the poller watches.
    pub(super) devices: Option<Devices>,
    pub(super) started: Instant,
}

impl DataPlane {
    /// Replaces the descriptor for the app's packets.
    pub(super) fn set_descriptor(&mut self, event_loop: &EventLoop, fd: PacketFd) -> Result<(), RunError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.main.set_descriptor(&event_loop.poller, fd))
    }

    /// Attaches this shard's TUN queue, so that the kernel uses it, or detaches it.
    pub(super) fn attach(&mut self, event_loop: &EventLoop, attached: bool) -> Result<(), RunError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.set_attached(&event_loop.poller, attached))
    }

    /// Takes the addresses that the server assigned.
    pub(super) fn assign(&mut self, assignment: &Assignment) {
        if let Some(devices) = &mut self.devices {
            devices.assign(&assignment.additional);
        }
    }

    /// When [`Self::handle_ready`] must be called.
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let all = [
            self.connections.poll_timeout(now),
            self.sockets.poll_timeout(),
            self.transports.next_update,
            self.other_servers.as_mut().and_then(OtherServers::poll_timeout),
        ];
        all.into_iter().flatten().min()
    }

    /// Handles ready sockets and expired timers. Calls `prepare` with the name of each link before its first
    /// use.
    pub(super) fn handle_ready(
        &mut self,
        event_loop: &EventLoop,
        iteration: &Iteration,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), RunError> {
        let now = iteration.now;
        let (mut stalled, mut packets_ready, mut written) = (iteration.stalled, false, false);
        for event in &iteration.ready {
            match event.token {
                TUN_TOKEN => {
                    packets_ready |= event.readable;
                    if let Some(devices) = self.devices.as_mut().filter(|_| event.writable) {
                        devices.main.flush(&event_loop.poller);
                    }
                }
                WAKE_TOKEN => {
                    event_loop.wake.drain();
                    packets_ready |=
                        self.devices.as_ref().is_some_and(|devices| devices.main.uses_callback());
                }
                MONITOR_TOKEN => self.read_kernel_events(event_loop, now, prepare)?,
                FIRST_SOCKET_TOKEN.. => {
                    let (connections, devices) = (&mut self.connections, &mut self.devices);
                    let after = |connections: &mut ClassConnections| {
                        written |= write_received_packets(event_loop, now, connections, devices);
                    };
                    let others = self.other_servers.as_mut();
                    let arrived =
                        self.sockets.on_ready(&event_loop.poller, *event, connections, others, now, after);
                    stalled |= arrived.is_some_and(|at| has_waited_long(at, now));
                }
                _ => {}
            }
        }
        if stalled {
            self.connections.on_local_stall(now);
        }
        self.connections.handle_batches(now);
        written |= write_received_packets(event_loop, now, &mut self.connections, &mut self.devices);
        // The kernel answers a TCP segment while it is written, so its acknowledgement leaves in this
        // iteration.
        if packets_ready || written {
            self.read_packets(event_loop, now)?;
        }
        for event in iteration
            .ready
            .iter()
            .filter(|event| (FIRST_CLASS_TUN_TOKEN..FIRST_SOCKET_TOKEN).contains(&event.token))
        {
            self.read_class(now, event.token);
        }
        self.connections.handle_timeout(now);
        if let Some(others) = &mut self.other_servers {
            others.handle_timeout(now);
        }
        if self.sockets.is_rescan_due(now) {
            self.rescan(event_loop, now, prepare)?;
        }
        self.update_transports(event_loop, now);
        Ok(())
    }

    /// Moves the links' packets between UDP and TCP where necessary.
    fn update_transports(&mut self, event_loop: &EventLoop, now: Instant) {
        for change in self.transports.update(
            event_loop,
            now,
            &mut self.sockets.links,
            &self.policies,
            &self.connections,
        ) {
            match change {
                TransportChange::PolicyChanged(uplink) => {
                    self.apply_link_policies(now, |id| id.uplink() == uplink)
                }
                TransportChange::Up(id, entry) => {
                    self.apply_link_policies(now, |other| other == id);
                    self.connections.link_up(now, id, entry);
                }
                TransportChange::Down(id) => self.connections.link_down(now, id),
                TransportChange::Removed(id) => self.remove_path(now, id),
                TransportChange::Refused(reason) => {
                    self.connections.default_client_mut().on_refused_over_tcp(now, reason);
                }
            }
        }
    }

    /// Sets the policies of all paths for which `which` is true.
    fn apply_link_policies(&mut self, now: Instant, which: impl Fn(LinkId) -> bool) {
        let links = &self.sockets.links;
        for (id, link) in links.links.iter().filter(|(id, _)| which(**id) && links.has_path(**id)) {
            self.connections.set_link(now, *id, self.policy(*id, &link.name));
        }
    }

    /// The policy of one path.
    fn policy(&self, id: LinkId, name: &str) -> LinkPolicy {
        let policy = self.classes.policy(id, name, &self.policies);
        self.transports.policy(id, policy, self.policies.transport(name))
    }

    /// Removes a path from the tunnel.
    fn remove_path(&mut self, now: Instant, id: LinkId) {
        self.connections.set_link(now, id, LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() });
        self.connections.link_down(now, id);
    }

    /// Reads the kernel's events about links and addresses, and rescans if they matter.
    fn read_kernel_events(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), RunError> {
        if self.sockets.links.read_kernel_events() {
            self.rescan(event_loop, now, prepare)?;
            self.sockets.rescan_soon(now);
        }
        Ok(())
    }

    fn read_packets(&mut self, event_loop: &EventLoop, now: Instant) -> Result<(), RunError> {
        let connections = &mut self.connections;
        let Some(devices) = &mut self.devices else { return Ok(()) };
        devices.read(&event_loop.wake, |hdr, packet| connections.handle_tun(now, None, hdr, packet))
    }

    fn read_class(&mut self, now: Instant, token: u64) {
        let connections = &mut self.connections;
        if let Some(devices) = &mut self.devices {
            devices.read_class(token, |class, hdr, packet| {
                connections.handle_tun(now, Some(class), hdr, packet)
            });
        }
    }

    /// Sends everything that is due: packets, received packets to the device, and events.
    pub(super) fn transmit(&mut self, event_loop: &EventLoop, now: Instant) {
        self.sockets.transmit(&event_loop.poller, now, |out| self.connections.poll_transmit(now, out));
        if let Some(others) = &mut self.other_servers {
            self.sockets.transmit(&event_loop.poller, now, |out| others.poll_transmit(now, out));
        }
        write_received_packets(event_loop, now, &mut self.connections, &mut self.devices);
        while let Some(change) = self.connections.poll_change(now) {
            self.events.report_change(now, change, &self.sockets.links, &self.classes);
        }
    }

    /// Sets the server's addresses.
    pub(super) fn set_remotes(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        remotes: Vec<SocketAddr>,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), RunError> {
        self.sockets.links.set_remotes(remotes);
        self.rescan(event_loop, now, prepare)
    }

    /// Updates the links from the interfaces that exist now.
    pub(super) fn rescan(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), RunError> {
        for change in self.sockets.links.rescan(&event_loop.poller, &self.policies)? {
            match change {
                LinkChange::Up(id, remote) => {
                    let link = &self.sockets.links.links[&id];
                    let name = &link.name;
                    if id == id.uplink() {
                        self.events.report_once(|| {
                            let addresses = link.addresses.clone();
                            Event::LinkUp { link: name.as_str().into(), addresses }
                        });
                        prepare(name);
                        self.transports.network_changed(now, id);
                    }
                    self.connections.set_link(now, id, self.policy(id, name));
                    self.connections.link_up(now, id, remote);
                }
                LinkChange::Down(id) => {
                    let link = &self.sockets.links.links[&id];
                    if id == id.uplink() {
                        self.events.report_once(|| {
                            let reason = link.reason.into();
                            Event::LinkDown { link: link.name.as_str().into(), reason }
                        });
                    }
                    self.connections.link_down(now, id);
                }
                LinkChange::Gone(id) => self.remove_path(now, id),
            }
        }
        Ok(())
    }

    /// Replaces the policies of all links.
    pub(super) fn set_policies(&mut self, now: Instant, policies: LinkPolicies) {
        self.policies = policies;
        self.apply_link_policies(now, |_| true);
        // The numbers of pipes may have changed.
        self.sockets.rescan_at(now);
    }

    /// Replaces the classes and their rules. Connections of unchanged classes stay.
    pub(super) fn set_classes(&mut self, event_loop: &EventLoop, now: Instant, config: &ClientConfig) {
        let classes = Classes::from_config(config, self.devices.is_some());
        for id in self.classes.removed_in(&classes) {
            self.connections.remove_class(now, id);
        }
        for connection in self.connection_factory.connections(config, &classes, self.shard) {
            if !self.classes.has_same_connection(connection.id, &classes) {
                self.connections.set_class(now, connection);
            }
        }
        self.connections.set_rules(classes.rules.clone());
        // Closing packets must leave now: their sockets may be removed next.
        self.transmit(event_loop, now);
        self.sockets.links.set_classes(classes.link_classes());
        self.transports.classes_changed(now);
        self.classes = classes;
        self.set_policies(now, self.policies.clone());
    }

    /// Asks a server at one of these addresses, and the one in use, over all links; or it alone, over the
    /// link that costs least.
    pub(super) fn probe_server(
        &mut self,
        now: Instant,
        number: usize,
        addresses: &[SocketAddr],
        over_all: bool,
    ) {
        let Some(others) = &mut self.other_servers else { return };
        let usable = |link: &&(LinkId, &Link)| {
            link.1.remote.is_some() && self.policies.tier(&link.1.name) != Tier::Never
        };
        let mut links: Vec<_> = self.sockets.links.uplinks().filter(|link| usable(&link)).collect();
        if !over_all {
            links.sort_by_key(|(_, link)| {
                (self.policies.of(&link.name).metered, self.policies.tier(&link.name))
            });
            links.truncate(1);
        }
        for (id, link) in links {
            // The socket of a link has one address family.
            let reached = |to: &&SocketAddr| {
                link.remote.is_some_and(|own| to.is_ipv4() == own.is_ipv4() && **to != own)
            };
            if let Some(remote) = addresses.iter().find(reached) {
                others.probe(now, number, id, *remote);
            }
        }
        if over_all {
            self.connections.default_client_mut().probe_paths(now);
        }
    }

    /// Uses another server from now on, whose addresses come next.
    pub(super) fn use_server(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        access: &ServerAccess,
        config: &ClientConfig,
    ) {
        self.connection_factory = access.connection_factory.clone();
        let setups = self.connection_factory.connections(config, &self.classes, self.shard);
        self.connections.use_server(now, setups);
        // Closing packets must leave now: they would go to the addresses of the new server.
        self.transmit(event_loop, now);
        self.transports.use_server(now, access.tcp.clone());
    }

    /// This shard's part of the status.
    pub(super) fn status(&mut self, now: Instant, config: &ClientConfig, member: ConnectionNumber) -> Status {
        let reports = self.connections.reports(now);
        let mut status = status::client_status(
            config,
            &self.sockets.links,
            &self.policies,
            &self.transports,
            &|uplink| {
                let Heard { udp, tcp, .. } = self.connections.heard(uplink);
                udp.max(tcp) != TransportHealth::Unknown
            },
            &reports,
            member,
        );
        status.uptime_s = now.saturating_duration_since(self.started).as_secs_f64();
        status
    }

    /// This shard's flows.
    pub(super) fn flows(&self, now: Instant, config: &ClientConfig) -> FlowList {
        flows::tun_flows(now, self.connections.flows(now), config)
    }

    /// Closes all connections to the server.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.connections.close(now, "the client ends");
        self.sockets.transmit_last(now, &mut self.connections);
        self.transports.end();
    }
}

/// Returns whether there were any.
fn write_received_packets(
    event_loop: &EventLoop,
    now: Instant,
    connections: &mut ClassConnections,
    devices: &mut Option<Devices>,
) -> bool {
    let mut written = false;
    while let Some(joined) = connections.poll_tun(now) {
        if let Some(devices) = devices {
            devices.write(&event_loop.poller, &joined);
        }
        connections.recycle(joined);
        written = true;
    }
    written
}
