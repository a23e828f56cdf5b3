//! The bytes that wait in noq for the readers of their streams.
//!
//! In: streams that have something to read, those that were read completely, and the bytes that have arrived
//! and that were taken. Out: how many wait. noq does not tell, so this is an upper bound: all bytes that have
//! arrived since no stream had something to read and that were not taken, but never more than flow control
//! allows. Always holds: nothing waits while no stream has something to read.

use rustc_hash::FxHashSet;

use crate::{
    StreamId,
    config::{RECEIVE_WINDOW, STREAM_WINDOW},
};

/// The unread streams of a connection.
#[derive(Debug, Default)]
pub(super) struct UnreadStreams {
    streams: FxHashSet<StreamId>,
    /// Bytes of streams and datagrams that were ever taken from noq.
    pub(super) taken: u64,
    /// Bytes of all packets that had arrived at the last call of [`Self::bytes`].
    arrived: u64,
    /// Those of them that were never taken when the last of the streams was read.
    before: u64,
}

impl UnreadStreams {
    /// A stream has something to read.
    pub(super) fn insert(&mut self, id: StreamId) {
        self.streams.insert(id);
    }

    /// A stream was read completely, or nobody reads it any more.
    pub(super) fn remove(&mut self, id: StreamId) {
        self.streams.remove(&id);
        if self.streams.is_empty() {
            self.before = self.arrived.saturating_sub(self.taken);
        }
    }

    /// Bytes that wait at most, after packets of `arrived` bytes.
    pub(super) fn bytes(&mut self, arrived: u64) -> usize {
        self.arrived = arrived;
        let not_taken = arrived.saturating_sub(self.taken);
        if self.streams.is_empty() {
            self.before = not_taken;
        }
        let windows = self.streams.len().saturating_mul(STREAM_WINDOW as usize).min(RECEIVE_WINDOW as usize);
        usize::try_from(not_taken.saturating_sub(self.before)).unwrap_or(usize::MAX).min(windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_from_the_first_that_is_not_read_until_all_are() {
        let mut unread = UnreadStreams::default();
        assert_eq!(unread.bytes(10_000), 0, "nothing has arrived on streams");
        unread.insert(0);
        assert_eq!(unread.bytes(12_000), 2000);
        unread.taken += 1900;
        unread.remove(0);
        unread.insert(0);
        assert_eq!(unread.bytes(13_000), 1000, "the others were no bytes of streams");
        unread.taken += 400;
        assert_eq!(unread.bytes(13_000), 600, "some was read, or came in datagrams");
        assert_eq!(unread.bytes(1 << 40), STREAM_WINDOW as usize, "more cannot be of one stream");
        (1..100).for_each(|number| unread.insert(4 * number));
        assert_eq!(unread.bytes(1 << 40), RECEIVE_WINDOW as usize, "nor of many");
        (0..100).for_each(|number| unread.remove(4 * number));
        assert_eq!(unread.bytes(1 << 41), 0);
    }
}
