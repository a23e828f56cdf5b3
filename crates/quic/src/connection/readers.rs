//! How far ahead of its reader a stream may be: what is not read takes memory at the peer.
//!
//! In: how many bytes the reader has taken, and when that was told. Out: up to where the stream may be sent. Always holds: one
//! that is not known to read has a bounded amount ahead of it, which many of them share.

use mpvpn_types::{BitRate, Duration, Instant};

/// Bytes that a reader is sent that is not known to read, at most.
const UNREAD: u64 = 896 << 10;
/// All such readers together, as long as there are not so many that each gets the least.
const ALL_UNREAD: u64 = 8 << 20;
const LEAST_UNREAD: u64 = 256 << 10;
/// Bytes after which a reader is taken for one that reads: more than the sockets of one that does not take.
const READS: u64 = UNREAD;
/// That it has taken so many more is told at once.
pub(super) const URGENT: u64 = UNREAD / 2;
/// Both ends take so long over that together.
const SLACK: Duration = Duration::from_millis(5);
/// It is sent what it reads in so many round trips, so that it can become quicker.
const ROUNDS: u32 = 3;
/// That it reads less counts by this part each time.
const FORGETS: u64 = 16;
/// How quickly it reads is measured over so long, at least.
const MEASURE: Duration = Duration::from_millis(20);

/// How far ahead of their readers streams may be now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How long it takes until a reader's answer to what is sent now is known here.
    lag: Duration,
    /// Bytes for one that is not known to read: no more than fits into memory for very many of them.
    unread: u64,
}

impl Patience {
    /// Where a round trip takes so long, and so many readers are not known to have read everything.
    pub(super) fn new(rtt: Duration, owing: u64) -> Self {
        let unread = (ALL_UNREAD / owing.max(1)).clamp(LEAST_UNREAD, UNREAD);
        Self { lag: rtt + SLACK, unread }
    }
}

/// What is known here of the reader of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reader {
    /// Bytes that it has taken, and how quickly.
    read: u64,
    reads: Option<Reads>,
}

/// How quickly a reader took bytes lately.
#[derive(Clone, Copy, Debug)]
struct Reads {
    since: Instant,
    /// What it had taken then.
    from: u64,
    /// `None` until there were two reports; it may have twice as much as one that is not known to read until then.
    rate: Option<BitRate>,
}

impl Reader {
    /// Whether it is known to have taken everything before this byte.
    pub(super) fn has_read(&self, at: u64) -> bool {
        self.read >= at
    }

    /// Where the stream has to stop for now: who reads is sent some round trips' data.
    pub(super) fn limit(&self, patience: Patience) -> u64 {
        let more =
            |reads: Reads| reads.rate.map_or(patience.unread, |rate| rate.bytes_in(patience.lag * ROUNDS));
        (self.read + patience.unread).saturating_add(self.reads.map_or(0, more))
    }

    /// It has taken so many bytes.
    pub(super) fn note(&mut self, now: Instant, read: u64) {
        if read < READS.max(self.read) {
            self.read = self.read.max(read);
            return;
        }
        // How quickly it reads the next report will tell.
        let Some(reads) = &mut self.reads else {
            (self.read, self.reads) = (read, Some(Reads { since: now, from: read, rate: None }));
            return;
        };
        self.read = read;
        let time = now.saturating_duration_since(reads.since);
        if time >= MEASURE {
            let bytes = u128::from(read - reads.from) * 1_000_000_000 / time.as_nanos();
            let rate = BitRate::from_bytes_per_second(u64::try_from(bytes).unwrap_or(u64::MAX));
            // What is missing before others holds a reader up now and then.
            let before = reads.rate.filter(|before| *before > rate);
            let rate = before.map_or(rate, |before| BitRate::from_bps(before.bps() - before.bps() / FORGETS));
            *reads = Reads { since: now, from: read, rate: Some(rate) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn readers_that_do_not_read_share_what_there_is() {
        let ahead = |owing| Reader::default().limit(Patience::new(20 * MS, owing));
        assert_eq!([0, 1, 9].map(ahead), [UNREAD; 3]);
        assert_eq!(ahead(16), ALL_UNREAD / 16);
        assert_eq!(ahead(10_000), LEAST_UNREAD);
    }

    #[test]
    fn a_reader_is_sent_what_it_reads_in_some_round_trips() {
        let (mut reader, start) = (Reader::default(), Instant::now());
        let patience = Patience::new(20 * MS, 1);
        let mut read = 0;
        for step in 0..100 {
            read += 1 << 20;
            reader.note(start + 25 * MS * step, read);
        }
        // 1 MiB in 25 ms, for three times 25 ms.
        assert_eq!(reader.limit(patience) - read, UNREAD + (3 << 20));
        assert!(reader.has_read(read) && !reader.has_read(read + 1));
        // It becomes slower: what it is sent follows, but not at once.
        let late = start + 25 * MS * 100;
        reader.note(late, read + 1);
        let once = reader.limit(patience);
        assert!(once > read + UNREAD + (5 << 19), "{}", once - read);
        for step in 1..200 {
            reader.note(late + 25 * MS * step, read + 1 + u64::from(step));
        }
        assert!(reader.limit(patience) < read + 2 * UNREAD);
    }

    #[test]
    fn what_was_told_before_is_not_taken_back() {
        let (mut reader, start) = (Reader::default(), Instant::now());
        reader.note(start, 2 * READS);
        reader.note(start + 50 * MS, READS);
        assert!(reader.has_read(2 * READS));
    }
}
