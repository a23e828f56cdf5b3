//! The picture of the run: what each link carried, what arrived, and how long pings took. Written as SVG.

use std::{fmt::Write, time::Instant};

use super::{
    LINK_WORDS,
    report::{Bonding, Summary},
};

const WIDTH: f64 = 1080.0;
const HEIGHT: f64 = 700.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 1050.0;
/// Top and bottom of the panel with the rates.
const RATES: (f64, f64) = (104.0, 430.0);
/// Top and bottom of the panel with the pings.
const PINGS: (f64, f64) = (506.0, 630.0);
/// Width of a step of the links' curves, in ms.
const STEP_MS: u128 = 100;

const LINK_COLOURS: [&str; 2] = ["#4c86c6", "#f0a04b"];
const TOTAL_COLOUR: &str = "#1d2733";
const PING_COLOUR: &str = "#2e8b6f";
const CUT_COLOUR: &str = "#c0392b";

/// Draws the run.
pub(super) fn draw(summary: &Summary) -> String {
    let bonding = &summary.bonding;
    let seconds = (bonding.end - bonding.start).as_secs_f64().max(1.0);
    let stack = stacked(bonding);
    let goodput = smooth(&bonding.goodput.curve());
    let peak = stack.iter().flatten().map(|point| point.1).fold(100.0, f64::max);
    let rates = Panel::new(RATES, seconds, peak * 1.15, "Mbit/s");
    let pings = Panel::new(PINGS, seconds, ping_scale(bonding), "ms");
    let mut svg = Svg::default();
    svg.head(summary);
    svg.cut_band(bonding, &rates, &pings);
    svg.grid(&rates);
    svg.grid(&pings);
    svg.areas(&rates, &stack);
    svg.reference(&rates, summary.better_link());
    let goodput: Vec<_> = goodput.iter().map(|(at, mbps)| (since(bonding, *at), *mbps)).collect();
    svg.line(&rates, &goodput, TOTAL_COLOUR, 2.2);
    svg.pings(&pings, bonding);
    svg.events(bonding, &rates);
    svg.text(LEFT, PINGS.0 - 12.0, "start", 14, TOTAL_COLOUR, "Round trip of pings through the tunnel");
    svg.text((LEFT + RIGHT) / 2.0, HEIGHT - 22.0, "middle", 14, "#444", "time (s)");
    svg.finish()
}

/// Seconds since the start of the run.
fn since(bonding: &Bonding, at: Instant) -> f64 {
    at.saturating_duration_since(bonding.start).as_secs_f64()
}

/// The upper edges of the links' areas, one upon the other: seconds and Mbit/s.
fn stacked(bonding: &Bonding) -> Vec<Vec<(f64, f64)>> {
    let step = std::time::Duration::from_millis(STEP_MS as u64);
    let steps = ((bonding.end - bonding.start).as_millis() / STEP_MS) as u32;
    let mut below = vec![0.0; steps as usize];
    let mut curves = Vec::new();
    for link in &bonding.links {
        let mut curve = Vec::new();
        for (n, sum) in (0..steps).zip(&mut below) {
            let from = bonding.start + step * n;
            *sum += link.down_between(from, from + step) as f64 * 8e-6 / step.as_secs_f64();
            curve.push((since(bonding, from + step / 2), *sum));
        }
        curves.push(curve);
    }
    curves
}

/// The mean of each point and its neighbours: receivers take data in bursts.
fn smooth(points: &[(Instant, f64)]) -> Vec<(Instant, f64)> {
    let mean = |part: &[(Instant, f64)]| part.iter().map(|point| point.1).sum::<f64>() / part.len() as f64;
    points.windows(3).map(|three| (three[1].0, mean(three))).collect()
}

/// The highest round trip that is drawn, in ms: all but one in 200.
fn ping_scale(bonding: &Bonding) -> f64 {
    let mut times: Vec<f64> = bonding.pings.replies.iter().map(|reply| reply.rtt_ms).collect();
    times.sort_by(f64::total_cmp);
    let high = times.get(times.len().saturating_sub(1 + times.len() / 200)).copied().unwrap_or(0.0);
    high.max(40.0) * 1.15
}

/// A diagram: where it is, and what its axes mean.
struct Panel {
    top: f64,
    bottom: f64,
    seconds: f64,
    highest: f64,
    unit: &'static str,
}

impl Panel {
    fn new((top, bottom): (f64, f64), seconds: f64, highest: f64, unit: &'static str) -> Self {
        Self { top, bottom, seconds, highest, unit }
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (seconds / self.seconds).clamp(0.0, 1.0)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * (value / self.highest).clamp(0.0, 1.0)
    }

    /// A round distance between lines that gives about `count` of them.
    fn spacing(range: f64, count: f64) -> f64 {
        let rough = range / count;
        let power = 10f64.powf(rough.log10().floor());
        [1.0, 2.0, 5.0, 10.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough)
    }
}

#[derive(Default)]
struct Svg {
    body: String,
}

impl Svg {
    fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, colour: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.push(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{text}</text>"#
        ));
    }

    fn head(&mut self, summary: &Summary) {
        self.push(&format!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"##));
        self.push(&format!(
            r#"<text x="{LEFT}" y="36" font-size="21" font-weight="600" fill="{TOTAL_COLOUR}">Two links as one: {} TCP downloads while link 1 is cut and restored</text>"#,
            summary.flows
        ));
        let subtitle = format!("each link: {LINK_WORDS}; emulated on one machine");
        self.text(LEFT, 58.0, "start", 14, "#5c6773", &subtitle);
        let mut x = LEFT;
        for (link, colour) in (1..).zip(LINK_COLOURS) {
            self.push(&format!(r#"<rect x="{x:.1}" y="75" width="16" height="12" rx="2" fill="{colour}" fill-opacity="0.8"/>"#));
            self.text(x + 22.0, 86.0, "start", 14, "#333", &format!("carried by link {link} (IP packets)"));
            x += 238.0;
        }
        self.push(&format!(r#"<path d="M{x:.1} 81h18" stroke="{TOTAL_COLOUR}" stroke-width="2.6"/>"#));
        self.text(x + 24.0, 86.0, "start", 14, "#333", "received by iperf3 (mean of 0.3 s)");
        x += 290.0;
        self.push(&format!(
            r##"<path d="M{x:.1} 81h18" stroke="#666" stroke-width="1.6" stroke-dasharray="5 4"/>"##
        ));
        let best = format!("one link: {:.0} Mbit/s", summary.better_link());
        self.text(x + 24.0, 86.0, "start", 14, "#333", &best);
    }

    fn cut_band(&mut self, bonding: &Bonding, rates: &Panel, pings: &Panel) {
        for panel in [rates, pings] {
            let (from, to) =
                (panel.x(since(bonding, bonding.cut)), panel.x(since(bonding, bonding.restored)));
            let (y, width, height) = (panel.top, to - from, panel.bottom - panel.top);
            self.push(&format!(
                r#"<rect x="{from:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{CUT_COLOUR}" fill-opacity="0.06"/>"#
            ));
            for x in [from, to] {
                self.push(&format!(
                    r#"<path d="M{x:.1} {y:.1}v{height:.1}" stroke="{CUT_COLOUR}" stroke-width="1.3" stroke-dasharray="3 3"/>"#
                ));
            }
        }
    }

    fn grid(&mut self, panel: &Panel) {
        let rows = if panel.bottom - panel.top > 200.0 { 6.0 } else { 4.0 };
        let step = Panel::spacing(panel.highest, rows);
        let mut value = 0.0;
        while value <= panel.highest {
            let y = panel.y(value);
            self.push(&format!(r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#dfe4ea" stroke-width="1"/>"##));
            self.text(LEFT - 8.0, y + 4.5, "end", 13, "#444", &format!("{value:.0}"));
            value += step;
        }
        let step = Panel::spacing(panel.seconds, 12.0).max(1.0);
        let mut second = 0.0;
        while second <= panel.seconds {
            let x = panel.x(second);
            let bottom = panel.bottom;
            self.push(&format!(r##"<path d="M{x:.1} {bottom:.1}v5" stroke="#8a94a0" stroke-width="1"/>"##));
            self.text(x, bottom + 20.0, "middle", 13, "#444", &format!("{second:.0}"));
            second += step;
        }
        let (y, middle) = (panel.bottom, (panel.top + panel.bottom) / 2.0);
        self.push(&format!(r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#8a94a0" stroke-width="1.2"/>"##));
        self.push(&format!(
            r##"<text transform="translate(24 {middle:.1}) rotate(-90)" text-anchor="middle" font-size="14" fill="#444">{}</text>"##,
            panel.unit
        ));
    }

    /// Fills between each curve and the one below it.
    fn areas(&mut self, panel: &Panel, curves: &[Vec<(f64, f64)>]) {
        let ground: Vec<(f64, f64)> = curves
            .first()
            .map(|curve| curve.iter().map(|point| (point.0, 0.0)).collect())
            .unwrap_or_default();
        let mut below = &ground;
        for (curve, colour) in curves.iter().zip(LINK_COLOURS) {
            let outline: Vec<_> = curve.iter().chain(below.iter().rev()).copied().collect();
            let path = path(panel, &outline);
            self.push(&format!(r#"<path d="{path}Z" fill="{colour}" fill-opacity="0.75"/>"#));
            below = curve;
        }
    }

    fn reference(&mut self, panel: &Panel, mbps: f64) {
        let y = panel.y(mbps);
        self.push(&format!(
            r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#555" stroke-width="1.4" stroke-dasharray="5 4"/>"##
        ));
    }

    fn line(&mut self, panel: &Panel, points: &[(f64, f64)], colour: &str, width: f64) {
        if points.is_empty() {
            return;
        }
        let path = path(panel, points);
        self.push(&format!(
            r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>"#
        ));
    }

    /// The line breaks where answers stay away for long.
    fn pings(&mut self, panel: &Panel, bonding: &Bonding) {
        const BREAK_SECONDS: f64 = 0.1;
        let points: Vec<_> =
            bonding.pings.replies.iter().map(|reply| (since(bonding, reply.at), reply.rtt_ms)).collect();
        for part in points.chunk_by(|a, b| b.0 - a.0 < BREAK_SECONDS) {
            self.line(panel, part, PING_COLOUR, 1.2);
        }
    }

    fn events(&mut self, bonding: &Bonding, panel: &Panel) {
        for (at, text) in [(bonding.cut, "link 1 cut"), (bonding.restored, "link 1 restored")] {
            let x = panel.x(since(bonding, at)) + 6.0;
            self.push(&format!(
                r##"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="19" rx="3" fill="#ffffff" fill-opacity="0.85"/>"##,
                x - 2.0,
                panel.top + 3.0,
                text.len() as f64 * 7.4 + 4.0
            ));
            self.text(x, panel.top + 17.0, "start", 14, CUT_COLOUR, text);
        }
    }

    fn finish(self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" font-family=\"'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif\">\n{}</svg>\n",
            self.body
        )
    }
}

fn path(panel: &Panel, points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (n, (seconds, value)) in points.iter().enumerate() {
        let command = if n == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{command}{:.1} {:.1}", panel.x(*seconds), panel.y(*value));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::report::tests::example;

    #[test]
    fn the_picture_has_its_curves_axes_and_events() {
        let svg = draw(&example());
        for part in ["link 1 cut", "link 1 restored", "time (s)", "Mbit/s", "carried by link 2", ">200<"] {
            assert!(svg.contains(part), "{part} is missing");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "a coordinate is not finite");
    }

    #[test]
    fn grid_lines_are_at_round_values() {
        assert_eq!(Panel::spacing(208.0, 6.0), 50.0);
        assert_eq!(Panel::spacing(30.0, 12.0), 5.0);
        assert_eq!(Panel::spacing(60.0, 4.0), 20.0);
    }
}
