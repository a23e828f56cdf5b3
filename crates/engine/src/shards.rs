//! How the shards of a process talk to each other, alike at client and server.
//!
//! In: messages between the first shard and the others, and requests for the status or the flows of all. Out: the
//! messages, and for each request one answer made of the reports of all shards.
//!
//! Always holds: no shard waits for another; messages are rare and never lost; a shard that does not report in time is
//! left out of the answer; the end of a thread, by panic too, is noticed by the first shard.

mod mailbox;
mod rounds;
mod threads;

use std::time::Instant;

use mpvpn_control::status::{FlowList, Role};
use mpvpn_os::poll::PollWaker;
use tokio::sync::oneshot;

use crate::EngineError;
pub(crate) use mailbox::Outbox;
use mailbox::{Inbox, mailbox};
use rounds::ReportRounds;
use threads::ShardThreads;

/// A message between shards. `M`: what only a client, or only a server, says. `R`: a shard's report for the status.
#[derive(Debug)]
pub(crate) enum ShardMessage<M, R> {
    /// What only this kind of process says.
    Specific(M),
    /// From the first shard: report for the status, in the round of this number.
    ReportStatus(u64),
    /// To the first shard: the report.
    Status(u64, Box<R>),
    /// From the first shard: report the flows, in the round of this number.
    ReportFlows(u64),
    /// To the first shard: the flows.
    Flows(u64, FlowList),
    /// From the first shard: say good-bye to the peers and end.
    End,
    /// To the first shard: this thread has ended.
    Ended,
}

/// What the first shard has to act on itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ShardEvent<M> {
    /// What only this kind of process says.
    Specific(M),
    /// A thread has ended; [`FirstShard::end`] says why.
    Ended,
}

/// The first shard's end. `A`: the status of all, made of the reports.
pub(crate) struct FirstShard<M, R, A> {
    role: Role,
    outbox: Outbox<ShardMessage<M, R>>,
    inbox: Inbox<ShardMessage<M, R>>,
    threads: ShardThreads<M, R>,
    status: ReportRounds<R, A>,
    flows: ReportRounds<FlowList, FlowList>,
}

impl<M: Send + 'static, R: Send + 'static, A: Clone> FirstShard<M, R, A> {
    /// No other shards yet. `wake` is what the first shard waits for.
    pub(crate) fn new(role: Role, wake: PollWaker) -> Self {
        let (outbox, inbox) = mailbox(wake);
        Self {
            role,
            threads: ShardThreads::new(outbox.clone()),
            outbox,
            inbox,
            status: ReportRounds::default(),
            flows: ReportRounds::default(),
        }
    }

    /// The end of a further shard, which waits for `wake`; its thread is still to be started.
    pub(crate) fn add(&mut self, wake: PollWaker) -> OtherShard<M, R> {
        let (outbox, inbox) = mailbox(wake);
        self.threads.outboxes.push(outbox);
        OtherShard { inbox, first: self.outbox.clone() }
    }

    /// Starts the thread of a shard.
    pub(crate) fn start(
        &mut self,
        shard: u8,
        work: impl FnOnce() -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        self.threads.start(format!("shard {shard}"), work)
    }

    /// The mailboxes of all shards, in order.
    pub(crate) fn outboxes(&self) -> Vec<Outbox<ShardMessage<M, R>>> {
        std::iter::once(&self.outbox).chain(&self.threads.outboxes).cloned().collect()
    }

    /// Tells all others something.
    pub(crate) fn send(&self, message: impl Fn() -> M) {
        self.threads.send(|| ShardMessage::Specific(message()));
    }

    /// Asks the others for the status, on behalf of `reply`. Then the first shard's own report is due, too, in the round of
    /// this number; none if a round is under way already.
    pub(crate) fn ask_status(&mut self, now: Instant, reply: oneshot::Sender<A>) -> Option<u64> {
        let round = self.status.ask(now, reply)?;
        self.threads.send(|| ShardMessage::ReportStatus(round));
        Some(round)
    }

    /// The first shard's own report.
    pub(crate) fn report_status(&mut self, round: u64, report: R) {
        self.status.add_report(round, report);
    }

    /// Like [`Self::ask_status`], for the flows.
    pub(crate) fn ask_flows(&mut self, now: Instant, reply: oneshot::Sender<FlowList>) -> Option<u64> {
        let round = self.flows.ask(now, reply)?;
        self.threads.send(|| ShardMessage::ReportFlows(round));
        Some(round)
    }

    /// The first shard's own flows.
    pub(crate) fn report_flows(&mut self, round: u64, flows: FlowList) {
        self.flows.add_report(round, flows);
    }

    /// When [`Self::answer`] wants to be called at the latest.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.status.poll_timeout().into_iter().chain(self.flows.poll_timeout()).min()
    }

    /// The next message that the first shard has to act on. Reports are taken in passing.
    pub(crate) fn next(&mut self) -> Option<ShardEvent<M>> {
        loop {
            match self.inbox.next()? {
                ShardMessage::Specific(message) => return Some(ShardEvent::Specific(message)),
                ShardMessage::Status(round, report) => self.status.add_report(round, *report),
                ShardMessage::Flows(round, flows) => self.flows.add_report(round, flows),
                ShardMessage::Ended => return Some(ShardEvent::Ended),
                ShardMessage::ReportStatus(_) | ShardMessage::ReportFlows(_) | ShardMessage::End => {}
            }
        }
    }

    /// Answers the requests for which all shards have reported, or time is up. `status` makes the status of the reports, of
    /// which the first shard's comes first if it was the first to report.
    pub(crate) fn answer(&mut self, now: Instant, status: impl FnOnce(Vec<R>) -> A) {
        let all = self.threads.outboxes.len() + 1;
        self.status.answer(now, all, status);
        self.flows.answer(now, all, |lists| {
            let mut flows = FlowList::new(self.role);
            lists.into_iter().for_each(|list| flows.add(list));
            flows
        });
    }

    /// Tells all others to end, and waits for it; the first failure of one.
    pub(crate) fn end(self) -> Result<(), EngineError> {
        self.threads.end()
    }
}

/// The end of any other shard.
#[derive(Debug)]
pub(crate) struct OtherShard<M, R> {
    inbox: Inbox<ShardMessage<M, R>>,
    first: Outbox<ShardMessage<M, R>>,
}

impl<M, R> OtherShard<M, R> {
    /// The next message.
    pub(crate) fn next(&self) -> Option<ShardMessage<M, R>> {
        self.inbox.next()
    }

    /// Tells the first shard something.
    pub(crate) fn send(&self, message: M) {
        self.first.send(ShardMessage::Specific(message));
    }

    /// Reports for the status, in the round of this number.
    pub(crate) fn report_status(&self, round: u64, report: R) {
        self.first.send(ShardMessage::Status(round, Box::new(report)));
    }

    /// Reports the flows, in the round of this number.
    pub(crate) fn report_flows(&self, round: u64, flows: FlowList) {
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
            assert_eq!(first.next(), None, "a report is no news");
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
            .start(1, move || {
                let Some(ShardMessage::Specific("hello")) = other.next() else { panic!("not told") };
                other.send("hello yourself");
                Ok(())
            })
            .unwrap();
        let mut events = Vec::new();
        while events.len() < 2 {
            events.extend(first.next());
            std::thread::yield_now();
        }
        assert_eq!(events, [ShardEvent::Specific("hello yourself"), ShardEvent::Ended]);
        while !wake.drain() {
            std::thread::yield_now();
        }
        first.end().unwrap();
    }
}
