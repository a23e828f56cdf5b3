//! Collects changes of paths for the event log.
//!
//! In: state changes of paths, opened and closed paths, changes of capacity. Out: [`PathEvent`]s, by
//! [`PathEvents::take`]. Always holds: at most [`MAX_WAITING_EVENTS`] events wait; further ones are dropped.

use std::{collections::BTreeMap, mem, net::SocketAddr};

use mpvpn_path::{PathState, Placement, StateReason};
use mpvpn_types::{Instant, PathId};

use super::{path::PathEntry, path_table::PathTable};
use crate::{FailureReason, PathChange, PathEvent, PathFailure, Reinjected};

/// Maximum number of events that wait. The owner of a connection takes events after each batch of packets;
/// the limit bounds memory for owners that take none, such as [`crate::Forwarder`]. Smaller: events of a
/// batch are dropped.
const MAX_WAITING_EVENTS: usize = 64;

/// The events of the paths of one connection.
#[derive(Debug, Default)]
pub(crate) struct PathEvents {
    waiting: Vec<PathEvent>,
    /// When each path that is down failed.
    failed_since: BTreeMap<PathId, Instant>,
}

impl PathEvents {
    /// The state of a path changed from `before`; `reinjected` says what was sent again on other paths.
    pub(super) fn on_state(
        &mut self,
        now: Instant,
        id: PathId,
        before: PathState,
        reinjected: Reinjected,
        paths: &PathTable,
    ) {
        let Some(path) = paths.get(id) else { return };
        let change = match (before, path.usage.state) {
            // The event of the TCP connection says why it ended; the link keeps its carrier.
            (_, PathState::Down) if path.is_inside_tcp() && !path.liveness.has_carrier() => {
                PathChange::Closed
            }
            (_, PathState::Down) => {
                self.failed_since.insert(id, now);
                let working = paths.iter().filter(|(other, path)| *other != id && path.works()).count();
                PathChange::Failed(PathFailure { reason: reason_of(now, path), reinjected, working })
            }
            (PathState::Down, _) => {
                let since = self.failed_since.remove(&id).unwrap_or(now);
                PathChange::Recovered(now.saturating_duration_since(since))
            }
            (_, PathState::Active) => PathChange::Active,
            _ => PathChange::Standby(match path.usage.placement {
                Placement::Active => "kept for later by the client",
                placement => placement.as_str(),
            }),
        };
        self.push(id, path, change);
    }

    /// A path was validated.
    pub(super) fn on_opened(&mut self, id: PathId, remote: Option<SocketAddr>, paths: &PathTable) {
        if let Some(path) = paths.get(id) {
            // Inside TCP, that is the address of a socket of this machine.
            let remote = remote.filter(|_| !path.is_inside_tcp());
            self.push(id, path, PathChange::Opened(remote));
        }
    }

    /// A path was closed. One that had failed before is not reported again.
    pub(super) fn on_closed(&mut self, id: PathId, path: &PathEntry) {
        self.failed_since.remove(&id);
        if path.usage.state != PathState::Down {
            self.push(id, path, PathChange::Closed);
        }
    }

    /// Reports changes of the measured capacity of links. Connections of other classes share the shapers;
    /// only the first connection that asks reports a change.
    pub(super) fn on_measured(&mut self, paths: &PathTable) {
        for (id, path) in paths.iter() {
            let change = path.policy.shaper.as_ref().and_then(|seat| seat.shaper().take_capacity_change());
            if let Some(change) = change {
                self.push(id, path, PathChange::Capacity(change));
            }
        }
    }

    fn push(&mut self, id: PathId, path: &PathEntry, change: PathChange) {
        if self.waiting.len() < MAX_WAITING_EVENTS {
            self.waiting.push(PathEvent { path: id, link: path.link(), change });
        }
    }

    /// The events since the last call, in order.
    pub(crate) fn take(&mut self) -> Vec<PathEvent> {
        mem::take(&mut self.waiting)
    }
}

fn reason_of(now: Instant, path: &PathEntry) -> FailureReason {
    let silence = now.saturating_duration_since(path.liveness.last_received());
    match path.liveness.reason() {
        _ if !path.liveness.has_carrier() => FailureReason::NoCarrier,
        StateReason::Silent { missed } => FailureReason::Silent(silence, missed),
        _ if !path.liveness.is_heard(now) => FailureReason::Silent(silence, path.liveness.missed(now)),
        // This end receives on the path, so the peer must have reported that it does not.
        _ => {
            let since = path.peer.unheard_since.or(path.peer.refused_since).unwrap_or(now);
            FailureReason::Unheard(now.saturating_duration_since(since))
        }
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_path::LivenessConfig;
    use mpvpn_types::{Duration, LinkId};

    use super::*;
    use crate::multipath::{
        Role,
        policy::{PathPolicy, PolicyInForce},
        usage::Evidence,
    };

    const MS: Duration = Duration::from_millis(1);

    fn table(now: Instant, paths: u32) -> PathTable {
        let mut table = PathTable::new(now);
        for id in 0..paths {
            let policy = PolicyInForce::new(PathPolicy::default(), false);
            table.insert(
                now,
                PathId(id),
                PathEntry::new(now, Role::Client, LinkId(id as u16), false, policy),
            );
        }
        table
    }

    fn judge(paths: &mut PathTable, id: PathId, alive: bool) -> PathState {
        let evidence = Evidence { alive, unheard: false, refused: false, peer_unknown: false };
        paths.get_mut(id).unwrap().usage.judge(evidence).previous_state.expect("another state")
    }

    #[test]
    fn a_silent_path_fails_with_the_measured_silence_and_recovers_after_a_time() {
        let start = Instant::now();
        let (mut paths, mut events, id) = (table(start, 2), PathEvents::default(), PathId(1));
        let path = paths.get_mut(id).unwrap();
        path.liveness.set_config(start, LivenessConfig::default());
        path.liveness.set_measurements(24 * MS, MS, 0.0);
        path.liveness.on_received(start + 10 * MS);
        let mut at = start;
        while path.liveness.is_alive() {
            at += MS;
            path.liveness.on_traffic(at);
            path.liveness.poll(at);
        }
        let before = judge(&mut paths, id, false);
        let reinjected = Reinjected { packets: 3, stream_bytes: 5000 };
        events.on_state(at, id, before, reinjected, &paths);
        let reason = FailureReason::Silent(at - start - 10 * MS, 3);
        let failure = PathFailure { reason, reinjected, working: 1 };
        assert_eq!(
            events.take(),
            [PathEvent { path: id, link: LinkId(1), change: PathChange::Failed(failure) }]
        );
        let before = judge(&mut paths, id, true);
        events.on_state(at + 700 * MS, id, before, Reinjected::default(), &paths);
        let changes: Vec<_> = events.take().into_iter().map(|event| event.change).collect();
        assert_eq!(changes, [PathChange::Recovered(700 * MS)]);
    }

    #[test]
    fn a_path_that_failed_is_closed_without_a_further_event() {
        let now = Instant::now();
        let (mut paths, mut events) = (table(now, 2), PathEvents::default());
        let before = judge(&mut paths, PathId(0), false);
        events.on_state(now, PathId(0), before, Reinjected::default(), &paths);
        assert_eq!(events.take().len(), 1);
        for id in [PathId(0), PathId(1)] {
            let closed = paths.remove(now, id).unwrap();
            events.on_closed(id, &closed);
        }
        let changes: Vec<_> = events.take().into_iter().map(|event| (event.path, event.change)).collect();
        assert_eq!(changes, [(PathId(1), PathChange::Closed)]);
    }

    #[test]
    fn a_tcp_connection_that_ends_closes_its_path_and_is_no_lost_carrier() {
        let now = Instant::now();
        let (mut paths, mut events, id) = (PathTable::new(now), PathEvents::default(), PathId(0));
        let policy = PolicyInForce::new(PathPolicy::default(), false);
        paths.insert(now, id, PathEntry::new(now, Role::Client, LinkId(0), true, policy));
        events.on_opened(id, "127.0.0.1:40000".parse().ok(), &paths);
        paths.get_mut(id).unwrap().liveness.on_carrier(now, false);
        let before = judge(&mut paths, id, false);
        events.on_state(now, id, before, Reinjected::default(), &paths);
        let changes: Vec<_> = events.take().into_iter().map(|event| event.change).collect();
        assert_eq!(changes, [PathChange::Opened(None), PathChange::Closed]);
    }

    #[test]
    fn waiting_events_are_bounded() {
        let now = Instant::now();
        let (paths, mut events) = (table(now, 1), PathEvents::default());
        for _ in 0..1000 {
            events.on_opened(PathId(0), None, &paths);
        }
        assert_eq!(events.take().len(), MAX_WAITING_EVENTS);
    }
}
