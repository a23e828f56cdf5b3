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
    device::Devices,
    events::ShardEvents,
    forge::Forge,
    sockets::LinkSockets,
    ways::{WayChange, Ways},
};
use crate::{
    EngineError, flows,
    links::{LinkChange, Links},
    policies::Policies,
    status,
    turn::{CLASS_TUNS, MONITOR, SOCKETS, TUN, Turn, Turns, WAKE},
};

/// The connections of a shard, and how they are made.
pub(super) struct PlaneGear {
    pub(super) shard: u8,
    pub(super) connections: ClassConnections,
    pub(super) classes: Classes,
    pub(super) forge: Forge,
    pub(super) ways: Ways,
    pub(super) events: ShardEvents,
}

/// One shard.
pub(super) struct Plane {
    shard: u8,
    pub(super) connections: ClassConnections,
    classes: Classes,
    forge: Forge,
    pub(super) sockets: LinkSockets,
    pub(super) policies: Policies,
    ways: Ways,
    pub(super) events: ShardEvents,
    devices: Option<Devices>,
    started: Instant,
}

impl Plane {
    /// Starts to watch the device; a queue of a TUN must be attached.
    pub(super) fn new(
        PlaneGear { shard, connections, classes, forge, ways, events }: PlaneGear,
        links: Links,
        policies: Policies,
        devices: Option<Devices>,
        turns: &Turns,
    ) -> Result<Self, EngineError> {
        if let Some(devices) = &devices {
            devices.watch(&turns.poller)?;
        }
        Ok(Self {
            shard,
            connections,
            classes,
            forge,
            sockets: LinkSockets::new(links),
            policies,
            ways,
            events,
            started: Instant::now(),
            devices,
        })
    }

    /// The packets of an app have another descriptor from now on.
    pub(super) fn set_descriptor(&mut self, turns: &Turns, fd: PacketFd) -> Result<(), EngineError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.set_descriptor(&turns.poller, fd))
    }

    /// Lets the kernel put packets into this shard's queue, or into those of the others only.
    pub(super) fn attach(&mut self, turns: &Turns, attached: bool) -> Result<(), EngineError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.set_attached(&turns.poller, attached))
    }

    /// The server gave these addresses.
    pub(super) fn assign(&mut self, assignment: &Assignment) {
        if let Some(devices) = &mut self.devices {
            devices.assign(&assignment.additional);
        }
    }

    /// When [`Self::take`] wants to be called.
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let all = [self.connections.poll_timeout(now), self.sockets.poll_timeout(), self.ways.poll_timeout()];
        all.into_iter().flatten().min()
    }

    /// Handles what has become ready, and time that has passed. `prepare` is called with the name of
    /// each link before its first use.
    pub(super) fn take(
        &mut self,
        turns: &Turns,
        turn: &Turn,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        let now = turn.now;
        if turn.overslept {
            self.connections.on_local_stall(now);
        }
        let mut packets_ready = false;
        for event in &turn.ready {
            match event.token {
                TUN => {
                    packets_ready |= event.readable;
                    if let Some(devices) = self.devices.as_mut().filter(|_| event.writable) {
                        devices.flush(&turns.poller);
                    }
                }
                WAKE => {
                    turns.wake.drain();
                    packets_ready |= self.devices.as_ref().is_some_and(Devices::comes_by_call);
                }
                MONITOR => self.read_news(turns, now, prepare)?,
                SOCKETS.. => {
                    let (connections, devices) = (&mut self.connections, &mut self.devices);
                    let after =
                        |connections: &mut ClassConnections| write_packets(turns, now, connections, devices);
                    self.sockets.ready(&turns.poller, *event, connections, now, after);
                }
                _ => {}
            }
        }
        self.connections.handle_batches(now);
        write_packets(turns, now, &mut self.connections, &mut self.devices);
        if packets_ready {
            self.read_packets(turns, now)?;
        }
        for event in turn.ready.iter().filter(|event| (CLASS_TUNS..SOCKETS).contains(&event.token)) {
            self.read_class(now, event.token);
        }
        if self.connections.poll_timeout(now).is_some_and(|at| at <= now) {
            self.connections.handle_timeout(now);
        }
        if self.sockets.is_rescan_due(now) {
            self.rescan(turns, now, prepare)?;
        }
        self.look_at_ways(turns, now);
        Ok(())
    }

    /// Has packets travel over UDP or inside TCP, link by link.
    fn look_at_ways(&mut self, turns: &Turns, now: Instant) {
        for change in self.ways.look(turns, now, &mut self.sockets.links, &self.policies, &self.connections) {
            match change {
                WayChange::Uses(uplink) => self.use_links(now, |id| id.uplink() == uplink),
                WayChange::Up(id, entry) => {
                    self.use_links(now, |other| other == id);
                    self.connections.link_up(now, id, entry);
                }
                WayChange::Down(id) => self.connections.link_down(now, id),
                WayChange::Gone(id) => self.leave(now, id),
            }
        }
    }

    /// Says how pipes are to be used.
    fn use_links(&mut self, now: Instant, which: impl Fn(LinkId) -> bool) {
        let links = &self.sockets.links;
        for (id, link) in links.links.iter().filter(|(id, _)| which(**id) && links.has(**id)) {
            self.connections.set_link(now, *id, self.policy(*id, &link.name));
        }
    }

    /// How a pipe of a link is to be used.
    fn policy(&self, id: LinkId, name: &str) -> LinkPolicy {
        let policy = self.classes.policy(id, name, &self.policies);
        self.ways.policy(id, policy, self.policies.transport(name))
    }

    /// A pipe is not there any more.
    fn leave(&mut self, now: Instant, id: LinkId) {
        self.connections.set_link(now, id, LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() });
        self.connections.link_down(now, id);
    }

    /// Reads what the kernel tells of links and addresses, and looks at the links if that matters.
    fn read_news(
        &mut self,
        turns: &Turns,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        if self.sockets.links.news() {
            self.rescan(turns, now, prepare)?;
            self.sockets.rescan_again(now);
        }
        Ok(())
    }

    fn read_packets(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        let connections = &mut self.connections;
        let Some(devices) = &mut self.devices else { return Ok(()) };
        devices.read(&turns.wake, |hdr, packet| connections.handle_tun(now, None, hdr, packet))
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
    pub(super) fn transmit(&mut self, turns: &Turns, now: Instant) {
        self.sockets.transmit(&turns.poller, now, &mut self.connections);
        write_packets(turns, now, &mut self.connections, &mut self.devices);
        while let Some(change) = self.connections.poll_change() {
            self.events.report_change(now, change, &self.sockets.links, &self.classes);
        }
    }

    /// The server's addresses have become known, or others.
    pub(super) fn set_remotes(
        &mut self,
        turns: &Turns,
        now: Instant,
        remotes: Vec<SocketAddr>,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        self.sockets.links.set_remotes(remotes);
        self.rescan(turns, now, prepare)
    }

    /// Looks at the interfaces anew.
    pub(super) fn rescan(
        &mut self,
        turns: &Turns,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        for change in self.sockets.links.rescan(&turns.poller, &self.policies)? {
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
                        self.ways.network_changed(now, id);
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
                LinkChange::Gone(id) => self.leave(now, id),
            }
        }
        Ok(())
    }

    /// Uses the links in another way.
    pub(super) fn set_policies(&mut self, now: Instant, policies: Policies) {
        self.policies = policies;
        self.use_links(now, |_| true);
        // They may have other numbers of pipes now.
        self.sockets.rescan_at(now);
    }

    /// Tells packets apart as this configuration says, and has classes travel so. The connections of those that stay as
    /// they are notice nothing.
    pub(super) fn set_classes(&mut self, turns: &Turns, now: Instant, config: &ClientConfig) {
        let classes = Classes::of(config, self.devices.is_some());
        for id in self.classes.gone_in(&classes) {
            self.connections.remove_class(now, id);
        }
        for connection in self.forge.connections(config, &classes, self.shard) {
            if !self.classes.travels_alike(connection.id, &classes) {
                self.connections.set_class(now, connection);
            }
        }
        self.connections.set_rules(classes.rules.clone());
        // Good-byes leave through sockets that may be gone then.
        self.transmit(turns, now);
        self.sockets.links.set_classes(classes.sockets());
        self.ways.classes_changed(now);
        self.classes = classes;
        self.set_policies(now, self.policies.clone());
    }

    /// What this shard's connection does.
    pub(super) fn status(&mut self, now: Instant, config: &ClientConfig, member: ConnectionNumber) -> Status {
        let reports = self.connections.reports(now);
        let uptime = now.saturating_duration_since(self.started);
        status::of_client(config, &self.sockets.links, &self.policies, &self.ways, &reports, uptime, member)
    }

    /// The flows of this shard.
    pub(super) fn flows(&self, now: Instant, config: &ClientConfig) -> FlowList {
        flows::of_tun(now, self.connections.flows(now), config)
    }

    /// Says good-bye to the server.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.connections.close(now, "the client ends");
        self.sockets.transmit_last(now, &mut self.connections);
        self.ways.end();
    }
}

fn write_packets(
    turns: &Turns,
    now: Instant,
    connections: &mut ClassConnections,
    devices: &mut Option<Devices>,
) {
    while let Some(joined) = connections.poll_tun(now) {
        if let Some(devices) = devices {
            devices.write(&turns.poller, &joined);
        }
        connections.recycle(joined);
    }
}
