//! Acknowledgements of data (as DATA_ACK of MPTCP, RFC 8684 §3.3.2): the end that reads a stream reports how
//! far it has come, and the end that writes reinjects what is waited for and should have come long ago. The
//! path that it was sent on may have stalled, or lost it more than once.
//!
//! In: reports of the far end, the progress of the streams here, round-trip times. Out: reports, and how long
//! the far end may be without what was sent on a path. Always holds: what is reinjected for this reason is a
//! small share of what is sent at all.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_quic::{DataAck, StreamId};
use mpvpn_types::{Duration, Instant, target::REORDER};

/// Progress is reported, and what is overdue looked for, this often: a fraction of the round trips that are
/// waited anyway.
const PERIOD: Duration = Duration::from_millis(20);
/// Reports come as late as that, and processors are busy. Less, and what is only late is sent twice.
const SLACK: Duration = Duration::from_millis(50);
/// The typical round-trip time of a path grows by no more than this part each period: it doubles in 5 s.
/// Faster, and a queue that builds up hides a stall.
const GROWTH: u32 = 360;
/// Bytes of one report, and streams in it, at most: some gaps of a stream always fit.
const REPORT: usize = 1000;
const MOST_STREAMS: usize = 128;
/// Room that an entry takes at most (bytes): three numbers, and two for each of its gaps.
const MOST_GAPS: usize = 16;
const ENTRY: usize = 8 * (3 + 2 * MOST_GAPS);
/// What may be reinjected: one byte of this many that are sent …
const SHARE: u64 = 20;
/// … and so many bytes in a second, and at once.
const ANYWAY: u64 = 64 << 10;
const MOST_BUDGET: u64 = 256 << 10;

/// Reports of how far streams have come, in both directions.
#[derive(Debug)]
pub(super) struct DataAcks {
    prefix: DatagramPrefix,
    /// A report that waits for a path.
    waiting: Option<Bytes>,
    /// Reports of the far end.
    arrived: Vec<Bytes>,
    /// Own reports that were lost.
    lost: Vec<Bytes>,
    /// When the last period began.
    began: Instant,
    budget: Budget,
}

impl DataAcks {
    /// For the context with this ID of a request stream.
    pub(super) fn new(now: Instant, stream: u64, context: u64) -> Self {
        Self {
            prefix: datagram::prefix(stream, context),
            waiting: None,
            arrived: Vec::new(),
            lost: Vec::new(),
            began: now,
            budget: Budget { bytes: MOST_BUDGET, sent: 0 },
        }
    }

    /// Whether a datagram is a report, of either end.
    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a report of the far end.
    pub(super) fn take(&mut self, datagram: Bytes) {
        self.arrived.push(datagram);
    }

    /// What the far end has reported since the last call; malformed entries end a report.
    pub(super) fn drain_arrived(&mut self) -> impl Iterator<Item = DataAck> + '_ {
        let prefix = &self.prefix;
        self.arrived.drain(..).flat_map(move |report| entries(prefix, &report).collect::<Vec<_>>())
    }

    /// An own report was lost: what it said is to be reported again, as it is then.
    pub(super) fn push_lost(&mut self, datagram: Bytes) {
        self.lost.push(datagram);
    }

    /// The streams whose progress has to be reported again.
    pub(super) fn take_lost(&mut self) -> Vec<StreamId> {
        let lost = std::mem::take(&mut self.lost);
        lost.iter().flat_map(|report| entries(&self.prefix, report)).map(|progress| progress.stream).collect()
    }

    /// Whether a report waits for a path.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// The report that waits for a path.
    pub(super) fn take_waiting(&mut self) -> Option<Bytes> {
        self.waiting.take()
    }

    /// Writes the next report: of at most `count` streams, as far as `next` has something to say about them.
    pub(super) fn write(&mut self, count: usize, mut next: impl FnMut() -> Option<DataAck>) {
        let mut out = BytesMut::from(self.prefix.as_ref());
        for _ in 0..count.min(MOST_STREAMS) {
            if out.len() + ENTRY > REPORT {
                break;
            }
            if let Some(progress) = next() {
                encode(&progress, &mut out);
            }
        }
        tracing::trace!(target: REORDER, bytes = out.len(), "a report of how far streams have come is due");
        self.waiting = Some(out.freeze());
    }

    /// When there is something to do again: what is `urgent` at once, unless a report waits for room, which
    /// nothing here can hasten.
    pub(super) fn due(&self, urgent: bool) -> Instant {
        self.began + if urgent && self.waiting.is_none() { Duration::ZERO } else { PERIOD }
    }

    /// Begins the next period if the last one is over; returns how long that was.
    pub(super) fn begin_period(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.began);
        (passed >= PERIOD).then(|| {
            self.began = now;
            passed
        })
    }

    /// A period is over, in which as many bytes of streams were sent as `sent` (since the start) has grown
    /// by; returns the bytes that may be reinjected now.
    pub(super) fn earn(&mut self, passed: Duration, sent: u64) -> u64 {
        self.budget.earn(passed, sent);
        self.budget.bytes
    }

    /// Bytes were reinjected.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.budget.bytes = self.budget.bytes.saturating_sub(bytes);
    }
}

/// What may be reinjected because it is overdue.
#[derive(Debug)]
struct Budget {
    /// Bytes that may be sent again now.
    bytes: u64,
    /// Bytes of streams that had been sent when it last grew.
    sent: u64,
}

impl Budget {
    fn earn(&mut self, passed: Duration, sent: u64) {
        let anyway = (u128::from(ANYWAY) * passed.as_millis() / 1000) as u64;
        let earned = (sent - std::mem::replace(&mut self.sent, sent)) / SHARE;
        self.bytes = (self.bytes + earned + anyway).min(MOST_BUDGET);
    }
}

/// What a round trip on a path usually takes: falls at once, and grows slowly.
#[derive(Debug, Default)]
pub(super) struct TypicalRtt(Duration);

impl TypicalRtt {
    /// To be called once a period.
    pub(super) fn update(&mut self, rtt: Duration) {
        self.0 = if self.0.is_zero() { rtt } else { rtt.min(self.0 + self.0 / GROWTH) };
    }

    /// Zero while nothing is known.
    pub(super) fn get(&self) -> Duration {
        self.0
    }

    /// How long after bytes were sent on this path they are overdue, with the slowest path that works taking
    /// `slowest`: what was lost is sent again by the library, and may be on its way on that one.
    pub(super) fn overdue_after(&self, slowest: Duration) -> Duration {
        self.0 * 2 + slowest / 2 + SLACK
    }
}

/// When bytes were overdue on a path last, and nothing was acknowledged there since: the path stalls.
#[derive(Debug, Default)]
pub(super) struct Stall(Option<Instant>);

impl Stall {
    /// A path that stalls is expected to take so much longer, for so long. Less, and it is given new data
    /// before it works again; more, and a path that was harmed once carries little for longer.
    const LASTS: Duration = Duration::from_millis(500);

    pub(super) fn note(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// What the one-way delay of the path is to be increased by.
    pub(super) fn delay(&self, now: Instant) -> Duration {
        let stalls = self.0.is_some_and(|at| now.saturating_duration_since(at) < Self::LASTS);
        if stalls { Self::LASTS } else { Duration::ZERO }
    }
}

/// What a report says.
fn entries(prefix: &DatagramPrefix, report: &[u8]) -> impl Iterator<Item = DataAck> {
    let mut bytes = report.get(prefix.as_ref().len()..).unwrap_or_default();
    std::iter::from_fn(move || decode(&mut bytes)).take(MOST_STREAMS)
}

fn encode(progress: &DataAck, out: &mut BytesMut) {
    varint::encode(progress.stream << 1 | u64::from(progress.reader_waits), out);
    varint::encode(progress.next_offset, out);
    varint::encode(progress.gaps.len() as u64, out);
    let mut end = progress.next_offset;
    for (at, len) in &progress.gaps {
        varint::encode(at - end, out);
        varint::encode(*len, out);
        end = at + len;
    }
}

/// The next entry; `None` at the end, or where it is malformed.
fn decode(bytes: &mut &[u8]) -> Option<DataAck> {
    let mut number = || {
        let (value, len) = varint::decode(bytes)?;
        bytes.advance(len);
        Some(value)
    };
    let (stream, next, count) = (number()?, number()?, number()?);
    let mut gaps = Vec::new();
    let mut end = next;
    for _ in 0..count.min(MOST_GAPS as u64) {
        let at = end.checked_add(number()?)?;
        let len = number()?;
        end = at.checked_add(len)?;
        gaps.push((at, len));
    }
    (count <= MOST_GAPS as u64).then_some(DataAck {
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
        super::testing::{Received, check_datagrams},
        *,
    };
    use crate::vectors::number;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_is_urgent_is_due_at_once_unless_a_report_waits_for_room() {
        let start = Instant::now();
        let mut acks = DataAcks::new(start, 0, 8);
        assert_eq!((acks.due(false), acks.due(true)), (start + PERIOD, start));
        acks.write(0, || None);
        assert_eq!(acks.due(true), start + PERIOD, "nothing can be done about it earlier");
    }

    #[test]
    fn a_period_begins_when_the_last_one_is_over() {
        let start = Instant::now();
        let mut acks = DataAcks::new(start, 0, 8);
        assert_eq!(acks.begin_period(start + 19 * MS), None);
        assert_eq!(acks.begin_period(start + 35 * MS), Some(35 * MS));
        assert_eq!(acks.due(false), start + 55 * MS);
    }

    #[test]
    fn what_a_lost_report_said_is_reported_again() {
        let (mut here, mut there) =
            (DataAcks::new(Instant::now(), 0, 8), DataAcks::new(Instant::now(), 0, 8));
        let mut streams = [4, 8, 12].into_iter();
        let progress = |stream| DataAck { stream, next_offset: 100, reader_waits: false, gaps: Vec::new() };
        here.write(3, || streams.next().map(progress));
        let report = here.take_waiting().expect("it was written");
        assert!(!here.has_waiting() && there.is_own(&report));
        here.push_lost(report.clone());
        assert_eq!((here.take_lost(), here.take_lost()), (vec![4, 8, 12], vec![]));
        there.take(report);
        assert_eq!(there.drain_arrived().collect::<Vec<_>>(), [4, 8, 12].map(progress));
    }

    #[test]
    fn a_report_has_room_for_few_streams_with_many_gaps() {
        let mut acks = DataAcks::new(Instant::now(), 0, 8);
        let gaps: Vec<_> = (0..16).map(|n| (n << 40, 1 << 30)).collect();
        let mut told = 0;
        acks.write(100, || {
            told += 1;
            Some(DataAck { stream: told, next_offset: 0, reader_waits: true, gaps: gaps.clone() })
        });
        let report = acks.take_waiting().expect("a report");
        assert!(told > 2 && report.len() <= REPORT, "{told} streams in {} bytes", report.len());
    }

    #[test]
    fn a_small_share_of_what_is_sent_may_be_sent_again() {
        let mut acks = DataAcks::new(Instant::now(), 0, 8);
        acks.spend(MOST_BUDGET + 1);
        assert_eq!(acks.earn(PERIOD, 0), 1310, "64 KiB in a second, whatever is sent");
        acks.spend(1310);
        assert_eq!(acks.earn(PERIOD, 2_000_000), 1310 + 100_000);
        assert_eq!(acks.earn(PERIOD, 1_000_000_000), MOST_BUDGET);
    }

    #[test]
    fn a_queue_that_builds_up_does_not_hide_a_stall() {
        let mut rtt = TypicalRtt::default();
        assert_eq!(rtt.overdue_after(Duration::ZERO), SLACK, "nothing is known");
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
        all.iter().for_each(|progress| encode(progress, &mut out));
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
            assert!(acks.is_own(received.bytes));
            acks.take(Bytes::copy_from_slice(received.bytes));
            let entries: Vec<_> = acks.drain_arrived().map(|progress| entry_of(&progress)).collect();
            Some(json!({ "entries": entries }))
        };
        let encode = |stream, context, fields: &Value| {
            let entries = fields["entries"].as_array().unwrap();
            let mut next = entries.iter().map(progress_of);
            let mut acks = DataAcks::new(Instant::now(), stream, context);
            acks.write(entries.len(), || next.next());
            acks.take_waiting().unwrap().to_vec()
        };
        check_datagrams(include_str!("../../../../docs/vectors/data-ack.json"), parse, encode);
    }

    fn entry_of(progress: &DataAck) -> Value {
        let mut end = progress.next_offset;
        let gap = |(at, len): &(u64, u64)| {
            let present = at - std::mem::replace(&mut end, at + len);
            json!({ "present": present, "missing": len })
        };
        let gaps: Vec<_> = progress.gaps.iter().map(gap).collect();
        json!({ "stream": progress.stream, "offset": progress.next_offset, "waits": progress.reader_waits, "gaps": gaps })
    }

    fn progress_of(entry: &Value) -> DataAck {
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
    fn endless_gaps_and_places_beyond_all_are_no_entry() {
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
