//! The picture of a run as SVG: the rate of each link, the goodput, and round-trip times of pings.

use std::time::Instant;

use mpvpn_plot::{COLOURS, HARM_COLOUR, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};

use super::{
    LINK_DESCRIPTION,
    report::{Bonding, Summary},
};

/// Height of the picture, in its own units.
const PICTURE_HEIGHT: f64 = 700.0;
/// Top and bottom of the panel with the rates, in the picture's units.
const RATES_PANEL: (f64, f64) = (104.0, 430.0);
/// Top and bottom of the panel with the pings, in the picture's units.
const PINGS_PANEL: (f64, f64) = (506.0, 630.0);
/// The interval of a point in the curves of the links, in ms. Longer hides short gaps, shorter shows bursts
/// of single packets.
const STEP_MS: u128 = 100;

const PING_COLOUR: &str = "#2e8b6f";

/// Draws the run.
pub(super) fn draw(summary: &Summary) -> String {
    let bonding = &summary.bonding;
    let seconds = (bonding.end - bonding.start).as_secs_f64().max(1.0);
    let stack = stacked(bonding);
    let goodput = smooth(&bonding.goodput.curve());
    let peak = stack.iter().flatten().map(|point| point.1).fold(100.0, f64::max);
    let rates = Panel::new(RATES_PANEL, seconds, peak * 1.15, "Mbit/s");
    let pings = Panel::new(PINGS_PANEL, seconds, ping_scale(bonding), "ms");
    let mut svg = Svg::default();
    header(&mut svg, summary);
    let cut = (since(bonding, bonding.cut), since(bonding, bonding.restored));
    svg.band(&rates, cut);
    svg.band(&pings, cut);
    svg.grid(&rates);
    svg.grid(&pings);
    svg.areas(&rates, &stack);
    svg.reference(&rates, summary.better_link());
    let goodput: Vec<_> = goodput.iter().map(|(at, mbps)| (since(bonding, *at), *mbps)).collect();
    svg.line(&rates, &goodput, TEXT_COLOUR, 2.2);
    draw_pings(&mut svg, &pings, bonding);
    draw_events(&mut svg, &rates, bonding);
    svg.text(
        PANEL_LEFT,
        PINGS_PANEL.0 - 12.0,
        "start",
        14,
        TEXT_COLOUR,
        "Round trip of pings through the tunnel",
    );
    svg.text((PANEL_LEFT + PANEL_RIGHT) / 2.0, PICTURE_HEIGHT - 22.0, "middle", 14, "#444", "time (s)");
    svg.finish(PICTURE_HEIGHT)
}

/// Seconds since the start of the run.
fn since(bonding: &Bonding, at: Instant) -> f64 {
    at.saturating_duration_since(bonding.start).as_secs_f64()
}

/// The upper edges of the stacked areas of the links: seconds and Mbit/s.
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

/// The mean of each point and its two neighbours, because receivers read data in bursts.
fn smooth(points: &[(Instant, f64)]) -> Vec<(Instant, f64)> {
    let mean = |part: &[(Instant, f64)]| part.iter().map(|point| point.1).sum::<f64>() / part.len() as f64;
    points.windows(3).map(|three| (three[1].0, mean(three))).collect()
}

/// The maximum of the axis of round-trip times, in ms: the 99.5th percentile, at least 40 ms, and a margin.
fn ping_scale(bonding: &Bonding) -> f64 {
    let mut times: Vec<f64> = bonding.pings.replies.iter().map(|reply| reply.rtt_ms).collect();
    times.sort_by(f64::total_cmp);
    let high = times.get(times.len().saturating_sub(1 + times.len() / 200)).copied().unwrap_or(0.0);
    high.max(40.0) * 1.15
}

fn header(svg: &mut Svg, summary: &Summary) {
    svg.push(&format!(
        r#"<text x="{PANEL_LEFT}" y="36" font-size="21" font-weight="600" fill="{TEXT_COLOUR}">Two links as one: {} TCP downloads while link 1 is cut and restored</text>"#,
        summary.flows
    ));
    let subtitle = format!("each link: {LINK_DESCRIPTION}; emulated on one machine");
    svg.text(PANEL_LEFT, 58.0, "start", 14, "#5c6773", &subtitle);
    let mut x = PANEL_LEFT;
    for (link, colour) in (1..).zip(&COLOURS[..2]) {
        svg.push(&format!(
            r#"<rect x="{x:.1}" y="75" width="16" height="12" rx="2" fill="{colour}" fill-opacity="0.8"/>"#
        ));
        svg.text(x + 22.0, 86.0, "start", 14, "#333", &format!("carried by link {link} (IP packets)"));
        x += 238.0;
    }
    svg.push(&format!(r#"<path d="M{x:.1} 81h18" stroke="{TEXT_COLOUR}" stroke-width="2.6"/>"#));
    svg.text(x + 24.0, 86.0, "start", 14, "#333", "received by iperf3 (mean of 0.3 s)");
    x += 290.0;
    svg.push(&format!(
        r##"<path d="M{x:.1} 81h18" stroke="#666" stroke-width="1.6" stroke-dasharray="5 4"/>"##
    ));
    let best = format!("one link: {:.0} Mbit/s", summary.better_link());
    svg.text(x + 24.0, 86.0, "start", 14, "#333", &best);
}

/// Draws the round-trip times; the line is interrupted where no reply came for `MAX_GAP_SECONDS`.
fn draw_pings(svg: &mut Svg, panel: &Panel, bonding: &Bonding) {
    const MAX_GAP_SECONDS: f64 = 0.1;
    let points: Vec<_> =
        bonding.pings.replies.iter().map(|reply| (since(bonding, reply.at), reply.rtt_ms)).collect();
    for part in points.chunk_by(|a, b| b.0 - a.0 < MAX_GAP_SECONDS) {
        svg.line(panel, part, PING_COLOUR, 1.2);
    }
}

fn draw_events(svg: &mut Svg, panel: &Panel, bonding: &Bonding) {
    for (at, text) in [(bonding.cut, "link 1 cut"), (bonding.restored, "link 1 restored")] {
        let x = panel.x(since(bonding, at)) + 6.0;
        svg.push(&format!(
            r##"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="19" rx="3" fill="#ffffff" fill-opacity="0.85"/>"##,
            x - 2.0,
            RATES_PANEL.0 + 3.0,
            text.len() as f64 * 7.4 + 4.0
        ));
        svg.text(x, RATES_PANEL.0 + 17.0, "start", 14, HARM_COLOUR, text);
    }
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
}
