//! Whether the only path of a connection works, judged by acknowledgements.
//!
//! The peer acknowledges each ack-eliciting packet (RFC 9000 §13.2.1), and the acknowledgement can come over
//! no other path. So data needs no heartbeats beside it, and only an end that sends nothing sends a heartbeat
//! now and then.
//!
//! In: ack-eliciting packets that were sent, arrivals. Out: since when nothing has arrived although an
//! acknowledgement is awaited. Always holds: silence counts only from an ack-eliciting packet on.

use mpvpn_types::{Duration, Instant};

/// The interval between an ack-eliciting packet and the next heartbeat, while data moves and every packet is
/// acknowledged. Shorter: thousands of clients with one link each cost a server more for heartbeats than for
/// their packets, as programs that send once a second get one beside each; longer: an end that only receives
/// notices later that nothing comes any more.
pub(super) const ACKED_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(1200);
/// How long the peer may keep an acknowledgement: the default of RFC 9000 §18.2. Peers of our own are asked
/// for less by ACK_FREQUENCY frames, which another peer need not understand, so that less would take its late
/// acknowledgements for missing ones.
const DEFAULT_MAX_ACK_DELAY: Duration = Duration::from_millis(25);

/// Retries are counted up to this, after which intervals are a thousand times the first one.
const MAX_RETRIES: u32 = 10;

/// The acknowledgement that an end awaits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AwaitedAck {
    /// When the last ack-eliciting packet was sent that was the first since something arrived.
    pub(super) sent: Option<Instant>,
    /// Whether nothing has arrived since.
    pub(super) is_awaited: bool,
    /// Heartbeats since then.
    pub(super) retries: u32,
}

/// How long acknowledgements may take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AckTimeouts {
    /// The time after which a heartbeat probes the path.
    probe: Duration,
    /// The time after which so many acknowledgements are missing that the path is dead.
    dead: Duration,
}

impl AckTimeouts {
    /// `interval` is that of heartbeats while an acknowledgement is late, `misses` the number of
    /// acknowledgements that must be missing.
    pub(super) fn new(rtt: Duration, rtt_var: Duration, interval: Duration, misses: u32) -> Self {
        let probe = rtt + rtt_var.min(interval) + DEFAULT_MAX_ACK_DELAY;
        // The last heartbeat follows the late first acknowledgement, and its own may take as long.
        Self { probe, dead: probe * 2 + interval * misses.saturating_sub(1) }
    }
}

impl AwaitedAck {
    /// An ack-eliciting packet was sent.
    pub(super) fn on_sent(&mut self, now: Instant) {
        if !self.is_awaited {
            *self = Self { sent: Some(now), is_awaited: true, retries: 0 };
        }
    }

    /// A heartbeat is about to be sent.
    pub(super) fn on_heartbeat(&mut self) {
        if self.is_awaited {
            self.retries = (self.retries + 1).min(MAX_RETRIES);
        }
    }

    /// Something arrived, or silence so far proves nothing.
    pub(super) fn reset(&mut self) {
        (self.is_awaited, self.retries) = (false, 0);
    }

    /// Since when an acknowledgement is awaited, if one is.
    fn awaited_since(&self) -> Option<Instant> {
        self.sent.filter(|_| self.is_awaited)
    }

    /// When a heartbeat has to probe the path.
    pub(super) fn probe_at(&self, timeouts: &AckTimeouts) -> Option<Instant> {
        self.awaited_since().map(|since| since + timeouts.probe)
    }

    /// When missing acknowledgements mean death.
    pub(super) fn dead_at(&self, timeouts: &AckTimeouts, min_silence: Duration) -> Option<Instant> {
        self.awaited_since().map(|since| since + timeouts.dead.max(min_silence))
    }
}
