//! Datagrams that `mpvpn measure` and the responder exchange, and the counts that a receiver keeps of them.
//!
//! ```text
//! 4 bytes   "mpvm"
//! 1 byte    kind: 1 echo request, 2 echo reply, 3 data
//! 3 bytes   0
//! 4 bytes   number of the run
//! 4 bytes   sequence number in the run, from 0
//! 8 bytes   time of the sender's clock (µs)
//! rest      0
//! ```

use serde::{Deserialize, Serialize};

const MAGIC: [u8; 4] = *b"mpvm";

/// Bytes of a datagram of the sweep: with 28 (IPv4) or 48 (IPv6) bytes of headers it fits the smallest MTU of
/// the tunnel, 1280 bytes.
pub const DATAGRAM_BYTES: usize = 1200;

/// The header of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The purpose of the datagram.
    pub kind: DatagramKind,
    /// Number of the run.
    pub run: u32,
    /// Sequence number in the run.
    pub sequence: u32,
    /// Time of the sender's clock (µs).
    pub sent_us: u64,
}

/// The purpose of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramKind {
    /// The responder sends it back as [`Self::EchoReply`], with the same length.
    EchoRequest,
    /// The answer to a request.
    EchoReply,
    /// The receiver counts it.
    Data,
}

impl Datagram {
    /// Bytes of the header.
    pub const HEADER_BYTES: usize = 24;

    /// Writes the header to the start of `buffer`.
    pub fn encode(&self) -> [u8; Self::HEADER_BYTES] {
        let mut header = [0; Self::HEADER_BYTES];
        header[..4].copy_from_slice(&MAGIC);
        header[4] = match self.kind {
            DatagramKind::EchoRequest => 1,
            DatagramKind::EchoReply => 2,
            DatagramKind::Data => 3,
        };
        header[8..12].copy_from_slice(&self.run.to_be_bytes());
        header[12..16].copy_from_slice(&self.sequence.to_be_bytes());
        header[16..24].copy_from_slice(&self.sent_us.to_be_bytes());
        header
    }

    /// Reads the header of a datagram; `None` if it is another one.
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let header: &[u8; Self::HEADER_BYTES] = datagram.first_chunk()?;
        let kind = match (&header[..4], header[4]) {
            (magic, 1) if magic == MAGIC => DatagramKind::EchoRequest,
            (magic, 2) if magic == MAGIC => DatagramKind::EchoReply,
            (magic, 3) if magic == MAGIC => DatagramKind::Data,
            _ => return None,
        };
        let word =
            |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let sent_us = u64::from(word(16)) << 32 | u64::from(word(20));
        Some(Self { kind, run: word(8), sequence: word(12), sent_us })
    }
}

/// Counts the datagrams of a run at its receiver.
#[derive(Clone, Debug, Default)]
pub struct DatagramCounter {
    report: DatagramReport,
    jitter_us: f64,
    /// Transit time of the last datagram: receiver's clock minus sender's (µs).
    transit_us: Option<i64>,
    highest: Option<u32>,
    first_us: u64,
}

/// The counters of a receiver.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct DatagramReport {
    /// Datagrams received.
    pub datagrams: u64,
    /// Their bytes, without headers of IP and UDP.
    pub bytes: u64,
    /// Datagrams that came after one with a higher number.
    pub reordered: u64,
    /// Time between the first and the last one (µs).
    pub span_us: u64,
    /// Interarrival jitter (RFC 3550 §6.4.1), in µs.
    pub jitter_us: f64,
}

impl DatagramCounter {
    /// Counts a datagram that was received at `now_us` of this end's clock.
    pub fn count(&mut self, now_us: u64, header: &Datagram, length: usize) {
        let report = &mut self.report;
        if report.datagrams == 0 {
            self.first_us = now_us;
        }
        report.datagrams += 1;
        report.bytes += length as u64;
        report.span_us = now_us.saturating_sub(self.first_us);
        if self.highest.is_some_and(|highest| header.sequence < highest) {
            report.reordered += 1;
        }
        self.highest = self.highest.max(Some(header.sequence));
        let transit = now_us.wrapping_sub(header.sent_us).cast_signed();
        if let Some(before) = self.transit_us.replace(transit) {
            let difference = transit.wrapping_sub(before).unsigned_abs() as f64;
            self.jitter_us += (difference - self.jitter_us) / 16.0;
        }
        report.jitter_us = self.jitter_us;
    }

    /// The counters.
    pub fn report(&self) -> DatagramReport {
        self.report
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data(sequence: u32, sent_us: u64) -> Datagram {
        Datagram { kind: DatagramKind::Data, run: 3, sequence, sent_us }
    }

    proptest! {
        #[test]
        fn a_header_is_read_back_and_no_bytes_panic(
            run: u32, sequence: u32, sent_us: u64, bytes in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            for kind in [DatagramKind::EchoRequest, DatagramKind::EchoReply, DatagramKind::Data] {
                let header = Datagram { kind, run, sequence, sent_us };
                let encoded = header.encode();
                prop_assert_eq!(Datagram::parse(&encoded), Some(header));
                prop_assert_eq!(Datagram::parse(&encoded[..23]), None);
            }
            if let Some(header) = Datagram::parse(&bytes) {
                let mut counter = DatagramCounter::default();
                counter.count(0, &header, bytes.len());
                counter.count(u64::MAX, &header, bytes.len());
            }
        }
    }

    #[test]
    fn a_steady_flow_has_no_jitter_and_a_late_packet_counts_as_reordered() {
        let mut counter = DatagramCounter::default();
        for n in 0..100 {
            counter.count(1000 * n + 77, &data(n as u32, 1000 * n + 500_000), DATAGRAM_BYTES);
        }
        let report = counter.report();
        assert_eq!((report.datagrams, report.bytes), (100, 100 * DATAGRAM_BYTES as u64));
        assert_eq!((report.reordered, report.span_us, report.jitter_us), (0, 99_000, 0.0));
        counter.count(102_000, &data(50, 550_000), DATAGRAM_BYTES);
        assert!(counter.report().reordered == 1 && counter.report().jitter_us > 1000.0);
    }
}
