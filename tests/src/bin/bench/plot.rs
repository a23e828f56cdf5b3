//! Bar charts as SVG: one panel per measure, one bar per system.

use std::fmt::Write;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 860.0;
const TOP: f64 = 64.0;
const BAR: f64 = 18.0;
/// Distance between bars, px.
const STEP: f64 = 23.0;
/// Height of a panel's heading, and of the gap below a panel, px.
const HEADING: f64 = 26.0;
const GAP: f64 = 20.0;
const OURS: &str = "#2e6fb7";
const OTHERS: &str = "#9aa7b5";

/// Values of one measure.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    /// Names and values; names that begin with `mpvpn` are highlighted.
    pub(crate) bars: Vec<(&'static str, f64)>,
}

/// Draws panels below each other, each with its own scale.
pub(crate) fn draw(title: &str, panels: &[Panel]) -> String {
    let height: f64 =
        TOP + panels.iter().map(|panel| HEADING + STEP * panel.bars.len() as f64 + GAP).sum::<f64>();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, (24.0, 36.0), "start", 20, title);
    let mut y = TOP;
    for panel in panels {
        text(&mut svg, (24.0, y + 16.0), "start", 14, &format!("{} ({})", panel.title, panel.unit));
        y += HEADING;
        let most = panel.bars.iter().map(|bar| bar.1).filter(|value| value.is_finite()).fold(0.0, f64::max);
        for (name, value) in &panel.bars {
            let share = if most > 0.0 && value.is_finite() { (value / most).clamp(0.0, 1.0) } else { 0.0 };
            let (length, colour) =
                ((RIGHT - LEFT) * share, if name.starts_with("mpvpn") { OURS } else { OTHERS });
            text(&mut svg, (LEFT - 8.0, y + 14.0), "end", 13, name);
            let _ = writeln!(
                svg,
                r#"<rect x="{LEFT}" y="{y:.1}" width="{length:.1}" height="{BAR}" rx="2" fill="{colour}"/>"#
            );
            text(&mut svg, (LEFT + length + 6.0, y + 14.0), "start", 13, &number(*value));
            y += STEP;
        }
        y += GAP;
    }
    svg + "</svg>\n"
}

/// Formats a value with three significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "–".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        svg,
        r##"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" fill="#1d2733">{text}</text>"##
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bars = vec![("mpvpn", 200.0), ("other", 50.0), ("absent", f64::NAN)];
        let svg = draw("a < b", &[Panel { title: "rate".to_owned(), unit: "Mbit/s", bars }]);
        for part in ["a &lt; b", "rate (Mbit/s)", r#"width="710.0""#, r#"width="177.5""#, ">50.0<", ">–<"] {
            assert!(svg.contains(part), "{part} is missing in {svg}");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
