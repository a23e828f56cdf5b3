//! One error for everything that a peer can do wrong, and what to end because of it.

use crate::{
    capsule::CapsuleError,
    datagram::DatagramError,
    h3::{H3Error, code},
    headers::HeadersError,
    qpack::QpackError,
};

/// Any violation by the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// In HTTP/3 framing.
    #[error(transparent)]
    H3(#[from] H3Error),
    /// In an HTTP Datagram.
    #[error(transparent)]
    Datagram(#[from] DatagramError),
    /// In a capsule.
    #[error(transparent)]
    Capsule(#[from] CapsuleError),
    /// In a header section.
    #[error(transparent)]
    Headers(#[from] HeadersError),
    /// In a field section.
    #[error(transparent)]
    Qpack(#[from] QpackError),
}

/// What must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The whole connection.
    Connection,
    /// The request stream on which it happened.
    Stream,
}

impl Error {
    /// The HTTP/3 error code to close or reset with.
    #[must_use]
    pub fn code(&self) -> u64 {
        match self {
            Self::H3(error) => error.code,
            Self::Datagram(error) => error.code(),
            Self::Capsule(error) => error.code(),
            Self::Headers(_) => code::MESSAGE_ERROR,
            Self::Qpack(QpackError::TooLarge { .. }) => code::EXCESSIVE_LOAD,
            Self::Qpack(_) => code::QPACK_DECOMPRESSION_FAILED,
        }
    }

    /// Whether the connection may live on.
    #[must_use]
    pub fn scope(&self) -> Scope {
        match self {
            Self::H3(_) => Scope::Connection,
            Self::Datagram(error) if error.stream().is_none() => Scope::Connection,
            Self::Qpack(QpackError::TooLarge { .. }) => Scope::Stream,
            Self::Qpack(_) => Scope::Connection,
            Self::Datagram(_) | Self::Capsule(_) | Self::Headers(_) => Scope::Stream,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{datagram, qpack};

    #[test]
    fn each_violation_ends_what_its_rfc_says() {
        let short: Error = datagram::parse(&[]).unwrap_err().into();
        assert_eq!((short.code(), short.scope()), (0x33, Scope::Connection));
        let no_context: Error = datagram::parse(&[0]).unwrap_err().into();
        assert_eq!((no_context.code(), no_context.scope()), (0x33, Scope::Stream));
        let broken: Error = qpack::decode(&[1, 0], 100).unwrap_err().into();
        assert_eq!((broken.code(), broken.scope()), (0x200, Scope::Connection));
        let large: Error = qpack::decode(&[0, 0, 0xd9], 1).unwrap_err().into();
        assert_eq!((large.code(), large.scope()), (0x107, Scope::Stream));
        let capsule: Error = CapsuleError::Truncated.into();
        assert_eq!((capsule.code(), capsule.scope()), (0x10e, Scope::Stream));
    }
}
