//! The data plane of one shard of a client: it moves packets and events between the sockets of the links, the device for
//! packets if there is one, and the connections.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{
    config::ClientConfig,
    events::Event,
    status::{FlowList, Status},
};
use mpvpn_os::PacketFd;
use mpvpn_tunnel::{Assignment, ClassConnections, ConnectionNumber, LinkPolicy};
use mpvpn_types::{LinkId, Tier};

use super::{
    classes::Classes,
    connection_factory::ConnectionFactory,
    device::Devices,
    events::ShardEvents,
    sockets::LinkSockets,
    transports::{LinkTransports, TransportChange},
};
use crate::{
    EngineError,
    event_loop::{
        EventLoop, FIRST_CLASS_TUN_TOKEN, FIRST_SOCKET_TOKEN, Iteration, MONITOR_TOKEN, TUN_TOKEN, WAKE_TOKEN,
    },
    flows,
    links::{LinkChange, Links},
    policies::LinkPolicies,
    status,
};

/// The connections of a shard, and how they are made.
pub(super) struct DataPlaneParts {
    pub(super) shard: u8,
    pub(super) connections: ClassConnections,
    pub(super) classes: Classes,
    pub(super) connection_factory: ConnectionFactory,
    pub(super) transports: LinkTransports,
    pub(super) events: ShardEvents,
}

/// One shard.
pub(super) struct DataPlane {
    shard: u8,
    pub(super) connections: ClassConnections,
    classes: Classes,
    connection_factory: ConnectionFactory,
    pub(super) sockets: LinkSockets,
    pub(super) policies: LinkPolicies,
    transports: LinkTransports,
    pub(super) events: ShardEvents,
    devices: Option<Devices>,
    started: Instant,
}

impl DataPlane {
    /// Starts to watch the device; a queue of a TUN must be attached.
    pub(super) fn new(
        DataPlaneParts { shard, connections, classes, connection_factory, transports, events }: DataPlaneParts,
        links: Links,
        policies: LinkPolicies,
        devices: Option<Devices>,
        event_loop: &EventLoop,
    ) -> Result<Self, EngineError> {
        if let Some(devices) = &devices {
            devices.watch(&event_loop.poller)?;
        }
        Ok(Self {
            shard,
            connections,
            classes,
            connection_factory,
            sockets: LinkSockets::new(links),
            policies,
            transports,
            events,
            started: Instant::now(),
            devices,
        })
    }

    /// The packets of an app have another descriptor from now on.
    pub(super) fn set_descriptor(&mut self, event_loop: &EventLoop, fd: PacketFd) -> Result<(), EngineError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.set_descriptor(&event_loop.poller, fd))
    }

    /// Lets the kernel put packets into this shard's queue, or into those of the others only.
    pub(super) fn attach(&mut self, event_loop: &EventLoop, attached: bool) -> Result<(), EngineError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.set_attached(&event_loop.poller, attached))
    }

    /// The server gave these addresses.
    pub(super) fn assign(&mut self, assignment: &Assignment) {
        if let Some(devices) = &mut self.devices {
            devices.assign(&assignment.additional);
        }
    }

    /// When [`Self::take`] wants to be called.
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let all =
            [self.connections.poll_timeout(now), self.sockets.poll_timeout(), self.transports.poll_timeout()];
        all.into_iter().flatten().min()
    }

    /// Handles what has become ready, and time that has passed. `prepare` is called with the name of
    /// each link before its first use.
    pub(super) fn handle_ready(
        &mut self,
        event_loop: &EventLoop,
        iteration: &Iteration,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        let now = iteration.now;
        if iteration.stalled {
            self.connections.on_local_stall(now);
        }
        let mut packets_ready = false;
        for event in &iteration.ready {
            match event.token {
                TUN_TOKEN => {
                    packets_ready |= event.readable;
                    if let Some(devices) = self.devices.as_mut().filter(|_| event.writable) {
                        devices.flush(&event_loop.poller);
                    }
                }
                WAKE_TOKEN => {
                    event_loop.wake.drain();
                    packets_ready |= self.devices.as_ref().is_some_and(Devices::uses_callback);
                }
                MONITOR_TOKEN => self.read_kernel_events(event_loop, now, prepare)?,
                FIRST_SOCKET_TOKEN.. => {
                    let (connections, devices) = (&mut self.connections, &mut self.devices);
                    let after = |connections: &mut ClassConnections| {
                        write_received_packets(event_loop, now, connections, devices)
                    };
                    self.sockets.on_ready(&event_loop.poller, *event, connections, now, after);
                }
                _ => {}
            }
        }
        self.connections.handle_batches(now);
        write_received_packets(event_loop, now, &mut self.connections, &mut self.devices);
        if packets_ready {
            self.read_packets(event_loop, now)?;
        }
        for event in iteration
            .ready
            .iter()
            .filter(|event| (FIRST_CLASS_TUN_TOKEN..FIRST_SOCKET_TOKEN).contains(&event.token))
        {
            self.read_class(now, event.token);
        }
        if self.connections.poll_timeout(now).is_some_and(|at| at <= now) {
            self.connections.handle_timeout(now);
        }
        if self.sockets.is_rescan_due(now) {
            self.rescan(event_loop, now, prepare)?;
        }
        self.update_transports(event_loop, now);
        Ok(())
    }

    /// Has packets travel over UDP or inside TCP, link by link.
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
                TransportChange::Removed(id) => self.remove_pipe(now, id),
            }
        }
    }

    /// Says how pipes are to be used.
    fn apply_link_policies(&mut self, now: Instant, which: impl Fn(LinkId) -> bool) {
        let links = &self.sockets.links;
        for (id, link) in links.links.iter().filter(|(id, _)| which(**id) && links.has_pipe(**id)) {
            self.connections.set_link(now, *id, self.policy(*id, &link.name));
        }
    }

    /// How a pipe of a link is to be used.
    fn policy(&self, id: LinkId, name: &str) -> LinkPolicy {
        let policy = self.classes.policy(id, name, &self.policies);
        self.transports.policy(id, policy, self.policies.transport(name))
    }

    /// A pipe is not there any more.
    fn remove_pipe(&mut self, now: Instant, id: LinkId) {
        self.connections.set_link(now, id, LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() });
        self.connections.link_down(now, id);
    }

    /// Reads what the kernel tells of links and addresses, and looks at the links if that matters.
    fn read_kernel_events(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        if self.sockets.links.read_kernel_events() {
            self.rescan(event_loop, now, prepare)?;
            self.sockets.rescan_soon(now);
        }
        Ok(())
    }

    fn read_packets(&mut self, event_loop: &EventLoop, now: Instant) -> Result<(), EngineError> {
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

    /// Sends what is to be sent.
    pub(super) fn transmit(&mut self, event_loop: &EventLoop, now: Instant) {
        self.sockets.transmit(&event_loop.poller, now, &mut self.connections);
        write_received_packets(event_loop, now, &mut self.connections, &mut self.devices);
        while let Some(change) = self.connections.poll_change() {
            self.events.report_change(now, change, &self.sockets.links, &self.classes);
        }
    }

    /// The server's addresses have become known, or others.
    pub(super) fn set_remotes(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        remotes: Vec<SocketAddr>,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        self.sockets.links.set_remotes(remotes);
        self.rescan(event_loop, now, prepare)
    }

    /// Looks at the interfaces anew.
    pub(super) fn rescan(
        &mut self,
        event_loop: &EventLoop,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
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
                LinkChange::Gone(id) => self.remove_pipe(now, id),
            }
        }
        Ok(())
    }

    /// Uses the links in another way.
    pub(super) fn set_policies(&mut self, now: Instant, policies: LinkPolicies) {
        self.policies = policies;
        self.apply_link_policies(now, |_| true);
        // They may have other numbers of pipes now.
        self.sockets.rescan_at(now);
    }

    /// Tells packets apart as this configuration says, and has classes travel so. The connections of those that stay as
    /// they are notice nothing.
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
        // Good-byes leave through sockets that may be gone then.
        self.transmit(event_loop, now);
        self.sockets.links.set_classes(classes.link_classes());
        self.transports.classes_changed(now);
        self.classes = classes;
        self.set_policies(now, self.policies.clone());
    }

    /// What this shard's connection does.
    pub(super) fn status(&mut self, now: Instant, config: &ClientConfig, member: ConnectionNumber) -> Status {
        let reports = self.connections.reports(now);
        let uptime = now.saturating_duration_since(self.started);
        status::client_status(
            config,
            &self.sockets.links,
            &self.policies,
            &self.transports,
            &reports,
            uptime,
            member,
        )
    }

    /// The flows of this shard.
    pub(super) fn flows(&self, now: Instant, config: &ClientConfig) -> FlowList {
        flows::tun_flows(now, self.connections.flows(now), config)
    }

    /// Says good-bye to the server.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.connections.close(now, "the client ends");
        self.sockets.transmit_last(now, &mut self.connections);
        self.transports.end();
    }
}

fn write_received_packets(
    event_loop: &EventLoop,
    now: Instant,
    connections: &mut ClassConnections,
    devices: &mut Option<Devices>,
) {
    while let Some(joined) = connections.poll_tun(now) {
        if let Some(devices) = devices {
            devices.write(&event_loop.poller, &joined);
        }
        connections.recycle(joined);
    }
}
