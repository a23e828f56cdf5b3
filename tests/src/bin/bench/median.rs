//! The value in the middle.

/// The median of the values that are numbers; `None` without any.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| !value.is_nan());
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_values_or_between_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, f64::NAN, 2.0]), Some(3.0));
        assert_eq!(median(Vec::new()), None);
    }
}
