//! The threads of all shards but the first.

use std::{io, thread::JoinHandle};

use mpvpn_error::RunError;
use mpvpn_types::panic_text;

use super::{ShardMessage, mailbox::Outbox};

/// Running threads. [`Self::end`] must be called, else they run until the process ends.
pub(super) struct ShardThreads<M, R> {
    first: Outbox<ShardMessage<M, R>>,
    /// The mailbox of each shard, in order.
    pub(super) outboxes: Vec<Outbox<ShardMessage<M, R>>>,
    threads: Vec<JoinHandle<Result<(), RunError>>>,
}

impl<M: Send + 'static, R: Send + 'static> ShardThreads<M, R> {
    /// No threads yet. The end of a thread is reported to `first`.
    pub(super) fn new(first: Outbox<ShardMessage<M, R>>) -> Self {
        Self { first, outboxes: Vec::new(), threads: Vec::new() }
    }

    /// Starts a thread.
    pub(super) fn start(
        &mut self,
        name: String,
        work: impl FnOnce() -> Result<(), RunError> + Send + 'static,
    ) -> Result<(), RunError> {
        let notice = EndNotice { first: self.first.clone() };
        let run = move || {
            let _notice = notice;
            work()
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(RunError::io("start a thread"))?);
        Ok(())
    }

    /// Sends a message to all shards.
    pub(super) fn send(&self, message: impl Fn() -> ShardMessage<M, R>) {
        self.outboxes.iter().for_each(|outbox| outbox.send(message()));
    }

    /// Ends all threads and waits for them; returns the first error.
    pub(super) fn end(self) -> Result<(), RunError> {
        self.send(|| ShardMessage::End);
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|panic| {
                let reason = io::Error::other(format!("it panicked: {}", panic_text(&*panic)));
                Err(RunError::io("go on without a thread")(reason))
            });
            result = result.and(ended);
        }
        result
    }
}

/// Reports the end of a thread when dropped, also by a panic.
struct EndNotice<M, R> {
    first: Outbox<ShardMessage<M, R>>,
}

impl<M, R> Drop for EndNotice<M, R> {
    fn drop(&mut self) {
        self.first.send(ShardMessage::Ended);
    }
}

#[cfg(test)]
mod tests {
    use mpvpn_os::poll::PollWaker;

    use super::{super::mailbox::mailbox, *};

    #[test]
    fn a_thread_that_panics_is_noticed_and_says_why() {
        let wake = PollWaker::new().unwrap();
        let (first, inbox) = mailbox(wake.clone());
        let mut threads = ShardThreads::<(), ()>::new(first);
        threads.start("doomed".to_owned(), || panic!("the ceiling fell")).unwrap();
        while !matches!(inbox.next(), Some(ShardMessage::Ended)) {
            std::thread::yield_now();
        }
        // The message arrives shortly before the wake-up.
        while !wake.drain() {
            std::thread::yield_now();
        }
        let error = threads.end().unwrap_err();
        assert!(error.to_string().contains("the ceiling fell"), "{error}");
    }
}
