//! Where a certificate and its key are.

use std::path::PathBuf;

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertFiles {
    /// PEM file with the certificate, leaf first.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}
