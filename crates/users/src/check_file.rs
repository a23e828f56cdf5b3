//! Checks a configuration file without starting anything.
//!
//! In: a file. Out: whether a server, client or proxy would start with it. Always holds: nothing is written.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use crate::{client_certificates::ClientCertificates, credentials::Certificates, users::Users};
use mpvpn_config::{ClientConfig, ClientOptions, FileKind, Rights, ServerConfig, ServerOptions};
use mpvpn_identity::{identity::Identity, tls, trust::Trust};
use mpvpn_input::{Error, Result};

/// A file with which the command would start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedFile {
    /// The command.
    pub kind: FileKind,
    /// Files that it names and that this user may not read, and rules that allow nothing, a sentence each.
    pub notes: Vec<String>,
}

/// Checks a file as the command does at its start, and the files that it names. `kind`: as the file says, if
/// it is `None`.
///
/// # Errors
/// The first mistake, with line and column if it is in the file itself.
pub fn check_file(path: &Path, kind: Option<FileKind>) -> Result<CheckedFile> {
    let kind = FileKind::of(path, kind)?;
    let mut notes = Vec::new();
    match kind {
        FileKind::Server => {
            let config = ServerConfig::load(Some(path), ServerOptions::default(), Rights::ALL)?;
            if config.cert.is_some() {
                note_unreadable(Certificates::load(&config).map(drop), &mut notes)?;
            }
            note_unreadable(ClientCertificates::load(&config).map(drop), &mut notes)?;
            if let Some(users) = &config.users {
                note_unreadable(Users::load(users).map(drop), &mut notes)?;
            }
            if let Some(folder) = config.site.folder() {
                let listed = std::fs::read_dir(folder).map(drop).map_err(Error::file("read", folder));
                note_unreadable(listed, &mut notes)?;
            }
            for (number, rule) in (1..).zip(&config.access) {
                notes.extend(rule.ineffective_network().map(|net| {
                    format!(
                        "the table [[access]] number {number} allows nothing in {net}: loopback and link-local \
                         addresses and metadata of clouds are reached only where `to` names each address alone"
                    )
                }));
            }
        }
        FileKind::Client | FileKind::Proxy => {
            let config = match kind {
                FileKind::Client => ClientConfig::load(Some(path), ClientOptions::default())?,
                _ => {
                    // Its default depends on the user who runs it.
                    let api_socket = Some(PathBuf::from("proxy.sock"));
                    ClientConfig::load_proxy(
                        Some(path),
                        ClientOptions { api_socket, ..ClientOptions::default() },
                    )?
                }
            };
            note_unreadable(config.load_token().map(drop), &mut notes)?;
            if let Some(files) = &config.cert {
                note_unreadable(Identity::load(&files.cert, &files.key).map(drop), &mut notes)?;
            }
            if let Trust::Ca(_) = config.trust {
                note_unreadable(tls::client_config(&config.trust, &[]).map(drop), &mut notes)?;
            }
        }
    }
    Ok(CheckedFile { kind, notes })
}

/// A file that is not for this user may be for the one that runs the command.
fn note_unreadable(result: Result<()>, notes: &mut Vec<String>) -> Result<()> {
    match result {
        Err(Error::File { ref source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            notes.extend(result.err().map(|error| error.to_string()));
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join(name);
        std::fs::write(&file, text).unwrap();
        (home, file)
    }

    #[test]
    fn a_file_is_checked_as_the_command_that_it_is_for() {
        for (name, text, kind) in [
            ("a.toml", "server = '192.0.2.1'\ninsecure = true\n", FileKind::Client),
            ("a.toml", "server = '192.0.2.1'\ninsecure = true\nsocks5 = '127.0.0.1:1080'\n", FileKind::Proxy),
            ("a.toml", "listen = '0.0.0.0:1'\n", FileKind::Server),
            ("server-x.toml", "", FileKind::Server),
        ] {
            let (_home, file) = write(name, text);
            assert_eq!(check_file(&file, None).unwrap(), CheckedFile { kind, notes: Vec::new() }, "{text}");
        }
        let (_home, file) = write("client.toml", "log-level = 'info'\n");
        assert!(check_file(&file, None).unwrap_err().to_string().contains("no server is given"));
    }

    #[test]
    fn mistakes_have_a_place_and_files_that_are_missing_are_named() {
        let (home, file) = write("server.toml", "tcp = 'off'\nmax-clients = 0\n");
        let error = check_file(&file, None).unwrap_err().to_string();
        assert!(error.contains("server.toml, line 2, column 1"), "{error}");
        for (text, missing) in [
            ("cert = '/no/such.crt'\nkey = '/no/such.key'\n", "/no/such.crt"),
            ("[site]\nroot = '/no/such'\n", "/no/such"),
            ("server = 'a'\ninsecure = true\ntoken-file = '/no/such/token'\n", "/no/such/token"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = check_file(&file, None).unwrap_err().to_string();
            assert!(error.contains(&format!("cannot read {missing}: No such file")), "{error}");
        }
        let rules = "[[access]]\nallow = true\nports = '80'\n[[access]]\nallow = true\nto = ['10.0.0.0/8', '127.0.0.1', \
                     '127.0.0.0/8']\n[[access]]\nallow = false\nto = '169.254.0.0/16'\n";
        std::fs::write(&file, rules).unwrap();
        let notes = check_file(&file, None).unwrap().notes;
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("the table [[access]] number 2 allows nothing in 127.0.0.0/8: "), "{note}");
        let users = home.path().join("users.toml");
        std::fs::write(&users, "[[user]]\nname = 1\n").unwrap();
        std::fs::write(&file, format!("users = '{}'\n", users.display())).unwrap();
        let error = check_file(&file, None).unwrap_err().to_string();
        assert!(error.contains("users.toml") && error.contains("line 2"), "{error}");
    }
}
