//! The threads of all shards but the first.

use std::{io, thread::JoinHandle};

use mpvpn_types::panic_text;

use super::{ShardMessage, mailbox::Outbox};
use crate::EngineError;

/// Running threads. They are to be ended, or run until the process ends.
pub(super) struct ShardThreads<M, R> {
    first: Outbox<ShardMessage<M, R>>,
    /// How each shard is reached, in order.
    pub(super) outboxes: Vec<Outbox<ShardMessage<M, R>>>,
    threads: Vec<JoinHandle<Result<(), EngineError>>>,
}

impl<M: Send + 'static, R: Send + 'static> ShardThreads<M, R> {
    /// None yet. When one ends, the first shard is told by this mailbox.
    pub(super) fn new(first: Outbox<ShardMessage<M, R>>) -> Self {
        Self { first, outboxes: Vec::new(), threads: Vec::new() }
    }

    /// Starts a thread.
    pub(super) fn start(
        &mut self,
        name: String,
        work: impl FnOnce() -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        let notice = EndNotice { first: self.first.clone() };
        let run = move || {
            let _notice = notice;
            work()
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(EngineError::io("start a thread"))?);
        Ok(())
    }

    /// Sends all shards a message.
    pub(super) fn send(&self, message: impl Fn() -> ShardMessage<M, R>) {
        self.outboxes.iter().for_each(|outbox| outbox.send(message()));
    }

    /// Tells all of them to end, and waits for it; the first failure of one.
    pub(super) fn end(self) -> Result<(), EngineError> {
        self.send(|| ShardMessage::End);
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|panic| {
                let reason = io::Error::other(format!("it panicked: {}", panic_text(&*panic)));
                Err(EngineError::io("go on without a thread")(reason))
            });
            result = result.and(ended);
        }
        result
    }
}

/// Tells of the end of a thread, by panic too.
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
        // The message is there a moment before the wake-up.
        while !wake.drain() {
            std::thread::yield_now();
        }
        let error = threads.end().unwrap_err();
        assert!(error.to_string().contains("the ceiling fell"), "{error}");
    }
}
