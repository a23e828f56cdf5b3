//! The server of a world: its identity, which clients accept unchecked, its users, and its shards.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use mpvpn_masque::request::Rejection;
use mpvpn_quic::{FlowControlWindows, OwnSockets, ServerSetup, Shard, TransportOptions};
use mpvpn_tunnel::{Authenticate, AuthenticatedUser, Registry, Server, ServerConfig, TunnelMode, UserLimits};
use mpvpn_types::CongestionControl;

use super::{DNS, TOKEN, TOKEN_OF_BOB, TOKEN_OF_CAROL, TOKEN_THAT_PANICS};

/// The certificate and key of a server.
#[derive(Clone)]
pub(super) struct Identity {
    cert: rustls::pki_types::CertificateDer<'static>,
    key: Arc<rcgen::KeyPair>,
}

impl Identity {
    pub(super) fn new() -> Self {
        // Signatures and certificates of one length: with others, packets leave at other times, and worlds
        // end otherwise.
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["mpvpn".to_owned()]).unwrap();
        params.serial_number = Some(1.into());
        let cert = params.self_signed(&key).unwrap().der().clone();
        Self { cert, key: Arc::new(key) }
    }
}

/// The users of a server.
#[derive(Clone, Copy, Default)]
pub(super) struct Users {
    pub(super) limits: UserLimits,
    pub(super) have_rules: bool,
    /// The memory of the server (bytes), if it is less than usual.
    pub(super) max_held: Option<usize>,
}

impl Authenticate for Users {
    fn authenticate(
        &self,
        authorization: Option<&str>,
        _: Option<&[u8]>,
    ) -> Result<AuthenticatedUser, Rejection> {
        match authorization {
            Some(value) if value == format!("Bearer {TOKEN}") => Ok("alice".into()),
            Some(value) if value == format!("Bearer {TOKEN_OF_BOB}") => Ok("bob".into()),
            Some(value) if value == format!("Bearer {TOKEN_THAT_PANICS}") => panic!("the test wants it"),
            Some(value) if value == format!("Bearer {TOKEN_OF_CAROL}") => {
                Err(Rejection::new(403, "the access of this user was revoked"))
            }
            _ => Err(Rejection::unauthorized("unknown token")),
        }
    }

    fn limits(&self, _: &str) -> UserLimits {
        self.limits
    }

    fn site_networks(&self, _: &str) -> Vec<IpNet> {
        ["192.168.0.0/16", "10.77.0.0/16", "fd77::/16"].map(|net| net.parse().unwrap()).to_vec()
    }

    fn has_rules_of_users(&self) -> bool {
        self.have_rules
    }
}

#[derive(Debug)]
pub(super) struct AnyCertificate;

impl rustls::client::danger::ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        vec![rustls::SignatureScheme::ED25519]
    }
}

pub(super) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

pub(super) fn options(seed: u8, shards: u8) -> TransportOptions {
    TransportOptions {
        cc: CongestionControl::Bbr,
        rng_seed: Some([seed; 32]),
        ..TransportOptions::for_shards(shards)
    }
}

/// The routes of a server, unless a test chooses others.
pub(super) const ALL_ROUTES: &[&str] = &["0.0.0.0/0", "::/0"];

/// TLS and transport of a server with these windows.
pub(super) fn server_setup(identity: &Identity, windows: FlowControlWindows) -> ServerSetup {
    let key = rustls::pki_types::PrivateKeyDer::try_from(identity.key.serialize_der()).unwrap();
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![identity.cert.clone()], key)
        .unwrap();
    tls.alpn_protocols = vec![b"h3".to_vec()];
    let options = TransportOptions { max_udp_payload: 65_000, windows, ..options(1, 1) };
    ServerSetup::new(Arc::new(tls), &options, &[7; 32]).unwrap().with_own_sockets(Arc::new(Gateway))
}

/// The gateway of the server, which has all ports of one address.
#[derive(Debug)]
struct Gateway;

impl OwnSockets for Gateway {
    fn contains(&self, address: SocketAddr) -> bool {
        address.ip() == Ipv4Addr::LOCALHOST
    }
}

/// The shards of a server whose secrets begin with this one, and their registry.
pub(super) fn new_servers(
    identity: &Identity,
    mode: TunnelMode,
    first_secret: u8,
    shards: u8,
    users: Users,
    routes: &[&str],
    disabled_extensions: &'static [&'static str],
) -> (Vec<Server>, Registry) {
    let setup = server_setup(identity, FlowControlWindows::default());
    let (subnet, subnet6) = ("10.0.0.0/24".parse().unwrap(), Some("fd00::/64".parse().unwrap()));
    let registry = Registry::new(subnet, subnet6, 200);
    // Twice what 800 connections of a user take.
    registry.set_max_held(users.max_held.unwrap_or(128 << 20));
    let server = |shard: Shard| {
        let mut secret = first_secret.wrapping_add(16 * shard.index());
        let config = ServerConfig {
            setup: setup.clone(),
            mode,
            subnet,
            subnet6,
            routes: routes.iter().map(|net| net.parse().unwrap()).collect(),
            offers_streams: true,
            disabled_extensions,
            dns: DNS.map(|ip| ip.parse().unwrap()).to_vec(),
            dns_domain: None,
            auth: Box::new(users),
            hide_wrong_credentials: false,
            max_clients: 200,
            new_secret: Box::new(move || {
                secret = secret.wrapping_add(1);
                [secret; 16]
            }),
        };
        Server::shard(config, registry.clone(), shard)
    };
    (Shard::all(shards).map(server).collect(), registry)
}
