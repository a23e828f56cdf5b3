use mpvpn_packet::{
    FlowKey, TunPacket,
    tcp::{self, Segment, TcpHeader},
    tcp_flags::{ACK, FIN, PSH, RST, SYN},
};
use mpvpn_types::{Duration, Instant};

use super::{
    ConnectionState, ConnectionSummary, ProxyLimits,
    inbound::Inbound,
    outbound::{Acked, Outbound, Waited},
    seq::Seq,
};

/// By how many bits the windows that this end announces are scaled: up to 1 MiB.
const SCALE: u8 = 4;
/// Answers to segments that make no sense leave no more often than this: the app's kernel might answer them in
/// turn (RFC 5961 §7).
const CHALLENGE: Duration = Duration::from_millis(500);
/// The answer to a SYN is repeated at this time, doubled each time.
const ANSWER: Duration = Duration::from_secs(1);
const MOST_ANSWERS: u32 = 5;
/// A connection that this end closed first is remembered for this long, for an app that has not heard that its own end
/// arrived. Nothing older than a moment is on a local link.
const LINGER: Duration = Duration::from_secs(3);
/// What an app takes that does not say (RFC 9293 §3.7.1).
const DEFAULT_MSS_V4: u16 = 536;
const DEFAULT_MSS_V6: u16 = 1220;
/// A SYN that carries more than its headers is not worth keeping (bytes).
const LARGEST_SYN: usize = 200;
/// Segments smaller than this would make one write into thousands of packets.
const SMALLEST_MSS: usize = 64;

/// Where a connection stands.
#[derive(Debug)]
pub(super) enum Phase {
    /// The app asked, and waits for what the far side says. Its SYN is kept, for an error that quotes it.
    Asked { syn: Box<[u8]> },
    /// The far side agreed; the answer was sent so often, and is sent again then.
    Answered { sent: u32, again: Option<Instant> },
    /// Bytes move.
    Open,
    /// Both ends have said and heard that nothing more comes.
    Over { until: Instant },
}

/// What a segment, or time, meant for the connection as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Goes,
    /// It is over, in good order.
    Ended,
    /// The app broke it off, or is gone.
    Broken,
    /// The app believes in another connection: it is to be told that this one is none of it.
    Strange,
}

/// One connection of an app, which ends here.
#[derive(Debug)]
pub(super) struct Flow {
    /// From the app to where it wants.
    pub(super) key: FlowKey,
    pub(super) phase: Phase,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    /// Whether windows are scaled.
    scaled: bool,
    /// An acknowledgement is to be sent.
    pub(super) ack_due: bool,
    /// This end said first that nothing more comes.
    ends_first: bool,
    challenged: Option<Instant>,
    /// When the app was heard of last.
    pub(super) heard: Instant,
    pub(super) since: Instant,
    /// When bytes moved last.
    pub(super) active: Instant,
    /// Bytes from the app, and to it.
    pub(super) up: u64,
    pub(super) down: u64,
}

impl Flow {
    /// A connection that an app asks for by `packet`; `first` is the number that this end begins with, and `limit`
    /// what may wait for being read (bytes).
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
        let mss = usize::from(syn.mss().unwrap_or(default)).max(SMALLEST_MSS);
        let theirs = Seq(syn.seq());
        // The window of a SYN's answer is not scaled.
        let window = limit.min(u16::MAX.into());
        Self {
            key,
            phase: Phase::Asked {
                syn: if packet.len() > LARGEST_SYN { Box::default() } else { packet.into() },
            },
            inbound: Inbound::new(theirs, window, if scale.is_some() { SCALE } else { 0 }),
            outbound: Outbound::new(first, theirs, mss, scale.unwrap_or(0)),
            scaled: scale.is_some(),
            ack_due: false,
            ends_first: false,
            challenged: None,
            heard: now,
            since: now,
            active: now,
            up: 0,
            down: 0,
        }
    }

    pub(super) fn summary(&self) -> ConnectionSummary {
        let state = match (&self.phase, self.inbound.has_ended(), self.outbound.has_ended()) {
            (Phase::Asked { .. } | Phase::Answered { .. }, ..) => ConnectionState::Opening,
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
            last_active: self.active.max(self.heard),
        }
    }

    /// The far side agreed.
    pub(super) fn answer(&mut self) {
        if matches!(self.phase, Phase::Asked { .. }) {
            self.phase = Phase::Answered { sent: 0, again: None };
            self.ack_due = true;
        }
    }

    /// Whether `syn` begins another connection in the place of one that is over (RFC 9293 §3.6.1), or that the app
    /// has given up before it was answered.
    pub(super) fn gives_way_to(&self, syn: &Segment<'_>) -> bool {
        let seq = Seq(syn.seq());
        match self.phase {
            Phase::Asked { .. } => seq.plus(1) != self.inbound.next(),
            Phase::Over { .. } => seq.since(self.inbound.next()) > 0,
            Phase::Answered { .. } | Phase::Open => false,
        }
    }

    /// Takes a segment of the app (RFC 9293 §3.10.7).
    pub(super) fn handle(&mut self, now: Instant, segment: &Segment<'_>) -> Verdict {
        self.heard = now;
        let seq = Seq(segment.seq());
        match self.phase {
            Phase::Asked { .. } => {
                return if segment.has(RST) { Verdict::Broken } else { Verdict::Goes };
            }
            Phase::Answered { .. } if segment.has(SYN) && seq.plus(1) == self.inbound.next() => {
                self.ack_due = true;
                return Verdict::Goes;
            }
            _ => {}
        }
        if segment.has(RST) {
            // In the window but not at its start it may be a guess (RFC 5961 §3.2).
            if let Phase::Over { until } = &mut self.phase {
                *until = now;
                return self.verdict(now);
            }
            if seq == self.inbound.next() {
                return Verdict::Broken;
            }
            if self.inbound.admits(seq, 0) {
                self.challenge(now);
            }
            return Verdict::Goes;
        }
        if segment.has(SYN) {
            self.challenge(now);
            return Verdict::Goes;
        }
        if !segment.has(ACK) {
            return Verdict::Goes;
        }
        let len = segment.seq_len();
        let admitted = self.inbound.admits(seq, len);
        // A keep-alive repeats an old byte, or none (RFC 9293 §3.8.4).
        let keep_alive = len < 2 && seq.plus(1) == self.inbound.next();
        if !admitted && (len > 0 || keep_alive) {
            self.ack_due = true;
        } else if !admitted {
            self.challenge(now);
        }
        // What it acknowledges counts even if what it carries does not fit (RFC 9293 §3.10.7.4).
        if !admitted && !keep_alive && seq != self.inbound.next() {
            return Verdict::Goes;
        }
        if self.outbound.on_ack(seq, Seq(segment.ack()), segment.window(), len) == Acked::Unsent {
            if matches!(self.phase, Phase::Answered { .. }) {
                return Verdict::Strange;
            }
            self.challenge(now);
            return Verdict::Goes;
        }
        if matches!(self.phase, Phase::Answered { .. }) {
            self.phase = Phase::Open;
        }
        if admitted && len > 0 {
            self.inbound.accept(seq, segment.payload(), segment.has(FIN));
            self.ack_due = true;
        }
        self.outbound.arm(now);
        self.look_whether_over(now)
    }

    /// Whether both ends have ended: this end lingers if it was the first.
    fn look_whether_over(&mut self, now: Instant) -> Verdict {
        if matches!(self.phase, Phase::Open) && self.outbound.is_finished() && self.inbound.has_ended() {
            let until = if self.ends_first { now + LINGER } else { now };
            self.phase = Phase::Over { until };
        }
        self.verdict(now)
    }

    /// Whether nothing is left to do: also what the app sent last has been read.
    pub(super) fn verdict(&self, now: Instant) -> Verdict {
        match self.phase {
            Phase::Over { until } if now >= until && !self.ack_due && self.inbound.is_finished() => {
                Verdict::Ended
            }
            _ => Verdict::Goes,
        }
    }

    fn challenge(&mut self, now: Instant) {
        if self.challenged.is_none_or(|at| now >= at + CHALLENGE) {
            self.challenged = Some(now);
            self.ack_due = true;
        }
    }

    /// Whether a packet is to be sent.
    pub(super) fn is_due(&self) -> bool {
        self.ack_due || matches!(self.phase, Phase::Open) && self.outbound.is_due()
    }

    /// The next packet to send, in segments that fit `mtu` bytes, where `limit` bytes may wait for being read.
    pub(super) fn poll_packet(&mut self, now: Instant, mtu: usize, limit: usize) -> Option<TunPacket> {
        match &mut self.phase {
            Phase::Asked { .. } => None,
            Phase::Answered { sent, again } => {
                if !std::mem::take(&mut self.ack_due) {
                    return None;
                }
                *again = Some(now + ANSWER * 2u32.pow(*sent));
                *sent = (*sent + 1).min(MOST_ANSWERS);
                let seq = Seq(self.outbound.next().0.wrapping_sub(1));
                let window = u16::try_from(limit).unwrap_or(u16::MAX);
                let mss = u16::try_from(mtu.saturating_sub(tcp::headers_len(self.key.source())))
                    .unwrap_or(u16::MAX);
                let scale = self.scaled.then_some(SCALE);
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
                    .mss()
                    .min(mtu.saturating_sub(tcp::headers_len(self.key.source())).max(SMALLEST_MSS));
                let mss = u16::try_from(mss).unwrap_or(u16::MAX);
                let seq = self.outbound.next();
                let most = tcp::max_payload(self.key.source());
                let most = most - most % usize::from(mss);
                let (parts, end) = self.outbound.take(now, most, mpvpn_packet::gro::MAX_PARTS - 1);
                let mut flags = ACK;
                if !parts.is_empty() && !self.outbound.is_due() {
                    flags |= PSH;
                }
                if end {
                    flags |= FIN;
                    self.ends_first |= !self.inbound.has_ended();
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

    /// What a packet to the app starts with.
    pub(super) fn head(&self, flags: u8) -> TcpHeader {
        TcpHeader {
            from: self.key.destination(),
            to: self.key.source(),
            seq: self.outbound.next().0,
            ack: self.inbound.next().0,
            flags,
            window: 0,
            mss: None,
            window_scale: None,
        }
    }

    /// What breaks the connection off.
    pub(super) fn reset(&self) -> Option<TunPacket> {
        let head = match self.phase {
            // This end has said nothing yet (RFC 9293 §3.5.2).
            Phase::Asked { .. } => TcpHeader { seq: 0, ..self.head(RST | ACK) },
            _ => self.head(RST | ACK),
        };
        tcp::build_packet(&head, Vec::new(), u16::MAX)
    }

    /// Whether it holds memory that [`Self::rest`] gives back.
    pub(super) fn has_spare(&self) -> bool {
        self.inbound.has_spare() || self.outbound.has_spare()
    }

    /// Gives back memory that is not in use.
    pub(super) fn rest(&mut self) {
        self.inbound.rest();
        self.outbound.rest();
    }

    /// When it is given up unless the app is heard of before.
    pub(super) fn ends_at(&self, limits: &ProxyLimits) -> Option<Instant> {
        let patience = match self.phase {
            Phase::Asked { .. } | Phase::Answered { .. } => limits.connect_timeout,
            Phase::Open if self.inbound.has_ended() || self.outbound.has_ended() => {
                limits.half_closed_timeout
            }
            Phase::Open => limits.idle_timeout,
            Phase::Over { .. } => return None,
        };
        Some(self.heard + patience)
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Asked { .. } => None,
            Phase::Answered { again, .. } => again,
            Phase::Open => self.outbound.poll_timeout(),
            Phase::Over { until } => (self.inbound.is_finished() && !self.ack_due).then_some(until),
        }
    }

    /// Lets time pass.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> Verdict {
        match self.phase {
            Phase::Asked { .. } => Verdict::Goes,
            Phase::Answered { sent, again } => {
                if again.is_none_or(|at| now < at) {
                    return Verdict::Goes;
                }
                if sent == MOST_ANSWERS {
                    return Verdict::Broken;
                }
                self.ack_due = true;
                self.phase = Phase::Answered { sent, again: None };
                Verdict::Goes
            }
            Phase::Open => match self.outbound.handle_timeout(now) {
                Waited::Gone => Verdict::Broken,
                Waited::Again => {
                    self.outbound.arm(now);
                    Verdict::Goes
                }
            },
            Phase::Over { .. } => self.verdict(now),
        }
    }
}
