//! The CAs that sign certificates of clients, and which certificates they have revoked.
//!
//! In: PEM files. Out: the verifier of a TLS handshake, and a set of [`CertificateId`]s.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rustls::{
    DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

use crate::{
    identity::{Fingerprint, read_certs},
    provider::provider,
    tls,
};
use mpvpn_input::{Error, Result, files, shared::Shared};

/// Names a certificate: a hash of its issuer and serial number (RFC 5280 §4.1.2.2).
pub type CertificateId = [u8; 32];

/// The CAs that sign certificates of clients, which may change while a server runs: all clones see the same.
#[derive(Clone, Debug)]
pub struct ClientCa(Shared<Roots>);

#[derive(Debug)]
struct Roots {
    certificates: Vec<CertificateDer<'static>>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCa {
    /// Reads the CAs' certificates (PEM).
    ///
    /// # Errors
    /// If the file has no certificate of a CA.
    pub fn load(path: &Path) -> Result<Self> {
        let bad = |found: String| Error::content(path, "the certificate of a CA in PEM", found);
        let mut roots = RootCertStore::empty();
        let certificates: Vec<_> = read_certs(path)?.into_iter().filter(tls::is_ca).collect();
        roots.add_parsable_certificates(certificates.iter().cloned());
        if roots.is_empty() {
            return Err(bad("certificates that are not marked as those of a CA".into()));
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            // Visitors see the site without one, and nobody learns the CA's name.
            .allow_unauthenticated()
            .clear_root_hint_subjects()
            .build()
            .map_err(|error| bad(error.to_string()))?;
        Ok(Self(Roots { certificates, verifier }.into()))
    }

    /// Takes the CAs of `other` for the handshakes that end from now on. Returns whether they are different.
    pub fn replace(&self, other: &Self) -> bool {
        let other = other.0.now();
        let Roots { certificates, verifier } = &*other;
        let new = Roots { certificates: certificates.clone(), verifier: Arc::clone(verifier) };
        self.0.replace(new).certificates != *certificates
    }

    fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.0.now().verifier)
    }
}

impl ClientCertVerifier for ClientCa {
    fn client_auth_mandatory(&self) -> bool {
        self.verifier().client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.verifier().verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier().supported_verify_schemes()
    }
}

/// The certificates that a CA has revoked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations(BTreeSet<CertificateId>);

impl Revocations {
    /// Reads certificate revocation lists (RFC 5280 §5, PEM), at least one.
    ///
    /// # Errors
    /// If the file has none, or one cannot be read.
    pub fn load(path: &Path) -> Result<Self> {
        let bad = |found: String| Error::content(path, "a certificate revocation list in PEM", found);
        let (mut revoked, mut lists) = (BTreeSet::new(), 0);
        for list in CertificateRevocationListDer::pem_slice_iter(&files::read(path)?) {
            let list = list.map_err(|error| bad(error.to_string()))?;
            let (_, list) = x509_parser::parse_x509_crl(list.as_ref())
                .map_err(|error| bad(format!("one that cannot be read: {error}")))?;
            let issuer = list.issuer().as_raw();
            revoked.extend(list.iter_revoked_certificates().map(|entry| id(issuer, entry.raw_serial())));
            lists += 1;
            let now = unix_seconds(SystemTime::now()).cast_signed();
            if list.next_update().is_some_and(|next| next.timestamp() < now) {
                tracing::warn!(
                    "the revocation list in {} is older than its CA says: put the next one there",
                    path.display()
                );
            }
        }
        match lists {
            0 => Err(bad("none".into())),
            _ => Ok(Self(revoked)),
        }
    }

    /// Those of this list that are not in `before`.
    pub fn added_since(&self, before: &Self) -> BTreeSet<CertificateId> {
        self.0.difference(&before.0).copied().collect()
    }

    /// Whether this certificate was revoked.
    pub fn contains(&self, id: &CertificateId) -> bool {
        self.0.contains(id)
    }
}

/// Seconds since 1970 of a clock; 0 before.
pub fn unix_seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The identifier of the certificate with this issuer (DER) and serial number.
pub fn id(issuer: &[u8], serial: &[u8]) -> CertificateId {
    Fingerprint::of(&[&(issuer.len() as u64).to_be_bytes(), issuer, serial].concat()).0
}
