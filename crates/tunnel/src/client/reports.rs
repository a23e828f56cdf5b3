//! What a client tells its edge: events, changes, and what its connections have come to.
//!
//! Always holds: an assignment is told once, until it changes; what was counted on a connection counts on after it.

use std::collections::VecDeque;

use super::{Assignment, ClientEvent, ClientReport, ClientState};
use crate::{
    TrafficCounters, TrafficRates,
    events::{Changes, ClientChange},
    multipath::MultipathConnection,
};
use mpvpn_types::Duration;

#[derive(Debug, Default)]
pub(super) struct Reports {
    pub(super) events: VecDeque<ClientEvent>,
    pub(super) changes: Changes<ClientChange>,
    /// What the server gave last.
    pub(super) assignment: Option<Assignment>,
    /// How often the session was taken up again.
    pub(super) resumed: u32,
    /// Of connections that are over.
    before: TrafficCounters,
    drops_before: u64,
    /// Why there was no connection last.
    down: String,
}

impl Reports {
    /// The tunnel works.
    pub(super) fn up(&mut self, assignment: Assignment) {
        self.assignment = Some(assignment.clone());
        self.events.push_back(ClientEvent::Up(assignment));
    }

    /// What the server gives to a tunnel that works.
    pub(super) fn reassign(&mut self, assignment: Assignment) {
        if self.assignment.as_ref() != Some(&assignment) {
            self.assignment = Some(assignment.clone());
            self.events.push_back(ClientEvent::AssignmentChanged(assignment));
        }
    }

    /// There is no connection, for this reason.
    pub(super) fn down(&mut self, reason: String) {
        self.events.push_back(ClientEvent::Down(reason.clone()));
        self.down = reason;
    }

    /// Why there was no connection last; empty if nothing is known.
    pub(super) fn why_down(&self) -> &str {
        &self.down
    }

    /// There is no connection because none is wanted.
    pub(super) fn clear_reason(&mut self) {
        self.down.clear();
    }

    /// What has changed about the paths of the connection in use.
    pub(super) fn take_path_events(&mut self, multipath: &mut MultipathConnection) {
        multipath.take_events().into_iter().for_each(|event| self.changes.push(ClientChange::Path(event)));
    }

    /// A connection is over.
    pub(super) fn count(&mut self, multipath: &MultipathConnection) {
        self.before.tx_bytes += multipath.counters().tx_bytes;
        self.before.rx_bytes += multipath.counters().rx_bytes;
        self.drops_before += multipath.drops();
    }

    /// What is known while there is no connection.
    pub(super) fn report(&self, state: ClientState) -> ClientReport {
        ClientReport {
            state,
            reason: self.down.clone(),
            assignment: self.assignment.clone(),
            resumed: self.resumed,
            counters: self.before,
            rates: TrafficRates::default(),
            drops: self.drops_before,
            sojourn: Duration::ZERO,
            resequencing: None,
            peer_cc: None,
            per_flow: false,
            stream_flows: 0,
            udp_flows: 0,
            datagram_flows: 0,
            paths: Vec::new(),
            mtu: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(address: &str) -> Assignment {
        let addresses = vec![address.parse().unwrap()];
        Assignment { addresses, additional: Vec::new(), routes: Vec::new(), dns: Vec::new() }
    }

    #[test]
    fn an_assignment_is_told_again_only_when_it_changes() {
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
