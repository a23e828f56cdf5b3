//! ResolverHandle into addresses, for the threads that move packets.
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

/// ResolverHandle that are looked up at once, each by a thread of its own as long as that takes.
pub(crate) const MAX_CONCURRENT_LOOKUPS: usize = 256;
/// ResolverHandle that wait for their turn.
const MAX_QUEUED_QUERIES: usize = 4096;

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
    pub(crate) result: Result<Vec<IpAddr>, String>,
}

/// Where threads get the means to ask.
#[derive(Clone)]
pub(crate) struct ResolverHandle(mpsc::Sender<ControlRequest>);

/// The means of one thread to ask.
pub(crate) struct ResolverClient {
    queries: mpsc::Sender<ControlRequest>,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
    wake: PollWaker,
}

/// What answers; runs in a tokio runtime.
pub(crate) struct Resolver(mpsc::Receiver<ControlRequest>);

/// Both ends.
pub(crate) fn resolver() -> (ResolverHandle, Resolver) {
    let (queries, receiver) = mpsc::channel(MAX_QUEUED_QUERIES);
    (ResolverHandle(queries), Resolver(receiver))
}

impl ResolverHandle {
    /// For the thread that `wake` wakes.
    pub(crate) fn client(&self, wake: PollWaker) -> ResolverClient {
        let (sender, answers) = channel();
        ResolverClient { queries: self.0.clone(), sender, answers, wake }
    }
}

impl ResolverClient {
    /// Asks for the addresses of `name`; whether there was room for the question.
    pub(crate) fn query(&self, name: &str) -> bool {
        let query =
            ControlRequest { name: name.to_owned(), answers: self.sender.clone(), wake: self.wake.clone() };
        self.queries.try_send(query).is_ok()
    }

    /// The next answer. They are no more than the questions, which whoever asks has to bound.
    pub(crate) fn next(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

impl Resolver {
    /// Answers until nobody can ask any more.
    pub(crate) async fn serve(mut self) {
        let slots = Arc::new(Semaphore::new(MAX_CONCURRENT_LOOKUPS));
        while let Some(query) = self.0.recv().await {
            // Nobody closes it.
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            tokio::spawn(async move {
                let result = look_up(&query.name).await;
                drop(slot);
                // Who asked may have ended.
                let _ = query.answers.send(Answer { name: query.name, result });
                query.wake.wake();
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
        let client = names.client(wake.clone());
        let ask = |name: &str| {
            assert!(client.query(name));
            poller.wait(&mut Events::with_capacity(1), Some(Duration::from_secs(20))).unwrap();
            wake.drain();
            client.next().expect("an answer")
        };
        let answer = ask("localhost");
        assert_eq!(answer.name, "localhost");
        assert!(answer.result.unwrap().iter().all(IpAddr::is_loopback));
        // No question to a name server: such a name cannot be.
        assert!(ask(&"a".repeat(300)).result.is_err());
        drop((names, client));
        thread.join().unwrap();
    }

    #[test]
    fn questions_beyond_the_bound_are_refused() {
        let (names, _resolver) = resolver();
        let client = names.client(PollWaker::new().unwrap());
        assert_eq!((0..MAX_QUEUED_QUERIES + 10).filter(|_| client.query("a")).count(), MAX_QUEUED_QUERIES);
    }
}
