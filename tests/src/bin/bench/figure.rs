//! A measured value beside what is asked of it.

/// A measured value and what is asked of it.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) rig: &'static str,
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) bar: Bar,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// Of interest, not judged.
    None,
}

/// A figure, told to who waits for it.
pub(crate) fn figure(rig: &'static str, name: String, value: f64, unit: &'static str, bar: Bar) -> Figure {
    let figure = Figure { rig, name, value, unit, bar };
    eprintln!("  {}: {:.2} {}", figure.name, figure.value, figure.unit);
    figure
}

impl Figure {
    pub(crate) fn is_good(&self) -> bool {
        match self.bar {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
            Bar::None => true,
        }
    }

    pub(crate) fn bar(&self) -> String {
        match self.bar {
            Bar::AtLeast(bar) => format!("≥ {bar}"),
            Bar::AtMost(bar) => format!("≤ {bar}"),
            Bar::None => String::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.bar, self.is_good()) {
            (Bar::None, _) => "",
            (_, true) => "ok",
            (_, false) => "missed",
        }
    }
}

/// All figures as Markdown.
pub(crate) fn table(figures: &[&Figure]) -> String {
    let mut text = String::from("| rig | figure | measured | unit | bar | |\n|---|---|---:|---|---|---|\n");
    for figure in figures {
        let (bar, verdict) = (figure.bar(), figure.verdict());
        text += &format!(
            "| {} | {} | {:.2} | {} | {bar} | {verdict} |\n",
            figure.rig, figure.name, figure.value, figure.unit
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_judged_by_its_bar() {
        let figure = |value, bar| Figure { rig: "r", name: "n".to_owned(), value, unit: "u", bar };
        assert!(figure(2.0, Bar::AtLeast(2.0)).is_good() && !figure(1.9, Bar::AtLeast(2.0)).is_good());
        assert!(figure(2.0, Bar::AtMost(2.0)).is_good() && !figure(2.1, Bar::AtMost(2.0)).is_good());
        assert!(figure(0.0, Bar::None).is_good());
        // What could not be measured has met nothing.
        assert!(
            !figure(f64::NAN, Bar::AtLeast(0.0)).is_good() && !figure(f64::NAN, Bar::AtMost(9.0)).is_good()
        );
        assert!(table(&[&figure(1.0, Bar::AtLeast(2.0))]).contains("| r | n | 1.00 | u | ≥ 2 | missed |"));
    }
}
