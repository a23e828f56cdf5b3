//! Draws diagrams over time as SVG: areas and lines in panels with a common time axis.
//!
//! In: points in seconds and in the panel's unit. Out: SVG text. Points outside of a panel are drawn at its
//! edge.

use std::fmt::Write;

/// Width of the picture, in its own units.
pub const WIDTH: f64 = 1080.0;
/// The left edge of panels, in the picture's units.
pub const PANEL_LEFT: f64 = 78.0;
/// The right edge of panels, in the picture's units.
pub const PANEL_RIGHT: f64 = 1050.0;
/// Colours of areas and curves, in turn; distinguishable with colour vision deficiency.
pub const COLOURS: [&str; 6] = ["#4c86c6", "#f0a04b", "#2e8b6f", "#b3638f", "#8a94a0", "#7a6a2b"];
/// The colour of headings and of the main curve.
pub const TEXT_COLOUR: &str = "#1d2733";
/// The colour that marks intervals in which a link is impaired.
pub const HARM_COLOUR: &str = "#c0392b";

/// A diagram: its position, and the scales of its axes.
#[derive(Clone, Debug)]
pub struct Panel {
    top: f64,
    bottom: f64,
    seconds: f64,
    max_value: f64,
    unit: &'static str,
}

impl Panel {
    /// A panel between the heights `top` and `bottom`, for `seconds` of time and values from 0 to
    /// `max_value`.
    pub fn new((top, bottom): (f64, f64), seconds: f64, max_value: f64, unit: &'static str) -> Self {
        Self { top, bottom, seconds, max_value, unit }
    }

    /// The x coordinate of a time in seconds.
    pub fn x(&self, seconds: f64) -> f64 {
        PANEL_LEFT + (PANEL_RIGHT - PANEL_LEFT) * (seconds / self.seconds).clamp(0.0, 1.0)
    }

    /// The y coordinate of a value.
    pub fn y(&self, value: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * (value / self.max_value).clamp(0.0, 1.0)
    }

    /// The distance of grid lines: 1, 2 or 5 times a power of ten, for at most `count` lines in `range`.
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

/// A picture under construction; later elements are drawn over earlier ones.
#[derive(Clone, Debug, Default)]
pub struct Svg {
    body: String,
}

impl Svg {
    /// Adds an SVG element.
    pub fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Adds a text whose `anchor` (`start`, `middle` or `end`) is at (`x`, `y`).
    pub fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, colour: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.push(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{text}</text>"#
        ));
    }

    /// Adds the axes and grid lines at round values.
    pub fn grid(&mut self, panel: &Panel) {
        let rows = if panel.bottom - panel.top > 200.0 { 6.0 } else { 4.0 };
        let step = Panel::spacing(panel.max_value, rows);
        let mut value = 0.0;
        while value <= panel.max_value {
            let y = panel.y(value);
            self.push(&format!(
                r##"<path d="M{PANEL_LEFT} {y:.1}H{PANEL_RIGHT}" stroke="#dfe4ea" stroke-width="1"/>"##
            ));
            self.text(PANEL_LEFT - 8.0, y + 4.5, "end", 13, "#444", &format!("{value:.0}"));
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
        self.push(&format!(
            r##"<path d="M{PANEL_LEFT} {y:.1}H{PANEL_RIGHT}" stroke="#8a94a0" stroke-width="1.2"/>"##
        ));
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

    /// Adds a dashed horizontal line at a value.
    pub fn reference(&mut self, panel: &Panel, value: f64) {
        let y = panel.y(value);
        self.push(&format!(
            r##"<path d="M{PANEL_LEFT} {y:.1}H{PANEL_RIGHT}" stroke="#555" stroke-width="1.4" stroke-dasharray="5 4"/>"##
        ));
    }

    /// Adds a line through the points.
    pub fn line(&mut self, panel: &Panel, points: &[(f64, f64)], colour: &str, width: f64) {
        if points.is_empty() {
            return;
        }
        let path = path(panel, points);
        self.push(&format!(
            r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>"#
        ));
    }

    /// Marks an interval, in seconds, in which a link is impaired.
    pub fn band(&mut self, panel: &Panel, (from, to): (f64, f64)) {
        let (from, to) = (panel.x(from), panel.x(to));
        let (y, width, height) = (panel.top, to - from, panel.bottom - panel.top);
        self.push(&format!(
            r#"<rect x="{from:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{HARM_COLOUR}" fill-opacity="0.06"/>"#
        ));
        for x in [from, to] {
            self.push(&format!(
                r#"<path d="M{x:.1} {y:.1}v{height:.1}" stroke="{HARM_COLOUR}" stroke-width="1.3" stroke-dasharray="3 3"/>"#
            ));
        }
    }

    /// The complete SVG document with this height.
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
