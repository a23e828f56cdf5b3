//! How the metrics of classes, links and paths are defined: a table beside each of these types in [`crate::status`].

/// What a number is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// It only grows, until it begins anew.
    Counter,
    /// Any other.
    Gauge,
}

/// A metric that is written by itself, not for each of several things.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SingleMetric {
    /// Its name without the prefix.
    pub(crate) name: &'static str,
    /// What its number is.
    pub(crate) kind: Kind,
    /// What it tells, in a sentence.
    pub(crate) help: &'static str,
    /// The names of its labels.
    pub(crate) labels: &'static [&'static str],
}

/// A metric of each of several things.
#[derive(Debug)]
pub(crate) struct Metric<T> {
    /// Its name without the prefix.
    pub(crate) name: &'static str,
    /// What its number is.
    pub(crate) kind: Kind,
    /// What it tells, in a sentence.
    pub(crate) help: &'static str,
    /// The number; a thing without one has none.
    pub(crate) value: fn(&T) -> Option<f64>,
}

/// A number of a metric, or none.
pub(crate) trait ToSample {
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

/// A table of metrics: a name, what its number is, the number of a thing, and what it tells.
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
