use std::{
    io::Cursor,
    path::{Path, PathBuf},
    process::Command,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ClientConnection, NamedGroup, ServerConnection, pki_types::ServerName};

use super::*;
use crate::identity::{Fingerprint, Identity};
use mpvpn_input::Error;

/// A folder with certificates.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The certificate of the documented command: marked as a CA, CN=mpvpn, no other name.
    fn openssl(&self, name: &str) -> Identity {
        let (cert, key) = (self.file(&format!("{name}.crt")), self.file(&format!("{name}.key")));
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout"])
            .arg(&key)
            .arg("-out")
            .arg(&cert)
            .args(["-days", "365", "-nodes", "-subj", "/CN=mpvpn"])
            .output()
            .expect("openssl is installed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Identity::load(&cert, &key).unwrap()
    }

    /// A certificate for `names`, signed by the CA in `ca.crt`, which is made the first time.
    fn signed(&self, names: &[&str]) -> Identity {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        std::fs::write(self.file("ca.crt"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
        self.leaf(names, &Issuer::new(ca, ca_key))
    }

    fn leaf(&self, names: &[&str], issuer: &Issuer<'_, KeyPair>) -> Identity {
        let key = KeyPair::generate().unwrap();
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let cert = CertificateParams::new(names).unwrap().signed_by(&key, issuer).unwrap();
        std::fs::write(self.file("leaf.crt"), cert.pem()).unwrap();
        std::fs::write(self.file("leaf.key"), key.serialize_pem()).unwrap();
        Identity::load(&self.file("leaf.crt"), &self.file("leaf.key")).unwrap()
    }
}

/// Shakes hands in memory as a client that asks for `name`.
fn shake(
    server: ServerConfig,
    trust: &Trust,
    name: &str,
) -> Result<ClientConnection, Option<CertificateRefusal>> {
    let slot = LastRefusal::default();
    let config = client_config_reporting(trust, None, &[b"h3"], &slot).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    for _ in 0..10 {
        let mut flight = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut flight).unwrap();
        }
        server.read_tls(&mut Cursor::new(flight)).unwrap();
        server.process_new_packets().map_err(|_| slot.take())?;
        let mut flight = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut flight).unwrap();
        }
        client.read_tls(&mut Cursor::new(flight)).unwrap();
        client.process_new_packets().map_err(|_| slot.take())?;
        if !client.is_handshaking() && !server.is_handshaking() {
            assert_eq!(slot.take(), None);
            return Ok(client);
        }
    }
    panic!("the handshake does not end");
}

fn meet(
    identity: &Identity,
    trust: &Trust,
    name: &str,
) -> Result<ClientConnection, Option<CertificateRefusal>> {
    shake(server_config(&identity.clone().into(), &[b"h3"]).unwrap(), trust, name)
}

fn ca(path: &Path) -> Trust {
    Trust::Ca(path.into())
}

#[test]
fn the_servers_own_certificate_given_as_ca_is_accepted_under_any_name() {
    let home = Home::new();
    let identity = home.openssl("server");
    for name in ["vpn.example", "203.0.113.1", "2001:db8::1", "mpvpn"] {
        assert!(meet(&identity, &ca(&home.file("server.crt")), name).is_ok(), "{name}");
    }
}

#[test]
fn it_may_be_one_of_several_in_the_file() {
    let home = Home::new();
    let identity = home.openssl("server");
    home.openssl("other");
    let both = ["other.crt", "server.crt"].map(|name| std::fs::read_to_string(home.file(name)).unwrap());
    std::fs::write(home.file("both.crt"), both.concat()).unwrap();
    assert!(meet(&identity, &ca(&home.file("both.crt")), "vpn.example").is_ok());
}

#[test]
fn another_certificate_is_refused_and_both_names_are_told() {
    let home = Home::new();
    let identity = home.openssl("server");
    home.openssl("other");
    let file = home.file("other.crt");
    let refusal = meet(&identity, &ca(&file), "vpn.example").unwrap_err().unwrap();
    assert_eq!(
        refusal.to_string(),
        format!(
            "the server's certificate is not trusted: the client asked for `vpn.example`, the certificate is for `mpvpn`, \
             and {} has neither this certificate nor the CA that signed it",
            file.display()
        )
    );
}

#[test]
fn a_certificate_signed_by_the_ca_is_accepted_for_its_names_only() {
    let home = Home::new();
    let identity = home.signed(&["vpn.example", "203.0.113.1"]);
    let trust = ca(&home.file("ca.crt"));
    assert!(meet(&identity, &trust, "vpn.example").is_ok());
    assert!(meet(&identity, &trust, "203.0.113.1").is_ok());
    let refusal = meet(&identity, &trust, "other.example").unwrap_err().unwrap();
    assert_eq!(
        refusal.to_string(),
        "the server's certificate is for another name: the client asked for `other.example`, the certificate is for \
         `vpn.example`, `203.0.113.1`"
    );
}

#[test]
fn a_certificate_signed_by_another_ca_is_refused() {
    let (home, other) = (Home::new(), Home::new());
    let identity = home.signed(&["vpn.example"]);
    other.signed(&["vpn.example"]);
    let refusal = meet(&identity, &ca(&other.file("ca.crt")), "vpn.example").unwrap_err().unwrap();
    assert!(matches!(refusal, CertificateRefusal::Untrusted { .. }), "{refusal}");
}

#[test]
fn a_servers_certificate_in_the_file_signs_no_others() {
    let home = Home::new();
    home.signed(&["vpn.example"]);
    let (pem, key) =
        ["leaf.crt", "leaf.key"].map(|name| std::fs::read_to_string(home.file(name)).unwrap()).into();
    std::fs::write(home.file("trusted.crt"), &pem).unwrap();
    let issuer = CertificateParams::new(vec!["vpn.example".to_owned()]).unwrap();
    let forged = home.leaf(&["bank.example"], &Issuer::new(issuer, KeyPair::from_pem(&key).unwrap()));
    let refusal = meet(&forged, &ca(&home.file("trusted.crt")), "bank.example").unwrap_err().unwrap();
    assert!(matches!(refusal, CertificateRefusal::Untrusted { .. }), "{refusal}");
}

#[test]
fn an_expired_certificate_of_the_ca_is_refused_with_the_reason() {
    let home = Home::new();
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    std::fs::write(home.file("ca.crt"), params.self_signed(&ca_key).unwrap().pem()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut old = CertificateParams::new(vec!["vpn.example".to_owned()]).unwrap();
    old.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let cert = old.signed_by(&key, &Issuer::new(params, ca_key)).unwrap();
    std::fs::write(home.file("old.crt"), cert.pem()).unwrap();
    std::fs::write(home.file("old.key"), key.serialize_pem()).unwrap();
    let identity = Identity::load(&home.file("old.crt"), &home.file("old.key")).unwrap();
    let refusal = meet(&identity, &ca(&home.file("ca.crt")), "vpn.example").unwrap_err().unwrap();
    assert!(matches!(refusal, CertificateRefusal::Unusable { .. }), "{refusal}");
    assert!(refusal.to_string().contains("expired"), "{refusal}");
    let clock = "and the clock of this machine says 2";
    assert!(refusal.to_string().contains(clock) && refusal.next_step().contains("timedatectl"), "{refusal}");
}

#[test]
fn a_pinned_certificate_is_accepted_and_another_is_refused_with_both_fingerprints() {
    let home = Home::new();
    let identity = home.openssl("server");
    assert!(meet(&identity, &Trust::Pin(vec![identity.fingerprint()]), "anything.example").is_ok());
    let wrong = Fingerprint([7; 32]);
    let refusal = meet(&identity, &Trust::Pin(vec![wrong]), "anything.example").unwrap_err();
    let presented = &identity.fingerprint().to_string()[..16];
    assert_eq!(
        refusal.as_ref().map(ToString::to_string),
        Some(format!(
            "the server's certificate is not the pinned one: its SHA-256 begins with {presented}, the pinned one with \
             0707070707070707"
        ))
    );
    assert_eq!(
        refusal,
        Some(CertificateRefusal::OtherFingerprint {
            expected: vec![wrong],
            presented: identity.fingerprint()
        })
    );
}

#[test]
fn the_fingerprint_is_the_one_that_openssl_prints() {
    let home = Home::new();
    let identity = home.openssl("server");
    let printed = Command::new("openssl")
        .args(["x509", "-noout", "-fingerprint", "-sha256", "-in"])
        .arg(home.file("server.crt"))
        .output()
        .unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let (_, digits) = printed.trim().split_once('=').unwrap();
    assert_eq!(digits.parse::<Fingerprint>().unwrap(), identity.fingerprint());
}

#[test]
fn insecure_accepts_anything_that_owns_its_certificate() {
    let home = Home::new();
    assert!(meet(&home.openssl("server"), &Trust::Insecure, "vpn.example").is_ok());
}

#[test]
fn a_stolen_certificate_without_its_key_is_refused_under_every_trust() {
    let home = Home::new();
    let honest = home.openssl("server");
    let thief = home.openssl("thief");
    let stolen = rustls::sign::CertifiedKey::new(honest.certs().to_vec(), Arc::clone(&thief.certified().key));
    let trusts = [ca(&home.file("server.crt")), Trust::Pin(vec![honest.fingerprint()]), Trust::Insecure];
    for trust in trusts {
        let server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(stolen.clone())));
        let refusal = shake(server, &trust, "mpvpn").unwrap_err();
        assert!(matches!(refusal, Some(CertificateRefusal::NotOwner { .. })), "{trust:?}: {refusal:?}");
    }
}

#[test]
fn the_key_exchange_is_post_quantum_and_the_cipher_suits_the_cpu() {
    let home = Home::new();
    let client = meet(&home.openssl("server"), &Trust::Insecure, "vpn.example").unwrap();
    assert_eq!(client.negotiated_key_exchange_group().unwrap().name(), NamedGroup::X25519MLKEM768);
    let expected = match crate::provider::cpu_has_aes() {
        true => rustls::CipherSuite::TLS13_AES_128_GCM_SHA256,
        false => rustls::CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    };
    assert_eq!(client.negotiated_cipher_suite().unwrap().suite(), expected);
    assert_eq!(client.alpn_protocol(), Some(&b"h3"[..]));
    assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
}

#[test]
fn a_ca_file_without_certificates_is_an_error_that_names_it() {
    let home = Home::new();
    std::fs::write(home.file("empty.crt"), "").unwrap();
    let error = client_config(&ca(&home.file("empty.crt")), &[b"h3"]).unwrap_err();
    assert!(matches!(error, Error::Content { .. }));
    assert!(error.to_string().contains("empty.crt"), "{error}");
}

#[test]
fn names_of_a_certificate_are_bounded_and_safe_to_print() {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("a\u{1b}[31m{}", "b".repeat(1000)));
    let shown = names(params.self_signed(&key).unwrap().der());
    assert!(
        shown.iter().all(|name| name.is_ascii() && name.len() < 1000 && !name.contains('\u{1b}')),
        "{shown:?}"
    );
    let many = (0..100).map(|n| format!("host{n}.example")).collect::<Vec<_>>();
    let cert = CertificateParams::new(many).unwrap().self_signed(&key).unwrap();
    assert_eq!(names(cert.der()).len(), 8);
    assert!(names(&CertificateDer::from(vec![1, 2, 3])).is_empty());
}
