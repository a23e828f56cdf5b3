//! The file with how much of its quota each link has used, so that a restart does not begin at 0.

use std::{collections::BTreeMap, io::ErrorKind, path::Path};

use serde::{Deserialize, Serialize};

use crate::{Error, Result, files};

/// The data that a link has carried in its month.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaUsage {
    /// When the month began, in seconds since 1970.
    pub since: u64,
    /// Bytes of IP packets in both directions.
    pub bytes: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct UsageFile {
    links: BTreeMap<String, QuotaUsage>,
}

/// Reads the file `path`: the usage by interface. Empty if the file does not exist. A file that cannot be parsed is renamed
/// to `*.json.bad`, and the result is empty.
///
/// # Errors
/// If the file is there and cannot be read or moved away.
pub fn load(path: &Path) -> Result<BTreeMap<String, QuotaUsage>> {
    let bytes = match files::read(path) {
        Ok(bytes) => bytes,
        Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    match serde_json::from_slice::<UsageFile>(&bytes) {
        Ok(content) => Ok(content.links),
        Err(error) => {
            let bad = files::move_away(path)?;
            tracing::warn!(
                "{} cannot be understood ({error}), so the quotas of all links count from 0; the file was renamed to {}; \
                 `mpvpn link show` shows how much is used",
                path.display(),
                bad.display()
            );
            Ok(BTreeMap::new())
        }
    }
}

/// Writes the file `path` atomically: after a crash the file is the old one or the new one.
///
/// # Errors
/// If the file or its folder cannot be made.
pub fn save(path: &Path, links: &BTreeMap<String, QuotaUsage>) -> Result<()> {
    if let Some(dir) = path.parent() {
        files::create_private_dir(dir)?;
    }
    let content = UsageFile { links: links.clone() };
    files::write_secret(path, &files::json(path, &content)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_loaded() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("state/links-mpvpn0.json");
        assert_eq!(load(&path).unwrap(), BTreeMap::new());
        let mut links = BTreeMap::new();
        links.insert("wwan0".to_owned(), QuotaUsage { since: 1_793_491_200, bytes: u64::MAX });
        links.insert("eth0".to_owned(), QuotaUsage::default());
        save(&path, &links).unwrap();
        assert_eq!(load(&path).unwrap(), links);
    }

    #[test]
    fn a_damaged_file_is_kept_and_counting_starts_anew() {
        for damage in ["", "{", "[]", r#"{"links":{"wwan0":{"since":1,"bytes":-1}}}"#, "\0\0\0\0"] {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("links-mpvpn0.json");
            std::fs::write(&path, damage).unwrap();
            assert_eq!(load(&path).unwrap(), BTreeMap::new(), "{damage:?}");
            assert!(!path.exists());
            let kept = std::fs::read_to_string(home.path().join("links-mpvpn0.json.bad")).unwrap();
            assert_eq!(kept, damage);
        }
    }
}
