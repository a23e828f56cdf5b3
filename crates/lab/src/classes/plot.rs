//! The picture of the run: what came back of each class, how long it took, and what was lost.

use std::time::Duration;

use super::{
    HARMED,
    report::{Run, Times},
    traffic::{Figures, LOADS},
};
use crate::plot::{COLOURS, DARK, HARM, LEFT, Panel, RIGHT, Svg};

const HEIGHT: f64 = 760.0;
/// Tops and bottoms of the panels.
const RATES: (f64, f64) = (122.0, 308.0);
const TIMES: (f64, f64) = (370.0, 524.0);
const LOSSES: (f64, f64) = (588.0, 692.0);
/// Each point stands for this time.
const STEP: Duration = Duration::from_millis(500);

type Curve = Vec<(f64, f64)>;

/// Draws the run.
pub(super) fn draw(run: &Run) -> String {
    let Times { begin, harmed, healed, end } = run.times;
    let seconds = (end - begin).as_secs_f64().max(1.0);
    let rates = curves(run, |figures| Some(figures.mbps));
    let times = curves(run, |figures| figures.rtt_p99_ms);
    let losses = curves(run, |figures| Some(100.0 * figures.lost as f64 / figures.sent.max(1) as f64));
    let highest = |curves: &[Curve], least: f64| {
        curves.iter().flatten().map(|point| point.1).fold(least, f64::max) * 1.15
    };
    let panels = [
        (Panel::new(RATES, seconds, highest(&rates, 1.0), "Mbit/s"), rates, "What came back", RATES),
        (
            Panel::new(TIMES, seconds, highest(&times, 10.0), "ms"),
            times,
            "99 % of the round trips were shorter",
            TIMES,
        ),
        (Panel::new(LOSSES, seconds, highest(&losses, 5.0), "%"), losses, "Lost", LOSSES),
    ];
    let mut svg = Svg::default();
    head(&mut svg, run);
    for (panel, curves, title, (top, _)) in &panels {
        svg.band(panel, ((harmed - begin).as_secs_f64(), (healed - begin).as_secs_f64()));
        svg.grid(panel);
        svg.text(LEFT, top - 12.0, "start", 14, DARK, title);
        for (curve, colour) in curves.iter().zip(COLOURS) {
            svg.line(panel, curve, colour, 2.2);
        }
    }
    svg.text((LEFT + RIGHT) / 2.0, HEIGHT - 22.0, "middle", 14, "#444", "time (s)");
    svg.finish(HEIGHT)
}

/// A curve for each class; where there is no value it has no point.
fn curves(run: &Run, value: impl Fn(&Figures) -> Option<f64>) -> Vec<Curve> {
    let Times { begin, end, .. } = run.times;
    let steps = (end - begin).as_millis() / STEP.as_millis();
    let curve = |(load, record)| {
        let point = |step: u32| {
            let from = begin + STEP * step;
            let figures = Figures::of(load, record, from..from + STEP);
            Some(((from + STEP / 2 - begin).as_secs_f64(), value(&figures)?))
        };
        (0..u32::try_from(steps).unwrap_or(u32::MAX)).filter_map(point).collect()
    };
    LOADS.iter().zip(run.records.iter().map(Vec::as_slice)).map(curve).collect()
}

fn head(svg: &mut Svg, run: &Run) {
    let title =
        format!("Three classes over one link, {:.0} % of the packets of {HARMED} lost", run.loss * 100.0);
    svg.text(LEFT, 36.0, "start", 21, DARK, &title);
    svg.text(LEFT, 58.0, "start", 14, "#5c6773", &format!("{}; emulated on one machine", run.link));
    let mut x = LEFT;
    for (load, colour) in LOADS.iter().zip(COLOURS) {
        svg.push(&format!(r#"<path d="M{x:.1} 75h18" stroke="{colour}" stroke-width="2.6"/>"#));
        svg.text(x + 24.0, 80.0, "start", 14, "#333", load.class);
        x += 110.0;
    }
    svg.text(x, 80.0, "start", 14, HARM, "between the dashed lines: loss");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::traffic::Sent;

    #[test]
    fn the_picture_has_its_curves_axes_and_classes() {
        let second = Duration::from_secs(1);
        let times = Times { begin: second, harmed: 3 * second, healed: 5 * second, end: 7 * second };
        let sent = |n: u32| Sent {
            at: Duration::from_millis(10) * n,
            rtt: (!n.is_multiple_of(7)).then_some(Duration::from_millis(14)),
        };
        let records = vec![(0..800).map(sent).collect(), Vec::new(), (0..800).map(sent).collect()];
        let svg = draw(&Run { link: "50mbit,6.5ms".to_owned(), loss: 0.3, times, records });
        for part in ["30 % of the packets of bulk", "critical", "default", "time (s)", "Mbit/s", "Lost"] {
            assert!(svg.contains(part), "{part} is missing");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "a coordinate is not finite");
    }
}
