//! Where the packets of a session's flows arrive at the server: their class and their shard.
//!
//! In: the class and the shard at which a packet of a client arrived, and the addresses of pinned classes.
//! Out: those of the newest packet of a flow, or of the class whose address a packet of a new flow is for.
//! Always holds: all shards of the server see the same flows of a session, since the kernel may read the
//! answer to a flow through the queue of any shard; a session whose flows all arrive in the default class
//! stores nothing, and its packets take no lock; the number of flows is bounded.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use mpvpn_class::FlowClasses;
use mpvpn_packet::{FlowKey, ip::IpPacket};
use mpvpn_types::{ClassId, Instant};

use crate::Addresses;

/// Class and shard of a connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) class: ClassId,
    pub(crate) shard: u8,
    /// Whether packets to the client use this class only.
    pub(crate) is_pinned: bool,
}

/// The arrivals of the flows of a session. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionFlows(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Whether any flow is stored. It is read without the lock: a packet that crosses the first store uses
    /// the default class.
    is_in_use: AtomicBool,
    flows: Mutex<Flows>,
}

#[derive(Debug, Default)]
struct Flows {
    by_flow: FlowClasses<Arrival>,
    /// The addresses of pinned classes.
    by_address: Vec<(Addresses, Arrival)>,
}

impl SessionFlows {
    fn lock(&self) -> MutexGuard<'_, Flows> {
        // No code panics while it holds the lock.
        self.0.flows.lock().unwrap_or_else(PoisonError::into_inner)
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
        let flows = &mut self.lock().by_flow;
        match flows.get(now, flow) {
            None if arrival.class == ClassId::DEFAULT => {}
            Some(known) if known == arrival => {}
            _ => {
                flows.insert(now, flow, arrival);
                self.0.is_in_use.store(true, Ordering::Relaxed);
            }
        }
    }

    /// The arrival of the newest packet of the flow that `packet` answers, or that of the class to which its
    /// destination belongs; `None` if neither is known, or if the flow has always been in the default class.
    pub(crate) fn arrival(&self, now: Instant, packet: &IpPacket<'_>) -> Option<Arrival> {
        if !self.is_in_use() {
            return None;
        }
        let mut flows = self.lock();
        let of_flow = flows.by_flow.get(now, FlowKey::of(packet).hash32());
        of_flow.or_else(|| {
            let own = flows.by_address.iter().find(|(addresses, _)| addresses.contains(packet.dst()));
            own.map(|(_, arrival)| *arrival)
        })
    }

    /// A class has a connection at a shard, and these addresses of its own if it is pinned.
    pub(crate) fn set_own(&self, arrival: Arrival, addresses: Option<Addresses>) {
        let own = addresses.filter(|_| arrival.is_pinned);
        if own.is_none() && !self.is_in_use() {
            return;
        }
        let mut flows = self.lock();
        flows.by_address.retain(|(_, other)| other.class != arrival.class);
        flows.by_address.extend(own.map(|own| (own, arrival)));
        self.0.is_in_use.store(true, Ordering::Relaxed);
    }

    /// Forgets all flows until their next packets.
    pub(crate) fn clear(&self) {
        if self.is_in_use() {
            let mut flows = self.lock();
            flows.by_flow.clear();
            self.0.is_in_use.store(!flows.by_address.is_empty(), Ordering::Relaxed);
        }
    }
}
