//! How far ahead of its reader a stream may be sent, because unread data takes memory at the peer.
//!
//! In: DataAck reports of how many bytes the reader has taken. Out: the offset up to which the stream may be
//! sent. Always holds: the unread bytes of readers that are not known to read are bounded, and many such
//! readers share the bound.

use mpvpn_types::{BitRate, Duration, Instant};

/// Unread bytes of a stream whose reader is not known to read: more than the socket buffers of such a reader
/// take. Smaller: slow start of readers; larger: memory at the peer.
const MAX_UNREAD_PER_STREAM: u64 = 896 << 10;
/// The unread bytes of all such streams together, while each can have [`MIN_UNREAD_PER_STREAM`]. Smaller:
/// slow start of many readers; larger: memory at the peer.
const MAX_UNREAD_IN_ALL: u64 = 8 << 20;
const MIN_UNREAD_PER_STREAM: u64 = 256 << 10;
/// Bytes after which a reader is known to read: more than the socket buffers of one that does not. Smaller:
/// false readers; larger: slow start.
const KNOWN_READER_BYTES: u64 = MAX_UNREAD_PER_STREAM;
/// Read bytes after which a DataAck report is urgent: half of what may be unread. Smaller: more reports;
/// larger: readers wait.
pub(super) const URGENT_REPORT_BYTES: u64 = MAX_UNREAD_PER_STREAM / 2;
/// Processing time of a report at both ends together.
const REPORT_PROCESSING_TIME: Duration = Duration::from_millis(5);
/// A reader is sent what it reads in this many round trips, so that it can become quicker. Fewer: readers
/// stay slow; more: memory. No measurement (docs/design/streams.md).
const READ_AHEAD_ROUNDS: u32 = 3;
/// The measured rate of a reader falls by at most this fraction (one over it) per report. Smaller: rates
/// jump; larger: memory for readers that have become slow.
const RATE_DECAY_DIVISOR: u64 = 16;
/// The least time over which the rate of a reader is measured. Shorter: noise; longer: slow to follow.
const MIN_MEASURING_TIME: Duration = Duration::from_millis(20);

/// How far ahead of their readers streams may be sent now.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadAhead {
    /// The time until a DataAck report about data that is sent now arrives.
    lag: Duration,
    /// Unread bytes of a stream whose reader is not known to read.
    unread: u64,
}

impl ReadAhead {
    /// For this round-trip time, and `unread_streams` streams that are not known to be read completely.
    pub(super) fn new(rtt: Duration, unread_streams: u64) -> Self {
        let unread =
            (MAX_UNREAD_IN_ALL / unread_streams.max(1)).clamp(MIN_UNREAD_PER_STREAM, MAX_UNREAD_PER_STREAM);
        Self { lag: rtt + REPORT_PROCESSING_TIME, unread }
    }
}

/// The reader of a stream at the peer, as its reports show it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reader {
    /// Bytes that it has taken, and its rate once it is known to read.
    read: u64,
    reads: Option<ReadRate>,
}

/// The measurement of a reader's rate.
#[derive(Clone, Copy, Debug)]
struct ReadRate {
    since: Instant,
    /// Bytes taken then.
    from: u64,
    /// `None` before the second report; until then it may have twice the unread bytes.
    rate: Option<BitRate>,
}

impl Reader {
    /// Whether it has taken everything before this offset.
    pub(super) fn has_read(&self, at: u64) -> bool {
        self.read >= at
    }

    /// The offset up to which the stream may be sent now.
    pub(super) fn limit(&self, read_ahead: ReadAhead) -> u64 {
        let more = |reads: ReadRate| {
            reads.rate.map_or(read_ahead.unread, |rate| rate.bytes_in(read_ahead.lag * READ_AHEAD_ROUNDS))
        };
        (self.read + read_ahead.unread).saturating_add(self.reads.map_or(0, more))
    }

    /// Takes a report that `read` bytes were taken.
    pub(super) fn on_report(&mut self, now: Instant, read: u64) {
        if read < KNOWN_READER_BYTES.max(self.read) {
            self.read = self.read.max(read);
            return;
        }
        // The next report will show its rate.
        let Some(reads) = &mut self.reads else {
            (self.read, self.reads) = (read, Some(ReadRate { since: now, from: read, rate: None }));
            return;
        };
        self.read = read;
        let time = now.saturating_duration_since(reads.since);
        if time >= MIN_MEASURING_TIME {
            let bytes = u128::from(read - reads.from) * 1_000_000_000 / time.as_nanos();
            let rate = BitRate::from_bytes_per_second(u64::try_from(bytes).unwrap_or(u64::MAX));
            // Gaps delay a reader now and then, so a lower rate counts slowly.
            let before = reads.rate.filter(|before| *before > rate);
            let rate = before
                .map_or(rate, |before| BitRate::from_bps(before.bps() - before.bps() / RATE_DECAY_DIVISOR));
            *reads = ReadRate { since: now, from: read, rate: Some(rate) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn readers_that_do_not_read_share_a_bound() {
        let ahead = |unread_streams| Reader::default().limit(ReadAhead::new(20 * MS, unread_streams));
        assert_eq!([0, 1, 9].map(ahead), [MAX_UNREAD_PER_STREAM; 3]);
        assert_eq!(ahead(16), MAX_UNREAD_IN_ALL / 16);
        assert_eq!(ahead(10_000), MIN_UNREAD_PER_STREAM);
    }

    #[test]
    fn a_reader_is_sent_what_it_reads_in_some_round_trips() {
        let (mut reader, start) = (Reader::default(), Instant::now());
        let read_ahead = ReadAhead::new(20 * MS, 1);
        let mut read = 0;
        for step in 0..100 {
            read += 1 << 20;
            reader.on_report(start + 25 * MS * step, read);
        }
        // 1 MiB in 25 ms, for three times 25 ms.
        assert_eq!(reader.limit(read_ahead) - read, MAX_UNREAD_PER_STREAM + (3 << 20));
        assert!(reader.has_read(read) && !reader.has_read(read + 1));
        // It becomes slower: the limit follows, but not at once.
        let late = start + 25 * MS * 100;
        reader.on_report(late, read + 1);
        let once = reader.limit(read_ahead);
        assert!(once > read + MAX_UNREAD_PER_STREAM + (5 << 19), "{}", once - read);
        for step in 1..200 {
            reader.on_report(late + 25 * MS * step, read + 1 + u64::from(step));
        }
        assert!(reader.limit(read_ahead) < read + 2 * MAX_UNREAD_PER_STREAM);
    }

    #[test]
    fn an_older_report_takes_nothing_back() {
        let (mut reader, start) = (Reader::default(), Instant::now());
        reader.on_report(start, 2 * KNOWN_READER_BYTES);
        reader.on_report(start + 50 * MS, KNOWN_READER_BYTES);
        assert!(reader.has_read(2 * KNOWN_READER_BYTES));
    }
}
