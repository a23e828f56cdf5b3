//! How much of their monthly quotas links or users have used, and the file that keeps it, so that a restart
//! does not begin at 0.
//!
//! Always holds: a clock that jumps takes nothing away. Where it jumps ahead into another month and back,
//! what was used before and since counts again.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::file;
use mpvpn_input::{Error, Result, files};

/// The data that a link or user has carried in its month.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaUsage {
    /// When the month began, in seconds since 1970.
    pub since: u64,
    /// Bytes of IP packets in both directions.
    pub bytes: u64,
    /// The month before it, as long as the clock may go back to that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<PreviousMonth>,
}

/// The month before the present one.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PreviousMonth {
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// Bytes of IP packets in both directions.
    pub bytes: u64,
}

impl QuotaUsage {
    /// Counts bytes in the month that began at `since`, by the clock now. A later month than before begins at
    /// zero. In an earlier one the clock was set back: the count goes on, with what that month had already.
    pub fn count(&mut self, since: u64, bytes: u64) {
        if self.since < since {
            let before = (self.since > 0).then_some(PreviousMonth { since: self.since, bytes: self.bytes });
            *self = Self { since, bytes: 0, before };
        } else if let Some(before) = self.before.filter(|before| before.since == since) {
            *self = Self { since, bytes: self.bytes.saturating_add(before.bytes), before: None };
        }
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The owners of the quotas that a file counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaHolders {
    /// The links of a client, by interface.
    Links,
    /// The users of a server, by name.
    Users,
}

/// The file of the links of the client `name`.
pub fn links_file(state_dir: &Path, name: &str) -> PathBuf {
    state_dir.join(format!("links-{name}.json"))
}

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct UsageFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    links: Option<BTreeMap<String, QuotaUsage>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    users: Option<BTreeMap<String, QuotaUsage>>,
}

/// Reads the file `path`. Empty if the file does not exist.
///
/// # Errors
/// If the file is there and cannot be read, or not be understood.
pub fn read(path: &Path, holders: QuotaHolders) -> Result<BTreeMap<String, QuotaUsage>> {
    let Some(bytes) = files::if_present(files::read(path))? else { return Ok(BTreeMap::new()) };
    let bad = |found| Error::content(path, "the used parts of quotas", found);
    let content: UsageFile = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    let found = match holders {
        QuotaHolders::Links => content.links,
        QuotaHolders::Users => content.users,
    };
    found.ok_or_else(|| bad("a file about something else".to_owned()))
}

/// As [`read`], but a file that cannot be understood is renamed to `*.json.bad`, and the result is empty.
///
/// # Errors
/// If the file is there and cannot be read or moved away.
pub fn load(path: &Path, holders: QuotaHolders) -> Result<BTreeMap<String, QuotaUsage>> {
    match read(path, holders) {
        Err(Error::Content { found, .. }) => {
            let (all, command) = match holders {
                QuotaHolders::Links => ("links", "mpvpn link show"),
                QuotaHolders::Users => ("users", "mpvpn user list"),
            };
            let effect = format!("the quotas of all {all} count from 0 (`{command}` shows how much is used)");
            file::move_away(path, &found, &effect).map(|()| BTreeMap::new())
        }
        read => read,
    }
}

/// Writes the file `path` atomically: after a crash the file is the old one or the new one.
///
/// # Errors
/// If the file or its folder cannot be made.
pub fn save(path: &Path, holders: QuotaHolders, used: &BTreeMap<String, QuotaUsage>) -> Result<()> {
    let used = Some(used.clone());
    let content = match holders {
        QuotaHolders::Links => UsageFile { links: used, users: None },
        QuotaHolders::Users => UsageFile { links: None, users: used },
    };
    file::save(path, &content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOVEMBER: u64 = 1_793_491_200;
    const DECEMBER: u64 = 1_796_083_200;

    #[test]
    fn what_was_saved_is_loaded() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("state/links-mpvpn0.json");
        for holders in [QuotaHolders::Links, QuotaHolders::Users] {
            let _ = std::fs::remove_file(&path);
            assert_eq!(load(&path, holders).unwrap(), BTreeMap::new());
            let mut used = BTreeMap::new();
            let before = Some(PreviousMonth { since: NOVEMBER, bytes: 7 });
            used.insert("wwan0".to_owned(), QuotaUsage { since: DECEMBER, bytes: u64::MAX, before });
            used.insert("eth0".to_owned(), QuotaUsage::default());
            save(&path, holders, &used).unwrap();
            assert_eq!(load(&path, holders).unwrap(), used);
        }
        assert!(read(&path, QuotaHolders::Links).unwrap_err().to_string().contains("something else"));
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("links-mpvpn0.json");
        std::fs::write(&path, r#"{"links":{"wwan0":{"since":1793491200,"bytes":5}}}"#).unwrap();
        let used = load(&path, QuotaHolders::Links).unwrap();
        assert_eq!(used["wwan0"], QuotaUsage { since: NOVEMBER, bytes: 5, before: None });
    }

    #[test]
    fn a_clock_that_jumps_takes_nothing_away() {
        let mut used = QuotaUsage::default();
        used.count(NOVEMBER, 100);
        // It was at 1970 before it was set.
        used.count(0, 10);
        assert_eq!((used.since, used.bytes), (NOVEMBER, 110));
        used.count(DECEMBER, 5);
        assert_eq!((used.since, used.bytes), (DECEMBER, 5));
        // December was an error.
        used.count(NOVEMBER, 1);
        assert_eq!((used.since, used.bytes, used.before), (NOVEMBER, 116, None));
        used.count(DECEMBER, 2);
        used.count(DECEMBER, 2);
        assert_eq!((used.since, used.bytes), (DECEMBER, 4));
    }

    #[test]
    fn a_damaged_file_is_kept_and_counting_starts_anew() {
        for damage in ["", "{", "[]", r#"{"links":{"wwan0":{"since":1,"bytes":-1}}}"#, "\0\0\0\0"] {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("links-mpvpn0.json");
            std::fs::write(&path, damage).unwrap();
            assert_eq!(load(&path, QuotaHolders::Links).unwrap(), BTreeMap::new(), "{damage:?}");
            assert!(!path.exists());
            let kept = std::fs::read_to_string(home.path().join("links-mpvpn0.json.bad")).unwrap();
            assert_eq!(kept, damage);
        }
    }
}
