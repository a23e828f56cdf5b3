//! The program `mpvpn-lab`; see the library of this package.
// This crate is an edge: it talks to the kernel, the clock, files and other processes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

fn main() -> std::process::ExitCode {
    mpvpn_lab_cli::perform(std::env::args_os())
}
