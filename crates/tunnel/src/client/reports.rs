//! Events, changes and counters of a client for its edge.
//!
//! In: events of the tunnel, counters of connections that were closed. Out: [`ClientEvent`]s,
//! [`ClientChange`]s and the [`ClientReport`]. Always holds: an assignment is reported once, until it
//! changes; counters go on after a reconnect.

use std::collections::VecDeque;

use super::{Assignment, ClientEvent, ClientReport, ClientState};
use crate::{
    SecretSharing, TrafficCounters,
    events::{Changes, ClientChange},
    handshake::MAX_REFUSED_BACKOFF,
    multipath::MultipathConnection,
};
use mpvpn_types::{Duration, Instant};

#[derive(Debug, Default)]
pub(super) struct Reports {
    pub(super) events: VecDeque<ClientEvent>,
    pub(super) changes: Changes<ClientChange>,
    /// The last assignment.
    pub(super) assignment: Option<Assignment>,
    /// How often the session was resumed.
    pub(super) resumed: u32,
    /// Whether another machine has shown the secret of the session.
    pub(super) sharing: SecretSharing,
    /// Totals of closed connections.
    closed_counters: TrafficCounters,
    closed_drops: u64,
    /// Why the last connection was lost, or refused; empty if no reason is known.
    down_reason: String,
    /// When the server last refused this client, unless something else has happened since.
    pub(super) refused_at: Option<Instant>,
}

/// A refusal counts for this long: until the server was asked again twice.
const REFUSAL_LIFETIME: Duration = MAX_REFUSED_BACKOFF.saturating_mul(2);

impl Reports {
    /// Reports that the tunnel is up.
    pub(super) fn up(&mut self, assignment: Assignment) {
        self.refused_at = None;
        self.assignment = Some(assignment.clone());
        self.events.push_back(ClientEvent::Up(assignment));
    }

    /// Reports an assignment that changed while the tunnel is up.
    pub(super) fn reassign(&mut self, assignment: Assignment) {
        if self.assignment.as_ref() != Some(&assignment) {
            self.assignment = Some(assignment.clone());
            self.events.push_back(ClientEvent::AssignmentChanged(assignment));
        }
    }

    /// Reports that the connection is lost, for this reason.
    pub(super) fn down(&mut self, reason: String) {
        self.refused_at = None;
        self.events.push_back(ClientEvent::Down(reason.clone()));
        self.down_reason = reason;
    }

    /// Reports that the server refuses this client, for this reason, unless it was the last to be reported.
    pub(super) fn refused(&mut self, now: Instant, reason: String) {
        if !self.is_refused(now) || self.down_reason != reason {
            self.down(reason);
        }
        self.refused_at = Some(now);
    }

    /// Whether the server has refused this client when it was asked last.
    pub(super) fn is_refused(&self, now: Instant) -> bool {
        self.refused_at.is_some_and(|at| now.saturating_duration_since(at) < REFUSAL_LIFETIME)
    }

    /// Why the last connection was lost; empty if no reason is known.
    pub(super) fn down_reason(&self) -> &str {
        &self.down_reason
    }

    /// Forgets the reason: no connection is wanted.
    pub(super) fn clear_reason(&mut self) {
        self.down_reason.clear();
    }

    /// Takes the path events of the connection in use.
    pub(super) fn take_path_events(&mut self, multipath: &mut MultipathConnection) {
        multipath.events.take().into_iter().for_each(|event| self.changes.push(ClientChange::Path(event)));
    }

    /// Adds the counters of a connection that is closed.
    pub(super) fn add_closed(&mut self, multipath: &MultipathConnection) {
        self.closed_counters += multipath.traffic.counters;
        self.closed_drops += multipath.drops();
    }

    /// The report while there is no connection.
    pub(super) fn report(&self, state: ClientState) -> ClientReport {
        ClientReport {
            state,
            reason: self.down_reason.clone(),
            assignment: self.assignment.clone(),
            resumed: self.resumed,
            counters: self.closed_counters,
            drops: self.closed_drops,
            ..ClientReport::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(address: &str) -> Assignment {
        let addresses = vec![address.parse().unwrap()];
        Assignment { addresses, ..Assignment::default() }
    }

    #[test]
    fn an_assignment_is_reported_again_only_when_it_changes() {
        let mut reports = Reports::default();
        reports.up(assignment("10.0.0.2/24"));
        reports.reassign(assignment("10.0.0.2/24"));
        reports.reassign(assignment("10.0.0.3/24"));
        assert_eq!(
            Vec::from(reports.events),
            [
                ClientEvent::Up(assignment("10.0.0.2/24")),
                ClientEvent::AssignmentChanged(assignment("10.0.0.3/24"))
            ]
        );
    }

    #[test]
    fn the_reason_of_the_last_loss_is_reported_until_none_is_wanted() {
        let mut reports = Reports::default();
        reports.down("silence".to_owned());
        assert_eq!(reports.report(ClientState::Connecting).reason, "silence");
        assert_eq!(reports.events.pop_front(), Some(ClientEvent::Down("silence".to_owned())));
        reports.clear_reason();
        assert_eq!(reports.report(ClientState::Asleep).reason, "");
    }
}
