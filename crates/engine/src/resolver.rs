//! Names into addresses, for the threads that move packets.
//!
//! In: questions of these threads. Out: an answer to each, and a wake-up call to who asked. Always holds: the system's
//! own resolver is asked, so `/etc/hosts` and all that `nsswitch.conf` says count; how many are asked for at once and
//! how many wait is bounded, and asking never blocks.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
};

use mpvpn_os::poll::PollWaker;
use tokio::sync::{Semaphore, mpsc};

/// Names that are looked up at once, each by a thread of its own as long as that takes.
pub(crate) const LOOKUPS: usize = 256;
/// Names that wait for their turn.
const WAITING: usize = 4096;

/// A question, and who asks.
struct ControlRequest {
    name: String,
    answers: Sender<Answer>,
    wake: PollWaker,
}

/// What was found.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The name that was asked for.
    pub(crate) name: String,
    /// Its addresses in the order in which to try them, or why there is none.
    pub(crate) found: Result<Vec<IpAddr>, String>,
}

/// Where threads get the means to ask.
#[derive(Clone)]
pub(crate) struct Names(mpsc::Sender<ControlRequest>);

/// The means of one thread to ask.
pub(crate) struct Asker {
    questions: mpsc::Sender<ControlRequest>,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
    wake: PollWaker,
}

/// What answers; runs in a tokio runtime.
pub(crate) struct Resolver(mpsc::Receiver<ControlRequest>);

/// Both ends.
pub(crate) fn resolver() -> (Names, Resolver) {
    let (questions, receiver) = mpsc::channel(WAITING);
    (Names(questions), Resolver(receiver))
}

impl Names {
    /// For the thread that `wake` wakes.
    pub(crate) fn asker(&self, wake: PollWaker) -> Asker {
        let (sender, answers) = channel();
        Asker { questions: self.0.clone(), sender, answers, wake }
    }
}

impl Asker {
    /// Asks for the addresses of `name`; whether there was room for the question.
    pub(crate) fn ask(&self, name: &str) -> bool {
        let question =
            ControlRequest { name: name.to_owned(), answers: self.sender.clone(), wake: self.wake.clone() };
        self.questions.try_send(question).is_ok()
    }

    /// The next answer. They are no more than the questions, which whoever asks has to bound.
    pub(crate) fn next(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

impl Resolver {
    /// Answers until nobody can ask any more.
    pub(crate) async fn serve(mut self) {
        let turns = Arc::new(Semaphore::new(LOOKUPS));
        while let Some(question) = self.0.recv().await {
            // Nobody closes it.
            let Ok(turn) = turns.clone().acquire_owned().await else { return };
            tokio::spawn(async move {
                let found = look_up(&question.name).await;
                drop(turn);
                // Who asked may have ended.
                let _ = question.answers.send(Answer { name: question.name, found });
                question.wake.wake();
            });
        }
    }
}

async fn look_up(name: &str) -> Result<Vec<IpAddr>, String> {
    match tokio::net::lookup_host((name, 0)).await {
        Ok(addresses) => Ok(addresses.map(|address| address.ip()).collect()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpvpn_os::poll::{Events, Interest, Poller};

    use super::*;

    #[test]
    fn the_hosts_file_counts_and_names_that_are_none_are_told() {
        let (names, resolver) = resolver();
        let thread = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(resolver.serve());
        });
        let wake = PollWaker::new().unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&wake, 0, Interest::Read).unwrap();
        let asker = names.asker(wake.clone());
        let ask = |name: &str| {
            assert!(asker.ask(name));
            poller.wait(&mut Events::with_capacity(1), Some(Duration::from_secs(20))).unwrap();
            wake.drain();
            asker.next().expect("an answer")
        };
        let answer = ask("localhost");
        assert_eq!(answer.name, "localhost");
        assert!(answer.found.unwrap().iter().all(IpAddr::is_loopback));
        // No question to a name server: such a name cannot be.
        assert!(ask(&"a".repeat(300)).found.is_err());
        drop((names, asker));
        thread.join().unwrap();
    }

    #[test]
    fn questions_beyond_the_bound_are_refused() {
        let (names, _resolver) = resolver();
        let asker = names.asker(PollWaker::new().unwrap());
        assert_eq!((0..WAITING + 10).filter(|_| asker.ask("a")).count(), WAITING);
    }
}
