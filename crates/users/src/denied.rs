//! The user of a request, or why it is refused.

use mpvpn_path::Day;
use mpvpn_types::ByteSize;

use crate::{client_certificates, expiry::Expiry};
use mpvpn_input::short_text::ShortText;

/// The authenticated user of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name in the users' file; `anonymous` without authentication.
    pub name: String,
}

/// Why a request is refused. Those with credentials of no user learn nothing about any user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No `authorization` field.
    #[error("no token was shown")]
    Missing,
    /// The field is neither `Bearer` and a token, nor `Basic` with a name and a token.
    #[error("the authorization field has neither a bearer token nor a user's name and token")]
    Malformed,
    /// No user has this token, or another user than the named one.
    #[error("no user has this token")]
    Unknown,
    /// The user has no access any more.
    #[error("the access of this user was revoked")]
    Revoked,
    /// The user had access until then.
    #[error("the access of this user ended on {0}")]
    Expired(Expiry),
    /// The user has used up the quota until that day.
    #[error("the quota of this user, {0}, is used up; it begins anew on {1} (UTC)")]
    QuotaUsedUp(ByteSize, Day),
    /// No certificate.
    #[error("no certificate of a client was shown")]
    NoCertificate,
    /// The certificate names nobody.
    #[error("the client's certificate has neither an e-mail address, a DNS name or a URI, nor a common name")]
    Nameless,
    /// The user of the certificate is not in the users' file.
    #[error("the user of the client's certificate, {0}, is not in the users' file")]
    Unlisted(ShortText),
    /// The CA has revoked the certificate.
    #[error("{}", client_certificates::REVOKED)]
    CertificateRevoked,
    /// The certificate was valid when the connection began.
    #[error("{}", client_certificates::EXPIRED)]
    CertificateExpired,
}

impl Denied {
    /// The HTTP status of the response (RFC 9110 §15.5.2, §15.5.4): 403 for a client that has proved who it
    /// is, and may learn why it is refused; 401 for all others.
    pub fn status(&self) -> u16 {
        if matches!(self, Self::Missing | Self::Malformed | Self::Unknown | Self::NoCertificate) {
            401
        } else {
            403
        }
    }
}
