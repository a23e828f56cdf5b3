//! What some operators have before the bottleneck: each UDP session gets a rate of its own and no more.
//!
//! In: packets with their sessions, and the current time. Out: the same packets, in the order in which they leave
//! their sessions' queues. Always holds: a session's packets stay in order, and memory is bounded.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use mpvpn_types::BitRate;

/// Sessions that are told apart; the one that was silent for the longest time makes room for a new one.
const MAX_SESSIONS: usize = 256;

/// A UDP session in one direction: the addresses and ports of its two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UdpFlow {
    from: SocketAddr,
    to: SocketAddr,
}

impl UdpFlow {
    /// The session of packets between these.
    pub fn new(from: SocketAddr, to: SocketAddr) -> Self {
        Self { from, to }
    }

    /// Its two ports, the sender's first.
    pub(crate) fn ports(&self) -> [u16; 2] {
        [self.from.port(), self.to.port()]
    }

    /// The session that an IP packet belongs to, if it is a UDP packet that shows its ports.
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

/// The queues of all sessions.
pub(crate) struct Shaper<T> {
    sessions: BTreeMap<UdpFlow, Queue<T>>,
}

struct Queue<T> {
    packets: VecDeque<Packet<T>>,
    /// Bytes in `packets`, as the rate counts them.
    bytes: u64,
    /// When the first packet has left.
    head_done: Instant,
    /// When the last packet came.
    seen: Instant,
}

/// A packet, and what the rates count of it.
pub(crate) struct Packet<T> {
    pub(crate) ip_bytes: u32,
    pub(crate) counted: u32,
    pub(crate) item: T,
}

impl<T> Shaper<T> {
    pub(crate) fn new() -> Self {
        Self { sessions: BTreeMap::new() }
    }

    /// Whether a session's queue, of `queue` at `rate`, takes `counted` bytes more.
    pub(crate) fn has_room(&self, session: &UdpFlow, rate: BitRate, queue: Duration, counted: u32) -> bool {
        self.sessions.get(session).is_none_or(|own| {
            own.packets.is_empty() || own.bytes + u64::from(counted) <= rate.bytes_in(queue)
        })
    }

    /// Takes a packet; returns those of a session that made room for this one.
    pub(crate) fn push(
        &mut self,
        now: Instant,
        session: UdpFlow,
        rate: BitRate,
        packet: Packet<T>,
    ) -> Vec<T> {
        let mut gone = Vec::new();
        if !self.sessions.contains_key(&session) && self.sessions.len() >= MAX_SESSIONS {
            let oldest =
                self.sessions.iter().min_by_key(|(_, queue)| queue.seen).map(|(session, _)| *session);
            let forgotten = oldest.and_then(|oldest| self.sessions.remove(&oldest));
            gone.extend(forgotten.into_iter().flat_map(|queue| queue.packets).map(|packet| packet.item));
        }
        let own = self.sessions.entry(session).or_insert_with(|| Queue {
            packets: VecDeque::new(),
            bytes: 0,
            head_done: now,
            seen: now,
        });
        own.seen = now;
        if own.packets.is_empty() {
            own.head_done = own.head_done.max(now) + rate.time_for(packet.counted.into());
        }
        own.bytes += u64::from(packet.counted);
        own.packets.push_back(packet);
        gone
    }

    /// The next packet that has left its queue by `now`, and when. `rate`: that of each session from then on; `None`
    /// lets all that waits go.
    pub(crate) fn pop(&mut self, now: Instant, rate: Option<BitRate>) -> Option<(Instant, Packet<T>)> {
        let waiting = self.sessions.values_mut().filter(|queue| !queue.packets.is_empty());
        let first = waiting.min_by_key(|queue| queue.head_done).filter(|queue| queue.head_done <= now)?;
        let packet = first.packets.pop_front()?;
        let left = first.head_done;
        first.bytes -= u64::from(packet.counted);
        if let Some(next) = first.packets.front() {
            let time = rate.map_or(Duration::ZERO, |rate| rate.time_for(next.counted.into()));
            first.head_done = left + time;
        }
        Some((left, packet))
    }

    /// When [`Self::pop`] has something.
    pub(crate) fn next(&self) -> Option<Instant> {
        let waiting = self.sessions.values().filter(|queue| !queue.packets.is_empty());
        waiting.map(|queue| queue.head_done).min()
    }

    /// Packets that wait.
    pub(crate) fn len(&self) -> usize {
        self.sessions.values().map(|queue| queue.packets.len()).sum()
    }

    /// Empties all queues.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = T> + use<T> {
        let all = std::mem::take(&mut self.sessions);
        all.into_values().flat_map(|queue| queue.packets).map(|packet| packet.item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: BitRate = BitRate::from_bps(8_000_000);
    const MS: Duration = Duration::from_millis(1);

    fn session(port: u16) -> UdpFlow {
        UdpFlow::new(([192, 0, 2, 1], port).into(), ([198, 51, 100, 1], 443).into())
    }

    fn packet(item: u32) -> Packet<u32> {
        Packet { ip_bytes: 1000, counted: 1000, item }
    }

    #[test]
    fn sessions_are_known_by_their_addresses_and_ports() {
        let mut v4 = vec![0x45, 0, 0, 30, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 1];
        v4.extend([0x13, 0x88, 0x01, 0xbb, 0, 10, 0, 0]);
        assert_eq!(UdpFlow::of_packet(&v4), Some(session(5000)), "also with the flag against fragmentation");
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
        let (mut shaper, start) = (Shaper::new(), Instant::now());
        for n in 0..3 {
            shaper.push(start, session(1), RATE, packet(n));
        }
        shaper.push(start + MS / 2, session(2), RATE, packet(10));
        let out = std::iter::from_fn(|| shaper.pop(start + 10 * MS, Some(RATE)));
        let out: Vec<_> = out.map(|(at, packet)| (packet.item, (at - start).as_micros())).collect();
        assert_eq!(out, [(0, 1000), (10, 1500), (1, 2000), (2, 3000)]);
    }

    #[test]
    fn a_queue_is_full_for_its_own_session_only() {
        let (mut shaper, start) = (Shaper::new(), Instant::now());
        let room = |shaper: &Shaper<u32>, port| shaper.has_room(&session(port), RATE, 2 * MS, 1000);
        for n in 0..2 {
            assert!(room(&shaper, 1));
            shaper.push(start, session(1), RATE, packet(n));
        }
        assert!(!room(&shaper, 1) && room(&shaper, 2));
    }

    #[test]
    fn the_session_that_was_silent_for_longest_is_forgotten() {
        let (mut shaper, start) = (Shaper::new(), Instant::now());
        for port in 0..MAX_SESSIONS as u16 {
            assert!(
                shaper
                    .push(start + MS * u32::from(port), session(port), RATE, packet(port.into()))
                    .is_empty()
            );
        }
        let later = start + Duration::from_secs(1);
        shaper.push(later, session(0), RATE, packet(1000));
        assert_eq!(shaper.push(later, session(9999), RATE, packet(2000)), [1]);
        assert_eq!((shaper.sessions.len(), shaper.len()), (MAX_SESSIONS, MAX_SESSIONS + 1));
        assert_eq!((shaper.clear().count(), shaper.next()), (MAX_SESSIONS + 1, None));
    }
}
