//! The accepted instruction counts, `benches/baseline.toml`, and the comparison with the counts of a run.
//!
//! In: the file, and the counts of a run of all benchmarks. Out: a verdict as text, or the file with new
//! counts. Always holds: a benchmark without an accepted count fails, and so does a count without a
//! benchmark.

use std::fmt::Write;

use serde::Deserialize;

use crate::{Counts, exceeds, percent};

/// Maximum difference between a count and the accepted one, percent. Smaller: another compiler or C library
/// than [`Baseline::counted_with`] may fail the comparison. Larger: a slower packet may pass unnoticed.
pub const THRESHOLD_PERCENT: f64 = 5.0;

/// Command that accepts new counts.
pub const ACCEPT_COMMAND: &str = "./dev micro --accept";

/// Accepted counts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Architecture of the counts, as named by Rust; counts of other architectures are not compared.
    pub architecture: String,
    /// Versions of the Rust compiler, C compiler, C library and valgrind; other versions count slightly
    /// differently.
    pub counted_with: String,
    /// Instructions of each benchmark.
    pub instructions: Counts,
}

/// Counts that differ by more than [`THRESHOLD_PERCENT`], and counts that cannot be compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// More instructions than accepted.
    pub worse: Vec<String>,
    /// Fewer instructions than accepted.
    pub better: Vec<String>,
    /// Benchmarks without an accepted count.
    pub new: Vec<String>,
    /// Accepted counts without a benchmark.
    pub missing: Vec<String>,
}

impl Baseline {
    /// Parses the file.
    ///
    /// # Errors
    /// If `text` is not in the format of [`Baseline::to_text`]; the error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
    }

    /// The content of the file: one line per benchmark, sorted.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "# Instructions of each benchmark in the profile of the tests. `./dev test micro` compares with them, \
             `{ACCEPT_COMMAND}`\n# writes them. Do not edit.\narchitecture = \"{}\"\ncounted_with = \"{}\"\n\n[instructions]\n",
            self.architecture, self.counted_with
        );
        for (name, count) in &self.instructions {
            let _ = writeln!(text, "\"{name}\" = {count}");
        }
        text
    }

    /// Compares the counts of a run with the accepted ones.
    pub fn compare(&self, counts: &Counts) -> Verdict {
        let mut verdict = Verdict::default();
        for (name, &new) in counts {
            let Some(&old) = self.instructions.get(name) else {
                verdict.new.push(format!("{name}: {new} instructions, no number accepted"));
                continue;
            };
            let change = || format!("{name}: {old} accepted, {new} now ({:+.1} %)", percent(old, new));
            if exceeds(new, old, THRESHOLD_PERCENT) {
                verdict.worse.push(change());
            } else if exceeds(old, new, THRESHOLD_PERCENT) {
                verdict.better.push(change());
            }
        }
        let missing = self.instructions.keys().filter(|name| !counts.contains_key(*name));
        verdict.missing.extend(missing.map(|name| format!("{name}: no such benchmark ran")));
        verdict
    }
}

impl Verdict {
    /// Whether a benchmark is worse, or counts and benchmarks do not match.
    pub fn fails(&self) -> bool {
        [&self.worse, &self.new, &self.missing].iter().any(|list| !list.is_empty())
    }

    /// The verdict as text; empty if nothing differs. `counted_with` are the versions of this run.
    pub fn to_text(&self, baseline: &Baseline, counted_with: &str) -> String {
        let mut text = String::new();
        let mut section = |title: String, list: &[String]| {
            if !list.is_empty() {
                let _ = writeln!(text, "{title}\n  {}", list.join("\n  "));
            }
        };
        section(format!("more than {THRESHOLD_PERCENT} % worse than accepted:"), &self.worse);
        section("benchmarks without an accepted number:".to_owned(), &self.new);
        section("accepted numbers without a benchmark:".to_owned(), &self.missing);
        section(format!("more than {THRESHOLD_PERCENT} % better than accepted:"), &self.better);
        if text.is_empty() {
            return text;
        }
        if baseline.counted_with != counted_with {
            let _ = writeln!(
                text,
                "part of the difference may come from the tools: accepted with {}, counted with {counted_with}",
                baseline.counted_with
            );
        }
        let next = if self.fails() {
            format!(
                "make it cheaper, or if the new numbers are meant: {ACCEPT_COMMAND}, and commit benches/baseline.toml"
            )
        } else {
            format!("keep what was gained: {ACCEPT_COMMAND}, and commit benches/baseline.toml")
        };
        let _ = writeln!(text, "  next: {next}");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(list: &[(&str, u64)]) -> Counts {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn baseline(list: &[(&str, u64)]) -> Baseline {
        Baseline {
            architecture: "x86_64".to_owned(),
            counted_with: "rustc 1.0".to_owned(),
            instructions: counts(list),
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_sorted() {
        let baseline = baseline(&[("packet::split tcp4", 100), ("packet::join one", 7)]);
        let text = baseline.to_text();
        assert_eq!(Baseline::parse(&text), Ok(baseline));
        let lines: Vec<&str> = text.lines().skip_while(|line| *line != "[instructions]").skip(1).collect();
        assert_eq!(lines, ["\"packet::join one\" = 7", "\"packet::split tcp4\" = 100"]);
    }

    #[test]
    fn a_file_that_was_edited_badly_names_the_line() {
        let text = baseline(&[("a", 1)]).to_text().replace("= 1", "= one");
        assert!(Baseline::parse(&text).expect_err("no number").contains("line 7"));
    }

    #[test]
    fn five_percent_more_passes_and_a_little_beyond_fails() {
        let baseline = baseline(&[("a", 1000), ("b", 1000), ("short", 20)]);
        let verdict = baseline.compare(&counts(&[("a", 1050), ("b", 1051), ("short", 25)]));
        assert_eq!(verdict.worse, ["b: 1000 accepted, 1051 now (+5.1 %)"]);
        assert!(verdict.fails() && verdict.better.is_empty());
        let text = verdict.to_text(&baseline, "rustc 1.0");
        assert!(text.contains(ACCEPT_COMMAND) && !text.contains("tools"), "{text}");
    }

    #[test]
    fn better_counts_are_reported_and_pass() {
        let baseline = baseline(&[("a", 1000), ("b", 1000)]);
        let verdict = baseline.compare(&counts(&[("a", 953), ("b", 900)]));
        assert_eq!(verdict.better, ["b: 1000 accepted, 900 now (-10.0 %)"]);
        assert!(!verdict.fails());
        assert!(verdict.to_text(&baseline, "rustc 1.0").contains(ACCEPT_COMMAND));
    }

    #[test]
    fn a_new_benchmark_and_a_missing_one_have_to_be_accepted() {
        let (old, now) = (baseline(&[("a", 1000), ("old", 9)]), counts(&[("a", 1000), ("new", 9)]));
        let verdict = old.compare(&now);
        assert_eq!((verdict.new.len(), verdict.missing.len()), (1, 1));
        assert!(verdict.fails());
        let accepted = Baseline { instructions: now.clone(), ..old };
        assert_eq!(accepted.compare(&now), Verdict::default());
        assert_eq!(Verdict::default().to_text(&accepted, "rustc 2.0"), "");
    }

    #[test]
    fn other_tools_are_named_beside_a_difference() {
        let baseline = baseline(&[("a", 1000)]);
        let text = baseline.compare(&counts(&[("a", 2000)])).to_text(&baseline, "rustc 2.0");
        assert!(text.contains("accepted with rustc 1.0, counted with rustc 2.0"), "{text}");
    }
}
