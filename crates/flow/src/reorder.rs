use std::collections::VecDeque;

use bytes::Bytes;
use mpvpn_types::{Duration, Instant, target::REORDER};
use rustc_hash::FxHashMap;

use crate::label::{Label, MODULUS};

/// Places for numbers that are waited for or held, of all sequences together (24 bytes each, so 264 KiB),
/// counted as allocated. A number that needs more restarts its sequence: the sender has lost its state, or
/// the peer tries to use up memory. Fewer: order is given up when a path fails silently, while all packets
/// behind the lost ones are held (11,264 packets are 0.65 s at 200 Mbit/s, 0.13 s at 1 Gbit/s); more: memory
/// that a hostile peer can claim with small packets.
const MAX_ENTRIES: usize = 11 << 10;
/// Sequences that may wait for a missing packet at the same time. Each costs an allocation, and time whenever
/// the next timeout is asked for. Fewer: order is given up for some flows after a loss that hits many of
/// them; more: processor time. Chosen.
const MAX_WAITING_SEQUENCES: usize = 256;
/// Ranges of given-up numbers that are remembered for all sequences together, as their packets may still
/// arrive. Fewer: late packets count as duplicates and are dropped; more: each duplicate is compared with
/// more ranges. Chosen.
const MAX_GIVEN_UP_RANGES: usize = 512;
/// Bytes of packets that are held for all sequences together at most. Fewer: order is given up on fast paths;
/// more: memory. Chosen.
const MAX_HELD_BYTES: usize = 16 << 20;
/// The largest list of entries that is kept for the next gap (12 KiB). Smaller: more allocations where gaps
/// follow each other; larger: memory of connections that do nothing.
const MAX_SPARE_ENTRIES: usize = 512;

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
    /// Packets that are held now.
    pub holding: u64,
    /// How long packets were held, summed up over all of them; counted when packets come early or late, and
    /// at timeouts.
    pub wait: Duration,
}

/// Restores the order of numbered packets, at the receiver.
#[derive(Debug, Default)]
pub struct ReorderBuffer {
    sequences: FxHashMap<u16, Sequence>,
    /// The sequences with a missing packet; a list because they are few.
    waiting: Vec<u16>,
    /// Bytes of held packets.
    bytes: usize,
    /// Capacity of all lists of entries in `sequences`.
    entries: usize,
    given_up: GivenUp,
    /// For the next sequence that waits.
    #[expect(
        clippy::box_collection,
        reason = "most sequences wait for nothing, and a list inline would cost each 32 bytes"
    )]
    spare: Option<Box<VecDeque<Entry>>>,
    stats: ReorderStats,
    /// Until when `stats.wait` counts.
    waits_counted_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct Sequence {
    /// The lowest number that was neither delivered nor given up.
    next: u32,
    /// The state of the numbers from `next` on, of which the first is missing; `None` where no packet is
    /// missing.
    #[expect(
        clippy::box_collection,
        reason = "most sequences wait for nothing, and a list inline would cost each 32 bytes"
    )]
    entries: Option<Box<VecDeque<Entry>>>,
}

#[derive(Debug)]
enum Entry {
    /// Not received; given up at this moment.
    Missing(Instant),
    Held(Box<[u8]>),
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
        let next = sequence.next;
        let ahead = distance(next, label.number);
        if ahead == 0 && sequence.entries.is_none() {
            sequence.next = (sequence.next + 1) % MODULUS;
            return out(packet);
        }
        self.count_waits(now);
        if ahead < 0 {
            let late = self.given_up.take(label.bucket, label.number);
            let Label { bucket, number, .. } = label;
            tracing::trace!(
                target: REORDER,
                bucket,
                number,
                next,
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
        let at = ahead as usize;
        let is_new = match self.entries_for(label.bucket, at) {
            None => return self.restart(label, packet, &mut out),
            Some(entries) if at >= entries.len() => {
                let deadline = now + label.reorder_timeout;
                entries.resize_with(at + 1, || Entry::Missing(deadline));
                true
            }
            Some(entries) => matches!(entries[at], Entry::Missing(_)),
        };
        if !is_new {
            self.stats.duplicates += 1;
            return;
        }
        let entry = if at == 0 || !label.ordered {
            out(packet);
            Entry::Delivered
        } else {
            // A copy: the received slice would keep its whole receive buffer alive.
            let copy = Box::<[u8]>::from(&packet[..]);
            self.bytes += copy.len();
            self.stats.held += 1;
            self.stats.holding += 1;
            let Label { bucket, number, reorder_timeout, .. } = label;
            tracing::trace!(target: REORDER, bucket, number, timeout = ?reorder_timeout, "held for missing packets");
            Entry::Held(copy)
        };
        if let Some(entries) = self.sequences.get_mut(&label.bucket).and_then(|it| it.entries.as_mut()) {
            entries[at] = entry;
        }
        if at == 0 {
            self.release(label.bucket, &mut out);
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
        self.count_waits(now);
        // From the last to the first: one that does not wait any more is replaced by one that was looked at
        // already.
        for at in (0..self.waiting.len()).rev() {
            let bucket = self.waiting[at];
            while self.deadline(bucket).is_some_and(|deadline| deadline <= now) {
                self.give_up_first(bucket, &mut out);
            }
        }
    }

    /// When [`Self::handle_timeout`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|bucket| self.deadline(*bucket)).min()
    }

    /// Adds the waits of held packets up to `now`; must be called before the number of held packets changes.
    fn count_waits(&mut self, now: Instant) {
        let since = self.waits_counted_at.replace(now).unwrap_or(now);
        let holding = u32::try_from(self.stats.holding).unwrap_or(u32::MAX);
        self.stats.wait += now.saturating_duration_since(since).saturating_mul(holding);
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
        self.spare = None;
        self.given_up.ranges.shrink_to_fit();
    }

    /// The entries of a sequence, with a capacity for the number `at` places ahead; `None` where there is too
    /// little room.
    fn entries_for(&mut self, bucket: u16, at: usize) -> Option<&mut VecDeque<Entry>> {
        let sequence = self.sequences.get_mut(&bucket)?;
        let before = sequence.entries.as_ref().map_or(0, |entries| entries.capacity());
        if sequence.entries.is_none() && self.waiting.len() >= MAX_WAITING_SEQUENCES {
            return None;
        }
        let wanted = (at + 1).max(if at < before { before } else { 2 * before });
        let room = MAX_ENTRIES - (self.entries - before);
        if at + 1 > room {
            return None;
        }
        let spare = &mut self.spare;
        let entries = sequence.entries.get_or_insert_with(|| {
            self.waiting.push(bucket);
            spare.take().filter(|spare| spare.capacity() <= room).unwrap_or_default()
        });
        let wanted = wanted.min(room);
        if wanted > entries.capacity() {
            entries.reserve_exact(wanted - entries.len());
        }
        self.entries = self.entries - before + entries.capacity();
        Some(entries)
    }

    /// Gives up all that a sequence waits for and begins it anew with this packet.
    fn restart(&mut self, label: Label, packet: Bytes, out: &mut impl FnMut(Bytes)) {
        let Label { bucket, number, .. } = label;
        tracing::debug!(
            target: REORDER,
            bucket,
            number,
            entries = self.entries,
            waiting = self.waiting.len(),
            "a number too far ahead: missing packets are given up, the sequence restarts"
        );
        self.give_up_all(bucket, out);
        self.given_up.forget(bucket);
        if let Some(sequence) = self.sequences.get_mut(&bucket) {
            sequence.next = (number + 1) % MODULUS;
        }
        out(packet);
    }

    fn give_up_all(&mut self, bucket: u16, out: &mut impl FnMut(Bytes)) {
        while self.deadline(bucket).is_some() {
            self.give_up_first(bucket, out);
        }
    }

    /// When the first missing packet of a sequence is given up; `None` where none is missing.
    fn deadline(&self, bucket: u16) -> Option<Instant> {
        match self.sequences.get(&bucket)?.entries.as_ref()?.front()? {
            Entry::Missing(deadline) => Some(*deadline),
            Entry::Held(_) | Entry::Delivered => None,
        }
    }

    /// Gives up the missing packets of a sequence up to the first received one, and delivers those behind
    /// them.
    fn give_up_first(&mut self, bucket: u16, out: &mut impl FnMut(Bytes)) {
        let Some(sequence) = self.sequences.get_mut(&bucket) else { return };
        let Some(entries) = &mut sequence.entries else { return };
        let mut count = 0;
        while entries.pop_front_if(|entry| matches!(entry, Entry::Missing(_))).is_some() {
            count += 1;
        }
        if count > 0 {
            self.given_up.push(GivenUpRange { bucket, first: sequence.next, count });
            sequence.next = (sequence.next + count) % MODULUS;
            self.stats.given_up += u64::from(count);
            tracing::trace!(target: REORDER, bucket, next = sequence.next, count, "missing packets are given up");
        }
        self.release(bucket, out);
    }

    /// Delivers the received packets of a sequence up to the next missing one.
    fn release(&mut self, bucket: u16, out: &mut impl FnMut(Bytes)) {
        let Some(sequence) = self.sequences.get_mut(&bucket) else { return };
        let Some(entries) = &mut sequence.entries else { return };
        while let Some(entry) = entries.pop_front_if(|entry| !matches!(entry, Entry::Missing(_))) {
            sequence.next = (sequence.next + 1) % MODULUS;
            if let Entry::Held(packet) = entry {
                self.bytes -= packet.len();
                self.stats.holding -= 1;
                out(packet.into());
            }
        }
        if entries.is_empty()
            && let Some(entries) = sequence.entries.take()
        {
            self.entries -= entries.capacity();
            if entries.capacity() <= MAX_SPARE_ENTRIES {
                self.spare = Some(entries);
            }
            if let Some(at) = self.waiting.iter().position(|waiting| *waiting == bucket) {
                self.waiting.swap_remove(at);
            }
        }
    }
}

/// Numbers that were given up, the oldest first.
#[derive(Debug, Default)]
struct GivenUp {
    ranges: VecDeque<GivenUpRange>,
}

#[derive(Clone, Copy, Debug)]
struct GivenUpRange {
    bucket: u16,
    first: u32,
    count: u32,
}

impl GivenUp {
    fn push(&mut self, range: GivenUpRange) {
        if self.ranges.len() == MAX_GIVEN_UP_RANGES {
            self.ranges.pop_front();
        }
        self.ranges.push_back(range);
    }

    fn forget(&mut self, bucket: u16) {
        self.ranges.retain(|range| range.bucket != bucket);
    }

    /// Whether a number was given up and has not arrived since; marks it as arrived.
    fn take(&mut self, bucket: u16, number: u32) -> bool {
        let is_inside = |range: &GivenUpRange| {
            range.bucket == bucket && (0..range.count as i32).contains(&distance(range.first, number))
        };
        let Some(at) = self.ranges.iter().position(is_inside) else { return false };
        let GivenUpRange { first, count, .. } = self.ranges[at];
        let before = distance(first, number) as u32;
        let behind = GivenUpRange { bucket, first: (number + 1) % MODULUS, count: count - before - 1 };
        match (before, behind.count) {
            (0, 0) => drop(self.ranges.remove(at)),
            (0, _) => self.ranges[at] = behind,
            (_, 0) => self.ranges[at].count = before,
            _ => {
                self.ranges[at].count = before;
                if self.ranges.len() < MAX_GIVEN_UP_RANGES {
                    self.ranges.insert(at + 1, behind);
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
