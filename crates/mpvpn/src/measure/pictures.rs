//! The pictures of a measurement.

use mpvpn_plot::{COLOURS, PANEL_LEFT, PANEL_RIGHT, Panel, Svg, TEXT_COLOUR};
use mpvpn_status::measure::{CutResult, HoursResult, LoadDirection, MeasureReport, RatePoint, UdpSweep};

/// Height of a panel, and the space above it for its title, in the picture's units.
const PANEL_HEIGHT: f64 = 220.0;
const TITLE_SPACE: f64 = 60.0;
/// Space below a panel for its axis.
const AXIS_SPACE: f64 = 40.0;
/// Highest loss that a picture shows (percent): more looks the same.
const MAX_SHOWN_LOSS: f64 = 10.0;

/// A picture: the end of its file's name, its title, and the SVG.
pub(crate) struct Picture {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) svg: String,
}

/// The pictures of what was measured.
pub(crate) fn pictures(report: &MeasureReport) -> Vec<Picture> {
    let tcp = (!report.tcp.is_empty()).then(|| Picture {
        name: "tcp",
        title: "TCP with 8 flows over time",
        svg: tcp(report),
    });
    let udp = (!report.udp.is_empty()).then(|| Picture {
        name: "udp",
        title: "Loss of UDP at rising rates",
        svg: udp(&report.udp),
    });
    let cut = report.cut.as_ref().map(|result| Picture {
        name: "cut",
        title: "A link that was not used for 20 s",
        svg: cut(result),
    });
    let hours = report.hours.as_ref().map(|result| Picture {
        name: "hours",
        title: "A load over hours",
        svg: hours(result),
    });
    [tcp, udp, cut, hours].into_iter().flatten().collect()
}

/// A curve with its name.
type Curve = (String, Vec<(f64, f64)>);

/// Draws a panel with curves and a legend; returns the picture's height so far.
fn panel(
    svg: &mut Svg,
    top: f64,
    (title, x_unit, y_unit): (&str, &str, &'static str),
    curves: &[Curve],
) -> (Panel, f64) {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
    let (x_max, y_max) = (most(|point| point.0).max(1.0), most(|point| point.1).max(1.0) * 1.1);
    let (from, to) = (top + TITLE_SPACE, top + TITLE_SPACE + PANEL_HEIGHT);
    let panel = Panel::new((from, to), x_max, y_max, y_unit);
    svg.text(PANEL_LEFT, top + 24.0, "start", 18, TEXT_COLOUR, title);
    svg.text(PANEL_RIGHT, to + 36.0, "end", 13, TEXT_COLOUR, x_unit);
    svg.grid(&panel);
    let mut at = PANEL_LEFT;
    for ((name, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        svg.line(&panel, points, colour, 2.0);
        svg.push(&format!(
            r#"<rect x="{at:.1}" y="{:.1}" width="14" height="4" fill="{colour}"/>"#,
            top + 40.0
        ));
        svg.text(at + 20.0, top + 46.0, "start", 13, TEXT_COLOUR, name);
        at += 60.0 + 8.0 * name.chars().count() as f64;
    }
    (panel, to + AXIS_SPACE)
}

fn points(series: &[RatePoint], unit: f64) -> Vec<(f64, f64)> {
    series.iter().map(|point| (point.second / unit, point.bits_per_second / 1e6)).collect()
}

fn tcp(report: &MeasureReport) -> String {
    let mut svg = Svg::default();
    let mut top = 0.0;
    for (direction, title) in [(LoadDirection::Down, "to the client"), (LoadDirection::Up, "to the server")] {
        let flows = report.tcp.iter().map(|row| row.flows).max().unwrap_or_default();
        let rows = report.tcp.iter().filter(|row| row.direction == direction && row.flows == flows);
        let name = |link: &str| if link.is_empty() { "all links".to_owned() } else { link.to_owned() };
        let curves: Vec<Curve> = rows.map(|row| (name(&row.link), points(&row.series, 1.0))).collect();
        (_, top) = panel(&mut svg, top, (&format!("TCP {title}, {flows} flows"), "s", "Mbit/s"), &curves);
    }
    svg.finish(top)
}

fn udp(sweeps: &[UdpSweep]) -> String {
    let mut svg = Svg::default();
    let curve = |sweep: &UdpSweep| {
        let steps = sweep.steps.iter();
        let points = steps.map(|step| (step.sent_bits_per_second / 1e6, step.loss_pct.min(MAX_SHOWN_LOSS)));
        let links = if sweep.link.is_empty() { "all links" } else { &sweep.link };
        (format!("{}, {links}", sweep.direction), points.collect())
    };
    let curves: Vec<Curve> = sweeps.iter().map(curve).collect();
    let (panel, height) = panel(&mut svg, 0.0, ("Loss of UDP", "Mbit/s sent", "% lost"), &curves);
    svg.reference(&panel, 1.0);
    svg.finish(height)
}

fn cut(result: &CutResult) -> String {
    let mut svg = Svg::default();
    let rates = result.rows.iter().map(|row| (f64::from(row.second), row.bits_per_second / 1e6)).collect();
    let title = format!("One TCP connection; {} is not used in the marked time", result.link);
    let (rate, height) = panel(&mut svg, 0.0, (&title, "s", "Mbit/s"), &[("rate".to_owned(), rates)]);
    svg.band(&rate, (result.cut_second, result.restored_second));
    let times = result.rows.iter().filter_map(|row| Some((f64::from(row.second), row.max_rtt_ms?))).collect();
    let curve = [("longest round trip of each second".to_owned(), times)];
    let (time, height) = panel(&mut svg, height, ("Latency meanwhile", "s", "ms"), &curve);
    svg.band(&time, (result.cut_second, result.restored_second));
    svg.finish(height)
}

fn hours(result: &HoursResult) -> String {
    let mut svg = Svg::default();
    let curve = [("rate of each minute".to_owned(), points(&result.series, 60.0))];
    let (_, height) = panel(&mut svg, 0.0, ("Eight TCP connections", "min", "Mbit/s"), &curve);
    svg.finish(height)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::markdown::tests::example;

    #[test]
    fn each_part_has_a_picture_with_its_curves() {
        let pictures = pictures(&example());
        assert_eq!(
            pictures.iter().map(|picture| picture.name).collect::<Vec<_>>(),
            ["tcp", "udp", "cut", "hours"]
        );
        for picture in &pictures {
            assert!(picture.svg.starts_with("<svg ") && picture.svg.ends_with("</svg>\n"));
            assert!(picture.svg.contains("Mbit/s") && !picture.svg.contains("NaN"), "{}", picture.name);
        }
        let curves = |at: usize| pictures[at].svg.matches("stroke-linejoin").count();
        assert_eq!([0, 1, 2, 3].map(curves), [6, 1, 2, 1]);
        assert!(super::pictures(&MeasureReport::default()).is_empty());
    }
}
