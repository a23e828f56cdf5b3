use std::io;

use mpvpn_control::tls::CertificateRefusal;
use mpvpn_os::OsError;
use mpvpn_quic::SetupError;
use mpvpn_tunnel::ClientError;

/// Why a client or a server could not start, or ended before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file, an option or a credential is not usable.
    #[error("{0}")]
    Control(#[from] mpvpn_control::Error),
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
    /// The URI template of the server is malformed.
    #[error("{0}")]
    Template(#[from] mpvpn_masque::template::TemplateError),
    /// What clients may connect to depends on them.
    #[error("cannot read the addresses of this machine: {0}")]
    Addresses(String),
    /// The server's name has no address.
    #[error("the name {name} cannot be resolved: {source}")]
    Unresolved {
        /// The name.
        name: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// A basic facility failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The app in which a client runs does not let a socket be used.
    #[error("the app does not let the socket of a link be used")]
    Unprotected,
    /// The kernel does not tell which links there are.
    #[error(
        "the kernel does not tell the links of this machine: {0} (an app that may not ask gives them itself)"
    )]
    NoLinks(OsError),
    /// Too little privilege.
    #[error("a TUN device and routes need root (or CAP_NET_ADMIN): run this with sudo")]
    Privilege,
}

impl EngineError {
    /// Examples for documents: the errors of this crate, of the tunnel and of the system that have a sentence of their
    /// own. What differs from case to case is in capitals.
    pub fn examples() -> Vec<Self> {
        let io = || io::Error::other("REASON");
        let own = [
            Self::Privilege,
            Self::Tunnel(ClientError::Unauthorized(401)),
            Self::Tunnel(ClientError::Tls("REASON".into())),
            Self::Tunnel(ClientError::Unsupported("FEATURE")),
            Self::Unresolved { name: "NAME".into(), source: io() },
            Self::Addresses("REASON".into()),
            Self::Setup(SetupError::Tls),
            Self::Io { what: "DO SOMETHING", source: io() },
            Self::Unprotected,
        ];
        own.into_iter().chain(OsError::examples().into_iter().map(Self::Os)).collect()
    }

    /// For `map_err`: what was tried when an I/O error came.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
