//! Decides whether a figure became better or worse.
//!
//! In: the values of a figure in pairs of runs, one with the binary before and one with the binary after,
//! soon after each other. Out: the medians, the difference with an interval, and a verdict.
//!
//! The method is nonparametric. If both binaries are equally good, the two runs of a pair are exchangeable,
//! so that the distribution of their difference is symmetric about zero. The estimate of the difference is
//! that of Hodges and Lehmann: the median of the Walsh averages (the means of any two differences, and each
//! difference itself). The interval reaches from one Walsh average to another, and the exact distribution of
//! Wilcoxon's signed-rank statistic says which. See J. L. Hodges and E. L. Lehmann, "Estimates of location
//! based on rank tests", Annals of Mathematical Statistics 34 (1963), and M. Hollander, D. A. Wolfe and E.
//! Chicken, "Nonparametric Statistical Methods", 3rd edition (2014), sections 3.1 to 3.3.
//!
//! A figure is better or worse if the interval excludes zero and the estimate is at least the relevant
//! difference. With fewer than [`FEW`] pairs the confidence of the interval is low. Then the gap between all
//! runs of one binary and all runs of the other must also exceed the range of the runs of either. Of figures
//! of two equal binaries, drawn from normal, exponential, log-normal, bimodal and Cauchy distributions, at
//! most 4.6 % are called worse after 2 pairs, 0.5 % after 3, 0.1 % after 4, 3.3 % after 5, and 0.6 % from 8
//! pairs on.

use crate::{figure::Better, median::median};

/// The least confidence of an interval of 8 pairs or more. With fewer pairs the interval is the widest that
/// there is, for 5 pairs that of 93.75 %. Lower: more false alarms. Higher: 10 pairs no longer show a
/// difference that one of them lacks.
const CONFIDENCE: f64 = 0.99;
/// Fewer pairs are few: their widest interval has a confidence of less than 93 %. Lower: more false alarms
/// after 3 and 4 pairs (12 % and 6 %). Higher: the usual 5 pairs show only differences that exceed the whole
/// spread.
const FEW: usize = 5;

/// The values of one figure in two runs, as far as they could be measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pair {
    pub(crate) before: Option<f64>,
    pub(crate) after: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Better,
    Worse,
    NotKnown,
}

/// The verdict on a figure and its reasons.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Judgement {
    /// Medians; not a number where nothing was measured.
    pub(crate) before: f64,
    pub(crate) after: f64,
    /// From before to after; `None` without a complete pair.
    pub(crate) shift: Option<Shift>,
    /// Smaller differences do not matter, in the unit of the figure.
    pub(crate) relevant: f64,
    pub(crate) verdict: Verdict,
    /// Why the verdict is not known, or what was not measured; may be empty.
    pub(crate) why: &'static str,
}

/// The estimated difference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shift {
    pub(crate) estimate: f64,
    /// The interval.
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// The probability with which such an interval has the true difference in it.
    pub(crate) confidence: f64,
}

/// Judges the pairs of a figure in which a difference of `threshold` percent of the median before is
/// relevant.
pub(crate) fn judge(pairs: &[Pair], better: Option<Better>, unit: &str, threshold: f64) -> Judgement {
    let before: Vec<f64> = pairs.iter().filter_map(|pair| pair.before).collect();
    let after: Vec<f64> = pairs.iter().filter_map(|pair| pair.after).collect();
    let both = |pair: &Pair| Some((pair.before?, pair.after?));
    let complete: Vec<(f64, f64)> = pairs.iter().filter_map(both).collect();
    let mut judgement = Judgement {
        before: median(before.clone()).unwrap_or(f64::NAN),
        after: median(after.clone()).unwrap_or(f64::NAN),
        shift: None,
        relevant: (median(before.clone()).unwrap_or(f64::NAN).abs() * threshold / 100.0)
            .max(least_relevant(unit)),
        verdict: Verdict::NotKnown,
        why: "",
    };
    if !complete.is_empty() {
        judgement.shift = Some(shift(complete.iter().map(|(before, after)| after - before).collect()));
    }
    let (failed_before, failed_after) = (pairs.len() - before.len(), pairs.len() - after.len());
    (judgement.verdict, judgement.why) = match (better, judgement.shift) {
        (None, _) => (Verdict::NotKnown, "neither is better"),
        _ if failed_after * 2 > pairs.len() && failed_before == 0 => {
            (Verdict::Worse, "cannot be measured any more")
        }
        (_, None) => (Verdict::NotKnown, "was not measured with both"),
        (Some(better), Some(shift)) => verdict(&complete, shift, better, judgement.relevant),
    };
    judgement
}

fn verdict(pairs: &[(f64, f64)], shift: Shift, better: Better, relevant: f64) -> (Verdict, &'static str) {
    if pairs.len() < 2 {
        return (Verdict::NotKnown, "one pair shows no spread");
    }
    if shift.low <= 0.0 && shift.high >= 0.0 {
        return (Verdict::NotKnown, "the interval includes 0");
    }
    if shift.estimate.abs() < relevant {
        return (Verdict::NotKnown, "too small to be relevant");
    }
    if pairs.len() < FEW && !lie_apart(pairs) {
        return (Verdict::NotKnown, "too few pairs for so much spread");
    }
    if (shift.estimate > 0.0) == (better == Better::Higher) {
        (Verdict::Better, "")
    } else {
        (Verdict::Worse, "")
    }
}

/// Whether the gap between all values before and all values after exceeds the range of either.
fn lie_apart(pairs: &[(f64, f64)]) -> bool {
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let before = range(&mut pairs.iter().map(|pair| pair.0));
    let after = range(&mut pairs.iter().map(|pair| pair.1));
    let gap = (after.0 - before.1).max(before.0 - after.1);
    gap > (before.1 - before.0).max(after.1 - after.0)
}

/// Estimates the true difference from the measured ones, of which there is at least one.
fn shift(differences: Vec<f64>) -> Shift {
    let count = differences.len();
    let mut averages: Vec<f64> = (0..count)
        .flat_map(|one| (one..count).map(move |other| (one, other)))
        .map(|(one, other)| f64::midpoint(differences[one], differences[other]))
        .collect();
    averages.sort_by(f64::total_cmp);
    let (cut, confidence) = cut(count);
    let (low, high) = (averages[cut], averages[averages.len() - 1 - cut]);
    Shift { estimate: median(averages).unwrap_or(f64::NAN), low, high, confidence }
}

/// The number of Walsh averages of `count` differences below the interval, which is also the number above it,
/// and the confidence of the interval, at least [`CONFIDENCE`] if possible.
fn cut(count: usize) -> (usize, f64) {
    // Probability of each value of the signed-rank statistic: each rank counts or not, both with probability
    // 1/2.
    let mut probability = vec![1.0];
    for rank in 1..=count {
        let mut next = vec![0.0; probability.len() + rank];
        for (value, probability) in probability.iter().enumerate() {
            next[value] += probability / 2.0;
            next[value + rank] += probability / 2.0;
        }
        probability = next;
    }
    let mut outside = probability[0];
    let mut best = (0, 1.0 - 2.0 * outside);
    for (cut, probability) in probability.iter().enumerate().skip(1) {
        outside += probability;
        if 1.0 - 2.0 * outside < CONFIDENCE {
            break;
        }
        best = (cut, 1.0 - 2.0 * outside);
    }
    best
}

/// The least relevant difference, in the unit of the figure: below it a percentage of a small value would be
/// less than the resolution of the measurement, or than users notice.
fn least_relevant(unit: &str) -> f64 {
    match unit {
        // The spread of pings through network namespaces on an idle machine.
        "ms" => 0.02,
        "s" => 0.01,
        // Points: of packets lost, of a link used.
        "%" => 0.1,
        "×" => 0.01,
        "MB" => 0.5,
        "kB" => 1.0,
        "CPU-s/GB" => 0.05,
        // Packets, connections.
        "" => 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use mpvpn_tests::random::Random;

    use super::*;

    fn pairs(before: &[f64], after: &[f64]) -> Vec<Pair> {
        let pair = |(before, after): (&f64, &f64)| Pair { before: Some(*before), after: Some(*after) };
        before.iter().zip(after).map(pair).collect()
    }

    fn verdict_of(before: &[f64], after: &[f64], better: Better) -> Verdict {
        judge(&pairs(before, after), Some(better), "Mbit/s", 5.0).verdict
    }

    #[test]
    fn a_clear_difference_is_better_or_worse_by_the_direction_of_the_figure() {
        let (low, high) = ([100.0, 102.0, 98.0, 101.0, 99.0], [120.0, 119.0, 122.0, 121.0, 118.0]);
        assert_eq!(verdict_of(&low, &high, Better::Higher), Verdict::Better);
        assert_eq!(verdict_of(&low, &high, Better::Lower), Verdict::Worse);
        assert_eq!(verdict_of(&high, &low, Better::Higher), Verdict::Worse);
        assert_eq!(verdict_of(&high, &low, Better::Lower), Verdict::Better);
    }

    #[test]
    fn the_difference_is_estimated_with_an_interval() {
        let judgement = judge(
            &pairs(&[100.0, 100.0, 100.0, 100.0, 100.0], &[81.0, 82.0, 83.0, 84.0, 85.0]),
            Some(Better::Higher),
            "Mbit/s",
            5.0,
        );
        assert_eq!((judgement.before, judgement.after, judgement.relevant), (100.0, 83.0, 5.0));
        let shift = judgement.shift.expect("complete pairs");
        assert_eq!((shift.estimate, shift.low, shift.high, shift.confidence), (-17.0, -19.0, -15.0, 0.9375));
    }

    #[test]
    fn a_machine_that_drifts_does_not_hide_a_difference_within_the_pairs() {
        let before = [100.0, 140.0, 90.0, 170.0, 120.0];
        let after = before.map(|value| value * 0.9);
        assert_eq!(verdict_of(&before, &after, Better::Higher), Verdict::Worse);
    }

    #[test]
    fn noise_is_not_known() {
        let (before, after) = ([18.0, 47.0, 30.0, 22.0, 41.0], [40.0, 20.0, 33.0, 45.0, 19.0]);
        let judgement = judge(&pairs(&before, &after), Some(Better::Lower), "ms", 5.0);
        assert_eq!((judgement.verdict, judgement.why), (Verdict::NotKnown, "the interval includes 0"));
    }

    #[test]
    fn irrelevant_differences_are_not_known_however_certain() {
        let judgement = judge(&pairs(&[100.0; 9], &[96.0; 9]), Some(Better::Higher), "Mbit/s", 5.0);
        assert_eq!((judgement.verdict, judgement.why), (Verdict::NotKnown, "too small to be relevant"));
        // 30 % more, but of a few microseconds.
        let judgement = judge(&pairs(&[0.05; 9], &[0.065; 9]), Some(Better::Lower), "ms", 5.0);
        assert_eq!(judgement.verdict, Verdict::NotKnown);
    }

    #[test]
    fn without_any_spread_equal_is_not_known_and_different_is_judged() {
        assert_eq!(verdict_of(&[0.0; 5], &[0.0; 5], Better::Lower), Verdict::NotKnown);
        assert_eq!(verdict_of(&[0.0; 5], &[2.0; 5], Better::Lower), Verdict::Worse);
        assert_eq!(verdict_of(&[10.0; 2], &[20.0; 2], Better::Higher), Verdict::Better);
    }

    #[test]
    fn two_pairs_are_judged_only_if_all_runs_lie_apart() {
        assert_eq!(verdict_of(&[100.0, 104.0], &[80.0, 83.0], Better::Higher), Verdict::Worse);
        let judgement = judge(&pairs(&[100.0, 130.0], &[80.0, 95.0]), Some(Better::Higher), "Mbit/s", 5.0);
        assert_eq!(judgement.why, "too few pairs for so much spread");
        assert_eq!(verdict_of(&[100.0], &[50.0], Better::Higher), Verdict::NotKnown);
    }

    #[test]
    fn a_figure_that_can_no_longer_be_measured_is_worse() {
        let pair = |before, after| Pair { before, after };
        let judged = |pairs: &[Pair]| judge(pairs, Some(Better::Higher), "", 5.0).verdict;
        assert_eq!(judged(&[pair(Some(1.0), None); 5]), Verdict::Worse);
        // The binary of before does not know what the rig asks of it.
        assert_eq!(judged(&[pair(None, Some(1.0)); 5]), Verdict::NotKnown);
        // The machine: both failed now and then.
        let mut some = vec![pair(Some(1.0), Some(1.0)); 3];
        some.extend([pair(None, Some(1.0)), pair(Some(1.0), None)]);
        assert_eq!(judged(&some), Verdict::NotKnown);
        assert_eq!(judge(&[], Some(Better::Higher), "", 5.0).verdict, Verdict::NotKnown);
    }

    #[test]
    fn a_figure_of_which_neither_is_better_is_never_judged() {
        assert_eq!(judge(&pairs(&[1.0; 9], &[9.0; 9]), None, "", 5.0).verdict, Verdict::NotKnown);
    }

    #[test]
    fn the_interval_is_that_of_the_tables() {
        // Hollander, Wolfe and Chicken, table of the signed-rank statistic: P(T+ <= 3) = 0.0049 of 10
        // differences.
        let confidences = [2, 5, 8, 10].map(|count| {
            let (cut, confidence) = cut(count);
            (cut, (confidence * 1e4).round() / 1e4)
        });
        assert_eq!(confidences, [(0, 0.5), (0, 0.9375), (0, 0.9922), (3, 0.9902)]);
    }

    /// Random values of several distributions.
    struct Noise(Random);

    impl Noise {
        fn uniform(&mut self) -> f64 {
            (self.0.bits() >> 11) as f64 / (1u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (TAU * self.uniform()).cos()
        }

        fn values(&mut self, kind: &str, count: usize) -> Vec<f64> {
            let one = |noise: &mut Self| match kind {
                "normal" => 100.0 + 20.0 * noise.normal(),
                "exponential" => 20.0 - 30.0 * (1.0 - noise.uniform()).ln(),
                "log-normal" => (3.5 + 0.5 * noise.normal()).exp(),
                "bimodal" => 20.0 + noise.uniform() + if noise.uniform() < 0.2 { 100.0 } else { 0.0 },
                "Cauchy" => 100.0 + 10.0 * (TAU / 2.0 * (noise.uniform() - 0.5)).tan(),
                kind => panic!("no distribution {kind}"),
            };
            (0..count).map(|_| one(self)).collect()
        }
    }

    #[test]
    fn of_equal_binaries_few_figures_are_called_worse() {
        let mut noise = Noise(Random::new(0x5eed));
        for kind in ["normal", "exponential", "log-normal", "bimodal", "Cauchy"] {
            for (count, most) in [(2, 5.0), (3, 1.0), (4, 0.5), (5, 4.0), (6, 2.5), (8, 1.0), (10, 1.0)] {
                let runs = 4000;
                let is_worse = |_: &usize| {
                    let (before, after) = (noise.values(kind, count), noise.values(kind, count));
                    verdict_of(&before, &after, Better::Higher) == Verdict::Worse
                };
                let percent = 100.0 * (0..runs).filter(is_worse).count() as f64 / runs as f64;
                assert!(percent <= most, "{kind}, {count} pairs: {percent} % are called worse");
            }
        }
    }

    #[test]
    fn a_difference_of_three_times_the_spread_is_seen_in_most_comparisons() {
        let mut noise = Noise(Random::new(0x5eed));
        for (count, least) in [(5, 85), (10, 97)] {
            let is_seen = |_: &usize| {
                let before = noise.values("normal", count);
                let after: Vec<f64> =
                    noise.values("normal", count).iter().map(|value| value - 60.0).collect();
                verdict_of(&before, &after, Better::Higher) == Verdict::Worse
            };
            let seen = (0..1000).filter(is_seen).count() / 10;
            assert!(seen >= least, "{count} pairs: seen in {seen} %");
        }
    }
}
