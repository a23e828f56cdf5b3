//! Heartbeats that say what their sender hears.
//!
//! A PING proves to the far end that one direction of a path works. Which of its own packets arrive an end
//! cannot see: acknowledgements and path status frames come over whatever path the far end thinks well of,
//! and that may be one on which nothing arrives. So where both ends know this extension, heartbeats are
//! reports of all paths, sent on every path that this end trusts with data. One path that works both ways
//! is enough for both ends to know the truth about all of them, within a heartbeat and half a round trip.
//!
//! Always holds: a report makes this end's heartbeats dense while data moves at the far end, and never
//! counts as data itself, so that two ends cannot keep each other awake.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_path::PathState;
use mpvpn_quic::{Connection, PathStatus};
use mpvpn_types::{Duration, Instant, PathId};

use super::{Carrier, Role};

/// The sender's data moved so lately. Less than heartbeats stay dense for: the last ones say that it is over.
const ACTIVE: Duration = Duration::from_millis(1500);
/// What one report of activity is worth.
const ECHO: Duration = Duration::from_millis(600);
/// No report for this long and a round trip, while data moves: nothing is known of the far end.
const UNTOLD: Duration = Duration::from_millis(400);
const UNTOLD_MAX: Duration = Duration::from_millis(1000);
/// Reports leave on all paths this often while nothing is known of the far end.
const CALL: Duration = Duration::from_millis(100);
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
/// A path that takes no data for this long is one that the library gave up to validate.
const MUTE: Duration = Duration::from_millis(1500);

/// Acknowledgements wait no longer than this for company.
const STEER: Duration = Duration::from_millis(5);

const FLAG_ACTIVE: u8 = 1;
const FLAG_ASK: u8 = 2;
const PATH_HEARD: u64 = 1;
const PATH_LATER: u64 = 2;
/// Paths in one report.
const MAX_PATHS: usize = 64;

/// What the far end said last about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Echo {
    /// It hears this end there.
    Heard,
    /// It does not.
    Silent,
}

/// Reports sent and received.
#[derive(Debug)]
pub(super) struct Pulses {
    prefix: DatagramPrefix,
    sent: u32,
    /// Number and time of the newest report.
    newest: Option<(u32, Instant)>,
    /// Since when heartbeats are dense, if they are.
    dense_since: Option<Instant>,
    /// All paths were called on last.
    called: Option<Instant>,
    /// When acknowledgements were last steered away from a path that may be dead.
    steered: Option<Instant>,
    /// A report is due at once on all paths that may take one.
    due: bool,
    /// Since when some path does not work, and when it is tried.
    trial: Option<Trial>,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    since: Instant,
    next: Instant,
}

/// A report as it is on the wire (docs/protocol.md, "Heartbeats").
#[derive(Debug, PartialEq, Eq)]
struct Report {
    active: bool,
    ask: bool,
    number: u32,
    paths: Vec<(PathId, Echo, bool)>,
}

impl Report {
    fn encode(&self, prefix: &DatagramPrefix) -> Bytes {
        let mut out = BytesMut::from(prefix.as_ref());
        let flags = if self.active { FLAG_ACTIVE } else { 0 } | if self.ask { FLAG_ASK } else { 0 };
        out.extend_from_slice(&[flags]);
        out.extend_from_slice(&self.number.to_be_bytes());
        for (id, echo, later) in self.paths.iter().take(MAX_PATHS) {
            let heard = if *echo == Echo::Heard { PATH_HEARD } else { 0 };
            let later = if *later { PATH_LATER } else { 0 };
            varint::encode(u64::from(id.0) << 2 | later | heard, &mut out);
        }
        out.freeze()
    }

    /// `None` if it is cut short.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let [flags, a, b, c, d] = *bytes.first_chunk()?;
        bytes.advance(5);
        let mut paths = Vec::new();
        while !bytes.is_empty() && paths.len() < MAX_PATHS {
            let (entry, len) = varint::decode(bytes)?;
            bytes.advance(len);
            let id = PathId(u32::try_from(entry >> 2).ok()?);
            let echo = if entry & PATH_HEARD != 0 { Echo::Heard } else { Echo::Silent };
            paths.push((id, echo, entry & PATH_LATER != 0));
        }
        let (active, ask) = (flags & FLAG_ACTIVE != 0, flags & FLAG_ASK != 0);
        Some(Self { active, ask, number: u32::from_be_bytes([a, b, c, d]), paths })
    }
}

impl Pulses {
    fn new(stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            sent: 0,
            newest: None,
            dense_since: None,
            called: None,
            steered: None,
            due: false,
            trial: None,
        }
    }

    /// Whether a received datagram is a report.
    pub(super) fn is_report(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }
}

impl Carrier {
    /// The peer knows reports, in this context of the request stream.
    pub(crate) fn report_paths(&mut self, stream: u64, context: u64) {
        self.pulses = Some(Pulses::new(stream, context));
    }

    /// The peer wants a path to be used, or not.
    pub(crate) fn peer_status(&mut self, now: Instant, id: PathId, status: PathStatus) {
        if self.is_told() {
            return;
        }
        let Some(path) = self.paths.get_mut(&id) else { return };
        path.refused = match status {
            PathStatus::Available => None,
            PathStatus::Backup => path.refused.or(Some(now)),
        };
        if path.refused == Some(now) {
            // Whether the far end hears this one must not stay open until the next heartbeat.
            path.liveness.beat_now();
        }
        self.changed = true;
    }

    /// What the far end says about a path counts, rather than its path status frames.
    pub(super) fn is_told(&self) -> bool {
        self.pulses.as_ref().is_some_and(|pulses| pulses.newest.is_some())
    }

    /// Takes a report; one that is malformed or overtaken says nothing.
    pub(super) fn take_report(&mut self, now: Instant, datagram: &[u8]) {
        let Some(pulses) = &mut self.pulses else { return };
        let Some(report) = Report::decode(&datagram[pulses.prefix.as_ref().len()..]) else { return };
        let newer = |(number, _): (u32, Instant)| (report.number.wrapping_sub(number) as i32) > 0;
        if !pulses.newest.is_none_or(newer) {
            return;
        }
        pulses.newest = Some((report.number, now));
        pulses.due |= report.ask;
        let until = report.active.then(|| now + ECHO);
        for (id, path) in &mut self.paths {
            let said = report.paths.iter().find(|(other, ..)| other == id);
            let echo = said.map(|(_, echo, _)| *echo);
            self.changed |= path.echo != echo;
            path.echo = echo;
            path.silent = (echo == Some(Echo::Silent)).then_some(path.silent.unwrap_or(now));
            let later = said.is_some_and(|(.., later)| *later);
            self.changed |= later != path.refused.is_some();
            path.refused = later.then_some(path.refused.unwrap_or(now));
            if !path.may_rest() {
                path.liveness.on_far_traffic(now, until);
            }
            // The far end waits for a sign of life there.
            path.owed |= report.ask && echo == Some(Echo::Silent);
        }
    }

    /// Whether heartbeats are dense.
    fn is_awake(&self, now: Instant) -> bool {
        self.paths.values().any(|path| path.liveness.is_dense(now))
    }

    /// Data is about to move. If it did not before, reports that did not come meanwhile say nothing, whether or not
    /// anybody looked while heartbeats were rare.
    pub(super) fn wake_up(&mut self, now: Instant) {
        if !self.is_awake(now)
            && let Some(pulses) = &mut self.pulses
        {
            pulses.dense_since = None;
        }
    }

    /// When silence about this end's packets becomes meaningful, while data moves.
    fn untold(&self, now: Instant) -> Option<Instant> {
        let pulses = self.pulses.as_ref()?;
        let dense = pulses.dense_since.filter(|_| self.is_awake(now))?;
        let since = pulses.newest.map_or(dense, |(_, newest)| newest.max(dense));
        let alive = self.paths.values().filter(|path| path.liveness.is_alive());
        let patience = alive.map(|path| path.liveness.patience()).max().unwrap_or(UNTOLD);
        Some(since + patience.clamp(UNTOLD, UNTOLD_MAX))
    }

    /// Whether this end cannot know which of its packets arrive.
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        self.lost_since(now).is_some()
    }

    /// Since when this end hears nothing from the far end about its own packets, although data moves.
    pub(super) fn lost_since(&self, now: Instant) -> Option<Instant> {
        self.untold(now).filter(|at| now >= *at)
    }

    /// A heartbeat on a path: a report where data may go, a PING elsewhere.
    fn beat(&mut self, now: Instant, connection: &mut Connection, id: PathId, ask: bool) {
        let trusted = self.paths.values().any(|path| path.told == PathStatus::Available);
        let may = self.paths.get(&id).is_some_and(|path| path.told == PathStatus::Available || !trusted);
        let fits = connection.max_datagram().is_some();
        if !may || !fits || self.pulses.is_none() {
            return connection.heartbeat(id);
        }
        let report = self.next_report(now, ask);
        connection.report(id, report);
    }

    /// To be called when something arrived: acknowledgements leave with the first datagram, and without one on the
    /// first path, whichever path they are for. While that one is suspiciously silent they get a datagram of their
    /// own, on a path where something was just heard: without them the far end could not use that one either.
    pub(super) fn steer_acks(&mut self, now: Instant, connection: &mut Connection) {
        let Some(pulses) = &self.pulses else { return };
        let trusted = || self.paths.iter().filter(|(_, path)| path.told == PathStatus::Available);
        let first_is_quiet = trusted().next().is_some_and(|(_, path)| path.liveness.is_quiet(now));
        let just_done = pulses.steered.is_some_and(|at| now < at + STEER);
        if !first_is_quiet || just_done || connection.max_datagram().is_none() {
            return;
        }
        let heard = trusted().filter(|(_, path)| path.liveness.heard() == now);
        let Some((id, _)) = heard.min_by_key(|(_, path)| path.liveness.patience()) else { return };
        let id = *id;
        let report = self.next_report(now, false);
        connection.queue(id, report);
        if let Some(pulses) = &mut self.pulses {
            pulses.steered = Some(now);
        }
    }

    fn next_report(&mut self, now: Instant, ask: bool) -> Bytes {
        let active = self.traffic.moved_within(now, ACTIVE);
        let paths = self.paths.iter().map(|(id, path)| {
            let echo = if path.liveness.is_alive() { Echo::Heard } else { Echo::Silent };
            let later = self.role == Role::Client && path.state == PathState::Standby;
            (*id, echo, later)
        });
        let paths = paths.collect();
        let Some(pulses) = &mut self.pulses else { return Bytes::new() };
        pulses.sent = pulses.sent.wrapping_add(1);
        Report { active, ask, number: pulses.sent, paths }.encode(&pulses.prefix)
    }

    /// Sends the heartbeats that `due` asks for, and what else both ends must know now.
    pub(super) fn send_beats(&mut self, now: Instant, connection: &mut Connection, due: &[PathId]) {
        for id in due {
            self.beat(now, connection, *id, false);
        }
        let awake = self.is_awake(now);
        let lost = self.is_lost(now);
        let Some(pulses) = &mut self.pulses else { return };
        pulses.dense_since = if awake { pulses.dense_since.or(Some(now)) } else { None };
        let announce = std::mem::take(&mut pulses.due);
        let call = match pulses.called {
            None if lost => {
                // First all paths must be trusted, which is done before the next packet leaves.
                self.changed = true;
                pulses.called = now.checked_sub(CALL);
                false
            }
            Some(_) if !lost => {
                self.changed = true;
                pulses.called = None;
                false
            }
            called => called.is_some_and(|at| now >= at + CALL),
        };
        if call {
            pulses.called = Some(now);
        }
        let owed = |path: &mut super::Watched| std::mem::take(&mut path.owed);
        let owed: Vec<PathId> =
            self.paths.iter_mut().filter_map(|(id, path)| owed(path).then_some(*id)).collect();
        for id in owed {
            connection.heartbeat(id);
        }
        if announce || call {
            let trusted = |path: &super::Watched| path.told == PathStatus::Available;
            let free = self.paths.values().any(|path| trusted(path) && !path.policy.metered);
            let may = |path: &super::Watched| trusted(path) && (awake || !free || !path.policy.metered);
            let all = self.paths.iter().filter(|(_, path)| path.liveness.has_carrier());
            let to = all.filter(|(id, path)| !due.contains(id) && (call || may(path)));
            for id in to.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.beat(now, connection, id, false);
            }
        }
        self.try_broken(now, connection, awake);
    }

    /// While no data moves: now and then a trial of the paths that do not work.
    fn try_broken(&mut self, now: Instant, connection: &mut Connection, awake: bool) {
        let broken = |path: &super::Watched| {
            path.state == PathState::Down && path.liveness.has_carrier() && !path.may_rest()
        };
        let ids: Vec<PathId> =
            self.paths.iter().filter(|(_, path)| broken(path)).map(|(id, _)| *id).collect();
        let metered = |id: &PathId| self.paths.get(id).is_some_and(|path| path.policy.metered);
        // The report that asks costs, too.
        let over = self.paths.iter().filter(|(_, path)| path.told == PathStatus::Available);
        let over = over.map(|(id, _)| *id).min_by_key(|id| (metered(id), *id));
        let trying = ids.iter().filter_map(|id| self.paths.get(id)).any(|path| path.liveness.is_trying(now));
        let costs = ids.iter().all(metered) || over.as_ref().is_none_or(metered);
        let Some(pulses) = &mut self.pulses else { return };
        if awake || ids.is_empty() {
            pulses.trial = None;
            return;
        }
        let trial = pulses.trial.get_or_insert(Trial { since: now, next: now + RETRY });
        if trying {
            trial.next = trial.next.min(now + TRIAL_STEP);
        }
        if now < trial.next {
            return;
        }
        let pause = match now.saturating_duration_since(trial.since) {
            _ if trying => TRIAL_STEP,
            _ if costs => RETRY_METERED,
            age if age < LATELY => RETRY,
            _ => RETRY_LATER,
        };
        trial.next = now + pause;
        for id in &ids {
            connection.heartbeat(*id);
        }
        let over = over.map_or(ids, |id| vec![id]);
        for id in over {
            self.beat(now, connection, id, true);
        }
    }

    /// When [`Self::send_beats`] has something to do that no path's own heartbeats ask for.
    pub(super) fn pulse_timeout(&self, now: Instant) -> Option<Instant> {
        let pulses = self.pulses.as_ref()?;
        if pulses.due || self.paths.values().any(|path| path.owed) {
            return Some(now);
        }
        let call = self.untold(now).map(|at| pulses.called.map_or(at, |called| called + CALL).max(at));
        let trial = pulses.trial.map(|trial| trial.next);
        call.into_iter().chain(trial).min()
    }

    /// This end has come to think otherwise about a path, which the far end must know.
    pub(super) fn announce(&mut self) {
        if let Some(pulses) = &mut self.pulses {
            pulses.due = true;
        }
    }

    /// Gives up paths on which the library does not let data leave: after a change of the client's address
    /// that it could not validate, it never tries again. The client opens another path.
    pub(super) fn give_up_mute(&self, now: Instant, connection: &mut Connection) {
        if self.role == Role::Client || self.paths.len() < 2 {
            return;
        }
        // On others no data leaves while there are these.
        for (id, _) in self.paths.iter().filter(|(_, path)| path.told == PathStatus::Available) {
            let mute = connection.mute_since(*id);
            if mute.is_some_and(|since| now.saturating_duration_since(since) >= MUTE) {
                tracing::info!(
                    class = self.class.as_deref(),
                    path = id.0,
                    "a path takes no data since the client's address changed"
                );
                connection.close_path(now, *id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_as_they_were_written() {
        let paths = vec![
            (PathId(0), Echo::Heard, false),
            (PathId(5), Echo::Silent, true),
            (PathId(u32::MAX), Echo::Heard, true),
        ];
        let report = Report { active: true, ask: false, number: 0xfedc_ba98, paths };
        let prefix = datagram::prefix(4, 4);
        let bytes = report.encode(&prefix);
        let start = prefix.as_ref().len();
        assert_eq!(bytes[..start], *prefix.as_ref());
        assert_eq!(Report::decode(&bytes[start..]), Some(report));
        for len in 0..5 {
            assert_eq!(Report::decode(&bytes[start..start + len]), None, "{len} bytes");
        }
        let cut = &bytes[start..bytes.len() - 1];
        assert_eq!(Report::decode(cut), None, "cut inside a path");
    }

    #[test]
    fn a_report_of_endless_paths_is_bounded() {
        let bytes = [vec![0; 5], vec![1; 500]].concat();
        assert_eq!(Report::decode(&bytes).map(|report| report.paths.len()), Some(MAX_PATHS));
    }
}
