//! All queued packets in one slab, linked into one first-in-first-out list per flow.
//!
//! In: packets and the [`Fifo`] of their flow. Out: the oldest packet of a [`Fifo`]. Always holds: a slot of
//! the slab is either in exactly one [`Fifo`] or in the list of free slots.

use bytes::Bytes;

/// Marks the end of a list.
const NIL: u32 = u32::MAX;
/// Maximum number of packets in a store: the range of its indices.
pub(super) const MAX_PACKETS: usize = NIL as usize - 1;
/// Number of slots for which an empty store keeps memory (1 KiB). With fewer, each small burst allocates;
/// with more, thousands of idle clients hold memory.
const IDLE_CAPACITY: usize = 16;
/// Number of slots after the first growth: a TUN read of 64 KiB is split into about 50 packets.
const FIRST_GROWTH: usize = 64;

#[derive(Debug)]
pub(super) struct Packet {
    pub(super) data: Bytes,
    pub(super) flow: u32,
    pub(super) needs_order: bool,
    pub(super) unnumbered: bool,
    /// Time of the push in ns.
    pub(super) pushed_ns: u64,
}

/// The packets of one flow.
#[derive(Debug)]
pub(super) struct Fifo {
    head: u32,
    tail: u32,
    pub(super) packets: usize,
    pub(super) bytes: usize,
}

impl Fifo {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL, packets: 0, bytes: 0 };
}

#[derive(Debug)]
pub(super) struct Store {
    slots: Vec<Slot>,
    free: u32,
}

#[derive(Debug)]
struct Slot {
    packet: Packet,
    next: u32,
}

impl Store {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: NIL }
    }

    pub(super) fn push(&mut self, fifo: &mut Fifo, packet: Packet) {
        fifo.packets += 1;
        fifo.bytes += packet.data.len();
        let index = self.insert(Slot { packet, next: NIL });
        match fifo.tail {
            NIL => fifo.head = index,
            tail => self.slots[tail as usize].next = index,
        }
        fifo.tail = index;
    }

    /// The newest packet of a list.
    pub(super) fn last_mut(&mut self, fifo: &Fifo) -> Option<&mut Packet> {
        self.slots.get_mut(fifo.tail as usize).map(|slot| &mut slot.packet)
    }

    /// The oldest packet of a list.
    pub(super) fn first(&self, fifo: &Fifo) -> Option<&Packet> {
        self.slots.get(fifo.head as usize).map(|slot| &slot.packet)
    }

    pub(super) fn pop(&mut self, fifo: &mut Fifo) -> Option<Packet> {
        if fifo.head == NIL {
            return None;
        }
        let index = fifo.head;
        let slot = &mut self.slots[index as usize];
        let packet = Packet { data: std::mem::take(&mut slot.packet.data), ..slot.packet };
        fifo.head = slot.next;
        if fifo.head == NIL {
            fifo.tail = NIL;
        }
        slot.next = self.free;
        self.free = index;
        fifo.packets -= 1;
        fifo.bytes -= packet.data.len();
        Some(packet)
    }

    /// Removes all packets; every [`Fifo`] of the store must be dropped too.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.free = NIL;
    }

    /// Frees the memory of an empty store.
    pub(super) fn trim_memory(&mut self) {
        self.slots.shrink_to(IDLE_CAPACITY);
    }

    #[cfg(test)]
    /// Bytes of the slab.
    pub(super) fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    fn insert(&mut self, slot: Slot) -> u32 {
        if self.free != NIL {
            let index = self.free;
            let place = &mut self.slots[index as usize];
            self.free = place.next;
            *place = slot;
            return index;
        }
        if self.slots.len() == self.slots.capacity() {
            self.grow();
        }
        self.slots.push(slot);
        (self.slots.len() - 1) as u32
    }

    #[cold]
    fn grow(&mut self) {
        let now = self.slots.len();
        let wanted = if now < IDLE_CAPACITY { IDLE_CAPACITY } else { (2 * now).max(FIRST_GROWTH) };
        self.slots.reserve_exact(wanted - now);
    }

    /// Number of slots that are not in the free list.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        let mut free = 0;
        let mut at = self.free;
        while at != NIL {
            free += 1;
            at = self.slots[at as usize].next;
        }
        self.slots.len() - free
    }

    /// Packets and bytes of a list, counted by traversal.
    #[cfg(test)]
    pub(super) fn walk(&self, fifo: &Fifo) -> (usize, usize) {
        let (mut packets, mut bytes, mut at) = (0, 0, fifo.head);
        while at != NIL {
            let slot = &self.slots[at as usize];
            packets += 1;
            bytes += slot.packet.data.len();
            at = slot.next;
        }
        (packets, bytes)
    }
}
