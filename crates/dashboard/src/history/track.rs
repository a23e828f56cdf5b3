//! The values of one thing over time, in steps of equal length.

use std::collections::VecDeque;

use super::{Slots, Span};

/// The means of `N` values in each step. A step without values is unknown.
#[derive(Debug)]
pub(super) struct Track<const N: usize> {
    /// The steps before the present one; NaN: unknown.
    steps: VecDeque<[f32; N]>,
    /// The number of the present step; `None` before the first.
    present: Option<u64>,
    sums: [f32; N],
    counts: [u16; N],
}

impl<const N: usize> Default for Track<N> {
    fn default() -> Self {
        Self { steps: VecDeque::new(), present: None, sums: [0.0; N], counts: [0; N] }
    }
}

impl<const N: usize> Track<N> {
    /// Adds values to the step `slot`, which is not before the present one.
    pub(super) fn add(&mut self, span: Span, slot: u64, values: [Option<f32>; N]) {
        let before = *self.present.get_or_insert(slot);
        let passed = usize::try_from(slot.saturating_sub(before)).unwrap_or(usize::MAX);
        if passed > 0 {
            self.push(span, self.means());
            (1..passed.min(span.steps() + 1)).for_each(|_| self.push(span, [f32::NAN; N]));
            (self.present, self.sums, self.counts) = (Some(slot), [0.0; N], [0; N]);
        }
        for ((sum, count), value) in self.sums.iter_mut().zip(&mut self.counts).zip(values) {
            if let Some(value) = value {
                *sum += value;
                *count = count.saturating_add(1);
            }
        }
    }

    fn push(&mut self, span: Span, values: [f32; N]) {
        if self.steps.len() >= span.steps() {
            self.steps.pop_front();
        }
        if self.steps.capacity() == self.steps.len() {
            // Never more than the span needs, and little for what is there for a moment.
            let wanted = (self.steps.len() * 2).clamp(16, span.steps());
            self.steps.reserve_exact(wanted - self.steps.len());
        }
        self.steps.push_back(values);
    }

    fn means(&self) -> [f32; N] {
        let mut means = self.sums;
        for (mean, count) in means.iter_mut().zip(self.counts) {
            *mean = if count == 0 { f32::NAN } else { *mean / f32::from(count) };
        }
        means
    }

    /// Whether there was a value within the span before the step `slot`.
    pub(super) fn is_within(&self, span: Span, slot: u64) -> bool {
        self.present.is_some_and(|present| slot.saturating_sub(present) < span.steps() as u64)
    }

    /// The values with the number `index` in the steps `slots`, rounded to 1/`precision`.
    pub(super) fn values(&self, index: usize, slots: Slots, precision: f32) -> Vec<Option<f32>> {
        let rounded = |value: f32| (!value.is_nan()).then(|| (value * precision).round() / precision);
        let Some(present) = self.present else { return vec![None; (slots.end - slots.begin) as usize] };
        let first = present.saturating_sub(self.steps.len() as u64);
        let value = |slot: u64| match slot {
            slot if slot == present => rounded(self.means()[index]),
            slot if (first..present).contains(&slot) => rounded(self.steps[(slot - first) as usize][index]),
            _ => None,
        };
        (slots.begin..slots.end).map(value).collect()
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.steps.capacity() * size_of::<[f32; N]>()
    }
}
