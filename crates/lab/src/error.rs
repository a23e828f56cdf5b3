use std::{io, path::PathBuf, time::Duration};

use crate::spec::ParseSpecError;

/// Why something in the lab did not work.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The machine lacks something that labs need; each entry says what and how to get it.
    #[error("the lab cannot run here:\n  - {}", .0.join("\n  - "))]
    Missing(Vec<String>),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// What the kernel answered.
        source: io::Error,
    },
    /// A helper program ended with an error.
    #[error("`{program}` failed ({status}): {stderr}")]
    Command {
        /// The command line.
        program: String,
        /// How it ended.
        status: String,
        /// The end of what it wrote to stderr.
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
    /// The lab was asked for more links than its address plan has room for.
    #[error("{0} links were asked for, a lab can have 1 to 64")]
    LinkCount(usize),
    /// Rate, delay and loss exist on emulated links only.
    #[error("link {0} is a plain veth pair: it can go down and up, but has no rate, delay or loss to change")]
    NotEmulated(usize),
    /// The thread that moves the frames has ended.
    #[error("the emulator of this lab has stopped")]
    EmulatorStopped,
    /// The name of a lab is not usable.
    #[error("`{0}` cannot be the name of a lab: use 1 to 32 letters, digits, `-` or `_`")]
    BadName(String),
    /// The name of a lab is taken.
    #[error("a lab named `{0}` is already running: choose another with --name")]
    NameTaken(String),
    /// No running lab could be chosen.
    #[error("{0}")]
    WhichLab(String),
    /// A request to change a link makes no sense.
    #[error(
        "`{0}` is no change of a link: there are down, up, and settings such as loss=10%; the direction is up, down or both"
    )]
    Change(String),
    /// A running lab refused a request.
    #[error("the lab says: {0}")]
    Refused(String),
    /// A file of `tests/scenarios/files` is not as it must be.
    #[error("the scenario {name} cannot be used: {why}")]
    Scenario {
        /// Which one.
        name: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The `mpvpn` binary was not found.
    #[error("the mpvpn binary is not at any of {0:?}: build it, or name it with MPVPN_BIN")]
    NoBinary(Vec<PathBuf>),
    /// One end of the tunnel ended or did not come up in time.
    #[error("the {role} did not come up within {waited:.1?} ({why})\n{logs}")]
    VpnNotUp {
        /// `server` or `client`.
        role: String,
        /// How long it had.
        waited: Duration,
        /// What was seen last.
        why: String,
        /// The ends of the logs of both sides.
        logs: String,
    },
    /// A program answered something that cannot be understood.
    #[error("{what}: expected {expected}, got `{got}`")]
    Unexpected {
        /// Where it came from.
        what: String,
        /// What should have come.
        expected: &'static str,
        /// The beginning of what came.
        got: String,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// Wraps an error of the operating system with what was attempted.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// The same for an error of a raw system call.
    pub(crate) fn sys(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let what = what.into();
        move |errno| Self::Io { what, source: errno.into() }
    }
}
