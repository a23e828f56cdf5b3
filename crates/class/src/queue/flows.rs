//! The active flows of a queue, and the round-robin lists of new and old flows.
//!
//! In: buckets. Out: slots of flows. Always holds: a flow can be found by its bucket exactly while it is in
//! one list.

use rustc_hash::FxHashMap;

use super::{
    codel::{Codel, DropState},
    store::Fifo,
};

/// Marks the end of a list.
const NIL: u32 = u32::MAX;
/// Number of flows for which an empty queue keeps memory: most idle clients have few flows at the same time.
/// With fewer, each burst allocates; with more, thousands of idle clients hold memory.
const IDLE_CAPACITY: usize = 4;
/// Number of emptied flows whose drop state is remembered. With fewer, a flow that runs empty now and then
/// starts with no drops each time; with more, a lookup, a linear search, takes longer. The number is chosen
/// (docs/design/shaper.md, open questions).
const MAX_REMEMBERED_STATES: usize = 8;

/// A bucket with packets, or one that became empty since its last turn.
#[derive(Debug)]
pub(super) struct Flow {
    bucket: u32,
    /// The flow behind this one in its list.
    next: u32,
    /// Bytes that the flow may still send in this round.
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
    /// Ring buffer of buckets and their drop states.
    remembered: [(u32, DropState); MAX_REMEMBERED_STATES],
    next_remembered: usize,
}

impl Flows {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: NIL,
            by_bucket: FxHashMap::default(),
            remembered: [(NIL, DropState::default()); MAX_REMEMBERED_STATES],
            next_remembered: 0,
        }
    }

    pub(super) fn find(&self, bucket: u32) -> Option<u32> {
        self.by_bucket.get(&bucket).copied()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Flow {
        &mut self.slots[slot as usize]
    }

    /// Creates a flow that is in no list yet.
    pub(super) fn insert(&mut self, bucket: u32, deficit: i64) -> u32 {
        let codel = Codel::with_drop_state(self.recall(bucket));
        let flow = Flow { bucket, next: NIL, deficit, fifo: Fifo::EMPTY, codel };
        let slot = if self.free == NIL {
            if self.slots.len() < IDLE_CAPACITY {
                self.slots.reserve_exact(IDLE_CAPACITY - self.slots.len());
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

    /// Removes an empty flow that is in no list.
    pub(super) fn remove(&mut self, slot: u32) {
        let free = self.free;
        let flow = self.get_mut(slot);
        let (bucket, drop_state) = (flow.bucket, flow.codel.drop_state);
        flow.next = free;
        flow.fifo = Fifo::EMPTY;
        self.free = slot;
        self.by_bucket.remove(&bucket);
        self.remember(bucket, drop_state);
        if self.by_bucket.is_empty() {
            self.slots.clear();
            self.free = NIL;
        }
    }

    /// Removes all flows of a list.
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

    /// The flow with the most queued bytes.
    pub(super) fn fattest(&self) -> Option<u32> {
        let flows = self.slots.iter().enumerate().filter(|(_, flow)| flow.fifo.packets > 0);
        flows.max_by_key(|(_, flow)| flow.fifo.bytes).map(|(slot, _)| slot as u32)
    }

    #[cfg(test)]
    /// Bytes of the slab and of the map; those of the map are estimated.
    pub(super) fn heap_bytes(&self) -> usize {
        let map_entry = size_of::<(u32, u32)>() + 1;
        self.slots.capacity() * size_of::<Flow>() + self.by_bucket.capacity() * 8 / 7 * map_entry
    }

    fn remember(&mut self, bucket: u32, drop_state: DropState) {
        if drop_state.count <= 1 {
            return;
        }
        self.remembered[self.next_remembered] = (bucket, drop_state);
        self.next_remembered = (self.next_remembered + 1) % MAX_REMEMBERED_STATES;
    }

    fn recall(&mut self, bucket: u32) -> DropState {
        match self.remembered.iter_mut().find(|(of, _)| *of == bucket) {
            Some((of, state)) => {
                *of = NIL;
                *state
            }
            None => DropState::default(),
        }
    }

    /// Frees memory if there are no flows.
    pub(super) fn trim_memory(&mut self) {
        if self.by_bucket.is_empty() {
            self.slots.shrink_to(IDLE_CAPACITY);
            self.by_bucket.shrink_to(IDLE_CAPACITY);
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

    /// Number of flows.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_bucket.len()
    }
}
