//! Diagrams over time as SVG: areas and lines in panels with a common time axis.
//!
//! In: points in seconds and in the panel's unit. Out: SVG text. What lies outside of a panel is drawn at its edge.

use std::fmt::Write;

/// Width of the picture, in its own units.
pub const WIDTH: f64 = 1080.0;
/// Where panels begin.
pub const LEFT: f64 = 78.0;
/// Where panels end.
pub const RIGHT: f64 = 1050.0;
/// Colours of areas, in turn: distinct also for people who see few colours.
pub const COLOURS: [&str; 6] = ["#4c86c6", "#f0a04b", "#2e8b6f", "#b3638f", "#8a94a0", "#7a6a2b"];
/// The colour of what is the subject of a picture, and of headings.
pub const DARK: &str = "#1d2733";
/// The colour of harm.
pub const HARM: &str = "#c0392b";

/// A diagram: where it is, and what its axes mean.
#[derive(Clone, Debug)]
pub struct Panel {
    top: f64,
    bottom: f64,
    seconds: f64,
    highest: f64,
    unit: &'static str,
}

impl Panel {
    /// A panel between these heights, for so many seconds, and values from 0 up to `highest`.
    pub fn new((top, bottom): (f64, f64), seconds: f64, highest: f64, unit: &'static str) -> Self {
        Self { top, bottom, seconds, highest, unit }
    }

    /// Where a time is.
    pub fn x(&self, seconds: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (seconds / self.seconds).clamp(0.0, 1.0)
    }

    /// Where a value is.
    pub fn y(&self, value: f64) -> f64 {
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

/// A picture as it grows, from back to front.
#[derive(Clone, Debug, Default)]
pub struct Svg {
    body: String,
}

impl Svg {
    /// Adds an element as it is.
    pub fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Adds a text whose `anchor` (`start`, `middle`, `end`) is at that place.
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, colour: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.push(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{text}</text>"#
        ));
    }

    /// Adds the axes, with lines at round values.
    pub fn grid(&mut self, panel: &Panel) {
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
    pub fn areas(&mut self, panel: &Panel, curves: &[Vec<(f64, f64)>]) {
        let ground: Vec<(f64, f64)> = curves
            .first()
            .map(|curve| curve.iter().map(|point| (point.0, 0.0)).collect())
            .unwrap_or_default();
        let mut below = &ground;
        for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
            let outline: Vec<_> = curve.iter().chain(below.iter().rev()).copied().collect();
            let path = path(panel, &outline);
            self.push(&format!(r#"<path d="{path}Z" fill="{colour}" fill-opacity="0.75"/>"#));
            below = curve;
        }
    }

    /// Adds a dashed line at a value.
    pub fn reference(&mut self, panel: &Panel, value: f64) {
        let y = panel.y(value);
        self.push(&format!(
            r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#555" stroke-width="1.4" stroke-dasharray="5 4"/>"##
        ));
    }

    /// Joins the points.
    pub fn line(&mut self, panel: &Panel, points: &[(f64, f64)], colour: &str, width: f64) {
        if points.is_empty() {
            return;
        }
        let path = path(panel, points);
        self.push(&format!(
            r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>"#
        ));
    }

    /// Marks a time of harm.
    pub fn band(&mut self, panel: &Panel, (from, to): (f64, f64)) {
        let (from, to) = (panel.x(from), panel.x(to));
        let (y, width, height) = (panel.top, to - from, panel.bottom - panel.top);
        self.push(&format!(
            r#"<rect x="{from:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{HARM}" fill-opacity="0.06"/>"#
        ));
        for x in [from, to] {
            self.push(&format!(
                r#"<path d="M{x:.1} {y:.1}v{height:.1}" stroke="{HARM}" stroke-width="1.3" stroke-dasharray="3 3"/>"#
            ));
        }
    }

    /// The whole picture, so high.
    pub fn finish(self, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" font-family=\"'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{}</svg>\n",
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

    #[test]
    fn grid_lines_are_at_round_values() {
        assert_eq!(Panel::spacing(208.0, 6.0), 50.0);
        assert_eq!(Panel::spacing(30.0, 12.0), 5.0);
        assert_eq!(Panel::spacing(60.0, 4.0), 20.0);
    }
}
