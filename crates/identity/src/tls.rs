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
    ClientConfig, ServerConfig, pki_types::CertificateDer, server::NoServerSessionStorage, version::TLS13,
};

pub use certificates::{ACME_TLS_ALPN, ServerCertificates};
pub use verify::{CertificateRefusal, LastRefusal, is_ca, names};

use crate::{
    cert_files::CertFiles, client_ca::ClientCa, identity::dns_names, provider::provider, trust::Trust,
};
use client_identity::ClientIdentity;
use mpvpn_input::Result;

/// The configuration of a server with the protocols `alpn`. Certificates that are replaced later count for
/// later handshakes.
pub fn server_config(certificates: &ServerCertificates, alpn: &[&[u8]]) -> Result<ServerConfig> {
    server_config_for(certificates, None, alpn)
}

/// As [`server_config`]; with `clients`, clients may show a certificate that one of these CAs has signed.
pub fn server_config_for(
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
pub fn publicly_trusted_names(chain: &[CertificateDer<'static>]) -> Vec<String> {
    let Some(leaf) = chain.first() else { return Vec::new() };
    let names = dns_names(leaf).into_iter().map(|name| name.to_ascii_lowercase());
    if verify::is_publicly_trusted(chain, &provider()) { names.collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests;
