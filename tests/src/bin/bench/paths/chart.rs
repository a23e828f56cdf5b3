//! The chart of a scenario: for each row, the rate of each path over time, and the received rate.

use mpvpn_plot::{COLOURS, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};
use mpvpn_scenarios::Scenario;

use super::play::{Row, RunResult};
use crate::timeline::averaged;

const TOP: f64 = 112.0;
/// Distance between the tops of panels, px.
const PITCH: f64 = 230.0;
/// Height of a panel, px.
const PANEL: f64 = 160.0;

/// Draws the first run of every row; returns SVG.
pub(crate) fn draw(scenario: &Scenario, rows: &[Row]) -> String {
    let mut svg = Svg::default();
    svg.text(PANEL_LEFT, 36.0, "start", 21, TEXT_COLOUR, &format!("{}: {}", scenario.name, scenario.story));
    let links: Vec<String> = scenario.links.iter().map(ToString::to_string).collect();
    svg.text(
        PANEL_LEFT,
        58.0,
        "start",
        14,
        "#5c6773",
        &format!("links: {}; inner TCP and QUIC: Cubic where not said", links.join("  +  ")),
    );
    let drawn = rows.iter().filter_map(|row| Some((row, row.runs.first()?)));
    let mut names: Vec<&String> = drawn.clone().flat_map(|(_, run)| run.path_rates.paths.keys()).collect();
    names.sort();
    names.dedup();
    legend(&mut svg, &names);
    let mut top = TOP;
    for (row, run) in drawn {
        let best = row.best_single().map(|single| single.1);
        panel(&mut svg, top, &format!("{}, {:?}", row.load.name(), row.direction), run, &names, best);
        top += PITCH;
    }
    svg.text((PANEL_LEFT + PANEL_RIGHT) / 2.0, top - 10.0, "middle", 14, "#444", "time (s)");
    svg.finish(top + 10.0)
}

fn legend(svg: &mut Svg, names: &[&String]) {
    let mut x = PANEL_LEFT;
    for (name, colour) in names.iter().zip(COLOURS.iter().cycle()) {
        svg.push(&format!(
            r#"<rect x="{x:.1}" y="75" width="16" height="12" rx="2" fill="{colour}" fill-opacity="0.8"/>"#
        ));
        svg.text(x + 22.0, 86.0, "start", 14, "#333", name);
        x += 150.0;
    }
    svg.push(&format!(r#"<path d="M{x:.1} 81h18" stroke="{TEXT_COLOUR}" stroke-width="2.6"/>"#));
    svg.text(x + 24.0, 86.0, "start", 14, "#333", "received inside");
    svg.push(&format!(
        r##"<path d="M{:.1} 81h18" stroke="#666" stroke-width="1.6" stroke-dasharray="5 4"/>"##,
        x + 170.0
    ));
    svg.text(x + 194.0, 86.0, "start", 14, "#333", "best link alone");
}

fn panel(svg: &mut Svg, top: f64, title: &str, run: &RunResult, names: &[&String], best: Option<f64>) {
    let path_rates = &run.path_rates;
    let mut below = vec![0.0; path_rates.times.len()];
    let mut stack = Vec::new();
    for name in names {
        if let Some(curve) = path_rates.paths.get(*name) {
            below.iter_mut().zip(curve).for_each(|(sum, rate)| *sum += rate);
        }
        stack.push(path_rates.times.iter().copied().zip(below.iter().copied()).collect::<Vec<_>>());
    }
    let began = path_rates.began.unwrap_or(std::time::UNIX_EPOCH);
    let since = |at: std::time::SystemTime| at.duration_since(began).map_or(0.0, |time| time.as_secs_f64());
    let received: Vec<(f64, f64)> = run.arrived.as_ref().map_or_else(
        |_| Vec::new(),
        |arrived| {
            let start = since(arrived.started);
            averaged(&arrived.steps).into_iter().map(|(at, rate)| (start + at, rate)).collect()
        },
    );
    let seconds = path_rates.times.last().copied().unwrap_or(1.0).max(1.0);
    let highest =
        stack.last().into_iter().flatten().chain(&received).map(|point| point.1).fold(1.0, f64::max);
    let panel = Panel::new((top, top + PANEL), seconds, highest.max(best.unwrap_or(0.0)) * 1.1, "Mbit/s");
    for impairment in &run.impairments {
        svg.band(&panel, (since(impairment.from), since(impairment.to)));
    }
    svg.grid(&panel);
    svg.areas(&panel, &stack);
    if let Some(best) = best {
        svg.reference(&panel, best);
    }
    svg.line(&panel, &received, TEXT_COLOUR, 2.0);
    svg.text(PANEL_LEFT + 6.0, top - 6.0, "start", 14, TEXT_COLOUR, title);
}
