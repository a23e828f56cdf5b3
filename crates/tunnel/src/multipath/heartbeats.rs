//! Heartbeats: PING frames, or reports of the paths on which this end receives.
//!
//! A PING proves to the peer that one direction of a path works. An end cannot see which of its own packets
//! arrive: acknowledgements and path status frames come over any path that the peer believes to work, which
//! may be one that delivers nothing. So where both ends negotiated the extension, heartbeats are reports
//! about all paths, sent on every path that this end trusts with data. One path that works in both directions
//! suffices for both ends to know the state of all paths, within a heartbeat interval and half a round trip.
//!
//! In: the paths whose own heartbeats are due, reports of the peer, the time. Out: PINGs and reports to send,
//! and the time since when reports of the peer are missing. Always holds: a report makes this end's
//! heartbeats dense while data moves at the peer, but never counts as data itself, so two ends cannot keep
//! each other's heartbeats dense.

mod report;

use bytes::Bytes;
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_path::{LivenessConfig, PathState, probe_pause};
use mpvpn_types::{Duration, Instant, PathId, target::LIVENESS};

use super::{Role, path::PathEntry, path_table::PathTable, peer_view::Reporting};
use report::HeartbeatReport;
pub(super) use report::{Reception, ReportedPath};

/// Returns `count` times the longest interval between dense heartbeats (100 ms).
const fn heartbeats(count: u32) -> Duration {
    LivenessConfig::MAX_DENSE_INTERVAL.saturating_mul(count)
}

/// Reports say "active" while data moved at this end within this time (1.5 s). It is five heartbeats shorter
/// than `LivenessConfig::DENSE_DURATION`, so the last dense heartbeats say that no data moves any more.
/// Larger: both ends stay dense for longer. Smaller: heartbeats of the peer become sparse in short pauses.
const ACTIVE_FOR: Duration = LivenessConfig::DENSE_DURATION.saturating_sub(heartbeats(5));
/// How long a report that says "active" keeps this end's heartbeats dense (0.5 s): as long as those of the
/// peer stay dense after its last such report. Smaller or larger: one end misses heartbeats that the other
/// sends no longer, and takes the path for dead.
const PEER_ACTIVE_FOR: Duration = LivenessConfig::DENSE_DURATION.saturating_sub(ACTIVE_FOR);
/// Bounds of the time without a report, while data moves, after which it is unknown which packets reach the
/// peer (0.4 to 1 s; between them the timeout of the slowest path decides). Smaller: false alarms. Larger:
/// data is sent on paths that do not deliver for longer.
const MIN_REPORT_TIMEOUT: Duration = heartbeats(4);
const MAX_REPORT_TIMEOUT: Duration = heartbeats(10);
/// While reports of the peer are missing, this end sends reports on all paths, at first at this interval: one
/// heartbeat. Smaller: more packets. Larger: the peer is found again later.
const ALL_PATHS_INTERVAL: Duration = heartbeats(1);
/// While no data moves, a path that is down is probed at this interval for [`EARLY_PROBE_PERIOD`], since most
/// outages are short. Smaller: more packets while idle. Larger: its return is found later. Value: chosen.
const EARLY_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the probes after [`EARLY_PROBE_PERIOD`]. Value: chosen.
const LATE_PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of the probes if only metered paths can carry them. Smaller: more metered packets. Value: that of
/// heartbeats of idle metered paths.
const METERED_PROBE_INTERVAL: Duration = Duration::from_secs(25);
/// How long after a failure [`EARLY_PROBE_INTERVAL`] applies. Value: chosen.
const EARLY_PROBE_PERIOD: Duration = Duration::from_secs(20);
/// Interval of the probes of a path on which a packet has just arrived, since a single arrival is not enough
/// to use it. Larger: the path is used later.
const CONFIRM_PROBE_INTERVAL: Duration = Duration::from_millis(40);
/// Minimum time between two reports whose purpose is to carry acknowledgements over another path. Smaller: a
/// report for each packet. Larger: acknowledgements are late.
const MIN_STEER_INTERVAL: Duration = Duration::from_millis(5);

/// How long after a path was full, or lost packets, a connection counts as crowded. Smaller: a class whose
/// packets are far apart gets a connection of its own later. Larger: it gets one without need. Chosen.
const CROWDED_FOR: Duration = Duration::from_secs(2);
/// While it lasts, a server reports it again at this interval, as a report may be lost. Smaller: more
/// packets. Larger: a class connects late if the first report was lost. Chosen.
const CROWDED_REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// A heartbeat to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heartbeat {
    /// A PING frame on this path.
    Ping(PathId),
    /// A report on this path; it replaces a report that still waits to be sent there.
    Report(PathId, Bytes),
}

/// The result of [`Heartbeats::poll`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HeartbeatActions {
    /// Heartbeats to send, in this order.
    pub(super) heartbeats: Vec<Heartbeat>,
    /// Whether reports of the peer began or ceased to be missing, so that paths have to be judged again.
    pub(super) rejudge: bool,
}

/// The properties of the connection on which heartbeats depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrafficState {
    /// Whether the peer takes QUIC DATAGRAM frames.
    pub(super) datagrams: bool,
    /// When data moved last, in either direction.
    pub(super) last_data_at: Option<Instant>,
}

/// The heartbeats of one connection: PINGs, or reports if both ends negotiated them.
#[derive(Debug)]
pub(super) struct Heartbeats {
    role: Role,
    reports: Option<ReportState>,
    /// When a path was last full or lost packets here, when that was last news, and whether the peer's newest
    /// report says so of its paths.
    crowded: Option<Instant>,
    crowding_reported: Option<Instant>,
    peer_crowded: bool,
}

/// The state of sent and received reports.
#[derive(Debug)]
struct ReportState {
    prefix: DatagramPrefix,
    sent: u32,
    /// Number and arrival time of the newest report of the peer.
    newest_received: Option<(u32, Instant)>,
    /// When heartbeats became dense; `None` while they are sparse.
    dense_since: Option<Instant>,
    /// When reports were last sent on all paths because reports of the peer are missing.
    all_paths_sent_at: Option<Instant>,
    /// When acknowledgements were last sent over another path because the first one may be dead.
    steered_at: Option<Instant>,
    /// A report is due at once on all trusted paths.
    announce: bool,
    /// Probing of paths that are down, while there are any.
    probe: Option<PathProbe>,
}

#[derive(Clone, Copy, Debug)]
struct PathProbe {
    since: Instant,
    next: Instant,
}

impl Heartbeats {
    /// Creates heartbeats that are PINGs.
    pub(super) fn new(role: Role) -> Self {
        Self { role, reports: None, crowded: None, crowding_reported: None, peer_crowded: false }
    }

    /// Sends reports from now on, in this context of the request stream.
    pub(super) fn set_reports(&mut self, stream: u64, context: u64) {
        self.reports = Some(ReportState {
            prefix: datagram::prefix(stream, context),
            sent: 0,
            newest_received: None,
            dense_since: None,
            all_paths_sent_at: None,
            steered_at: None,
            announce: false,
            probe: None,
        });
    }

    /// Whether a received datagram is a report.
    #[inline]
    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        self.reports.as_ref().is_some_and(|reports| datagram.starts_with(reports.prefix.as_ref()))
    }

    /// Whether the peer has sent a report, so that reports count rather than path status frames.
    #[inline]
    pub(super) fn has_reports(&self) -> bool {
        self.reports.as_ref().is_some_and(|reports| reports.newest_received.is_some())
    }

    /// How the peer tells whether packets of this end arrive. A report from before there were several paths
    /// that work counts as one of a single path.
    pub(super) fn reporting(&self, paths: &PathTable) -> Reporting {
        match self.reports.as_ref().and_then(|reports| reports.newest_received) {
            None => Reporting::Never,
            Some((_, at)) if paths.several_since.is_some_and(|since| at >= since) => Reporting::Often,
            Some(_) => Reporting::Seldom,
        }
    }

    /// Takes a report of the peer; malformed and outdated reports are ignored. Returns whether paths have to
    /// be judged again.
    pub(super) fn take_report(&mut self, now: Instant, datagram: &[u8], paths: &mut PathTable) -> bool {
        let Some(reports) = &mut self.reports else { return false };
        let Some(report) = HeartbeatReport::decode(&datagram[reports.prefix.as_ref().len()..]) else {
            return false;
        };
        let newer = |(number, _): (u32, Instant)| (report.number.wrapping_sub(number) as i32) > 0;
        if !reports.newest_received.is_none_or(newer) {
            return false;
        }
        if reports.newest_received.is_none() {
            tracing::debug!(
                target: LIVENESS,
                number = report.number,
                "the first heartbeat report of the peer arrived: path status frames no longer count"
            );
        }
        tracing::trace!(target: LIVENESS, ?report, "a heartbeat report of the peer arrived");
        reports.newest_received = Some((report.number, now));
        reports.announce |= report.ask;
        self.peer_crowded = report.crowded;
        let active_until = report.active.then(|| now + PEER_ACTIVE_FOR);
        if report.active && !is_dense(now, paths) {
            tracing::debug!(target: LIVENESS, "data moves at the peer: heartbeats become dense");
        }
        let mut changed = false;
        for (id, path) in paths.iter_mut() {
            let said = report.paths.iter().find(|entry| entry.id == id);
            if path.peer.on_report(now, said, report.ask) {
                let heard = said.map(|entry| entry.reception == Reception::Heard);
                let later = said.is_some_and(|entry| entry.later);
                tracing::debug!(
                    target: LIVENESS,
                    path = id.0,
                    heard,
                    later,
                    "the peer's report about a path has changed"
                );
                changed = true;
            }
            if let Some(until) = active_until.filter(|_| !path.may_stay_unprobed()) {
                path.liveness.on_peer_traffic(now, until);
            }
        }
        changed
    }

    /// Data is about to move. If heartbeats were sparse, reports that did not arrive meanwhile do not count
    /// as missing. Returns whether heartbeats were sparse.
    #[inline]
    pub(super) fn on_data_resumed(&mut self, now: Instant, paths: &PathTable) -> bool {
        let Some(reports) = &mut self.reports else { return false };
        if is_dense(now, paths) {
            return false;
        }
        reports.dense_since = None;
        true
    }

    /// Returns when reports of the peer count as missing, while heartbeats are dense. With one path that
    /// works there is nothing to report, and they are seldom.
    fn report_overdue_at(&self, now: Instant, paths: &PathTable) -> Option<Instant> {
        let reports = self.reports.as_ref()?;
        let dense = reports.dense_since.filter(|_| is_dense(now, paths))?.max(paths.several_since?);
        let since = reports.newest_received.map_or(dense, |(_, newest_received)| newest_received.max(dense));
        let alive = paths.values().filter(|path| path.liveness.is_alive());
        let timeout = alive.map(|path| path.liveness.silence_limit()).max().unwrap_or(MIN_REPORT_TIMEOUT);
        Some(since + timeout.clamp(MIN_REPORT_TIMEOUT, MAX_REPORT_TIMEOUT))
    }

    /// Returns since when reports of the peer are missing although data moves; it is then unknown which
    /// packets of this end arrive.
    pub(super) fn unanswered_since(&self, now: Instant, paths: &PathTable) -> Option<Instant> {
        let newest = self.reports.as_ref()?.newest_received;
        if newest.is_some_and(|(_, at)| now < at + MIN_REPORT_TIMEOUT) {
            // No path is so quick that one could be missing: the usual case, for which no path is looked at.
            return None;
        }
        self.report_overdue_at(now, paths).filter(|at| now >= *at)
    }

    /// A path is full or loses packets. A server reports that at once, and again while it lasts. Returns
    /// whether that is news.
    pub(super) fn note_crowded(&mut self, now: Instant) -> bool {
        let is_news = self.crowded.is_none_or(|at| now >= at + CROWDED_FOR)
            || self.crowding_reported.is_none_or(|at| now >= at + CROWDED_REPORT_INTERVAL);
        self.crowded = Some(now);
        if is_news {
            self.crowding_reported = Some(now);
            if self.role == Role::Server {
                self.announce();
            }
        }
        is_news
    }

    /// Whether packets of one class delay those of another one, here or at the peer.
    pub(super) fn is_crowded(&self, now: Instant) -> bool {
        self.peer_crowded || self.crowded.is_some_and(|at| now < at + CROWDED_FOR)
    }

    /// Sends a report at once, because this end has changed its mind about a path.
    pub(super) fn announce(&mut self) {
        if let Some(reports) = &mut self.reports {
            reports.announce = true;
        }
    }

    /// Chooses a path for acknowledgements; to be called when packets have arrived. noq sends
    /// acknowledgements for all paths with the first datagram or, without one, on the first path. If that
    /// path has been silent for too long, they are sent with a report on a path on which a packet has
    /// just arrived, or the peer could not use that path either. Returns the path and the report; `fits`
    /// returns whether the connection takes a report.
    pub(super) fn steer_acks(
        &mut self,
        now: Instant,
        paths: &PathTable,
        last_data_at: Option<Instant>,
        fits: impl FnOnce() -> bool,
    ) -> Option<(PathId, Bytes)> {
        let reports = self.reports.as_ref()?;
        let trusted = || paths.iter().filter(|(_, path)| path.is_trusted());
        // The usual case: packets arrive on the first path, or on the only one.
        if trusted().next().is_none_or(|(_, path)| !path.liveness.is_quiet(now)) {
            return None;
        }
        let just_done = reports.steered_at.is_some_and(|at| now < at + MIN_STEER_INTERVAL);
        // While no data moves, nobody waits for acknowledgements; each end would answer the other's report.
        if !is_dense(now, paths) || just_done || !fits() {
            return None;
        }
        let heard = trusted().filter(|(_, path)| path.liveness.last_received() == now);
        let (id, _) = heard.min_by_key(|(_, path)| path.liveness.silence_limit())?;
        let report = self.next_report(now, paths, last_data_at, false)?;
        if let Some(reports) = &mut self.reports {
            reports.steered_at = Some(now);
        }
        tracing::trace!(
            target: LIVENESS,
            path = id.0,
            "the first path is silent: acknowledgements leave on another one"
        );
        Some((id, report))
    }

    fn next_report(
        &mut self,
        now: Instant,
        paths: &PathTable,
        last_data_at: Option<Instant>,
        ask: bool,
    ) -> Option<Bytes> {
        let reports = self.reports.as_mut()?;
        let active = last_data_at.is_some_and(|at| now.saturating_duration_since(at) < ACTIVE_FOR);
        // Where nothing is heard at all, a report before the verdict would only make the peer pause.
        let any_heard = paths.values().any(|path| path.liveness.is_heard(now));
        let paths = paths.iter().map(|(id, path)| {
            let liveness = &path.liveness;
            let heard = if any_heard { liveness.is_heard(now) } else { liveness.is_alive() };
            let reception = if heard { Reception::Heard } else { Reception::Silent };
            let later = self.role == Role::Client && path.usage.state == PathState::Standby;
            ReportedPath { id, reception, later }
        });
        let paths = paths.collect();
        reports.sent = reports.sent.wrapping_add(1);
        let crowded = self.role == Role::Server && self.crowded.is_some_and(|at| now < at + CROWDED_FOR);
        Some(HeartbeatReport { active, ask, crowded, number: reports.sent, paths }.encode(&reports.prefix))
    }

    /// Returns the heartbeat for a path: a report on a trusted path (or any, if none is trusted), else a
    /// PING.
    fn heartbeat(
        &mut self,
        now: Instant,
        paths: &PathTable,
        traffic: TrafficState,
        id: PathId,
        ask: bool,
    ) -> Heartbeat {
        let trusted = paths.values().any(PathEntry::is_trusted);
        let may = paths.get(id).is_some_and(|path| path.is_trusted() || !trusted);
        let report = if may && traffic.datagrams {
            self.next_report(now, paths, traffic.last_data_at, ask)
        } else {
            None
        };
        report.map_or(Heartbeat::Ping(id), |report| Heartbeat::Report(id, report))
    }

    /// Returns the heartbeats to send now: on the paths `due`, whose liveness asks for one, and those that
    /// reports and probes need.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        paths: &mut PathTable,
        traffic: TrafficState,
        due: &[PathId],
    ) -> HeartbeatActions {
        let mut out = HeartbeatActions::default();
        out.heartbeats.extend(due.iter().map(|id| self.heartbeat(now, paths, traffic, *id, false)));
        let dense = is_dense(now, paths);
        let unanswered = self.unanswered_since(now, paths);
        let Some(reports) = &mut self.reports else { return out };
        reports.dense_since = if dense { reports.dense_since.or(Some(now)) } else { None };
        let announce = std::mem::take(&mut reports.announce);
        let (to_all_paths, rejudge) = reports.update_all_paths_mode(now, unanswered);
        out.rejudge = rejudge;
        // On dead paths there are heartbeats anyway.
        let to_all_paths = to_all_paths && paths.values().any(|path| path.liveness.is_alive());
        let requested =
            paths.iter_mut().filter_map(|(id, path)| path.take_heartbeat_request(now).then_some(id));
        out.heartbeats.extend(requested.map(Heartbeat::Ping));
        if announce || to_all_paths {
            let none_trusted = !paths.values().any(PathEntry::is_trusted);
            let free = paths.values().any(|path| path.is_trusted() && !path.is_metered());
            let may = |path: &PathEntry| {
                none_trusted || path.is_trusted() && (dense || !free || !path.is_metered())
            };
            let all = paths.iter().filter(|(_, path)| path.liveness.has_carrier());
            let to = all.filter(|(id, path)| !due.contains(id) && (to_all_paths || may(path)));
            for id in to.map(|(id, _)| id).collect::<Vec<_>>() {
                out.heartbeats.push(self.heartbeat(now, paths, traffic, id, false));
            }
        }
        self.probe_down_paths(now, paths, traffic, dense, &mut out.heartbeats);
        out
    }

    /// Probes the paths that are down from time to time while no data moves.
    fn probe_down_paths(
        &mut self,
        now: Instant,
        paths: &mut PathTable,
        traffic: TrafficState,
        dense: bool,
        out: &mut Vec<Heartbeat>,
    ) {
        let Some(reports) = &mut self.reports else { return };
        let is_down = |path: &PathEntry| {
            path.usage.state == PathState::Down
                && path.liveness.has_carrier()
                && !path.liveness.is_left_to_others(now)
                && !path.may_stay_unprobed()
        };
        let down_paths = || paths.iter().filter(|(_, path)| is_down(path));
        if dense || down_paths().next().is_none() {
            reports.probe = None;
            return;
        }
        // The report that asks the peer for heartbeats uses a path that may be metered as well. Where no path
        // is trusted, the heartbeats of the paths themselves are reports.
        let over = paths.iter().filter(|(_, path)| path.is_trusted());
        let Some((over, over_path)) = over.min_by_key(|(id, path)| (path.is_metered(), *id)) else {
            reports.probe = None;
            return;
        };
        let confirming = down_paths().any(|(_, path)| path.liveness.is_probing(now));
        let metered_only = down_paths().all(|(_, path)| path.is_metered()) || over_path.is_metered();
        let probe = reports.probe.get_or_insert(PathProbe { since: now, next: now + EARLY_PROBE_INTERVAL });
        if confirming {
            probe.next = probe.next.min(now + CONFIRM_PROBE_INTERVAL);
        }
        if now < probe.next {
            return;
        }
        tracing::debug!(
            target: LIVENESS,
            over = over.0,
            confirming,
            metered_only,
            "paths that are down are probed while no data moves"
        );
        let pause = match now.saturating_duration_since(probe.since) {
            _ if confirming => CONFIRM_PROBE_INTERVAL,
            _ if metered_only => METERED_PROBE_INTERVAL,
            age if age < EARLY_PROBE_PERIOD => EARLY_PROBE_INTERVAL,
            _ => LATE_PROBE_INTERVAL,
        };
        probe.next = now + pause;
        for (id, path) in paths.iter_mut().filter(|(_, path)| is_down(path)) {
            out.push(Heartbeat::Ping(id));
            path.liveness.on_heartbeat_sent(now);
        }
        out.push(self.heartbeat(now, paths, traffic, over, true));
    }

    /// Returns when [`Self::poll`] has to be called, apart from the heartbeats of the paths themselves;
    /// `None` also if that is not before `limit`.
    pub(super) fn poll_timeout(
        &self,
        now: Instant,
        paths: &PathTable,
        limit: Option<Instant>,
    ) -> Option<Instant> {
        let reports = self.reports.as_ref()?;
        if reports.announce || paths.values().any(|path| path.peer.heartbeat_requested) {
            return Some(now);
        }
        // While data moves a heartbeat is due before a report can be missing, and no path is looked at.
        let least = reports.newest_received.map(|(_, at)| at + MIN_REPORT_TIMEOUT);
        let matters = limit.is_none_or(|limit| least.is_none_or(|least| least < limit));
        let overdue = matters.then(|| self.report_overdue_at(now, paths)).flatten();
        let to_all_paths = overdue.map(|at| {
            let pause = all_paths_pause(now, at);
            reports.all_paths_sent_at.map_or(at, |all_paths_sent_at| all_paths_sent_at + pause).max(at)
        });
        let probe = reports.probe.map(|probe| probe.next);
        to_all_paths.into_iter().chain(probe).min()
    }
}

impl ReportState {
    /// Enters or leaves the mode in which reports are sent on all paths, because reports of the peer are
    /// missing. Returns whether to send them now, and whether paths have to be judged again.
    fn update_all_paths_mode(&mut self, now: Instant, unanswered: Option<Instant>) -> (bool, bool) {
        match (self.all_paths_sent_at, unanswered) {
            (None, Some(_)) => {
                // All paths must be trusted first, which happens before the next packet is sent.
                tracing::debug!(
                    target: LIVENESS,
                    "no report of the peer arrives while data moves: all paths are trusted until one does"
                );
                self.all_paths_sent_at = now.checked_sub(ALL_PATHS_INTERVAL);
                (false, true)
            }
            (Some(_), None) => {
                tracing::debug!(target: LIVENESS, "reports of the peer arrive again");
                self.all_paths_sent_at = None;
                (false, true)
            }
            (Some(all_paths_sent_at), Some(since))
                if now >= all_paths_sent_at + all_paths_pause(now, since) =>
            {
                self.all_paths_sent_at = Some(now);
                (true, false)
            }
            _ => (false, false),
        }
    }
}

/// The interval of reports on all paths when reports of the peer have been missing `since`.
fn all_paths_pause(now: Instant, since: Instant) -> Duration {
    let silence = now.saturating_duration_since(since);
    probe_pause(silence, ALL_PATHS_INTERVAL, false)
}

/// Whether heartbeats are dense.
fn is_dense(now: Instant, paths: &PathTable) -> bool {
    paths.values().any(|path| path.liveness.is_dense(now))
}

#[cfg(test)]
mod tests {
    use mpvpn_types::LinkId;

    use super::{
        super::{
            tests::path,
            usage::{Evidence, PathUsage},
        },
        *,
    };

    const MS: Duration = Duration::from_millis(1);

    fn heartbeats(role: Role) -> Heartbeats {
        let mut heartbeats = Heartbeats::new(role);
        heartbeats.set_reports(0, 4);
        heartbeats
    }

    fn table(now: Instant, paths: u16) -> PathTable {
        let mut table = PathTable::new(now);
        (0..paths).for_each(|link| table.insert(now, PathId(link.into()), path(now, link)));
        table
    }

    /// Makes a path dead by silence, and its status known to the peer.
    fn die(now: Instant, path: &mut PathEntry) {
        path.liveness.on_traffic(now);
        path.liveness.on_traffic(now + 1000 * MS);
        path.liveness.poll(now + 1000 * MS);
        assert!(!path.liveness.is_alive());
        judge(&mut path.usage, false);
    }

    fn judge(usage: &mut PathUsage, alive: bool) {
        usage.judge(Evidence { alive, unheard: false, refused: false, peer_unknown: false });
    }

    fn traffic(now: Instant) -> TrafficState {
        TrafficState { datagrams: true, last_data_at: Some(now) }
    }

    /// Returns the paths on which reports (`.0`) and PINGs (`.1`) are sent.
    fn sent(due: &HeartbeatActions) -> (Vec<u32>, Vec<u32>) {
        let (mut reports, mut pings) = (Vec::new(), Vec::new());
        for heartbeat in &due.heartbeats {
            match heartbeat {
                Heartbeat::Report(id, _) => reports.push(id.0),
                Heartbeat::Ping(id) => pings.push(id.0),
            }
        }
        (reports, pings)
    }

    fn report_of(due: &HeartbeatActions) -> Bytes {
        let report = due.heartbeats.iter().find_map(|heartbeat| match heartbeat {
            Heartbeat::Report(_, report) => Some(report.clone()),
            Heartbeat::Ping(_) => None,
        });
        report.expect("a report is sent")
    }

    #[test]
    fn one_working_path_suffices_to_know_the_state_of_all() {
        let start = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(start, 2), table(start, 2));
        die(start, ours.get_mut(PathId(1)).expect("a path"));
        let now = start + 1000 * MS;
        let due = here.poll(now, &mut ours, traffic(now), &[PathId(0), PathId(1)]);
        assert_eq!(sent(&due), (vec![0], vec![1]), "reports are for paths that are trusted");
        assert!(!there.has_reports());
        assert!(there.take_report(now, &report_of(&due), &mut theirs));
        assert!(there.has_reports());
        let unheard = |id| theirs.get(PathId(id)).expect("a path").peer.unheard_since;
        assert_eq!((unheard(0), unheard(1)), (None, Some(now)));
    }

    #[test]
    fn outdated_and_malformed_reports_are_ignored() {
        let now = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(now, 1), table(now, 1));
        let old = report_of(&here.poll(now, &mut ours, traffic(now), &[PathId(0)]));
        let new = report_of(&here.poll(now, &mut ours, traffic(now), &[PathId(0)]));
        assert!(there.is_report(&new) && there.take_report(now, &new, &mut theirs));
        ours.get_mut(PathId(0)).expect("a path").liveness.on_carrier(now, false);
        assert!(!there.take_report(now, &old, &mut theirs));
        assert!(!there.take_report(now, &new[..4], &mut theirs));
        assert!(theirs.any_works());
    }

    #[test]
    fn without_the_extension_heartbeats_are_pings_and_nothing_else_is_sent() {
        let now = Instant::now();
        let (mut heartbeats, mut paths) = (Heartbeats::new(Role::Client), table(now, 2));
        heartbeats.announce();
        let due = heartbeats.poll(now, &mut paths, traffic(now), &[PathId(1)]);
        assert_eq!((sent(&due), due.rejudge), ((vec![], vec![1]), false));
        assert_eq!(heartbeats.poll_timeout(now, &paths, None), None);
        assert_eq!(heartbeats.unanswered_since(now + 9000 * MS, &paths), None);
    }

    #[test]
    fn changes_are_reported_at_once_on_trusted_paths_and_down_paths_get_a_ping() {
        let now = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(now, 3), table(now, 3));
        die(now, ours.get_mut(PathId(2)).expect("a path"));
        // The probe of the path that is dead asks for signs of life.
        let idle = now + 5000 * MS;
        let calm = TrafficState { datagrams: true, last_data_at: None };
        assert_eq!(here.poll(idle, &mut ours, calm, &[]).heartbeats, []);
        let trial_at = here.poll_timeout(idle, &ours, None).expect("a probe");
        assert_eq!(trial_at, idle + EARLY_PROBE_INTERVAL);
        let probe = here.poll(trial_at, &mut ours, calm, &[]);
        assert_eq!(sent(&probe), (vec![0], vec![2]));
        there.take_report(trial_at, &report_of(&probe), &mut theirs);
        assert_eq!(there.poll_timeout(trial_at, &theirs, None), Some(trial_at));
        let answer = there.poll(trial_at, &mut theirs, calm, &[]);
        assert_eq!(sent(&answer), (vec![0, 1, 2], vec![2]));
        assert_eq!(there.poll(trial_at, &mut theirs, calm, &[]).heartbeats, [], "once");
    }

    #[test]
    fn while_reports_of_the_peer_are_missing_reports_are_sent_on_all_paths() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 2));
        let mut calls = Vec::new();
        for ms in (0..1000).step_by(10) {
            let now = start + ms * MS;
            for path in paths.values_mut() {
                path.liveness.on_traffic(now);
                path.liveness.on_received(now);
            }
            let due = heartbeats.poll(now, &mut paths, traffic(now), &[]);
            assert_eq!(
                due.rejudge,
                due.heartbeats.is_empty() && heartbeats.unanswered_since(now, &paths) == Some(now)
            );
            if !due.heartbeats.is_empty() {
                assert_eq!(sent(&due), (vec![0, 1], vec![]));
                calls.push(ms);
            }
        }
        let silence_limit = paths.get(PathId(0)).expect("a path").liveness.silence_limit();
        let silent = silence_limit.clamp(MIN_REPORT_TIMEOUT, MAX_REPORT_TIMEOUT).as_millis() as u32;
        assert_eq!(calls.len() as u32, (1000 - silent).div_ceil(100), "{calls:?} after {silent} ms");
        assert!(calls[0] > silent, "first all paths are trusted");
    }

    #[test]
    fn silence_while_one_path_worked_is_no_evidence_when_another_one_works_again() {
        let start = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(start, 2), table(start, 2));
        let work = |paths: &mut PathTable, now, works: bool| {
            let other = paths.over_mut(LinkId(1)).next().expect("a path");
            other.is_unheard = !works;
            paths.values_mut().for_each(|path| {
                path.liveness.on_traffic(now);
                path.liveness.on_received(now);
            });
            paths.note_works(now);
        };
        work(&mut theirs, start, false);
        let report = report_of(&there.poll(start, &mut theirs, traffic(start), &[PathId(0)]));
        here.take_report(start, &report, &mut ours);
        assert_eq!(here.reporting(&ours), Reporting::Often);
        for ms in (0..3000).step_by(10) {
            work(&mut ours, start + ms * MS, false);
            here.poll(start + ms * MS, &mut ours, traffic(start), &[]);
        }
        let back = start + 3000 * MS;
        work(&mut ours, back, true);
        assert_eq!(here.unanswered_since(back, &ours), None);
        assert_eq!(here.reporting(&ours), Reporting::Seldom, "the report is of before");
        let late = back + MIN_REPORT_TIMEOUT;
        work(&mut ours, late, true);
        assert_eq!(here.unanswered_since(late, &ours), Some(late));
    }

    #[test]
    fn silence_while_heartbeats_were_sparse_is_no_evidence() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 1));
        let busy = |paths: &mut PathTable, now| {
            paths.values_mut().for_each(|path| _ = path.liveness.on_traffic(now))
        };
        busy(&mut paths, start);
        heartbeats.poll(start, &mut paths, traffic(start), &[]);
        let later = start + 60_000 * MS;
        assert!(heartbeats.on_data_resumed(later, &paths));
        busy(&mut paths, later);
        assert_eq!(heartbeats.unanswered_since(later, &paths), None);
    }

    #[test]
    fn acknowledgements_use_a_path_with_arrivals_while_the_first_path_is_silent() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 2));
        let now = start + 300 * MS;
        paths.get_mut(PathId(1)).expect("a path").liveness.on_received(now);
        let mut steer =
            |paths: &PathTable, now, fits| heartbeats.steer_acks(now, paths, None, || fits).map(|(id, _)| id);
        assert_eq!(steer(&paths, now, true), None, "no data moves");
        paths.values_mut().for_each(|path| _ = path.liveness.on_traffic(now));
        assert_eq!(steer(&paths, now, false), None, "the peer takes no datagrams");
        assert_eq!(steer(&paths, now, true), Some(PathId(1)));
        assert_eq!(steer(&paths, now, true), None, "not for every packet");
        paths.get_mut(PathId(0)).expect("a path").liveness.on_received(now + 10 * MS);
        assert_eq!(steer(&paths, now + 10 * MS, true), None, "the first path is heard");
    }
}
