use std::{io, time::Duration};

use crate::spec::ParseSpecError;

/// An error of a lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The machine does not meet the requirements of labs; each entry names one and its remedy.
    #[error("the lab cannot run here:\n  - {}", .0.join("\n  - "))]
    MissingRequirements(Vec<String>),
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Io {
        /// The attempted operation.
        operation: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A helper program failed.
    #[error("`{program}` failed ({status}): {stderr}")]
    Command {
        /// The command line.
        program: String,
        /// Its exit status.
        status: String,
        /// Its stderr.
        stderr: String,
    },
    /// A link description cannot be read.
    #[error(transparent)]
    Spec(#[from] ParseSpecError),
    /// The lab has no such link.
    #[error("there is no link {wanted}: this lab has links 1 to {count}")]
    NoSuchLink {
        /// The link asked for, counted from 1.
        wanted: usize,
        /// How many there are.
        count: usize,
    },
    /// The number of links is 0, or exceeds the address plan.
    #[error("{0} links were asked for, a lab can have 1 to 64")]
    LinkCount(usize),
    /// The operation needs an emulated link, and this one is a veth pair.
    #[error("link {0} is a plain veth pair: it can go down and up, but has no rate, delay or loss to change")]
    NotEmulated(usize),
    /// The thread that forwards the frames has ended.
    #[error("the emulator of this lab has stopped")]
    EmulatorStopped,
    /// The name for a lab has invalid characters or a wrong length.
    #[error("`{0}` cannot be the name of a lab: use 1 to 32 letters, digits, `-` or `_`")]
    BadName(String),
    /// Another running lab has this name.
    #[error("a lab named `{0}` is already running: choose another with --name")]
    NameTaken(String),
    /// No lab is running, or several are and none was named.
    #[error("{0}")]
    NoLabChosen(String),
    /// A request to change a link has an unknown change or direction.
    #[error(
        "`{0}` is no change of a link: use down, up, or settings such as loss=10%; a direction is up, down or both"
    )]
    InvalidChange(String),
    /// A running lab refused a request.
    #[error("the lab refused the change: {0}")]
    Refused(String),
    /// A file of `tests/scenarios/files` is invalid.
    #[error("the scenario {name} cannot be used: {reason}")]
    Scenario {
        /// The name of the scenario.
        name: &'static str,
        /// Why the file is invalid.
        reason: String,
    },
    /// The program `mpvpn` was not found.
    #[error(
        "the program mpvpn is neither beside mpvpn-lab nor in PATH: install it, or name it with MPVPN_BIN"
    )]
    NoBinary,
    /// The server or the client ended, or did not come up in time.
    #[error("the {role} did not come up within {waited:.1?} ({reason})\n{logs}")]
    VpnNotUp {
        /// `server` or `client`.
        role: String,
        /// The time it had.
        waited: Duration,
        /// Its last state or error.
        reason: String,
        /// The ends of the logs of server and client.
        logs: String,
    },
    /// A program gave an unexpected answer.
    #[error("{what}: expected {expected}, got `{got}`")]
    Unexpected {
        /// The source of the answer.
        what: String,
        /// The expected answer.
        expected: &'static str,
        /// The beginning of the answer.
        got: String,
    },
    /// SIGINT, SIGTERM or SIGHUP was received.
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// Wraps an error of the operating system with the attempted operation.
    pub fn io(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    /// As [`Self::io`], for the error type of rustix.
    pub fn sys(operation: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let operation = operation.into();
        move |errno| Self::Io { operation, source: errno.into() }
    }
}
