//! Tests of the whole program: its reference is what the code defines.

pub(crate) mod errors;
mod reference;
