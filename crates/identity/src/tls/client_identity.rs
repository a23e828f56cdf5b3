//! The certificate that a client shows to a server.
//!
//! In: PEM files. Out: the certificate of a handshake. Always holds: files that were replaced count for the
//! next handshake, so a renewed certificate needs no restart; files with a mistake change nothing.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{SignatureScheme, client::ResolvesClientCert, sign::CertifiedKey};

use crate::{cert_files::CertFiles, identity::Identity};
use mpvpn_input::Result;

/// A client's certificate and its key.
#[derive(Debug)]
pub(super) struct ClientIdentity {
    files: CertFiles,
    read: Mutex<ReadFiles>,
}

#[derive(Debug)]
struct ReadFiles {
    certified: Arc<CertifiedKey>,
    versions: Versions,
}

/// Tells two contents of certificate and key apart: inode, bytes, and time of the last change (s, ns); `None`
/// if that is unknown.
type Versions = [Option<(u64, u64, i64, i64)>; 2];

impl ClientIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// If a file cannot be read, or the key does not belong to the certificate.
    pub(super) fn load(files: &CertFiles) -> Result<Self> {
        Ok(Self { files: files.clone(), read: Mutex::new(ReadFiles::load(files)?) })
    }
}

impl ReadFiles {
    fn load(files: &CertFiles) -> Result<Self> {
        // First, so that a file that is replaced meanwhile is read again.
        let versions = versions(files);
        Ok(Self { certified: Identity::load(&files.cert, &files.key)?.certified(), versions })
    }
}

fn versions(files: &CertFiles) -> Versions {
    [&files.cert, &files.key].map(|file| {
        let found = fs::metadata(file).ok()?;
        Some((found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
    })
}

impl ResolvesClientCert for ClientIdentity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = versions(&self.files);
        if read.versions != versions {
            match ReadFiles::load(&self.files) {
                Ok(new) => {
                    tracing::info!(file = %self.files.cert.display(), "the certificate of this client was read again");
                    *read = new;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read the certificate of this client again, and shows the one before");
                    // Not again until the files change once more.
                    read.versions = versions;
                }
            }
        }
        Some(Arc::clone(&read.certified))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewed_certificate_is_shown_at_the_next_handshake_and_a_broken_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let files = CertFiles { cert: home.path().join("a.crt"), key: home.path().join("a.key") };
        let renew = || {
            let made = rcgen::generate_simple_self_signed(vec!["alice".to_owned()]).unwrap();
            fs::write(&files.cert, made.cert.pem()).unwrap();
            fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
            made.cert.der().to_vec()
        };
        let first = renew();
        let identity = ClientIdentity::load(&files).unwrap();
        let shown = || identity.resolve(&[], &[]).unwrap().cert[0].to_vec();
        assert_eq!(shown(), first);
        fs::write(&files.cert, "half a cert").unwrap();
        assert_eq!(shown(), first);
        let second = renew();
        assert_eq!(shown(), second);
    }
}
