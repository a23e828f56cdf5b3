use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use time::{Date, OffsetDateTime};
use x509_parser::{extensions::GeneralName, prelude::X509Certificate};

use super::ServerCertificates;
use crate::{
    identity::{Fingerprint, dns_names, read_certs},
    trust::Trust,
};
use mpvpn_input::{Error, Result};

/// Why a server's certificate was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateRefusal {
    /// Neither the certificate nor its issuer is trusted.
    #[error(
        "the server's certificate is not trusted: the client asked for `{asked}`, the certificate is for {}, and {} \
         has neither this certificate nor the CA that signed it", list(presented), file.display()
    )]
    Untrusted {
        /// The name or address asked for.
        asked: String,
        /// The names in the certificate.
        presented: Vec<String>,
        /// The file of trusted certificates.
        file: PathBuf,
    },
    /// A trusted CA signed it, but for other names.
    #[error(
        "the server's certificate is for another name: the client asked for `{asked}`, the certificate is for {}",
        list(presented)
    )]
    OtherName {
        /// The name or address asked for.
        asked: String,
        /// The names in the certificate.
        presented: Vec<String>,
    },
    /// No CA that this machine trusts signed it.
    #[error(
        "the server's certificate is not trusted: the client asked for `{asked}`, the certificate is for {}, and no CA that \
         this machine trusts signed it",
        list(presented)
    )]
    UnknownCa {
        /// The name or address asked for.
        asked: String,
        /// The names in the certificate.
        presented: Vec<String>,
    },
    /// The certificate is none of those that were pinned.
    #[error(
        "the server's certificate is not the pinned one: its SHA-256 begins with {}, the pinned one with {}",
        first_digits(presented),
        either(expected)
    )]
    OtherFingerprint {
        /// The fingerprints that were pinned.
        expected: Vec<Fingerprint>,
        /// The fingerprint of the server's certificate.
        presented: Fingerprint,
    },
    /// It cannot be used: expired, damaged, for another purpose.
    #[error(
        "the server's certificate cannot be used: the client asked for `{asked}`, the certificate is for {}: {why}",
        list(presented)
    )]
    Unusable {
        /// The name or address asked for.
        asked: String,
        /// The names in the certificate.
        presented: Vec<String>,
        /// The reason why it cannot be used.
        why: String,
    },
    /// The server presents a certificate whose private key it does not have.
    #[error("the server does not have the private key of its certificate: its signature is wrong ({why})")]
    NotOwner {
        /// The error of the signature check.
        why: String,
    },
}

impl CertificateRefusal {
    /// The user's next step after the error.
    pub fn next_step(&self) -> &'static str {
        match self {
            Self::Untrusted { .. } => {
                "copy the server's certificate to this machine and give it with --ca, or give its fingerprint with \
                 --pin; if you have done that, an attacker may be between client and server"
            }
            Self::UnknownCa { .. } => {
                "give the server's fingerprint with --pin if it has no certificate of a public CA, or its CA with --ca PEM; if \
                 the server has one, update the CAs of this machine (the package ca-certificates)"
            }
            Self::OtherName { .. } => {
                "use a name of the certificate in --server, or give the certificate itself with --ca"
            }
            Self::OtherFingerprint { .. } => {
                "ask the server's owner for its current fingerprint; if it has not changed, an attacker is between client \
                 and server"
            }
            Self::Unusable { .. } => {
                "renew or replace the server's certificate; if the clock of this machine is wrong, set it (`timedatectl`)"
            }
            Self::NotOwner { .. } => "check the server: an attacker may be between client and server",
        }
    }
}

/// The last [`CertificateRefusal`] of a TLS configuration, for the code that reports the failed handshake.
#[derive(Clone, Debug, Default)]
pub struct LastRefusal(Arc<Mutex<Option<CertificateRefusal>>>);

impl LastRefusal {
    /// Takes the last refusal out.
    pub fn take(&self) -> Option<CertificateRefusal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, refusal: CertificateRefusal) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(refusal);
    }
}

#[derive(Debug)]
pub(super) struct Verifier {
    rule: TrustRule,
    provider: Arc<CryptoProvider>,
    last_refusal: LastRefusal,
}

#[derive(Debug)]
enum TrustRule {
    File { file: PathBuf, certs: Vec<CertificateDer<'static>>, issuers: Option<Arc<WebPkiServerVerifier>> },
    System(Arc<WebPkiServerVerifier>),
    Pinned(Vec<Fingerprint>),
    Own(ServerCertificates),
    Any,
}

impl Verifier {
    pub(super) fn new(
        trust: &Trust,
        provider: Arc<CryptoProvider>,
        last_refusal: LastRefusal,
    ) -> Result<Self> {
        let rule = match trust {
            Trust::Ca(file) => {
                let certs = read_certs(file)?;
                TrustRule::File { file: file.clone(), issuers: issuers(&certs, &provider), certs }
            }
            Trust::System => TrustRule::System(system_issuers(&provider)?),
            Trust::Pin(fingerprints) => TrustRule::Pinned(fingerprints.clone()),
            Trust::Insecure => TrustRule::Any,
        };
        Ok(Self { rule, provider, last_refusal })
    }

    /// Accepts what `own` has at the moment of a handshake.
    pub(super) fn of_own(own: ServerCertificates, provider: Arc<CryptoProvider>) -> Self {
        Self { rule: TrustRule::Own(own), provider, last_refusal: LastRefusal::default() }
    }

    fn judge(
        &self,
        cert: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        asked: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<(), CertificateRefusal> {
        match &self.rule {
            TrustRule::Any => Ok(()),
            TrustRule::Own(own) if own.has(cert) => Ok(()),
            TrustRule::Own(own) => Err(CertificateRefusal::OtherFingerprint {
                expected: vec![own.first().fingerprint()],
                presented: Fingerprint::of(cert),
            }),
            TrustRule::Pinned(expected) => match Fingerprint::of(cert) {
                presented if expected.contains(&presented) => Ok(()),
                presented => {
                    Err(CertificateRefusal::OtherFingerprint { expected: expected.clone(), presented })
                }
            },
            // The certificate itself is in the file: the user trusts it whatever its name and dates are.
            TrustRule::File { certs, .. } if certs.iter().any(|listed| listed == cert) => Ok(()),
            TrustRule::File { file, issuers, .. } => {
                let untrusted =
                    |asked, presented| CertificateRefusal::Untrusted { asked, presented, file: file.clone() };
                // webpki refuses a CA certificate as a server's before it looks at the signature.
                let Some(issuers) = issuers.as_ref().filter(|_| !is_ca(cert)) else {
                    return Err(untrusted(asked.to_str().into_owned(), names(cert)));
                };
                let checked = issuers.verify_server_cert(cert, intermediates, asked, ocsp, now);
                checked.map(drop).map_err(|error| refusal(error, cert, asked, untrusted))
            }
            TrustRule::System(issuers) => {
                let unknown = |asked, presented| CertificateRefusal::UnknownCa { asked, presented };
                if is_ca(cert) {
                    return Err(unknown(asked.to_str().into_owned(), names(cert)));
                }
                let checked = issuers.verify_server_cert(cert, intermediates, asked, ocsp, now);
                checked.map(drop).map_err(|error| refusal(error, cert, asked, unknown))
            }
        }
    }

    fn refuse(&self, refusal: CertificateRefusal) -> rustls::Error {
        let error = match &refusal {
            CertificateRefusal::OtherName { .. } => CertificateError::NotValidForName,
            CertificateRefusal::NotOwner { .. } => CertificateError::BadSignature,
            CertificateRefusal::Untrusted { .. } | CertificateRefusal::UnknownCa { .. } => {
                CertificateError::UnknownIssuer
            }
            other => CertificateError::Other(OtherError(Arc::new(other.clone()))),
        };
        self.last_refusal.set(refusal);
        rustls::Error::InvalidCertificate(error)
    }

    fn check_signature(
        &self,
        checked: Result<HandshakeSignatureValid, rustls::Error>,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        checked.map_err(|error| self.refuse(CertificateRefusal::NotOwner { why: error.to_string() }))
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.judge(end_entity, intermediates, server_name, ocsp_response, now) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(refusal) => Err(self.refuse(refusal)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        self.check_signature(verify_tls12_signature(message, cert, dss, algorithms))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        self.check_signature(verify_tls13_signature(message, cert, dss, algorithms))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Why webpki refused `cert` for the name `asked`; `untrusted` makes the refusal if nobody who is trusted
/// signed it.
fn refusal(
    error: rustls::Error,
    cert: &CertificateDer<'_>,
    asked: &ServerName<'_>,
    untrusted: impl Fn(String, Vec<String>) -> CertificateRefusal,
) -> CertificateRefusal {
    let (asked, presented) = (asked.to_str().into_owned(), names(cert));
    match error {
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => CertificateRefusal::OtherName { asked, presented },
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => untrusted(asked, presented),
        rustls::Error::InvalidCertificate(
            CertificateError::ExpiredContext { time, .. } | CertificateError::NotValidYetContext { time, .. },
        ) => CertificateRefusal::Unusable { asked, presented, why: validity(cert, time) },
        rustls::Error::InvalidCertificate(why) => {
            CertificateRefusal::Unusable { asked, presented, why: why.to_string() }
        }
        other => CertificateRefusal::Unusable { asked, presented, why: other.to_string() },
    }
}

/// When a certificate is valid that is not at `clock`, the time of this machine.
fn validity(cert: &CertificateDer<'_>, clock: UnixTime) -> String {
    let day = |unix: i64| OffsetDateTime::from_unix_timestamp(unix).map_or(Date::MAX, OffsetDateTime::date);
    let (Some(cert), clock) = (parse(cert), day(clock.as_secs() as i64)) else { return String::new() };
    let [from, until] = [cert.validity().not_before, cert.validity().not_after].map(|at| day(at.timestamp()));
    format!(
        "it has expired or is not valid yet: it is valid from {from} to {until}, and the clock of this machine says {clock}"
    )
}

/// Verifies chains to the CAs that this machine trusts.
fn system_issuers(provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
    WebPkiServerVerifier::builder_with_provider(Arc::new(system_roots()?), Arc::clone(provider))
        .build()
        .map_err(|error| no_system_roots(&error))
}

/// The CAs that this machine trusts.
pub(super) fn system_roots() -> Result<RootCertStore> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(found.certs);
    match (usable, found.errors.first()) {
        (0, Some(error)) => Err(no_system_roots(error)),
        (0, None) => Err(no_system_roots(&"no file has any")),
        _ => Ok(roots),
    }
}

/// Whether a CA that this machine trusts signed this chain, leaf first, for the first DNS name of the leaf.
pub(super) fn is_publicly_trusted(chain: &[CertificateDer<'static>], provider: &Arc<CryptoProvider>) -> bool {
    let Some((leaf, intermediates)) = chain.split_first().filter(|(leaf, _)| !is_ca(leaf)) else {
        return false;
    };
    let Some(name) = dns_names(leaf).into_iter().next() else { return false };
    // A name of the first level below a wildcard.
    let Ok(name) = ServerName::try_from(name.replacen('*', "www", 1)) else { return false };
    let Ok(issuers) = system_issuers(provider) else { return false };
    issuers.verify_server_cert(leaf, intermediates, &name, &[], UnixTime::now()).is_ok()
}

fn no_system_roots(why: &dyn std::fmt::Display) -> Error {
    Error::usage(
        format!("--ca system: this machine has no CAs that it trusts ({why})"),
        "install the package ca-certificates, or give --ca PEM or --pin SHA256",
    )
}

/// Verifies chains to those of `certs` that are marked as a CA: webpki alone would accept a server's
/// certificate in the file as an issuer of others.
fn issuers(
    certs: &[CertificateDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Option<Arc<WebPkiServerVerifier>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certs.iter().filter(|cert| is_ca(cert)).cloned());
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build().ok()
}

fn parse<'a>(cert: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    x509_parser::parse_x509_certificate(cert).ok().map(|(_, parsed)| parsed)
}

/// Whether the certificate is marked as that of a CA.
pub fn is_ca(cert: &CertificateDer<'_>) -> bool {
    parse(cert).is_some_and(|cert| cert.is_ca())
}

/// The names and addresses of a certificate, at most 8 with at most 64 characters, escaped for printing:
/// those of its subjectAltName, or its common name if it has none.
pub fn names(cert: &CertificateDer<'_>) -> Vec<String> {
    let Some(cert) = parse(cert) else { return Vec::new() };
    let alternative = cert.subject_alternative_name().ok().flatten();
    let mut names: Vec<String> = alternative
        .iter()
        .flat_map(|extension| &extension.value.general_names)
        .filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            GeneralName::IPAddress(bytes) => address(bytes),
            _ => None,
        })
        .take(8)
        .collect();
    if names.is_empty() {
        let common = cert.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        names.extend(common.take(8).map(str::to_owned));
    }
    names.iter().map(|name| name.chars().take(64).flat_map(char::escape_default).collect()).collect()
}

fn address(bytes: &[u8]) -> Option<String> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(std::net::Ipv4Addr::from(v4).to_string());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|v6| std::net::Ipv6Addr::from(v6).to_string())
}

fn either(fingerprints: &[Fingerprint]) -> String {
    fingerprints.iter().map(first_digits).collect::<Vec<_>>().join(" or ")
}

/// The first 16 hexadecimal digits: enough for people to tell two certificates apart.
fn first_digits(fingerprint: &Fingerprint) -> String {
    fingerprint.to_string().chars().take(16).collect()
}

fn list(names: &[String]) -> String {
    match names {
        [] => "no name".into(),
        names => names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
    }
}
