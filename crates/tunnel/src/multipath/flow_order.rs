//! Decides which flows are resequenced: TCP and QUIC, which take reordering for loss, and UDP flows of high
//! rate.
//!
//! In: packets of flows and the time. Out: whether reordering harms the flow. Always holds: memory is bounded
//! by the number of buckets, and the state of a silent flow expires.

use mpvpn_packet::{ip, protocol};
use mpvpn_types::{Duration, Instant};

/// A UDP flow is resequenced from this many bytes in about 200 ms on (halved every [`METER_STEP`]), which is
/// about 8 Mbit/s: downloads reach it, calls do not. Smaller: packets of calls wait for each other. Larger:
/// downloads lose throughput to reordering.
const MIN_BULK_BYTES: u32 = 200_000;
/// Time in which the byte count of a flow is halved: with it, a flow is recognised within about 200 ms.
/// Value: chosen.
const METER_STEP: Duration = Duration::from_millis(100);
/// Steps of [`METER_STEP`] without a packet after which a flow no longer counts as QUIC: one minute, twice
/// the usual idle timeout of QUIC connections. Smaller: a connection loses order in a pause. Larger: a later
/// flow of the same bucket is resequenced without need.
const QUIC_IDLE_STEPS: u32 = 600;
/// QUIC versions 1 (RFC 9000) and 2 (RFC 9369).
const QUIC_VERSIONS: [u32; 2] = [1, 0x6b33_43cf];

/// Whether reordering harms the flow of a packet, judged by the packet alone.
pub(super) fn needs_order(packet: &ip::IpPacket<'_>) -> bool {
    if !packet.has_transport_header() {
        return true;
    }
    match packet.protocol() {
        protocol::UDP | protocol::ICMP | protocol::ICMPV6 => false,
        // A later acknowledgement covers one that it overtakes.
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

/// The recent rate of each bucket of flows.
#[derive(Debug, Default)]
pub(super) struct FlowOrder {
    origin: Option<Instant>,
    buckets: Vec<FlowRate>,
}

#[derive(Clone, Debug, Default)]
struct FlowRate {
    /// The step of [`METER_STEP`] in which the last packet arrived.
    last_step: u32,
    /// Bytes, halved in each step.
    decayed_bytes: u32,
    is_bulk: bool,
    /// A QUIC long header was seen.
    is_quic: bool,
}

impl FlowOrder {
    /// Whether reordering harms the flow of a packet that is not TCP. QUIC declares a packet lost if three
    /// later ones are acknowledged (RFC 9002 §6.1.1); a reordered QUIC flow would never reach the rate
    /// that identifies downloads.
    pub(super) fn wants_order(&mut self, now: Instant, bucket: u16, packet: &[u8]) -> bool {
        if self.buckets.is_empty() {
            self.buckets = vec![FlowRate::default(); mpvpn_flow::BUCKETS as usize];
        }
        let step = step_at(*self.origin.get_or_insert(now), now);
        let Some(rate) = self.buckets.get_mut(usize::from(bucket)) else { return false };
        rate.wants_order(step, packet.len(), || begins_quic(packet))
    }
}

impl FlowRate {
    fn wants_order(&mut self, step: u32, bytes: usize, begins_quic: impl FnOnce() -> bool) -> bool {
        if step != self.last_step {
            self.is_quic &= step.saturating_sub(self.last_step) < QUIC_IDLE_STEPS;
            self.decayed_bytes =
                self.decayed_bytes.checked_shr(step.saturating_sub(self.last_step)).unwrap_or(0);
            self.last_step = step;
            self.is_bulk &= self.decayed_bytes > MIN_BULK_BYTES / 4;
        }
        self.decayed_bytes = self.decayed_bytes.saturating_add(bytes as u32);
        self.is_bulk |= self.decayed_bytes > MIN_BULK_BYTES;
        self.is_quic = self.is_quic || begins_quic();
        self.is_bulk || self.is_quic
    }
}

fn step_at(origin: Instant, now: Instant) -> u32 {
    (now.saturating_duration_since(origin).as_millis() / METER_STEP.as_millis()) as u32
}

/// The recent rate of one flow of UDP payloads.
#[derive(Debug)]
pub(crate) struct FlowMeter {
    origin: Instant,
    rate: FlowRate,
}

impl FlowMeter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { origin: now, rate: FlowRate::default() }
    }

    /// Whether reordering harms the flow of a payload.
    pub(crate) fn wants_order(&mut self, now: Instant, payload: &[u8]) -> bool {
        self.rate.wants_order(step_at(self.origin, now), payload.len(), || is_long_header(payload))
    }
}

/// Whether an IP packet carries a QUIC packet with a long header, which connections begin with (RFC 9000
/// §17.2).
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
