//! A channel whose messages wake the receiving thread.

use std::sync::mpsc::{Receiver, Sender, channel};

use mpvpn_os::poll::PollWaker;

/// The receiving end.
#[derive(Debug)]
pub struct Inbox<T>(Receiver<T>);

/// A sending end.
#[derive(Debug)]
pub struct Outbox<T> {
    messages: Sender<T>,
    wake: PollWaker,
}

/// Both ends; `wake` wakes the owner of the inbox.
pub fn mailbox<T>(wake: PollWaker) -> (Outbox<T>, Inbox<T>) {
    let (messages, inbox) = channel();
    (Outbox { messages, wake }, Inbox(inbox))
}

impl<T> Inbox<T> {
    /// The next message.
    pub fn next(&self) -> Option<T> {
        self.0.try_recv().ok()
    }
}

impl<T> Outbox<T> {
    /// Sends a message and wakes the receiver.
    pub fn send(&self, message: T) {
        // A thread that has ended takes no messages.
        let _ = self.messages.send(message);
        self.wake.wake();
    }
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone(), wake: self.wake.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_wakes_the_thread_that_it_is_for() {
        let wake = PollWaker::new().unwrap();
        let (outbox, inbox) = mailbox(wake.clone());
        assert!(!wake.drain() && inbox.next().is_none());
        outbox.clone().send("a message");
        outbox.send("another");
        assert!(wake.drain());
        assert_eq!([inbox.next(), inbox.next(), inbox.next()], [Some("a message"), Some("another"), None]);
    }

    #[test]
    fn a_thread_that_has_ended_is_no_error() {
        let (outbox, inbox) = mailbox(PollWaker::new().unwrap());
        drop(inbox);
        outbox.send("to nobody");
    }
}
