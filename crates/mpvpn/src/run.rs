//! Where the command line meets the engine and the lab.

pub(crate) use mpvpn_engine::{
    client::{check::run as check, run as client},
    server::{rights, run as server},
};
pub(crate) use mpvpn_lab::cli::{LabCommand, run as lab};
