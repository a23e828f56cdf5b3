//! Figures: measured values with the bars that they must meet.

/// A measured value and its bar.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) rig: &'static str,
    /// The key by which runs are compared: equal in every run.
    pub(crate) name: String,
    /// Additional text that may differ between runs.
    pub(crate) note: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) bar: Bar,
}

/// A limit that a value must meet; also defines which of two values is better.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// No limit; a higher value is better.
    Higher,
    /// No limit; a lower value is better.
    Lower,
    /// No limit, and neither direction is better.
    None,
}

/// Which of two values is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    Higher,
    Lower,
}

/// Creates a figure and prints it.
pub(crate) fn figure(rig: &'static str, name: String, value: f64, unit: &'static str, bar: Bar) -> Figure {
    figure_with_note(rig, name, "", value, unit, bar)
}

/// Creates a figure with a note and prints it.
pub(crate) fn figure_with_note(
    rig: &'static str,
    name: String,
    note: &str,
    value: f64,
    unit: &'static str,
    bar: Bar,
) -> Figure {
    let figure = Figure { rig, name, note: note.to_owned(), value, unit, bar };
    eprintln!("  {}: {:.2} {}", figure.title(), figure.value, figure.unit);
    figure
}

impl Bar {
    /// The better direction, if there is one.
    pub(crate) fn better(self) -> Option<Better> {
        match self {
            Self::AtLeast(_) | Self::Higher => Some(Better::Higher),
            Self::AtMost(_) | Self::Lower => Some(Better::Lower),
            Self::None => None,
        }
    }
}

impl Better {
    pub(crate) const ALL: [Self; 2] = [Self::Higher, Self::Lower];

    /// Name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Higher => "higher",
            Self::Lower => "lower",
        }
    }
}

impl Figure {
    pub(crate) fn is_good(&self) -> bool {
        match self.bar {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
            Bar::Higher | Bar::Lower | Bar::None => true,
        }
    }

    /// The name with the note.
    pub(crate) fn title(&self) -> String {
        if self.note.is_empty() { self.name.clone() } else { format!("{} ({})", self.name, self.note) }
    }

    pub(crate) fn bar(&self) -> String {
        match self.bar {
            Bar::AtLeast(bar) => format!("≥ {bar}"),
            Bar::AtMost(bar) => format!("≤ {bar}"),
            Bar::Higher | Bar::Lower | Bar::None => String::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.bar, self.is_good()) {
            (Bar::Higher | Bar::Lower | Bar::None, _) => "",
            (_, true) => "ok",
            (_, false) => "missed",
        }
    }
}

/// A Markdown table of figures.
pub(crate) fn table(figures: &[&Figure]) -> String {
    let mut text = String::from("| rig | figure | measured | unit | bar | |\n|---|---|---:|---|---|---|\n");
    for figure in figures {
        let (title, bar, verdict) = (figure.title(), figure.bar(), figure.verdict());
        text += &format!(
            "| {} | {title} | {:.2} | {} | {bar} | {verdict} |\n",
            figure.rig, figure.value, figure.unit
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, bar: Bar) -> Figure {
        Figure { rig: "r", name: "n".to_owned(), note: String::new(), value, unit: "u", bar }
    }

    #[test]
    fn a_figure_is_judged_by_its_bar() {
        assert!(figure(2.0, Bar::AtLeast(2.0)).is_good() && !figure(1.9, Bar::AtLeast(2.0)).is_good());
        assert!(figure(2.0, Bar::AtMost(2.0)).is_good() && !figure(2.1, Bar::AtMost(2.0)).is_good());
        assert!([Bar::None, Bar::Higher, Bar::Lower].iter().all(|bar| figure(0.0, *bar).is_good()));
        // NaN meets no bar.
        assert!(
            !figure(f64::NAN, Bar::AtLeast(0.0)).is_good() && !figure(f64::NAN, Bar::AtMost(9.0)).is_good()
        );
        assert!(table(&[&figure(1.0, Bar::AtLeast(2.0))]).contains("| r | n | 1.00 | u | ≥ 2 | missed |"));
    }

    #[test]
    fn the_bar_says_which_direction_is_better() {
        let better =
            [Bar::AtLeast(1.0), Bar::Higher, Bar::AtMost(1.0), Bar::Lower, Bar::None].map(Bar::better);
        let (higher, lower) = (Some(Better::Higher), Some(Better::Lower));
        assert_eq!(better, [higher, higher, lower, lower, None]);
    }

    #[test]
    fn a_note_is_shown_behind_the_name() {
        let figure_with_note = Figure { note: "of 5".to_owned(), ..figure(1.0, Bar::None) };
        assert!(table(&[&figure_with_note]).contains("| r | n (of 5) | 1.00 |"));
    }
}
