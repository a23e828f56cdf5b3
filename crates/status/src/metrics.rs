//! The metrics of a process, in the text format of Prometheus.
//!
//! In: a [`Status`](crate::Status). Out: text. Always holds: the number of series depends on the classes,
//! links and paths of this machine, and on the number of users that have series, not on the clients of a
//! server.

mod table;
mod text;
mod users;

pub(crate) use table::metrics;
pub use table::{Kind, Metric, SingleMetric, ToSample};
pub use text::{SINGLE_METRICS, exposition};
pub use users::{UserFigures, UserSeries};
