//! What both ends do alike with an established tunnel: packets become datagrams, wait for a path
//! and leave; paths are watched and judged.

mod clocks;
mod flow_order;
mod groups;
mod handout;
mod late;
mod load;
mod numbering;
mod policy;
mod progress;
mod protect;
mod pulse;
mod report;
mod rescue;
mod resequencer;
mod retransmissions;
mod sequence;
#[cfg(test)]
mod testing;
mod traffic;

use std::{collections::BTreeMap, net::IpAddr};

use bytes::Bytes;
use mpvpn_class::{MOST_COPIES, QueueConfig, Queued, Seat};
use mpvpn_lane::Label;
use mpvpn_masque::datagram::{self, DatagramError, DatagramPrefix};
use mpvpn_packet::{
    Arena, FlowKey, SplitError, VnetHdr, icmp, ip,
    mss::{self, Checksum},
    protocol, split,
};
use mpvpn_path::{Change, Choice, Dispatcher, Liveness, Offer, PathInfo, PathState, Place, Scheduler, Tiers};
use mpvpn_quic::{Connection, Local, PathStatus, Transmit};
use mpvpn_types::{ClassId, Duration, Instant, LinkId, PathId, Tier};

use crate::{ClassProfile, client::Seen, mtu::MtuFollower, shapers::Shapers};
use clocks::{Clocked, Clocks};
pub(crate) use flow_order::FlowMeter;
use flow_order::needs_order;
use groups::{Member, PathGroups};
use load::PathLoad;
pub(crate) use policy::PathPolicy;
pub use protect::FecCounters;
use pulse::{Echo, Pulses};
pub use report::PathReport;
use rescue::Rescue;
pub use sequence::LaneCounters;
use sequence::Sequencer;
use traffic::Traffic;
pub use traffic::{Counters, Rates};

/// Measurements of paths are taken over into scheduling at this interval.
const MEASURE: Duration = Duration::from_millis(20);
/// While overflow links are in use it is asked this often whether they are still needed.
const OVERFLOW: Duration = Duration::from_millis(100);
/// Losses that belong to the death of a path may be found this long after it is back.
const THAW: Duration = Duration::from_millis(300);
/// A tunnel that had nothing to send for this time gives its memory for packets back.
const REST: Duration = Duration::from_secs(1);
/// A flow keeps the others waiting for no longer than this at a time.
const FLOW_TURN: Duration = Duration::from_micros(300);
/// No packet should wait for longer than this.
const QUEUE_TIME: Duration = Duration::from_millis(150);

/// Which end of the tunnel this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens paths and decides which of them are standby.
    Client,
    /// Follows the client's wishes.
    Server,
}

#[derive(Debug)]
struct Watched {
    liveness: Liveness,
    /// Since when the peer wants no data on this path.
    refused: Option<Instant>,
    /// Whether the far end hears this one here, if it said so.
    echo: Option<Echo>,
    /// Since when it says that it does not.
    silent: Option<Instant>,
    /// The far end asked for a sign of life.
    owed: bool,
    policy: PathPolicy,
    /// Its packets travel inside TCP.
    inside_tcp: bool,
    /// The connection knows the cap of the policy.
    capped: bool,
    /// Its place at the shaper of its link, where classes share that.
    seat: Option<Seat>,
    clocked: Clocked,
    place: Place,
    link: LinkId,
    thaw: Option<Instant>,
    /// If it is dead still then, it is closed: streams wait for what is on its way here.
    close: Option<Instant>,
    /// What was sent here came too late, last.
    stalled: Option<Instant>,
    /// What a round trip usually takes; 0 while that is not known.
    usual: Duration,
    told: PathStatus,
    state: PathState,
    load: PathLoad,
}

impl Watched {
    /// What all paths over one link have in common, and no other path has. One inside TCP has a controller of its own.
    fn link_key(&self, role: Role, id: PathId) -> u32 {
        match role {
            Role::Client if self.link.is_tcp() => self.link.0.into(),
            Role::Client => self.link.uplink().0.into(),
            Role::Server => self.policy.with.unwrap_or(id).0,
        }
    }
}

/// A tunnel over one connection.
#[derive(Debug)]
pub(crate) struct Carrier {
    role: Role,
    /// What its class is called, where there are several.
    class: Option<Box<str>>,
    /// The request stream whose packets it carries; `None` if it carries streams and payloads of UDP only.
    stream: Option<u64>,
    prefix: DatagramPrefix,
    dispatcher: Dispatcher,
    choice: Choice,
    /// What the paths in use can take; kept for its memory.
    offers: Vec<Offer>,
    /// Where both ends know how to number packets.
    sequencer: Option<Box<Sequencer>>,
    /// Where both ends can send bytes of streams as datagrams.
    rescue: Option<Box<Rescue>>,
    /// Where both ends tell each other what they hear.
    pulses: Option<Pulses>,
    /// Where both ends tell each other what their clocks say.
    clocks: Option<Clocks>,
    /// In boxes, as a map takes the room of many at once, and most clients have one.
    paths: BTreeMap<PathId, Box<Watched>>,
    groups: PathGroups,
    tiers: Tiers,
    /// Where other connections have paths over the same links.
    shares: Option<(Shapers, ClassId)>,
    by_link: BTreeMap<LinkId, PathPolicy>,
    by_path: BTreeMap<PathId, PathPolicy>,
    /// Since when there is no path, if there is none.
    bare: Instant,
    measured: Option<Instant>,
    changed: bool,
    mtu: MtuFollower,
    arena: Arena,
    /// When memory for packets was last in use, until it has been given back.
    busy: Option<Instant>,
    ranges: Vec<std::ops::Range<usize>>,
    traffic: Traffic,
}

impl Carrier {
    /// For a connection whose path 0 is open, with a tunnel on the request stream `stream`, if there is one.
    pub(crate) fn new(now: Instant, role: Role, stream: Option<u64>, scheduler: Scheduler) -> Self {
        Self {
            role,
            class: None,
            stream,
            prefix: datagram::prefix(stream.unwrap_or_default(), datagram::CONTEXT_PAYLOAD),
            dispatcher: Dispatcher::new(scheduler, queue()),
            choice: Choice::new(),
            offers: Vec::new(),
            sequencer: None,
            rescue: None,
            pulses: None,
            clocks: None,
            paths: BTreeMap::new(),
            groups: PathGroups::default(),
            tiers: Tiers::default(),
            shares: None,
            by_link: BTreeMap::new(),
            by_path: BTreeMap::new(),
            bare: now,
            measured: None,
            changed: true,
            mtu: MtuFollower::new(now),
            arena: Arena::new(),
            busy: None,
            ranges: Vec::new(),
            traffic: Traffic::new(now),
        }
    }

    /// It is one of several, each for a class with a name.
    pub(crate) fn set_class(&mut self, class: Option<&ClassProfile>) {
        self.class = class.map(|class| class.name.as_str().into());
    }

    /// The peer knows numbered packets, in this context of the request stream.
    pub(crate) fn number_packets(&mut self, stream: u64, context: u64) {
        self.sequencer = Some(Box::new(Sequencer::new(stream, context)));
        self.measured = None;
        self.changed = true;
    }

    /// Sends each numbered packet so often, each time on another link.
    pub(crate) fn set_copies(&mut self, copies: u8) {
        self.choice.set_copies(if self.sequencer.is_some() { copies.min(MOST_COPIES) } else { 1 });
    }

    /// A path can carry data.
    pub(crate) fn path_opened(&mut self, now: Instant, connection: &Connection, id: PathId) {
        let link = connection.local_of(id).and_then(Local::as_link).unwrap_or(LinkId(id.0 as u16));
        let policy = self.policy_of(id, link);
        let inside_tcp = match self.role {
            Role::Client => link.is_tcp(),
            Role::Server => connection.is_from_here(id),
        };
        if inside_tcp {
            connection.set_inside_tcp(id);
        }
        let mut liveness = Liveness::new(policy.liveness(inside_tcp), now);
        // The far end may see data move here that this one noted before there was this path.
        if let Some(at) = self.traffic.last_moved() {
            liveness.on_traffic(at);
        }
        let watched = Watched {
            liveness,
            refused: None,
            echo: None,
            silent: None,
            owed: false,
            policy,
            inside_tcp,
            capped: policy.cap.is_none() && self.shares.is_none(),
            seat: None,
            clocked: Clocked::default(),
            place: Place::Active,
            link,
            thaw: None,
            close: None,
            stalled: None,
            usual: Duration::ZERO,
            told: PathStatus::Available,
            state: PathState::Active,
            load: PathLoad::new(),
        };
        self.paths.entry(id).or_insert_with(|| Box::new(watched));
        self.changed = true;
    }

    /// A path is gone; returns the link that it ran over.
    pub(crate) fn path_closed(&mut self, now: Instant, id: PathId) -> Option<LinkId> {
        let closed = self.paths.remove(&id);
        if self.paths.is_empty() {
            self.bare = now;
        }
        self.by_path.remove(&id);
        self.changed = true;
        closed.map(|path| path.link)
    }

    /// The kernel says whether a link can carry packets.
    pub(crate) fn link_carrier(&mut self, now: Instant, link: LinkId, up: bool) {
        for path in self.paths.values_mut().filter(|path| path.link == link) {
            path.liveness.on_carrier(now, up);
            self.changed = true;
        }
    }

    /// Asks at once whether the paths over a link work.
    pub(crate) fn beat_on(&mut self, link: LinkId) {
        for path in self.paths.values_mut().filter(|path| path.link == link) {
            path.liveness.beat_now();
        }
    }

    /// The path that runs over a link.
    pub(crate) fn path_on(&self, link: LinkId) -> Option<PathId> {
        self.paths.iter().find(|(_, path)| path.link == link).map(|(id, _)| *id)
    }

    /// Whether the path over a link works, if there is one.
    pub(crate) fn works_on(&self, link: LinkId) -> Option<bool> {
        self.paths.values().find(|path| path.link == link).map(|path| path.works())
    }

    /// Whether any path works.
    pub(crate) fn any_alive(&self) -> bool {
        self.paths.values().any(|path| path.works())
    }

    /// Since when no path works, as far as anyone can tell.
    pub(crate) fn dead_since(&self, now: Instant) -> Option<Instant> {
        if self.any_alive() {
            return self.lost_since(now);
        }
        if self.paths.is_empty() {
            return Some(self.bare);
        }
        let since = |path: &Watched| path.liveness.dead_since().max(path.silent);
        self.paths.values().filter_map(|path| since(path)).max()
    }

    /// This end did not run for a while.
    pub(crate) fn forgive(&mut self, now: Instant) {
        for path in self.paths.values_mut() {
            path.liveness.forgive(now);
        }
    }

    /// Notes on which paths something arrived.
    pub(crate) fn note_received(&mut self, now: Instant, connection: &mut Connection) {
        let paths = &mut self.paths;
        connection.drain_received(now, |id| {
            if let Some(path) = paths.get_mut(&id) {
                path.liveness.on_received(now);
            }
        });
        self.steer_acks(now, connection);
    }

    /// Takes the payload of a received QUIC DATAGRAM frame apart.
    ///
    /// # Errors
    /// If it is malformed, which the peer must be told (RFC 9297 §2.1).
    pub(crate) fn open_datagram(&mut self, now: Instant, datagram: Bytes) -> Result<Opened, DatagramError> {
        let prefix = self.prefix.as_ref();
        if self.stream.is_some() && datagram.starts_with(prefix) {
            return Ok(Opened::Packet(Arrived { label: None, packet: datagram.slice(prefix.len()..) }));
        }
        if let Some(sequencer) = &mut self.sequencer
            && sequencer.is_own(&datagram)
        {
            let opened = sequencer.open(now, datagram);
            return Ok(opened.map_or(Opened::Nothing, |(label, packet)| {
                Opened::Packet(Arrived { label: Some(label), packet })
            }));
        }
        if self.rescue.as_mut().is_some_and(|rescue| rescue.takes(&datagram)) {
            return Ok(Opened::Nothing);
        }
        if self.pulses.as_ref().is_some_and(|pulses| pulses.is_report(&datagram)) {
            self.take_report(now, &datagram);
            return Ok(Opened::Nothing);
        }
        if self.clocks.as_ref().is_some_and(|clocks| clocks.is_report(&datagram)) {
            self.take_clock(now, &datagram);
            return Ok(Opened::Nothing);
        }
        Ok(match open_payload(&datagram)? {
            // The same numbers may be written in longer varints (RFC 9000 §16).
            Opened::Payload(stream, packet) if Some(stream) == self.stream => {
                Opened::Packet(Arrived { label: None, packet })
            }
            opened => opened,
        })
    }

    /// The next packet that did not arrive and was restored. It is to be treated as one that did.
    pub(crate) fn next_restored(&mut self) -> Option<Arrived> {
        let (label, packet) = self.sequencer.as_mut()?.next_restored()?;
        Some(Arrived { label: Some(label), packet })
    }

    /// Hands out a packet that arrived, and those that waited for it.
    pub(crate) fn put_in_order(&mut self, now: Instant, arrived: Arrived, mut out: impl FnMut(Bytes)) {
        match (&mut self.sequencer, arrived.label) {
            (Some(sequencer), Some(label)) => sequencer.resequencer().push(now, label, arrived.packet, out),
            _ => out(arrived.packet),
        }
    }

    /// Hands out packets that have waited long enough for others.
    pub(crate) fn release(&mut self, now: Instant, out: impl FnMut(Bytes)) {
        if let Some(sequencer) = &mut self.sequencer {
            sequencer.resequencer().handle_timeout(now, out);
        }
    }

    /// Bytes of a stream were sent.
    pub(crate) fn count_sent(&mut self, bytes: u64) {
        self.traffic.count_sent(bytes);
    }

    /// Data arrived through the tunnel.
    pub(crate) fn note_delivered(&mut self, now: Instant, bytes: u64) {
        self.traffic.count_received(bytes);
        self.note_traffic(now);
    }

    /// Takes what was read from the TUN, and notes the flow where somebody may ask for it. Returns an ICMP error to
    /// give back, if the packet cannot be carried.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        hdr: VnetHdr,
        packet: &mut [u8],
        gateway: Gateway,
        seen: Option<&mut Seen>,
    ) -> Option<Vec<u8>> {
        let mut mtu = self.mtu.limit()?;
        let view = ip::parse(packet).ok()?;
        let flow = FlowKey::of(&view);
        if self.sequencer.is_some() && flow.protocol != protocol::TCP {
            // What outgrows the paths while they are probed travels in parts.
            mtu = mtu.max(self.mtu.announced());
        }
        let ordered = needs_order(&view);
        let gateway = gateway.for_source(view.src());
        if view.protocol() == protocol::TCP {
            let partial = if hdr.needs_csum() { Checksum::Partial } else { Checksum::Full };
            mss::clamp(packet, self.mtu.announced(), partial);
        }
        self.ranges.clear();
        let prefix = self.prefix.as_ref();
        let room = self.arena.room(split::bound(hdr, packet.len(), mtu, prefix.len()));
        let mut split = split::split(hdr, packet, mtu, prefix, room, &mut self.ranges);
        if let Err(SplitError::TooBig { len, .. }) = split
            && flow.protocol == protocol::TCP
            && len <= self.mtu.announced()
        {
            // The limit is lower than what was promised while a path is still being probed.
            self.ranges.clear();
            let hdr = as_super_packet(packet);
            let room = self.arena.room(split::bound(hdr, packet.len(), mtu, prefix.len()));
            split = split::split(hdr, packet, mtu, prefix, room, &mut self.ranges);
        }
        match split {
            Ok(()) => {}
            Err(SplitError::TooBig { mtu, .. }) => {
                return gateway.and_then(|from| icmp::packet_too_big(packet, mtu as u32, from));
            }
            Err(error) => {
                tracing::debug!(%error, "a packet from the TUN was dropped");
                return None;
            }
        }
        let whole = self.arena.take();
        let hash = flow.hash32();
        if let Some(seen) = seen {
            seen.sent(now, &flow, hash, packet.len());
        }
        for range in &self.ranges {
            let data = whole.slice(range.clone());
            self.traffic.count_sent((data.len() - prefix.len()) as u64);
            self.dispatcher.push(now, Queued { data, flow: hash, ordered, plain: false });
        }
        self.note_traffic(now);
        self.busy = Some(now);
        None
    }

    /// Takes a payload of UDP that fits a datagram behind its prefix; `ordered` if overtaking hurts its flow.
    pub(crate) fn send_payload(
        &mut self,
        now: Instant,
        prefix: &DatagramPrefix,
        payload: &[u8],
        flow: u32,
        ordered: bool,
    ) {
        let room = self.arena.room(prefix.as_ref().len() + payload.len());
        room.extend_from_slice(prefix.as_ref());
        room.extend_from_slice(payload);
        let data = self.arena.take();
        self.traffic.count_sent(payload.len() as u64);
        self.dispatcher.push(now, Queued { data, flow, ordered, plain: true });
        self.note_traffic(now);
        self.busy = Some(now);
    }

    /// A payload of UDP does not fit a datagram, and is dropped.
    pub(crate) fn count_too_big(&mut self) {
        self.traffic.count_too_big();
    }

    /// Bytes that wait for a path.
    pub(crate) fn backlog(&self) -> usize {
        self.dispatcher.bytes()
    }

    /// The next UDP payload to send.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Instant,
        connection: &mut Connection,
        buf: &mut Vec<u8>,
    ) -> Option<Transmit> {
        self.refresh(now, connection);
        self.repair_streams(now, connection);
        if connection.is_between_passes() {
            self.send_clocks(now, connection);
        }
        loop {
            let moved = connection.is_between_passes() && self.assign(now, connection);
            if let Some(transmit) = connection.poll_transmit(now, buf) {
                return Some(transmit);
            }
            if !moved && !self.assign(now, connection) {
                return None;
            }
        }
    }

    /// Takes measurements over, judges paths, and tells the peer and the dispatcher what changed.
    fn refresh(&mut self, now: Instant, connection: &mut Connection) {
        let due = self.measured.is_none_or(|at| now.saturating_duration_since(at) >= MEASURE);
        if !due && !self.changed {
            return;
        }
        if due {
            self.measured = Some(now);
            self.traffic.measure(now);
            let label = self.sequencer.as_ref().map_or(0, |sequencer| sequencer.overhead(&self.prefix));
            let around = self.prefix.as_ref().len() + label;
            let limit = connection.max_datagram().map(|max| max.saturating_sub(around));
            self.mtu.update(now, limit);
        }
        self.changed = false;
        self.choose_places(now, connection, due);
        let (told_by_reports, lost) = (self.is_told(), self.is_lost(now));
        let mut infos = Vec::with_capacity(self.paths.len());
        let mut views = Vec::with_capacity(self.paths.len());
        let mut dead = Vec::new();
        for (id, path) in &mut self.paths {
            if due && let Some(view) = connection.view(now, *id) {
                path.liveness.on_measured(view.rtt, view.jitter, view.loss);
                views.push(view);
            }
            let active = path.place == Place::Active;
            let unheard = path.is_unheard(*id, connection, told_by_reports);
            let alive = path.liveness.is_alive() && !(active && unheard);
            // Where the server knows the tier it decides for itself what it sends when.
            let told = self.role == Role::Server && path.policy.tier == Tier::Primary;
            let state = match alive {
                false => PathState::Down,
                true if !active || told && path.refused.is_some() => PathState::Standby,
                true => PathState::Active,
            };
            if state == PathState::Down {
                connection.freeze(*id, true);
                path.thaw = Some(now + THAW);
            } else if path.thaw.is_some_and(|at| now >= at) {
                connection.freeze(*id, false);
                path.thaw = None;
            }
            // Also the library's own choice for acknowledgements and stream data.
            let trusted = state == PathState::Active || lost && path.liveness.has_carrier();
            let tell = if trusted { PathStatus::Available } else { PathStatus::Backup };
            if tell != path.told {
                path.told = tell;
                connection.set_status(*id, tell);
            }
            if state != path.state {
                tracing::debug!(class = self.class.as_deref(), path = id.0, from = path.state.as_str(), to = state.as_str(), reason = %path.liveness.reason(), "path");
                path.state = state;
                if state == PathState::Down {
                    dead.push(*id);
                }
            }
        }
        for id in dead {
            self.rescue_from(now, connection, id);
        }
        self.form_groups(connection);
        let heads = self.groups.heads().filter_map(|head| self.paths.get_key_value(&head));
        infos.extend(heads.map(|(id, path)| PathInfo {
            id: *id,
            link: if self.role == Role::Client { path.link.uplink() } else { path.link },
            state: path.state,
            rtt: connection.rtt(*id).unwrap_or(Duration::MAX),
            rate: connection.rate(*id),
            load: path.load.now(),
        }));
        self.dispatcher.set_paths(now, &infos);
        if due {
            let rates = self.dispatcher.order().map(|id| connection.rate(id));
            let rate = rates.sum();
            self.dispatcher.set_limits(queue_limit(rate), turn_of_a_flow(rate));
        }
        if due && self.sequencer.is_some() {
            let heads = self.dispatcher.order();
            let used: Vec<PathId> = heads.flat_map(|head| self.groups.members(head)).copied().collect();
            let one_each = self.dispatcher.order().count() == used.len();
            let once = self.choice.copies() == 1;
            let stays = one_each && once && self.dispatcher.scheduler() == Scheduler::Flow;
            views.retain(|view| used.contains(&view.id));
            let Some(sequencer) = &mut self.sequencer else { return };
            sequencer.measure(now, used.len() > 1 && !stays, &views);
            for id in used {
                connection.set_made_good(id, sequencer.protects(id));
            }
            self.dispatcher.set_numbered(now, sequencer.is_on());
        }
    }

    /// Groups the paths that carry as one. Where the far end does not restore order each is one for itself, so that flows
    /// can stay on theirs.
    fn form_groups(&mut self, connection: &mut Connection) {
        let (role, ordered) = (self.role, self.sequencer.is_some());
        self.groups.set(self.paths.iter().map(|(id, path)| Member {
            link_key: if ordered { path.link_key(role, *id) } else { id.0 },
            state: path.state,
            id: *id,
        }));
        connection.set_together(self.groups.as_lists());
    }

    /// Sends heartbeats and judges paths.
    pub(crate) fn handle_timeout(&mut self, now: Instant, connection: &mut Connection) {
        let mut beats = Vec::new();
        let mut judged = false;
        for (id, path) in &mut self.paths {
            let verdict = path.liveness.poll(now);
            if verdict.heartbeat {
                beats.push(*id);
            }
            if let Some(change) = verdict.change {
                judged = true;
                let state = if change == Change::Alive { "alive" } else { "dead" };
                tracing::info!(class = self.class.as_deref(), path = id.0, link = path.link.0, state, reason = %path.liveness.reason(), "path changed");
            }
        }
        if judged {
            self.changed = true;
            self.announce();
        }
        self.send_beats(now, connection, &beats);
        self.give_up_mute(now, connection);
        self.close_dead(now, connection);
        if self.busy.is_some_and(|at| now >= at + REST) && self.dispatcher.is_empty() {
            self.busy = None;
            self.arena.release();
            self.dispatcher.rest();
            if let Some(sequencer) = &mut self.sequencer {
                sequencer.trim();
            }
        }
        self.mtu.tick(now);
    }

    /// When [`Self::handle_timeout`] or [`Self::poll_transmit`] has something to do again.
    pub(crate) fn poll_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let beats = self.paths.values().filter_map(|path| path.liveness.poll_timeout(now)).min();
        let repairing = self.sequencer.as_ref().is_some_and(|sequencer| sequencer.has_repairs());
        let rescuing = self.rescue.as_ref().is_some_and(|rescue| rescue.has_waiting());
        let waits = repairing || rescuing || !self.dispatcher.is_empty() || connection.stream_backlog() > 0;
        let pacer = if waits { connection.pacer_timeout(now) } else { None };
        let company = if waits { self.choice.poll_timeout(now) } else { None };
        let order = self.sequencer.as_ref().and_then(|sequencer| sequencer.poll_timeout());
        let thaw = self.paths.values().filter_map(|path| path.thaw).min();
        let close = self.paths.values().filter_map(|path| path.close).min();
        let rest = self.busy.filter(|_| self.dispatcher.is_empty()).map(|at| at + REST);
        let overflow = self.measured.filter(|_| self.tiers.is_overflowing()).map(|at| at + OVERFLOW);
        let all = [
            beats,
            pacer,
            company,
            order,
            thaw,
            close,
            rest,
            overflow,
            self.mtu.poll_timeout(),
            self.pulse_timeout(now),
            self.progress_timeout(connection),
        ];
        all.into_iter().flatten().min()
    }

    /// The MTU that the tunnel promises (bytes), once it is known well enough.
    pub(crate) fn take_mtu(&mut self) -> Option<usize> {
        self.mtu.take_change()
    }

    /// The MTU promised last.
    pub(crate) fn mtu(&self) -> usize {
        self.mtu.announced()
    }
}

/// The addresses that ICMP errors come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gateway {
    pub(crate) v4: Option<IpAddr>,
    pub(crate) v6: Option<IpAddr>,
}

impl Gateway {
    /// The address of the family of `source`.
    pub(crate) fn for_source(self, source: IpAddr) -> Option<IpAddr> {
        if source.is_ipv4() { self.v4 } else { self.v6 }
    }
}

/// The queues in front of the paths. A flow's own packets may wait longer than RFC 8289 proposes
/// for a bottleneck: other flows do not wait with them, and a congestion window that is still growing
/// must not be answered with losses.
fn queue() -> QueueConfig {
    QueueConfig {
        target: Duration::from_millis(40),
        interval: Duration::from_millis(300),
        limit_bytes: queue_limit(0),
        ..QueueConfig::default()
    }
}

/// Bytes that may wait for paths that carry `rate` bytes/s together: more than this time is of no use to a
/// flow that doubles what it sends each round trip, and only delays the news that it is too much.
fn queue_limit(rate: u64) -> usize {
    let bytes = (u128::from(rate) * QUEUE_TIME.as_nanos() / 1_000_000_000) as usize;
    // The rate is not known at first, and grows.
    if rate == 0 { 1 << 20 } else { bytes.clamp(384 << 10, 8 << 20) }
}

/// Bytes that a flow may send before the next one has its turn: packets of one flow that follow each other cost the far
/// end less, which writes them to its TUN as one.
fn turn_of_a_flow(rate: u64) -> usize {
    let bytes = (u128::from(rate) * FLOW_TURN.as_nanos() / 1_000_000_000) as usize;
    bytes.clamp(QueueConfig::default().quantum, 64 << 10)
}

/// What a received QUIC DATAGRAM frame holds.
#[derive(Debug)]
pub(crate) enum Opened {
    /// An IP packet of the tunnel.
    Packet(Arrived),
    /// What is in context 0 of another request stream.
    Payload(u64, Bytes),
    /// Nothing that anybody waits for.
    Nothing,
}

/// Takes the payload of a QUIC DATAGRAM frame apart where there is no tunnel.
///
/// # Errors
/// If it is malformed, which the peer must be told (RFC 9297 §2.1).
pub(crate) fn open_payload(datagram: &Bytes) -> Result<Opened, DatagramError> {
    let parsed = datagram::parse(datagram)?;
    if parsed.context_id != datagram::CONTEXT_PAYLOAD {
        return Ok(Opened::Nothing);
    }
    Ok(Opened::Payload(parsed.stream_id, datagram.slice(parsed.payload_at..)))
}

/// An IP packet that came through the tunnel.
#[derive(Debug)]
pub(crate) struct Arrived {
    label: Option<Label>,
    pub(crate) packet: Bytes,
}

/// The virtio header under which a single TCP packet is cut into smaller ones.
fn as_super_packet(packet: &[u8]) -> VnetHdr {
    let v6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
    let gso_type = if v6 { mpvpn_packet::vnet::GSO_TCPV6 } else { mpvpn_packet::vnet::GSO_TCPV4 };
    VnetHdr { gso_type, gso_size: u16::MAX, ..VnetHdr::NONE }
}
