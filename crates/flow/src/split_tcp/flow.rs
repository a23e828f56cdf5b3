use mpvpn_packet::{
    FlowKey, TunPacket,
    tcp::{self, Segment, TcpHeader},
    tcp_flags::{ACK, FIN, PSH, RST, SYN},
};
use mpvpn_types::{Duration, Instant};

use super::{
    ConnectionState, ConnectionSummary, ProxyLimits,
    inbound::Inbound,
    outbound::{Acked, Outbound, TimeoutResult},
    seq::Seq,
};

/// The window scale (RFC 7323) of this end: windows up to 1 MiB. Larger: more memory a connection; smaller: a
/// fast local app stops and starts.
const WINDOW_SCALE: u8 = 4;
/// The shortest time between two challenge ACKs, which the app's kernel might answer in turn (RFC 5961 §7).
/// Shorter: loops of answers; longer: an app with a wrong state notices late.
const MIN_CHALLENGE_INTERVAL: Duration = Duration::from_millis(500);
/// The first retransmission timeout of a SYN-ACK, doubled each time (RFC 6298 §2.1).
const SYN_ACK_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_SYN_ACKS: u32 = 5;
/// The TIME-WAIT of a connection that this end closed first, for an app whose FIN was not acknowledged. A
/// local link keeps no old segments, so it may be far shorter than 2 MSL. Longer: memory.
const TIME_WAIT: Duration = Duration::from_secs(3);
/// The MSS of an app that sends no option (RFC 9293 §3.7.1).
const DEFAULT_MSS_V4: u16 = 536;
const DEFAULT_MSS_V6: u16 = 1220;
/// SYNs up to this size (bytes) are kept, to be quoted in ICMP errors; larger ones carry data.
const MAX_KEPT_SYN: usize = 200;
/// The smallest MSS that is used (bytes): a smaller one would split one write into thousands of packets.
const MIN_MSS: usize = 64;

/// The phase of a connection.
#[derive(Debug)]
pub(super) enum Phase {
    /// The SYN arrived, and the server has not answered. The SYN is kept, to be quoted in an ICMP error.
    SynReceived { syn: Box<[u8]> },
    /// The server accepted; the SYN-ACK was sent `sent` times, and is sent again at `again`.
    SynAckSent { sent: u32, again: Option<Instant> },
    /// Established.
    Open,
    /// Both directions have ended and are acknowledged; remembered until then (TIME-WAIT).
    Over { until: Instant },
}

/// The effect of a segment or timeout on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Continue,
    /// The connection has ended regularly.
    Ended,
    /// The app reset the connection, or does not answer any more.
    Broken,
    /// The segment belongs to another connection of the app: it is answered with a RST.
    WrongConnection,
}

/// One connection of an app, which this proxy terminates.
#[derive(Debug)]
pub(super) struct Flow {
    /// The 5-tuple of the app's packets.
    pub(super) key: FlowKey,
    pub(super) phase: Phase,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    /// Whether the app agreed to window scaling.
    scaled: bool,
    /// Whether an acknowledgement has to be sent.
    pub(super) ack_due: bool,
    /// Whether this end sent its FIN before the app did.
    closed_first: bool,
    last_challenge: Option<Instant>,
    /// When the app last sent a segment.
    pub(super) last_segment: Instant,
    pub(super) since: Instant,
    /// When bytes last moved.
    pub(super) active: Instant,
    /// Bytes from the app, and to it.
    pub(super) up: u64,
    pub(super) down: u64,
}

impl Flow {
    /// A connection that an app requests by the SYN in `packet`; `first` is the initial sequence number of
    /// this end, and `limit` the bytes that may wait to be read.
    pub(super) fn new(
        now: Instant,
        key: FlowKey,
        syn: &Segment<'_>,
        packet: &[u8],
        first: Seq,
        limit: usize,
    ) -> Self {
        let scale = syn.window_scale();
        let default = if key.src.is_ipv4() { DEFAULT_MSS_V4 } else { DEFAULT_MSS_V6 };
        let mss = usize::from(syn.mss().unwrap_or(default)).max(MIN_MSS);
        let theirs = Seq(syn.seq());
        // The window of a SYN-ACK is not scaled (RFC 7323 §2.2).
        let window = limit.min(u16::MAX.into());
        Self {
            key,
            phase: Phase::SynReceived {
                syn: if packet.len() > MAX_KEPT_SYN { Box::default() } else { packet.into() },
            },
            inbound: Inbound::new(theirs, window, if scale.is_some() { WINDOW_SCALE } else { 0 }),
            outbound: Outbound::new(first, theirs, mss, scale.unwrap_or(0)),
            scaled: scale.is_some(),
            ack_due: false,
            closed_first: false,
            last_challenge: None,
            last_segment: now,
            since: now,
            active: now,
            up: 0,
            down: 0,
        }
    }

    pub(super) fn summary(&self) -> ConnectionSummary {
        let state = match (&self.phase, self.inbound.ended, self.outbound.has_ended()) {
            (Phase::SynReceived { .. } | Phase::SynAckSent { .. }, ..) => ConnectionState::Opening,
            (Phase::Over { .. }, ..) | (Phase::Open, true, true) => ConnectionState::Closing,
            (Phase::Open, true, false) => ConnectionState::AppEnded,
            (Phase::Open, false, true) => ConnectionState::RemoteEnded,
            (Phase::Open, false, false) => ConnectionState::Open,
        };
        let (up, down, since) = (self.up, self.down, self.since);
        ConnectionSummary {
            key: self.key,
            state,
            up_bytes: up,
            down_bytes: down,
            started: since,
            last_active: self.active.max(self.last_segment),
        }
    }

    /// The server accepted: a SYN-ACK has to be sent.
    pub(super) fn answer(&mut self) {
        if matches!(self.phase, Phase::SynReceived { .. }) {
            self.phase = Phase::SynAckSent { sent: 0, again: None };
            self.ack_due = true;
        }
    }

    /// Whether `syn` opens a new connection with the same 5-tuple, because this one is over (RFC 9293 §3.6.1)
    /// or the app has given it up before it was answered.
    pub(super) fn is_replaced_by(&self, syn: &Segment<'_>) -> bool {
        let seq = Seq(syn.seq());
        match self.phase {
            Phase::SynReceived { .. } => seq.plus(1) != self.inbound.next,
            Phase::Over { .. } => seq.since(self.inbound.next) > 0,
            Phase::SynAckSent { .. } | Phase::Open => false,
        }
    }

    /// Takes a segment of the app (RFC 9293 §3.10.7).
    pub(super) fn handle(&mut self, now: Instant, segment: &Segment<'_>) -> Verdict {
        self.last_segment = now;
        let seq = Seq(segment.seq());
        match self.phase {
            Phase::SynReceived { .. } => {
                return if segment.has(RST) { Verdict::Broken } else { Verdict::Continue };
            }
            Phase::SynAckSent { .. } if segment.has(SYN) && seq.plus(1) == self.inbound.next => {
                self.ack_due = true;
                return Verdict::Continue;
            }
            _ => {}
        }
        if segment.has(RST) {
            // In the window but not at its start, a RST may be forged (RFC 5961 §3.2).
            if let Phase::Over { until } = &mut self.phase {
                *until = now;
                return self.verdict(now);
            }
            if seq == self.inbound.next {
                return Verdict::Broken;
            }
            if self.inbound.admits(seq, 0) {
                self.challenge(now);
            }
            return Verdict::Continue;
        }
        if segment.has(SYN) {
            self.challenge(now);
            return Verdict::Continue;
        }
        if !segment.has(ACK) {
            return Verdict::Continue;
        }
        let len = segment.seq_len();
        let admitted = self.inbound.admits(seq, len);
        // A keep-alive repeats an old byte, or none (RFC 9293 §3.8.4).
        let keep_alive = len < 2 && seq.plus(1) == self.inbound.next;
        if !admitted && (len > 0 || keep_alive) {
            self.ack_due = true;
        } else if !admitted {
            self.challenge(now);
        }
        // The acknowledgement counts even if the payload is outside of the window (RFC 9293 §3.10.7.4).
        if !admitted && !keep_alive && seq != self.inbound.next {
            return Verdict::Continue;
        }
        if self.outbound.on_ack(seq, Seq(segment.ack()), segment.window(), len) == Acked::Unsent {
            if matches!(self.phase, Phase::SynAckSent { .. }) {
                return Verdict::WrongConnection;
            }
            self.challenge(now);
            return Verdict::Continue;
        }
        if matches!(self.phase, Phase::SynAckSent { .. }) {
            self.phase = Phase::Open;
        }
        if admitted && len > 0 {
            self.inbound.accept(seq, segment.payload(), segment.has(FIN));
            self.ack_due = true;
        }
        self.outbound.arm(now);
        self.check_end(now)
    }

    /// Ends the connection once both directions have ended, after a TIME-WAIT if this end was the first.
    fn check_end(&mut self, now: Instant) -> Verdict {
        if matches!(self.phase, Phase::Open) && self.outbound.end_acked && self.inbound.ended {
            let until = if self.closed_first { now + TIME_WAIT } else { now };
            self.phase = Phase::Over { until };
        }
        self.verdict(now)
    }

    /// [`Verdict::Ended`] if nothing is left to do: the TIME-WAIT is over, and all bytes were read.
    pub(super) fn verdict(&self, now: Instant) -> Verdict {
        match self.phase {
            Phase::Over { until } if now >= until && !self.ack_due && self.inbound.end_read => Verdict::Ended,
            _ => Verdict::Continue,
        }
    }

    fn challenge(&mut self, now: Instant) {
        if self.last_challenge.is_none_or(|at| now >= at + MIN_CHALLENGE_INTERVAL) {
            self.last_challenge = Some(now);
            self.ack_due = true;
        }
    }

    /// Whether a packet has to be sent.
    pub(super) fn is_due(&self) -> bool {
        self.ack_due || matches!(self.phase, Phase::Open) && self.outbound.is_due()
    }

    /// The next packet to send, in segments that fit `mtu` bytes; `limit` bytes may wait to be read.
    pub(super) fn poll_packet(&mut self, now: Instant, mtu: usize, limit: usize) -> Option<TunPacket> {
        match &mut self.phase {
            Phase::SynReceived { .. } => None,
            Phase::SynAckSent { sent, again } => {
                if !std::mem::take(&mut self.ack_due) {
                    return None;
                }
                *again = Some(now + SYN_ACK_TIMEOUT * 2u32.pow(*sent));
                *sent = (*sent + 1).min(MAX_SYN_ACKS);
                let seq = Seq(self.outbound.next.0.wrapping_sub(1));
                let window = u16::try_from(limit).unwrap_or(u16::MAX);
                let mss = u16::try_from(mtu.saturating_sub(tcp::headers_len(self.key.source())))
                    .unwrap_or(u16::MAX);
                let scale = self.scaled.then_some(WINDOW_SCALE);
                let head = TcpHeader {
                    mss: Some(mss),
                    window_scale: scale,
                    window,
                    seq: seq.0,
                    ..self.head(SYN | ACK)
                };
                tcp::build_packet(&head, Vec::new(), mss)
            }
            Phase::Open => {
                if !self.is_due() {
                    return None;
                }
                let mss = self
                    .outbound
                    .mss
                    .min(mtu.saturating_sub(tcp::headers_len(self.key.source())).max(MIN_MSS));
                let mss = u16::try_from(mss).unwrap_or(u16::MAX);
                let seq = self.outbound.next;
                let max = tcp::max_payload(self.key.source());
                let max = max - max % usize::from(mss);
                let (parts, end) = self.outbound.take(now, max, mpvpn_packet::gro::MAX_PARTS - 1);
                let mut flags = ACK;
                if !parts.is_empty() && !self.outbound.is_due() {
                    flags |= PSH;
                }
                if end {
                    flags |= FIN;
                    self.closed_first |= !self.inbound.ended;
                }
                self.ack_due = false;
                let window = self.inbound.announce(limit);
                tcp::build_packet(&TcpHeader { window, seq: seq.0, ..self.head(flags) }, parts, mss)
            }
            Phase::Over { .. } => {
                if !std::mem::take(&mut self.ack_due) {
                    return None;
                }
                let window = self.inbound.announce(limit);
                tcp::build_packet(&TcpHeader { window, ..self.head(ACK) }, Vec::new(), u16::MAX)
            }
        }
    }

    /// The TCP header of a packet to the app.
    pub(super) fn head(&self, flags: u8) -> TcpHeader {
        TcpHeader {
            from: self.key.destination(),
            to: self.key.source(),
            seq: self.outbound.next.0,
            ack: self.inbound.next.0,
            flags,
            window: 0,
            mss: None,
            window_scale: None,
        }
    }

    /// A RST for the app.
    pub(super) fn reset(&self) -> Option<TunPacket> {
        let head = match self.phase {
            // This end has not sent a SYN-ACK yet (RFC 9293 §3.5.2).
            Phase::SynReceived { .. } => TcpHeader { seq: 0, ..self.head(RST | ACK) },
            _ => self.head(RST | ACK),
        };
        tcp::build_packet(&head, Vec::new(), u16::MAX)
    }

    /// Whether [`Self::trim_memory`] would free memory.
    pub(super) fn has_spare(&self) -> bool {
        self.inbound.has_spare() || self.outbound.has_spare()
    }

    /// Frees memory that is not in use.
    pub(super) fn trim_memory(&mut self) {
        self.inbound.trim_memory();
        self.outbound.trim_memory();
    }

    /// When the connection times out unless the app sends something before.
    pub(super) fn expires_at(&self, limits: &ProxyLimits) -> Option<Instant> {
        let timeout = match self.phase {
            Phase::SynReceived { .. } | Phase::SynAckSent { .. } => limits.connect_timeout,
            Phase::Open if self.inbound.ended || self.outbound.has_ended() => limits.half_closed_timeout,
            Phase::Open => limits.idle_timeout,
            Phase::Over { .. } => return None,
        };
        Some(self.last_segment + timeout)
    }

    /// When [`Self::handle_timeout`] has to be called.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::SynReceived { .. } => None,
            Phase::SynAckSent { again, .. } => again,
            Phase::Open => self.outbound.deadline,
            Phase::Over { until } => (self.inbound.end_read && !self.ack_due).then_some(until),
        }
    }

    /// Handles a retransmission timeout or the end of the TIME-WAIT.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> Verdict {
        match self.phase {
            Phase::SynReceived { .. } => Verdict::Continue,
            Phase::SynAckSent { sent, again } => {
                if again.is_none_or(|at| now < at) {
                    return Verdict::Continue;
                }
                if sent == MAX_SYN_ACKS {
                    return Verdict::Broken;
                }
                self.ack_due = true;
                self.phase = Phase::SynAckSent { sent, again: None };
                Verdict::Continue
            }
            Phase::Open => match self.outbound.handle_timeout(now) {
                TimeoutResult::Gone => Verdict::Broken,
                TimeoutResult::Again => {
                    self.outbound.arm(now);
                    Verdict::Continue
                }
            },
            Phase::Over { .. } => self.verdict(now),
        }
    }
}
