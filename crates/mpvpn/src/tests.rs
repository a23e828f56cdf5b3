//! Tests of the whole program: its reference is what the code defines.

mod reference;
