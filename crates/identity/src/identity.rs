//! A server's certificate and private key, and what is derived from them.
//!
//! In: PEM files, or a state folder where they are made once. Out: an [`Identity`] whose key belongs to
//! its certificate, its [`Fingerprint`], and secrets that are the same after a restart.

use std::{
    fmt,
    path::Path,
    str::FromStr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::{digest, hkdf};
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};

use x509_parser::extensions::GeneralName;

use crate::provider::provider;
use mpvpn_input::{Error, Result, files};

/// Validity of a certificate that mpvpn makes: 10 years. Clients pin it, so a shorter validity only brings
/// outages; a longer one keeps a stolen key usable.
const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(3652 * 24 * 3600);
/// The validity of such a certificate begins this long before it is made, for clients whose clock is behind.
/// Nothing gets worse with more.
const BACKDATED_BY: Duration = Duration::from_secs(24 * 3600);

/// A certificate chain and the private key of its leaf.
#[derive(Clone, derive_more::Debug)]
#[debug("Identity({})", self.fingerprint())]
pub struct Identity {
    certified: Arc<CertifiedKey>,
    key: Arc<PrivateKeyDer<'static>>,
}

impl Identity {
    /// Reads a certificate chain (PEM, leaf first) and its private key (PEM: PKCS #8, SEC 1 or PKCS #1).
    pub fn load(cert: &Path, key: &Path) -> Result<Self> {
        Self::new(read_certs(cert)?, &files::read_secret(key)?, cert, key)
    }

    /// A private key and a certificate chain, leaf first, both PEM, which are to be kept in `path`.
    pub fn from_pem(key: &str, chain: &str, path: &Path) -> Result<Self> {
        Self::new(parse_certs(chain.as_bytes(), path)?, key.as_bytes(), path, path)
    }

    fn new(chain: Vec<CertificateDer<'static>>, secret: &[u8], cert: &Path, key: &Path) -> Result<Self> {
        let bad_key = |found: String| Error::content(key, "a private key in PEM", found);
        let private = PrivateKeyDer::from_pem_slice(secret).map_err(|error| bad_key(error.to_string()))?;
        let certified = match CertifiedKey::from_der(chain, private.clone_key(), &provider()) {
            Ok(certified) => certified,
            Err(rustls::Error::InconsistentKeys(_)) => {
                return Err(Error::KeyMismatch { cert: cert.into(), key: key.into() });
            }
            Err(rustls::Error::InvalidCertificate(why)) => {
                let found = format!("one that cannot be used: {why}");
                return Err(Error::content(cert, "a certificate in PEM", found));
            }
            Err(error) => return Err(bad_key(error.to_string())),
        };
        Ok(Self { certified: Arc::new(certified), key: Arc::new(private) })
    }

    /// A private key (PKCS #8, DER) and a certificate for it that has a critical extension which webpki does
    /// not know.
    pub fn unchecked(key: Vec<u8>, certificate: CertificateDer<'static>) -> Result<Self> {
        let key = PrivateKeyDer::Pkcs8(key.into());
        let signing = provider().key_provider.load_private_key(key.clone_key())?;
        let certified = CertifiedKey::new(vec![certificate], signing);
        Ok(Self { certified: Arc::new(certified), key: Arc::new(key) })
    }

    /// The identity kept in `state_dir` as `server.crt` and `server.key`; made at the first call.
    ///
    /// It is self-signed, on P-256, for the name `localhost` and without a subject, and good for 10 years.
    pub fn load_or_create(state_dir: &Path) -> Result<Self> {
        files::create_private_dir(state_dir)?;
        let _lock = files::lock_dir(state_dir)?;
        let (cert, key) = (state_dir.join("server.crt"), state_dir.join("server.key"));
        if !cert.exists() && !key.exists() {
            create(&cert, &key)?;
        }
        Self::load(&cert, &key)
    }

    /// The certificates, leaf first.
    pub fn certs(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }

    /// The fingerprint of the leaf certificate, which clients pin.
    pub fn fingerprint(&self) -> Fingerprint {
        self.certified.cert.first().map_or(Fingerprint([0; 32]), |leaf| Fingerprint::of(leaf))
    }

    /// From when until when the leaf is valid; in the past if it cannot be read.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        let parsed = self.certs().first().and_then(|leaf| x509_parser::parse_x509_certificate(leaf).ok());
        let at = |time: x509_parser::time::ASN1Time| {
            UNIX_EPOCH + Duration::from_secs(time.timestamp().max(0).unsigned_abs())
        };
        parsed.map_or((UNIX_EPOCH, UNIX_EPOCH), |(_, leaf)| {
            (at(leaf.validity().not_before), at(leaf.validity().not_after))
        })
    }

    /// The moment until which the leaf is valid (RFC 3339, UTC).
    pub fn valid_until(&self) -> String {
        let moment = time::OffsetDateTime::from(self.validity().1);
        moment.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
    }

    /// The DNS names of the leaf.
    pub(crate) fn dns_names(&self) -> Vec<String> {
        self.certs().first().map(dns_names).unwrap_or_default()
    }

    /// Whether the leaf has all of these DNS names.
    pub fn is_for(&self, names: &[String]) -> bool {
        let own = self.dns_names();
        names.iter().all(|name| own.iter().any(|own| own.eq_ignore_ascii_case(name)))
    }

    /// A secret of `N` bytes (at most 8160) for the purpose that `label` names.
    ///
    /// HKDF-SHA256 (RFC 5869) of the private key: the same after every restart with the same key file,
    /// unrelated for other labels, and of no use for finding the key.
    pub fn derive_secret<const N: usize>(&self, label: &str) -> [u8; N] {
        struct Length(usize);
        impl hkdf::KeyType for Length {
            fn len(&self) -> usize {
                self.0
            }
        }
        const { assert!(N <= 255 * 32, "HKDF-SHA256 gives at most 255 blocks") };
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"mpvpn identity 1");
        let derived = salt.extract(self.key.secret_der());
        let mut secret = [0; N];
        derived
            .expand(&[label.as_bytes()], Length(N))
            .and_then(|material| material.fill(&mut secret))
            .expect("the length is checked at compile time");
        secret
    }

    /// The chain and the signing key, for rustls.
    pub fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }
}

/// The DNS names of a certificate's subjectAltName.
pub(crate) fn dns_names(cert: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, cert)) = x509_parser::parse_x509_certificate(cert) else { return Vec::new() };
    let alternative = cert.subject_alternative_name().ok().flatten();
    let names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    };
    names.filter_map(name).collect()
}

/// All certificates of a PEM file, at least one.
pub fn read_certs(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    parse_certs(&files::read(path)?, path)
}

/// The certificates in the content of the PEM file `path`, at least one.
fn parse_certs(pem: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bad = |found: String| Error::content(path, "a certificate in PEM", found);
    let certs: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| bad(error.to_string()))?;
    if certs.is_empty() {
        return Err(bad("none".into()));
    }
    Ok(certs)
}

fn create(cert_file: &Path, key_file: &Path) -> Result<()> {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    // The name says nothing, as strangers see it; clients know the server by its fingerprint.
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()])?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.key_usages = vec![rcgen::KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + now.saturating_sub(BACKDATED_BY);
    params.not_after = params.not_before + BACKDATED_BY + CERTIFICATE_LIFETIME;
    let cert = params.self_signed(&pair)?;
    // The key is written first: a crash in between leaves the key alone, which the next start reports as an
    // error.
    files::write_secret(key_file, pair.serialize_pem().as_bytes())?;
    files::write_secret(cert_file, cert.pem().as_bytes())
}

/// The SHA-256 of a certificate's DER form, or of other data.
#[derive(Clone, Copy, derive_more::Debug, PartialEq, Eq)]
#[debug("{self}")]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// The fingerprint of `data`.
    pub fn of(data: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, data).as_ref());
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A text that is not a fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a SHA-256 fingerprint: expected 64 hexadecimal digits, with or without colons")]
pub struct ParseFingerprintError(String);

impl FromStr for Fingerprint {
    type Err = ParseFingerprintError;

    /// 64 hexadecimal digits of either case; colons between bytes, as openssl prints them, are fine.
    fn from_str(text: &str) -> Result<Self, ParseFingerprintError> {
        let error = || ParseFingerprintError(text.chars().take(120).collect());
        let digits: Vec<u8> = match text.contains(':') {
            false => text.bytes().collect(),
            true if text.split(':').all(|byte| byte.len() == 2) => {
                text.bytes().filter(|b| *b != b':').collect()
            }
            true => return Err(error()),
        };
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return Err(error());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte =
                nibble(pair[0]).zip(nibble(pair[1])).map(|(high, low)| high << 4 | low).ok_or_else(error)?;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

mpvpn_input::text_of_parsed! {
    Fingerprint: "64 hexadecimal digits in quotes", as in "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    /// A certificate that is valid for this time.
    pub(crate) fn valid(from: SystemTime, lifetime: Duration) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["vpn.example".to_owned()]).unwrap();
        let start = from.duration_since(UNIX_EPOCH).unwrap();
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + start;
        params.not_after = params.not_before + lifetime;
        let cert = params.self_signed(&key).unwrap();
        Identity::from_pem(&key.serialize_pem(), &cert.pem(), Path::new("test")).unwrap()
    }

    #[test]
    fn a_certificate_tells_its_validity_and_names() {
        let (from, lifetime) = (UNIX_EPOCH + Duration::from_secs(1_800_000_000), Duration::from_secs(3600));
        let identity = valid(from, lifetime);
        assert_eq!(identity.validity(), (from, from + lifetime));
        assert_eq!(identity.valid_until(), "2027-01-15T09:00:00Z");
        let of = |names: &[&str]| identity.is_for(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(of(&["VPN.example"]) && !of(&["vpn.example", "other.example"]));
    }

    #[test]
    fn an_identity_is_made_once_and_kept() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("state");
        let first = Identity::load_or_create(&dir).unwrap();
        let second = Identity::load_or_create(&dir).unwrap();
        assert_eq!(first.fingerprint(), second.fingerprint());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(&dir.join("server.key")), 0o600);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2, "a draft was left behind");
    }

    #[test]
    fn an_identity_made_here_names_no_program_and_lasts_ten_years() {
        let home = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(home.path()).unwrap();
        assert_eq!(crate::tls::names(&identity.certs()[0]), ["localhost"]);
        let (_, cert) = x509_parser::parse_x509_certificate(&identity.certs()[0]).unwrap();
        assert_eq!((cert.subject().to_string(), cert.issuer().to_string()), (String::new(), String::new()));
        let validity = cert.validity();
        assert!(validity.is_valid());
        let left = validity.not_after.timestamp() - validity.not_before.timestamp();
        assert_eq!(left / (365 * 24 * 3600), 10);
    }

    #[test]
    fn secrets_survive_a_restart_and_differ_by_label() {
        let home = tempfile::tempdir().unwrap();
        let before = Identity::load_or_create(home.path()).unwrap();
        let after = Identity::load_or_create(home.path()).unwrap();
        assert_eq!(before.derive_secret::<64>("reset"), after.derive_secret::<64>("reset"));
        assert_ne!(before.derive_secret::<32>("reset"), before.derive_secret::<32>("token"));
        let other = Identity::load_or_create(&home.path().join("other")).unwrap();
        assert_ne!(before.derive_secret::<32>("reset"), other.derive_secret::<32>("reset"));
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let (a, b) = (home.path().join("a"), home.path().join("b"));
        Identity::load_or_create(&a).unwrap();
        Identity::load_or_create(&b).unwrap();
        let error = Identity::load(&a.join("server.crt"), &b.join("server.key")).unwrap_err();
        assert!(matches!(error, Error::KeyMismatch { .. }), "{error}");
    }

    #[test]
    fn half_an_identity_is_an_error_and_is_not_overwritten() {
        let home = tempfile::tempdir().unwrap();
        Identity::load_or_create(home.path()).unwrap();
        std::fs::remove_file(home.path().join("server.crt")).unwrap();
        let key = std::fs::read(home.path().join("server.key")).unwrap();
        let error = Identity::load_or_create(home.path()).unwrap_err();
        assert!(error.to_string().contains("server.crt"), "{error}");
        assert_eq!(std::fs::read(home.path().join("server.key")).unwrap(), key);
    }

    #[test]
    fn files_that_are_no_pem_are_named() {
        let home = tempfile::tempdir().unwrap();
        Identity::load_or_create(home.path()).unwrap();
        let (cert, key) = (home.path().join("server.crt"), home.path().join("server.key"));
        let junk = home.path().join("junk");
        std::fs::write(&junk, "hello").unwrap();
        let error = Identity::load(&junk, &key).unwrap_err().to_string();
        assert_eq!(error, format!("{}: expected a certificate in PEM, found none", junk.display()));
        let error = Identity::load(&cert, &junk).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: expected a private key in PEM", junk.display())), "{error}");
        let error = Identity::load(&home.path().join("absent"), &key).unwrap_err().to_string();
        assert!(error.starts_with("cannot read ") && error.contains("absent"), "{error}");
    }

    #[test]
    fn fingerprints_are_read_as_openssl_prints_them() {
        let plain = "ab".repeat(32);
        let colons = vec!["AB"; 32].join(":");
        assert_eq!(colons.parse::<Fingerprint>(), plain.parse::<Fingerprint>());
        assert_eq!(colons.parse::<Fingerprint>().unwrap().to_string(), plain);
        let upside_down = format!("a:b{}", "ab".repeat(31));
        for bad in ["", "ab", &"ab".repeat(33), &"xy".repeat(32), &upside_down, "é"] {
            assert!(bad.parse::<Fingerprint>().is_err(), "{bad} was taken for a fingerprint");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_fingerprint_or_an_error(text in ".{0,100}") {
            let _ = text.parse::<Fingerprint>();
        }

        #[test]
        fn printing_and_reading_a_fingerprint_agree(bytes: [u8; 32]) {
            prop_assert_eq!(Fingerprint(bytes).to_string().parse(), Ok(Fingerprint(bytes)));
        }
    }
}
