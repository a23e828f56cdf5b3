//! A shaper that limits the rate of each UDP flow (5-tuple) in front of the bottleneck, as some operators
//! have it.
//!
//! In: packets with their flows, and the current time. Out: the same packets, in the order in which they
//! leave the queues of their flows. Always holds: the packets of a flow stay in order, and memory is bounded.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use mpvpn_types::BitRate;

/// Flows that have a queue, at most; beyond that the flow with the oldest arrival is dropped. With fewer,
/// flows displace each other; more take memory (`docs/design/lab.md`).
const MAX_FLOWS: usize = 256;

/// One direction of a UDP flow: addresses and ports of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UdpFlow {
    from: SocketAddr,
    to: SocketAddr,
}

impl UdpFlow {
    /// The flow of packets from `from` to `to`.
    pub fn new(from: SocketAddr, to: SocketAddr) -> Self {
        Self { from, to }
    }

    /// The source and the destination port.
    pub(crate) fn ports(&self) -> [u16; 2] {
        [self.from.port(), self.to.port()]
    }

    /// The flow of an IP packet; `None` if it is no UDP packet, or a later fragment, which has no ports.
    pub fn of_packet(packet: &[u8]) -> Option<Self> {
        const UDP: u8 = 17;
        let (from, to, rest) = match packet.first()? >> 4 {
            4 => {
                let later_fragment = packet.get(6..8)? != [0, 0] && packet[6] & 0x1f | packet[7] != 0;
                if *packet.get(9)? != UDP || later_fragment {
                    return None;
                }
                let address = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
                let header = usize::from(packet[0] & 0x0f) * 4;
                (address(12)?.into(), address(16)?.into(), packet.get(header..)?)
            }
            6 if *packet.get(6)? == UDP => {
                let address = |at: usize| Some(Ipv6Addr::from(*packet.get(at..)?.first_chunk::<16>()?));
                (address(8)?.into(), address(24)?.into(), packet.get(40..)?)
            }
            _ => return None,
        };
        let [a, b, c, d] = *rest.first_chunk()?;
        let (source, destination) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Some(Self::new(SocketAddr::new(from, source), SocketAddr::new(to, destination)))
    }
}

/// The queues of all flows.
pub(crate) struct FlowShaper<T> {
    flows: BTreeMap<UdpFlow, FlowQueue<T>>,
}

struct FlowQueue<T> {
    packets: VecDeque<Packet<T>>,
    /// Bytes in `packets`, with the overhead that the rate counts.
    bytes: u64,
    /// When the transmission of the first packet ends.
    head_departs: Instant,
    /// When the last packet arrived.
    last_arrival: Instant,
}

/// A packet with its length, and the bytes that the rates count.
pub(crate) struct Packet<T> {
    pub(crate) ip_bytes: u32,
    pub(crate) counted_bytes: u32,
    pub(crate) item: T,
}

impl<T> FlowShaper<T> {
    pub(crate) fn new() -> Self {
        Self { flows: BTreeMap::new() }
    }

    /// Whether the queue of `flow`, limited to the time `queue` at `rate`, takes a packet of `counted_bytes`.
    pub(crate) fn fits(&self, flow: &UdpFlow, rate: BitRate, queue: Duration, counted_bytes: u32) -> bool {
        self.flows.get(flow).is_none_or(|own| {
            own.packets.is_empty() || own.bytes + u64::from(counted_bytes) <= rate.bytes_in(queue)
        })
    }

    /// Queues a packet; returns the packets of a flow that was dropped to make room for a new one.
    pub(crate) fn push(&mut self, now: Instant, flow: UdpFlow, rate: BitRate, packet: Packet<T>) -> Vec<T> {
        let mut evicted = Vec::new();
        if !self.flows.contains_key(&flow) && self.flows.len() >= MAX_FLOWS {
            let oldest = self.flows.iter().min_by_key(|(_, queue)| queue.last_arrival).map(|(flow, _)| *flow);
            let forgotten = oldest.and_then(|oldest| self.flows.remove(&oldest));
            evicted.extend(forgotten.into_iter().flat_map(|queue| queue.packets).map(|packet| packet.item));
        }
        let own = self.flows.entry(flow).or_insert_with(|| FlowQueue {
            packets: VecDeque::new(),
            bytes: 0,
            head_departs: now,
            last_arrival: now,
        });
        own.last_arrival = now;
        if own.packets.is_empty() {
            own.head_departs = own.head_departs.max(now) + rate.time_for(packet.counted_bytes.into());
        }
        own.bytes += u64::from(packet.counted_bytes);
        own.packets.push_back(packet);
        evicted
    }

    /// The next packet that has left its queue by `now`, and when. `rate` is the rate of each flow from then
    /// on; without one all queued packets leave at once.
    pub(crate) fn pop(&mut self, now: Instant, rate: Option<BitRate>) -> Option<(Instant, Packet<T>)> {
        let backlogged = self.flows.values_mut().filter(|queue| !queue.packets.is_empty());
        let first =
            backlogged.min_by_key(|queue| queue.head_departs).filter(|queue| queue.head_departs <= now)?;
        let packet = first.packets.pop_front()?;
        let left = first.head_departs;
        first.bytes -= u64::from(packet.counted_bytes);
        if let Some(next) = first.packets.front() {
            let time = rate.map_or(Duration::ZERO, |rate| rate.time_for(next.counted_bytes.into()));
            first.head_departs = left + time;
        }
        Some((left, packet))
    }

    /// When [`Self::pop`] will return a packet.
    pub(crate) fn next(&self) -> Option<Instant> {
        let backlogged = self.flows.values().filter(|queue| !queue.packets.is_empty());
        backlogged.map(|queue| queue.head_departs).min()
    }

    /// The number of queued packets.
    pub(crate) fn len(&self) -> usize {
        self.flows.values().map(|queue| queue.packets.len()).sum()
    }

    /// Empties all queues and returns their items.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = T> + use<T> {
        let all = std::mem::take(&mut self.flows);
        all.into_values().flat_map(|queue| queue.packets).map(|packet| packet.item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: BitRate = BitRate::from_bps(8_000_000);
    const MS: Duration = Duration::from_millis(1);

    fn flow(port: u16) -> UdpFlow {
        UdpFlow::new(([192, 0, 2, 1], port).into(), ([198, 51, 100, 1], 443).into())
    }

    fn packet(item: u32) -> Packet<u32> {
        Packet { ip_bytes: 1000, counted_bytes: 1000, item }
    }

    #[test]
    fn sessions_are_known_by_their_addresses_and_ports() {
        let mut v4 = vec![0x45, 0, 0, 30, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 1];
        v4.extend([0x13, 0x88, 0x01, 0xbb, 0, 10, 0, 0]);
        assert_eq!(UdpFlow::of_packet(&v4), Some(flow(5000)), "also with the flag against fragmentation");
        for len in 0..24 {
            assert_eq!(UdpFlow::of_packet(&v4[..len]), None, "{len} bytes");
        }
        let changed = |at: usize, byte| {
            let mut other = v4.clone();
            other[at] = byte;
            UdpFlow::of_packet(&other)
        };
        assert_eq!(changed(9, 6), None, "TCP");
        assert_eq!(changed(7, 1), None, "a later fragment");
        let mut v6 = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
        v6.extend([[0x20; 16], [0x30; 16]].concat());
        v6.extend([0x13, 0x88, 0x01, 0xbb, 0, 8, 0, 0]);
        let ends = [(Ipv6Addr::from([0x20; 16]), 5000), (Ipv6Addr::from([0x30; 16]), 443)];
        assert_eq!(UdpFlow::of_packet(&v6), Some(UdpFlow::new(ends[0].into(), ends[1].into())));
    }

    #[test]
    fn each_session_has_the_rate_for_itself() {
        let (mut shaper, start) = (FlowShaper::new(), Instant::now());
        for n in 0..3 {
            shaper.push(start, flow(1), RATE, packet(n));
        }
        shaper.push(start + MS / 2, flow(2), RATE, packet(10));
        let out = std::iter::from_fn(|| shaper.pop(start + 10 * MS, Some(RATE)));
        let out: Vec<_> = out.map(|(at, packet)| (packet.item, (at - start).as_micros())).collect();
        assert_eq!(out, [(0, 1000), (10, 1500), (1, 2000), (2, 3000)]);
    }

    #[test]
    fn a_queue_is_full_for_its_own_session_only() {
        let (mut shaper, start) = (FlowShaper::new(), Instant::now());
        let room = |shaper: &FlowShaper<u32>, port| shaper.fits(&flow(port), RATE, 2 * MS, 1000);
        for n in 0..2 {
            assert!(room(&shaper, 1));
            shaper.push(start, flow(1), RATE, packet(n));
        }
        assert!(!room(&shaper, 1) && room(&shaper, 2));
    }

    #[test]
    fn the_session_that_was_silent_for_longest_is_forgotten() {
        let (mut shaper, start) = (FlowShaper::new(), Instant::now());
        for port in 0..MAX_FLOWS as u16 {
            assert!(
                shaper.push(start + MS * u32::from(port), flow(port), RATE, packet(port.into())).is_empty()
            );
        }
        let later = start + Duration::from_secs(1);
        shaper.push(later, flow(0), RATE, packet(1000));
        assert_eq!(shaper.push(later, flow(9999), RATE, packet(2000)), [1]);
        assert_eq!((shaper.flows.len(), shaper.len()), (MAX_FLOWS, MAX_FLOWS + 1));
        assert_eq!((shaper.clear().count(), shaper.next()), (MAX_FLOWS + 1, None));
    }
}
