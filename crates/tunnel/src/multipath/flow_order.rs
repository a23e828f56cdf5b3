//! Which flows have to arrive in order: TCP for its speed, QUIC for its own detection of loss, downloads over
//! UDP.
//!
//! In: packets of flows and the time. Out: whether overtaking hurts the flow. Always holds: what is
//! remembered is bounded by the number of sequences, and a flow that falls silent is forgotten.

use mpvpn_packet::{ip, protocol};
use mpvpn_types::{Duration, Instant};

/// Bytes in about 200 ms (halved every 100 ms) from which on a flow of UDP gets order: about 8 Mbit/s. Those
/// are downloads, not calls: a lower limit holds packets of calls back, a higher one lets downloads collapse.
const BULK: u32 = 200_000;
const METER_STEP: Duration = Duration::from_millis(100);
/// Steps of silence after which a flow of QUIC is forgotten: a minute, twice the usual idle timeout of its
/// connections.
const QUIC_STEPS: u32 = 600;
/// Versions of QUIC (RFC 9000, RFC 9369).
const QUIC_VERSIONS: [u32; 2] = [1, 0x6b33_43cf];

/// Whether overtaking hurts the flow of a packet.
pub(super) fn needs_order(packet: &ip::IpPacket<'_>) -> bool {
    if !packet.has_transport_header() {
        return true;
    }
    match packet.protocol() {
        protocol::UDP | protocol::ICMP | protocol::ICMPV6 => false,
        // An acknowledgement that is overtaken is only worth nothing.
        protocol::TCP => !is_pure_ack(packet.transport()),
        _ => true,
    }
}

/// Whether a TCP segment carries no data and no flag but ACK (RFC 9293 §3.1).
fn is_pure_ack(segment: &[u8]) -> bool {
    const OTHER_FLAGS: u8 = 0b111;
    let (Some(offset), Some(flags)) = (segment.get(12), segment.get(13)) else { return false };
    usize::from(offset >> 4) * 4 == segment.len() && flags & OTHER_FLAGS == 0
}

/// How much each sequence of numbers carried lately.
#[derive(Debug, Default)]
pub(super) struct FlowOrder {
    origin: Option<Instant>,
    sequences: Vec<Metered>,
}

#[derive(Clone, Debug, Default)]
struct Metered {
    /// The step of 100 ms in which a packet came last.
    last: u32,
    /// Bytes, halved each step.
    sum: u32,
    bulk: bool,
    /// It began as QUIC does.
    quic: bool,
}

impl FlowOrder {
    /// Whether overtaking hurts the flow of a packet that is not TCP's. QUIC takes what is overtaken by three
    /// packets for lost (RFC 9002 §6.1.1), and would never become quick enough to be told by its rate.
    pub(super) fn wants_order(&mut self, now: Instant, bucket: u16, packet: &[u8]) -> bool {
        if self.sequences.is_empty() {
            self.sequences = vec![Metered::default(); mpvpn_flow::BUCKETS as usize];
        }
        let step = step(*self.origin.get_or_insert(now), now);
        let Some(metered) = self.sequences.get_mut(usize::from(bucket)) else { return false };
        metered.wants_order(step, packet.len(), || begins_quic(packet))
    }
}

impl Metered {
    fn wants_order(&mut self, step: u32, bytes: usize, begins_quic: impl FnOnce() -> bool) -> bool {
        if step != self.last {
            self.quic &= step.saturating_sub(self.last) < QUIC_STEPS;
            self.sum = self.sum.checked_shr(step.saturating_sub(self.last)).unwrap_or(0);
            self.last = step;
            self.bulk &= self.sum > BULK / 4;
        }
        self.sum = self.sum.saturating_add(bytes as u32);
        self.bulk |= self.sum > BULK;
        self.quic = self.quic || begins_quic();
        self.bulk || self.quic
    }
}

fn step(origin: Instant, now: Instant) -> u32 {
    (now.saturating_duration_since(origin).as_millis() / METER_STEP.as_millis()) as u32
}

/// How much one flow of UDP payloads carried lately.
#[derive(Debug)]
pub(crate) struct FlowMeter {
    origin: Instant,
    metered: Metered,
}

impl FlowMeter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { origin: now, metered: Metered::default() }
    }

    /// Whether overtaking hurts the flow of a payload.
    pub(crate) fn wants_order(&mut self, now: Instant, payload: &[u8]) -> bool {
        self.metered.wants_order(step(self.origin, now), payload.len(), || is_long_header(payload))
    }
}

/// Whether an IP packet carries a QUIC packet with a long header, as connections begin (RFC 9000 §17.2).
fn begins_quic(packet: &[u8]) -> bool {
    const UDP_HEADER: usize = 8;
    let Ok(view) = ip::parse(packet) else { return false };
    if view.protocol() != protocol::UDP || !view.has_transport_header() {
        return false;
    }
    view.transport().get(UDP_HEADER..).is_some_and(is_long_header)
}

fn is_long_header(payload: &[u8]) -> bool {
    let Some([first, version @ ..]) = payload.first_chunk::<5>() else { return false };
    first & 0xc0 == 0xc0 && QUIC_VERSIONS.contains(&u32::from_be_bytes(*version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_is_told_from_a_call() {
        let start = Instant::now();
        let mut order = FlowOrder::default();
        let mut bulk = |bucket, interval_ms, bytes| {
            let packets = (0..2000u64).map(|n| start + Duration::from_millis(n * interval_ms));
            let packet = vec![0; bytes];
            packets.map(|at| order.wants_order(at, bucket, &packet)).filter(|bulk| *bulk).count()
        };
        assert_eq!(bulk(1, 20, 200), 0, "50 packets/s of 200 bytes");
        assert_eq!(bulk(2, 2, 1200), 0, "4.8 Mbit/s");
        assert!(bulk(3, 1, 1400) > 1500, "11 Mbit/s");
    }

    /// A datagram with such a payload, from one host to another.
    fn datagram(payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol::UDP, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        packet.extend([0x9c, 0x40, 0x01, 0xbb, 0, 8 + payload.len() as u8, 0, 0]);
        packet.extend(payload);
        let len = packet.len() as u16;
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet
    }

    #[test]
    fn a_flow_that_begins_as_quic_is_kept_in_order_from_then_on() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut order = FlowOrder::default();
        let short = datagram(&[0x40; 30]);
        assert!(!order.wants_order(now, 1, &short));
        assert!(order.wants_order(now, 1, &datagram(&[0xc3, 0, 0, 0, 1, 8, 7, 7])));
        assert!(order.wants_order(later(1), 1, &short) && order.wants_order(later(50), 1, &short));
        assert!(!order.wants_order(later(50), 2, &short), "another flow");
        assert!(!order.wants_order(later(111), 1, &short), "a minute of silence");
        for other in [&[0xc3, 0, 0, 0, 9, 8, 7, 7][..], &[0x43, 0, 0, 0, 1, 8], &[0xc3, 0, 0, 0], &[]] {
            assert!(!order.wants_order(later(111), 3, &datagram(other)), "{other:?}");
        }
    }

    /// An IPv4 packet with a TCP segment of such flags and so much data.
    fn segment(flags: u8, data: usize) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol::TCP, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
        packet.extend([0x9c, 0x40, 0x01, 0xbb, 0, 0, 0, 1, 0, 0, 0, 1, 5 << 4, flags, 1, 0, 0, 0, 0, 0]);
        packet.extend(vec![0; data]);
        let len = packet.len() as u16;
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet
    }

    #[test]
    fn only_pure_acknowledgements_of_tcp_may_be_overtaken() {
        const ACK: u8 = 16;
        const FIN: u8 = 1;
        let needs = |packet: Vec<u8>| needs_order(&ip::parse(&packet).expect("a packet"));
        assert!(!needs(segment(ACK, 0)));
        assert!(needs(segment(ACK, 1)));
        assert!(needs(segment(ACK | FIN, 0)));
        assert!(!needs(datagram(&[0x40; 30])), "UDP");
    }
}
