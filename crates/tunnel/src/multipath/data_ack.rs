//! DataAcks (like DATA_ACK of MPTCP, RFC 8684 §3.3.2): the reader of a stream reports which bytes have
//! arrived, and the writer reinjects bytes that are overdue. Bytes are overdue if their path stalled or lost
//! them repeatedly.
//!
//! In: reports of the peer, the receive offsets of local streams, round-trip times. Out: reports to send, and
//! the time after which bytes sent on a path are overdue. Always holds: bytes reinjected because they are
//! overdue are a small share of all stream bytes (see [`BUDGET_DIVISOR`]).

use bytes::{Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_quic::{DataAck, StreamId};
use mpvpn_types::{Duration, Instant, target::REORDER};

/// Time between reports, and between searches for overdue bytes: a fraction of most round trips. Smaller:
/// more reports. Larger: overdue bytes are reinjected later.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);
/// Delay that is added to the expected arrival of a report: reports are sent every [`REPORT_INTERVAL`], and
/// processors are busy. Smaller: bytes that are merely late are sent twice. Larger: stalls last longer.
const OVERDUE_SLACK: Duration = Duration::from_millis(50);
/// The typical round-trip time of a path grows by at most 1/360 in each [`REPORT_INTERVAL`], so it doubles in
/// 5 s. Smaller (faster growth): a queue that builds up hides a stall. Larger: after a real increase of the
/// delay, bytes count as overdue for longer.
const RTT_GROWTH_DIVISOR: u32 = 360;
/// Maximum size of a report in bytes: fits one datagram of every path. A stream with all its gaps
/// ([`MAX_ENTRY_BYTES`]) always fits.
const MAX_REPORT_BYTES: usize = 1000;
/// Maximum number of streams in a report. Larger: a hostile peer costs more time for each datagram.
const MAX_STREAMS_PER_REPORT: usize = 128;
/// Maximum number of gaps reported for a stream. Smaller: bytes behind further gaps are reinjected later.
/// Larger: fewer streams fit a report.
const MAX_GAPS_PER_STREAM: usize = 16;
/// Maximum encoded size of a stream's entry in bytes: three varints, and two for each gap, of 8 bytes each.
const MAX_ENTRY_BYTES: usize = 8 * (3 + 2 * MAX_GAPS_PER_STREAM);
/// The budget for reinjection grows by one byte for each 20 stream bytes sent (5 %). Smaller: more bandwidth
/// for bytes that may have arrived. Larger: stalls last longer. Value: chosen (docs/design/reinjection.md).
const BUDGET_DIVISOR: u64 = 20;
/// Bytes per second by which the budget grows in addition, for streams that send little.
const BASE_BUDGET_BYTES_PER_SECOND: u64 = 64 << 10;
/// Upper bound of the budget in bytes. Larger: longer bursts of reinjected data. Smaller: a stall of a fast
/// path takes several report intervals to repair.
const MAX_BUDGET_BYTES: u64 = 256 << 10;

/// Sends and receives the DataAck reports of one connection.
#[derive(Debug)]
pub(super) struct DataAcks {
    prefix: DatagramPrefix,
    /// A report that waits until a path has an available window.
    waiting: Option<Bytes>,
    /// Reports of the peer that have not been processed.
    received: Vec<Bytes>,
    /// Reports sent by this end and lost.
    lost: Vec<Bytes>,
    /// When the current report interval began.
    period_start: Instant,
    budget: Budget,
}

impl DataAcks {
    /// Creates the reports of the datagram context `context` of a request stream.
    pub(super) fn new(now: Instant, stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            waiting: None,
            received: Vec::new(),
            lost: Vec::new(),
            period_start: now,
            budget: Budget { bytes: MAX_BUDGET_BYTES, sent: 0 },
        }
    }

    /// Whether a datagram, sent or received, is a DataAck report.
    pub(super) fn has_prefix(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a report of the peer.
    pub(super) fn on_report(&mut self, datagram: Bytes) {
        self.received.push(datagram);
    }

    /// Whether the peer has sent a report since [`Self::drain_received`].
    pub(super) fn has_received(&self) -> bool {
        !self.received.is_empty()
    }

    /// Returns the entries that the peer has reported since the last call. A malformed entry ends its report.
    pub(super) fn drain_received(&mut self) -> impl Iterator<Item = DataAck> + '_ {
        let prefix = &self.prefix;
        self.received.drain(..).flat_map(move |report| entries(prefix, &report).collect::<Vec<_>>())
    }

    /// A report of this end was lost: its streams are reported again, with their state at that time.
    pub(super) fn on_report_lost(&mut self, datagram: Bytes) {
        self.lost.push(datagram);
    }

    /// Returns the streams of lost reports, which have to be reported again.
    pub(super) fn take_lost_streams(&mut self) -> Vec<StreamId> {
        let lost = std::mem::take(&mut self.lost);
        lost.iter().flat_map(|report| entries(&self.prefix, report)).map(|data_ack| data_ack.stream).collect()
    }

    /// Whether a report waits to be sent.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Takes the report that waits to be sent.
    pub(super) fn take_waiting(&mut self) -> Option<Bytes> {
        self.waiting.take()
    }

    /// Writes the next report with at most `count` entries, which `next` returns.
    pub(super) fn write(&mut self, count: usize, mut next: impl FnMut() -> Option<DataAck>) {
        let mut out = BytesMut::from(self.prefix.as_ref());
        for _ in 0..count.min(MAX_STREAMS_PER_REPORT) {
            if out.len() + MAX_ENTRY_BYTES > MAX_REPORT_BYTES {
                break;
            }
            if let Some(data_ack) = next() {
                encode(&data_ack, &mut out);
            }
        }
        tracing::trace!(target: REORDER, bytes = out.len(), "a DataAck report is ready to be sent");
        self.waiting = Some(out.freeze());
    }

    /// Returns when the next report is due: at once if `urgent` and no report waits to be sent, else after
    /// the report interval.
    pub(super) fn next_due(&self, urgent: bool) -> Instant {
        self.period_start + if urgent && self.waiting.is_none() { Duration::ZERO } else { REPORT_INTERVAL }
    }

    /// Begins the next report interval if the current one is over; returns the length of the latter.
    pub(super) fn begin_period(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.period_start);
        (passed >= REPORT_INTERVAL).then(|| {
            self.period_start = now;
            passed
        })
    }

    /// Increases the budget after an interval of `passed`, with `sent` stream bytes sent since the start of
    /// the connection; returns the bytes that may be reinjected now.
    pub(super) fn refill_budget(&mut self, passed: Duration, sent: u64) -> u64 {
        self.budget.refill(passed, sent);
        self.budget.bytes
    }

    /// Subtracts reinjected bytes from the budget.
    pub(super) fn spend_budget(&mut self, bytes: u64) {
        self.budget.bytes = self.budget.bytes.saturating_sub(bytes);
    }
}

/// The budget for reinjecting overdue bytes.
#[derive(Debug)]
struct Budget {
    /// Bytes that may be reinjected now.
    bytes: u64,
    /// Stream bytes sent since the start of the connection, when the budget was last increased.
    sent: u64,
}

impl Budget {
    fn refill(&mut self, passed: Duration, sent: u64) {
        let base = (u128::from(BASE_BUDGET_BYTES_PER_SECOND) * passed.as_millis() / 1000) as u64;
        let earned = (sent - std::mem::replace(&mut self.sent, sent)) / BUDGET_DIVISOR;
        self.bytes = (self.bytes + earned + base).min(MAX_BUDGET_BYTES);
    }
}

/// The typical round-trip time of a path: falls at once, and grows slowly ([`RTT_GROWTH_DIVISOR`]).
#[derive(Debug, Default)]
pub(super) struct TypicalRtt(Duration);

impl TypicalRtt {
    /// Takes the smoothed round-trip time; to be called once each [`REPORT_INTERVAL`].
    pub(super) fn update(&mut self, rtt: Duration) {
        self.0 = if self.0.is_zero() { rtt } else { rtt.min(self.0 + self.0 / RTT_GROWTH_DIVISOR) };
    }

    /// Returns the typical round-trip time; zero before the first measurement.
    pub(super) fn get(&self) -> Duration {
        self.0
    }

    /// Returns how long after being sent on this path bytes are overdue. `slowest` is the typical round-trip
    /// time of the slowest working path: noq may have retransmitted lost bytes there.
    pub(super) fn overdue_after(&self, slowest: Duration) -> Duration {
        self.0 * 2 + slowest / 2 + OVERDUE_SLACK
    }
}

/// Detects stalls of a path: the time when bytes sent there were last found overdue without a later
/// acknowledgement.
#[derive(Debug, Default)]
pub(super) struct Stall(Option<Instant>);

impl Stall {
    /// Delay that the scheduler adds to a stalled path, and how long it does so. Smaller: the path gets new
    /// data before it works again. Larger: a path that stalled once carries little for longer. Value:
    /// chosen, not measured (docs/design/reinjection.md, open questions).
    const PENALTY: Duration = Duration::from_millis(500);

    pub(super) fn note(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Returns the delay that is added to the one-way delay of the path.
    pub(super) fn delay(&self, now: Instant) -> Duration {
        let stalls = self.0.is_some_and(|at| now.saturating_duration_since(at) < Self::PENALTY);
        if stalls { Self::PENALTY } else { Duration::ZERO }
    }
}

/// Decodes the entries of a report.
fn entries(prefix: &DatagramPrefix, report: &[u8]) -> impl Iterator<Item = DataAck> {
    let mut bytes = report.get(prefix.as_ref().len()..).unwrap_or_default();
    std::iter::from_fn(move || decode(&mut bytes)).take(MAX_STREAMS_PER_REPORT)
}

fn encode(data_ack: &DataAck, out: &mut BytesMut) {
    varint::encode(data_ack.stream << 1 | u64::from(data_ack.reader_waits), out);
    varint::encode(data_ack.next_offset, out);
    varint::encode(data_ack.gaps.len() as u64, out);
    let mut end = data_ack.next_offset;
    for (at, len) in &data_ack.gaps {
        varint::encode(at - end, out);
        varint::encode(*len, out);
        end = at + len;
    }
}

/// Decodes the next entry; `None` at the end, or if the entry is malformed.
fn decode(bytes: &mut &[u8]) -> Option<DataAck> {
    let mut number = || varint::take(bytes);
    let (stream, next, count) = (number()?, number()?, number()?);
    let mut gaps = Vec::new();
    let mut end = next;
    for _ in 0..count.min(MAX_GAPS_PER_STREAM as u64) {
        let at = end.checked_add(number()?)?;
        let len = number()?;
        end = at.checked_add(len)?;
        gaps.push((at, len));
    }
    (count <= MAX_GAPS_PER_STREAM as u64).then_some(DataAck {
        stream: stream >> 1,
        next_offset: next,
        reader_waits: stream & 1 == 1,
        gaps,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::tests::{Received, check_datagrams},
        *,
    };
    use crate::vectors::number;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_urgent_report_is_due_at_once_unless_one_waits_to_be_sent() {
        let start = Instant::now();
        let mut acks = DataAcks::new(start, 0, 8);
        assert_eq!((acks.next_due(false), acks.next_due(true)), (start + REPORT_INTERVAL, start));
        acks.write(0, || None);
        assert_eq!(acks.next_due(true), start + REPORT_INTERVAL, "nothing can be done about it earlier");
    }

    #[test]
    fn a_report_interval_begins_when_the_last_one_is_over() {
        let start = Instant::now();
        let mut acks = DataAcks::new(start, 0, 8);
        assert_eq!(acks.begin_period(start + 19 * MS), None);
        assert_eq!(acks.begin_period(start + 35 * MS), Some(35 * MS));
        assert_eq!(acks.next_due(false), start + 55 * MS);
    }

    #[test]
    fn streams_of_a_lost_report_are_reported_again() {
        let (mut here, mut there) =
            (DataAcks::new(Instant::now(), 0, 8), DataAcks::new(Instant::now(), 0, 8));
        let mut streams = [4, 8, 12].into_iter();
        let data_ack = |stream| DataAck { stream, next_offset: 100, reader_waits: false, gaps: Vec::new() };
        here.write(3, || streams.next().map(data_ack));
        let report = here.take_waiting().expect("it was written");
        assert!(!here.has_waiting() && there.has_prefix(&report));
        here.on_report_lost(report.clone());
        assert_eq!((here.take_lost_streams(), here.take_lost_streams()), (vec![4, 8, 12], vec![]));
        there.on_report(report);
        assert_eq!(there.drain_received().collect::<Vec<_>>(), [4, 8, 12].map(data_ack));
    }

    #[test]
    fn a_report_has_room_for_few_streams_with_many_gaps() {
        let mut acks = DataAcks::new(Instant::now(), 0, 8);
        let gaps: Vec<_> = (0..16).map(|n| (n << 40, 1 << 30)).collect();
        let mut count_written = 0;
        acks.write(100, || {
            count_written += 1;
            Some(DataAck { stream: count_written, next_offset: 0, reader_waits: true, gaps: gaps.clone() })
        });
        let report = acks.take_waiting().expect("a report");
        assert!(
            count_written > 2 && report.len() <= MAX_REPORT_BYTES,
            "{count_written} streams in {} bytes",
            report.len()
        );
    }

    #[test]
    fn a_small_share_of_the_bytes_sent_may_be_reinjected() {
        let mut acks = DataAcks::new(Instant::now(), 0, 8);
        acks.spend_budget(MAX_BUDGET_BYTES + 1);
        assert_eq!(acks.refill_budget(REPORT_INTERVAL, 0), 1310, "64 KiB in a second, whatever is sent");
        acks.spend_budget(1310);
        assert_eq!(acks.refill_budget(REPORT_INTERVAL, 2_000_000), 1310 + 100_000);
        assert_eq!(acks.refill_budget(REPORT_INTERVAL, 1_000_000_000), MAX_BUDGET_BYTES);
    }

    #[test]
    fn a_queue_that_builds_up_does_not_hide_a_stall() {
        let mut rtt = TypicalRtt::default();
        assert_eq!(rtt.overdue_after(Duration::ZERO), OVERDUE_SLACK, "nothing is known");
        rtt.update(40 * MS);
        assert_eq!(rtt.overdue_after(60 * MS), (80 + 30 + 50) * MS);
        (0..50).for_each(|_| rtt.update(900 * MS));
        assert!(rtt.get() < 47 * MS, "{:?} after a second", rtt.get());
        rtt.update(30 * MS);
        assert_eq!(rtt.get(), 30 * MS, "it falls at once");
    }

    #[test]
    fn a_path_that_stalls_is_expected_to_be_slower_for_half_a_second() {
        let (mut stall, now) = (Stall::default(), Instant::now());
        assert_eq!(stall.delay(now), Duration::ZERO);
        stall.note(now);
        assert_eq!((stall.delay(now + 499 * MS), stall.delay(now + 500 * MS)), (500 * MS, Duration::ZERO));
    }

    #[test]
    fn reports_are_read_as_they_were_written() {
        let all = [
            DataAck { stream: 0, next_offset: 0, reader_waits: true, gaps: Vec::new() },
            DataAck { stream: 4, next_offset: 1 << 40, reader_waits: false, gaps: Vec::new() },
            DataAck {
                stream: 1 << 20,
                next_offset: 77,
                reader_waits: true,
                gaps: vec![(77, 1), (100, 1 << 30)],
            },
        ];
        let mut out = BytesMut::new();
        all.iter().for_each(|data_ack| encode(data_ack, &mut out));
        let mut bytes = &out[..];
        let read: Vec<DataAck> = std::iter::from_fn(|| decode(&mut bytes)).collect();
        assert_eq!(read, all);
        for len in 0..out.len() {
            let mut bytes = &out[..len];
            assert!(std::iter::from_fn(|| decode(&mut bytes)).count() < 3, "{len} bytes");
        }
    }

    #[test]
    fn reports_are_those_of_the_vectors() {
        let parse = |received: Received<'_>| {
            let mut acks = DataAcks::new(Instant::now(), received.stream, received.context);
            assert!(acks.has_prefix(received.bytes));
            acks.on_report(Bytes::copy_from_slice(received.bytes));
            let entries: Vec<_> = acks.drain_received().map(|data_ack| entry_of(&data_ack)).collect();
            Some(json!({ "entries": entries }))
        };
        let encode = |stream, context, fields: &Value| {
            let entries = fields["entries"].as_array().unwrap();
            let mut next = entries.iter().map(data_ack_of);
            let mut acks = DataAcks::new(Instant::now(), stream, context);
            acks.write(entries.len(), || next.next());
            acks.take_waiting().unwrap().to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/data-ack.json"), parse, encode);
    }

    fn entry_of(data_ack: &DataAck) -> Value {
        let mut end = data_ack.next_offset;
        let gap = |(at, len): &(u64, u64)| {
            let present = at - std::mem::replace(&mut end, at + len);
            json!({ "present": present, "missing": len })
        };
        let gaps: Vec<_> = data_ack.gaps.iter().map(gap).collect();
        json!({ "stream": data_ack.stream, "offset": data_ack.next_offset, "waits": data_ack.reader_waits, "gaps": gaps })
    }

    fn data_ack_of(entry: &Value) -> DataAck {
        let next = number(&entry["offset"]);
        let mut end = next;
        let gap = |gap: &Value| {
            let (at, len) = (end + number(&gap["present"]), number(&gap["missing"]));
            end = at + len;
            (at, len)
        };
        let gaps = entry["gaps"].as_array().unwrap().iter().map(gap).collect();
        let waits = entry["waits"].as_bool().unwrap();
        DataAck { stream: number(&entry["stream"]), next_offset: next, reader_waits: waits, gaps }
    }

    #[test]
    fn entries_with_too_many_gaps_or_offsets_beyond_the_maximum_are_malformed() {
        let entry = |numbers: &[u64]| {
            let mut out = BytesMut::new();
            numbers.iter().for_each(|number| varint::encode(*number, &mut out));
            decode(&mut &out[..])
        };
        let most = (1 << 62) - 1;
        assert_eq!(entry(&[1, 0, most, 1, 1]), None);
        let many = [&[1, 0, 17][..], &[1; 34]].concat();
        assert_eq!(entry(&many), None);
        let beyond = [&[1, most, 4][..], &[most; 8]].concat();
        assert_eq!(entry(&beyond), None);
    }
}
