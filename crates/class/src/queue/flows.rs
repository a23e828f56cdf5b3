//! The active flows of a queue, and the lists in which they wait for their turn.
//!
//! Always holds: a flow is found by its bucket exactly as long as it stands in one list.

use rustc_hash::FxHashMap;

use super::{
    codel::{Codel, Memory},
    store::Fifo,
};

/// Marks the end of a list.
const NIL: u32 = u32::MAX;
/// Flows that an empty queue keeps room for.
const KEPT: usize = 4;
/// Flows that ran empty whose drop rate is remembered.
const REMEMBERED: usize = 8;

/// One bucket with packets (or that had some a moment ago).
#[derive(Debug)]
pub(super) struct Flow {
    bucket: u32,
    /// The flow behind this one in its list.
    next: u32,
    /// Bytes that it may still send in this turn.
    pub(super) deficit: i64,
    pub(super) fifo: Fifo,
    pub(super) codel: Codel,
}

/// A list of flows, first in, first out.
#[derive(Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL };

    pub(super) fn is_empty(&self) -> bool {
        self.head == NIL
    }

    pub(super) fn front(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }
}

#[derive(Debug)]
pub(super) struct Flows {
    slots: Vec<Flow>,
    free: u32,
    by_bucket: FxHashMap<u32, u32>,
    /// A ring, the oldest entry is overwritten.
    memories: [(u32, Memory); REMEMBERED],
    next_memory: usize,
}

impl Flows {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: NIL,
            by_bucket: FxHashMap::default(),
            memories: [(NIL, Memory::default()); REMEMBERED],
            next_memory: 0,
        }
    }

    pub(super) fn find(&self, bucket: u32) -> Option<u32> {
        self.by_bucket.get(&bucket).copied()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Flow {
        &mut self.slots[slot as usize]
    }

    /// Makes a flow that stands in no list yet.
    pub(super) fn insert(&mut self, bucket: u32, deficit: i64) -> u32 {
        let codel = Codel::with_memory(self.recall(bucket));
        let flow = Flow { bucket, next: NIL, deficit, fifo: Fifo::EMPTY, codel };
        let slot = if self.free == NIL {
            if self.slots.len() < KEPT {
                self.slots.reserve_exact(KEPT - self.slots.len());
            }
            self.slots.push(flow);
            (self.slots.len() - 1) as u32
        } else {
            let slot = self.free;
            self.free = self.get_mut(slot).next;
            *self.get_mut(slot) = flow;
            slot
        };
        self.by_bucket.insert(bucket, slot);
        slot
    }

    /// Forgets a flow that is empty and stands in no list.
    pub(super) fn remove(&mut self, slot: u32) {
        let free = self.free;
        let flow = self.get_mut(slot);
        let (bucket, memory) = (flow.bucket, flow.codel.memory());
        flow.next = free;
        flow.fifo = Fifo::EMPTY;
        self.free = slot;
        self.by_bucket.remove(&bucket);
        self.remember(bucket, memory);
        if self.by_bucket.is_empty() {
            self.slots.clear();
            self.free = NIL;
        }
    }

    /// Forgets all flows of a list.
    pub(super) fn remove_all(&mut self, list: &mut List) {
        while let Some(slot) = self.pop_front(list) {
            self.remove(slot);
        }
    }

    pub(super) fn push_back(&mut self, list: &mut List, slot: u32) {
        self.get_mut(slot).next = NIL;
        match list.tail {
            NIL => list.head = slot,
            tail => self.get_mut(tail).next = slot,
        }
        list.tail = slot;
    }

    pub(super) fn pop_front(&mut self, list: &mut List) -> Option<u32> {
        let slot = list.front()?;
        list.head = self.get_mut(slot).next;
        if list.head == NIL {
            list.tail = NIL;
        }
        Some(slot)
    }

    /// The flow with the most bytes among those with a packet.
    pub(super) fn fattest(&self) -> Option<u32> {
        let flows = self.slots.iter().enumerate().filter(|(_, flow)| flow.fifo.packets > 0);
        flows.max_by_key(|(_, flow)| flow.fifo.bytes).map(|(slot, _)| slot as u32)
    }

    #[cfg(test)]
    /// Bytes of the slab and of the map, where the map's share is an estimate.
    pub(super) fn heap_bytes(&self) -> usize {
        let map_entry = size_of::<(u32, u32)>() + 1;
        self.slots.capacity() * size_of::<Flow>() + self.by_bucket.capacity() * 8 / 7 * map_entry
    }

    fn remember(&mut self, bucket: u32, memory: Memory) {
        if memory.count <= 1 {
            return;
        }
        self.memories[self.next_memory] = (bucket, memory);
        self.next_memory = (self.next_memory + 1) % REMEMBERED;
    }

    fn recall(&mut self, bucket: u32) -> Memory {
        match self.memories.iter_mut().find(|(of, _)| *of == bucket) {
            Some((of, memory)) => {
                *of = NIL;
                *memory
            }
            None => Memory::default(),
        }
    }

    /// Gives memory back if there are no flows.
    pub(super) fn trim_memory(&mut self) {
        if self.by_bucket.is_empty() {
            self.slots.shrink_to(KEPT);
            self.by_bucket.shrink_to(KEPT);
        }
    }

    #[cfg(test)]
    pub(super) fn listed(&self, list: &List) -> Vec<u32> {
        let mut slots = Vec::new();
        let mut at = list.head;
        while at != NIL {
            slots.push(at);
            at = self.slots[at as usize].next;
        }
        slots
    }

    /// How many flows exist.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_bucket.len()
    }
}
