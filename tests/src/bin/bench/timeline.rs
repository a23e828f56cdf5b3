//! Charts of goodput over time: a panel for each system, with the time in which a link is impaired.

use mpvpn_plot::{COLOURS, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};

use crate::paths::load::STEP;

const TOP: f64 = 104.0;
/// Distance between the tops of panels, px.
const PITCH: f64 = 236.0;
/// Height of a panel, px.
const PANEL: f64 = 160.0;
/// The colour of the names of moments.
const LABEL_COLOUR: &str = "#8a2f25";
/// Steps of a moving average: iperf3 reports what arrives in bunches.
const AVERAGED_STEPS: usize = 3;

/// One panel.
pub(crate) struct Timeline {
    pub(crate) title: String,
    /// Goodput in each [`STEP`] of each run (Mbit/s).
    pub(crate) runs: Vec<Vec<f64>>,
    /// When the impairment began and ended (s).
    pub(crate) impaired: (f64, f64),
    /// Further times with their names (s).
    pub(crate) marks: Vec<(f64, &'static str)>,
}

/// Draws panels below each other, with the same scales; returns SVG. `began` and `ended` name the ends of the
/// impairment.
pub(crate) fn draw(title: &str, below: &str, (began, ended): (&str, &str), panels: &[Timeline]) -> String {
    let mut svg = Svg::default();
    svg.text(PANEL_LEFT, 36.0, "start", 21, TEXT_COLOUR, title);
    svg.text(PANEL_LEFT, 58.0, "start", 14, "#5c6773", below);
    let curves: Vec<Vec<Vec<(f64, f64)>>> =
        panels.iter().map(|panel| panel.runs.iter().map(|run| averaged(run)).collect()).collect();
    let points = || curves.iter().flatten().flatten();
    let seconds = points().map(|point| point.0).fold(1.0, f64::max);
    let most = points().map(|point| point.1).fold(1.0, f64::max);
    let mut top = TOP;
    for (panel, curves) in panels.iter().zip(&curves) {
        let scales = Panel::new((top, top + PANEL), seconds, most * 1.1, "Mbit/s");
        svg.band(&scales, panel.impaired);
        svg.grid(&scales);
        // The first run is drawn last, over the others.
        for (number, curve) in curves.iter().enumerate().rev() {
            let (colour, width) = if number == 0 { (COLOURS[0], 2.4) } else { ("#b9c4d0", 1.4) };
            svg.line(&scales, curve, colour, width);
        }
        for (at, name) in [(panel.impaired.0, began), (panel.impaired.1, ended)] {
            svg.text(scales.x(at) + 5.0, top + 14.0, "start", 12, LABEL_COLOUR, name);
        }
        // Marks may be close to the end of the impairment, and have a line of their own.
        for (at, name) in &panel.marks {
            let x = scales.x(*at);
            svg.push(&format!(
                r#"<path d="M{x:.1} {top:.1}v{PANEL}" stroke="{LABEL_COLOUR}" stroke-width="1"/>"#
            ));
            svg.text(x + 5.0, top + 30.0, "start", 12, LABEL_COLOUR, name);
        }
        svg.text(PANEL_LEFT + 6.0, top - 8.0, "start", 14, TEXT_COLOUR, &panel.title);
        top += PITCH;
    }
    svg.text((PANEL_LEFT + PANEL_RIGHT) / 2.0, top - 22.0, "middle", 14, "#444", "time (s)");
    svg.finish(top)
}

/// The goodput over time: a moving average, with the middle of each interval in seconds.
pub(crate) fn averaged(steps: &[f64]) -> Vec<(f64, f64)> {
    let middle = |at: usize| STEP.as_secs_f64() * (at as f64 + AVERAGED_STEPS as f64 / 2.0);
    let windows = steps.windows(AVERAGED_STEPS).enumerate();
    windows.map(|(at, steps)| (middle(at), steps.iter().sum::<f64>() / AVERAGED_STEPS as f64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_of_three_steps_around_its_time() {
        let points = averaged(&[0.0, 3.0, 6.0, 9.0]);
        assert_eq!(points.len(), 2);
        for (point, (at, rate)) in points.iter().zip([(0.15, 3.0), (0.25, 6.0)]) {
            assert!((point.0 - at).abs() < 1e-9 && (point.1 - rate).abs() < 1e-9, "{points:?}");
        }
        assert!(averaged(&[1.0]).is_empty());
    }

    #[test]
    fn each_panel_shows_its_runs_the_impairment_and_its_marks() {
        let panel = |title: &str| Timeline {
            title: title.to_owned(),
            runs: vec![vec![10.0; 100], vec![5.0; 100]],
            impaired: (3.0, 6.0),
            marks: vec![(7.0, "QUIC again")],
        };
        let svg = draw("a cut", "twice", ("link 1 silent", "back"), &[panel("packets"), panel("kernel")]);
        assert_eq!(svg.matches("fill=\"none\"").count(), 4, "a curve for each run");
        for (text, count) in
            [("link 1 silent", 2), (">back<", 2), ("QUIC again", 2), ("packets", 1), ("kernel", 1)]
        {
            assert_eq!(svg.matches(text).count(), count, "{text} in {svg}");
        }
        assert!(!svg.contains("NaN"));
        assert!(!draw("nothing", "", ("", ""), &[]).contains("NaN"));
    }
}
