//! The report of `mpvpn measure`: tables in Markdown, and pictures.
//!
//! In: the results. Out: text and SVG. Always holds: both are functions of the results alone.

pub(crate) mod markdown;
pub(crate) mod pictures;
pub(crate) mod summary;
