//! A CA of clients for tests of access; those of the crate `server` include this file.

use std::{fs, path::PathBuf};

use mpvpn_identity::cert_files::CertFiles;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// A certificate of a client.
#[derive(Clone)]
pub(crate) struct Issued {
    pub(crate) files: CertFiles,
    pub(crate) der: Vec<u8>,
    serial: u64,
}

/// A CA, whose files are in a folder of its own.
pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    folder: tempfile::TempDir,
    issued: u64,
    revoked: Vec<u64>,
}

impl Ca {
    /// A CA that has revoked nothing.
    pub(crate) fn new() -> Self {
        let (key, folder) = (KeyPair::generate().unwrap(), tempfile::tempdir().unwrap());
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).unwrap();
        let ca = Self { issuer: Issuer::new(params, key), folder, issued: 0, revoked: Vec::new() };
        fs::write(ca.certificate_file(), certificate.pem()).unwrap();
        ca.write_revocations();
        ca
    }

    /// The file of its certificate.
    pub(crate) fn certificate_file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// The file of its revocation list.
    pub(crate) fn revocations_file(&self) -> PathBuf {
        self.folder.path().join("crl.pem")
    }

    /// Issues a certificate that names a user.
    pub(crate) fn issue(&mut self, user: &str) -> Issued {
        self.issued += 1;
        let (key, serial) = (KeyPair::generate().unwrap(), self.issued);
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |end: &str| self.folder.path().join(format!("{serial}.{end}"));
        let files = CertFiles { cert: file("pem"), key: file("key") };
        fs::write(&files.cert, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        Issued { files, der: certificate.der().to_vec(), serial }
    }

    /// Adds a certificate to the revocation list.
    pub(crate) fn revoke(&mut self, issued: &Issued) {
        self.revoked.push(issued.serial);
        self.write_revocations();
    }

    fn write_revocations(&self) {
        let moment = date_time_ymd(2026, 1, 1);
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: moment,
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: moment,
            next_update: date_time_ymd(2099, 1, 1),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: self.revoked.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(self.revocations_file(), list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
    }
}
