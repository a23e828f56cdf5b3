//! The values of every figure, run by run.
//!
//! In: the reports of single runs (`report.rs`). Out: a series a figure, in the order in which they first
//! came, with a value or nothing for either binary in every pair.

use serde_json::Value;

use super::{judge::Pair, schedule::Side};
use crate::figure::Better;

/// The values of one figure.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) rig: String,
    pub(super) name: String,
    /// Index among figures of the same name in a report, from 0.
    occurrence: usize,
    pub(super) unit: String,
    pub(super) better: Option<Better>,
    values: Vec<Pair>,
}

impl Series {
    /// The pairs with at least one value. In the other pairs the figure was not measured, or both runs
    /// failed.
    pub(super) fn pairs(&self) -> Vec<Pair> {
        self.values.iter().filter(|pair| **pair != Pair::default()).copied().collect()
    }
}

/// All series.
#[derive(Default)]
pub(super) struct Collection(Vec<Series>);

impl Collection {
    /// The series with at least one value.
    pub(super) fn measured(&self) -> impl Iterator<Item = &Series> {
        self.0.iter().filter(|series| !series.pairs().is_empty())
    }

    /// Adds the figures of one run.
    ///
    /// # Errors
    /// If `report` is not a report.
    pub(super) fn take(&mut self, report: &Value, pair: u32, side: Side) -> Result<(), String> {
        let figures = report["figures"].as_array().ok_or("the report has no list of figures")?;
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for figure in figures {
            let text = |key: &str| figure[key].as_str().ok_or_else(|| format!("a figure without {key}"));
            let (rig, name) = (text("rig")?, text("name")?);
            let occurrence = seen.iter().filter(|other| **other == (rig, name)).count();
            seen.push((rig, name));
            let values = &mut self.series(figure, rig, name, occurrence, text("unit")?).values;
            values.resize(values.len().max(pair as usize + 1), Pair::default());
            let pair = &mut values[pair as usize];
            // A value that could not be measured is null.
            let value = figure["value"].as_f64();
            match side {
                Side::Before => pair.before = value,
                Side::After => pair.after = value,
            }
        }
        Ok(())
    }

    fn series(
        &mut self,
        figure: &Value,
        rig: &str,
        name: &str,
        occurrence: usize,
        unit: &str,
    ) -> &mut Series {
        let is_it =
            |series: &Series| series.rig == rig && series.name == name && series.occurrence == occurrence;
        let at = self.0.iter().position(is_it).unwrap_or_else(|| {
            let better = figure["better"].as_str();
            let better = Better::ALL.into_iter().find(|direction| Some(direction.name()) == better);
            let (rig, name, unit) = (rig.to_owned(), name.to_owned(), unit.to_owned());
            self.0.push(Series { rig, name, occurrence, unit, better, values: Vec::new() });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(figures: &[(&str, Value)]) -> Value {
        let figure = |(name, value): &(&str, Value)| json!({ "rig": "cut", "name": name, "unit": "ms", "better": "lower", "value": value });
        json!({ "figures": figures.iter().map(figure).collect::<Value>() })
    }

    #[test]
    fn values_of_the_same_figure_become_pairs() {
        let mut all = Collection::default();
        all.take(&report(&[("gap", json!(1.5)), ("back", json!(9))]), 0, Side::Before).unwrap();
        all.take(&report(&[("back", json!(8)), ("gap", json!(2.5))]), 0, Side::After).unwrap();
        all.take(&report(&[("gap", Value::Null)]), 1, Side::After).unwrap();
        all.take(&report(&[("gap", json!(1.0))]), 1, Side::Before).unwrap();
        let series: Vec<&Series> = all.measured().collect();
        assert_eq!(series.iter().map(|series| series.name.as_str()).collect::<Vec<_>>(), ["gap", "back"]);
        assert_eq!(series[0].better, Some(Better::Lower));
        let gap = [Pair { before: Some(1.5), after: Some(2.5) }, Pair { before: Some(1.0), after: None }];
        assert_eq!(series[0].pairs(), gap);
        // The second pair did not ask for it.
        assert_eq!(series[1].pairs(), [Pair { before: Some(9.0), after: Some(8.0) }]);
    }

    #[test]
    fn a_name_that_a_report_has_twice_is_two_figures() {
        let mut all = Collection::default();
        for side in [Side::Before, Side::After] {
            all.take(&report(&[("gap", json!(1)), ("gap", json!(2))]), 0, side).unwrap();
        }
        let firsts: Vec<_> = all.measured().map(|series| series.pairs()[0].after).collect();
        assert_eq!(firsts, [Some(1.0), Some(2.0)]);
    }

    #[test]
    fn figures_that_were_never_measured_are_left_out() {
        let mut all = Collection::default();
        all.take(&report(&[("lab: it cannot be measured", Value::Null)]), 0, Side::Before).unwrap();
        assert_eq!(all.measured().count(), 0);
        assert!(all.take(&json!({}), 0, Side::Before).is_err());
        assert!(all.take(&json!({ "figures": [{ "rig": "cut" }] }), 0, Side::Before).is_err());
    }
}
