use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::{Instant, target::REORDER};
use rustc_hash::FxHashMap;

use crate::label::{Label, MODULUS};

/// A number this far ahead of the expected one restarts its sequence: the sender has lost its state, or too much is missing.
/// Smaller: a burst of losses restarts the sequence; larger: memory. Chosen (docs/design/reordering.md).
const MAX_AHEAD: u32 = 1 << 14;
/// Ranges of given-up numbers that are remembered for each sequence, as their packets may still arrive. Fewer: late packets
/// count as duplicates and are dropped; more: memory. Chosen.
const MAX_GIVEN_UP_RANGES: usize = 64;
/// Bytes of packets that are held for all sequences together at most. Fewer: order is given up on fast paths; more: memory.
/// Chosen.
const MAX_HELD_BYTES: usize = 16 << 20;

/// Packets by what happened to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReorderStats {
    /// Packets that were held for missing ones.
    pub held: u64,
    /// Packets that arrived after they were given up, and were delivered out of order.
    pub late: u64,
    /// Packets that arrived a second time, and were dropped.
    pub duplicates: u64,
    /// Missing packets that were given up.
    pub given_up: u64,
}

/// Restores the order of numbered packets, at the receiver.
#[derive(Debug, Default)]
pub struct ReorderBuffer {
    sequences: FxHashMap<u16, Sequence>,
    /// The sequences with a missing packet; a list because they are few.
    waiting: Vec<u16>,
    /// Bytes of held packets.
    bytes: usize,
    stats: ReorderStats,
}

#[derive(Debug, Default)]
struct Sequence {
    /// The lowest number that was neither delivered nor given up.
    next: u32,
    /// The state of the numbers from `next` on. If there are any, the first one is missing.
    entries: VecDeque<Entry>,
    /// Ranges of numbers below `next` that were given up: first number and count, the oldest first.
    given_up: VecDeque<(u32, u32)>,
}

#[derive(Debug)]
enum Entry {
    /// Not received; given up at this moment.
    Missing(Instant),
    Held(Bytes),
    /// Delivered before packets with lower numbers.
    Delivered,
}

/// How far `number` is ahead of `base` modulo 2^24; negative if it is behind.
fn distance(base: u32, number: u32) -> i32 {
    let ahead = number.wrapping_sub(base) % MODULUS;
    if ahead < MODULUS / 2 { ahead as i32 } else { ahead as i32 - MODULUS as i32 }
}

impl ReorderBuffer {
    /// Before the first packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a received packet, and passes to `out` the packets to deliver now.
    pub fn push(&mut self, now: Instant, label: Label, packet: Bytes, mut out: impl FnMut(Bytes)) {
        let sequence = self.sequences.entry(label.bucket).or_default();
        let ahead = distance(sequence.next, label.number);
        if ahead == 0 && sequence.entries.is_empty() {
            sequence.next = (sequence.next + 1) % MODULUS;
            return out(packet);
        }
        if ahead < 0 {
            let late = sequence.take_given_up(label.number);
            let Label { bucket, number, .. } = label;
            tracing::trace!(
                target: REORDER,
                bucket,
                number,
                next = sequence.next,
                late,
                "a packet behind the expected number: late, or a duplicate"
            );
            if late {
                self.stats.late += 1;
                out(packet);
            } else {
                self.stats.duplicates += 1;
            }
            return;
        }
        let ahead = ahead as u32;
        if ahead >= MAX_AHEAD {
            let Label { bucket, number, .. } = label;
            tracing::debug!(
                target: REORDER,
                bucket,
                number,
                ahead,
                "a number too far ahead: missing packets are given up, the sequence restarts"
            );
            self.give_up_all(label.bucket, &mut out);
            if let Some(sequence) = self.sequences.get_mut(&label.bucket) {
                sequence.next = (label.number + 1) % MODULUS;
                sequence.given_up.clear();
            }
            return out(packet);
        }
        let was_waiting = !sequence.entries.is_empty();
        let at = ahead as usize;
        if at >= sequence.entries.len() {
            let deadline = now + label.reorder_timeout;
            sequence.entries.resize_with(at + 1, || Entry::Missing(deadline));
        } else if !matches!(sequence.entries[at], Entry::Missing(_)) {
            self.stats.duplicates += 1;
            return;
        }
        if at == 0 || !label.ordered {
            sequence.entries[at] = Entry::Delivered;
            out(packet);
        } else {
            // A copy: the received slice would keep its whole receive buffer alive.
            let copy = Bytes::copy_from_slice(&packet);
            self.bytes += copy.len();
            self.stats.held += 1;
            let Label { bucket, number, reorder_timeout: patience, .. } = label;
            tracing::trace!(
                target: REORDER,
                bucket,
                number,
                next = sequence.next,
                timeout = ?patience,
                "held for missing packets"
            );
            sequence.entries[at] = Entry::Held(copy);
        }
        if at == 0 {
            self.bytes -= sequence.release(&mut out);
        }
        let waits = !sequence.entries.is_empty();
        if waits && !was_waiting {
            self.waiting.push(label.bucket);
        } else if was_waiting && !waits {
            self.waiting.retain(|bucket| *bucket != label.bucket);
        }
        if self.bytes > MAX_HELD_BYTES {
            tracing::debug!(
                target: REORDER,
                bucket = label.bucket,
                bytes = self.bytes,
                "too many bytes are held: missing packets are given up"
            );
            self.give_up_all(label.bucket, &mut out);
        }
    }

    /// Gives up packets whose reorder timeout has passed, and passes to `out` the packets to deliver now.
    pub fn handle_timeout(&mut self, now: Instant, mut out: impl FnMut(Bytes)) {
        if self.waiting.is_empty() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|bucket| {
            let Some(sequence) = self.sequences.get_mut(bucket) else { return false };
            while sequence.deadline().is_some_and(|deadline| deadline <= now) {
                let count = sequence.give_up_first();
                tracing::trace!(
                    target: REORDER,
                    bucket,
                    next = sequence.next,
                    count,
                    "timeout: missing packets are given up"
                );
                self.stats.given_up += u64::from(count);
                self.bytes -= sequence.release(&mut out);
            }
            !sequence.entries.is_empty()
        });
        self.waiting = waiting;
    }

    /// When [`Self::handle_timeout`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let deadlines = self.waiting.iter().filter_map(|bucket| self.sequences.get(bucket)?.deadline());
        deadlines.min()
    }

    /// The statistics since the start.
    pub fn stats(&self) -> ReorderStats {
        self.stats
    }

    /// Bytes of the packets that are held now.
    pub fn held_bytes(&self) -> usize {
        self.bytes
    }

    /// Frees memory that is not in use.
    pub fn trim_memory(&mut self) {
        #[allow(clippy::disallowed_methods, reason = "all are treated alike, in any order")]
        for sequence in self.sequences.values_mut() {
            if sequence.entries.is_empty() {
                sequence.entries.shrink_to(0);
            }
        }
    }

    fn give_up_all(&mut self, bucket: u16, out: &mut impl FnMut(Bytes)) {
        let Some(sequence) = self.sequences.get_mut(&bucket) else { return };
        while !sequence.entries.is_empty() {
            self.stats.given_up += u64::from(sequence.give_up_first());
            self.bytes -= sequence.release(out);
        }
        self.waiting.retain(|waiting| *waiting != bucket);
    }
}

impl Sequence {
    /// When the first missing packet is given up.
    fn deadline(&self) -> Option<Instant> {
        match self.entries.front() {
            Some(Entry::Missing(deadline)) => Some(*deadline),
            _ => None,
        }
    }

    /// Gives up the missing packets up to the first received one; returns their number.
    fn give_up_first(&mut self) -> u32 {
        let mut count = 0;
        while let Some(Entry::Missing(_)) = self.entries.front() {
            self.entries.pop_front();
            count += 1;
        }
        if count > 0 {
            if self.given_up.len() == MAX_GIVEN_UP_RANGES {
                self.given_up.pop_front();
            }
            self.given_up.push_back((self.next, count));
            self.next = (self.next + count) % MODULUS;
        }
        count
    }

    /// Passes to `out` the received packets up to the next missing one; returns the bytes that were held.
    fn release(&mut self, out: &mut impl FnMut(Bytes)) -> usize {
        let mut bytes = 0;
        while let Some(entry) = self.entries.pop_front_if(|entry| !matches!(entry, Entry::Missing(_))) {
            self.next = (self.next + 1) % MODULUS;
            if let Entry::Held(packet) = entry {
                bytes += packet.len();
                out(packet);
            }
        }
        bytes
    }

    /// Whether `number` was given up and has not arrived since; marks it as arrived.
    fn take_given_up(&mut self, number: u32) -> bool {
        let inside = |(first, count): &(u32, u32)| (0..*count as i32).contains(&distance(*first, number));
        let Some(at) = self.given_up.iter().position(inside) else { return false };
        let (first, count) = self.given_up[at];
        let before = distance(first, number) as u32;
        let behind = count - before - 1;
        match (before, behind) {
            (0, 0) => {
                self.given_up.remove(at);
            }
            (0, _) => self.given_up[at] = ((number + 1) % MODULUS, behind),
            _ => self.given_up[at].1 = before,
        }
        if before > 0 && behind > 0 {
            self.given_up.insert(at + 1, ((number + 1) % MODULUS, behind));
        }
        true
    }
}

#[cfg(test)]
mod tests;
