//! How far streams have come: the end that reads tells, and the end that writes sends again what is waited for and should
//! have come long ago. The path that it was sent on may have stalled, or lost it more than once.
//!
//! Always holds: what is sent again for this reason is a small share of what is sent at all.

use bytes::{Buf, Bytes, BytesMut};
use mpvpn_masque::{
    datagram::{self, DatagramPrefix},
    varint,
};
use mpvpn_path::Offer;
use mpvpn_quic::{Connection, Overdue, Progress, Tracked};
use mpvpn_types::{Duration, Instant, PathId};

use super::{Carrier, Role, Watched, rescue::announce};

/// Progress is told, and what is overdue looked for, this often.
const EVERY: Duration = Duration::from_millis(20);
/// What is told comes as late as that, and processors are busy.
const SLACK: Duration = Duration::from_millis(50);
/// The round-trip time that is expected of a path grows by no more than this part each time: it doubles in 5 s.
const GROWTH: u32 = 360;
/// Bytes of one report, and streams in it, at most: some gaps of a stream always fit.
const REPORT: usize = 1000;
const MOST_STREAMS: usize = 128;
/// Room that an entry takes at most: three numbers, and two for each of its gaps.
const MOST_GAPS: usize = 16;
const ENTRY: usize = 8 * (3 + 2 * MOST_GAPS);
/// What may be sent again: this share of what is sent …
const SHARE: u64 = 20;
/// … and so much in a second, and at once (bytes).
const ANYWAY: u64 = 64 << 10;
const MOST_BUDGET: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct Progresses {
    prefix: DatagramPrefix,
    /// A report that waits for a path.
    waiting: Option<Bytes>,
    /// Reports of the far end.
    arrived: Vec<Bytes>,
    /// Own reports that were lost.
    lost: Vec<Bytes>,
    /// When all this was looked at last.
    looked: Instant,
    /// Bytes that may be sent again now.
    budget: u64,
    /// Bytes of streams that had been sent then.
    sent: u64,
}

impl Progresses {
    fn new(now: Instant, prefix: DatagramPrefix) -> Self {
        Self {
            prefix,
            waiting: None,
            arrived: Vec::new(),
            lost: Vec::new(),
            looked: now,
            budget: MOST_BUDGET,
            sent: 0,
        }
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    pub(super) fn is_own(&self, datagram: &[u8]) -> bool {
        datagram.starts_with(self.prefix.as_ref())
    }

    /// Takes a report of the far end.
    pub(super) fn take(&mut self, datagram: Bytes) {
        self.arrived.push(datagram);
    }

    /// An own report was lost: what it said is to be told again, as it is then.
    pub(super) fn lose(&mut self, datagram: Bytes) {
        self.lost.push(datagram);
    }

    /// Lets the connection know what the far end said; malformed entries end a report.
    pub(super) fn deliver(&mut self, now: Instant, connection: &mut Connection) {
        for report in self.arrived.drain(..) {
            entries(&self.prefix, &report).for_each(|progress| connection.confirm(now, progress));
        }
    }

    /// Sends what waits on all paths that have room, since any may stall. Returns whether there was something.
    pub(super) fn send(&mut self, now: Instant, connection: &mut Connection, offers: &mut [Offer]) -> bool {
        if offers.iter().all(|offer| offer.room == 0) {
            return false;
        }
        let Some(report) = self.waiting.take() else { return false };
        for offer in offers.iter_mut().filter(|offer| offer.room > 0) {
            let report = Tracked { data: report.clone(), born: now, tries: 0, copied: false, mark: None };
            offer.take(connection.queue_tracked(offer.id, report));
        }
        true
    }

    /// When there is something to do again: what is `urgent` at once, unless a report waits for room, which nothing here
    /// can hasten.
    fn due(&self, urgent: bool) -> Instant {
        self.looked + if urgent && self.waiting.is_none() { Duration::ZERO } else { EVERY }
    }

    fn write(&self, connection: &mut Connection) -> Bytes {
        let mut out = BytesMut::from(self.prefix.as_ref());
        connection.note_told();
        for _ in 0..connection.progresses().min(MOST_STREAMS) {
            if out.len() + ENTRY > REPORT {
                break;
            }
            if let Some(progress) = connection.take_progress() {
                encode(&progress, &mut out);
            }
        }
        out.freeze()
    }
}

/// What a report says.
fn entries(prefix: &DatagramPrefix, report: &[u8]) -> impl Iterator<Item = Progress> {
    let mut bytes = report.get(prefix.as_ref().len()..).unwrap_or_default();
    std::iter::from_fn(move || decode(&mut bytes)).take(MOST_STREAMS)
}

fn encode(progress: &Progress, out: &mut BytesMut) {
    varint::encode(progress.stream << 1 | u64::from(progress.waits), out);
    varint::encode(progress.next, out);
    varint::encode(progress.gaps.len() as u64, out);
    let mut end = progress.next;
    for (at, len) in &progress.gaps {
        varint::encode(at - end, out);
        varint::encode(*len, out);
        end = at + len;
    }
}

/// The next entry; `None` at the end, or where it is malformed.
fn decode(bytes: &mut &[u8]) -> Option<Progress> {
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
    (count <= MOST_GAPS as u64).then_some(Progress {
        stream: stream >> 1,
        next,
        waits: stream & 1 == 1,
        gaps,
    })
}

impl Carrier {
    /// The peer tells and takes how far streams have come, in this context of the request stream; it knows rescued
    /// bytes, too.
    pub(crate) fn tell_progress(&mut self, stream: u64, context: u64) {
        let Some(rescue) = &mut self.rescue else { return };
        rescue.progress = Some(Progresses::new(self.bare, datagram::prefix(stream, context)));
    }

    /// When there is something to tell.
    pub(super) fn progress_timeout(&self, connection: &Connection) -> Option<Instant> {
        let progress = self.rescue.as_ref()?.progress.as_ref()?;
        (connection.progresses() > 0).then(|| progress.due(connection.progress_is_urgent()))
    }

    /// Tells how far streams have come, and sends again what the far end waits for in vain.
    pub(super) fn repair_streams(&mut self, now: Instant, connection: &mut Connection) {
        let Some(rescue) = &mut self.rescue else { return };
        let Some(progress) = &mut rescue.progress else { return };
        if now < progress.due(connection.progress_is_urgent()) {
            return;
        }
        let passed = now.saturating_duration_since(progress.looked);
        connection.tell_progress();
        for report in std::mem::take(&mut progress.lost) {
            entries(&progress.prefix, &report).for_each(|progress| connection.retell(progress.stream));
        }
        if progress.waiting.is_none() && connection.progresses() > 0 {
            progress.waiting = Some(progress.write(connection));
        }
        if passed < EVERY {
            return;
        }
        progress.looked = now;
        if self.paths.len() < 2 {
            return;
        }
        connection.keep_sent();
        let sent = connection.stream_bytes();
        let anyway = (u128::from(ANYWAY) * passed.as_millis() / 1000) as u64;
        let earned = (sent - std::mem::replace(&mut progress.sent, sent)) / SHARE;
        progress.budget = (progress.budget + earned + anyway).min(MOST_BUDGET);
        let Some(max) = connection.max_datagram().filter(|_| progress.budget > 0) else { return };
        for (id, path) in &mut self.paths {
            let rtt = connection.rtt(*id).unwrap_or_default();
            path.usual = if path.usual.is_zero() { rtt } else { rtt.min(path.usual + path.usual / GROWTH) };
        }
        let working = self.paths.values().filter(|path| path.works());
        let slowest = working.map(|path| path.usual).max().unwrap_or_default();
        // What was lost is sent again by the library, and may be on its way on the slowest of all.
        let patience = |path: &Watched| path.usual * 2 + slowest / 2 + SLACK;
        let patience: Vec<(PathId, Duration)> =
            self.paths.iter().map(|(id, path)| (*id, patience(path))).collect();
        let budget = usize::try_from(progress.budget).unwrap_or(usize::MAX);
        let mut repeated = 0;
        let (paths, groups) = (&mut self.paths, &self.groups);
        let mut unknown = Vec::new();
        connection.take_overdue(now, &patience, budget, |Overdue { piece, path, stalls }| {
            repeated += piece.bytes.len() as u64;
            if piece.at == 0 && self.role == Role::Client {
                unknown.push(piece.stream);
            }
            rescue.send(now, &piece, max, groups.head_of(path));
            if let Some(path) = paths.get_mut(&path).filter(|_| stalls) {
                path.stalled = Some(now);
            }
        });
        unknown.into_iter().for_each(|stream| announce(connection, stream));
        if let Some(progress) = &mut rescue.progress {
            progress.budget = progress.budget.saturating_sub(repeated);
        }
        self.traffic.count_reinjected(repeated);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_urgent_is_due_at_once_unless_a_report_waits_for_room() {
        let start = Instant::now();
        let mut progress = Progresses::new(start, datagram::prefix(0, 8));
        assert_eq!((progress.due(false), progress.due(true)), (start + EVERY, start));
        progress.waiting = Some(Bytes::new());
        assert_eq!(progress.due(true), start + EVERY, "nothing can be done about it earlier");
    }

    #[test]
    fn reports_are_read_as_they_were_written() {
        let all = [
            Progress { stream: 0, next: 0, waits: true, gaps: Vec::new() },
            Progress { stream: 4, next: 1 << 40, waits: false, gaps: Vec::new() },
            Progress { stream: 1 << 20, next: 77, waits: true, gaps: vec![(77, 1), (100, 1 << 30)] },
        ];
        let mut out = BytesMut::new();
        all.iter().for_each(|progress| encode(progress, &mut out));
        let mut bytes = &out[..];
        let read: Vec<Progress> = std::iter::from_fn(|| decode(&mut bytes)).collect();
        assert_eq!(read, all);
        for len in 0..out.len() {
            let mut bytes = &out[..len];
            assert!(std::iter::from_fn(|| decode(&mut bytes)).count() < 3, "{len} bytes");
        }
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
