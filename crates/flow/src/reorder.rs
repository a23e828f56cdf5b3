use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::{Instant, target::REORDER};
use rustc_hash::FxHashMap;

use crate::label::{Label, MODULUS};

/// A number so far ahead of what is expected starts its sequence anew (packets).
const MAX_AHEAD: u32 = 1 << 14;
/// Ranges of numbers that were given up and may still come, for each sequence.
const MAX_GIVEN_UP_RANGES: usize = 64;
/// Bytes of packets that are held for all sequences together.
const MAX_HELD_BYTES: usize = 16 << 20;

/// What became of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReorderStats {
    /// Held for a while and then delivered in their place.
    pub held: u64,
    /// Came after their place was given up, and were delivered late.
    pub late: u64,
    /// Came a second time, and were dropped.
    pub duplicates: u64,
    /// Places that were given up.
    pub given_up: u64,
}

/// Restores the order of numbered packets, at the receiver.
#[derive(Debug, Default)]
pub struct ReorderBuffer {
    sequences: FxHashMap<u16, Sequence>,
    /// The sequences that wait for a packet: few, so a list.
    waiting: Vec<u16>,
    /// Bytes of packets that are held.
    bytes: usize,
    stats: ReorderStats,
}

#[derive(Debug, Default)]
struct Sequence {
    /// The lowest number that has neither been delivered nor given up.
    next: u32,
    /// From `next` on. If it is not empty, its first place is missing.
    places: VecDeque<Place>,
    /// Numbers below `next` that were given up: first one and count, the oldest in front.
    given_up: VecDeque<(u32, u32)>,
}

#[derive(Debug)]
enum Place {
    /// Not here, and not waited for after this moment.
    Missing(Instant),
    Held(Bytes),
    /// Delivered ahead of its turn.
    Delivered,
}

/// How far `number` is ahead of `base`; negative if it is behind.
fn distance(base: u32, number: u32) -> i32 {
    let ahead = number.wrapping_sub(base) % MODULUS;
    if ahead < MODULUS / 2 { ahead as i32 } else { ahead as i32 - MODULUS as i32 }
}

impl ReorderBuffer {
    /// Nothing is held.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a packet that arrived, and hands out what may be delivered now.
    pub fn push(&mut self, now: Instant, label: Label, packet: Bytes, mut out: impl FnMut(Bytes)) {
        let sequence = self.sequences.entry(label.bucket).or_default();
        let ahead = distance(sequence.next, label.number);
        if ahead == 0 && sequence.places.is_empty() {
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
                "a number that was passed: late, or a duplicate"
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
                "too far ahead: all that is missing is given up"
            );
            self.give_up_all(label.bucket, &mut out);
            if let Some(sequence) = self.sequences.get_mut(&label.bucket) {
                sequence.next = (label.number + 1) % MODULUS;
                sequence.given_up.clear();
            }
            return out(packet);
        }
        let was_waiting = !sequence.places.is_empty();
        let at = ahead as usize;
        if at >= sequence.places.len() {
            let deadline = now + label.reorder_timeout;
            sequence.places.resize_with(at + 1, || Place::Missing(deadline));
        } else if !matches!(sequence.places[at], Place::Missing(_)) {
            self.stats.duplicates += 1;
            return;
        }
        if at == 0 || !label.ordered {
            sequence.places[at] = Place::Delivered;
            out(packet);
        } else {
            // A copy: what arrived is a small part of a large buffer, which holding it would keep.
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
            sequence.places[at] = Place::Held(copy);
        }
        if at == 0 {
            self.bytes -= sequence.release(&mut out);
        }
        let waits = !sequence.places.is_empty();
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
                "too much is held: what is missing is given up"
            );
            self.give_up_all(label.bucket, &mut out);
        }
    }

    /// Hands out what was held long enough.
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
            !sequence.places.is_empty()
        });
        self.waiting = waiting;
    }

    /// When [`Self::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let deadlines = self.waiting.iter().filter_map(|bucket| self.sequences.get(bucket)?.deadline());
        deadlines.min()
    }

    /// What became of packets so far.
    pub fn stats(&self) -> ReorderStats {
        self.stats
    }

    /// Bytes of packets that are held now.
    pub fn held_bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets nothing that matters, and gives memory back that is not in use.
    pub fn trim_memory(&mut self) {
        #[allow(clippy::disallowed_methods, reason = "each is treated alike, in any order")]
        for sequence in self.sequences.values_mut() {
            if sequence.places.is_empty() {
                sequence.places.shrink_to(0);
            }
        }
    }

    fn give_up_all(&mut self, bucket: u16, out: &mut impl FnMut(Bytes)) {
        let Some(sequence) = self.sequences.get_mut(&bucket) else { return };
        while !sequence.places.is_empty() {
            self.stats.given_up += u64::from(sequence.give_up_first());
            self.bytes -= sequence.release(out);
        }
        self.waiting.retain(|waiting| *waiting != bucket);
    }
}

impl Sequence {
    /// When the first missing packet is given up.
    fn deadline(&self) -> Option<Instant> {
        match self.places.front() {
            Some(Place::Missing(deadline)) => Some(*deadline),
            _ => None,
        }
    }

    /// Gives up the missing packets in front; returns how many they were.
    fn give_up_first(&mut self) -> u32 {
        let mut count = 0;
        while let Some(Place::Missing(_)) = self.places.front() {
            self.places.pop_front();
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

    /// Hands out what is in front and not missing; returns the bytes that were held.
    fn release(&mut self, out: &mut impl FnMut(Bytes)) -> usize {
        let mut bytes = 0;
        while let Some(place) = self.places.pop_front_if(|place| !matches!(place, Place::Missing(_))) {
            self.next = (self.next + 1) % MODULUS;
            if let Place::Held(packet) = place {
                bytes += packet.len();
                out(packet);
            }
        }
        bytes
    }

    /// Whether `number` was given up and has not come since; it counts as come now.
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
