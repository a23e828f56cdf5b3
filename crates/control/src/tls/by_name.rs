//! Chooses among several certificates of a server by the name that the client asks for (SNI, RFC 6066 §3).

use std::{collections::HashMap, sync::Arc};

use rustls::{
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

use super::verify;
use crate::identity::Identity;

/// Certificates by their DNS names. The first is also for clients that ask for no name or an unknown one.
#[derive(Debug)]
pub(super) struct CertificatesByName {
    first: Arc<CertifiedKey>,
    by_name: HashMap<String, Arc<CertifiedKey>>,
}

impl CertificatesByName {
    /// If several certificates have the same name, the first one counts.
    pub(super) fn new(first: &Identity, others: &[Identity]) -> Self {
        let mut by_name = HashMap::new();
        for identity in std::iter::once(first).chain(others) {
            for name in identity.certs().first().map(verify::dns_names).unwrap_or_default() {
                by_name.entry(name.to_ascii_lowercase()).or_insert_with(|| identity.certified());
            }
        }
        Self { first: first.certified(), by_name }
    }

    /// The certificate for a name, or the wildcard certificate for its siblings (`*.example.org`, RFC 9525 §6.3).
    fn certificate_for(&self, name: &str) -> Option<&Arc<CertifiedKey>> {
        let name = name.to_ascii_lowercase();
        let beside = || name.split_once('.').and_then(|(_, rest)| self.by_name.get(&format!("*.{rest}")));
        self.by_name.get(&name).or_else(beside)
    }
}

impl ResolvesServerCert for CertificatesByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let named = hello.server_name().and_then(|name| self.certificate_for(name));
        Some(Arc::clone(named.unwrap_or(&self.first)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

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
        let others = [identity(&["www.example", "both.example"]), identity(&["*.example.org"])];
        let certificates = CertificatesByName::new(&first, &others);
        let of = |name| certificates.certificate_for(name).map(|found| found.cert[0].clone());
        let is = |identity: &Identity| Some(identity.certs()[0].clone());
        assert_eq!(of("vpn.example"), is(&first));
        assert_eq!(of("both.example"), is(&first));
        assert_eq!(of("WWW.example"), is(&others[0]));
        assert_eq!(of("a.example.org"), is(&others[1]));
        for unknown in ["example.org", "a.b.example.org", "nobody.example", "example"] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }
}
