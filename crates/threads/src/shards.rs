//! How the shards of a process talk to each other, at client and server.
//!
//! In: messages between shard 0 and the others, and requests for the status or the flows of all. Out: the
//! messages, and for each request one answer made of the reports of all shards.
//!
//! Always holds: no shard waits for another; messages are rare and never lost; an answer leaves out a shard
//! that does not report in time; shard 0 notices the end of a thread, even by panic.

mod mailbox;
mod rounds;
mod threads;

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use mpvpn_error::RunError;
use mpvpn_input::role::Role;
use mpvpn_os::poll::PollWaker;
use mpvpn_status::{FlowList, Overview};
use tokio::sync::oneshot;

use crate::service_manager::LoopActivity;
pub use mailbox::{Inbox, Outbox, mailbox};
use rounds::ReportRounds;
use threads::ShardThreads;

/// A message between shards. `M`: messages that only a client or only a server has. `R`: a shard's report for
/// the status.
#[derive(Debug)]
pub enum ShardMessage<M, R> {
    /// A message of the client or of the server.
    Specific(M),
    /// From shard 0: report your status for this round.
    ReportStatus(u64),
    /// To shard 0: a report for this round.
    Status(u64, Box<R>),
    /// From shard 0: report for an overview of this round, with paths of these sessions only.
    ReportOverview(u64, Arc<BTreeSet<u64>>),
    /// To shard 0: a report for an overview of this round.
    Overview(u64, Box<R>),
    /// From shard 0: report your flows for this round.
    ReportFlows(u64),
    /// To shard 0: the flows for this round.
    Flows(u64, FlowList),
    /// From shard 0: close all connections and end.
    End,
    /// To the first shard: this thread has ended.
    Ended,
}

/// An event that shard 0 itself has to handle.
#[derive(Debug, PartialEq, Eq)]
pub enum ShardEvent<M> {
    /// A message of the client or of the server.
    Specific(M),
    /// A thread has ended; [`FirstShard::end`] says why.
    Ended,
}

/// Shard 0's end of all mailboxes. `A`: the status of the whole process, made of the reports.
pub struct FirstShard<M, R, A> {
    role: Role,
    outbox: Outbox<ShardMessage<M, R>>,
    inbox: Inbox<ShardMessage<M, R>>,
    threads: ShardThreads<M, R>,
    status: ReportRounds<R, A>,
    overviews: ReportRounds<R, Overview>,
    flows: ReportRounds<FlowList, FlowList>,
    /// How far the event loops of the other shards have come, by the names of their threads.
    pub activities: Vec<(String, LoopActivity)>,
}

impl<M: Send + 'static, R: Send + 'static, A: Clone> FirstShard<M, R, A> {
    /// No other shards yet. `wake` wakes shard 0.
    pub fn new(role: Role, wake: PollWaker) -> Self {
        let (outbox, inbox) = mailbox(wake);
        Self {
            role,
            threads: ShardThreads::new(outbox.clone()),
            outbox,
            inbox,
            status: ReportRounds::default(),
            overviews: ReportRounds::default(),
            flows: ReportRounds::default(),
            activities: Vec::new(),
        }
    }

    /// Adds a shard that `wake` wakes, and returns its end. Its thread must be started with [`Self::start`].
    pub fn add(&mut self, wake: PollWaker) -> OtherShard<M, R> {
        let (outbox, inbox) = mailbox(wake);
        self.threads.outboxes.push(outbox);
        OtherShard { inbox, first: self.outbox.clone() }
    }

    /// Starts the thread of a shard, whose event loop counts its iterations in `activity`.
    pub fn start(
        &mut self,
        shard: u8,
        activity: LoopActivity,
        work: impl FnOnce() -> Result<(), RunError> + Send + 'static,
    ) -> Result<(), RunError> {
        let name = format!("shard {shard}");
        self.activities.push((name.clone(), activity));
        self.threads.start(name, work)
    }

    /// The mailboxes of all shards, in order.
    pub fn outboxes(&self) -> Vec<Outbox<ShardMessage<M, R>>> {
        std::iter::once(&self.outbox).chain(&self.threads.outboxes).cloned().collect()
    }

    /// Sends a message to all other shards.
    pub fn send(&self, message: impl Fn() -> M) {
        self.threads.send(|| ShardMessage::Specific(message()));
    }

    /// Requests the status of the other shards for `reply`. Returns the number of the round, for which shard
    /// 0's own report is due, too; `None` if the request joins a round that is already running.
    pub fn ask_status(&mut self, now: Instant, reply: oneshot::Sender<A>) -> Option<u64> {
        let round = self.status.ask(now, reply)?;
        self.threads.send(|| ShardMessage::ReportStatus(round));
        Some(round)
    }

    /// Adds shard 0's own report.
    pub fn report_status(&mut self, round: u64, report: R) {
        self.status.add_report(round, report);
    }

    /// Like [`Self::ask_status`], for an overview with the paths of the sessions in `shown`.
    pub fn ask_overview(
        &mut self,
        now: Instant,
        shown: Arc<BTreeSet<u64>>,
        reply: oneshot::Sender<Overview>,
    ) -> Option<u64> {
        let round = self.overviews.ask(now, reply)?;
        self.threads.send(|| ShardMessage::ReportOverview(round, Arc::clone(&shown)));
        Some(round)
    }

    /// Adds shard 0's own report for an overview.
    pub fn report_overview(&mut self, round: u64, report: R) {
        self.overviews.add_report(round, report);
    }

    /// Like [`Self::ask_status`], for the flows.
    pub fn ask_flows(&mut self, now: Instant, reply: oneshot::Sender<FlowList>) -> Option<u64> {
        let round = self.flows.ask(now, reply)?;
        self.threads.send(|| ShardMessage::ReportFlows(round));
        Some(round)
    }

    /// Adds shard 0's own flows.
    pub fn report_flows(&mut self, round: u64, flows: FlowList) {
        self.flows.add_report(round, flows);
    }

    /// When [`Self::answer`] must be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let rounds = [self.status.poll_timeout(), self.overviews.poll_timeout(), self.flows.poll_timeout()];
        rounds.into_iter().flatten().min()
    }

    /// The next message that shard 0 has to handle. Reports are collected without being returned.
    pub fn next_event(&mut self) -> Option<ShardEvent<M>> {
        loop {
            match self.inbox.next()? {
                ShardMessage::Specific(message) => return Some(ShardEvent::Specific(message)),
                ShardMessage::Status(round, report) => self.status.add_report(round, *report),
                ShardMessage::Overview(round, report) => self.overviews.add_report(round, *report),
                ShardMessage::Flows(round, flows) => self.flows.add_report(round, flows),
                ShardMessage::Ended => return Some(ShardEvent::Ended),
                ShardMessage::ReportStatus(_)
                | ShardMessage::ReportOverview(..)
                | ShardMessage::ReportFlows(_)
                | ShardMessage::End => {}
            }
        }
    }

    /// Answers the requests for which all shards have reported or whose timeout has passed. `status` combines
    /// the reports, in the order in which they came.
    pub fn answer(&mut self, now: Instant, status: impl FnOnce(Vec<R>) -> A) {
        let all = self.threads.outboxes.len() + 1;
        self.status.answer(now, all, status);
        self.flows.answer(now, all, |lists| {
            let mut flows = FlowList::new(self.role);
            lists.into_iter().for_each(|list| flows.add(list));
            flows
        });
    }

    /// Like [`Self::answer`], for overviews.
    pub fn answer_overviews(&mut self, now: Instant, overview: impl FnOnce(Vec<R>) -> Overview) {
        self.overviews.answer(now, self.threads.outboxes.len() + 1, overview);
    }

    /// Ends all other shards and waits for their threads; returns the first error.
    pub fn end(self) -> Result<(), RunError> {
        self.threads.end()
    }
}

/// Any other shard's end.
#[derive(Debug)]
pub struct OtherShard<M, R> {
    inbox: Inbox<ShardMessage<M, R>>,
    first: Outbox<ShardMessage<M, R>>,
}

impl<M, R> OtherShard<M, R> {
    /// The next message.
    pub fn next(&self) -> Option<ShardMessage<M, R>> {
        self.inbox.next()
    }

    /// Sends a message to shard 0.
    pub fn send(&self, message: M) {
        self.first.send(ShardMessage::Specific(message));
    }

    /// Reports the status for this round.
    pub fn report_status(&self, round: u64, report: R) {
        self.first.send(ShardMessage::Status(round, Box::new(report)));
    }

    /// Reports for an overview of this round.
    pub fn report_overview(&self, round: u64, report: R) {
        self.first.send(ShardMessage::Overview(round, Box::new(report)));
    }

    /// Reports the flows for this round.
    pub fn report_flows(&self, round: u64, flows: FlowList) {
        self.first.send(ShardMessage::Flows(round, flows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type First = FirstShard<&'static str, u32, u32>;

    fn first() -> (First, PollWaker) {
        let wake = PollWaker::new().unwrap();
        (First::new(Role::Client, wake.clone()), wake)
    }

    fn sum(reports: Vec<u32>) -> u32 {
        reports.into_iter().sum()
    }

    #[test]
    fn a_status_is_answered_once_every_shard_has_reported() {
        let (mut first, wake) = first();
        let others = [first.add(PollWaker::new().unwrap()), first.add(PollWaker::new().unwrap())];
        let (now, (reply, mut answer)) = (Instant::now(), oneshot::channel());
        let round = first.ask_status(now, reply).unwrap();
        first.report_status(round, 1);
        for (other, report) in others.iter().zip([10, 100]) {
            first.answer(now, sum);
            assert!(answer.try_recv().is_err(), "a report is missing");
            let Some(ShardMessage::ReportStatus(asked)) = other.next() else { panic!("not asked") };
            other.report_status(asked, report);
            assert_eq!(first.next_event(), None, "a report is no news");
        }
        assert!(wake.drain());
        first.answer(now, sum);
        assert_eq!((answer.try_recv(), first.poll_timeout()), (Ok(111), None));
    }

    #[test]
    fn a_shard_that_does_not_report_in_time_is_left_out() {
        let (mut first, _wake) = first();
        let _silent = first.add(PollWaker::new().unwrap());
        let (reply, mut answer) = oneshot::channel();
        let round = first.ask_flows(Instant::now(), reply).unwrap();
        first.report_flows(round, FlowList::new(Role::Client));
        let deadline = first.poll_timeout().unwrap();
        first.answer(deadline, sum);
        assert!(answer.try_recv().is_ok());
    }

    #[test]
    fn messages_reach_all_others_and_the_end_of_a_thread_is_news() {
        let (mut first, wake) = first();
        let other = first.add(PollWaker::new().unwrap());
        first.send(|| "hello");
        first
            .start(1, LoopActivity::default(), move || {
                let Some(ShardMessage::Specific("hello")) = other.next() else { panic!("not told") };
                other.send("hello yourself");
                Ok(())
            })
            .unwrap();
        let mut events = Vec::new();
        while events.len() < 2 {
            events.extend(first.next_event());
            std::thread::yield_now();
        }
        assert_eq!(events, [ShardEvent::Specific("hello yourself"), ShardEvent::Ended]);
        while !wake.drain() {
            std::thread::yield_now();
        }
        first.end().unwrap();
    }
}
