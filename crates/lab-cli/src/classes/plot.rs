//! The picture of a run: rate, round-trip time and loss of each class over time.

use std::time::Duration;

use mpvpn_plot::{COLOURS, HARM_COLOUR, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};

use super::{
    LOSSY_CLASS,
    report::{Run, Times},
    traffic::{FLOWS, Figures},
};

/// Height of the picture, in its own units.
const PICTURE_HEIGHT: f64 = 760.0;
/// Top and bottom of each panel, in the picture's units.
const RATES_PANEL: (f64, f64) = (122.0, 308.0);
const RTT_PANEL: (f64, f64) = (370.0, 524.0);
const LOSS_PANEL: (f64, f64) = (588.0, 692.0);
/// The interval that each point of a curve stands for.
const STEP: Duration = Duration::from_millis(500);

type Curve = Vec<(f64, f64)>;

/// Draws the run.
pub(super) fn draw(run: &Run) -> String {
    let Times { begin, loss_begins, loss_ends, end } = run.times;
    let seconds = (end - begin).as_secs_f64().max(1.0);
    let rates = curves(run, |figures| Some(figures.mbps));
    let rtts = curves(run, |figures| figures.rtt_p99_ms);
    let losses = curves(run, |figures| Some(100.0 * figures.lost as f64 / figures.sent.max(1) as f64));
    let axis_maximum = |curves: &[Curve], minimum: f64| {
        curves.iter().flatten().map(|point| point.1).fold(minimum, f64::max) * 1.15
    };
    let panels = [
        (
            Panel::new(RATES_PANEL, seconds, axis_maximum(&rates, 1.0), "Mbit/s"),
            rates,
            "What came back",
            RATES_PANEL,
        ),
        (
            Panel::new(RTT_PANEL, seconds, axis_maximum(&rtts, 10.0), "ms"),
            rtts,
            "99 % of the round trips were shorter",
            RTT_PANEL,
        ),
        (Panel::new(LOSS_PANEL, seconds, axis_maximum(&losses, 5.0), "%"), losses, "Lost", LOSS_PANEL),
    ];
    let mut svg = Svg::default();
    header(&mut svg, run);
    for (panel, curves, title, (top, _)) in &panels {
        svg.band(panel, ((loss_begins - begin).as_secs_f64(), (loss_ends - begin).as_secs_f64()));
        svg.grid(panel);
        svg.text(PANEL_LEFT, top - 12.0, "start", 14, TEXT_COLOUR, title);
        for (curve, colour) in curves.iter().zip(COLOURS) {
            svg.line(panel, curve, colour, 2.2);
        }
    }
    svg.text((PANEL_LEFT + PANEL_RIGHT) / 2.0, PICTURE_HEIGHT - 22.0, "middle", 14, "#444", "time (s)");
    svg.finish(PICTURE_HEIGHT)
}

/// A curve for each class, without points where there is no value.
fn curves(run: &Run, value: impl Fn(&Figures) -> Option<f64>) -> Vec<Curve> {
    let Times { begin, end, .. } = run.times;
    let steps = (end - begin).as_millis() / STEP.as_millis();
    let curve = |(flow, record)| {
        let point = |step: u32| {
            let from = begin + STEP * step;
            let figures = Figures::of(flow, record, from..from + STEP);
            Some(((from + STEP / 2 - begin).as_secs_f64(), value(&figures)?))
        };
        (0..u32::try_from(steps).unwrap_or(u32::MAX)).filter_map(point).collect()
    };
    FLOWS.iter().zip(run.records.iter().map(Vec::as_slice)).map(curve).collect()
}

fn header(svg: &mut Svg, run: &Run) {
    let title = format!(
        "Three classes over one link, {:.0} % of the packets of {LOSSY_CLASS} lost",
        run.loss * 100.0
    );
    svg.text(PANEL_LEFT, 36.0, "start", 21, TEXT_COLOUR, &title);
    svg.text(PANEL_LEFT, 58.0, "start", 14, "#5c6773", &format!("{}; emulated on one machine", run.link));
    let mut x = PANEL_LEFT;
    for (flow, colour) in FLOWS.iter().zip(COLOURS) {
        svg.push(&format!(r#"<path d="M{x:.1} 75h18" stroke="{colour}" stroke-width="2.6"/>"#));
        svg.text(x + 24.0, 80.0, "start", 14, "#333", flow.class);
        x += 110.0;
    }
    svg.text(x, 80.0, "start", 14, HARM_COLOUR, "between the dashed lines: loss");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::traffic::Datagram;

    #[test]
    fn the_picture_has_its_curves_axes_and_classes() {
        let second = Duration::from_secs(1);
        let times = Times { begin: second, loss_begins: 3 * second, loss_ends: 5 * second, end: 7 * second };
        let sent = |n: u32| Datagram {
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
