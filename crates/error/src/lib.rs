//! The error with which a client or a server ends.
//!
//! In: errors of the crates below. Out: one sentence for people, and their next step where it is known.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::io;

use mpvpn_identity::tls::CertificateRefusal;
use mpvpn_os::OsError;
use mpvpn_quic::SetupError;
use mpvpn_tunnel::ClientError;

/// Why a client or a server could not start, or ended without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A file, an option or a credential is not usable.
    #[error("{0}")]
    Control(#[from] mpvpn_input::Error),
    /// The certificate of the server was not accepted.
    #[error("{0}")]
    Refused(#[from] CertificateRefusal),
    /// The kernel refused something.
    #[error("{0}")]
    Os(#[from] OsError),
    /// QUIC cannot be set up.
    #[error("{0}")]
    Setup(#[from] SetupError),
    /// The tunnel has ended.
    #[error("{0}")]
    Tunnel(#[from] ClientError),
    /// The addresses of this machine cannot be read; the rules of where clients may connect depend on them.
    #[error("cannot read the addresses of this machine: {0}")]
    Addresses(String),
    /// The server's name cannot be resolved to an address.
    #[error("the name {name} cannot be resolved: {source}")]
    Unresolved {
        /// The name.
        name: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// An I/O operation failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// The operation, as a verb phrase.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The app in which the client runs refused a socket (its `protect` callback returned false).
    #[error("the app does not let the socket of a link be used")]
    Unprotected,
    /// The kernel does not list the links of this machine.
    #[error(
        "the kernel does not tell the links of this machine: {0} (an app that may not ask gives them itself)"
    )]
    NoLinks(OsError),
    /// The process lacks the privilege to create a TUN device and routes.
    #[error("a TUN device and routes need root (or CAP_NET_ADMIN): run this with sudo")]
    Privilege,
}

impl RunError {
    /// The user's next step, where it is known.
    pub fn next_step(&self) -> Option<&'static str> {
        match self {
            Self::Tunnel(ClientError::AccessDenied { .. }) => Some(
                "ask for access at the server: `mpvpn user list` there shows the users, to whom certificates of clients have to belong",
            ),
            Self::Tunnel(ClientError::CertificateRefused(_)) => Some(
                "name with --cert and --key a certificate that is valid now and that a CA of the server's `client-ca` signed",
            ),
            _ => None,
        }
    }

    /// For `map_err`: turns an I/O error of the operation `what` into an [`RunError::Io`].
    pub fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
