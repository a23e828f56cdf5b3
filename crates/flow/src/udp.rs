//! The UDP flows of a machine that travel one by one.
//!
//! In come the keys of packets and what becomes of the requests made for them, out go what to do with a packet and
//! which requests to end. Bounded: where too many flows are alive, the one that was silent longest makes room.

use std::collections::BTreeMap;

use mpvpn_packet::{FlowKey, icmp::Unreachable};
use mpvpn_types::{Duration, Instant};

/// Flows that are remembered at most, unless told otherwise.
pub const MAX_UDP_FLOWS: usize = 4096;
/// A flow without a packet for so long is over ("two minutes" at least, RFC 4787 REQ-5 and RFC 9298 §3.1).
const IDLE: Duration = Duration::from_secs(150);
/// A query of the DNS is answered sooner, and its port not used again.
const IDLE_DNS: Duration = Duration::from_secs(20);
/// What was refused is not asked for again before.
const REFUSED: Duration = Duration::from_secs(3);
/// How often flows that are over are looked for.
const SWEEP: Duration = Duration::from_secs(5);

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpFlowState<Id> {
    /// It belongs to this request.
    Relayed(Id),
    /// It is answered with this error.
    Refused(Unreachable),
}

/// What is known of a flow.
#[derive(Clone, Copy, Debug)]
pub struct UdpFlowSummary {
    /// Of the packets that the app sends.
    pub key: FlowKey,
    /// Bytes from the app.
    pub up_bytes: u64,
    /// Bytes to the app.
    pub down_bytes: u64,
    /// When it began.
    pub started: Instant,
    /// When something of it was seen last.
    pub last_active: Instant,
}

#[derive(Debug)]
struct Flow<Id> {
    fate: UdpFlowState<Id>,
    up: u64,
    down: u64,
    since: Instant,
    last: Instant,
}

impl<Id> Flow<Id> {
    fn ends(&self, key: &FlowKey) -> Instant {
        const DNS: u16 = 53;
        self.last
            + match self.fate {
                UdpFlowState::Refused(_) => REFUSED,
                UdpFlowState::Relayed(_) if key.dst_port == DNS => IDLE_DNS,
                UdpFlowState::Relayed(_) => IDLE,
            }
    }
}

/// All flows, by the key of their packets and by their request.
#[derive(Debug)]
pub struct UdpFlows<Id> {
    most: usize,
    flows: BTreeMap<FlowKey, Flow<Id>>,
    keys: BTreeMap<Id, FlowKey>,
    sweep: Option<Instant>,
}

impl<Id: Copy + Ord> UdpFlows<Id> {
    /// None yet, and never more than `most`.
    pub fn new(most: usize) -> Self {
        Self { most, flows: BTreeMap::new(), keys: BTreeMap::new(), sweep: None }
    }

    /// Flows with a request.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no flow has a request.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether a request is that of a flow.
    pub fn contains(&self, id: Id) -> bool {
        self.keys.contains_key(&id)
    }

    /// Flows with a request, one by one.
    pub fn summaries(&self) -> impl Iterator<Item = UdpFlowSummary> + '_ {
        let carried = self.flows.iter().filter(|(_, flow)| matches!(flow.fate, UdpFlowState::Relayed(_)));
        carried.map(|(key, flow)| UdpFlowSummary {
            key: *key,
            up_bytes: flow.up,
            down_bytes: flow.down,
            started: flow.since,
            last_active: flow.last,
        })
    }

    /// What becomes of a packet with so many bytes that goes out; `None` if a request has to be made for it first.
    pub fn on_outgoing(&mut self, now: Instant, key: &FlowKey, bytes: usize) -> Option<UdpFlowState<Id>> {
        let flow = self.flows.get_mut(key)?;
        match flow.fate {
            UdpFlowState::Relayed(_) => {
                flow.last = now;
                flow.up += bytes as u64;
            }
            // Who goes on asking must be able to succeed some day.
            UdpFlowState::Refused(_) if now >= flow.ends(key) => {
                self.flows.remove(key);
                return None;
            }
            UdpFlowState::Refused(_) => {}
        }
        Some(flow.fate)
    }

    /// A request has been made for a packet with so many bytes, and those like it. Returns a request that is to be ended
    /// to make room.
    pub fn insert(&mut self, now: Instant, key: FlowKey, id: Id, bytes: usize) -> Option<Id> {
        let room = (self.flows.len() >= self.most).then(|| self.drop_oldest()).flatten();
        self.flows.insert(
            key,
            Flow { fate: UdpFlowState::Relayed(id), up: bytes as u64, down: 0, since: now, last: now },
        );
        self.keys.insert(id, key);
        self.sweep.get_or_insert(now + SWEEP);
        room
    }

    fn drop_oldest(&mut self) -> Option<Id> {
        let key = *self.flows.iter().min_by_key(|(_, flow)| flow.last)?.0;
        match self.flows.remove(&key)?.fate {
            UdpFlowState::Relayed(id) => {
                self.keys.remove(&id);
                Some(id)
            }
            UdpFlowState::Refused(_) => None,
        }
    }

    /// So many bytes came for the flow of a request: the key of the packets that the app sends.
    pub fn on_incoming(&mut self, now: Instant, id: Id, bytes: usize) -> Option<FlowKey> {
        let key = *self.keys.get(&id)?;
        let flow = self.flows.get_mut(&key)?;
        flow.last = now;
        flow.down += bytes as u64;
        Some(key)
    }

    /// A request was refused. Returns the key of the packets that the app sends.
    pub fn refuse(&mut self, now: Instant, id: Id, reason: Unreachable) -> Option<FlowKey> {
        let key = self.keys.remove(&id)?;
        let flow = self.flows.get_mut(&key)?;
        (flow.fate, flow.last) = (UdpFlowState::Refused(reason), now);
        Some(key)
    }

    /// A request has ended: the next packet makes another one.
    pub fn remove(&mut self, id: Id) {
        if let Some(key) = self.keys.remove(&id) {
            self.flows.remove(&key);
        }
    }

    /// When [`Self::expire`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.sweep
    }

    /// Forgets flows that are over, and returns their requests, which are to be ended.
    pub fn expire(&mut self, now: Instant) -> Vec<Id> {
        if self.sweep.is_none_or(|at| now < at) {
            return Vec::new();
        }
        let over = self.flows.extract_if(.., |key, flow| now >= flow.ends(key));
        let ended: Vec<Id> = over
            .filter_map(|(_, flow)| match flow.fate {
                UdpFlowState::Relayed(id) => Some(id),
                UdpFlowState::Refused(_) => None,
            })
            .collect();
        for id in &ended {
            self.keys.remove(id);
        }
        self.sweep = (!self.flows.is_empty()).then_some(now + SWEEP);
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpvpn_packet::protocol;

    fn key(port: u16, to: u16) -> FlowKey {
        FlowKey {
            src: [192, 0, 0, 2].into(),
            dst: [198, 51, 100, 1].into(),
            src_port: port,
            dst_port: to,
            protocol: protocol::UDP,
        }
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn a_flow_lives_as_long_as_packets_come_either_way() {
        let start = Instant::now();
        let mut flows = UdpFlows::new(10);
        assert_eq!(flows.on_outgoing(start, &key(1, 9), 10), None);
        assert_eq!(flows.insert(start, key(1, 9), 7, 10), None);
        assert_eq!(flows.on_outgoing(start + seconds(100), &key(1, 9), 10), Some(UdpFlowState::Relayed(7)));
        assert_eq!(flows.on_incoming(start + seconds(200), 7, 30), Some(key(1, 9)));
        assert_eq!(flows.expire(start + seconds(300)), []);
        assert_eq!(flows.expire(start + seconds(400)), [7]);
        assert_eq!(
            (flows.on_outgoing(start + seconds(400), &key(1, 9), 10), flows.on_incoming(start, 7, 30)),
            (None, None)
        );
        assert_eq!((flows.poll_timeout(), flows.len()), (None, 0));
    }

    #[test]
    fn a_query_of_the_dns_is_soon_forgotten() {
        let start = Instant::now();
        let mut flows = UdpFlows::new(10);
        flows.insert(start, key(1, 53), 1, 10);
        flows.insert(start, key(2, 443), 2, 10);
        assert_eq!(flows.expire(start + seconds(21)), [1]);
        assert_eq!(flows.len(), 1);
    }

    #[test]
    fn what_was_refused_is_asked_for_again_after_a_while() {
        let start = Instant::now();
        let mut flows = UdpFlows::new(10);
        flows.insert(start, key(1, 9), 1, 10);
        assert_eq!(flows.refuse(start, 1, Unreachable::Prohibited), Some(key(1, 9)));
        let refused = Some(UdpFlowState::Refused(Unreachable::Prohibited));
        for later in 0..3 {
            assert_eq!(flows.on_outgoing(start + seconds(later), &key(1, 9), 10), refused);
        }
        assert_eq!(flows.on_outgoing(start + seconds(3), &key(1, 9), 10), None);
        assert_eq!(flows.refuse(start, 1, Unreachable::Prohibited), None);
    }

    #[test]
    fn the_most_silent_flow_makes_room() {
        let start = Instant::now();
        let mut flows = UdpFlows::new(3);
        for n in 0..3 {
            assert_eq!(flows.insert(start + seconds(n), key(n as u16, 9), n, 10), None);
        }
        flows.on_outgoing(start + seconds(5), &key(0, 9), 10);
        assert_eq!(flows.insert(start + seconds(6), key(3, 9), 3, 10), Some(1));
        assert_eq!(flows.len(), 3);
        assert_eq!(flows.on_outgoing(start + seconds(6), &key(1, 9), 10), None);
        [0, 2, 3].into_iter().for_each(|id| flows.remove(id));
        assert!(flows.is_empty());
    }
}
