//! The used parts of the users' quotas, in calendar months (UTC).
//!
//! In: bytes that users have carried, and the time. Out: how much is used, and who has used up the quota.
//! Always holds: only users with a quota are counted, so no file tells how much others have carried.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::SystemTime,
};

use mpvpn_path::Month;

use crate::users::{UsedUpQuotas, UserEntry, Users};
use mpvpn_input::{Error, Result};
use mpvpn_state::quota_usage::{self, QuotaHolders, QuotaUsage};

/// How the names of the files in the state folder begin and end; the name of a server is between.
const FILE: [&str; 2] = ["user-quotas-", ".json"];
/// The fewest bytes after which a user's use is counted. More: small quotas are exceeded by more. Fewer: each
/// few packets wake the thread that counts. Chosen.
const MIN_COUNTED_BYTES: u64 = 64 << 10;
/// The day on which months begin.
const FIRST_DAY: u8 = 1;

/// The used parts of the quotas of a server's users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserQuotas {
    file: PathBuf,
    used: BTreeMap<String, QuotaUsage>,
    is_changed: bool,
}

/// Seconds since 1970; a clock before 1970 counts as 1970.
fn unix(clock: SystemTime) -> u64 {
    clock.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

impl UserQuotas {
    /// The file of a server. Servers that share a folder count by themselves.
    pub fn file(state_dir: &Path, server: &str) -> PathBuf {
        let [begin, end] = FILE;
        state_dir.join(format!("{begin}{server}{end}"))
    }

    /// Reads what is used, for a command that shows it. Of several servers that share the folder, the one
    /// where a user has used most counts.
    ///
    /// # Errors
    /// If a file is damaged, or cannot be read.
    pub fn read(state_dir: &Path) -> Result<Self> {
        let mut all = Self::default();
        for file in files_in(state_dir)? {
            for (user, used) in quota_usage::read(&file, QuotaHolders::Users)? {
                let most = all.used.entry(user).or_default();
                if (most.since, most.bytes) < (used.since, used.bytes) {
                    *most = used;
                }
            }
        }
        Ok(all)
    }

    /// Forgets what a user has used, who is removed: another user may get the name. A server that runs
    /// forgets it by itself.
    ///
    /// # Errors
    /// If a file is damaged, or cannot be read or written.
    pub fn forget(state_dir: &Path, user: &str) -> Result<()> {
        for file in files_in(state_dir)? {
            let mut used = quota_usage::read(&file, QuotaHolders::Users)?;
            if used.remove(user).is_some() {
                quota_usage::save(&file, QuotaHolders::Users, &used)?;
            }
        }
        Ok(())
    }

    /// Reads what is used, for a server; a damaged file is moved away.
    ///
    /// # Errors
    /// If the file cannot be read or moved away.
    pub fn load(file: &Path) -> Result<Self> {
        let used = quota_usage::load(file, QuotaHolders::Users)?;
        Ok(Self { used, file: file.into(), is_changed: false })
    }

    /// Counts bytes that users have carried, and forgets users that have no quota.
    pub fn count<'a>(
        &mut self,
        clock: SystemTime,
        users: &Users,
        carried: impl IntoIterator<Item = (&'a str, u64)>,
    ) {
        let since = Month::of(unix(clock), FIRST_DAY).first.unix();
        let has_quota = |name: &str| users.get(name).is_some_and(|entry| entry.quota.is_some());
        let before = self.used.len();
        self.used.retain(|name, _| has_quota(name));
        self.is_changed |= self.used.len() != before;
        for (name, bytes) in carried.into_iter().filter(|(name, _)| has_quota(name)) {
            self.used.entry(name.to_owned()).or_default().count(since, bytes);
            self.is_changed = true;
        }
        for used in self.used.values_mut() {
            let old = *used;
            used.count(since, 0);
            self.is_changed |= *used != old;
        }
    }

    /// Takes what a user has used in the month that the clock shows (bytes) from a server that counts it.
    pub fn set_used(&mut self, clock: SystemTime, user: String, bytes: u64) {
        let since = Month::of(unix(clock), FIRST_DAY).first.unix();
        self.used.insert(user, QuotaUsage { since, bytes, before: None });
    }

    /// Bytes that a user has used in the month that the clock shows.
    pub fn used(&self, clock: SystemTime, user: &str) -> u64 {
        let mut used = self.used.get(user).copied().unwrap_or_default();
        used.count(Month::of(unix(clock), FIRST_DAY).first.unix(), 0);
        used.bytes
    }

    /// The bytes that each user with a quota may carry in one direction until they have to be counted. Both
    /// directions may carry as many, so a quota is exceeded by 1 % and by the bytes until the count.
    pub fn count_limits(&self, clock: SystemTime, users: &Users) -> BTreeMap<String, u64> {
        let limit = |entry: &UserEntry| {
            let quota = entry.quota?.bytes();
            let left = quota.saturating_sub(self.used(clock, &entry.name));
            Some((entry.name.clone(), left.min(quota / 100).max(MIN_COUNTED_BYTES)))
        };
        users.iter().filter_map(limit).collect()
    }

    /// The users that have used up their quotas, with the day on which the next month begins.
    pub fn used_up(&self, clock: SystemTime, users: &Users) -> UsedUpQuotas {
        let is_used_up = |name: &str| {
            let quota = users.get(name)?.quota?;
            (self.used(clock, name) >= quota.bytes()).then(|| {
                // With a clock that was set back, the month that counts may be a later one.
                let since = self.used.get(name).map_or(0, |used| used.since);
                Month::of(unix(clock).max(since), FIRST_DAY).next
            })
        };
        self.used.keys().filter_map(|name| Some((name.clone(), is_used_up(name)?))).collect()
    }

    /// Whether something was counted that the file does not have.
    pub fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// If the file cannot be written; what was counted stays here.
    pub fn save(&mut self) -> Result<()> {
        quota_usage::save(&self.file, QuotaHolders::Users, &self.used)?;
        self.is_changed = false;
        Ok(())
    }
}

/// The files of the servers that share a state folder.
fn files_in(state_dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(state_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::file("read", state_dir)(error)),
    };
    let is_one = |name: &str| name.starts_with(FILE[0]) && name.ends_with(FILE[1]);
    let files = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_one));
    Ok(files.map(|entry| entry.path()).collect())
}
