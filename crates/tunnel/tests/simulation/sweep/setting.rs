//! The settings of the sweep: links, load, changes, and what they are drawn from.

use std::fmt;

use mpvpn_lab::{ChannelParams, Discipline, LinkSpec, emulation::Rng};
use mpvpn_types::{BitRate, CongestionControl, Duration};

use super::LINK_MTU;

/// The largest product of rate and round-trip time (bytes).
const MAX_BDP_BYTES: f64 = 2e6;

/// Random draws that follow from a seed.
pub(super) struct Draw(pub(super) Rng);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        (self.0.uniform() * count as f64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Between two numbers, uniform in their logarithms.
    pub(super) fn log(&mut self, least: f64, most: f64) -> f64 {
        (least.ln() + self.0.uniform() * (most / least).ln()).exp()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    Packets,
    Streams,
}

/// Others that use the links.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Beside {
    Nothing,
    /// A bottleneck behind the first two links.
    Bottleneck(Box<LinkSpec>),
    /// A flow that shares the first link.
    Cubic,
    Bbr,
}

/// A change of one link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    Rate(usize, f64),
    Rtt(usize, f64),
}

/// The loss of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    None,
    Random,
    Bursts,
    /// 30 %, which is shown apart.
    Heavy,
}

#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) links: Vec<LinkSpec>,
    pub(super) loss: Loss,
    pub(super) beside: Beside,
    pub(super) step: Option<Step>,
    pub(super) load: Load,
    pub(super) flows: u16,
    /// Whether the load goes up; else it goes down.
    pub(super) is_up: bool,
    pub(super) has_call: bool,
    pub(super) cc: CongestionControl,
}

fn spec(draw: &mut Draw, rate: f64, rtt: f64) -> ChannelParams {
    let discipline = match draw.below(4) {
        0 => Discipline::TailDrop,
        1 => Discipline::CoDel,
        2 => Discipline::FqCoDel,
        _ => Discipline::Policer,
    };
    let least = 10.0 * f64::from(LINK_MTU) * 8.0 / rate;
    let queue = (draw.log(0.5, 8.0) * rtt).max(least);
    let jitter = if draw.one_in(2) { 0.0 } else { draw.0.uniform() * rtt / 4.0 };
    ChannelParams {
        rate: Some(BitRate::from_bps(rate as u64)),
        delay: Duration::from_secs_f64(rtt / 2.0),
        jitter: Duration::from_secs_f64(jitter),
        queue: Duration::from_secs_f64(queue),
        discipline,
        mtu: Some(LINK_MTU),
        ..ChannelParams::default()
    }
}

fn both_ways(params: ChannelParams) -> LinkSpec {
    LinkSpec { up: params.clone(), down: params, ..LinkSpec::default() }
}

impl Setting {
    pub(super) fn draw(seed: u64, number: u64) -> Self {
        let own = seed.wrapping_mul(0x1_0000_0001).wrapping_add(number.wrapping_mul(0x5851_f42d));
        let draw = &mut Draw(Rng(own));
        draw.0.uniform();
        let loss = match draw.below(20) {
            ..10 => Loss::None,
            10..15 => Loss::Random,
            15..19 => Loss::Bursts,
            _ => Loss::Heavy,
        };
        let mut links = Vec::new();
        for _ in 0..1 + draw.below(4) {
            let (rate, rtt) = loop {
                let (rate, rtt) = (draw.log(1e6, 1e9), draw.log(1e-3, 0.6));
                if rate / 8.0 * rtt <= MAX_BDP_BYTES {
                    break (rate, rtt);
                }
            };
            let mut params = spec(draw, rate, rtt);
            (params.loss, params.burst) = match loss {
                Loss::None => (0.0, 1),
                Loss::Random => (draw.log(0.0005, 0.1), 1),
                Loss::Bursts => (draw.log(0.0005, 0.1), 2 + draw.below(15) as u32),
                Loss::Heavy => (0.3, 1),
            };
            links.push(both_ways(params));
        }
        let beside = match draw.below(10) {
            0 | 1 if links.len() > 1 => {
                let rate = |link: &LinkSpec| link.up.rate.map_or(0.0, |rate| rate.bps() as f64);
                let rate = draw.log(0.3, 0.9) * links[..2].iter().map(rate).sum::<f64>();
                let rtt = links[..2].iter().map(rtt_of).max().unwrap_or_default().as_secs_f64();
                let params = spec(draw, rate, rtt);
                let (delay, jitter) = (Duration::ZERO, Duration::ZERO);
                Beside::Bottleneck(Box::new(both_ways(ChannelParams { delay, jitter, ..params })))
            }
            2 => Beside::Cubic,
            3 => Beside::Bbr,
            _ => Beside::Nothing,
        };
        let link = draw.below(links.len());
        let (up, down) = (draw.log(1.5, 8.0), 1.0 / draw.log(1.5, 8.0));
        let step = match draw.below(8) {
            0 => Some(Step::Rate(link, up)),
            1 => Some(Step::Rate(link, down)),
            2 => Some(Step::Rtt(link, draw.log(0.25, 4.0))),
            _ => None,
        };
        Self {
            links,
            loss,
            beside,
            step,
            load: if draw.one_in(2) { Load::Packets } else { Load::Streams },
            flows: if draw.one_in(2) { 1 } else { 8 },
            is_up: draw.one_in(2),
            has_call: draw.one_in(2),
            cc: CongestionControl::Bbr,
        }
    }

    /// The links after the change.
    pub(super) fn changed(&self) -> Vec<LinkSpec> {
        let mut links = self.links.clone();
        let Some(Step::Rate(link, factor) | Step::Rtt(link, factor)) = self.step else { return links };
        let LinkSpec { up, down, .. } = &mut links[link];
        for params in [up, down] {
            if let Some(Step::Rate(..)) = self.step {
                params.rate = params.rate.map(|rate| BitRate::from_bps((rate.bps() as f64 * factor) as u64));
            } else {
                params.delay = params.delay.mul_f64(factor);
                params.jitter = params.jitter.mul_f64(factor);
            }
        }
        links
    }

    /// The longest round-trip time of a link at any time.
    pub(super) fn rtt(&self) -> Duration {
        self.links.iter().chain(&self.changed()).map(rtt_of).max().unwrap_or_default()
    }

    /// The rate at which all links together deliver, and that of the best (bit/s, with the tunnel's headers).
    pub(super) fn ceiling(&self, links: &[LinkSpec]) -> (f64, f64) {
        let of = |link: &LinkSpec| link.up.rate.map_or(0.0, |rate| rate.bps() as f64) * (1.0 - link.up.loss);
        let rates: Vec<f64> = links.iter().map(of).collect();
        let (best, mut all) = (rates.iter().copied().fold(0.0, f64::max), rates.iter().sum::<f64>());
        if let Beside::Bottleneck(shared) = &self.beside {
            let behind = rates[0] + rates[1];
            let most = of(shared);
            all -= behind - behind.min(most);
            let best_behind = rates[..2].iter().copied().fold(0.0, f64::max).min(most);
            return (all, rates[2..].iter().copied().fold(best_behind, f64::max));
        }
        (all, best)
    }
}

pub(super) fn rtt_of(link: &LinkSpec) -> Duration {
    link.up.delay + link.down.delay
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links: Vec<String> = self.links.iter().map(ToString::to_string).collect();
        write!(
            f,
            "{}; {} x {:?} {}",
            links.join(" | "),
            self.flows,
            self.load,
            if self.is_up { "up" } else { "down" }
        )?;
        if self.has_call {
            f.write_str(", a call")?;
        }
        match &self.beside {
            Beside::Nothing => {}
            Beside::Bottleneck(link) => write!(f, "; links 1 and 2 behind {link}")?,
            Beside::Cubic => f.write_str("; Cubic beside on link 1")?,
            Beside::Bbr => f.write_str("; BBR beside on link 1")?,
        }
        match self.step {
            None => Ok(()),
            Some(Step::Rate(link, factor)) => write!(f, "; rate of link {} x {factor:.2}", link + 1),
            Some(Step::Rtt(link, factor)) => write!(f, "; RTT of link {} x {factor:.2}", link + 1),
        }
    }
}
