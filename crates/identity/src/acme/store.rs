//! The account and the certificate in the state folder: `acme/DIRECTORY/account.json` and `certificate.pem`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::identity::{Fingerprint, Identity};
use mpvpn_input::{Result, files};

/// Name of the folder in the state folder.
const FOLDER: &str = "acme";
/// The account: its URL and its key, as JSON.
const ACCOUNT: &str = "account.json";
/// The private key and the certificate chain, as PEM.
const CERTIFICATE: &str = "certificate.pem";
/// Hexadecimal digits of the hash in a folder's name: two directories of one host do not share them by
/// chance.
const HASH_DIGITS: usize = 8;

/// The files of one CA: the account there, and the certificate.
#[derive(Clone, Debug)]
pub struct AcmeStore {
    folder: PathBuf,
    domains: Vec<String>,
}

impl AcmeStore {
    /// The files of the CA with this directory, for these names. Another directory has other files: a
    /// certificate for tests does not count for another CA.
    pub fn new(state_dir: &Path, directory: &str, domains: &[String]) -> Self {
        let host = directory.split('/').nth(2).unwrap_or_default();
        let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '-', "_");
        let hash = Fingerprint::of(directory.as_bytes()).to_string();
        let folder = state_dir.join(FOLDER).join(format!("{host}-{}", &hash[..HASH_DIGITS]));
        Self { folder, domains: domains.to_vec() }
    }

    /// The account of an earlier order, as JSON.
    pub fn account(&self) -> Option<Vec<u8>> {
        files::read(&self.folder.join(ACCOUNT)).ok()
    }

    /// Keeps the account.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save_account(&self, json: &[u8]) -> Result<()> {
        files::create_private_dir(&self.folder)?;
        files::write_secret(&self.folder.join(ACCOUNT), json)
    }

    /// The certificate of an earlier order, if it has all names; it may have expired.
    pub fn certificate(&self) -> Option<Identity> {
        let file = self.folder.join(CERTIFICATE);
        if !file.exists() {
            return None;
        }
        match Identity::load(&file, &file) {
            Ok(identity) if identity.is_for(&self.domains) => Some(identity),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(%error, "a certificate of an earlier order cannot be used, and a new one is ordered");
                None
            }
        }
    }

    /// Keeps a certificate chain and its private key (both PEM), and returns them.
    ///
    /// # Errors
    /// If they do not belong together, the certificate has not all names, or the file cannot be written.
    pub fn save_certificate(&self, key: &str, chain: &str) -> Result<Identity> {
        files::create_private_dir(&self.folder)?;
        let file = self.folder.join(CERTIFICATE);
        let identity = Identity::from_pem(key, chain, &file)?;
        if !identity.is_for(&self.domains) {
            let expected = "a certificate for the names of [acme]";
            return Err(mpvpn_input::Error::content(file, expected, "one for other names from the CA"));
        }
        files::write_secret(&file, format!("{key}{chain}").as_bytes())?;
        Ok(identity)
    }
}

/// The files of all CAs in the state folder, and after them their folders.
pub fn files_in(state_dir: &Path) -> Vec<PathBuf> {
    let top = state_dir.join(FOLDER);
    let mut found = Vec::new();
    let entries = fs::read_dir(&top).into_iter().flatten().flatten().map(|entry| entry.path());
    for folder in entries.filter(|path| path.is_dir()) {
        found.extend([ACCOUNT, CERTIFICATE].map(|name| folder.join(name)));
        found.push(folder);
    }
    found.extend(top.is_dir().then_some(top));
    found
}

#[cfg(test)]
mod tests {
    use std::{io::ErrorKind, os::unix::fs::PermissionsExt};

    use super::*;

    fn store_in(home: &Path, directory: &str, domains: &[&str]) -> AcmeStore {
        let domains: Vec<_> = domains.iter().map(ToString::to_string).collect();
        AcmeStore::new(home, directory, &domains)
    }

    /// Removes a file if there is one, or a folder if it is empty.
    fn remove(path: &Path) {
        let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
        if let Err(error) = removed {
            let expected = [ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty];
            assert!(expected.contains(&error.kind()), "{}: {error}", path.display());
        }
    }

    #[test]
    fn all_files_are_named_before_their_folders_so_that_nothing_is_left() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(files_in(home.path()), Vec::<PathBuf>::new());
        for directory in ["https://a.example/dir", "https://b.example/dir"] {
            store_in(home.path(), directory, &["vpn.example"]).save_account(b"{}").unwrap();
        }
        files_in(home.path()).iter().for_each(|path| remove(path));
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        // Files of others stay.
        store_in(home.path(), "https://a.example/dir", &[]).save_account(b"{}").unwrap();
        fs::write(home.path().join(FOLDER).join("notes"), "mine").unwrap();
        files_in(home.path()).iter().for_each(|path| remove(path));
        assert!(home.path().join(FOLDER).join("notes").exists());
    }

    #[test]
    fn a_certificate_is_kept_for_its_directory_and_names() {
        let home = tempfile::tempdir().unwrap();
        let names = ["vpn.example", "www.vpn.example"];
        let store = store_in(home.path(), "https://ca.example:14000/dir", &names);
        assert!(store.certificate().is_none() && store.account().is_none());
        let made = rcgen::generate_simple_self_signed(names.map(String::from).to_vec()).unwrap();
        let kept = store.save_certificate(&made.signing_key.serialize_pem(), &made.cert.pem()).unwrap();
        store.save_account(b"{}").unwrap();
        assert_eq!(store.certificate().unwrap().fingerprint(), kept.fingerprint());
        assert_eq!(store.account().unwrap(), b"{}");
        for file in [ACCOUNT, CERTIFICATE] {
            let mode = fs::metadata(store.folder.join(file)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        for other in [
            ("https://ca.example:14000/other", names),
            ("https://ca.example:14000/dir", ["vpn.example", "more.example"]),
        ] {
            assert!(store_in(home.path(), other.0, &other.1).certificate().is_none(), "{other:?}");
        }
        let fewer = store_in(home.path(), "https://ca.example:14000/dir", &["vpn.example"]);
        assert!(fewer.certificate().is_some());
    }

    #[test]
    fn what_does_not_belong_together_is_not_kept() {
        let home = tempfile::tempdir().unwrap();
        let store = store_in(home.path(), "https://ca.example/", &["vpn.example"]);
        let make = |name: &str| rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
        let (good, other) = (make("vpn.example"), make("other.example"));
        let key = good.signing_key.serialize_pem();
        assert!(store.save_certificate(&key, &other.cert.pem()).is_err());
        assert!(store.save_certificate(&other.signing_key.serialize_pem(), &other.cert.pem()).is_err());
        assert!(store.save_certificate(&key, "").is_err());
        assert!(store.certificate().is_none());
        fs::write(store.folder.join(CERTIFICATE), "junk").unwrap();
        assert!(store.certificate().is_none());
    }
}
