//! Keys, certificates and configurations of the benchmarked server and clients. They are chosen for fast
//! handshakes, which are not counted.

use std::{net::Ipv4Addr, sync::Arc};

use ipnet::{IpNet, Ipv4Net};
use mpvpn_masque::request::Rejection;
use mpvpn_path::Scheduler;
use mpvpn_quic::{ClientSetup, ServerSetup, TransportOptions};
use mpvpn_tunnel::{Authenticate, AuthenticatedUser, Client, ClientConfig, Server, ServerConfig, TunnelMode};
use mpvpn_types::{Fec, Instant};
use rustls::{
    ClientConfig as TlsClient, DigitallySignedStruct, Error, ServerConfig as TlsServer, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
};

/// Subnet with addresses for 65 000 clients.
pub(crate) const SUBNET: &str = "10.0.0.0/16";
pub(crate) const SUBNET6: &str = "fd00::/64";

/// The server's key and certificate, and the TLS configuration of all clients.
pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    key: rcgen::KeyPair,
    client: Arc<TlsClient>,
}

impl Identity {
    pub(crate) fn new() -> Self {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
        let params = rcgen::CertificateParams::new(vec!["mpvpn".to_owned()]).expect("a name");
        let certificate = params.self_signed(&key).expect("a certificate").der().clone();
        let mut client = TlsClient::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate))
            .with_no_client_auth();
        client.alpn_protocols = vec![b"h3".to_vec()];
        client.resumption = Resumption::disabled();
        Self { certificate, key, client: Arc::new(client) }
    }

    /// The TLS configuration of a client.
    pub(crate) fn client_tls(&self) -> Arc<TlsClient> {
        self.client.clone()
    }

    /// The TLS configuration of a server.
    pub(crate) fn server_tls(&self) -> TlsServer {
        let key = PrivateKeyDer::try_from(self.key.serialize_der()).expect("the key's encoding");
        let mut tls = TlsServer::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.clone()], key)
            .expect("a certificate with its key");
        tls.alpn_protocols = vec![b"h3".to_vec()];
        tls.send_tls13_tickets = 0;
        tls
    }

    /// A server that advertises `routes` routes.
    pub(crate) fn server(&self, routes: u32) -> Server {
        let tls = self.server_tls();
        let mut sessions = 0u128;
        let config = ServerConfig {
            mode: TunnelMode::Packets,
            setup: ServerSetup::new(Arc::new(tls), &options(u32::MAX), &[7; 32]).expect("a setup"),
            subnet: SUBNET.parse().expect("a subnet"),
            subnet6: SUBNET6.parse().ok(),
            routes: (0..routes).map(|n| route(n, routes)).collect(),
            offers_streams: true,
            disabled_extensions: &[],
            dns: Vec::new(),
            dns_domain: None,
            auth: Box::new(AcceptAnyToken),
            hide_wrong_credentials: false,
            max_clients: 65_000,
            new_secret: Box::new(move || {
                sessions += 1;
                sessions.to_be_bytes()
            }),
        };
        Server::new(config)
    }

    /// A client whose connection IDs and other random numbers come from `seed`.
    pub(crate) fn client(&self, now: Instant, seed: u32) -> Client {
        let setup = ClientSetup::new(self.client.clone(), &options(seed), &seed.to_be_bytes());
        let config = ClientConfig {
            mode: TunnelMode::Packets,
            setup: setup.expect("a setup"),
            server_name: "mpvpn".to_owned(),
            authority: "mpvpn".to_owned(),
            path: "/.well-known/masque/ip/*/*/".to_owned(),
            token: None,
            class: None,
            instance: None,
            additional_addresses: 0,
            addresses_in_use: Default::default(),
            scheduler: Scheduler::Auto,
            fec: Fec::Off,
            copies: 1,
            flow_rules: Default::default(),
            isn_secret: Default::default(),
            disabled_extensions: &[],
        };
        Client::new(now, config)
    }
}

/// Route `n` of `routes`. The last one is 128.0.0.0/1, so that a packet is compared with all others first.
/// The others are not adjacent, since adjacent ones would be advertised as one range.
fn route(n: u32, routes: u32) -> IpNet {
    let net = match n + 1 == routes {
        true => Ipv4Net::new(Ipv4Addr::new(128, 0, 0, 0), 1),
        false => Ipv4Net::new(Ipv4Addr::from((11 << 24) + n * 512), 24),
    };
    IpNet::V4(net.expect("a prefix"))
}

fn options(seed: u32) -> TransportOptions {
    let mut rng_seed = [0; 32];
    rng_seed[..4].copy_from_slice(&seed.to_be_bytes());
    TransportOptions { rng_seed: Some(rng_seed), ..TransportOptions::default() }
}

fn provider() -> Arc<CryptoProvider> {
    let kx_groups = vec![aws_lc_rs::kx_group::X25519];
    let cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { kx_groups, cipher_suites, ..aws_lc_rs::default_provider() })
}

struct AcceptAnyToken;

impl Authenticate for AcceptAnyToken {
    fn authenticate(&self, _: Option<&str>, _: Option<&[u8]>) -> Result<AuthenticatedUser, Rejection> {
        Ok("user".into())
    }
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
