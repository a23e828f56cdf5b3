//! TLS 1.3 for QUIC and TCP: the parameters that both ends offer, and the verification of the server's
//! certificate.
//!
//! In: [`ServerCertificates`], or a [`Trust`] (client). Out: rustls configurations with the hybrid
//! post-quantum key exchange X25519MLKEM768 first. Always holds: the server has to prove that it owns the
//! private key of its certificate, whatever the trust; the reason of a refusal is stored as a
//! [`CertificateRefusal`], as a TLS alert carries none.

mod certificates;
mod client_identity;
mod verify;

use std::sync::{Arc, Once};

use rustls::{
    CipherSuite, ClientConfig, ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::CertificateDer,
    server::NoServerSessionStorage,
    version::TLS13,
};

pub use certificates::ServerCertificates;
pub use verify::{CertificateRefusal, LastRefusal, names};
pub(crate) use verify::{dns_names, is_ca};

use crate::{
    Result,
    client_certificates::ClientCa,
    config::{CertFiles, Trust},
};
use client_identity::ClientIdentity;

/// The configuration of a server with the protocols `alpn`. Certificates that are replaced later count for
/// later handshakes.
pub fn server_config(certificates: &ServerCertificates, alpn: &[&[u8]]) -> Result<ServerConfig> {
    server_config_for(certificates, None, alpn)
}

/// As [`server_config`]; with `clients`, clients may show a certificate that one of these CAs has signed.
pub(crate) fn server_config_for(
    certificates: &ServerCertificates,
    clients: Option<&ClientCa>,
    alpn: &[&[u8]],
) -> Result<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let resolver = Arc::new(certificates.clone());
    let mut config = match clients {
        None => builder.with_no_client_auth().with_cert_resolver(resolver),
        Some(ca) => {
            let mut config =
                builder.with_client_cert_verifier(Arc::new(ca.clone())).with_cert_resolver(resolver);
            // A resumed handshake verifies no certificate, and would forget that the CA was replaced (RFC
            // 8446 §4.6.1).
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            config
        }
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(config)
}

/// The configuration of a client with the protocols `alpn`, which verifies the server's certificate by
/// `trust`.
pub fn client_config(trust: &Trust, alpn: &[&[u8]]) -> Result<ClientConfig> {
    client_config_reporting(trust, None, alpn, &LastRefusal::default())
}

/// As [`client_config`]; the client shows its own certificate `own` to servers that ask for one. Stores in
/// `last_refusal` why a server's certificate was refused.
pub fn client_config_reporting(
    trust: &Trust,
    own: Option<&CertFiles>,
    alpn: &[&[u8]],
    last_refusal: &LastRefusal,
) -> Result<ClientConfig> {
    static WARNED: Once = Once::new();
    if *trust == Trust::Insecure {
        WARNED.call_once(|| {
            tracing::warn!(
                "--insecure: the client trusts any server, so an attacker on the path can read and change everything; \
                 use --pin or --ca"
            );
        });
    }
    let own = own.map(ClientIdentity::load).transpose()?;
    client_config_by(verify::Verifier::new(trust, provider(), last_refusal.clone())?, own, alpn)
}

/// The configuration with which a server connects to itself, whatever its certificate is at that moment.
pub fn loopback_client_config(own: &ServerCertificates, alpn: &[&[u8]]) -> Result<ClientConfig> {
    client_config_by(verify::Verifier::of_own(own.clone(), provider()), None, alpn)
}

fn client_config_by(
    verifier: verify::Verifier,
    own: Option<ClientIdentity>,
    alpn: &[&[u8]],
) -> Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => builder.with_client_cert_resolver(Arc::new(own)),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(config)
}

/// The DNS names for which machines like this one trust a server with this chain, leaf first: those of the
/// leaf, in lower case, if a CA that this machine trusts signed it.
pub(crate) fn publicly_trusted_names(chain: &[CertificateDer<'static>]) -> Vec<String> {
    let Some(leaf) = chain.first() else { return Vec::new() };
    let names = dns_names(leaf).into_iter().map(|name| name.to_ascii_lowercase());
    match verify::is_publicly_trusted(chain, &provider()) {
        true => names.collect(),
        false => Vec::new(),
    }
}

/// aws-lc-rs with an own order of cipher suites: AES first if the CPU has instructions for it, else ChaCha20.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![
        aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
        aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    if !cpu_has_aes() {
        provider
            .cipher_suites
            .sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_CHACHA20_POLY1305_SHA256);
    }
    provider.kx_groups = vec![
        aws_lc_rs::kx_group::X25519MLKEM768,
        aws_lc_rs::kx_group::X25519,
        aws_lc_rs::kx_group::SECP256R1,
    ];
    Arc::new(provider)
}

fn cpu_has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

#[cfg(test)]
mod tests;
