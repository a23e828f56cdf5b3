//! UDP flows that travel as UDP payloads, each with a CONNECT-UDP request of its own (RFC 9298).
//!
//! In: the 5-tuples of packets, and the outcome of requests. Out: which request carries a packet, or the ICMP
//! error that answers it, and which requests to end. Always holds: the number of flows is bounded; for a new
//! flow the one that was silent for the longest time is dropped.

use std::collections::BTreeMap;

use mpvpn_packet::{FlowKey, icmp::Unreachable};
use mpvpn_types::{Duration, Instant};

/// The default bound of flows. Fewer: flows of busy machines end early; more: requests and memory. Chosen
/// (docs/design/relay.md).
pub const MAX_UDP_FLOWS: usize = 4096;
/// How long a flow lives without a packet: RFC 4787 REQ-5 and RFC 9298 §3.1 ask for two minutes at least.
/// Longer: requests of flows that are over.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// How long a DNS flow (port 53) lives without a packet: a query is answered sooner, and its port is not
/// reused. Shorter: late answers are dropped; longer: many useless requests.
const DNS_IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long packets of a refused flow are answered with the error before another request is made. Shorter:
/// load on the server; longer: a flow that would be accepted again waits. Chosen.
const REFUSAL_TIME: Duration = Duration::from_secs(3);
/// How often expired flows are removed. Shorter: processor time; longer: flows live up to this much longer.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How the packets of a flow travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpFlowState<Id> {
    /// In the datagrams of this request.
    Relayed(Id),
    /// Not at all: they are answered with this ICMP error.
    Refused(Unreachable),
}

/// The state of a flow, for status output.
#[derive(Clone, Copy, Debug)]
pub struct UdpFlowSummary {
    /// The 5-tuple of the packets that the app sends.
    pub key: FlowKey,
    /// Bytes from the app.
    pub up_bytes: u64,
    /// Bytes to the app.
    pub down_bytes: u64,
    /// When the flow began.
    pub started: Instant,
    /// When a packet of the flow last passed.
    pub last_active: Instant,
}

#[derive(Debug)]
struct Flow<Id> {
    state: UdpFlowState<Id>,
    up: u64,
    down: u64,
    since: Instant,
    last_packet: Instant,
}

impl<Id> Flow<Id> {
    fn expires_at(&self, key: &FlowKey) -> Instant {
        const DNS: u16 = 53;
        self.last_packet
            + match self.state {
                UdpFlowState::Refused(_) => REFUSAL_TIME,
                UdpFlowState::Relayed(_) if key.dst_port == DNS => DNS_IDLE_TIMEOUT,
                UdpFlowState::Relayed(_) => IDLE_TIMEOUT,
            }
    }
}

/// All flows, by 5-tuple and by request.
#[derive(Debug)]
pub struct UdpFlows<Id> {
    max_flows: usize,
    flows: BTreeMap<FlowKey, Flow<Id>>,
    keys_by_request: BTreeMap<Id, FlowKey>,
    next_sweep: Option<Instant>,
}

impl<Id: Copy + Ord> UdpFlows<Id> {
    /// No flows yet, and never more than `max_flows`.
    pub fn new(max_flows: usize) -> Self {
        Self { max_flows, flows: BTreeMap::new(), keys_by_request: BTreeMap::new(), next_sweep: None }
    }

    /// The number of flows with a request.
    pub fn len(&self) -> usize {
        self.keys_by_request.len()
    }

    /// Whether no flow has a request.
    pub fn is_empty(&self) -> bool {
        self.keys_by_request.is_empty()
    }

    /// Whether a request belongs to a flow.
    pub fn contains(&self, id: Id) -> bool {
        self.keys_by_request.contains_key(&id)
    }

    /// The flows with a request.
    pub fn summaries(&self) -> impl Iterator<Item = UdpFlowSummary> + '_ {
        let carried = self.flows.iter().filter(|(_, flow)| matches!(flow.state, UdpFlowState::Relayed(_)));
        carried.map(|(key, flow)| UdpFlowSummary {
            key: *key,
            up_bytes: flow.up,
            down_bytes: flow.down,
            started: flow.since,
            last_active: flow.last_packet,
        })
    }

    /// How a packet of `bytes` bytes from an app travels; `None` if a request has to be made first.
    pub fn on_outgoing(&mut self, now: Instant, key: &FlowKey, bytes: usize) -> Option<UdpFlowState<Id>> {
        let flow = self.flows.get_mut(key)?;
        match flow.state {
            UdpFlowState::Relayed(_) => {
                flow.last_packet = now;
                flow.up += bytes as u64;
            }
            // An app that keeps sending gets another request.
            UdpFlowState::Refused(_) if now >= flow.expires_at(key) => {
                self.flows.remove(key);
                return None;
            }
            UdpFlowState::Refused(_) => {}
        }
        Some(flow.state)
    }

    /// Adds a flow whose request was made for a packet of `bytes` bytes. Returns the request of a flow that
    /// was dropped for it, which is to be ended.
    pub fn insert(&mut self, now: Instant, key: FlowKey, id: Id, bytes: usize) -> Option<Id> {
        let dropped = (self.flows.len() >= self.max_flows).then(|| self.drop_oldest()).flatten();
        self.flows.insert(
            key,
            Flow {
                state: UdpFlowState::Relayed(id),
                up: bytes as u64,
                down: 0,
                since: now,
                last_packet: now,
            },
        );
        self.keys_by_request.insert(id, key);
        self.next_sweep.get_or_insert(now + SWEEP_INTERVAL);
        dropped
    }

    fn drop_oldest(&mut self) -> Option<Id> {
        let key = *self.flows.iter().min_by_key(|(_, flow)| flow.last_packet)?.0;
        match self.flows.remove(&key)?.state {
            UdpFlowState::Relayed(id) => {
                self.keys_by_request.remove(&id);
                Some(id)
            }
            UdpFlowState::Refused(_) => None,
        }
    }

    /// Counts a packet of `bytes` bytes for the app. Returns the 5-tuple of the packets that the app sends.
    pub fn on_incoming(&mut self, now: Instant, id: Id, bytes: usize) -> Option<FlowKey> {
        let key = *self.keys_by_request.get(&id)?;
        let flow = self.flows.get_mut(&key)?;
        flow.last_packet = now;
        flow.down += bytes as u64;
        Some(key)
    }

    /// Marks the flow of a request as refused. Returns the 5-tuple of the packets that the app sends.
    pub fn refuse(&mut self, now: Instant, id: Id, reason: Unreachable) -> Option<FlowKey> {
        let key = self.keys_by_request.remove(&id)?;
        let flow = self.flows.get_mut(&key)?;
        (flow.state, flow.last_packet) = (UdpFlowState::Refused(reason), now);
        Some(key)
    }

    /// Removes the flow of a request that has ended; its next packet needs another request.
    pub fn remove(&mut self, id: Id) {
        if let Some(key) = self.keys_by_request.remove(&id) {
            self.flows.remove(&key);
        }
    }

    /// When [`Self::expire`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next_sweep
    }

    /// Removes expired flows, and returns their requests, which are to be ended.
    pub fn expire(&mut self, now: Instant) -> Vec<Id> {
        if self.next_sweep.is_none_or(|at| now < at) {
            return Vec::new();
        }
        let over = self.flows.extract_if(.., |key, flow| now >= flow.expires_at(key));
        let ended: Vec<Id> = over
            .filter_map(|(_, flow)| match flow.state {
                UdpFlowState::Relayed(id) => Some(id),
                UdpFlowState::Refused(_) => None,
            })
            .collect();
        for id in &ended {
            self.keys_by_request.remove(id);
        }
        self.next_sweep = (!self.flows.is_empty()).then_some(now + SWEEP_INTERVAL);
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
    fn a_dns_flow_expires_soon() {
        let start = Instant::now();
        let mut flows = UdpFlows::new(10);
        flows.insert(start, key(1, 53), 1, 10);
        flows.insert(start, key(2, 443), 2, 10);
        assert_eq!(flows.expire(start + seconds(21)), [1]);
        assert_eq!(flows.len(), 1);
    }

    #[test]
    fn a_refused_flow_gets_another_request_after_a_while() {
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
    fn the_flow_that_was_silent_longest_is_dropped() {
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
