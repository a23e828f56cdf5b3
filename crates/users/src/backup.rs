//! The backup of a server: users, identity, leases, quotas and everything else in its state folder, in one
//! file.
//!
//! In: the state folder and the users' file; or a backup. Out: the other of the two. Always holds: a backup
//! has mode 0600, and the SHA-256 of each file in it; all of it is checked before any file is replaced; files
//! are written beside the old ones first, so a full disk replaces nothing; nothing is restored under a
//! running server.

use std::{
    fs,
    io::ErrorKind,
    path::{Component, Path, PathBuf},
    time::SystemTime,
};

use aws_lc_rs::digest;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{paths::users_file, users::Users};
use mpvpn_config::ServerConfig;
use mpvpn_identity::identity::Fingerprint;
use mpvpn_input::{Error, Result, files};
use mpvpn_state::leases;

/// The version of the format.
const VERSION: u32 = 1;
/// Most files in a backup. More: a wrong folder fills memory.
const MAX_FILES: usize = 1000;
/// Most bytes of all files together. More: a wrong folder fills memory; a state folder with 10,000 users has
/// some 5 MB.
const MAX_BYTES: usize = 64 << 20;
/// Folders below the state folder whose files belong to it.
const MAX_DEPTH: usize = 3;
/// The name of the users' file in a backup, wherever it is on the machine.
const USERS: &str = "users.toml";
/// The expected content of a backup, for errors.
const EXPECTED: &str = "a backup of `mpvpn backup`";

/// The files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// When it was made (RFC 3339, UTC).
    created: String,
    files: Vec<(PathBuf, Vec<u8>)>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct BackupFile {
    mpvpn_backup: u32,
    created: String,
    files: Vec<Entry>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    sha256: String,
    content: String,
}

/// The lock of a running server, held until dropped.
#[derive(Debug)]
pub struct RunningLock {
    _file: fs::File,
}

impl RunningLock {
    /// Says that a server runs with this state folder; several may.
    ///
    /// # Errors
    /// If the folder or the file cannot be made, or a backup is being restored.
    pub fn hold(state_dir: &Path) -> Result<Self> {
        lock(state_dir, rustix::fs::FlockOperation::NonBlockingLockShared).map(|_file| Self { _file })
    }
}

fn lock(state_dir: &Path, kind: rustix::fs::FlockOperation) -> Result<fs::File> {
    files::create_private_dir(state_dir)?;
    let path = state_dir.join(crate::paths::LOCK);
    let file = files::open_private(&path)?;
    rustix::fs::flock(&file, kind).map_err(|errno| Error::file("lock", &path)(errno.into()))?;
    Ok(file)
}

impl Backup {
    /// Reads the files of the server with this configuration.
    ///
    /// # Errors
    /// If a file cannot be read, or there is none.
    pub fn collect(config: &ServerConfig, now: SystemTime) -> Result<Self> {
        let (state_dir, users) = (&config.state_dir, users_file(config));
        let mut files = Vec::new();
        // Nobody changes the users meanwhile.
        let _lock = files::lock_dir(state_dir)?;
        collect(state_dir, Path::new(""), 0, &mut files)?;
        files.retain(|(name, _)| name != Path::new(USERS));
        if users.exists() {
            files.push((USERS.into(), files::read(&users)?));
        }
        files.sort();
        let size: usize = files.iter().map(|(_, content)| content.len()).sum();
        if files.is_empty() || files.len() > MAX_FILES || size > MAX_BYTES {
            return Err(Error::Content {
                path: state_dir.clone(),
                expected: "the state folder of a server",
                found: format!("{} files with {size} bytes", files.len()),
            });
        }
        let created = OffsetDateTime::from(now).format(&Rfc3339).unwrap_or_default();
        Ok(Self { created, files })
    }

    /// Writes it to a new file of mode 0600.
    ///
    /// # Errors
    /// If there is such a file already, or it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        if path.exists() {
            return Err(Error::usage(
                format!("{} is there already", path.display()),
                "name a new file; a backup replaces none",
            ));
        }
        let entry = |(name, content): &(PathBuf, Vec<u8>)| Entry {
            name: name.display().to_string(),
            sha256: sum(content).to_string(),
            content: STANDARD.encode(content),
        };
        let file = BackupFile {
            mpvpn_backup: VERSION,
            created: self.created.clone(),
            files: self.files.iter().map(entry).collect(),
        };
        files::write_secret(path, &files::json(path, &file)?)
    }

    /// Reads and checks a backup.
    ///
    /// # Errors
    /// If the file is cut short, changed, or of a later version; or if the users or leases in it cannot be
    /// understood.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = files::read_up_to(path, 2 * MAX_BYTES as u64)?;
        Self::parse(&bytes).map_err(|found| Error::Content { path: path.into(), expected: EXPECTED, found })
    }

    /// Checks the content of a backup.
    ///
    /// # Errors
    /// If the bytes are not a whole backup. The error says what was found instead.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let file: BackupFile = serde_json::from_slice(bytes).map_err(|error| match error.is_eof() {
            true => format!("one that is cut short after {} bytes", bytes.len()),
            false => format!("something else ({error})"),
        })?;
        if file.mpvpn_backup != VERSION {
            let version = file.mpvpn_backup;
            return Err(format!("one of version {version}, and this program knows version {VERSION}"));
        }
        if file.files.len() > MAX_FILES {
            return Err(format!("one with {} files, at most {MAX_FILES} work", file.files.len()));
        }
        let mut files = Vec::new();
        for Entry { name, sha256, content } in file.files {
            let path = PathBuf::from(&name);
            if !is_inside(&path) {
                return Err(format!("one with the file name {name:?}"));
            }
            let content = STANDARD.decode(content).map_err(|error| format!("{name}: {error}"))?;
            if sum(&content).to_string() != sha256 {
                return Err(format!("one in which {name} was changed: its SHA-256 is not the one noted"));
            }
            check(&path, &content)?;
            files.push((path, content));
        }
        Ok(Self { created: file.created, files })
    }

    /// When it was made.
    pub fn created(&self) -> &str {
        &self.created
    }

    /// The names of its files.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.files.iter().map(|(name, _)| name.display().to_string())
    }

    /// Replaces the files of the server with this configuration. Other files in the state folder stay.
    ///
    /// # Errors
    /// If a server runs with the folder, or a file cannot be written: then nothing was replaced.
    pub fn restore(&self, config: &ServerConfig) -> Result<()> {
        let (state_dir, users) = (&config.state_dir, users_file(config));
        let _running = lock(state_dir, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |error| match error {
                Error::File { source, .. } if source.kind() == ErrorKind::WouldBlock => Error::usage(
                    format!("a server runs with the state folder {}", state_dir.display()),
                    "stop it first, as with `systemctl stop mpvpn-server`, and start it after",
                ),
                error => error,
            },
        )?;
        let _lock = files::lock_dir(state_dir)?;
        let place = |name: &Path| if name == Path::new(USERS) { users.clone() } else { state_dir.join(name) };
        files::write_secrets(self.files.iter().map(|(name, content)| (place(name), content.as_slice())))
    }
}

fn sum(content: &[u8]) -> Fingerprint {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, content).as_ref());
    Fingerprint(bytes)
}

/// Reads the files in a folder, and in those below.
fn collect(state_dir: &Path, below: &Path, depth: usize, files: &mut Vec<(PathBuf, Vec<u8>)>) -> Result<()> {
    let folder = state_dir.join(below);
    let entries = fs::read_dir(&folder).map_err(Error::file("read", &folder))?;
    for entry in entries {
        let entry = entry.map_err(Error::file("read", &folder))?;
        let name = below.join(entry.file_name());
        let kind = entry.file_type().map_err(Error::file("read", &name))?;
        let text = entry.file_name().to_string_lossy().into_owned();
        // Broken files that were moved aside, and temporary files of interrupted writes, belong to no server.
        if !is_inside(&name) || [".bad", ".new", ".lock"].iter().any(|end| text.ends_with(end)) {
            continue;
        }
        if kind.is_dir() && depth + 1 < MAX_DEPTH {
            collect(state_dir, &name, depth + 1, files)?;
        } else if kind.is_file() && files.len() <= MAX_FILES {
            files.push((name.clone(), files::read(&state_dir.join(&name))?));
        }
    }
    Ok(())
}

/// Whether a name leads to a file in the state folder.
fn is_inside(name: &Path) -> bool {
    let is_plain = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-@+".contains(c);
        !part.is_empty() && part.len() < 200 && !part.starts_with('.') && part.chars().all(allowed)
    };
    let parts: Vec<_> = name.components().collect();
    let plain = parts.iter().all(|part| match part {
        Component::Normal(part) => part.to_str().is_some_and(is_plain),
        _ => false,
    });
    plain && (1..=MAX_DEPTH).contains(&parts.len())
}

/// Checks the content of a file that the server reads.
fn check(name: &Path, content: &[u8]) -> Result<(), String> {
    let text = name.display().to_string();
    if text == USERS {
        return Users::parse(content, name).map(drop).map_err(|error| format!("one whose {error}"));
    }
    if text.starts_with("leases-") && text.ends_with(".json") {
        return leases::check(content).map(drop).map_err(|why| format!("one whose {text} is broken: {why}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;
    use crate::credentials::Credentials;

    fn config(state_dir: &Path) -> ServerConfig {
        ServerConfig { state_dir: state_dir.into(), ..ServerConfig::default() }
    }

    fn backup() -> (tempfile::TempDir, Backup, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let config = config(&home.path().join("a"));
        Credentials::load(&config).unwrap();
        fs::create_dir(config.state_dir.join("acme")).unwrap();
        fs::write(config.state_dir.join("acme/account.json"), "{}").unwrap();
        fs::write(config.state_dir.join("old.json.bad"), "{}").unwrap();
        let backup = Backup::collect(&config, SystemTime::UNIX_EPOCH).unwrap();
        let file = home.path().join("backup");
        backup.save(&file).unwrap();
        (home, backup, file)
    }

    #[test]
    fn a_server_is_the_same_on_another_machine() {
        let (home, backup, file) = backup();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(backup.save(&file).unwrap_err().to_string().contains("is there already"));
        let names: Vec<_> = backup.names().collect();
        let expected = [
            "acme/account.json",
            "client-token",
            "last-start.json",
            "server.crt",
            "server.key",
            "users.toml",
        ];
        assert_eq!(names, expected);
        assert_eq!(
            (Backup::load(&file).unwrap(), backup.created()),
            (backup.clone(), "1970-01-01T00:00:00Z")
        );
        let new =
            ServerConfig { users: Some(home.path().join("b/other.toml")), ..config(&home.path().join("b")) };
        backup.restore(&new).unwrap();
        let [a, b] = [config(&home.path().join("a")), new].map(|config| Credentials::load(&config).unwrap());
        assert_eq!(a.identity.fingerprint(), b.identity.fingerprint());
        let token = a.token.unwrap();
        assert_eq!(b.authenticator.check(Some(&token.authorization())).unwrap().name, "default");
        assert!(!home.path().join("b/users.toml").exists());
    }

    #[test]
    fn nothing_is_restored_under_a_running_server() {
        let (home, backup, _) = backup();
        let config = config(&home.path().join("a"));
        let running = RunningLock::hold(&config.state_dir).unwrap();
        let _another = RunningLock::hold(&config.state_dir).unwrap();
        drop(running);
        let error = backup.restore(&config).unwrap_err();
        assert!(error.to_string().contains("a server runs with the state folder"), "{error}");
        assert!(error.next_step().contains("stop it first"));
        drop(_another);
        backup.restore(&config).unwrap();
    }

    #[test]
    fn a_backup_that_was_cut_or_changed_is_refused_and_nothing_is_replaced() {
        let (_home, _, file) = backup();
        let good = fs::read_to_string(&file).unwrap();
        for (bad, why) in [
            (good[..good.len() / 2].to_owned(), "cut short"),
            (String::new(), "cut short after 0 bytes"),
            ("hello".to_owned(), "something else"),
            (good.replace("\"mpvpn_backup\":1", "\"mpvpn_backup\":2"), "version 2"),
            (good.replace("acme/account.json", "acme/../../x"), "file name"),
            (good.replace("acme/account.json", "/etc/passwd"), "file name"),
            (good.replace("e30=", "e31="), "acme/account.json"),
            (good.replace("e30=", "e30gIA=="), "was changed"),
        ] {
            fs::write(&file, &bad).unwrap();
            let error = Backup::load(&file).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_all_as_they_are() {
        let (home, mut backup, _) = backup();
        let config = config(&home.path().join("a"));
        let before = fs::read(config.state_dir.join("server.crt")).unwrap();
        for (_, content) in &mut backup.files {
            *content = b"new".to_vec();
        }
        // A file cannot be made below a file.
        backup.files.push(("users.toml/x".into(), Vec::new()));
        assert!(backup.restore(&config).is_err());
        assert_eq!(fs::read(config.state_dir.join("server.crt")).unwrap(), before);
        let left: Vec<_> =
            fs::read_dir(&config.state_dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".new")), "{left:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_reading_fail_badly(bytes: Vec<u8>) {
            prop_assert!(Backup::parse(&bytes).is_err());
        }
    }
}
