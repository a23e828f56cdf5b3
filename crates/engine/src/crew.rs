//! The data-plane threads of a process but the first.

use std::{io, thread::JoinHandle};

use mpvpn_types::panic_text;

use crate::{EngineError, exchange::Outbox};

/// Running threads. They are to be ended, or run until the process ends.
pub(crate) struct Crew<W> {
    first: Outbox<W>,
    ended: fn() -> W,
    threads: Vec<JoinHandle<Result<(), EngineError>>>,
    outboxes: Vec<Outbox<W>>,
}

impl<W: Send + 'static> Crew<W> {
    /// Nobody yet. When a thread ends, `first` is told the word that `ended` makes.
    pub(crate) fn new(first: Outbox<W>, ended: fn() -> W) -> Self {
        Self { first, ended, threads: Vec::new(), outboxes: Vec::new() }
    }

    /// Starts a thread, which `outbox` reaches.
    pub(crate) fn start(
        &mut self,
        name: String,
        outbox: Outbox<W>,
        work: impl FnOnce() -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        let notice = Notice { first: self.first.clone(), ended: self.ended };
        let run = move || {
            let _notice = notice;
            work()
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(EngineError::io("start a thread"))?);
        self.outboxes.push(outbox);
        Ok(())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Tells all of them something.
    pub(crate) fn tell(&self, word: impl Fn() -> W) {
        for outbox in &self.outboxes {
            outbox.tell(word());
        }
    }

    /// Tells all of them to end, and waits for it; the first failure of one.
    pub(crate) fn end(self, word: impl Fn() -> W) -> Result<(), EngineError> {
        self.tell(word);
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
struct Notice<W> {
    first: Outbox<W>,
    ended: fn() -> W,
}

impl<W> Drop for Notice<W> {
    fn drop(&mut self) {
        self.first.tell((self.ended)());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::exchange;
    use mpvpn_os::poll::Wake;

    #[test]
    fn a_thread_that_panics_is_noticed_and_says_why() {
        let wake = Wake::new().unwrap();
        let (first, inbox) = exchange(wake.clone());
        let mut crew = Crew::new(first, || "ended");
        let (outbox, _inbox) = exchange(Wake::new().unwrap());
        crew.start("doomed".to_owned(), outbox, || panic!("the ceiling fell")).unwrap();
        while inbox.word() != Some("ended") {
            std::thread::yield_now();
        }
        // The word is there a moment before the bell rings.
        while !wake.drain() {
            std::thread::yield_now();
        }
        let error = crew.end(|| "end").unwrap_err();
        assert!(error.to_string().contains("the ceiling fell"), "{error}");
    }
}
