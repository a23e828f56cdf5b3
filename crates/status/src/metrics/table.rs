//! Definitions of metrics. The tables themselves stand beside the types in [`crate`].

/// The type of a metric.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A value that only grows, and restarts at 0.
    Counter,
    /// A value that may grow and shrink.
    Gauge,
}

/// A metric that is not repeated for each class, link or path.
#[derive(Clone, Copy, Debug)]
pub struct SingleMetric {
    /// Its name without the prefix.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: Kind,
    /// Its meaning, in a sentence.
    pub help: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
}

/// A metric with a sample for each item: each class, link or path.
#[derive(Debug)]
pub struct Metric<T> {
    /// Its name without the prefix.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: Kind,
    /// Its meaning, in a sentence.
    pub help: &'static str,
    /// The value of an item; `None`: the item has no sample.
    pub value: fn(&T) -> Option<f64>,
}

/// A value that can be a sample of a metric.
pub trait ToSample {
    /// The number.
    fn to_sample(self) -> Option<f64>;
}

impl ToSample for f64 {
    fn to_sample(self) -> Option<f64> {
        Some(self)
    }
}

impl ToSample for u64 {
    fn to_sample(self) -> Option<f64> {
        Some(self as f64)
    }
}

impl ToSample for bool {
    fn to_sample(self) -> Option<f64> {
        Some(f64::from(self))
    }
}

impl<T: ToSample> ToSample for Option<T> {
    fn to_sample(self) -> Option<f64> {
        self.and_then(T::to_sample)
    }
}

/// A table of metrics: name, type, value of an item, and help text.
macro_rules! metrics {
    ($item:ident: $type:ty; $($name:literal $kind:ident $value:expr, $help:literal;)+) => {
        &[$($crate::metrics::Metric::<$type> {
            name: $name,
            kind: $crate::metrics::Kind::$kind,
            help: $help,
            value: |$item| $crate::metrics::ToSample::to_sample($value),
        }),+]
    };
}
pub(crate) use metrics;
