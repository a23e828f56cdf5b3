//! Collects the reports of all shards for one request.

use std::time::Instant;

use mpvpn_types::Duration;
use tokio::sync::oneshot;

/// An answer leaves out shards that have not reported by then. Longer: a stalled shard delays `mpvpn status`.
/// Shorter: busy shards are missing. Chosen.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Requests for which each shard reports an `R`, and which are answered with an `A`. A request during a round
/// joins that round.
pub(super) struct ReportRounds<R, A> {
    last_number: u64,
    current: Option<Round<R, A>>,
}

struct Round<R, A> {
    replies: Vec<oneshot::Sender<A>>,
    reports: Vec<R>,
    deadline: Instant,
}

impl<R, A> Default for ReportRounds<R, A> {
    fn default() -> Self {
        Self { last_number: 0, current: None }
    }
}

impl<R, A: Clone> ReportRounds<R, A> {
    /// Adds a request. Returns the number of a new round if the shards must be asked.
    pub(super) fn ask(&mut self, now: Instant, reply: oneshot::Sender<A>) -> Option<u64> {
        if let Some(round) = &mut self.current {
            round.replies.push(reply);
            return None;
        }
        self.last_number += 1;
        self.current =
            Some(Round { replies: vec![reply], reports: Vec::new(), deadline: now + REPORT_TIMEOUT });
        Some(self.last_number)
    }

    /// Adds a shard's report. A report for an earlier round is dropped.
    pub(super) fn add_report(&mut self, number: u64, report: R) {
        if let Some(round) = self.current.as_mut().filter(|_| number == self.last_number) {
            round.reports.push(report);
        }
    }

    /// When the round's timeout passes.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.current.as_ref().map(|round| round.deadline)
    }

    /// Answers with what `answer` makes of the reports, if there are `all` of them or the timeout has passed.
    pub(super) fn answer(&mut self, now: Instant, all: usize, answer: impl FnOnce(Vec<R>) -> A) {
        let is_over = |round: &mut Round<R, A>| round.reports.len() >= all || now >= round.deadline;
        let Some(round) = self.current.take_if(is_over) else { return };
        let answer = answer(round.reports);
        for reply in round.replies {
            // The requester may have disconnected.
            let _ = reply.send(answer.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_ask_are_told_once_every_shard_has_reported_or_time_is_up() {
        let (now, mut rounds) = (Instant::now(), ReportRounds::default());
        let (first, mut of_first) = oneshot::channel();
        let (second, mut of_second) = oneshot::channel();
        assert_eq!((rounds.ask(now, first), rounds.ask(now, second)), (Some(1), None));
        rounds.add_report(1, 5);
        rounds.add_report(0, 100);
        rounds.answer(now, 2, |_| panic!("one is missing"));
        rounds.add_report(1, 6);
        rounds.answer(now, 2, |reports| reports.iter().sum::<i32>());
        assert_eq!((of_first.try_recv(), of_second.try_recv()), (Ok(11), Ok(11)));
        let (third, mut of_third) = oneshot::channel();
        assert_eq!(rounds.ask(now, third), Some(2));
        let deadline = rounds.poll_timeout().unwrap();
        rounds.answer(deadline, 2, |reports| reports.iter().sum());
        assert_eq!((of_third.try_recv(), rounds.poll_timeout()), (Ok(0), None));
    }
}
