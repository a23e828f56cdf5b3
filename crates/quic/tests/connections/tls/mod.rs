//! A server that proves to be "mpvpn", and clients that believe that.

use std::{net::SocketAddr, sync::Arc};

use mpvpn_quic::{ClientSetup, Endpoint, OwnSockets, ServerSetup, TransportOptions};

/// The gateway of the server, which has all ports of the loopback.
#[derive(Debug)]
struct Gateway;

impl OwnSockets for Gateway {
    fn contains(&self, address: SocketAddr) -> bool {
        address.ip().is_loopback()
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// A server, and what clients need to connect to it.
pub(crate) fn pair(server: &TransportOptions, client: &TransportOptions) -> (Endpoint, ClientSetup) {
    // Signatures and certificates of one length: with others, packets leave at other times, and worlds end
    // otherwise.
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut cert = rcgen::CertificateParams::new(vec!["mpvpn".to_owned()]).unwrap();
    cert.serial_number = Some(1.into());
    let cert = cert.self_signed(&key).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let mut accepts = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let mut connects = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let alpn = vec![b"mpvpn".to_vec()];
    (accepts.alpn_protocols, connects.alpn_protocols) = (alpn.clone(), alpn);
    let server = ServerSetup::new(Arc::new(accepts), server, &[7; 32]).unwrap();
    let server = Endpoint::server(&server.with_own_sockets(Arc::new(Gateway)));
    (server, ClientSetup::new(Arc::new(connects), client, &[8; 32]).unwrap())
}
