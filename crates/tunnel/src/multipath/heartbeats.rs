//! Heartbeats that say what their sender hears.
//!
//! A PING proves to the far end that one direction of a path works. Which of its own packets arrive an end
//! cannot see: acknowledgements and path status frames come over whatever path the far end thinks well of,
//! and that may be one on which nothing arrives. So where both ends know this extension, heartbeats are
//! reports of all paths, sent on every path that this end trusts with data. One path that works both ways
//! is enough for both ends to know the truth about all of them, within a heartbeat and half a round trip.
//!
//! In: the paths whose own heartbeats are due, reports of the far end, the time. Out: PINGs and reports to
//! send, and since when nothing is known of the far end. Always holds: a report makes this end's heartbeats
//! dense while data moves at the far end, and never counts as data itself, so that two ends cannot keep each
//! other awake.

mod report;

use bytes::Bytes;
use mpvpn_masque::datagram::{self, DatagramPrefix};
use mpvpn_path::{LivenessConfig, PathState};
use mpvpn_types::{Duration, Instant, PathId, target::LIVENESS};

use super::{Role, path::PathEntry, path_table::PathTable};
use report::HeartbeatReport;
pub(super) use report::{Reception, ReportedPath};

/// This many of the longest intervals between dense heartbeats.
const fn heartbeats(count: u32) -> Duration {
    LivenessConfig::MAX_DENSE_INTERVAL.saturating_mul(count)
}

/// The sender counts as active if data moved there within this time. Five heartbeats less than they stay dense for: the last
/// ones say that it is over.
const ACTIVE: Duration = LivenessConfig::DENSE_DURATION.saturating_sub(heartbeats(5));
/// What one report of activity is worth. Less, and lost reports make heartbeats rare in between; more, and they stay dense
/// for longer than needed.
const ACTIVITY_LASTS: Duration = heartbeats(6);
/// No report for this long and a round trip, while data moves: nothing is known of the far end.
const OVERDUE: Duration = heartbeats(4);
const OVERDUE_MAX: Duration = heartbeats(10);
/// Reports leave on all paths this often while nothing is known of the far end.
const CALL_INTERVAL: Duration = heartbeats(1);
/// While no data moves, a path that does not work is tried anew after this time …
const RETRY: Duration = Duration::from_secs(1);
/// … later after this …
const RETRY_LATER: Duration = Duration::from_secs(5);
/// … and where packets cost after this.
const RETRY_METERED: Duration = Duration::from_secs(25);
/// How long the first of them holds.
const LATELY: Duration = Duration::from_secs(20);
/// The next trial of a path on which something was heard: one heartbeat proves nothing.
const TRIAL_STEP: Duration = Duration::from_millis(40);
/// Acknowledgements wait no longer than this for company.
const STEER_INTERVAL: Duration = Duration::from_millis(5);

/// What to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heartbeat {
    /// A PING frame on this path.
    Ping(PathId),
    /// A report on this path, which replaces one that still waits there.
    Report(PathId, Bytes),
}

/// What is to be done now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    /// To send, in this order.
    pub(super) heartbeats: Vec<Heartbeat>,
    /// What is known of the far end has changed: paths have to be judged again.
    pub(super) rejudge: bool,
}

/// What heartbeats have to know about the tunnel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings {
    /// The connection carries datagrams.
    pub(super) datagrams: bool,
    /// When data moved last, in either direction.
    pub(super) data_moved: Option<Instant>,
}

/// Heartbeats on the paths of one connection: PINGs, and reports where both ends know them.
#[derive(Debug)]
pub(super) struct Heartbeats {
    role: Role,
    reports: Option<Reports>,
}

/// Reports sent and received.
#[derive(Debug)]
struct Reports {
    prefix: DatagramPrefix,
    sent: u32,
    /// Number and time of the newest report.
    newest: Option<(u32, Instant)>,
    /// Since when heartbeats are dense, if they are.
    dense_since: Option<Instant>,
    /// When reports left on all paths last because nothing is known of the far end.
    called: Option<Instant>,
    /// When acknowledgements were last steered away from a path that may be dead.
    steered: Option<Instant>,
    /// A report is due at once on all paths that may take one.
    announce: bool,
    /// Since when some path does not work, and when it is tried.
    trial: Option<Trial>,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    since: Instant,
    next: Instant,
}

impl Heartbeats {
    /// PINGs only.
    pub(super) fn new(role: Role) -> Self {
        Self { role, reports: None }
    }

    /// The peer knows reports, in this context of the request stream.
    pub(super) fn set_reports(&mut self, stream: u64, context: u64) {
        self.reports = Some(Reports {
            prefix: datagram::prefix(stream, context),
            sent: 0,
            newest: None,
            dense_since: None,
            called: None,
            steered: None,
            announce: false,
            trial: None,
        });
    }

    /// Whether a received datagram is a report.
    #[inline]
    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        self.reports.as_ref().is_some_and(|reports| datagram.starts_with(reports.prefix.as_ref()))
    }

    /// Whether what the far end says about a path counts, rather than its path status frames.
    #[inline]
    pub(super) fn has_reports(&self) -> bool {
        self.reports.as_ref().is_some_and(|reports| reports.newest.is_some())
    }

    /// Takes a report; one that is malformed or overtaken says nothing. Returns whether paths have to be
    /// judged again.
    pub(super) fn take_report(&mut self, now: Instant, datagram: &[u8], paths: &mut PathTable) -> bool {
        let Some(reports) = &mut self.reports else { return false };
        let Some(report) = HeartbeatReport::decode(&datagram[reports.prefix.as_ref().len()..]) else {
            return false;
        };
        let newer = |(number, _): (u32, Instant)| (report.number.wrapping_sub(number) as i32) > 0;
        if !reports.newest.is_none_or(newer) {
            return false;
        }
        if reports.newest.is_none() {
            tracing::debug!(
                target: LIVENESS,
                number = report.number,
                "the first report of the far end: it decides which paths it hears"
            );
        }
        tracing::trace!(target: LIVENESS, ?report, "a report of the far end");
        reports.newest = Some((report.number, now));
        reports.announce |= report.ask;
        let active_until = report.active.then(|| now + ACTIVITY_LASTS);
        if report.active && !is_dense(now, paths) {
            tracing::debug!(target: LIVENESS, "data moves at the far end: heartbeats become dense");
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
                    "the far end reports otherwise about a path"
                );
                changed = true;
            }
            if !path.may_rest() {
                path.liveness.on_peer_traffic(now, active_until);
            }
        }
        changed
    }

    /// Data is about to move. If it did not before, reports that did not come meanwhile say nothing, whether
    /// or not anybody looked while heartbeats were rare. Returns whether this is so.
    #[inline]
    pub(super) fn wake_up(&mut self, now: Instant, paths: &PathTable) -> bool {
        let Some(reports) = &mut self.reports else { return false };
        if is_dense(now, paths) {
            return false;
        }
        reports.dense_since = None;
        true
    }

    /// When silence about this end's packets becomes meaningful, while data moves.
    fn overdue_at(&self, now: Instant, paths: &PathTable) -> Option<Instant> {
        let reports = self.reports.as_ref()?;
        let dense = reports.dense_since.filter(|_| is_dense(now, paths))?;
        let since = reports.newest.map_or(dense, |(_, newest)| newest.max(dense));
        let alive = paths.values().filter(|path| path.liveness.is_alive());
        let timeout = alive.map(|path| path.liveness.silence_limit()).max().unwrap_or(OVERDUE);
        Some(since + timeout.clamp(OVERDUE, OVERDUE_MAX))
    }

    /// Since when this end hears nothing from the far end about its own packets, although data moves: it
    /// cannot know which of them arrive.
    pub(super) fn unanswered_since(&self, now: Instant, paths: &PathTable) -> Option<Instant> {
        self.overdue_at(now, paths).filter(|at| now >= *at)
    }

    /// This end has come to think otherwise about a path, which the far end must know.
    pub(super) fn announce(&mut self) {
        if let Some(reports) = &mut self.reports {
            reports.announce = true;
        }
    }

    /// To be called when something arrived: acknowledgements leave with the first datagram, and without one
    /// on the first path, whichever path they are for. While that one is suspiciously silent they get a
    /// datagram of their own, on a path where something was just heard: without them the far end could not
    /// use that one either. Returns that path and a report to send there, if `fits` says that it can be sent.
    pub(super) fn steer_acks(
        &mut self,
        now: Instant,
        paths: &PathTable,
        data_moved: Option<Instant>,
        fits: impl FnOnce() -> bool,
    ) -> Option<(PathId, Bytes)> {
        let reports = self.reports.as_ref()?;
        let trusted = || paths.iter().filter(|(_, path)| path.is_trusted());
        let first_is_quiet = trusted().next().is_some_and(|(_, path)| path.liveness.is_quiet(now));
        let just_done = reports.steered.is_some_and(|at| now < at + STEER_INTERVAL);
        if !first_is_quiet || just_done || !fits() {
            return None;
        }
        let heard = trusted().filter(|(_, path)| path.liveness.last_received() == now);
        let (id, _) = heard.min_by_key(|(_, path)| path.liveness.silence_limit())?;
        let report = self.next_report(now, paths, data_moved, false)?;
        if let Some(reports) = &mut self.reports {
            reports.steered = Some(now);
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
        data_moved: Option<Instant>,
        ask: bool,
    ) -> Option<Bytes> {
        let reports = self.reports.as_mut()?;
        let active = data_moved.is_some_and(|at| now.saturating_duration_since(at) < ACTIVE);
        let paths = paths.iter().map(|(id, path)| {
            let reception = if path.liveness.is_alive() { Reception::Heard } else { Reception::Silent };
            let later = self.role == Role::Client && path.usage.state() == PathState::Standby;
            ReportedPath { id, reception, later }
        });
        let paths = paths.collect();
        reports.sent = reports.sent.wrapping_add(1);
        Some(HeartbeatReport { active, ask, number: reports.sent, paths }.encode(&reports.prefix))
    }

    /// A heartbeat on a path: a report where data may go, a PING elsewhere.
    fn heartbeat(
        &mut self,
        now: Instant,
        paths: &PathTable,
        around: Surroundings,
        id: PathId,
        ask: bool,
    ) -> Heartbeat {
        let trusted = paths.values().any(PathEntry::is_trusted);
        let may = paths.get(id).is_some_and(|path| path.is_trusted() || !trusted);
        let report =
            if may && around.datagrams { self.next_report(now, paths, around.data_moved, ask) } else { None };
        report.map_or(Heartbeat::Ping(id), |report| Heartbeat::Report(id, report))
    }

    /// The heartbeats that the liveness of the paths `due` asks for, and what else both ends must know now.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        paths: &mut PathTable,
        around: Surroundings,
        due: &[PathId],
    ) -> Due {
        let mut out = Due::default();
        out.heartbeats.extend(due.iter().map(|id| self.heartbeat(now, paths, around, *id, false)));
        let dense = is_dense(now, paths);
        let unanswered = self.unanswered_since(now, paths).is_some();
        let Some(reports) = &mut self.reports else { return out };
        reports.dense_since = if dense { reports.dense_since.or(Some(now)) } else { None };
        let announce = std::mem::take(&mut reports.announce);
        let (call, rejudge) = reports.calls(now, unanswered);
        out.rejudge = rejudge;
        let owed = paths.iter_mut().filter_map(|(id, path)| path.peer.take_owed_heartbeat().then_some(id));
        out.heartbeats.extend(owed.map(Heartbeat::Ping));
        if announce || call {
            let free = paths.values().any(|path| path.is_trusted() && !path.is_metered());
            let may = |path: &PathEntry| path.is_trusted() && (dense || !free || !path.is_metered());
            let all = paths.iter().filter(|(_, path)| path.liveness.has_carrier());
            let to = all.filter(|(id, path)| !due.contains(id) && (call || may(path)));
            for id in to.map(|(id, _)| id).collect::<Vec<_>>() {
                out.heartbeats.push(self.heartbeat(now, paths, around, id, false));
            }
        }
        self.try_broken(now, paths, around, dense, &mut out.heartbeats);
        out
    }

    /// While no data moves: now and then a trial of the paths that do not work.
    fn try_broken(
        &mut self,
        now: Instant,
        paths: &PathTable,
        around: Surroundings,
        dense: bool,
        out: &mut Vec<Heartbeat>,
    ) {
        let Some(reports) = &mut self.reports else { return };
        let is_broken = |path: &PathEntry| {
            path.usage.state() == PathState::Down && path.liveness.has_carrier() && !path.may_rest()
        };
        let broken = || paths.iter().filter(|(_, path)| is_broken(path));
        if dense || broken().next().is_none() {
            reports.trial = None;
            return;
        }
        // The report that asks costs, too.
        let over = paths.iter().filter(|(_, path)| path.is_trusted());
        let over = over.min_by_key(|(id, path)| (path.is_metered(), *id));
        let trying = broken().any(|(_, path)| path.liveness.is_probing(now));
        let costs =
            broken().all(|(_, path)| path.is_metered()) || over.is_none_or(|(_, path)| path.is_metered());
        let trial = reports.trial.get_or_insert(Trial { since: now, next: now + RETRY });
        if trying {
            trial.next = trial.next.min(now + TRIAL_STEP);
        }
        if now < trial.next {
            return;
        }
        let over_path = over.map(|(id, _)| id.0);
        tracing::debug!(
            target: LIVENESS,
            over = over_path,
            trying,
            costs,
            "paths that do not work are tried while no data moves"
        );
        let pause = match now.saturating_duration_since(trial.since) {
            _ if trying => TRIAL_STEP,
            _ if costs => RETRY_METERED,
            age if age < LATELY => RETRY,
            _ => RETRY_LATER,
        };
        trial.next = now + pause;
        out.extend(broken().map(|(id, _)| Heartbeat::Ping(id)));
        let over = over.map_or_else(|| broken().map(|(id, _)| id).collect(), |(id, _)| vec![id]);
        for id in over {
            out.push(self.heartbeat(now, paths, around, id, true));
        }
    }

    /// When [`Self::poll`] has something to do that no path's own heartbeats ask for.
    pub(super) fn poll_timeout(&self, now: Instant, paths: &PathTable) -> Option<Instant> {
        let reports = self.reports.as_ref()?;
        if reports.announce || paths.values().any(|path| path.peer.owes_heartbeat()) {
            return Some(now);
        }
        let overdue = self.overdue_at(now, paths);
        let call = overdue.map(|at| reports.called.map_or(at, |called| called + CALL_INTERVAL).max(at));
        let trial = reports.trial.map(|trial| trial.next);
        call.into_iter().chain(trial).min()
    }
}

impl Reports {
    /// Whether reports leave on all paths now, because the far end is silent about this end's packets; and
    /// whether paths have to be judged again.
    fn calls(&mut self, now: Instant, unanswered: bool) -> (bool, bool) {
        match self.called {
            None if unanswered => {
                // First all paths must be trusted, which is done before the next packet leaves.
                tracing::debug!(
                    target: LIVENESS,
                    "no report while data moves: all paths are trusted until the far end is heard"
                );
                self.called = now.checked_sub(CALL_INTERVAL);
                (false, true)
            }
            Some(_) if !unanswered => {
                tracing::debug!(target: LIVENESS, "the far end reports again");
                self.called = None;
                (false, true)
            }
            Some(called) if now >= called + CALL_INTERVAL => {
                self.called = Some(now);
                (true, false)
            }
            _ => (false, false),
        }
    }
}

/// Whether heartbeats are dense.
fn is_dense(now: Instant, paths: &PathTable) -> bool {
    paths.values().any(|path| path.liveness.is_dense(now))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            testing::path,
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
        (0..paths).for_each(|link| table.insert(PathId(link.into()), path(now, link)));
        table
    }

    /// Nothing has arrived on a path for so long that it is dead, and the peer was told.
    fn die(now: Instant, path: &mut PathEntry) {
        path.liveness.on_traffic(now);
        path.liveness.on_traffic(now + 1000 * MS);
        path.liveness.poll(now + 1000 * MS);
        assert!(!path.liveness.is_alive());
        judge(&mut path.usage, false);
    }

    fn judge(usage: &mut PathUsage, alive: bool) {
        usage.judge(Evidence { alive, unheard: false, refused: false, trusted_anyway: false });
    }

    fn around(now: Instant) -> Surroundings {
        Surroundings { datagrams: true, data_moved: Some(now) }
    }

    /// What is sent: `.0` on each path as a report, `.1` as a PING.
    fn sent(due: &Due) -> (Vec<u32>, Vec<u32>) {
        let (mut reports, mut pings) = (Vec::new(), Vec::new());
        for heartbeat in &due.heartbeats {
            match heartbeat {
                Heartbeat::Report(id, _) => reports.push(id.0),
                Heartbeat::Ping(id) => pings.push(id.0),
            }
        }
        (reports, pings)
    }

    fn report_of(due: &Due) -> Bytes {
        let report = due.heartbeats.iter().find_map(|heartbeat| match heartbeat {
            Heartbeat::Report(_, report) => Some(report.clone()),
            Heartbeat::Ping(_) => None,
        });
        report.expect("a report is sent")
    }

    #[test]
    fn one_path_that_works_is_enough_to_know_the_truth_about_all() {
        let start = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(start, 2), table(start, 2));
        die(start, ours.get_mut(PathId(1)).expect("a path"));
        let now = start + 1000 * MS;
        let due = here.poll(now, &mut ours, around(now), &[PathId(0), PathId(1)]);
        assert_eq!(sent(&due), (vec![0], vec![1]), "reports are for paths that are trusted");
        assert!(!there.has_reports());
        assert!(there.take_report(now, &report_of(&due), &mut theirs));
        assert!(there.has_reports());
        let unheard = |id| theirs.get(PathId(id)).expect("a path").peer.unheard_since();
        assert_eq!((unheard(0), unheard(1)), (None, Some(now)));
    }

    #[test]
    fn a_report_that_was_overtaken_or_is_malformed_says_nothing() {
        let now = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(now, 1), table(now, 1));
        let old = report_of(&here.poll(now, &mut ours, around(now), &[PathId(0)]));
        let new = report_of(&here.poll(now, &mut ours, around(now), &[PathId(0)]));
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
        let due = heartbeats.poll(now, &mut paths, around(now), &[PathId(1)]);
        assert_eq!((sent(&due), due.rejudge), ((vec![], vec![1]), false));
        assert_eq!(heartbeats.poll_timeout(now, &paths), None);
        assert_eq!(heartbeats.unanswered_since(now + 9000 * MS, &paths), None);
    }

    #[test]
    fn news_are_announced_at_once_on_all_trusted_paths_and_where_none_is_heard_by_a_ping() {
        let now = Instant::now();
        let (mut here, mut there) = (heartbeats(Role::Client), heartbeats(Role::Server));
        let (mut ours, mut theirs) = (table(now, 3), table(now, 3));
        die(now, ours.get_mut(PathId(2)).expect("a path"));
        // The trial of the path that is dead asks for signs of life.
        let idle = now + 5000 * MS;
        let calm = Surroundings { datagrams: true, data_moved: None };
        assert_eq!(here.poll(idle, &mut ours, calm, &[]).heartbeats, []);
        let trial_at = here.poll_timeout(idle, &ours).expect("a trial");
        assert_eq!(trial_at, idle + RETRY);
        let trial = here.poll(trial_at, &mut ours, calm, &[]);
        assert_eq!(sent(&trial), (vec![0], vec![2]));
        there.take_report(trial_at, &report_of(&trial), &mut theirs);
        assert_eq!(there.poll_timeout(trial_at, &theirs), Some(trial_at));
        let answer = there.poll(trial_at, &mut theirs, calm, &[]);
        assert_eq!(sent(&answer), (vec![0, 1, 2], vec![2]));
        assert_eq!(there.poll(trial_at, &mut theirs, calm, &[]).heartbeats, [], "once");
    }

    #[test]
    fn while_nothing_is_known_of_the_far_end_reports_leave_on_all_paths() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 2));
        let mut calls = Vec::new();
        for ms in (0..1000).step_by(10) {
            let now = start + ms * MS;
            for path in paths.values_mut() {
                path.liveness.on_traffic(now);
                path.liveness.on_received(now);
            }
            let due = heartbeats.poll(now, &mut paths, around(now), &[]);
            assert_eq!(
                due.rejudge,
                due.heartbeats.is_empty() && heartbeats.unanswered_since(now, &paths) == Some(now)
            );
            if !due.heartbeats.is_empty() {
                assert_eq!(sent(&due), (vec![0, 1], vec![]));
                calls.push(ms);
            }
        }
        let patience = paths.get(PathId(0)).expect("a path").liveness.silence_limit();
        let silent = patience.clamp(OVERDUE, OVERDUE_MAX).as_millis() as u32;
        assert_eq!(calls.len() as u32, (1000 - silent).div_ceil(100), "{calls:?} after {silent} ms");
        assert!(calls[0] > silent, "first all paths are trusted");
    }

    #[test]
    fn silence_while_heartbeats_were_rare_says_nothing() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 1));
        let busy =
            |paths: &mut PathTable, now| paths.values_mut().for_each(|path| path.liveness.on_traffic(now));
        busy(&mut paths, start);
        heartbeats.poll(start, &mut paths, around(start), &[]);
        let later = start + 60_000 * MS;
        assert!(heartbeats.wake_up(later, &paths));
        busy(&mut paths, later);
        assert_eq!(heartbeats.unanswered_since(later, &paths), None);
    }

    #[test]
    fn acknowledgements_leave_where_something_was_heard_while_the_first_path_is_silent() {
        let start = Instant::now();
        let (mut heartbeats, mut paths) = (heartbeats(Role::Client), table(start, 2));
        let now = start + 300 * MS;
        paths.get_mut(PathId(1)).expect("a path").liveness.on_received(now);
        let mut steer =
            |paths: &PathTable, now, fits| heartbeats.steer_acks(now, paths, None, || fits).map(|(id, _)| id);
        assert_eq!(steer(&paths, now, false), None, "the peer takes no datagrams");
        assert_eq!(steer(&paths, now, true), Some(PathId(1)));
        assert_eq!(steer(&paths, now, true), None, "not for every packet");
        paths.get_mut(PathId(0)).expect("a path").liveness.on_received(now + 10 * MS);
        assert_eq!(steer(&paths, now + 10 * MS, true), None, "the first path is heard");
    }
}
