//! The result of a comparison as a table and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{
    judge::{Judgement, Verdict, judge},
    series::{Collection, Series},
};

/// A figure and its judgement.
pub(super) struct Row<'a> {
    pub(super) series: &'a Series,
    pub(super) judgement: Judgement,
}

impl Row<'_> {
    pub(super) fn is_worse(&self) -> bool {
        self.judgement.verdict == Verdict::Worse
    }
}

/// Judges every figure.
pub(super) fn rows(all: &Collection, threshold: f64) -> Vec<Row<'_>> {
    all.measured()
        .map(|series| {
            let judgement = judge(&series.pairs(), series.better, &series.unit, threshold);
            Row { series, judgement }
        })
        .collect()
}

fn name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::NotKnown => "not known",
    }
}

/// Markdown.
pub(super) fn table(rows: &[Row<'_>]) -> String {
    let mut text = String::from(
        "| rig | figure | unit | better | pairs | before | after | difference | interval | | |\n\
         |---|---|---|---|---:|---:|---:|---:|---|---|---|\n",
    );
    for Row { series, judgement } in rows {
        let Judgement { before, after, shift, verdict, why, .. } = judgement;
        let difference = shift.map_or("–".to_owned(), |shift| format!("{:+.2}", shift.estimate));
        let interval = shift.map_or("–".to_owned(), |shift| {
            format!("{:+.2} to {:+.2} ({:.0} %)", shift.low, shift.high, 100.0 * shift.confidence)
        });
        let better = series.better.map_or("–", |better| better.name());
        let _ = writeln!(
            text,
            "| {} | {} | {} | {better} | {} | {before:.2} | {after:.2} | {difference} | {interval} | {} | {why} |",
            series.rig,
            series.name,
            series.unit,
            series.pairs().len(),
            if series.better.is_some() { name(*verdict) } else { "" },
        );
    }
    text
}

/// Every figure with all its values.
pub(super) fn figures(rows: &[Row<'_>]) -> Value {
    let figure = |Row { series, judgement }: &Row<'_>| {
        let pairs = series.pairs();
        let shift = judgement.shift.map(|shift| {
            json!({ "estimate": shift.estimate, "low": shift.low, "high": shift.high, "confidence": shift.confidence })
        });
        json!({
            "rig": series.rig, "name": series.name, "unit": series.unit,
            "better": series.better.map(|better| better.name()),
            "before": pairs.iter().map(|pair| pair.before).collect::<Vec<_>>(),
            "after": pairs.iter().map(|pair| pair.after).collect::<Vec<_>>(),
            "median_before": judgement.before, "median_after": judgement.after, "difference": shift,
            "relevant": judgement.relevant, "verdict": name(judgement.verdict), "why": judgement.why,
        })
    };
    rows.iter().map(figure).collect()
}

/// Numbers of figures by verdict, as text.
pub(super) fn counts(rows: &[Row<'_>]) -> String {
    let count = |verdict| {
        let judged = rows.iter().filter(|row| row.series.better.is_some());
        judged.filter(|row| row.judgement.verdict == verdict).count()
    };
    let [better, worse, unknown] = [Verdict::Better, Verdict::Worse, Verdict::NotKnown].map(count);
    format!("{better} better, {worse} worse, {unknown} not known")
}

#[cfg(test)]
mod tests {
    use super::{super::schedule::Side, *};

    fn collection() -> Collection {
        let mut all = Collection::default();
        for pair in 0..5 {
            for (side, rate) in [(Side::Before, 100.0), (Side::After, 80.0)] {
                let figure = |name: &str, better: Option<&str>| {
                    json!({ "rig": "speed", "name": name, "unit": "Mbit/s", "better": better,
                            "value": rate + f64::from(pair) })
                };
                let figures = [figure("up", Some("higher")), figure("raw", None)];
                all.take(&json!({ "figures": figures }), pair, side).expect("a report");
            }
        }
        all
    }

    #[test]
    fn the_table_says_medians_difference_interval_and_verdict() {
        let all = collection();
        let rows = rows(&all, 5.0);
        let table = table(&rows);
        let lines: Vec<&str> = table.lines().skip(2).collect();
        let up = "| speed | up | Mbit/s | higher | 5 | 102.00 | 82.00 | -20.00 | -20.00 to -20.00 (94 %) | worse |  |";
        assert_eq!(lines[0], up);
        assert!(
            lines[1].contains("| – | 5 |") && lines[1].ends_with("|  | neither is better |"),
            "{}",
            lines[1]
        );
        assert_eq!(counts(&rows), "0 better, 1 worse, 0 not known");
        assert!(rows[0].is_worse() && !rows[1].is_worse());
    }

    #[test]
    fn all_values_are_in_the_json() {
        let all = collection();
        let figures = figures(&rows(&all, 5.0));
        assert_eq!(figures[0]["before"], json!([100.0, 101.0, 102.0, 103.0, 104.0]));
        assert_eq!(figures[0]["verdict"], "worse");
        assert_eq!(figures[0]["difference"]["confidence"], 0.9375);
    }
}
