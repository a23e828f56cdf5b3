//! The multipath data plane shared by client and server: turns packets into datagrams, assigns them to paths,
//! and monitors the paths.
//!
//! In: packets and UDP payloads to send, received datagrams, path events of the QUIC connection, and the
//! time. Out: UDP payloads to send, received packets in order, and the time of the next call.
//! [`MultipathConnection`] joins the parts. A packet passes [`Packetizer`], [`PacketScheduler`] and
//! [`Pass`](pass::Pass); [`Recovery`] sends lost data again. [`PathTable`] holds the paths; [`Heartbeats`],
//! [`Tiers`] and `judge.rs` decide which of them carry data. Always holds: each part owns its state, and
//! nothing here reads a clock or a socket.

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
mod tests;
mod traffic;
mod usage;

use std::net::SocketAddr;

use mpvpn_class::RateLimitMember;
use mpvpn_masque::capsule::{LinkNotice, LinkPolicy};
use mpvpn_path::{PathCandidate, Scheduler, Tiers};
use mpvpn_quic::{Connection, LocalAddress, PathStatus};
use mpvpn_types::{
    ClassId, Duration, Instant, LinkId, PathId, SessionId, earliest,
    target::{LIVENESS, REORDER, SCHEDULER, TRANSPORT},
};

use crate::{ClassProfile, EchoWatch, mtu::MtuFollower, shapers::Shapers};
use clocks::ClockReports;
use delay_difference::LatePaths;
use events::PathEvents;
pub(crate) use flow_order::FlowMeter;
use groups::PathGroups;
use heartbeats::{Heartbeat, Heartbeats, TrafficState};
use log_context::{LogContext, enter_connection, enter_path};
use measurement_timer::MeasurementTimer;
use memory_trimmer::MemoryTrimmer;
use packetizer::Packetizer;
use path::PathEntry;
use path_table::PathTable;
use policy::{LinkPolicies, PathPolicy, PolicyInForce, SharedLinks};
pub use protect::{FecCounters, PathFecCounters};
pub(crate) use receive::{DecodedDatagram, decode_payload};
use recovery::Recovery;
pub use report::PathReport;
use scheduling::PacketScheduler;
pub(crate) use send::Gateway;
pub use sequence::ResequencingCounters;
use traffic::Traffic;
pub use traffic::{TrafficCounters, TrafficRates};

/// Time after which a path on which noq sends no data is closed. noq stops sending when it validates a
/// changed peer address (RFC 9000 §9.3), gives up after three probe timeouts, and never resumes. Smaller:
/// paths with long round trips are closed during validation. Larger: data that waits for the path is delayed
/// for longer.
const BLOCKED_PATH_TIMEOUT: Duration = Duration::from_millis(1500);

/// Which end of the tunnel this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens paths, and decides which of them are standby.
    Client,
    /// Accepts paths, and uses them as the client asks.
    Server,
}

/// A tunnel over one QUIC connection with several paths.
#[derive(Debug)]
pub(crate) struct MultipathConnection {
    role: Role,
    log: LogContext,
    /// The CONNECT-IP request stream; `None` if the connection carries only streams and UDP payloads.
    stream: Option<u64>,
    packetizer: Packetizer,
    pub(crate) scheduler: PacketScheduler,
    /// Path candidates of the current pass; a field so that its allocation is reused.
    candidates: Vec<PathCandidate>,
    recovery: Recovery,
    late_paths: LatePaths,
    heartbeats: Heartbeats,
    /// Clock reports, if both ends negotiated them.
    clocks: Option<ClockReports>,
    pub(crate) paths: PathTable,
    groups: PathGroups,
    tiers: Tiers,
    policies: LinkPolicies,
    /// The shapers of the links, if other connections of the session use the same links.
    shared_links: Option<SharedLinks>,
    /// The shortest round trip of any path, as last measured.
    pub(crate) shortest_rtt: Option<Duration>,
    timer: MeasurementTimer,
    pub(crate) mtu: MtuFollower,
    trimmer: MemoryTrimmer,
    pub(crate) traffic: Traffic,
    /// At a server: the limit of the user to whom the data goes; `None` if there is none. Stream data is not
    /// sent at the rate: the caller limits what it writes.
    pub(crate) rate_limit: Option<RateLimitMember>,
    pub(crate) events: PathEvents,
    /// At a client: records the links of ICMP echoes.
    pub(crate) echo_watch: Option<EchoWatch>,
    /// At a client: nothing was heard on any path when they were judged last.
    is_alone: bool,
    /// The end of the last local stall (time without processor); initially the time of creation.
    stalled_until: Instant,
    /// When heartbeats last became dense although no data moves here.
    probed_at: Option<Instant>,
    /// Whether something has made a deadline earlier since packets were last sent.
    may_be_due: bool,
}

impl MultipathConnection {
    /// Creates the data plane of a connection whose path 0 is open. `stream` is the CONNECT-IP request
    /// stream, if there is one.
    pub(crate) fn new(now: Instant, role: Role, stream: Option<u64>, scheduler: Scheduler) -> Self {
        Self {
            role,
            log: LogContext::new(role),
            stream,
            packetizer: Packetizer::new(stream.unwrap_or_default()),
            scheduler: PacketScheduler::new(scheduler),
            candidates: Vec::new(),
            recovery: Recovery::new(role),
            late_paths: LatePaths::default(),
            heartbeats: Heartbeats::new(role),
            clocks: None,
            paths: PathTable::new(now),
            groups: PathGroups::default(),
            tiers: Tiers::default(),
            policies: LinkPolicies::new(role),
            shared_links: None,
            shortest_rtt: None,
            timer: MeasurementTimer::new(),
            mtu: MtuFollower::new(now),
            trimmer: MemoryTrimmer::default(),
            traffic: Traffic::new(now),
            rate_limit: None,
            events: PathEvents::default(),
            echo_watch: None,
            is_alone: false,
            stalled_until: now,
            probed_at: None,
            may_be_due: true,
        }
    }

    /// Sets the traffic class that this connection carries, for the log.
    pub(crate) fn set_class(&mut self, class: Option<&ClassProfile>) {
        self.log.set_class(class.map(|class| class.name.as_str()));
    }

    /// At a server: sets the session that this connection belongs to, for the log.
    pub(crate) fn set_session(&mut self, session: SessionId) {
        self.log.set_session(session);
    }

    /// Shares the links with the other connections of the session from now on. This connection carries
    /// `class`.
    pub(crate) fn share_links(&mut self, shapers: Shapers, class: ClassId) {
        self.shared_links = Some(SharedLinks::new(shapers, class));
        self.paths.values_mut().for_each(|path| path.policy.reapply());
        self.timer.judge_soon();
    }

    /// At a client: sets the policy of a link, for its present and future paths.
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

    /// At a server: sets the policy of a path. The path need not be open yet.
    pub(crate) fn set_path(&mut self, now: Instant, notice: LinkNotice) {
        let (id, policy) = (notice.path, PathPolicy::from(notice));
        self.policies.set_path(id, policy);
        if self.paths.get_mut(id).is_some_and(|path| path.set_policy(now, policy)) {
            let _spans = enter_connection!(&self.log, DEBUG, [SCHEDULER]);
            tracing::debug!(
                target: SCHEDULER,
                path = id.0,
                ?policy,
                "the client changed the policy of a path"
            );
            self.timer.judge_soon();
        }
    }

    /// Adds a path that QUIC has validated.
    pub(crate) fn path_opened(&mut self, now: Instant, connection: &Connection, id: PathId) {
        let link = connection.local_of(id).and_then(LocalAddress::as_link).unwrap_or(LinkId(id.0 as u16));
        let inside_tcp = match self.role {
            Role::Client => link.is_tcp(),
            Role::Server => connection.is_own_peer(id),
        };
        if inside_tcp {
            connection.set_inside_tcp(id);
        }
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        let policy = PolicyInForce::new(self.policies.of(id, link), self.shared_links.is_some());
        let mut path = PathEntry::new(now, self.role, link, inside_tcp, policy);
        // Data may have moved on other paths already; heartbeats on this one must be dense as well.
        let _path = enter_path!(LIVENESS, self.log, id, path);
        tracing::debug!(target: LIVENESS, inside_tcp, policy = ?path.policy.get(), "a path is opened");
        if let Some(at) = self.traffic.last_data_at {
            path.liveness.on_traffic(at);
        }
        self.paths.insert(now, id, path);
        self.timer.judge_soon();
    }

    /// Removes a closed path; returns the link that it used.
    pub(crate) fn path_closed(&mut self, now: Instant, id: PathId) -> Option<LinkId> {
        let closed = self.paths.remove(now, id);
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        tracing::debug!(target: LIVENESS, path = id.0, left = self.paths.len(), "a path is closed");
        self.policies.forget_path(id);
        if let Some(sequencer) = &mut self.recovery.sequencer {
            sequencer.on_path_closed(id);
        }
        self.timer.judge_soon();
        let closed = closed?;
        self.events.on_closed(id, &closed);
        Some(closed.link())
    }

    /// Reports the event that a path with this remote address was opened.
    pub(crate) fn report_path_opened(&mut self, id: PathId, remote: Option<SocketAddr>) {
        self.events.on_opened(id, remote, &self.paths);
    }

    /// Takes the kernel's report whether a link has a carrier.
    pub(crate) fn on_link_carrier(&mut self, now: Instant, link: LinkId, up: bool) {
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        for (id, path) in self.paths.iter_mut().filter(|(_, path)| path.link() == link) {
            let _path = enter_path!(LIVENESS, self.log, id, path);
            path.liveness.on_carrier(now, up);
            self.timer.judge_soon();
            // The peer sends its packets in flight again, and no more of them into the link.
            if !up {
                self.heartbeats.announce();
            }
        }
    }

    /// Takes the peer's status of a path (draft-ietf-quic-multipath-21 §3.3). Ignored if the peer sends
    /// heartbeat reports, which say more.
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
            // A heartbeat now finds out at once whether the peer still receives on this path.
            path.liveness.send_heartbeat_now();
        }
        self.timer.judge_soon();
    }

    /// Sends a heartbeat at once on each path over a link.
    pub(crate) fn send_heartbeats_on(&mut self, link: LinkId) {
        self.paths.over_mut(link).for_each(|path| path.liveness.send_heartbeat_now());
    }

    /// Whether packets of one class delay those of another one on this connection, here or at the peer.
    pub(crate) fn is_crowded(&self, now: Instant) -> bool {
        self.heartbeats.is_crowded(now)
    }

    /// Heartbeats are dense for a while, as if data moved, so that both ends find out which paths work:
    /// another connection has found one of the links silent, or nothing answers here.
    pub(crate) fn probe_paths(&mut self, now: Instant) {
        self.probed_at = Some(now);
        self.make_heartbeats_dense(now);
    }

    /// At a client that hears nothing on any path: asks as often as at the beginning of the silence.
    pub(crate) fn probe_anew(&mut self, now: Instant) {
        self.paths.values_mut().for_each(|path| path.liveness.probe_anew(now));
    }

    /// Whether the path over this link is alive, whatever the peer receives there.
    pub(crate) fn hears_on(&self, link: LinkId) -> bool {
        let path = self.paths.path_on(link).and_then(|id| self.paths.get(id));
        path.is_some_and(|path| path.liveness.is_alive())
    }

    /// The links over which a path is dead, so that heartbeats ask there, and whether data could use it.
    pub(crate) fn questions(&self, now: Instant) -> impl Iterator<Item = (LinkId, bool)> {
        let dead = self.paths.values().map(|path| (path, &path.liveness));
        let dead = dead.filter(|(_, liveness)| liveness.has_carrier() && !liveness.is_alive());
        dead.map(move |(path, liveness)| (path.link(), liveness.is_dense(now)))
    }

    /// Leaves questions on dead paths to other connections where they ask over the same link. Returns whether
    /// this is a change.
    pub(crate) fn share_questions(&mut self, now: Instant, asks_over: impl Fn(LinkId, bool) -> bool) -> bool {
        let set = |changed, path: &mut PathEntry| {
            let is_left = asks_over(path.link(), path.liveness.is_dense(now));
            path.liveness.set_probed(!is_left) | changed
        };
        self.paths.values_mut().fold(false, set)
    }

    /// This process got no processor until `until`, so silence before that is no evidence against a path.
    /// Repeated calls with the same time have no effect.
    pub(crate) fn on_local_stall(&mut self, until: Instant) {
        if until <= self.stalled_until {
            return;
        }
        self.stalled_until = until;
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS]);
        tracing::debug!(
            target: LIVENESS,
            "this process did not run for a while: silence until now does not count against paths"
        );
        self.paths.values_mut().for_each(|path| path.liveness.on_local_stall(until));
    }

    /// Sends heartbeats that are due, updates the liveness of paths, closes dead paths, and trims memory.
    pub(crate) fn handle_timeout(&mut self, now: Instant, connection: &mut Connection) {
        let _spans = enter_connection!(&self.log, DEBUG, [LIVENESS, REORDER, TRANSPORT]);
        let mut due = Vec::new();
        let (mut judged, mut report, mut grace_is_over) = (false, false, false);
        for (id, path) in self.paths.iter_mut() {
            let _path = enter_path!(LIVENESS, self.log, id, path);
            let verdict = path.liveness.poll(now);
            if verdict.send_heartbeat {
                due.push(id);
            }
            judged |= verdict.change.is_some();
            report |= verdict.report;
            grace_is_over |= path.loss_grace.is_over(now);
        }
        if !due.is_empty() {
            let others = self.paths.iter_mut().filter(|(id, _)| !due.contains(id));
            let early: Vec<_> = others
                .filter_map(|(id, path)| path.liveness.take_early_heartbeat(now).then_some(id))
                .collect();
            due.extend(early);
        }
        if judged || grace_is_over {
            self.timer.judge_soon();
        }
        if report {
            self.heartbeats.announce();
        }
        self.send_heartbeats(now, connection, &due);
        if self.no_answer_at(connection).is_some_and(|at| at <= now) {
            tracing::debug!(target: LIVENESS, "nothing answers a heartbeat on a path: heartbeats become dense");
            self.paths.values_mut().for_each(PathEntry::forget_heartbeat);
            self.probe_paths(now);
        }
        self.close_blocked_paths(now, connection);
        self.close_dead_paths(now, connection);
        if self.trimmer.expires(now, !self.scheduler.dispatcher.is_empty()) {
            self.packetizer.trim();
            self.scheduler.dispatcher.trim_memory();
            if let Some(sequencer) = &mut self.recovery.sequencer {
                sequencer.trim();
            }
        }
        self.mtu.update_announced(now);
    }

    /// Sends heartbeats on the paths `due`, whose liveness asked for one, and further reports and probes.
    fn send_heartbeats(&mut self, now: Instant, connection: &mut Connection, due: &[PathId]) {
        let datagrams = connection.max_datagram_size().is_some();
        let last_data_at = self.traffic.last_data_at.max(self.probed_at);
        let traffic = TrafficState { datagrams, last_data_at };
        let actions = self.heartbeats.poll(now, &mut self.paths, traffic, due);
        if actions.rejudge {
            self.timer.judge_soon();
        }
        let is_idle_client =
            self.role == Role::Client && !self.paths.values().any(|path| path.liveness.is_dense(now));
        for heartbeat in actions.heartbeats {
            let (Heartbeat::Ping(id) | Heartbeat::Report(id, _)) = heartbeat;
            if is_idle_client && let Some(path) = self.paths.get_mut(id) {
                path.on_heartbeat(now, connection.last_acked_send_time(id));
            }
            match heartbeat {
                Heartbeat::Ping(id) => connection.heartbeat(id),
                Heartbeat::Report(id, report) => connection.queue_report(id, report),
            }
        }
    }

    /// When heartbeats of the idle time have waited too long for an acknowledgement on a path that seems to
    /// work.
    fn no_answer_at(&self, connection: &Connection) -> Option<Instant> {
        let at = |(id, path): (PathId, &PathEntry)| path.no_answer_at(|| connection.last_acked_send_time(id));
        self.paths.iter().filter_map(at).min()
    }

    /// Closes paths on which noq sends no data. It does so for ever if it could not validate a changed
    /// address of the client (RFC 9000 §9.3). The client then opens another path.
    fn close_blocked_paths(&self, now: Instant, connection: &mut Connection) {
        if self.role == Role::Client || self.paths.len() < 2 {
            return;
        }
        // Untrusted paths carry no data anyway while there are trusted ones.
        for (id, _) in self.paths.iter().filter(|(_, path)| path.is_trusted()) {
            let mute = connection.stalled_since(id);
            if mute.is_some_and(|since| now.saturating_duration_since(since) >= BLOCKED_PATH_TIMEOUT) {
                tracing::info!(
                    target: LIVENESS,
                    class = self.log.class(),
                    path = id.0,
                    "a path is closed: it could not be validated since the client's address changed"
                );
                connection.close_path(now, id);
            }
        }
    }

    /// Closes dead paths while streams wait for data that was sent on them, so that noq sends it again.
    fn close_dead_paths(&mut self, now: Instant, connection: &mut Connection) {
        let others = self.paths.any_works();
        for (id, path) in self.paths.iter_mut() {
            if path.close.expires(now) && others && !path.works() {
                tracing::debug!(
                    target: REORDER,
                    class = self.log.class(),
                    path = id.0,
                    "a dead path is closed: streams wait for data that was sent on it"
                );
                connection.close_path(now, id);
            }
        }
    }

    /// Whether something may be due before what [`Self::poll_timeout`] said, after packets have arrived or
    /// were queued.
    pub(crate) fn may_be_due(&self, now: Instant, connection: &Connection) -> bool {
        let sequencer = self.recovery.sequencer.as_ref();
        let reordered = sequencer.and_then(|sequencer| sequencer.poll_timeout());
        self.may_be_due || earliest(reordered, self.send_timeout(now, connection)).is_some_and(|at| at <= now)
    }

    /// Returns when data that waits may be sent.
    fn send_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let waits = !self.is_drained() || connection.stream_backlog() > 0;
        waits.then(|| earliest(connection.pacer_timeout(now), self.scheduler.choice.poll_timeout(now)))?
    }

    /// Returns when [`Self::handle_timeout`] and [`Self::poll_transmit`] have to be called next.
    pub(crate) fn poll_timeout(&self, now: Instant, connection: &Connection) -> Option<Instant> {
        let empty = self.scheduler.dispatcher.is_empty();
        let rate_limit = self.rate_limit.as_ref().filter(|_| !empty);
        let sequencer = self.recovery.sequencer.as_ref();
        let parts = [
            rate_limit.and_then(|limit| limit.retry_at(now)),
            self.paths.values().filter_map(|path| path.poll_timeout(now)).min(),
            self.send_timeout(now, connection),
            sequencer.and_then(|sequencer| sequencer.poll_timeout()),
            self.trimmer.poll_timeout(!empty),
            self.timer.poll_timeout(self.tiers.is_overflowing()),
            self.mtu.poll_timeout(),
            self.no_answer_at(connection),
            self.recovery.data_ack_timeout(connection),
        ];
        let first = parts.into_iter().fold(None, earliest);
        earliest(first, self.heartbeats.poll_timeout(now, &self.paths, first))
    }
}
