//! The request for a certificate, and the answers to the challenges of a CA.

use crate::identity::Identity;
use mpvpn_input::{Error, Result};

/// Bytes of a SHA-256.
const DIGEST_BYTES: usize = 32;

/// A new private key, as PEM, and the request for a certificate for these names with it, as DER (RFC 2986).
///
/// # Errors
/// If no key can be made.
pub fn certificate_request(domains: &[String]) -> Result<(String, Vec<u8>)> {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let mut params = rcgen::CertificateParams::new(domains)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    let request = params.serialize_request(&key)?;
    Ok((key.serialize_pem(), request.der().to_vec()))
}

/// The certificate that answers TLS-ALPN-01 for a name; `digest` is the SHA-256 of the key authorization (RFC
/// 8737 §3).
///
/// # Errors
/// If no certificate can be made.
pub fn tls_alpn_certificate(domain: &str, digest: &[u8]) -> Result<Identity> {
    if digest.len() != DIGEST_BYTES {
        return Err(Error::Tls(rustls::Error::General(format!("a digest of {} bytes", digest.len()))));
    }
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let mut params = rcgen::CertificateParams::new(vec![domain.to_owned()])?;
    params.custom_extensions = vec![rcgen::CustomExtension::new_acme_identifier(digest)];
    let cert = params.self_signed(&key)?;
    Identity::unchecked(key.serialize_der(), cert.der().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_tls_alpn_has_the_digest_in_a_critical_extension() {
        let identity = tls_alpn_certificate("vpn.example", &[7; 32]).unwrap();
        let (_, cert) = x509_parser::parse_x509_certificate(&identity.certs()[0]).unwrap();
        // id-pe-acmeIdentifier (RFC 8737 §6.1).
        let found = cert.extensions().iter().find(|e| e.oid.to_id_string() == "1.3.6.1.5.5.7.1.31").unwrap();
        assert!(found.critical);
        assert_eq!(found.value, [&[4, 32][..], &[7; 32]].concat());
        assert!(identity.is_for(&["vpn.example".to_owned()]));
        assert!(tls_alpn_certificate("vpn.example", &[7; 31]).is_err());
    }

    #[test]
    fn a_request_is_for_all_names() {
        let domains = ["a.example", "b.example"].map(String::from);
        let (key, request) = certificate_request(&domains).unwrap();
        assert!(key.starts_with("-----BEGIN PRIVATE KEY-----"), "{key}");
        let text = String::from_utf8_lossy(&request).into_owned();
        assert!(domains.iter().all(|domain| text.contains(domain.as_str())));
    }
}
