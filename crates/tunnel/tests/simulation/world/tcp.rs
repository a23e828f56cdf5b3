//! A model of one TCP flow through a tunnel: real segments and acknowledgements, with SACK, as Linux would
//! send them in outline. Cubic (RFC 9438) with the HyStart of Linux, as far as it goes by delay (trains of
//! acknowledgements are broken by the bursts of real machines); loss is what RACK (RFC 8985) takes for it,
//! with a tolerance for reordering that grows when segments were sent again for nothing; a retransmission
//! timer of at least 200 ms.

use std::{collections::BTreeMap, net::SocketAddr};

use super::bbr::{Bbr, Stamp};

use mpvpn_packet::{ip, tcp_flags};
use mpvpn_packets::{Packet, Tcp};
use mpvpn_types::{Duration, Instant};

/// Bytes of IPv4 and TCP headers with the options of a data segment.
const HEADERS: usize = 52;
/// Segments in flight that a receive window of 6 MB allows.
const MAX_WINDOW: f64 = 4000.0;
const MIN_RTO: Duration = Duration::from_millis(200);
/// The timestamp option that nearly all TCP carries, padded.
const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1];

/// A segment in flight, or one that was lost and not retransmitted yet.
#[derive(Clone, Copy)]
struct Sent {
    at: Instant,
    sacked: bool,
    lost: bool,
    retransmitted: bool,
    stamp: Option<Stamp>,
}

/// The current round of slow start (HyStart, Ha and Rhee, "Taming the elephants", 2011, as in Linux).
#[derive(Default)]
struct HyStart {
    /// The segment whose arrival ends the round.
    end: u64,
    /// Samples of this round, and the least of them.
    samples: u32,
    least: Option<Duration>,
}

/// Both ends of a flow. Segments are counted from 0; all are as long as the tunnel's MTU allows.
pub struct Flow {
    there: Packet,
    back: Packet,
    payload: Vec<u8>,
    // The sender.
    cwnd: f64,
    ssthresh: f64,
    /// Cubic's window before the last loss, and when that was.
    w_max: f64,
    epoch: Option<Instant>,
    next: u64,
    una: u64,
    sent: BTreeMap<u64, Sent>,
    srtt: Option<Duration>,
    rttvar: Duration,
    min_rtt: Duration,
    /// When the newest segment that arrived was sent, and how long it was under way there and back.
    rack: Option<(Instant, Duration)>,
    /// The tolerance in quarters of the least RTT; 0 until reordering was seen.
    tolerance: u32,
    /// The end of the current recovery: the segments before this one are repaired.
    recovery: Option<u64>,
    /// Whether a timeout began the recovery: the window grows during it (RFC 5681, section 3.1).
    timed_out: bool,
    hystart: HyStart,
    /// Retransmissions of this recovery that may be spurious, and the window and threshold before it.
    undo: (u64, f64, f64),
    timer: Option<Instant>,
    backoff: u32,
    /// BBR in place of Cubic.
    bbr: Option<Bbr>,
    // The receiver.
    expected: u64,
    out_of_order: BTreeMap<u64, ()>,
}

impl Flow {
    /// A flow from `from` to `to`, in packets of at most `mtu` bytes.
    pub fn new(from: SocketAddr, to: SocketAddr, mtu: usize) -> Self {
        Self {
            there: Packet::between(from, to),
            back: Packet::between(to, from),
            payload: vec![0x5a; mtu - HEADERS],
            cwnd: 10.0,
            ssthresh: MAX_WINDOW,
            w_max: 0.0,
            epoch: None,
            next: 0,
            una: 0,
            sent: BTreeMap::new(),
            srtt: None,
            rttvar: Duration::ZERO,
            min_rtt: Duration::MAX,
            rack: None,
            tolerance: 0,
            recovery: None,
            timed_out: false,
            hystart: HyStart::default(),
            undo: (0, 0.0, 0.0),
            timer: None,
            backoff: 0,
            bbr: None,
            expected: 0,
            out_of_order: BTreeMap::new(),
        }
    }

    /// The same flow with BBR in place of Cubic.
    pub fn with_bbr(self, now: Instant) -> Self {
        Self { bbr: Some(Bbr::new(now)), ..self }
    }

    /// Bytes of payload in each segment.
    pub fn segment_bytes(&self) -> usize {
        self.payload.len()
    }

    /// Bytes that the receiver has delivered in order.
    pub fn delivered(&self) -> u64 {
        self.expected * self.payload.len() as u64
    }

    /// Whether that packet goes to the receiver of this flow (`Some(true)`) or to its sender (`Some(false)`).
    pub fn is_mine(&self, packet: &[u8]) -> Option<bool> {
        let ports = ip::parse(packet).ok()?.ports()?;
        match ports {
            _ if ports == (self.there.src.port(), self.there.dst.port()) => Some(true),
            _ if ports == (self.back.src.port(), self.back.dst.port()) => Some(false),
            _ => None,
        }
    }

    /// Returns the packets that the sender sends now.
    pub fn send(&mut self, now: Instant) -> Vec<Vec<u8>> {
        if self.timer.is_some_and(|at| at <= now) {
            self.time_out(now);
        }
        self.find_losses(now);
        let mut packets = Vec::new();
        let mut pipe = self.sent.values().filter(|sent| !sent.sacked && !sent.lost).count() as f64;
        let lost: Vec<u64> =
            self.sent.iter().filter(|(_, sent)| sent.lost).map(|(number, _)| *number).collect();
        let window = match &mut self.bbr {
            None => self.cwnd,
            Some(bbr) => bbr.cwnd().min(pipe + bbr.budget(now).max(0.0)),
        };
        let stamp = self.bbr.as_ref().map(Bbr::stamp);
        let sent = |retransmitted| Sent { at: now, sacked: false, lost: false, retransmitted, stamp };
        let room = (window.min(MAX_WINDOW) - pipe).max(0.0) as usize;
        for number in lost.into_iter().take(room) {
            self.sent.insert(number, sent(true));
            self.undo.0 += 1;
            packets.push(self.segment(number));
            pipe += 1.0;
        }
        while pipe + 1.0 <= window && (self.next - self.una) as f64 <= MAX_WINDOW {
            self.sent.insert(self.next, sent(false));
            packets.push(self.segment(self.next));
            self.next += 1;
            pipe += 1.0;
        }
        if let Some(bbr) = &mut self.bbr {
            packets.iter().for_each(|_| bbr.on_sent());
        }
        if !packets.is_empty() && self.timer.is_none() {
            self.timer = Some(now + self.rto());
        }
        packets
    }

    /// Handles a packet at the receiver, which may be several merged segments; returns the acknowledgement.
    pub fn receive(&mut self, packet: &[u8]) -> Option<Vec<u8>> {
        let (tcp, payload) = transport(packet)?;
        let size = self.payload.len() as u64;
        let sequence = u64::from(u32::from_be_bytes(tcp[4..8].try_into().ok()?));
        // Sequence numbers wrap: the nearest one to what is expected is meant.
        let expected = self.expected * size;
        let ahead = i64::from(sequence.wrapping_sub(expected) as u32 as i32);
        let from = expected.checked_add_signed(ahead)?;
        // The tunnel may cut a segment: it counts when its last part is there.
        let (first, behind) = (from / size, (from + payload as u64) / size);
        if first == behind {
            return None;
        }
        let mut duplicate = None;
        for number in first..behind {
            if number < self.expected || self.out_of_order.insert(number, ()).is_some() {
                duplicate = Some(number);
            }
        }
        while self.out_of_order.remove(&self.expected).is_some() {
            self.expected += 1;
        }
        Some(self.acknowledge(first, duplicate))
    }

    /// Returns an acknowledgement with up to three SACK blocks: the duplicate (RFC 2883), the newest segment,
    /// other segments out of order.
    fn acknowledge(&self, newest: u64, duplicate: Option<u64>) -> Vec<u8> {
        let mut blocks: Vec<(u64, u64)> = duplicate.map(|number| (number, number + 1)).into_iter().collect();
        let mut out_of_order: Vec<(u64, u64)> = Vec::new();
        for number in self.out_of_order.keys() {
            match out_of_order.last_mut() {
                Some(last) if last.1 == *number => last.1 += 1,
                _ => out_of_order.push((*number, number + 1)),
            }
        }
        let with_newest = out_of_order.iter().position(|block| (block.0..block.1).contains(&newest));
        blocks.extend(with_newest.map(|at| out_of_order.remove(at)));
        blocks.extend(out_of_order.into_iter().rev());
        blocks.truncate(3);
        let mut options = Vec::new();
        if !blocks.is_empty() {
            options.extend([1, 1, 5, 2 + 8 * blocks.len() as u8]);
            for (from, to) in blocks {
                options.extend(self.number(from).to_be_bytes());
                options.extend(self.number(to).to_be_bytes());
            }
        }
        let tcp =
            Tcp { seq: 1, ack: self.number(self.expected), flags: tcp_flags::ACK, window: 0xffff, options };
        self.back.tcp_with(&tcp, &[])
    }

    /// Handles an acknowledgement at the sender.
    pub fn acknowledged(&mut self, now: Instant, packet: &[u8]) {
        let Some((tcp, _)) = transport(packet) else { return };
        let ack = self.number_of(&tcp[8..12]);
        let (mut arrived, mut newest) = (0, None::<Sent>);
        let mut arrive = |sent: &Sent| {
            arrived += 1;
            newest = newest.filter(|newest| newest.at >= sent.at).or(Some(*sent));
        };
        let highest = self.sent.iter().rev().find(|(_, sent)| sent.sacked).map(|(number, _)| *number);
        let mut reordered = false;
        let rest = self.sent.split_off(&ack.max(self.una));
        for (number, sent) in std::mem::replace(&mut self.sent, rest) {
            if !sent.sacked {
                reordered |=
                    !sent.retransmitted && !sent.lost && highest.is_some_and(|highest| highest > number);
                arrive(&sent);
            }
        }
        let options = tcp.get(20..).unwrap_or_default();
        if options.len() > 4 && options[2] == 5 {
            for block in options[4..].chunks_exact(8) {
                let (from, to) = (self.number_of(&block[..4]), self.number_of(&block[4..]));
                if to <= ack {
                    self.on_spurious_retransmission();
                    continue;
                }
                for (number, sent) in self.sent.range_mut(from..to).filter(|(_, sent)| !sent.sacked) {
                    reordered |=
                        !sent.retransmitted && !sent.lost && highest.is_some_and(|highest| highest > *number);
                    arrive(sent);
                    (sent.sacked, sent.lost) = (true, false);
                }
            }
        }
        self.tolerance = self.tolerance.max(u32::from(reordered));
        if let Some(newest) = newest {
            if let (Some(bbr), Some(stamp)) = (&mut self.bbr, newest.stamp) {
                let in_flight = self.sent.values().filter(|sent| !sent.sacked && !sent.lost).count();
                bbr.on_arrival(now, arrived, stamp, now - newest.at, in_flight as f64);
            }
            if !newest.retransmitted {
                self.measure(now - newest.at);
                self.update_hystart(now - newest.at, ack);
            }
            if self.rack.is_none_or(|rack| rack.0 <= newest.at) {
                self.rack = Some((newest.at, now - newest.at));
            }
        }
        if ack > self.una {
            self.una = ack;
            self.backoff = 0;
            self.timer = (!self.sent.is_empty()).then(|| now + self.rto());
        }
        if self.recovery.is_some_and(|end| self.una >= end) {
            (self.recovery, self.timed_out) = (None, false);
        }
        if self.recovery.is_none() || self.timed_out && self.cwnd < self.ssthresh {
            self.grow(now, f64::from(arrived));
        }
    }

    /// A retransmitted segment had arrived before (RFC 2883): increases the tolerance, and undoes the
    /// reduction of the window if all retransmissions were spurious.
    fn on_spurious_retransmission(&mut self) {
        self.tolerance = (self.tolerance + 1).min(64);
        if self.undo.0 > 0 {
            self.undo.0 -= 1;
            if self.undo.0 == 0 {
                (self.cwnd, self.ssthresh) = (self.cwnd.max(self.undo.1), self.ssthresh.max(self.undo.2));
                (self.recovery, self.timed_out) = (None, false);
            }
        }
    }

    /// Ends slow start when the round-trip time shows a queue.
    fn update_hystart(&mut self, rtt: Duration, ack: u64) {
        if self.cwnd >= self.ssthresh || self.cwnd < 16.0 {
            return;
        }
        let round = &mut self.hystart;
        if ack > round.end {
            *round = HyStart { end: self.next, samples: 0, least: None };
        }
        if round.samples < 8 {
            round.samples += 1;
            round.least = Some(round.least.map_or(rtt, |least| least.min(rtt)));
        } else {
            let slack = (self.min_rtt / 8).clamp(Duration::from_millis(4), Duration::from_millis(16));
            if round.least.is_some_and(|least| least > self.min_rtt + slack) {
                self.ssthresh = self.cwnd;
            }
        }
    }

    fn measure(&mut self, rtt: Duration) {
        self.min_rtt = self.min_rtt.min(rtt);
        let srtt = self.srtt.unwrap_or(rtt);
        self.rttvar = if self.srtt.is_none() { rtt / 2 } else { (self.rttvar * 3 + rtt.abs_diff(srtt)) / 4 };
        self.srtt = Some((srtt * 7 + rtt) / 8);
    }

    fn grow(&mut self, now: Instant, arrived: f64) {
        if self.cwnd < self.ssthresh {
            self.cwnd = (self.cwnd + arrived).min(MAX_WINDOW);
            return;
        }
        let since = now - *self.epoch.get_or_insert(now);
        let rtt = self.srtt.unwrap_or_default();
        let k = (self.w_max.max(self.cwnd) * 0.3 / 0.4).cbrt();
        let cubic = 0.4 * ((since + rtt).as_secs_f64() - k).powi(3) + self.w_max.max(self.cwnd);
        // As fast as Reno at least (RFC 9438, section 4.3).
        let reno = 0.53 / self.cwnd;
        let gain = ((cubic - self.cwnd) / self.cwnd).clamp(reno, 0.5);
        self.cwnd = (self.cwnd + gain * arrived).min(MAX_WINDOW);
    }

    /// RFC 8985, section 6.2: a segment is lost if a segment that was sent clearly later has arrived.
    fn find_losses(&mut self, now: Instant) {
        let (Some((rack, rtt)), Some(srtt)) = (self.rack, self.srtt) else { return };
        let sacked = self.sent.values().filter(|sent| sent.sacked).count();
        // Without any reordering so far, three later arrivals are enough (RFC 8985, section 6.2, step 4).
        let quick = self.tolerance == 0 && (sacked >= 3 || self.recovery.is_some());
        let wait = if quick { Duration::ZERO } else { (self.min_rtt / 4 * self.tolerance.max(1)).min(srtt) };
        let mut found = false;
        for sent in self.sent.values_mut().filter(|sent| !sent.sacked && !sent.lost) {
            if sent.at < rack && now >= sent.at + rtt + wait {
                sent.lost = true;
                found = true;
            }
        }
        if found && self.recovery.is_none() {
            self.reduce(0.7);
            (self.recovery, self.timed_out) = (Some(self.next), false);
        }
    }

    fn reduce(&mut self, factor: f64) {
        self.undo = (0, self.cwnd, self.ssthresh);
        self.w_max = self.cwnd;
        self.epoch = None;
        self.ssthresh = (self.cwnd * factor).max(2.0);
        self.cwnd = self.ssthresh;
    }

    fn time_out(&mut self, now: Instant) {
        self.timer = None;
        if self.sent.is_empty() {
            return;
        }
        self.reduce(0.7);
        self.cwnd = 1.0;
        (self.recovery, self.timed_out) = (Some(self.next), true);
        self.sent.values_mut().filter(|sent| !sent.sacked).for_each(|sent| sent.lost = true);
        self.backoff = (self.backoff + 1).min(8);
        self.timer = Some(now + self.rto());
    }

    fn rto(&self) -> Duration {
        // As in Linux: the minimum applies to the variation, not to the sum.
        let base = self.srtt.map_or(Duration::from_secs(1), |srtt| srtt + (self.rttvar * 4).max(MIN_RTO));
        (base * 2u32.pow(self.backoff)).min(Duration::from_secs(60))
    }

    fn segment(&self, number: u64) -> Vec<u8> {
        let tcp = Tcp {
            seq: self.number(number),
            ack: 1,
            flags: tcp_flags::ACK,
            window: 512,
            options: TIMESTAMPS.to_vec(),
        };
        self.there.tcp_with(&tcp, &self.payload)
    }

    fn number(&self, segment: u64) -> u32 {
        (segment * self.payload.len() as u64) as u32
    }

    /// The segment that a sequence number means: the one next to what is not acknowledged.
    fn number_of(&self, bytes: &[u8]) -> u64 {
        let (size, sequence) =
            (self.payload.len() as u64, u32::from_be_bytes(bytes.try_into().expect("4 bytes")));
        let base = self.una * size;
        let ahead = i64::from(sequence.wrapping_sub(base as u32) as i32);
        base.saturating_add_signed(ahead) / size
    }
}

/// The TCP header of a packet with its options, and the length of its payload.
fn transport(packet: &[u8]) -> Option<(&[u8], usize)> {
    let segment = ip::parse(packet).ok()?.transport();
    let header = usize::from(segment.get(12)? >> 4) * 4;
    Some((segment.get(..header)?, segment.len() - header))
}
