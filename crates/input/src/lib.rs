//! Reading what people give: words and numbers of options, configuration files, folders. Errors name the
//! option or file, and say what to do next ([`Error::next_step`]).
//!
//! In: text and files. Out: values ([`values::Text`]), their JSON schemas ([`schema`]), file contents. Always
//! holds: every file that holds a secret is made with mode 0600 before the secret is written to it; input is
//! bounded and never panics.
#![forbid(unsafe_code)]
// This crate is at the edge: files are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod dirs;
mod error;
pub mod files;
pub mod groups;
pub mod role;
pub mod rules;
pub mod schema;
pub mod shared;
pub mod short_text;
mod types;
pub mod values;

pub use error::Error;

/// The result of the functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
