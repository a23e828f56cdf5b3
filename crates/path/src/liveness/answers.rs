//! Whether the only path of a connection works, judged by answers.
//!
//! Each ack-eliciting packet asks the peer for an acknowledgement (RFC 9000 §13.2.1), which can come over no
//! other path. So data needs no heartbeats beside it, and only an end that sends nothing asks with one now
//! and then.
//!
//! In: ack-eliciting packets that were sent, arrivals. Out: since when nothing has arrived although something
//! was asked. Always holds: silence counts only from a question on.

use mpvpn_types::{Duration, Instant};

/// How long after its last question an end asks with a heartbeat, while data moves and everything is
/// answered. Shorter: thousands of clients with one link each cost a server more for heartbeats than for
/// their packets, as programs that send once a second get one beside each; longer: an end that only receives
/// notices later that nothing comes any more.
pub(super) const CALM_INTERVAL: Duration = Duration::from_millis(1200);
/// How long the peer may keep an acknowledgement: the default of RFC 9000 §18.2.
const MAX_ACK_DELAY: Duration = Duration::from_millis(25);

/// Retries are counted up to this, after which intervals are a thousand times the first one.
const MAX_RETRIES: u32 = 10;

/// The questions of an end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    /// When the last ack-eliciting packet was sent that was the first since something arrived.
    last_asked: Option<Instant>,
    /// Whether nothing has arrived since.
    awaited: bool,
    /// Heartbeats since then.
    retries: u32,
}

/// How long answers may take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerLimits {
    /// The time after which an answer is late: a heartbeat asks again.
    late: Duration,
    /// The time after which so many answers are missing that the path is dead.
    dead: Duration,
}

impl AnswerLimits {
    /// `interval` is that of heartbeats while an answer is late, `misses` the number of answers that must be
    /// missing.
    pub(super) fn new(rtt: Duration, rtt_var: Duration, interval: Duration, misses: u32) -> Self {
        let late = rtt + rtt_var.min(interval) + MAX_ACK_DELAY;
        // The last of them is asked for after the first one was late, and may take as long.
        Self { late, dead: late * 2 + interval * misses.saturating_sub(1) }
    }
}

impl Answers {
    /// An ack-eliciting packet was sent.
    pub(super) fn on_sent(&mut self, now: Instant) {
        if !self.awaited {
            *self = Self { last_asked: Some(now), awaited: true, retries: 0 };
        }
    }

    /// When the last question was asked.
    pub(super) fn last_asked(&self) -> Option<Instant> {
        self.last_asked
    }

    /// A heartbeat is about to be sent.
    pub(super) fn on_heartbeat(&mut self) {
        if self.awaited {
            self.retries = (self.retries + 1).min(MAX_RETRIES);
        }
    }

    /// Number of heartbeats that have asked again, at most [`MAX_RETRIES`].
    pub(super) fn retries(&self) -> u32 {
        self.retries
    }

    /// Something arrived, or silence so far proves nothing.
    pub(super) fn forget(&mut self) {
        (self.awaited, self.retries) = (false, 0);
    }

    /// Whether something was asked for, and nothing has arrived since.
    pub(super) fn are_awaited(&self) -> bool {
        self.awaited
    }

    /// When the last question was asked; `None` if it is answered.
    fn asked(&self) -> Option<Instant> {
        self.last_asked.filter(|_| self.awaited)
    }

    /// When an answer is late.
    pub(super) fn late_at(&self, limits: &AnswerLimits) -> Option<Instant> {
        self.asked().map(|asked| asked + limits.late)
    }

    /// When missing answers mean death.
    pub(super) fn dead_at(&self, limits: &AnswerLimits, min_silence: Duration) -> Option<Instant> {
        self.asked().map(|asked| asked + limits.dead.max(min_silence))
    }
}
