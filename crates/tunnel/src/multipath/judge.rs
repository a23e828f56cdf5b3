//! Decides which paths carry data: takes over measurements, determines the state of each path, and passes
//! changes to the peer, the QUIC connection and the scheduler.
//!
//! In: measurements of the QUIC connection, liveness, reports of the peer, tiers. Out: the state of each path
//! and everything that follows from it. Always holds: every [`MeasurementTimer`](super::MeasurementTimer)
//! task leaves scheduler, groups and connection with the same set of usable paths.

use mpvpn_path::{PathInfo, PathState, TieredPath, Utilization};
use mpvpn_quic::{Connection, PathStats};
use mpvpn_types::{
    ClassId, Duration, Instant, LinkId, PathId, Tier,
    target::{CLASSES, FEC, REORDER, SCHEDULER, TRANSPORT},
};

use super::{
    MultipathConnection, Role,
    groups::GroupCandidate,
    log_context::{enter_connection, enter_path},
    measurement_timer::Task,
    path::PathEntry,
    peer_view::Reporting,
    usage::{Evidence, Judgement},
};
use crate::Reinjected;

/// The loss of a path (share of packets, 0 to 1) from which one class would feel what another one loses,
/// since both share congestion control. Smaller: classes connect without need; larger: they feel it. The loss
/// from which FEC protects a path by itself (docs/design/fec.md).
const CROWDED_LOSS: f64 = 0.02;
/// Packets sent in the last 10 s from which their loss counts. Fewer: chance; more: it counts late. Chosen.
const MIN_PACKETS_FOR_LOSS: u64 = 100;

impl MultipathConnection {
    /// Measures and judges the paths if the timer says so.
    pub(super) fn refresh(&mut self, now: Instant, connection: &mut Connection) {
        let Some(task) = self.timer.poll(now) else { return };
        let _spans = enter_connection!(&self.log, DEBUG, [CLASSES, SCHEDULER, REORDER, FEC, TRANSPORT]);
        let measuring = task == Task::Measure;
        if measuring {
            self.traffic.measure(now);
            let prefix = &self.packetizer.prefix;
            let label_bytes =
                self.recovery.sequencer.as_ref().map_or(0, |sequencer| sequencer.overhead_bytes(prefix));
            let overhead = prefix.as_ref().len() + label_bytes;
            let limit = connection.max_datagram_size().map(|max| max.saturating_sub(overhead));
            self.mtu.update(now, limit);
        }
        self.choose_placements(now, connection, measuring);
        let views = self.judge_paths(now, connection, measuring);
        self.paths.note_works(now);
        if self.role == Role::Client {
            self.is_alone = !self.paths.any_works();
            self.paths.values_mut().for_each(|path| path.liveness.set_alone(now, self.is_alone));
        }
        self.form_groups(connection);
        self.update_scheduler(now, connection, measuring);
        if measuring {
            self.shortest_rtt = views.iter().filter_map(|view| view.min_rtt).min();
            self.note_crowding(now, &views);
            self.update_numbering(now, views);
            self.events.on_measured(&self.paths);
        }
    }

    /// Decides by the tiers of the links which paths are used. `measuring`: a measurement is due.
    fn choose_placements(&mut self, now: Instant, connection: &mut Connection, measuring: bool) {
        let role = self.role;
        // A path that works has no bad report, so reports make no difference to it.
        let reporting = self.heartbeats.reporting(&self.paths).beside(self.paths.any_works());
        let silences = self.silent_links();
        let mut candidates = Vec::with_capacity(self.paths.len());
        for (id, path) in self.paths.iter_mut() {
            path.is_unheard = is_unheard(path, id, reporting, &silences, connection);
            let link = path.uplink();
            let inside_tcp = path.is_inside_tcp();
            if let Some(settings) = path.policy.apply(now, self.shared_links.as_ref(), link, inside_tcp) {
                tracing::debug!(
                    target: SCHEDULER,
                    path = id.0,
                    shared = settings.shaper.is_some(),
                    cap = ?settings.cap,
                    "the rate cap, shaper or DSCP of a path has changed"
                );
                connection.set_shaper(now, id, settings.shaper);
                connection.set_rate_cap(now, id, settings.cap);
                connection.set_dscp(id, settings.dscp);
            }
            let utilization = path.load.measure(measuring, connection.is_backlogged(id));
            candidates.push(TieredPath {
                id,
                // Under the scheduler `failover` the client chooses the path within a tier, so the server
                // puts a path that the client refuses last.
                link: if role == Role::Server && path.peer.refuses_data() {
                    LinkId(u16::MAX)
                } else {
                    path.link().uplink()
                },
                group: path.link_key(role, id),
                tier: path.policy.get().tier,
                metered: path.is_metered(),
                works: path.liveness.is_alive() && !path.is_unheard,
                utilization,
            });
        }
        let links = usize::from(self.scheduler.choice.copies());
        let placements = self.tiers.placements(now, self.scheduler.kind(), &candidates, links, measuring);
        for ((id, path), placement) in self.paths.iter_mut().zip(placements) {
            if path.usage.placement != placement {
                let tier = path.policy.get().tier;
                tracing::debug!(
                    target: SCHEDULER,
                    path = id.0,
                    %tier,
                    from = ?path.usage.placement,
                    to = ?placement,
                    "the role of a path among the tiers has changed"
                );
            }
            path.usage.placement = placement;
            if path.may_stay_unprobed() {
                path.liveness.end_dense_heartbeats();
            }
        }
    }

    /// The links on which a path over UDP is dead, and since when; mostly none.
    fn silent_links(&self) -> Vec<(u16, Instant)> {
        let over_udp = self.paths.values().filter(|path| !path.is_inside_tcp());
        over_udp.filter_map(|path| Some((path.uplink()?, path.dead_since()?))).collect()
    }

    /// Determines the state of every path, and reinjects the data in flight on paths that died. Returns the
    /// measurements, if `measuring`.
    fn judge_paths(&mut self, now: Instant, connection: &mut Connection, measuring: bool) -> Vec<PathStats> {
        let unanswered = self.heartbeats.unanswered_since(now, &self.paths).is_some();
        let mut views = Vec::with_capacity(self.paths.len());
        let mut changes = Vec::new();
        for (id, path) in self.paths.iter_mut() {
            if measuring && let Some(view) = connection.path_stats(now, id) {
                path.liveness.set_measurements(view.rtt, view.jitter, view.loss);
                views.push(view);
            }
            let evidence = Evidence {
                alive: path.liveness.is_alive(),
                unheard: path.is_unheard,
                // A server that knows the tier of the link decides by the tier.
                refused: self.role == Role::Server
                    && path.policy.get().tier == Tier::Primary
                    && path.peer.refuses_data(),
                peer_unknown: unanswered && path.liveness.has_carrier(),
            };
            let Judgement { new_status, previous_state } = path.usage.judge(evidence);
            let state = path.usage.state;
            if let Some(ignore) = path.loss_grace.update(now, state == PathState::Down) {
                connection.set_ignore_losses(id, ignore);
            }
            if let Some(from) = previous_state {
                tracing::debug!(
                    target: SCHEDULER,
                    path = id.0,
                    from = from.as_str(),
                    to = state.as_str(),
                    alive = evidence.alive,
                    unheard = evidence.unheard,
                    refused = evidence.refused,
                    placement = ?path.usage.placement,
                    reason = %path.liveness.reason(),
                    "the state of a path has changed"
                );
                changes.push((id, from));
            }
            if let Some(status) = new_status {
                let peer_unknown = evidence.peer_unknown;
                tracing::debug!(
                    target: SCHEDULER,
                    path = id.0,
                    ?status,
                    state = state.as_str(),
                    peer_unknown,
                    "the path status sent to the peer has changed"
                );
                connection.set_status(id, status);
            }
        }
        for (id, from) in changes {
            let is_down = self.paths.get(id).is_some_and(|path| path.usage.state == PathState::Down);
            let reinjected =
                if is_down { self.reinject_from(now, connection, id) } else { Reinjected::default() };
            self.events.on_state(now, id, from, reinjected, &self.paths);
        }
        views
    }

    /// Sends everything again that is in flight on a dead path.
    fn reinject_from(&mut self, now: Instant, connection: &mut Connection, id: PathId) -> Reinjected {
        let reinjected = self.recovery.reinject_from(now, connection, id);
        self.traffic.counters.reinjected_bytes += reinjected.bytes;
        if let Some(path) = self.paths.get_mut(id).filter(|_| connection.has_bulk()) {
            let _path = enter_path!(REORDER, self.log, id, path);
            path.close.start(now, reinjected.stuck);
        }
        Reinjected { packets: reinjected.packets, stream_bytes: reinjected.bytes }
    }

    /// Groups the paths over one link. If the peer does not resequence, each path forms its own group, so
    /// that each flow can stay on one path.
    fn form_groups(&mut self, connection: &mut Connection) {
        let (role, ordered) = (self.role, self.recovery.sequencer.is_some());
        self.groups.set(self.paths.iter().map(|(id, path)| GroupCandidate {
            link_key: if ordered { path.link_key(role, id) } else { id.0 },
            state: path.usage.state,
            id,
        }));
        connection.set_path_groups(self.groups.as_lists());
    }

    fn update_scheduler(&mut self, now: Instant, connection: &Connection, measuring: bool) {
        let heads = self.groups.heads().filter_map(|head| Some((head, self.paths.get(head)?)));
        let infos: Vec<PathInfo> = heads
            .map(|(id, path)| PathInfo {
                id,
                link: if self.role == Role::Client { path.link().uplink() } else { path.link() },
                state: path.usage.state,
                rtt: connection.rtt(id).unwrap_or(Duration::MAX),
                rate: connection.delivery_rate(id),
                utilization: path.load.now,
            })
            .collect();
        self.scheduler.dispatcher.set_paths(now, &infos);
        if measuring {
            let rate =
                self.scheduler.dispatcher.paths_by_preference().map(|id| connection.delivery_rate(id)).sum();
            self.scheduler.set_rate(rate);
        }
    }

    /// Notes whether a link is full, or loses packets, so that other classes would feel what the connection
    /// of the default class carries for them.
    fn note_crowding(&mut self, now: Instant, views: &[PathStats]) {
        if self.shared_links.as_ref().is_some_and(|links| links.class != ClassId::DEFAULT) {
            return;
        }
        let is_lossy =
            |view: &PathStats| view.loss >= CROWDED_LOSS && view.recent_packets_sent >= MIN_PACKETS_FOR_LOSS;
        let lossy = views.iter().find(|view| is_lossy(view)).map(|view| (view.id.0, view.loss));
        let full = self.paths.iter().find(|(_, path)| path.load.now == Utilization::Full);
        let full = full.map(|(id, _)| id.0);
        if (lossy.is_some() || full.is_some()) && self.heartbeats.note_crowded(now) {
            tracing::debug!(target: CLASSES, ?full, ?lossy, "a path is full or loses packets: classes connect");
        }
    }

    /// Decides whether packets are numbered, and which paths are protected by FEC.
    fn update_numbering(&mut self, now: Instant, mut views: Vec<PathStats>) {
        let Some(sequencer) = &mut self.recovery.sequencer else { return };
        let heads = self.scheduler.dispatcher.paths_by_preference();
        let used: Vec<PathId> = heads.flat_map(|head| self.groups.members(head)).copied().collect();
        let one_each = self.scheduler.dispatcher.paths_by_preference().count() == used.len();
        let once = self.scheduler.choice.copies() == 1;
        let stays = one_each && once && self.scheduler.kind().keeps_flows_on_paths();
        views.retain(|view| used.contains(&view.id));
        sequencer.measure(now, used.len() > 1 && !stays, &views);
        self.scheduler.dispatcher.set_numbered(now, sequencer.is_on());
    }
}

/// Whether packets that this end sends on a path do not arrive at the peer. A path inside TCP is long taken
/// for alive, as TCP delivers late what it retransmits. Once UDP on its link is dead (`silences`), the link
/// may be: the path counts again when packets that were sent after that have arrived in both directions,
/// without which TCP stops.
fn is_unheard(
    path: &PathEntry,
    id: PathId,
    reporting: Reporting,
    silences: &[(u16, Instant)],
    connection: &Connection,
) -> bool {
    let acked_sent = || connection.last_acked_send_time(id);
    let is_proven = |since: Instant| {
        path.liveness.last_arrival() > since && acked_sent().is_some_and(|acked| acked >= since)
    };
    path.peer.is_unheard(reporting, acked_sent)
        || path.is_inside_tcp()
            && silences.iter().any(|(link, since)| path.uplink() == Some(*link) && !is_proven(*since))
}
