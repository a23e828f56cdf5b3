//! Keys and certificates of the ends, made once, and TLS that is fast.

use std::sync::{Arc, LazyLock};

use mpvpn_quic::{ClientSetup, ServerSetup, TransportOptions};
use rustls::{
    DigitallySignedStruct, Error, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
};

/// The transports of a client and of a server, with fixed seeds: an input does the same each time.
pub(super) static SETUPS: LazyLock<(ClientSetup, ServerSetup)> = LazyLock::new(|| {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
    let params = rcgen::CertificateParams::new(vec!["mpvpn".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("a certificate").der().clone();
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("the key's encoding");
    let mut client = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    client.alpn_protocols = vec![b"h3".to_vec()];
    client.resumption = Resumption::disabled();
    let mut server = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("a certificate with its key");
    server.alpn_protocols = vec![b"h3".to_vec()];
    server.send_tls13_tickets = 0;
    (
        ClientSetup::new(Arc::new(client), &options(1), &[1; 32]).expect("a setup"),
        ServerSetup::new(Arc::new(server), &options(2), &[2; 32]).expect("a setup"),
    )
});

fn options(seed: u8) -> TransportOptions {
    TransportOptions { rng_seed: Some([seed; 32]), ..TransportOptions::default() }
}

fn provider() -> Arc<CryptoProvider> {
    let kx_groups = vec![aws_lc_rs::kx_group::X25519];
    let cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { kx_groups, cipher_suites, ..aws_lc_rs::default_provider() })
}

#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
