//! Which bytes of bulk streams leave on which path: paths are granted so many, and take them out of the streams when their
//! passes begin.

use mpvpn_types::{Instant, PathId, varint_len};

use super::{Connection, Event, streams::BULK_QUEUE};

/// Bytes that a bulk stream may send before the next one has its turn.
const TURN: u64 = 16 << 10;
/// Bytes around the frames of a packet: flags, connection ID, packet number (of two bytes with up to 32,768 packets under
/// way) and AEAD tag.
const AROUND_FRAMES: u64 = 1 + 8 + 2 + 16;
/// Bytes of a STREAM frame beside stream, offset and data: its type, and what the library sets aside for the length.
const OF_FRAME: u64 = 1 + 8;
/// Packets by which a pass goes on when the library had more to repeat than was known, and how often.
const PROLONGED: u64 = 2;
const MOST_PROLONGED: u32 = 16;
/// Streams that are looked through for those that last.
const MOST_LOOKS: usize = 64;

impl Connection {
    /// Bytes of bulk streams that paths could be granted now.
    pub fn stream_backlog(&self) -> u64 {
        (self.streams.waiting + self.streams.lost).saturating_sub(self.streams.granted)
    }

    /// Lets a path carry up to `most` bytes of bulk streams, framing included, but at least a packet if there is
    /// anything; returns the bytes of room that this takes.
    pub fn grant(&mut self, id: PathId, most: u64) -> u64 {
        self.grant_of(id, most, self.stream_backlog(), None)
    }

    /// The same for a path on which bytes arrive so late that nothing but a long transfer profits: only of streams whose
    /// owners have had more than there was room for all the time since `since`. Not while something is lost, which the
    /// library would repeat there.
    pub fn grant_late(&mut self, id: PathId, most: u64, since: Instant) -> u64 {
        if self.streams.lost > 0 {
            return 0;
        }
        let streams =
            self.streams.ready.iter().take(MOST_LOOKS).filter_map(|id| self.streams.outbound.get(id));
        let bytes: u64 = streams.filter(|out| out.lasts_since(since)).map(|out| out.bytes as u64).sum();
        self.grant_of(id, most, bytes.min(self.stream_backlog()), Some(since))
    }

    fn grant_of(&mut self, id: PathId, most: u64, backlog: u64, late: Option<Instant>) -> u64 {
        if backlog == 0 {
            return 0;
        }
        let packet = u64::from(self.inner.current_mtu());
        let overhead = self.packet_overhead(most.max(packet));
        let payload = packet - overhead;
        let bytes = backlog.min((most / packet).max(1) * payload);
        let cost = bytes + bytes.div_ceil(payload) * overhead;
        let Some(path) = self.least_loaded(id) else { return 0 };
        path.load(cost);
        path.grant += bytes;
        path.late = path.late.or(late);
        self.streams.granted += bytes;
        cost
    }

    /// Bytes of a packet that are none of the stream's whose turn it is, of which up to `most` leave now. More than
    /// needed makes a packet shorter than it could be; less, and a second one carries some bytes.
    fn packet_overhead(&self, most: u64) -> u64 {
        let front = self.streams.ready.front();
        let known = front.and_then(|id| Some((*id, self.streams.outbound.get(id)?.at + most)));
        let place = known.map_or(4 + 8, |(id, end)| varint_len(id) + varint_len(end));
        AROUND_FRAMES + OF_FRAME + place as u64
    }

    /// Gives the library what the path at `index` was granted: its pass begins.
    pub(super) fn write_granted(&mut self, now: Instant, index: usize, grant: u64) {
        let mut sent = std::mem::take(&mut self.paths[index].sent);
        self.streams.granted = self.streams.granted.saturating_sub(grant);
        self.streams.prolong = if grant > 0 { MOST_PROLONGED } else { 0 };
        let repeated = self.streams.lost.min(grant);
        self.streams.lost -= repeated;
        if repeated > 0 {
            self.paths[index].repeated = Some(now);
        }
        let mut left = grant - repeated;
        let late = self.paths[index].late.take();
        let patience = (left > 0 && self.streams.progress).then(|| self.patience());
        let mut passed = Vec::new();
        while left > 0
            && passed.len() < MOST_LOOKS
            && let Some(id) = self.streams.ready.pop_front()
        {
            let Some(out) = self.streams.outbound.get_mut(&id) else { continue };
            if late.is_some_and(|since| !out.lasts_since(since)) {
                passed.push(id);
                continue;
            }
            let before = out.wants();
            let was_full = out.full;
            if was_full {
                out.crowded.get_or_insert(now);
            }
            let first = sent.len();
            let most = left.min(TURN).min(patience.map_or(u64::MAX, |patience| out.may_send(patience)));
            if most == 0 {
                (out.blocked, out.restrained) = (true, true);
            }
            let done = self.flush(id, most, |piece| sent.push_back((now, piece)));
            let path = self.paths[index].id;
            sent.range(first..).for_each(|(_, piece)| self.streams.kept.keep(now, path, piece));
            if patience.is_some() {
                self.streams.note_owing(id);
            }
            left -= done;
            let Some(out) = self.streams.outbound.get_mut(&id) else {
                self.streams.waiting = self.streams.waiting.saturating_sub(done);
                continue;
            };
            if out.full && out.bytes <= BULK_QUEUE / 2 {
                out.full = false;
                self.events.push_back(Event::StreamWritable(id));
            }
            let wants = out.wants();
            if wants == 0 && !was_full {
                out.crowded = None;
            }
            if wants > 0 && !out.blocked {
                self.streams.waiting -= before - wants;
                self.streams.ready.push_back(id);
            } else {
                out.ready = false;
                self.streams.waiting -= before;
                if wants == 0 && !self.streams.inbound.contains_key(&id) {
                    self.streams.forget(id);
                }
            }
        }
        passed.into_iter().rev().for_each(|id| self.streams.ready.push_front(id));
        self.paths[index].sent = sent;
    }

    /// A data pass has ended with so much credit left; whether it goes on with more, because what was meant for it did
    /// not fit: the library first repeats what was lost. What is left over would leave with the next packets, on any
    /// path.
    pub(super) fn prolongs_pass(&mut self, now: Instant, index: usize, left: u64) -> bool {
        let packet = u64::from(self.inner.current_mtu());
        if left >= packet || self.streams.prolong == 0 {
            return false;
        }
        self.streams.prolong -= 1;
        let Some(path) = self.paths.get_mut(index) else { return false };
        path.repeated = Some(now);
        self.granted = PROLONGED * packet;
        path.gate.set_credit(self.granted);
        true
    }

    /// A control pass begins, in which the library may repeat what was lost, on any path.
    pub(super) fn note_repeats(&mut self, now: Instant) {
        if self.streams.lost > 0 {
            for path in &mut self.paths {
                path.repeated = Some(now);
            }
        }
    }
}
