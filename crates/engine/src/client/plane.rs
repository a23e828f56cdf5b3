//! The data plane of one shard of a client: its links with their sockets, its device for packets if there is one, its
//! connection.

use std::{net::SocketAddr, time::Instant};

use mpvpn_control::{
    config::ClientConfig,
    events::Event,
    status::{FlowList, Status},
};
use mpvpn_os::{PacketFd, RecvBatch, tun::READ_BUFFER};
use mpvpn_quic::Local;
use mpvpn_tunnel::{Assignment, Fleet, LinkPolicy, Member};
use mpvpn_types::{Duration, LinkId, Tier};

use super::{
    classes::Classes,
    device::Devices,
    events::ShardEvents,
    forge::Forge,
    ways::{WayChange, Ways},
};
use crate::{
    EngineError, flows,
    links::{LinkChange, Links},
    policies::{Policies, Way},
    status,
    turn::{CLASS_TUNS, MONITOR, SIGNAL, SOCKETS, TUN, Turn, Turns, WAKE},
    wire::{Sent, datagrams},
};

/// Receive calls a socket a turn.
const SOCKET_READS: usize = 4;
/// Messages a receive call.
const BATCH: usize = 16;
/// The links are looked at anew this long after news that may not be complete.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The connections of a shard, and how they are made.
pub(super) struct PlaneGear {
    pub(super) shard: u8,
    pub(super) fleet: Fleet,
    pub(super) classes: Classes,
    pub(super) forge: Forge,
    pub(super) ways: Ways,
    pub(super) events: ShardEvents,
}

/// One shard.
pub(super) struct Plane {
    shard: u8,
    pub(super) fleet: Fleet,
    classes: Classes,
    forge: Forge,
    pub(super) links: Links,
    pub(super) policies: Policies,
    ways: Ways,
    pub(super) events: ShardEvents,
    devices: Option<Devices>,
    attached: bool,
    started: Instant,
    batch: RecvBatch,
    device_buffer: Vec<u8>,
    out: Vec<u8>,
    look_at: Option<Instant>,
}

impl Plane {
    /// Starts to watch the device; a queue of a TUN must be attached.
    pub(super) fn new(
        PlaneGear { shard, fleet, classes, forge, ways, events }: PlaneGear,
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
            fleet,
            classes,
            forge,
            links,
            policies,
            ways,
            events,
            attached: true,
            started: Instant::now(),
            batch: RecvBatch::new(BATCH),
            device_buffer: if devices.is_some() { vec![0; READ_BUFFER] } else { Vec::new() },
            devices,
            out: Vec::with_capacity(64 << 10),
            look_at: None,
        })
    }

    /// The packets of an app have another descriptor from now on.
    pub(super) fn set_descriptor(&mut self, turns: &Turns, fd: PacketFd) -> Result<(), EngineError> {
        self.devices.as_mut().map_or(Ok(()), |devices| devices.main.set_descriptor(&turns.poller, fd))
    }

    /// Lets the kernel put packets into this shard's queue, or into those of the others only.
    pub(super) fn attach(&mut self, turns: &Turns, attached: bool) -> Result<(), EngineError> {
        let Some(devices) = self.devices.as_ref().filter(|_| self.attached != attached) else {
            return Ok(());
        };
        devices.set_attached(&turns.poller, attached)?;
        self.attached = attached;
        Ok(())
    }

    /// The server gave these addresses.
    pub(super) fn assign(&mut self, assignment: &Assignment) {
        if let Some(devices) = &mut self.devices {
            devices.assign(&assignment.more);
        }
    }

    /// When [`Self::take`] wants to be called.
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        let ways = self.ways.poll_timeout();
        self.fleet.poll_timeout(now).into_iter().chain(self.look_at).chain(ways).min()
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
            self.fleet.forgive(now);
        }
        let mut packets_ready = false;
        for event in &turn.ready {
            match event.token {
                TUN => {
                    packets_ready |= event.readable;
                    if let Some(devices) = self.devices.as_mut().filter(|_| event.writable) {
                        devices.main.flush(&turns.poller);
                    }
                }
                WAKE => {
                    turns.wake.drain();
                    packets_ready |=
                        self.devices.as_ref().is_some_and(|devices| devices.main.comes_by_call());
                }
                SIGNAL => {}
                MONITOR => {
                    if self.links.news() {
                        self.rescan(turns, now, prepare)?;
                        self.look_at = Some(now + LOOK_AGAIN);
                    }
                }
                CLASS_TUNS..SOCKETS => {}
                token => self.socket(turns, now, token, event.readable, event.writable),
            }
        }
        self.fleet.handle_batches(now);
        self.write_packets(turns, now);
        if packets_ready {
            self.read_packets(turns, now)?;
        }
        for event in turn.ready.iter().filter(|event| (CLASS_TUNS..SOCKETS).contains(&event.token)) {
            self.read_class(now, event.token);
        }
        if self.fleet.poll_timeout(now).is_some_and(|at| at <= now) {
            self.fleet.handle_timeout(now);
        }
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.rescan(turns, now, prepare)?;
        }
        self.look_at_ways(turns, now);
        Ok(())
    }

    /// Has packets travel over UDP or inside TCP, link by link.
    fn look_at_ways(&mut self, turns: &Turns, now: Instant) {
        for change in self.ways.look(turns, now, &mut self.links, &self.policies, &self.fleet) {
            match change {
                WayChange::Uses(uplink) => self.use_links(now, |id| id.uplink() == uplink),
                WayChange::Up(id, entry) => {
                    self.use_links(now, |other| other == id);
                    self.fleet.link_up(now, id, entry);
                }
                WayChange::Down(id) => self.fleet.link_down(now, id),
                WayChange::Gone(id) => self.leave(now, id),
            }
        }
    }

    /// Says how pipes are to be used.
    fn use_links(&mut self, now: Instant, which: impl Fn(LinkId) -> bool) {
        for (id, link) in self.links.links.iter().filter(|(id, _)| which(**id) && self.links.has(**id)) {
            self.fleet.set_link(now, *id, self.policy(*id, &link.name));
        }
    }

    /// How a pipe of a link is to be used.
    fn policy(&self, id: LinkId, name: &str) -> LinkPolicy {
        let policy = self.classes.policy(id, name, &self.policies);
        self.ways.policy(id, policy, self.policies.transport(name))
    }

    /// A pipe is not there any more.
    fn leave(&mut self, now: Instant, id: LinkId) {
        self.fleet.set_link(now, id, LinkPolicy { tier: Tier::Never, ..LinkPolicy::default() });
        self.fleet.link_down(now, id);
    }

    fn socket(&mut self, turns: &Turns, now: Instant, token: u64, readable: bool, writable: bool) {
        let Ok(number) = u16::try_from(token.wrapping_sub(SOCKETS)) else { return };
        let id = LinkId(number);
        let Some(link) = self.links.links.get_mut(&id) else { return };
        let (meter, Some(wire)) = (&link.meter, link.wire.as_mut()) else { return };
        if writable {
            wire.flush(&turns.poller, token, |_| None);
        }
        if !readable {
            return;
        }
        for _ in 0..SOCKET_READS {
            let count = match wire.socket.recv_batch(&mut self.batch) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!(%error, link = number, "cannot receive");
                    return;
                }
            };
            let fleet = &mut self.fleet;
            datagrams(&mut self.batch, |got| {
                meter.count(Way::Received, got.data.len(), 1, got.remote.is_ipv4());
                fleet.handle_datagram(now, id, got.remote, got.ecn, got.data);
            });
            self.fleet.handle_batch(now, id.class());
            while let Some(joined) = self.fleet.poll_tun(now) {
                if let Some(devices) = &mut self.devices {
                    devices.write(&turns.poller, &joined);
                }
                self.fleet.recycle(joined);
            }
            if count < BATCH {
                return;
            }
        }
    }

    fn write_packets(&mut self, turns: &Turns, now: Instant) {
        while let Some(joined) = self.fleet.poll_tun(now) {
            if let Some(devices) = &mut self.devices {
                devices.write(&turns.poller, &joined);
            }
            self.fleet.recycle(joined);
        }
    }

    fn read_packets(&mut self, turns: &Turns, now: Instant) -> Result<(), EngineError> {
        let fleet = &mut self.fleet;
        let Some(devices) = &self.devices else { return Ok(()) };
        let handle = |hdr, packet: &mut [u8]| fleet.handle_tun(now, None, hdr, packet);
        devices.main.read(&mut self.device_buffer, &turns.wake, handle)
    }

    fn read_class(&mut self, now: Instant, token: u64) {
        let fleet = &mut self.fleet;
        if let Some(devices) = &self.devices {
            let handle = |class, hdr, packet: &mut [u8]| fleet.handle_tun(now, Some(class), hdr, packet);
            devices.read_class(token, &mut self.device_buffer, handle);
        }
    }

    /// Sends what is to be sent.
    pub(super) fn transmit(&mut self, turns: &Turns, now: Instant) {
        loop {
            self.out.clear();
            let Some(transmit) = self.fleet.poll_transmit(now, &mut self.out) else { break };
            let Some(id) = transmit.local.and_then(Local::as_link) else { continue };
            let Some(link) = self.links.links.get_mut(&id) else { continue };
            // Into a cable that is pulled the kernel would only ask for its neighbour in vain, and when the link is
            // back hold everything for up to a second, until it asks again.
            if link.remote.is_none() {
                continue;
            }
            let Some(wire) = &mut link.wire else { continue };
            let token = SOCKETS + u64::from(id.0);
            let datagrams = transmit.segment_size.map_or(1, |size| transmit.size.div_ceil(size.max(1)));
            link.meter.count(Way::Sent, transmit.size, datagrams, transmit.remote.is_ipv4());
            if wire.send(&turns.poller, token, &transmit, &self.out, None) == Sent::LinkDown {
                // The news will say why; if there is none, look.
                self.look_at.get_or_insert(now + LOOK_AGAIN);
            }
        }
        self.write_packets(turns, now);
        while let Some(change) = self.fleet.poll_change() {
            self.events.report_change(now, change, &self.links, &self.classes);
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
        self.links.set_remotes(remotes);
        self.rescan(turns, now, prepare)
    }

    /// Looks at the interfaces anew.
    pub(super) fn rescan(
        &mut self,
        turns: &Turns,
        now: Instant,
        prepare: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        for change in self.links.rescan(&turns.poller, &self.policies)? {
            match change {
                LinkChange::Up(id, remote) => {
                    let link = &self.links.links[&id];
                    let name = &link.name;
                    if id == id.uplink() {
                        self.events.report_once(|| {
                            let addresses = link.addresses.clone();
                            Event::LinkUp { link: name.as_str().into(), addresses }
                        });
                        prepare(name);
                        self.ways.network_changed(now, id);
                    }
                    self.fleet.set_link(now, id, self.policy(id, name));
                    self.fleet.link_up(now, id, remote);
                }
                LinkChange::Down(id) => {
                    let link = &self.links.links[&id];
                    if id == id.uplink() {
                        self.events.report_once(|| {
                            let reason = link.reason.into();
                            Event::LinkDown { link: link.name.as_str().into(), reason }
                        });
                    }
                    self.fleet.link_down(now, id);
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
        self.look_at = Some(now);
    }

    /// Tells packets apart as this configuration says, and has classes travel so. The connections of those that stay as
    /// they are notice nothing.
    pub(super) fn set_classes(&mut self, turns: &Turns, now: Instant, config: &ClientConfig) {
        let classes = Classes::of(config, self.devices.is_some());
        for id in self.classes.gone_in(&classes) {
            self.fleet.remove_class(now, id);
        }
        for connection in self.forge.connections(config, &classes, self.shard) {
            if !self.classes.travels_alike(connection.id, &classes) {
                self.fleet.set_class(now, connection);
            }
        }
        self.fleet.set_rules(classes.rules.clone());
        // Good-byes leave through sockets that may be gone then.
        self.transmit(turns, now);
        self.links.set_classes(classes.sockets());
        self.ways.classes_changed(now);
        self.classes = classes;
        self.set_policies(now, self.policies.clone());
    }

    /// What this shard's connection does.
    pub(super) fn status(&mut self, now: Instant, config: &ClientConfig, member: Member) -> Status {
        let reports = self.fleet.reports(now);
        let uptime = now.saturating_duration_since(self.started);
        status::of_client(config, &self.links, &self.policies, &self.ways, &reports, uptime, member)
    }

    /// The flows of this shard.
    pub(super) fn flows(&self, now: Instant, config: &ClientConfig) -> FlowList {
        flows::of_tun(now, self.fleet.flows(now), config)
    }

    /// Says good-bye to the server.
    pub(super) fn end(&mut self) {
        let now = Instant::now();
        self.fleet.close(now, "the client ends");
        loop {
            self.out.clear();
            let Some(transmit) = self.fleet.poll_transmit(now, &mut self.out) else { break };
            let link = transmit.local.and_then(Local::as_link).and_then(|id| self.links.links.get_mut(&id));
            if let Some(wire) = link.and_then(|link| link.wire.as_mut()) {
                wire.send_last(&transmit, &self.out, None);
            }
        }
        self.ways.end();
    }
}
