use std::collections::VecDeque;

use bytes::{Buf, Bytes};
use mpvpn_types::{Duration, Instant};

use super::seq::Seq;

/// The first retransmission timeout: an app may delay its acknowledgement for 200 ms. Shorter: needless
/// retransmissions; longer: a lost packet stops the app for longer.
const INITIAL_RTO: Duration = Duration::from_millis(300);
/// The longest retransmission timeout. Longer: an app that is back waits for its data.
const MAX_RTO: Duration = Duration::from_secs(5);
/// Consecutive timeouts without any segment of the app after which it is gone: about 50 s. Fewer: an app that
/// was stopped loses its connection; more: memory.
const MAX_TIMEOUTS: u32 = 12;
/// Duplicate acknowledgements that indicate a loss (RFC 5681 §3.2).
const DUPLICATE_ACK_THRESHOLD: u8 = 3;

/// The meaning of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acked {
    /// It acknowledges this many new bytes.
    Bytes(usize),
    /// It acknowledges bytes that were never sent.
    Unsent,
}

/// The result of a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeoutResult {
    /// Bytes have to be sent again, or a closed window to be probed.
    Again,
    /// The app has not answered for too long: it is gone.
    Gone,
}

/// The sending side: bytes that the app has not acknowledged, and bytes that wait for its window.
///
/// A local link loses packets only in a full device queue, so there is no congestion window; after a loss
/// everything from there on is sent again (go-back-N).
#[derive(Debug, Default)]
pub(super) struct Outbound {
    /// The first unacknowledged byte (SND.UNA).
    una: Seq,
    /// The next byte to send (SND.NXT).
    pub(super) next: Seq,
    /// The byte after the highest one that was ever sent.
    top: Seq,
    /// The app's window (SND.WND), and the sequence number of the segment that announced it (SND.WL1).
    window: usize,
    window_from: Seq,
    scale: u8,
    pub(super) mss: usize,
    sent: VecDeque<Bytes>,
    unsent: VecDeque<Bytes>,
    pub(super) held: usize,
    waiting: usize,
    /// Whether the stream has ended: a FIN follows all bytes.
    end: bool,
    end_sent: bool,
    pub(super) end_acked: bool,
    duplicate_acks: u8,
    /// Whether one byte may be sent beyond a closed window, as a window probe (RFC 9293 §3.8.6.1).
    probe: bool,
    rto: Duration,
    timeouts: u32,
    pub(super) deadline: Option<Instant>,
}

impl Outbound {
    /// `first` is the initial sequence number of this end, `theirs` that of the app, `mss` the app's MSS
    /// (bytes), and `scale` its window scale.
    pub(super) fn new(first: Seq, theirs: Seq, mss: usize, scale: u8) -> Self {
        let next = first.plus(1);
        Self {
            una: next,
            next,
            top: next,
            window_from: theirs,
            scale,
            mss,
            rto: INITIAL_RTO,
            ..Self::default()
        }
    }

    /// Whether the stream has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.end
    }

    /// Queues bytes for the app.
    pub(super) fn write(&mut self, bytes: Bytes) {
        if self.end || bytes.is_empty() {
            return;
        }
        self.held += bytes.len();
        self.waiting += bytes.len();
        self.unsent.push_back(bytes);
    }

    /// Ends the stream after the queued bytes.
    pub(super) fn finish(&mut self) {
        self.end = true;
    }

    /// Takes the acknowledgement and window of a segment; `payload` is its length in sequence numbers.
    pub(super) fn on_ack(&mut self, seq: Seq, ack: Seq, window: u16, payload: usize) -> Acked {
        if ack.since(self.top) > 0 {
            return Acked::Unsent;
        }
        self.timeouts = 0;
        let window = usize::from(window) << self.scale;
        let repeated = ack == self.una && payload == 0 && window == self.window;
        let was_closed = self.window == 0;
        let fresh = ack.beyond(self.una);
        // A window counts from its own acknowledgement number: the one with the newest acknowledgement is
        // used, also from a retransmission; an older one is ignored.
        if fresh > 0 || ack == self.una && seq.since(self.window_from) >= 0 {
            (self.window, self.window_from) = (window, seq);
        }
        if fresh == 0 {
            if was_closed && self.window > 0 {
                // The probe was not accepted.
                self.go_back();
                self.rto = INITIAL_RTO;
            } else if repeated && self.next != self.una {
                self.duplicate_acks = self.duplicate_acks.saturating_add(1);
                if self.duplicate_acks == DUPLICATE_ACK_THRESHOLD {
                    self.go_back();
                }
            }
            return Acked::Bytes(0);
        }
        // The FIN has a sequence number of its own, after all bytes.
        self.end_acked |= fresh > self.held;
        let bytes = fresh.min(self.held);
        self.forget(bytes);
        self.una = ack;
        if self.next.since(ack) < 0 {
            self.next = ack;
            self.end_sent |= self.end_acked;
        }
        (self.duplicate_acks, self.rto, self.deadline, self.probe) = (0, INITIAL_RTO, None, false);
        Acked::Bytes(bytes)
    }

    /// Drops the first `bytes`, which are acknowledged.
    fn forget(&mut self, mut bytes: usize) {
        self.held -= bytes;
        while bytes > 0 {
            let from_sent = !self.sent.is_empty();
            let queue = if from_sent { &mut self.sent } else { &mut self.unsent };
            let Some(front) = queue.front_mut() else { return };
            let some = front.len().min(bytes);
            bytes -= some;
            self.waiting -= if from_sent { 0 } else { some };
            if some == front.len() {
                queue.pop_front();
            } else {
                front.advance(some);
            }
        }
    }

    /// Sends everything again that is not acknowledged (go-back-N).
    fn go_back(&mut self) {
        self.waiting += self.sent.iter().map(Bytes::len).sum::<usize>();
        while let Some(bytes) = self.sent.pop_back() {
            self.unsent.push_front(bytes);
        }
        self.next = self.una;
        self.end_sent = self.end_acked;
        self.deadline = None;
    }

    /// Bytes that may be sent now.
    fn sendable(&self) -> usize {
        let in_flight = self.next.beyond(self.una);
        let open = self.window.saturating_sub(in_flight).max(usize::from(self.probe && in_flight == 0));
        let len = self.waiting.min(open);
        // A segment that only the window makes small waits for a larger window.
        let small = len < self.waiting && len < self.mss;
        if small && in_flight > 0 { 0 } else { len }
    }

    fn is_end_due(&self) -> bool {
        self.end && !self.end_sent && self.waiting == 0
    }

    /// Whether [`Self::take`] has something to send.
    pub(super) fn is_due(&self) -> bool {
        self.sendable() > 0 || self.is_end_due()
    }

    /// The next bytes to send, at most `max` in at most `parts` buffers, and whether a FIN follows them.
    pub(super) fn take(&mut self, now: Instant, max: usize, parts: usize) -> (Vec<Bytes>, bool) {
        let sendable = self.sendable();
        let mut left = sendable.min(max);
        // Only the last segment of all may be smaller than the MSS.
        if left < sendable && left > self.mss {
            left -= left % self.mss;
        }
        let mut taken = Vec::new();
        while left > 0 && taken.len() < parts {
            let Some(front) = self.unsent.front_mut() else { break };
            let some = front.len().min(left);
            let part = front.split_to(some);
            if front.is_empty() {
                self.unsent.pop_front();
            }
            left -= some;
            self.waiting -= some;
            self.next = self.next.plus(some);
            self.sent.push_back(part.clone());
            taken.push(part);
        }
        let end = self.is_end_due();
        if end {
            self.end_sent = true;
            self.next = self.next.plus(1);
        }
        if self.next.since(self.top) > 0 {
            self.top = self.next;
        }
        self.probe = false;
        if end || !taken.is_empty() {
            self.deadline.get_or_insert(now + self.rto);
        }
        (taken, end)
    }

    /// Starts the timer if an acknowledgement or a larger window is awaited.
    pub(super) fn arm(&mut self, now: Instant) {
        if self.next != self.una || self.waiting > 0 && !self.is_due() {
            self.deadline.get_or_insert(now + self.rto);
        }
    }

    /// Handles the retransmission timer.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> TimeoutResult {
        if self.deadline.is_none_or(|at| now < at) {
            return TimeoutResult::Again;
        }
        self.timeouts += 1;
        if self.timeouts > MAX_TIMEOUTS {
            return TimeoutResult::Gone;
        }
        self.rto = (2 * self.rto).min(MAX_RTO);
        self.go_back();
        self.probe = self.window == 0;
        TimeoutResult::Again
    }

    /// Copies the unsent buffers into one, because each may be a small slice of a large receive buffer.
    pub(super) fn compact(&mut self) {
        if self.unsent.len() < 2 {
            return;
        }
        let mut whole = Vec::with_capacity(self.waiting);
        for bytes in self.unsent.drain(..) {
            whole.extend_from_slice(&bytes);
        }
        self.unsent.push_back(whole.into());
    }

    /// The number of unsent buffers.
    pub(super) fn buffers(&self) -> usize {
        self.unsent.len()
    }

    /// Whether [`Self::trim_memory`] would free memory.
    pub(super) fn has_spare(&self) -> bool {
        self.held == 0 && self.sent.capacity() + self.unsent.capacity() > 0
    }

    /// Frees memory that is not in use.
    pub(super) fn trim_memory(&mut self) {
        if self.has_spare() {
            self.sent = VecDeque::new();
            self.unsent = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Seq = Seq(u32::MAX - 2000);
    const THEIRS: Seq = Seq(77);

    fn at(offset: usize) -> Seq {
        FIRST.plus(1 + offset)
    }

    fn open(window: u16) -> Outbound {
        let mut outbound = Outbound::new(FIRST, THEIRS, 100, 0);
        outbound.on_ack(THEIRS, at(0), window, 0);
        outbound
    }

    fn bytes(taken: (Vec<Bytes>, bool)) -> (Vec<u8>, bool) {
        (taken.0.concat(), taken.1)
    }

    #[test]
    fn the_window_bounds_what_leaves_and_acknowledgements_free_it() {
        let now = Instant::now();
        let mut outbound = open(250);
        outbound.write(Bytes::from(vec![1; 400]));
        outbound.finish();
        assert_eq!(outbound.take(now, 1000, 10).0.concat().len(), 250);
        assert!(!outbound.is_due());
        assert_eq!(outbound.on_ack(THEIRS, at(250), 250, 0), Acked::Bytes(250));
        assert_eq!(bytes(outbound.take(now, 1000, 10)), (vec![1; 150], true));
        assert_eq!(outbound.on_ack(THEIRS, at(401), 250, 0), Acked::Bytes(150));
        assert!(outbound.end_acked && outbound.deadline.is_none());
        assert_eq!(outbound.on_ack(THEIRS, at(402), 250, 0), Acked::Unsent);
    }

    #[test]
    fn packets_hold_whole_segments_but_the_last() {
        let now = Instant::now();
        let mut outbound = open(1000);
        outbound.write(Bytes::from(vec![1; 640]));
        assert_eq!(outbound.take(now, 350, 10).0.concat().len(), 300);
        assert_eq!(outbound.take(now, 350, 10).0.concat().len(), 340);
    }

    #[test]
    fn what_is_lost_is_sent_again_after_three_repeated_acknowledgements_or_a_wait() {
        let mut now = Instant::now();
        let mut outbound = open(1000);
        outbound.write(Bytes::from_static(b"abcdef"));
        outbound.take(now, 3, 10);
        outbound.take(now, 3, 10);
        for _ in 0..3 {
            assert!(!outbound.is_due());
            outbound.on_ack(THEIRS, at(0), 1000, 0);
        }
        assert_eq!(bytes(outbound.take(now, 4, 10)).0, b"abcd");
        // The second half had arrived and is acknowledged although it was about to be sent again.
        assert_eq!(outbound.on_ack(THEIRS, at(6), 1000, 0), Acked::Bytes(6));
        assert!(!outbound.is_due() && outbound.deadline.is_none() && outbound.next == at(6));

        outbound.write(Bytes::from_static(b"gh"));
        outbound.take(now, 10, 10);
        now = outbound.deadline.unwrap();
        assert_eq!(outbound.handle_timeout(now), TimeoutResult::Again);
        assert_eq!(bytes(outbound.take(now, 10, 10)).0, b"gh");
        assert!(outbound.deadline.unwrap() > now + INITIAL_RTO, "the second wait is longer");
    }

    #[test]
    fn a_closed_window_is_probed_by_one_byte_for_as_long_as_the_app_answers() {
        let mut now = Instant::now();
        let mut outbound = open(2);
        outbound.write(Bytes::from_static(b"abcdef"));
        outbound.take(now, 10, 10);
        outbound.on_ack(THEIRS, at(2), 0, 0);
        for _ in 0..100 {
            assert!(!outbound.is_due());
            outbound.arm(now);
            now = outbound.deadline.unwrap();
            assert_eq!(outbound.handle_timeout(now), TimeoutResult::Again);
            assert_eq!(bytes(outbound.take(now, 10, 10)).0, b"c");
            outbound.on_ack(THEIRS, at(2), 0, 0);
            outbound.arm(now);
        }
        outbound.on_ack(THEIRS, at(2), 100, 0);
        assert_eq!(bytes(outbound.take(now, 10, 10)).0, b"cdef");
    }

    #[test]
    fn an_app_that_never_answers_is_gone_within_a_minute() {
        let start = Instant::now();
        let mut now = start;
        let mut outbound = open(100);
        outbound.write(Bytes::from_static(b"abc"));
        loop {
            outbound.take(now, 10, 10);
            now = outbound.deadline.unwrap();
            if outbound.handle_timeout(now) == TimeoutResult::Gone {
                break;
            }
        }
        let waited = now.saturating_duration_since(start);
        assert!((Duration::from_secs(30)..Duration::from_secs(60)).contains(&waited), "{waited:?}");
    }

    #[test]
    fn an_old_segment_does_not_set_the_window_back() {
        let now = Instant::now();
        let mut outbound = open(100);
        outbound.on_ack(THEIRS.plus(10), at(0), 500, 0);
        outbound.on_ack(THEIRS, at(0), 3, 0);
        outbound.write(Bytes::from(vec![1; 600]));
        assert_eq!(outbound.take(now, 1000, 10).0.concat().len(), 500);
    }

    #[test]
    fn a_window_is_counted_from_the_acknowledgement_that_said_so() {
        let now = Instant::now();
        let mut outbound = open(100);
        outbound.on_ack(THEIRS.plus(10), at(0), 500, 0);
        outbound.write(Bytes::from(vec![1; 900]));
        assert_eq!(outbound.take(now, 1000, 10).0.concat().len(), 500);
        // The app sends again what was lost of its own, with what it has received meanwhile.
        outbound.on_ack(THEIRS, at(400), 100, 5);
        assert!(!outbound.is_due(), "more than the app takes");
        outbound.on_ack(THEIRS.plus(5), at(450), 150, 5);
        assert_eq!(outbound.take(now, 1000, 10).0.concat().len(), 100);
        // One that came late says nothing, whatever its own place.
        outbound.on_ack(THEIRS.plus(20), at(300), 1000, 0);
        assert!(!outbound.is_due(), "what the app took before it took that");
    }
}
