//! Certificates of clients: which CA signs them, whose they are, and whether they were revoked or have
//! expired.
//!
//! In: PEM files of the CA and of its revocations, and certificates that a TLS handshake has verified. Out:
//! the user and the [`CertificateId`]. Always holds: a chain, its dates and purpose are verified by the
//! handshake; whether the user is listed and the certificate is revoked or has expired since is decided for
//! each request, so that a change counts at once.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use x509_parser::{extensions::GeneralName, prelude::X509Certificate};

use crate::{
    denied::{Denied, User},
    users::SharedUsers,
};
use mpvpn_config::{AuthMode, ServerConfig};
use mpvpn_identity::{
    client_ca::{CertificateId, ClientCa, Revocations, id, unix_seconds},
    token::Token,
};
use mpvpn_input::{Result, shared::Shared};

/// The reason given to a client whose certificate was revoked.
pub const REVOKED: &str = "the client's certificate was revoked";
/// The reason given to a client whose certificate has expired.
pub const EXPIRED: &str = "the client's certificate has expired";

/// The scheme of the `authorization` field by which the server's TCP side tells its HTTP/3 which client asks.
const FORWARDED: &str = "mpvpn-forwarded";

/// The files of a configuration about certificates of clients.
#[derive(Clone, Debug)]
pub struct ClientCertificates {
    /// The CAs that sign them.
    pub ca: ClientCa,
    /// Those that were revoked.
    pub revoked: Revocations,
}

impl ClientCertificates {
    /// Reads the files that `config` names; `None` if certificates of clients do not count.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn load(config: &ServerConfig) -> Result<Option<Self>> {
        let Some(ca) = config.client_ca.as_deref().filter(|_| config.auth == AuthMode::Mtls) else {
            return Ok(None);
        };
        let revoked = config.crl.as_deref().map(Revocations::load).transpose()?.unwrap_or_default();
        Ok(Some(Self { ca: ClientCa::load(ca)?, revoked }))
    }
}

/// The check of certificates of clients. All clones see the same users and revocations.
#[derive(Clone, Debug)]
pub struct CertificateCheck {
    users: SharedUsers,
    revoked: Shared<Revocations>,
    /// The accepted certificates that have not expired, by their ends (Unix time). Only a CA of `client-ca`
    /// adds to them.
    accepted: Arc<Mutex<BTreeSet<(u64, CertificateId)>>>,
    /// Proves that a request comes from this process.
    forward: Token,
}

impl CertificateCheck {
    /// A check by these users and revocations.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn new(users: SharedUsers, revoked: Revocations) -> Result<Self> {
        Ok(Self { users, revoked: revoked.into(), accepted: Arc::default(), forward: Token::generate()? })
    }

    /// The users.
    pub fn users(&self) -> &SharedUsers {
        &self.users
    }

    /// Replaces the revocations; returns the certificates that are revoked since.
    pub fn revoke(&self, revoked: Revocations) -> BTreeSet<CertificateId> {
        let before = self.revoked.replace(revoked);
        self.revoked.now().added_since(&before)
    }

    /// The accepted certificates that have expired by `now`, each once.
    pub fn take_expired(&self, now: SystemTime) -> BTreeSet<CertificateId> {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        let valid = accepted.split_off(&(unix_seconds(now), CertificateId::default()));
        let expired = std::mem::replace(&mut *accepted, valid);
        expired.into_iter().map(|(_, id)| id).collect()
    }

    /// When the next accepted certificate expires.
    pub fn next_expiry(&self) -> Option<SystemTime> {
        let accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        // The last second belongs to the validity (RFC 5280 §4.1.2.5).
        accepted.first().map(|(until, _)| UNIX_EPOCH + Duration::from_secs(until.saturating_add(1)))
    }

    /// The user of a verified certificate (DER), or of a request that this process forwards; and which
    /// certificate it is.
    ///
    /// # Errors
    /// If the user has no access.
    pub(crate) fn check(
        &self,
        authorization: Option<&str>,
        certificate: Option<&[u8]>,
        now: SystemTime,
    ) -> Result<(User, CertificateId), Denied> {
        let shown = match certificate {
            Some(certificate) => Shown::read(certificate).ok_or(Denied::Nameless)?,
            None => authorization.and_then(|field| self.forwarded(field)).ok_or(Denied::NoCertificate)?,
        };
        if shown.name.is_empty() {
            return Err(Denied::Nameless);
        }
        if self.revoked.now().contains(&shown.id) {
            return Err(Denied::CertificateRevoked);
        }
        if shown.until < unix_seconds(now) {
            return Err(Denied::CertificateExpired);
        }
        let user = self.users.now().listed(&shown.name, now)?;
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.insert((shown.until, shown.id));
        Ok((user, shown.id))
    }

    /// Whether a user is listed with access, and this certificate is not revoked.
    pub(crate) fn has_access(&self, user: &str, id: &CertificateId, now: SystemTime) -> bool {
        !self.revoked.now().contains(id) && self.users.now().listed(user, now).is_ok()
    }

    /// The `authorization` field by which the server's TCP side forwards requests of a client with this
    /// certificate.
    pub fn forward(&self, certificate: &[u8]) -> Option<String> {
        let Shown { name, id, until } = Shown::read(certificate)?;
        let (id, name) = (hex(&id), hex(name.as_bytes()));
        Some(format!("{FORWARDED} {} {id} {until} {name}", self.forward.reveal()))
    }

    fn forwarded(&self, authorization: &str) -> Option<Shown> {
        let mut words = authorization.strip_prefix(FORWARDED)?.split_ascii_whitespace();
        let [secret, id, until, name] = [words.next()?, words.next()?, words.next()?, words.next()?];
        verify_slices_are_equal(secret.as_bytes(), self.forward.reveal().as_bytes()).ok()?;
        let (name, id) = (String::from_utf8(bytes(name)?).ok()?, bytes(id)?.try_into().ok()?);
        Some(Shown { name, id, until: until.parse().ok()? })
    }
}

/// The parts of a certificate that describe its owner.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    /// The first e-mail address, DNS name or URI of the subjectAltName, else the common name, else empty.
    name: String,
    id: CertificateId,
    /// The last second of its validity (Unix time).
    until: u64,
}

impl Shown {
    /// Reads a certificate (DER); `None` if it is damaged.
    fn read(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let id = id(certificate.issuer().as_raw(), certificate.raw_serial());
        let until = certificate.validity().not_after.timestamp().max(0).unsigned_abs();
        Some(Self { name: name_of(&certificate), id, until })
    }
}

fn name_of(certificate: &X509Certificate<'_>) -> String {
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let mut names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let name = names.find_map(|name| match name {
        GeneralName::RFC822Name(name) | GeneralName::DNSName(name) | GeneralName::URI(name) => Some(*name),
        _ => None,
    });
    let common = || certificate.subject().iter_common_name().find_map(|name| name.as_str().ok());
    name.or_else(common).unwrap_or_default().to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).ok());
    digits.map(|pair| u8::from_str_radix(pair.filter(|pair| pair.len() == 2)?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
        KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
    };

    use rustls::{pki_types::UnixTime, server::danger::ClientCertVerifier};

    use super::*;
    use crate::{
        file::{LockedUsers, UserCredential, UserSettings},
        users::Users,
    };

    struct Ca(Issuer<'static, KeyPair>, String);

    impl Ca {
        fn new() -> Self {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            params.distinguished_name.push(DnType::CommonName, "clients");
            let pem = params.self_signed(&key).unwrap().pem();
            Self(Issuer::new(params, key), pem)
        }

        fn client(&self, serial: u64, common: &str, names: Vec<SanType>) -> Vec<u8> {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.serial_number = Some(SerialNumber::from(serial));
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, common);
            params.subject_alt_names = names;
            params.signed_by(&KeyPair::generate().unwrap(), &self.0).unwrap().der().to_vec()
        }

        fn revoke(&self, serial: u64) -> String {
            let moment = rcgen::date_time_ymd(2026, 1, 1);
            let revoked = RevokedCertParams {
                serial_number: SerialNumber::from(serial),
                revocation_time: moment,
                reason_code: None,
                invalidity_date: None,
            };
            let list = CertificateRevocationListParams {
                this_update: moment,
                next_update: rcgen::date_time_ymd(2099, 1, 1),
                crl_number: SerialNumber::from(1u64),
                issuing_distribution_point: None,
                revoked_certs: vec![revoked],
                key_identifier_method: KeyIdMethod::Sha256,
            };
            list.signed_by(&self.0).unwrap().pem().unwrap()
        }
    }

    fn now() -> SystemTime {
        SystemTime::now()
    }

    fn check(names: &[&str]) -> CertificateCheck {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("users.toml");
        for name in names {
            let (mut users, settings) = (LockedUsers::open(&path).unwrap(), UserSettings::default());
            assert_eq!(
                users.add_with_credential(name, &settings, UserCredential::Certificate).unwrap(),
                None
            );
        }
        CertificateCheck::new(Users::load(&path).unwrap().into(), Revocations::default()).unwrap()
    }

    #[test]
    fn the_user_is_the_first_name_of_the_certificate_else_the_common_name() {
        let ca = Ca::new();
        let mail = || SanType::Rfc822Name("alice@example.org".try_into().unwrap());
        let dns = || SanType::DnsName("laptop.example.org".try_into().unwrap());
        let uri = || SanType::URI("spiffe://example.org/alice".try_into().unwrap());
        let ip = || SanType::IpAddress("192.0.2.1".parse().unwrap());
        for (names, user) in [
            (vec![mail(), dns()], "alice@example.org"),
            (vec![dns(), mail()], "laptop.example.org"),
            (vec![ip(), uri()], "spiffe://example.org/alice"),
            (vec![ip()], "alice"),
            (vec![], "alice"),
        ] {
            assert_eq!(Shown::read(&ca.client(7, "alice", names)).unwrap().name, user);
        }
        assert!(Shown::read(b"junk").is_none());
    }

    #[test]
    fn a_listed_user_gets_in_and_nobody_else() {
        let (ca, check) = (Ca::new(), check(&["alice"]));
        let [alice, bob, nameless] = ["alice", "bob", ""].map(|name| ca.client(1, name, Vec::new()));
        assert_eq!(check.check(None, Some(&alice), now()).unwrap().0.name, "alice");
        for (certificate, why) in [
            (Some(&bob[..]), Denied::Unlisted("bob".into())),
            (Some(&nameless), Denied::Nameless),
            (Some(b"junk"), Denied::Nameless),
            (None, Denied::NoCertificate),
        ] {
            assert_eq!(check.check(None, certificate, now()), Err(why));
        }
    }

    #[test]
    fn a_revoked_certificate_is_refused_and_another_one_of_the_user_is_not() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("crl.pem");
        let (ca, check) = (Ca::new(), check(&["alice"]));
        let [old, new] = [1, 2].map(|serial| ca.client(serial, "alice", Vec::new()));
        std::fs::write(&path, ca.revoke(1)).unwrap();
        let revoked = check.revoke(Revocations::load(&path).unwrap());
        assert_eq!(revoked, BTreeSet::from([Shown::read(&old).unwrap().id]));
        assert_eq!(check.check(None, Some(&old), now()), Err(Denied::CertificateRevoked));
        assert!(check.check(None, Some(&new), now()).is_ok());
        for junk in ["", "junk", "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"] {
            std::fs::write(&path, junk).unwrap();
            let error = Revocations::load(&path).unwrap_err().to_string();
            assert!(error.contains("crl.pem: expected a certificate revocation list"), "{error}");
        }
    }

    #[test]
    fn a_certificate_that_was_accepted_is_named_once_when_it_expires() {
        let (ca, check) = (Ca::new(), check(&["alice"]));
        let [first, second] = [1, 2].map(|serial| ca.client(serial, "alice", Vec::new()));
        assert_eq!((check.next_expiry(), check.take_expired(now()).len()), (None, 0));
        for certificate in [&first, &second, &first] {
            check.check(None, Some(certificate), now()).unwrap();
        }
        let Shown { id, until, .. } = Shown::read(&first).unwrap();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(check.next_expiry(), Some(at(until + 1)));
        assert_eq!(check.take_expired(at(until)), BTreeSet::new());
        assert_eq!(check.take_expired(at(until + 1)), BTreeSet::from([id, Shown::read(&second).unwrap().id]));
        assert_eq!((check.next_expiry(), check.take_expired(at(until + 9)).len()), (None, 0));
        // Also where no handshake looks at it: a request that is forwarded, a session that is resumed.
        let later = check.check(Some(&check.forward(&first).unwrap()), None, at(until + 1));
        assert_eq!(later, Err(Denied::CertificateExpired));
    }

    #[test]
    fn a_request_that_this_process_forwards_is_that_of_the_certificate_and_nobody_can_make_one() {
        let (ca, check) = (Ca::new(), check(&["alice"]));
        let alice = ca.client(1, "alice", Vec::new());
        let shown = check.forward(&alice).unwrap();
        assert_eq!(check.check(Some(&shown), None, now()), check.check(None, Some(&alice), now()));
        let made_up = shown.replacen("mpvpn_", "mpvpn_A", 1);
        for bad in [&made_up[..], "mpvpn-forwarded", "mpvpn-forwarded a b c d", "Bearer abc", &shown[..40]] {
            assert_eq!(check.check(Some(bad), None, now()), Err(Denied::NoCertificate), "{bad}");
        }
    }

    #[test]
    fn a_file_without_a_ca_is_an_error_that_names_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ca.pem");
        std::fs::write(&path, Ca::new().1).unwrap();
        ClientCa::load(&path).unwrap();
        let leaf = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap().cert.pem();
        for bad in [&leaf[..], ""] {
            std::fs::write(&path, bad).unwrap();
            let error = ClientCa::load(&path).unwrap_err().to_string();
            assert!(error.contains("ca.pem: expected"), "{error}");
        }
    }

    #[test]
    fn another_ca_counts_for_the_handshakes_after_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ca.pem");
        let [old, new] = [Ca::new(), Ca::new()];
        let load = |ca: &Ca| {
            std::fs::write(&path, &ca.1).unwrap();
            ClientCa::load(&path).unwrap()
        };
        let used = load(&old);
        let verifier: Arc<dyn ClientCertVerifier> = Arc::new(used.clone());
        let accepts = |ca: &Ca| {
            let certificate = ca.client(1, "alice", Vec::new()).into();
            verifier.verify_client_cert(&certificate, &[], UnixTime::now()).is_ok()
        };
        assert_eq!((accepts(&old), accepts(&new)), (true, false));
        assert!(!used.replace(&load(&old)));
        assert!(used.replace(&load(&new)));
        assert_eq!((accepts(&old), accepts(&new)), (false, true));
    }
}
