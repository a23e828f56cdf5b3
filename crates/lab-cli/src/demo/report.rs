//! The results of the demonstration, as a table, as JSON and as a picture.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mpvpn_lab::{History, LabError};
use serde::Serialize;

use super::{
    LINK_DESCRIPTION, TCP_START_UP, plot,
    traffic::{Goodput, Pings},
};
use crate::results;

/// Bytes of IP packets after which a restored link "carries data again": more than heartbeats and handshakes
/// need.
const CARRIES_AGAIN_BYTES: u64 = 100_000;
/// Share of its earlier rate that a restored link must carry for 100 ms to be "back". Nearer to 1 measures
/// the variation of the rate.
const BACK_RATE_SHARE: f64 = 0.8;
/// Time after a cut or repair in which gaps of pings count as its effect. Longer includes unrelated gaps,
/// shorter may miss late ones.
const EFFECT_DURATION: Duration = Duration::from_secs(3);

/// One link measured while the other had no carrier.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct SingleLink {
    /// Counted from 1.
    pub(super) link: usize,
    pub(super) goodput_mbps: f64,
}

/// The recording of the run over both links.
#[derive(Debug)]
pub(super) struct Bonding {
    pub(super) start: Instant,
    pub(super) cut: Instant,
    pub(super) restored: Instant,
    pub(super) end: Instant,
    pub(super) goodput: Goodput,
    pub(super) pings: Pings,
    pub(super) links: Vec<History>,
}

/// Everything that was measured.
#[derive(Debug)]
pub(super) struct Summary {
    pub(super) link: String,
    pub(super) flows: String,
    pub(super) idle_rtt_ms: f64,
    pub(super) alone: [SingleLink; 2],
    pub(super) bonding: Bonding,
}

/// The content of `summary.json`: times in ms, rates in Mbit/s of goodput, `null` where nothing was measured.
/// The names of the fields are its keys.
#[derive(Debug, Serialize)]
struct Figures<'a> {
    links: &'a str,
    tcp_flows: &'a str,
    idle_rtt_ms: f64,
    loaded_rtt_ms: Option<f64>,
    alone: &'a [SingleLink],
    both_before_cut_mbps: Option<f64>,
    gain_over_better_link: Option<f64>,
    one_link_during_cut_mbps: Option<f64>,
    both_after_restore_mbps: Option<f64>,
    whole_run_mbps: Option<f64>,
    retransmits: Option<u64>,
    longest_ping_gap_before_cut_ms: Option<f64>,
    longest_ping_gap_at_cut_ms: Option<f64>,
    longest_ping_gap_at_restore_ms: Option<f64>,
    pings_lost: u64,
    pings_sent: u64,
    link_carries_again_ms: Option<f64>,
    link_back_ms: Option<f64>,
}

impl Summary {
    /// Prints the figures as a table.
    pub(super) fn print(&self) {
        let f = self.figures();
        let rate =
            |text: &str, value: Option<f64>, remark: &str| println!("  {text:34} {} {remark}", mbps(value));
        println!("Received through the tunnel ({} TCP flows; each link: {LINK_DESCRIPTION}):", self.flows);
        for alone in &self.alone {
            rate(&format!("link {} alone", alone.link), Some(alone.goodput_mbps), "");
        }
        let gain =
            f.gain_over_better_link.map(|gain| format!("= {gain:.2} × the better link")).unwrap_or_default();
        rate("both links, before the cut", f.both_before_cut_mbps, &gain);
        rate("link 1 cut (all of that time)", f.one_link_during_cut_mbps, "");
        rate("both links again", f.both_after_restore_mbps, "");
        println!("`ping -i 0.01` through the tunnel:");
        let time =
            |text: &str, value: Option<f64>, remark: &str| println!("  {text:34} {} {remark}", ms(value));
        time("round trip, idle", Some(f.idle_rtt_ms), "(median)");
        time("round trip, under this load", f.loaded_rtt_ms, "(median)");
        time("longest silence before the cut", f.longest_ping_gap_before_cut_ms, "");
        time("longest silence at the cut", f.longest_ping_gap_at_cut_ms, "");
        time("longest silence at the repair", f.longest_ping_gap_at_restore_ms, "");
        println!("  {:34} {} of {}", "not answered in the whole run", f.pings_lost, f.pings_sent);
        println!("After the repair:");
        time("link 1 carries data again after", f.link_carries_again_ms, "");
        time("80 % of its earlier rate after", f.link_back_ms, "");
    }

    /// Writes the picture and the figures into `dir`, and returns their paths.
    pub(super) fn write(&self, dir: &Path) -> Result<(PathBuf, PathBuf), LabError> {
        results::write(dir, ("bonding.svg", plot::draw(self)), ("summary.json", &self.figures()))
    }

    /// The goodput of the better link alone, in Mbit/s.
    pub(super) fn better_link(&self) -> f64 {
        self.alone.iter().map(|alone| alone.goodput_mbps).fold(0.0, f64::max)
    }

    fn figures(&self) -> Figures<'_> {
        let Bonding { start, cut, restored, end, goodput, pings, .. } = &self.bonding;
        let before = goodput.between(*start + TCP_START_UP, *cut);
        let gap = |from, to| pings.longest_gap(from, to).map(|gap| gap.as_secs_f64() * 1e3);
        let (lost, sent) = pings.lost();
        Figures {
            links: &self.link,
            tcp_flows: &self.flows,
            idle_rtt_ms: self.idle_rtt_ms,
            loaded_rtt_ms: pings.median_rtt(*start + TCP_START_UP, *cut),
            alone: &self.alone,
            both_before_cut_mbps: before,
            gain_over_better_link: before.map(|both| both / self.better_link()),
            one_link_during_cut_mbps: goodput.between(*cut, *restored),
            both_after_restore_mbps: goodput.between(*restored + TCP_START_UP, *end),
            whole_run_mbps: goodput.whole_mbps,
            retransmits: goodput.retransmits,
            longest_ping_gap_before_cut_ms: gap(*start + TCP_START_UP, *cut - Duration::from_millis(200)),
            longest_ping_gap_at_cut_ms: gap(*cut, *cut + EFFECT_DURATION),
            longest_ping_gap_at_restore_ms: gap(*restored, *restored + EFFECT_DURATION),
            pings_lost: lost,
            pings_sent: sent,
            link_carries_again_ms: self.time_until_carrying(),
            link_back_ms: self.time_until_back(),
        }
    }

    /// ms from the repair until the first [`CARRIES_AGAIN_BYTES`] had come over link 1.
    fn time_until_carrying(&self) -> Option<f64> {
        let (link, restored) = (self.bonding.links.first()?, self.bonding.restored);
        self.search(Duration::ZERO, |at| link.down_between(restored, at) >= CARRIES_AGAIN_BYTES)
    }

    /// ms from the repair until link 1 had carried [`BACK_RATE_SHARE`] of its earlier rate for 100 ms.
    fn time_until_back(&self) -> Option<f64> {
        const WINDOW: Duration = Duration::from_millis(100);
        let (link, start, cut) =
            (self.bonding.links.first()?, self.bonding.start + TCP_START_UP, self.bonding.cut);
        let before =
            link.down_between(start, cut) as f64 / (cut.checked_duration_since(start)?).as_secs_f64();
        let wanted = before * BACK_RATE_SHARE * WINDOW.as_secs_f64();
        self.search(WINDOW, |at| link.down_between(at - WINDOW, at) as f64 >= wanted)
    }

    /// The first time after the repair, in steps of 10 ms from `first`, at which `condition` holds, in ms.
    fn search(&self, first: Duration, condition: impl Fn(Instant) -> bool) -> Option<f64> {
        let length = self.bonding.end.checked_duration_since(self.bonding.restored)?;
        let steps = (0..).map(|step| first + Duration::from_millis(10) * step).take_while(|at| *at <= length);
        steps.into_iter().find(|at| condition(self.bonding.restored + *at)).map(|at| at.as_secs_f64() * 1e3)
    }
}

fn mbps(value: Option<f64>) -> String {
    value.map_or_else(|| "  not measured".to_owned(), |value| format!("{value:7.1} Mbit/s"))
}

fn ms(value: Option<f64>) -> String {
    value.map_or_else(|| "  not measured".to_owned(), |value| format!("{value:7.1} ms"))
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::SystemTime;

    use super::*;
    use mpvpn_lab::HISTORY_STEP;

    /// An artificial run of 9 s: link 1 (100 Mbit/s) is cut at 3 s, restored at 6 s, and carries data again
    /// 200 ms later.
    pub(in crate::demo) fn example() -> Summary {
        let start = Instant::now() + Duration::from_secs(100);
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let full = 125_000;
        let link = |off: std::ops::Range<f64>| {
            let steps = (0..900).map(|step| f64::from(step) * HISTORY_STEP.as_secs_f64());
            steps.map(|time| if off.contains(&time) { 0 } else { full }).collect()
        };
        let pings: String = (0..900)
            .filter(|step| !(300..305).contains(step))
            .map(|step| {
                let (time, sequence) = (1000.0 + f64::from(step) / 100.0, step + 1);
                format!("[{time:.6}] 64 bytes from 10.0.0.1: icmp_seq={sequence} ttl=64 time=40.0 ms\n")
            })
            .collect();
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let history = |down| History { start, up: Vec::new(), down };
        Summary {
            link: "100mbit,12.5ms,queue=60ms".to_owned(),
            flows: "8".to_owned(),
            idle_rtt_ms: 25.3,
            alone: [1, 2].map(|link| SingleLink { link, goodput_mbps: 91.0 }),
            bonding: Bonding {
                start,
                cut: at(3.0),
                restored: at(6.0),
                end: at(9.0),
                goodput: Goodput::default(),
                pings: Pings::parse(&pings, start, wall),
                links: vec![history(link(2.999..6.2)), history(link(0.0..0.0))],
            },
        }
    }

    #[test]
    fn the_effects_of_cut_and_repair_are_found_in_the_records() {
        let summary = example();
        let figures = summary.figures();
        let gap = figures.longest_ping_gap_at_cut_ms.unwrap();
        assert!((gap - 60.0).abs() < 0.1, "{gap}");
        assert!((figures.longest_ping_gap_before_cut_ms.unwrap() - 10.0).abs() < 0.1);
        assert_eq!((figures.pings_lost, figures.pings_sent), (5, 900));
        assert_eq!(figures.link_carries_again_ms, Some(210.0));
        assert_eq!(figures.link_back_ms, Some(280.0));
        assert_eq!(figures.both_before_cut_mbps, None, "iperf3 said nothing, so nothing may be claimed");
    }
}
