//! What both ends do alike with an established tunnel: packets become datagrams, wait for a path
//! and leave; paths are watched and judged.
//!
//! In: packets and payloads to send, datagrams of the far end, what happens to paths, the time. Out: UDP
//! payloads, packets in order, and when to call again. [`MultipathConnection`] joins the parts, each of which owns its
//! state: packets take the way [`Packetizer`], [`PacketScheduler`], [`Pass`](pass::Pass), and [`Recovery`]
//! knows what was lost of them; [`PathTable`] has the paths, which [`Heartbeats`], [`Tiers`] and the
//! judgement in `judge.rs` are about.

mod clocks;
mod data_ack;
mod delay_difference;
mod events;
pub(crate) mod extensions;
mod flow_order;
mod groups;
mod heartbeats;
mod judge;
mod load;
mod log_context;
mod measurement_timer;
mod memory_trimmer;
mod numbering;
mod packetizer;
mod pass;
mod path;
mod path_table;
mod peer_view;
mod policy;
mod protect;
mod receive;
mod recovery;
mod reinjection;
mod report;
mod resequencer;
mod retransmissions;
mod scheduling;
mod send;
mod sequence;
#[cfg(test)]
mod testing;
mod traffic;
mod usage;

use std::net::SocketAddr;

use mpvpn_masque::capsule::{LinkNotice, LinkPolicy};
use mpvpn_path::{PathCandidate, Scheduler, Tiers};
use mpvpn_quic::{Connection, LocalAddress, PathStatus};
use mpvpn_types::{
    ClassId, Duration, Instant, LinkId, PathId, SessionId,
    target::{LIVENESS, REORDER, SCHEDULER, TRANSPORT},
};

use crate::{ClassProfile, PathEvent, mtu::MtuFollower, shapers::Shapers};
use clocks::ClockReports;
use events::PathEvents;
pub(crate) use flow_order::FlowMeter;
use groups::PathGroups;
use heartbeats::{Heartbeat, Heartbeats, Surroundings};
use log_context::{LogContext, enter_connection, enter_path};
use measurement_timer::MeasurementTimer;
use memory_trimmer::MemoryTrimmer;
use packetizer::Packetizer;
use path::PathEntry;
use path_table::PathTable;
use policy::{LinkPolicies, PathPolicy, PolicyInForce, SharedLinks};
pub use protect::FecCounters;
pub(crate) use receive::{DecodedDatagram, decode_payload};
use recovery::Recovery;
pub use report::PathReport;
use scheduling::PacketScheduler;
pub(crate) use send::Gateway;
pub use sequence::ResequencingCounters;
use traffic::Traffic;
pub use traffic::{TrafficCounters, TrafficRates};

/// A path that takes no data for this long is one that the library gave up to validate: it tries that for
/// three probe timeouts. Shorter, and slow paths are given up; longer, and nothing arrives meanwhile.
const MUTE: Duration = Duration::from_millis(1500);

/// Which end of the tunnel this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens paths and decides which of them are standby.
    Client,
    /// Follows the client's wishes.
    Server,
}

/// A tunnel over one connection.
#[derive(Debug)]
pub(crate) struct MultipathConnection {
    role: Role,
    log: LogContext,
    /// The request stream whose packets it carries; `None` if it carries streams and payloads of UDP only.
    stream: Option<u64>,
    packetizer: Packetizer,
    scheduler: PacketScheduler,
    /// What the paths in use can take; kept for its memory.
    offers: Vec<PathCandidate>,
    recovery: Recovery,
    heartbeats: Heartbeats,
    /// Where both ends tell each other what their clocks say.
    clocks: Option<ClockReports>,
    paths: PathTable,
    groups: PathGroups,
    tiers: Tiers,
    policies: LinkPolicies,
    /// Where other connections have paths over the same links.
    shared: Option<SharedLinks>,
    timer: MeasurementTimer,
    mtu: MtuFollower,
    trimmer: MemoryTrimmer,
    traffic: Traffic,
    events: PathEvents,
    /// When this process ran again after the last time in which it did not; at first when the connection was made.
    stalled_until: Instant,
}

impl MultipathConnection {
    /// For a connection whose path 0 is open, with a tunnel on the request stream `stream`, if there is one.
    pub(crate) fn new(now: Instant, role: Role, stream: Option<u64>, scheduler: Scheduler) -> Self {
        Self {
            role,
            log: LogContext::new(role),
            stream,
            packetizer: Packetizer::new(stream.unwrap_or_default()),
            scheduler: PacketScheduler::new(scheduler),
            offers: Vec::new(),
            recovery: Recovery::new(role),
            heartbeats: Heartbeats::new(role),
            clocks: None,
            paths: PathTable::new(now),
            groups: PathGroups::default(),
            tiers: Tiers::default(),
            policies: LinkPolicies::new(role),
            shared: None,
            timer: MeasurementTimer::new(),
            mtu: MtuFollower::new(now),
            trimmer: MemoryTrimmer::default(),
            traffic: Traffic::new(now),
            events: PathEvents::default(),
            stalled_until: now,
        }
    }

    /// It is one of several, each for a class with a name.
    pub(crate) fn set_class(&mut self, class: Option<&ClassProfile>) {
        self.log.set_class(class.map(|class| class.name.as_str()));
    }

    /// At a server: it is one of this session.
    pub(crate) fn set_session(&mut self, session: SessionId) {
        self.log.set_session(session);
    }

    /// The links are shared with other connections of the session from now on, this one being that of
    /// `class`.
    pub(crate) fn share_links(&mut self, shapers: Shapers, class: ClassId) {
        self.shared = Some(SharedLinks::new(shapers, class));
        self.paths.values_mut().for_each(|path| path.policy.reapply());
        self.timer.judge_soon();
    }

    /// At a client: how the link is to be used, whatever paths it has or will have.
    pub(crate) fn set_link(&mut self, now: Instant, link: LinkId, policy: LinkPolicy) {
        let policy = PathPolicy::from(policy);
        self.policies.set_link(link, policy);
        let _spans = enter_connection!(&self.log, DEBUG, [SCHEDULER]);
        for (id, path) in self.paths.iter_mut().filter(|(_, path)| path.link() == link) {
            if path.set_policy(now, policy) {
                tracing::debug!(
                    target: SCHEDULER,
                    path = id.0,
                    link = link.0,
                    ?policy,
                    "the policy of a link has changed"
                );
                self.timer.judge_soon();
            }
        }
    }

    /// At a server: how a path is to be used, which may still have to be opened.
    pub(crate) fn set_path(&mut self, now: Instant, notice: LinkNotice) {
        let (id, policy) = (notice.path, PathPolicy::from(notice));
        self.policies.set_path(id, policy);
        if self.paths.get_mut(id).is_some_and(|path| path.set_policy(now, policy)) {
            let _spans = enter_connection!(&self.log, DEBUG, [SCHEDULER]);
            tracing::debug!(
                target: SCHEDULER,
                path = id.0,
                ?policy,
                "the client has another policy for a path"
            );
            self.timer.judge_soon();
        }
    }

    /// A path can carry data.
    pub(crate) fn path_opened(&mut self, now: Instant, connection: &Connection, id: PathId) {
        let link = connection.local_of(id).and_then(LocalAddress::as_link).unwrap_or(LinkId(id.0 as u16));
        let inside_tcp = match self.role {
            Role::Client => link.is_tcp(),
            Role::Server => connection.is_loopback_peer(id),
        };
        if inside_tcp {
            connection.set_inside_tcp(id);
        }
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        let policy = PolicyInForce::new(self.policies.of(id, link), self.shared.is_some());
        let mut path = PathEntry::new(now, link, inside_tcp, policy);
        // The far end may see data move here that this one noted before there was this path.
        let _path = enter_path!(LIVENESS, self.log, id, path);
        tracing::debug!(target: LIVENESS, inside_tcp, policy = ?path.policy.get(), "a path is opened");
        if let Some(at) = self.traffic.last_data_at() {
            path.liveness.on_traffic(at);
        }
        self.paths.insert(id, path);
        self.timer.judge_soon();
    }

    /// A path is gone; returns the link that it ran over.
    pub(crate) fn path_closed(&mut self, now: Instant, id: PathId) -> Option<LinkId> {
        let closed = self.paths.remove(now, id);
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        tracing::debug!(target: LIVENESS, path = id.0, left = self.paths.len(), "a path is closed");
        self.policies.forget_path(id);
        self.timer.judge_soon();
        let closed = closed?;
        self.events.on_closed(id, &closed);
        Some(closed.link())
    }

    /// Reports that a path was validated, with this remote address.
    pub(crate) fn report_path_opened(&mut self, id: PathId, remote: Option<SocketAddr>) {
        self.events.on_opened(id, remote, &self.paths);
    }

    /// The events of paths since the last call, in order.
    pub(crate) fn take_events(&mut self) -> Vec<PathEvent> {
        self.events.take()
    }

    /// The kernel says whether a link can carry packets.
    pub(crate) fn on_link_carrier(&mut self, now: Instant, link: LinkId, up: bool) {
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        for (id, path) in self.paths.iter_mut().filter(|(_, path)| path.link() == link) {
            let _path = enter_path!(LIVENESS, self.log, id, path);
            path.liveness.on_carrier(now, up);
            self.timer.judge_soon();
        }
    }

    /// The peer wants a path to be used, or not.
    pub(crate) fn on_peer_status(&mut self, now: Instant, id: PathId, status: PathStatus) {
        if self.heartbeats.has_reports() {
            return;
        }
        let Some(path) = self.paths.get_mut(id) else { return };
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        tracing::debug!(
            target: LIVENESS,
            path = id.0,
            ?status,
            "the peer, which sends no reports, sets the status of a path"
        );
        if path.peer.on_status(now, status) {
            // Whether the far end hears this one must not stay open until the next heartbeat.
            path.liveness.send_heartbeat_now();
        }
        self.timer.judge_soon();
    }

    /// Asks at once whether the paths over a link work.
    pub(crate) fn send_heartbeats_on(&mut self, link: LinkId) {
        self.paths.over_mut(link).for_each(|path| path.liveness.send_heartbeat_now());
    }

    /// This end did not run for a while until `until`, which may be said more than once.
    pub(crate) fn on_local_stall(&mut self, until: Instant) {
        if until <= self.stalled_until {
            return;
        }
        self.stalled_until = until;
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        tracing::debug!(
            target: LIVENESS,
            "this end did not run for a while: silence until now proves nothing"
        );
        self.paths.values_mut().for_each(|path| path.liveness.on_local_stall(until));
    }

    /// Sends heartbeats and judges paths.
    pub(crate) fn handle_timeout(&mut self, now: Instant, connection: &mut Connection) {
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS, REORDER, TRANSPORT]);
        let mut due = Vec::new();
        let mut judged = false;
        for (id, path) in self.paths.iter_mut() {
            let _path = enter_path!(LIVENESS, self.log, id, path);
            let verdict = path.liveness.poll(now);
            if verdict.send_heartbeat {
                due.push(id);
            }
            judged |= verdict.change.is_some();
        }
        if judged {
            self.timer.judge_soon();
            self.heartbeats.announce();
        }
        self.send_heartbeats(now, connection, &due);
        self.close_mute(now, connection);
        self.close_dead(now, connection);
        if self.trimmer.expires(now, !self.scheduler.is_empty()) {
            self.packetizer.trim();
            self.scheduler.trim();
            if let Some(sequencer) = &mut self.recovery.sequencer {
                sequencer.trim();
            }
        }
        self.mtu.tick(now);
    }

    /// Sends the heartbeats that the liveness of the paths `due` asks for, and what else both ends must know
    /// now.
    fn send_heartbeats(&mut self, now: Instant, connection: &mut Connection, due: &[PathId]) {
        let datagrams = connection.max_datagram_size().is_some();
        let around = Surroundings { datagrams, data_moved: self.traffic.last_data_at() };
        let todo = self.heartbeats.poll(now, &mut self.paths, around, due);
        if todo.rejudge {
            self.timer.judge_soon();
        }
        for heartbeat in todo.heartbeats {
            match heartbeat {
                Heartbeat::Ping(id) => connection.heartbeat(id),
                Heartbeat::Report(id, report) => connection.queue_report(id, report),
            }
        }
    }

    /// Gives up paths on which the library does not let data leave: after a change of the client's address
    /// that it could not validate, it never tries again. The client opens another path.
    fn close_mute(&self, now: Instant, connection: &mut Connection) {
        if self.role == Role::Client || self.paths.len() < 2 {
            return;
        }
        // On others no data leaves while there are these.
        for (id, _) in self.paths.iter().filter(|(_, path)| path.is_trusted()) {
            let mute = connection.stalled_since(id);
            if mute.is_some_and(|since| now.saturating_duration_since(since) >= MUTE) {
                tracing::info!(
                    target: LIVENESS,
                    class = self.log.class(),
                    path = id.0,
                    "a path takes no data since the client's address changed"
                );
                connection.close_path(now, id);
            }
        }
    }

    /// Closes paths that are dead while streams wait for what was sent there.
    fn close_dead(&mut self, now: Instant, connection: &mut Connection) {
        let others = self.paths.any_works();
        for (id, path) in self.paths.iter_mut() {
            if path.close.expires(now) && others && !path.works() {
                tracing::debug!(
                    target: REORDER,
                    class = self.log.class(),
                    path = id.0,
                    "a dead path is closed: streams wait for what it holds"
                );
                connection.close_path(now, id);
            }
        }
    }

    /// When [`Self::handle_timeout`] or [`Self::poll_transmit`] has something to do again.
    pub(crate) fn poll_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let empty = self.scheduler.is_empty();
        let waits = !empty || self.recovery.has_waiting() || connection.stream_backlog() > 0;
        let while_waiting =
            || [connection.pacer_timeout(now), self.scheduler.poll_timeout(now)].into_iter().flatten().min();
        let sequencer = self.recovery.sequencer.as_ref();
        let all = [
            self.paths.values().filter_map(|path| path.poll_timeout(now)).min(),
            if waits { while_waiting() } else { None },
            sequencer.and_then(|sequencer| sequencer.poll_timeout()),
            self.trimmer.poll_timeout(!empty),
            self.timer.poll_timeout(self.tiers.is_overflowing()),
            self.mtu.poll_timeout(),
            self.heartbeats.poll_timeout(now, &self.paths),
            self.recovery.data_ack_timeout(connection),
        ];
        all.into_iter().flatten().min()
    }

    /// The MTU that the tunnel promises (bytes), once it is known well enough.
    pub(crate) fn take_mtu_change(&mut self) -> Option<usize> {
        self.mtu.take_change()
    }
}
