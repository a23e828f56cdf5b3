//! What the far end says about a path: whether it hears this end there, and whether it wants data there.
//!
//! In: heartbeat reports, path status frames of peers that send no reports. Out: whether packets sent there
//! arrive, as far as is known. Always holds: a later report replaces an earlier one.

use mpvpn_quic::PathStatus;
use mpvpn_types::Instant;

use super::heartbeats::{Reception, ReportedPath};

/// The far end's view of one path.
#[derive(Debug, Default)]
pub(super) struct PeerView {
    /// Whether the far end hears this one there, if it said so.
    reception: Option<Reception>,
    /// Since when it says that it does not.
    unheard_since: Option<Instant>,
    /// Since when it wants no data there.
    refused_since: Option<Instant>,
    /// It asked for a sign of life there.
    owes_heartbeat: bool,
}

impl PeerView {
    /// Takes a path status frame; whether the far end has just begun to want no data there.
    pub(super) fn on_status(&mut self, now: Instant, status: PathStatus) -> bool {
        self.refused_since = match status {
            PathStatus::Available => None,
            PathStatus::Backup => self.refused_since.or(Some(now)),
        };
        self.refused_since == Some(now)
    }

    /// Takes what a report says about the path, if it says anything; `ask`: the far end wants signs of life
    /// where it hears nothing. Returns whether anything is different.
    pub(super) fn on_report(&mut self, now: Instant, said: Option<&ReportedPath>, ask: bool) -> bool {
        let reception = said.map(|entry| entry.reception);
        let silent = reception == Some(Reception::Silent);
        let later = said.is_some_and(|entry| entry.later);
        let changed = self.reception != reception || later != self.refused_since.is_some();
        self.reception = reception;
        self.unheard_since = silent.then_some(self.unheard_since.unwrap_or(now));
        self.refused_since = later.then_some(self.refused_since.unwrap_or(now));
        self.owes_heartbeat |= ask && silent;
        changed
    }

    /// Since when the far end says that it does not hear this one there.
    pub(super) fn unheard_since(&self) -> Option<Instant> {
        self.unheard_since
    }

    /// When the far end asked for no data there, if it does.
    pub(super) fn refused_since(&self) -> Option<Instant> {
        self.refused_since
    }

    /// Whether the far end wants no data there.
    pub(super) fn refuses(&self) -> bool {
        self.refused_since.is_some()
    }

    /// Whether the far end waits for a sign of life there.
    pub(super) fn owes_heartbeat(&self) -> bool {
        self.owes_heartbeat
    }

    /// The same; it is about to get one.
    pub(super) fn take_owed_heartbeat(&mut self) -> bool {
        std::mem::take(&mut self.owes_heartbeat)
    }

    /// The far end does not hear this one there. Where it does not say so in reports, its wish for no data
    /// means that, until a packet sent since was acknowledged; `acked_sent`: when the newest one that was had
    /// been sent.
    pub(super) fn is_unheard(&self, reports: bool, acked_sent: impl FnOnce() -> Option<Instant>) -> bool {
        if reports {
            return self.reception == Some(Reception::Silent);
        }
        // What is sent in the same turn is sent after it was read.
        self.refused_since.is_some_and(|since| acked_sent().is_none_or(|acked| acked < since))
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
    fn a_report_says_since_when_nothing_is_heard_until_one_says_otherwise() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        assert!(view.on_report(start, Some(&entry(Reception::Silent, false)), false));
        assert!(!view.on_report(start + MS, Some(&entry(Reception::Silent, false)), false), "nothing new");
        assert_eq!(view.unheard_since(), Some(start));
        assert!(view.is_unheard(true, || None));
        assert!(view.on_report(start + MS, Some(&entry(Reception::Heard, true)), false));
        assert_eq!((view.unheard_since(), view.refuses()), (None, true));
        assert!(view.on_report(start + MS, None, false), "a report without the path says nothing about it");
        assert_eq!((view.refuses(), view.is_unheard(true, || None)), (false, false));
    }

    #[test]
    fn a_sign_of_life_is_owed_once_where_the_far_end_hears_nothing() {
        let (mut view, now) = (PeerView::default(), Instant::now());
        view.on_report(now, Some(&entry(Reception::Heard, false)), true);
        assert!(!view.owes_heartbeat());
        view.on_report(now, Some(&entry(Reception::Silent, false)), true);
        view.on_report(now, Some(&entry(Reception::Silent, false)), false);
        assert!(view.owes_heartbeat() && view.take_owed_heartbeat() && !view.take_owed_heartbeat());
    }

    #[test]
    fn without_reports_a_refusal_means_silence_until_a_later_packet_is_acknowledged() {
        let (mut view, start) = (PeerView::default(), Instant::now());
        assert!(view.on_status(start, PathStatus::Backup));
        assert!(!view.on_status(start + MS, PathStatus::Backup), "it is known already");
        assert!(view.is_unheard(false, || None));
        assert!(!view.is_unheard(false, || Some(start)), "sent in the same turn, after it was read");
        view.on_status(start + MS, PathStatus::Available);
        assert!(!view.is_unheard(false, || None));
    }
}
