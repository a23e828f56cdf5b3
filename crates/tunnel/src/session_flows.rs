//! Where the packets of a session's flows arrive at the server: their class and their shard.
//!
//! In: the class and the shard at which a packet of a client arrived. Out: those of the newest packet of a
//! flow. Always holds: all shards of the server see the same flows of a session, since the kernel may read
//! the answer to a flow through the queue of any shard; a session whose flows all arrive in the default class
//! stores nothing, and its packets take no lock; the number of flows is bounded.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use mpvpn_class::FlowClasses;
use mpvpn_packet::{FlowKey, ip::IpPacket};
use mpvpn_types::{ClassId, Instant};

/// Class and shard of a connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) class: ClassId,
    pub(crate) shard: u8,
}

/// The arrivals of the flows of a session. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionFlows(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Whether any flow is stored. It is read without the lock: a packet that crosses the first store uses
    /// the default class.
    is_in_use: AtomicBool,
    by_flow: Mutex<FlowClasses<Arrival>>,
}

impl SessionFlows {
    fn lock(&self) -> MutexGuard<'_, FlowClasses<Arrival>> {
        // No code panics while it holds the lock.
        self.0.by_flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_in_use(&self) -> bool {
        self.0.is_in_use.load(Ordering::Relaxed)
    }

    /// Records a packet of the client.
    pub(crate) fn record(&self, now: Instant, arrival: Arrival, packet: &IpPacket<'_>) {
        // Most clients use one class only.
        if arrival.class == ClassId::DEFAULT && !self.is_in_use() {
            return;
        }
        let flow = FlowKey::of(packet).reversed().hash32();
        let mut flows = self.lock();
        match flows.get(now, flow) {
            None if arrival.class == ClassId::DEFAULT => {}
            Some(known) if known == arrival => {}
            _ => {
                flows.insert(now, flow, arrival);
                self.0.is_in_use.store(true, Ordering::Relaxed);
            }
        }
    }

    /// The arrival of the newest packet of the flow that `packet` answers; `None` if it is not known, or if
    /// the flow has always been in the default class.
    pub(crate) fn arrival(&self, now: Instant, packet: &IpPacket<'_>) -> Option<Arrival> {
        if self.is_in_use() { self.lock().get(now, FlowKey::of(packet).hash32()) } else { None }
    }

    /// Forgets all flows until their next packets.
    pub(crate) fn clear(&self) {
        if self.is_in_use() {
            let mut flows = self.lock();
            flows.clear();
            self.0.is_in_use.store(false, Ordering::Relaxed);
        }
    }
}
