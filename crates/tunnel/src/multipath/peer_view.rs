//! The peer's view of a path: whether it receives packets of this end there, and whether it wants data there.
//!
//! In: heartbeat reports, or path status frames of peers that send no reports. Out: whether packets sent on
//! the path arrive, as far as is known. Always holds: a later report replaces an earlier one.

use mpvpn_quic::PathStatus;
use mpvpn_types::Instant;

use super::heartbeats::{Reception, ReportedPath};

/// How the peer tells whether packets of this end arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reporting {
    /// By reports about several paths that work: the last one counts.
    Often,
    /// By reports that leave only while no data is answered, as one path works: the last one counts until
    /// a packet that was sent since then is acknowledged.
    Seldom,
    /// By the status "backup" of a path, likewise.
    Never,
}

impl Reporting {
    /// How the peer tells it of a path beside which another one works, or none. Where another one does, both
    /// would work if this one did, and the peer, which reports at once what changes, knows better than one
    /// acknowledged packet whether it hears enough there.
    pub(super) fn beside(self, another_works: bool) -> Self {
        match self {
            Self::Seldom if another_works => Self::Often,
            other => other,
        }
    }
}

/// The peer's view of one path.
#[derive(Debug, Default)]
pub(super) struct PeerView {
    /// Whether the peer receives packets on the path, as last reported.
    reception: Option<Reception>,
    /// Since when the peer reports that it receives nothing on the path.
    pub(super) unheard_since: Option<Instant>,
    /// Since when the peer wants no data on the path.
    pub(super) refused_since: Option<Instant>,
    /// Whether the peer asked for a heartbeat on the path.
    pub(super) heartbeat_requested: bool,
}

impl PeerView {
    /// Takes a path status frame; returns whether the peer wants no data on the path since now.
    pub(super) fn on_status(&mut self, now: Instant, status: PathStatus) -> bool {
        self.refused_since = match status {
            PathStatus::Available => None,
            PathStatus::Backup => self.refused_since.or(Some(now)),
        };
        self.refused_since == Some(now)
    }

    /// Takes the entry of the path in a report, if it has one. `ask`: the peer asks for heartbeats on paths
    /// on which it receives nothing. Returns whether the view has changed.
    pub(super) fn on_report(&mut self, now: Instant, said: Option<&ReportedPath>, ask: bool) -> bool {
        let reception = said.map(|entry| entry.reception);
        let silent = reception == Some(Reception::Silent);
        let later = said.is_some_and(|entry| entry.later);
        let changed = self.reception != reception || later != self.refused_since.is_some();
        self.reception = reception;
        self.unheard_since = silent.then_some(self.unheard_since.unwrap_or(now));
        self.refused_since = later.then_some(self.refused_since.unwrap_or(now));
        self.heartbeat_requested |= ask && silent;
        changed
    }

    /// Whether the peer wants no data on the path.
    pub(super) fn refuses_data(&self) -> bool {
        self.refused_since.is_some()
    }

    /// Returns the same and resets it, as a heartbeat is about to be sent.
    pub(super) fn take_heartbeat_request(&mut self) -> bool {
        std::mem::take(&mut self.heartbeat_requested)
    }

    /// Whether packets of this end do not arrive on the path; `acked_sent` returns when the newest
    /// acknowledged packet was sent.
    pub(super) fn is_unheard(
        &self,
        reporting: Reporting,
        acked_sent: impl FnOnce() -> Option<Instant>,
    ) -> bool {
        let since = match reporting {
            Reporting::Often => return self.reception == Some(Reception::Silent),
            Reporting::Seldom => self.unheard_since,
            Reporting::Never => self.refused_since,
        };
        // A packet sent in the same event-loop iteration was sent after the report was read.
        since.is_some_and(|since| acked_sent().is_none_or(|acked| acked < since))
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_types::{Duration, PathId};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn entry(reception: Reception, later: bool) -> ReportedPath {
        ReportedPath { id: PathId(3), reception, later }
    }

    #[test]
    fn a_path_is_unheard_from_the_first_report_that_says_so_until_one_denies_it() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        assert!(view.on_report(start, Some(&entry(Reception::Silent, false)), false));
        assert!(!view.on_report(start + MS, Some(&entry(Reception::Silent, false)), false), "nothing new");
        assert_eq!(view.unheard_since, Some(start));
        assert!(view.is_unheard(Reporting::Often, || None));
        assert!(view.on_report(start + MS, Some(&entry(Reception::Heard, true)), false));
        assert_eq!((view.unheard_since, view.refuses_data()), (None, true));
        assert!(view.on_report(start + MS, None, false), "a report without the path says nothing about it");
        assert_eq!((view.refuses_data(), view.is_unheard(Reporting::Often, || None)), (false, false));
    }

    #[test]
    fn on_the_only_path_an_acknowledgement_denies_that_the_peer_hears_nothing() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        view.on_report(start, Some(&entry(Reception::Silent, false)), false);
        assert!(view.is_unheard(Reporting::Seldom, || Some(start - MS)), "sent before the report arrived");
        assert!(!view.is_unheard(Reporting::Seldom, || Some(start + MS)));
        assert!(view.is_unheard(Reporting::Often, || Some(start + MS)), "other reports will follow");
    }

    #[test]
    fn beside_a_path_that_works_the_report_counts_whatever_is_acknowledged() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        view.on_report(start, Some(&entry(Reception::Silent, false)), false);
        let is_unheard =
            |another_works| view.is_unheard(Reporting::Seldom.beside(another_works), || Some(start + MS));
        assert_eq!([true, false].map(is_unheard), [true, false]);
    }

    #[test]
    fn a_heartbeat_is_requested_once_where_the_peer_receives_nothing() {
        let (mut view, now) = (PeerView::default(), Instant::now());
        view.on_report(now, Some(&entry(Reception::Heard, false)), true);
        assert!(!view.heartbeat_requested);
        view.on_report(now, Some(&entry(Reception::Silent, false)), true);
        view.on_report(now, Some(&entry(Reception::Silent, false)), false);
        assert!(view.heartbeat_requested && view.take_heartbeat_request() && !view.take_heartbeat_request());
    }

    #[test]
    fn without_reports_a_refusal_means_silence_until_a_later_packet_is_acknowledged() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        assert!(view.on_status(start, PathStatus::Backup));
        assert!(!view.on_status(start + MS, PathStatus::Backup), "it is known already");
        assert!(view.is_unheard(Reporting::Never, || None));
        assert!(
            !view.is_unheard(Reporting::Never, || Some(start)),
            "sent in the same turn, after it was read"
        );
        view.on_status(start + MS, PathStatus::Available);
        assert!(!view.is_unheard(Reporting::Never, || None));
    }
}
