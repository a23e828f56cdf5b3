use std::{io::ErrorKind, path::PathBuf};

use crate::groups;

/// Errors of options, files, certificates and the local API. Each names the option, file or socket that it is
/// about.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option, or a combination of options, is not valid.
    #[error("{why}")]
    Usage {
        /// One sentence without a full stop.
        why: String,
        /// The next step for the user.
        next: String,
    },
    /// The machine lacks something that a command needs.
    #[error("{why}")]
    Machine {
        /// One sentence without a full stop.
        why: String,
        /// The next step for the user.
        next: String,
    },
    /// A configuration file with a mistake at a known place.
    #[error("{}, line {line}, column {column}: {why}\n{shown}", file.display())]
    ConfigFile {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// Column in characters, counted from 1.
        column: usize,
        /// One sentence without a full stop.
        why: String,
        /// The line itself with the mistake underlined.
        shown: String,
    },
    /// A file or folder that could not be read, written or made.
    #[error("cannot {doing} {}: {source}", path.display())]
    File {
        /// The verb: `read`, `write`, `create`.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A file whose content is not what it should be.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The content of the file.
        found: String,
    },
    /// A private key that does not belong to the certificate.
    #[error("the private key {} does not belong to the certificate {}", key.display(), cert.display())]
    KeyMismatch {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// A certificate that could not be made.
    #[error("cannot make a certificate: {0}")]
    MakeCertificate(#[from] rcgen::Error),
    /// The TLS library refused the configuration.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The system's random number generator failed.
    #[error("the kernel gives no random numbers")]
    Random,
    /// Metrics or the dashboard cannot be offered at this address.
    #[error("cannot offer {} at {address}: {source}", if *option == "metrics" { "metrics" } else { "the dashboard" })]
    MonitoringAddress {
        /// The option with the address: `metrics` or `dashboard`.
        option: &'static str,
        /// The address.
        address: std::net::SocketAddr,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Connections cannot be taken at this address.
    #[error("cannot listen on TCP {address}: {source}")]
    TcpAddress {
        /// The address.
        address: std::net::SocketAddr,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The API's socket belongs to another process.
    #[error("{} is in use by a running process{}", path.display(), of_pid(*pid))]
    SocketInUse {
        /// The socket.
        path: PathBuf,
        /// Process ID of the listener, if the kernel reports it (SO_PEERCRED).
        pid: Option<i32>,
    },
    /// A path that is too long for a unix socket address (unix(7)).
    #[error("{} is too long for a unix socket: {bytes} bytes, at most 100", path.display())]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        bytes: usize,
    },
    /// No process answers at the API's socket.
    #[error("nothing answers at {}: {source}", path.display())]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// This user may not ask the process.
    #[error("permission denied: use sudo{0}")]
    Denied(
        /// The remedy beside sudo; empty if there is none.
        &'static str,
    ),
    /// The process at the API's socket gave an answer that is not one of the API.
    #[error("the process at {} gave an answer that is not understood: {why}", path.display())]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// The answer that came instead.
        why: String,
    },
}

impl Error {
    /// A mistake in the options, and what to do instead.
    pub fn usage(why: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Usage { why: why.into(), next: next.into() }
    }

    /// An error of the machine: a missing part, and the next step.
    pub fn machine(why: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Machine { why: why.into(), next: next.into() }
    }

    /// This user may not do it; `join` is the remedy where this machine has the group for that.
    pub fn denied(join: &'static str) -> Self {
        Self::Denied(groups::id(groups::READERS).map_or("", |_| join))
    }

    /// For `map_err` on I/O: `.map_err(Error::file("read", path))`.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    /// An error of the file `path`, in which something else than `expected` was found.
    pub fn content(path: impl Into<PathBuf>, expected: &'static str, found: impl ToString) -> Self {
        Self::Content { path: path.into(), expected, found: found.to_string() }
    }

    /// Whether options or the configuration file caused the error (exit code 2).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Usage { .. } | Self::ConfigFile { .. })
    }

    /// The user's next step after the error.
    pub fn next_step(&self) -> String {
        match self {
            Self::Usage { next, .. } | Self::Machine { next, .. } => next.clone(),
            Self::ConfigFile { file, .. } => format!("correct {} and start again", file.display()),
            Self::File { source, .. } if source.kind() == ErrorKind::PermissionDenied => {
                "run it as root, or give this user access to the file".into()
            }
            Self::File { .. } => "check that the path is right and its folder exists".into(),
            Self::Content { path, .. } => format!("correct or replace {}", path.display()),
            Self::KeyMismatch { .. } => "give the private key of this certificate with --key".into(),
            Self::MakeCertificate(_) => {
                "make a certificate with `openssl req -x509` and give it with --cert and --key".into()
            }
            Self::Tls(_) => "check the certificate with `openssl x509 -text -noout -in FILE`".into(),
            Self::Random => "check that nothing, as a seccomp filter, forbids getrandom(2)".into(),
            Self::MonitoringAddress { option, address, source } => match source.kind() {
                ErrorKind::AddrInUse => format!(
                    "choose another port with --{option}, or end the process that listens there: `ss -ltnp sport = :{}` names it",
                    address.port()
                ),
                ErrorKind::AddrNotAvailable => {
                    format!(
                        "give an address of this machine with --{option}, as 127.0.0.1, or 0.0.0.0 for all"
                    )
                }
                ErrorKind::PermissionDenied => {
                    format!("choose a port above 1023 with --{option}, or run it as root")
                }
                _ => format!("choose another address with --{option}"),
            },
            Self::TcpAddress { address, source } => match source.kind() {
                ErrorKind::AddrInUse => format!(
                    "end the process that has the port: `ss -ltnp sport = :{}` names it; or choose another port with \
                     --listen, or turn TCP off with --tcp off",
                    address.port()
                ),
                ErrorKind::AddrNotAvailable => "give an address of this machine with --listen".into(),
                _ => "choose another port with --listen, or turn TCP off with --tcp off".into(),
            },
            Self::SocketInUse { .. } => {
                "stop that process, or give this one another --tun-name, after which its socket is named; a proxy: another --name"
                    .into()
            }
            Self::SocketPath { .. } => "choose a shorter path with --api-socket".into(),
            Self::NoAnswer { .. } => {
                "start `mpvpn server` or `mpvpn client`, or name its socket with --api-socket".into()
            }
            Self::Denied(_) => "run it with sudo; `id` shows the groups of this login".into(),
            Self::BadAnswer { .. } => {
                "check that the process at the socket is mpvpn, and of the version of `mpvpn --version`"
                    .into()
            }
        }
    }
}

fn of_pid(pid: Option<i32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
}
