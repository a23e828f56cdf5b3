//! A model of BBR, as far as a flow beside the tunnel needs it: version 1 (Cardwell and others, "BBR:
//! Congestion-Based Congestion Control", ACM Queue 14, 2016), without its reaction to losses.

use std::collections::VecDeque;

use mpvpn_types::{Duration, Instant};

const STARTUP_GAIN: f64 = 2.885;
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
/// Rounds for which the highest rate counts.
const RATE_ROUNDS: u64 = 10;
/// For how long the shortest round trip counts, and how long it is probed for.
const MIN_RTT_TIME: Duration = Duration::from_secs(10);
const PROBE_RTT_TIME: Duration = Duration::from_millis(200);
/// Segments in flight at least.
const MIN_CWND: f64 = 4.0;

/// The segments that had been delivered when one was sent, and when the last of them was.
#[derive(Clone, Copy)]
pub struct Stamp {
    delivered: u64,
    at: Instant,
}

enum Phase {
    Startup,
    Drain,
    /// A place in the cycle, and since when.
    ProbeRate(usize, Instant),
    /// Until when.
    ProbeRtt(Instant),
}

pub struct Bbr {
    phase: Phase,
    /// Segments that have arrived, and when the last one was acknowledged.
    delivered: u64,
    delivered_at: Instant,
    /// The highest rate of each round, in segments a second.
    rates: VecDeque<(u64, f64)>,
    round: u64,
    round_end: u64,
    /// The rate that slow start has to exceed, and the rounds in which it did not.
    full: (f64, u32),
    min_rtt: Option<(Duration, Instant)>,
    /// Segments that may be sent now, and since when.
    budget: (f64, Instant),
}

impl Bbr {
    pub fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Startup,
            delivered: 0,
            delivered_at: now,
            rates: VecDeque::new(),
            round: 0,
            round_end: 0,
            full: (0.0, 0),
            min_rtt: None,
            budget: (10.0, now),
        }
    }

    pub fn stamp(&self) -> Stamp {
        Stamp { delivered: self.delivered, at: self.delivered_at }
    }

    fn rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max)
    }

    /// Segments that are in flight at this rate for the shortest round trip.
    fn bdp(&self) -> f64 {
        self.rate() * self.min_rtt.map_or(0.0, |(rtt, _)| rtt.as_secs_f64())
    }

    pub fn cwnd(&self) -> f64 {
        match self.phase {
            _ if self.bdp() == 0.0 => 10.0,
            Phase::ProbeRtt(_) => MIN_CWND,
            Phase::Startup | Phase::Drain => (STARTUP_GAIN * self.bdp()).max(10.0),
            Phase::ProbeRate(..) => (2.0 * self.bdp()).max(MIN_CWND),
        }
    }

    /// Segments that the pacer lets leave now.
    pub fn budget(&mut self, now: Instant) -> f64 {
        let gain = match self.phase {
            Phase::Startup => STARTUP_GAIN,
            Phase::Drain => 1.0 / STARTUP_GAIN,
            Phase::ProbeRate(place, _) => CYCLE[place],
            Phase::ProbeRtt(_) => 1.0,
        };
        let (left, since) = self.budget;
        let earned = gain * self.rate() * (now - since).as_secs_f64();
        // Two milliseconds of bursts, as the model is asked once a millisecond.
        let most = (gain * self.rate() * 0.002).max(10.0);
        self.budget = ((left + earned).min(most), now);
        self.budget.0
    }

    pub fn on_sent(&mut self) {
        self.budget.0 -= 1.0;
    }

    /// Segments have arrived, the last of them sent with this stamp `rtt` ago; so many are in flight.
    pub fn on_arrival(&mut self, now: Instant, segments: u32, stamp: Stamp, rtt: Duration, in_flight: f64) {
        self.delivered += u64::from(segments);
        self.delivered_at = now;
        let rate = (self.delivered - stamp.delivered) as f64 / (now - stamp.at).as_secs_f64().max(1e-4);
        let is_new_round = stamp.delivered >= self.round_end;
        if is_new_round {
            (self.round, self.round_end) = (self.round + 1, self.delivered);
        }
        self.rates.retain(|(round, _)| round + RATE_ROUNDS > self.round);
        match self.rates.back_mut() {
            Some((round, highest)) if *round == self.round => *highest = highest.max(rate),
            _ => self.rates.push_back((self.round, rate)),
        }
        let is_expired = self.min_rtt.is_some_and(|(_, at)| now > at + MIN_RTT_TIME);
        if self.min_rtt.is_none_or(|(least, _)| rtt <= least) || is_expired {
            self.min_rtt = Some((rtt, now));
        }
        self.advance(now, is_new_round, is_expired, in_flight);
    }

    fn advance(&mut self, now: Instant, is_new_round: bool, is_expired: bool, in_flight: f64) {
        let min_rtt = self.min_rtt.map_or(Duration::ZERO, |(rtt, _)| rtt);
        match self.phase {
            Phase::Startup if is_new_round => {
                if self.rate() > self.full.0 * 1.25 {
                    self.full = (self.rate(), 0);
                } else {
                    self.full.1 += 1;
                }
                if self.full.1 >= 3 {
                    self.phase = Phase::Drain;
                }
            }
            Phase::Drain if in_flight <= self.bdp() => self.phase = Phase::ProbeRate(2, now),
            Phase::ProbeRate(..) if is_expired => self.phase = Phase::ProbeRtt(now + PROBE_RTT_TIME),
            Phase::ProbeRate(place, since)
                if now > since + min_rtt || place == 1 && in_flight <= self.bdp() =>
            {
                self.phase = Phase::ProbeRate((place + 1) % CYCLE.len(), now);
            }
            Phase::ProbeRtt(until) if now >= until => self.phase = Phase::ProbeRate(2, now),
            _ => {}
        }
    }
}
