//! The certificates of a server, and the choice among them by the name that the client asks for (SNI, RFC
//! 6066 §3).
//!
//! In: the certificates, again whenever one is new; the answers to challenges of a CA. Out: the certificate
//! of a handshake. Always holds: a new certificate counts for the handshakes that begin later; connections
//! keep what they agreed on.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

use rustls::{
    pki_types::CertificateDer,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

use crate::identity::Identity;

/// The protocol by which a CA asks for the answer to TLS-ALPN-01 (RFC 8737 §6.2).
pub const ACME_TLS_ALPN: &[u8] = b"acme-tls/1";

/// Certificates that may change while a server runs: all clones see the same.
#[derive(Clone, Debug)]
pub struct ServerCertificates(Arc<RwLock<Arc<Current>>>);

/// The certificates now.
#[derive(Clone, Debug)]
struct Current {
    /// For clients that ask for no name or an unknown one, too.
    first: Identity,
    others: Vec<Identity>,
    /// The certificate that a CA has issued by ACME.
    issued: Option<Identity>,
    by_name: HashMap<String, Arc<CertifiedKey>>,
    /// The certificates for a CA that validates names by TLS-ALPN-01, by name.
    challenges: HashMap<String, Arc<CertifiedKey>>,
}

impl Current {
    fn new(first: Identity, others: Vec<Identity>) -> Self {
        let (by_name, challenges) = (HashMap::new(), HashMap::new());
        Self { first, others, issued: None, by_name, challenges }.with_names()
    }

    fn with_names(mut self) -> Self {
        let mut by_name = HashMap::new();
        for identity in self.all() {
            for name in identity.dns_names() {
                by_name.entry(name.to_ascii_lowercase()).or_insert_with(|| identity.certified());
            }
        }
        self.by_name = by_name;
        self
    }

    fn all(&self) -> impl Iterator<Item = &Identity> {
        self.issued.iter().chain(std::iter::once(&self.first)).chain(&self.others)
    }

    /// The certificate for a name, or the wildcard certificate for its siblings (`*.example.org`, RFC 9525
    /// §6.3).
    fn certificate_for(&self, name: &str) -> Option<&Arc<CertifiedKey>> {
        let name = name.to_ascii_lowercase();
        let beside = || name.split_once('.').and_then(|(_, rest)| self.by_name.get(&format!("*.{rest}")));
        self.by_name.get(&name).or_else(beside)
    }
}

impl ServerCertificates {
    /// A client that asks for a name of one of `others` gets that certificate, else `first`. If several
    /// certificates have the same name, the issued one counts, else the first one.
    pub fn new(first: Identity, others: Vec<Identity>) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(Current::new(first, others)))))
    }

    /// Replaces the certificates for the handshakes that begin from now on.
    pub fn replace(&self, first: Identity, others: Vec<Identity>) {
        self.change(|now| Current { first, others, ..now });
    }

    /// Sets the certificate that a CA has issued by ACME: clients that ask for one of its names get it from
    /// now on.
    pub fn set_issued(&self, issued: Option<Identity>) {
        self.change(|now| Current { issued, ..now });
    }

    /// Sets what a CA sees that validates a name by TLS-ALPN-01: the certificate for each name.
    pub fn set_challenges(&self, challenges: Vec<(String, Identity)>) {
        let challenges =
            challenges.into_iter().map(|(name, identity)| (name, identity.certified())).collect();
        self.change(|now| Current { challenges, ..now });
    }

    fn change(&self, change: impl FnOnce(Current) -> Current) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(change((**current).clone()).with_names());
    }

    /// The certificate for clients that ask for no name or an unknown one.
    pub fn first(&self) -> Identity {
        self.now().first.clone()
    }

    /// Whether these are the certificates, chains included.
    pub fn are(&self, first: &Identity, others: &[Identity]) -> bool {
        let now = self.now();
        let all = std::iter::once(&now.first).chain(&now.others).map(Identity::certs);
        all.eq(std::iter::once(first).chain(others).map(Identity::certs))
    }

    /// Whether one of the certificates is for this DNS name.
    pub fn has_name(&self, name: &str) -> bool {
        self.now().certificate_for(name).is_some()
    }

    /// Whether this is the leaf of one of the certificates.
    pub(super) fn has(&self, leaf: &CertificateDer<'_>) -> bool {
        self.now().all().any(|identity| identity.certs().first() == Some(leaf))
    }

    fn now(&self) -> Arc<Current> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl From<Identity> for ServerCertificates {
    fn from(identity: Identity) -> Self {
        Self::new(identity, Vec::new())
    }
}

impl ResolvesServerCert for ServerCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let now = self.now();
        if hello.alpn().is_some_and(|mut offered| offered.any(|protocol| protocol == ACME_TLS_ALPN)) {
            // Nobody but a CA asks like this, and only while it validates a name (RFC 8737 §3).
            return now.challenges.get(&hello.server_name()?.to_ascii_lowercase()).cloned();
        }
        let named = hello.server_name().and_then(|name| now.certificate_for(name));
        Some(named.cloned().unwrap_or_else(|| now.first.certified()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(names: &[&str]) -> Identity {
        let made =
            rcgen::generate_simple_self_signed(names.iter().map(ToString::to_string).collect::<Vec<_>>());
        let made = made.unwrap();
        let home = tempfile::tempdir().unwrap();
        let (cert, key) = (home.path().join("crt"), home.path().join("key"));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        Identity::load(&cert, &key).unwrap()
    }

    #[test]
    fn a_name_has_its_certificate_and_an_unknown_one_the_first() {
        let first = identity(&["vpn.example", "both.example"]);
        let others = vec![identity(&["www.example", "both.example"]), identity(&["*.example.org"])];
        let certificates = ServerCertificates::new(first.clone(), others.clone());
        let now = certificates.now();
        let of = |name| now.certificate_for(name).map(|found| found.cert[0].clone());
        let is = |identity: &Identity| Some(identity.certs()[0].clone());
        assert_eq!(of("vpn.example"), is(&first));
        assert_eq!(of("both.example"), is(&first));
        assert_eq!(of("WWW.example"), is(&others[0]));
        assert_eq!(of("a.example.org"), is(&others[1]));
        for unknown in ["example.org", "a.b.example.org", "nobody.example", "example"] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn clones_see_a_new_certificate() {
        let (old, new) = (identity(&["vpn.example"]), identity(&["vpn.example"]));
        let certificates = ServerCertificates::from(old.clone());
        let clone = certificates.clone();
        certificates.replace(new.clone(), Vec::new());
        assert_eq!(clone.first().fingerprint(), new.fingerprint());
        assert!(clone.has(&new.certs()[0]) && !clone.has(&old.certs()[0]));
    }

    #[test]
    fn an_issued_certificate_is_for_its_names_and_outlasts_a_reload() {
        let (own, issued, reloaded) =
            (identity(&["mpvpn"]), identity(&["vpn.example"]), identity(&["mpvpn"]));
        let certificates = ServerCertificates::from(own);
        certificates.set_issued(Some(issued.clone()));
        certificates.replace(reloaded.clone(), vec![identity(&["vpn.example"])]);
        let now = certificates.now();
        let found = now.certificate_for("vpn.example").unwrap();
        assert_eq!(found.cert[0], issued.certs()[0], "before others with the same name");
        assert_eq!(certificates.first().fingerprint(), reloaded.fingerprint());
    }
}
