//! Which bytes of bulk streams leave on which path: paths are granted so many, and take them out of the streams when their
//! passes begin.

use mpvpn_types::{Instant, PathId, varint_len};

use super::{
    Connection, Event, path::StreamsInFlight, readers::Patience, send::StreamWriter, streams::Streams,
};
use crate::StreamId;

/// Bytes around the frames of a packet: flags, connection ID, packet number (of two bytes with up to 32,768 packets under
/// way) and AEAD tag.
const AROUND_FRAMES: u64 = 1 + 8 + 2 + 16;
/// Bytes of a STREAM frame beside stream, offset and data: its type, and what the library sets aside for the length.
const OF_FRAME: u64 = 1 + 8;
/// Packets by which a pass goes on when the library had more to repeat than was known, and how often.
const PASS_EXTENSION_PACKETS: u64 = 2;
const MAX_PASS_EXTENSIONS: u32 = 16;

/// How many bytes of bulk streams paths may send in their next passes.
///
/// What the library found lost it sends again before anything else, on whatever path comes next; so that counts as
/// granted first.
#[derive(Debug, Default)]
pub(super) struct StreamGrants {
    /// Bytes that are lost, and may be of streams: the library sends them again as soon as it may.
    lost: u64,
    /// Bytes that paths have been granted for their next passes.
    granted: u64,
    /// How often the pass may go on with more credit than was reckoned.
    prolong: u32,
}

impl StreamGrants {
    /// Bytes that could be granted when so many wait in streams.
    fn backlog(&self, waiting: u64) -> u64 {
        (waiting + self.lost).saturating_sub(self.granted)
    }

    /// Packets with so many bytes were lost.
    pub(super) fn on_lost(&mut self, bytes: u64) {
        self.lost += bytes;
    }

    /// Whether the library may have something to send again.
    pub(super) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// A path was granted so many bytes.
    fn add(&mut self, bytes: u64) {
        self.granted += bytes;
    }

    /// A path will not send what it was granted.
    pub(super) fn forget(&mut self, bytes: u64) {
        self.granted = self.granted.saturating_sub(bytes);
    }

    /// The pass of a path begins that was granted so many bytes; returns how many of them the library sends again.
    fn begin_pass(&mut self, grant: u64) -> u64 {
        self.forget(grant);
        self.prolong = if grant > 0 { MAX_PASS_EXTENSIONS } else { 0 };
        let again = self.lost.min(grant);
        self.lost -= again;
        again
    }

    /// A pass has ended with `left` bytes of credit; returns the credit (bytes) with which it goes on, if it does. What
    /// was meant for it did not fit, because the library first sent more again than was known; left over, it would leave
    /// with the next packets, on any path.
    pub(super) fn prolong(&mut self, left: u64, packet: u64) -> Option<u64> {
        if left >= packet || self.prolong == 0 {
            return None;
        }
        self.prolong -= 1;
        Some(PASS_EXTENSION_PACKETS * packet)
    }
}

/// What a path takes out of bulk streams when its pass begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    pub(super) path: PathId,
    /// Bytes that it was granted.
    pub(super) grant: u64,
    /// Only of streams that last since then.
    pub(super) lasting_since: Option<Instant>,
    /// How far ahead of their readers streams may be, if readers tell how far they are.
    pub(super) patience: Option<Patience>,
}

impl Streams {
    /// Gives the library what a path was granted, and notes what is in flight there from now on. Calls `writable` for
    /// every stream that has room again.
    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        writer: &mut impl StreamWriter,
        withdrawal: Withdrawal,
        in_flight: &mut StreamsInFlight,
        mut writable: impl FnMut(StreamId),
    ) {
        let Withdrawal { path, grant, lasting_since, patience } = withdrawal;
        let again = self.grants.begin_pass(grant);
        if again > 0 {
            in_flight.note_retransmission(now);
        }
        let mut left = grant - again;
        let mut skipped = Vec::new();
        while let Some(turn) = self.send.next_turn(now, left, lasting_since, patience, &mut skipped) {
            let first = in_flight.len();
            let flushed = self.send.flush(writer, turn.id, turn.most, |piece| in_flight.push(now, piece));
            if flushed.dropped {
                self.log.forget(turn.id);
            }
            in_flight.since(first).for_each(|piece| self.log.keep(now, path, piece));
            if patience.is_some() {
                self.send.note_owing(turn.id);
            }
            left -= flushed.bytes;
            if self.send.end_turn(turn, flushed.bytes, self.receive.contains(turn.id)) {
                writable(turn.id);
            }
        }
        self.send.return_skipped(skipped);
    }
}

impl Connection {
    /// Bytes of bulk streams that paths could be granted now.
    pub fn stream_backlog(&self) -> u64 {
        self.streams.grants.backlog(self.streams.send.waiting())
    }

    /// Lets a path carry up to `most` bytes of bulk streams, framing included, but at least a packet if there is
    /// anything; returns the bytes of room that this takes.
    pub fn grant_quota(&mut self, id: PathId, most: u64) -> u64 {
        self.grant_of(id, most, self.stream_backlog(), None)
    }

    /// The same for a path on which bytes arrive so late that nothing but a long transfer profits: only of streams whose
    /// owners have had more than there was room for all the time since `since`. Not while something is lost, which the
    /// library would repeat there.
    pub fn grant_quota_to_long_transfers(&mut self, id: PathId, most: u64, since: Instant) -> u64 {
        if self.streams.grants.has_lost() {
            return 0;
        }
        let bytes = self.streams.send.lasting(since);
        self.grant_of(id, most, bytes.min(self.stream_backlog()), Some(since))
    }

    fn grant_of(&mut self, id: PathId, most: u64, backlog: u64, lasting_since: Option<Instant>) -> u64 {
        if backlog == 0 {
            return 0;
        }
        let packet = u64::from(self.inner.current_mtu());
        let overhead = self.packet_overhead(most.max(packet));
        let payload = packet - overhead;
        let bytes = backlog.min((most / packet).max(1) * payload);
        let cost = bytes + bytes.div_ceil(payload) * overhead;
        let Some(path) = self.next_of_group(id) else { return 0 };
        path.queue.add_stream_bytes(bytes, cost, lasting_since);
        self.streams.grants.add(bytes);
        cost
    }

    /// Bytes of a packet that are none of the stream's whose turn it is, of which up to `most` leave now. More than
    /// needed makes a packet shorter than it could be; less, and a second one carries some bytes.
    fn packet_overhead(&self, most: u64) -> u64 {
        let front = self.streams.send.front();
        let place = front.map_or(4 + 8, |(id, at)| varint_len(id) + varint_len(at + most));
        AROUND_FRAMES + OF_FRAME + place as u64
    }

    /// Gives the library what the path at `index` was granted: its pass begins.
    pub(super) fn write_granted(
        &mut self,
        now: Instant,
        index: usize,
        grant: u64,
        lasting_since: Option<Instant>,
    ) {
        let patience = (grant > 0 && self.streams.heeds_readers).then(|| self.patience());
        let Some(path) = self.paths.at_mut(index) else { return };
        let withdrawal = Withdrawal { path: path.id, grant, lasting_since, patience };
        let events = &mut self.events;
        self.streams.withdraw(now, &mut self.inner, withdrawal, &mut path.streams, |id| {
            events.push_back(Event::StreamWritable(id));
        });
    }

    /// A control pass begins, in which the library may repeat what was lost, on any path.
    pub(super) fn note_repeats(&mut self, now: Instant) {
        if self.streams.grants.has_lost() {
            self.paths.iter_mut().for_each(|path| path.streams.note_retransmission(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_granted_first_and_once() {
        let mut grants = StreamGrants::default();
        grants.on_lost(3000);
        assert_eq!((grants.backlog(5000), grants.has_lost()), (8000, true));
        grants.add(4000);
        grants.add(1000);
        assert_eq!(grants.backlog(5000), 3000);
        assert_eq!(grants.begin_pass(4000), 3000);
        assert_eq!(grants.begin_pass(1000), 0);
        assert!(!grants.has_lost());
        grants.add(500);
        grants.forget(500);
        assert_eq!(grants.backlog(5000), 5000);
    }

    #[test]
    fn a_pass_goes_on_while_the_library_sends_more_again_than_was_known_but_not_for_ever() {
        let mut grants = StreamGrants::default();
        assert_eq!(grants.prolong(0, 1200), None, "nothing was granted");
        grants.begin_pass(1000);
        assert_eq!(grants.prolong(1200, 1200), None, "a packet would have fitted");
        let times = std::iter::from_fn(|| grants.prolong(100, 1200)).count();
        assert_eq!(times, MAX_PASS_EXTENSIONS as usize);
    }
}
