//! Resolves names for the packet threads.
//!
//! In: queries of these threads. Out: an answer to each, and a wake-up call to the thread. Always holds: the
//! system's resolver is used, so `/etc/hosts` and `nsswitch.conf` count; concurrent lookups and queued
//! queries are bounded; a query never blocks.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
};

use mpvpn_os::poll::PollWaker;
use tokio::sync::{Semaphore, mpsc};

/// Concurrent lookups; each occupies a thread. More: threads. Fewer: name servers that do not answer delay
/// other lookups. Chosen (docs/design/relay.md).
pub const MAX_CONCURRENT_LOOKUPS: usize = 256;
/// Queries that wait for a lookup. More: memory. Fewer: refused queries. Chosen.
const MAX_QUEUED_QUERIES: usize = 4096;

/// A name to look up, and where the answer goes.
struct Query {
    name: String,
    answers: Sender<Answer>,
    wake: PollWaker,
}

/// The answer to a query.
#[derive(Debug)]
pub struct Answer {
    /// The name of the query.
    pub name: String,
    /// The addresses in the order of the resolver, or the error as text.
    pub result: Result<Vec<IpAddr>, String>,
}

/// Makes [`ResolverClient`]s for other threads.
#[derive(Clone)]
pub struct ResolverHandle(mpsc::Sender<Query>);

/// One thread's access to the resolver.
pub struct ResolverClient {
    queries: mpsc::Sender<Query>,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
    wake: PollWaker,
}

/// Runs the lookups, in a tokio runtime.
pub struct Resolver(mpsc::Receiver<Query>);

/// A resolver, and the handle to it.
pub fn resolver() -> (ResolverHandle, Resolver) {
    let (queries, receiver) = mpsc::channel(MAX_QUEUED_QUERIES);
    (ResolverHandle(queries), Resolver(receiver))
}

impl ResolverHandle {
    /// A client for the thread that `wake` wakes.
    pub fn client(&self, wake: PollWaker) -> ResolverClient {
        let (sender, answers) = channel();
        ResolverClient { queries: self.0.clone(), sender, answers, wake }
    }
}

impl ResolverClient {
    /// Queries the addresses of `name`. Returns false if too many queries wait.
    pub fn query(&self, name: &str) -> bool {
        let query = Query { name: name.to_owned(), answers: self.sender.clone(), wake: self.wake.clone() };
        self.queries.try_send(query).is_ok()
    }

    /// The next answer. The caller bounds its queries and thereby the answers that wait here.
    pub fn next(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

impl Resolver {
    /// Runs until all handles and clients are dropped.
    pub async fn serve(mut self) {
        let slots = Arc::new(Semaphore::new(MAX_CONCURRENT_LOOKUPS));
        while let Some(query) = self.0.recv().await {
            // The semaphore is never closed.
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            tokio::spawn(async move {
                let result = look_up(&query.name).await;
                drop(slot);
                // The querying thread may have ended.
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
        // Too long for DNS, so no name server is queried.
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
