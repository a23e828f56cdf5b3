//! Numbers that are divided between the instances of a network namespace, as firewall marks and routing
//! tables need them.
//!
//! In: a pool, and who wants a number of it. Out: a number, until its holder ends in whatever way. Always
//! holds: a number that is held exclusively has one holder; one that is shared has the same label for all its
//! holders; what a killed process held stays reserved until its changes are reverted, because they are still
//! in force.
//!
//! A number is a locked file in `<folder of the network namespace>/<pool>/`, whose text says who holds it, or
//! what it stands for.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use super::{failed, open_locked, read_text};
use crate::{
    error::OsError,
    regular_file::{self, Links},
};

/// Serialises changes of a pool.
const GUARD: &str = "lock";

/// Numbers for one purpose.
#[derive(Debug)]
pub struct NumberPool {
    /// The folder's name.
    pub folder: &'static str,
    /// The purpose of the numbers, as in "firewall marks for classes"; for errors.
    pub purpose: &'static str,
    /// The smallest number.
    pub first: u8,
    /// The largest number.
    pub last: u8,
}

/// The numbers of clients. Each has rules in each layer, so more would need priorities beyond that of the
/// main table.
pub const INSTANCE_NUMBERS: NumberPool =
    NumberPool { folder: "instances", purpose: "numbers of clients on one machine", first: 0, last: 0x7f };
/// The numbers of links, the same at all clients: a connection mark keeps its meaning when one of them ends.
pub const LINK_NUMBERS: NumberPool = NumberPool {
    folder: "links",
    purpose: "numbers of links that connections come in by",
    first: 0x80,
    last: 0xbf,
};
/// The values of the bits 0x0f000000 of firewall marks but 0.
pub const CLASS_MARKS: NumberPool = NumberPool {
    folder: "class-marks",
    purpose: "firewall marks (0x0f000000) for the TUN devices of classes",
    first: 1,
    last: 15,
};

/// A number that is held. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct TakenNumber {
    pub(super) pool: &'static str,
    pub(super) label: String,
    pub(super) number: u8,
    path: PathBuf,
    file: File,
}

/// Takes a number that nobody else has, `preferred` if it is free. `namespace` is the folder with the
/// journals.
pub(super) fn take(
    namespace: &Path,
    pool: &'static NumberPool,
    holder: &str,
    preferred: Option<u8>,
) -> Result<TakenNumber, OsError> {
    let folder = namespace.join(pool.folder);
    let _guard = guard(&folder)?;
    let used = used_numbers(&folder);
    let is_free = |number: &u8| used.get(number).is_none_or(|label| !journal_exists(namespace, label));
    let candidates = preferred.into_iter().chain(pool.first..=pool.last).filter(is_free);
    let lock = FlockOperation::NonBlockingLockExclusive;
    first_lockable(&folder, pool, candidates, lock, holder)?.ok_or_else(|| in_use(pool, &used))
}

/// Takes the number that stands for `label`, which other processes may have as well.
pub(super) fn share(
    namespace: &Path,
    pool: &'static NumberPool,
    label: &str,
) -> Result<TakenNumber, OsError> {
    let folder = namespace.join(pool.folder);
    let _guard = guard(&folder)?;
    let used = used_numbers(&folder);
    let known = used.iter().filter(|(_, other)| *other == label).map(|(number, _)| *number);
    let free = (pool.first..=pool.last).filter(|number| !used.contains_key(number));
    // Numbers left by ended processes keep their meaning as long as there are others, because connections may
    // remember them.
    let lock = FlockOperation::NonBlockingLockShared;
    let stale = used.keys().copied().filter(|number| is_lockable(&folder.join(number.to_string())));
    let found = first_lockable(&folder, pool, known.chain(free).chain(stale), lock, label)?;
    found.ok_or_else(|| in_use(pool, &used))
}

/// Gives back what ended processes held, unless their changes are still to be reverted.
pub(super) fn clean(namespace: &Path, pools: &[&NumberPool]) {
    for pool in pools {
        let folder = namespace.join(pool.folder);
        if !folder.exists() {
            continue;
        }
        let Ok(_guard) = guard(&folder) else { continue };
        for (number, label) in used_numbers(&folder) {
            let path = folder.join(number.to_string());
            if !journal_exists(namespace, &label) && is_lockable(&path) {
                let _ = fs::remove_file(path);
            }
        }
        remove_if_empty(&folder);
    }
}

impl Drop for TakenNumber {
    fn drop(&mut self) {
        let Some(folder) = self.path.parent() else { return };
        let Ok(_guard) = guard(folder) else { return };
        // Fails where others share it.
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_file(&self.path);
        }
        remove_if_empty(folder);
    }
}

fn guard(folder: &Path) -> Result<Option<File>, OsError> {
    open_locked(&folder.join(GUARD), FlockOperation::LockExclusive).map_err(|e| failed("lock", folder, e))
}

fn remove_if_empty(folder: &Path) {
    if used_numbers(folder).is_empty() {
        let _ = fs::remove_file(folder.join(GUARD));
        let _ = fs::remove_dir(folder);
    }
}

fn first_lockable(
    folder: &Path,
    pool: &'static NumberPool,
    candidates: impl Iterator<Item = u8>,
    operation: FlockOperation,
    label: &str,
) -> Result<Option<TakenNumber>, OsError> {
    for number in candidates {
        let path = folder.join(number.to_string());
        let open = || -> io::Result<Option<File>> {
            let Some(file) = open_locked(&path, operation)? else { return Ok(None) };
            file.set_len(0)?;
            file.write_all_at(label.as_bytes(), 0)?;
            Ok(Some(file))
        };
        if let Some(file) = open().map_err(|error| failed("write", &path, error))? {
            return Ok(Some(TakenNumber { pool: pool.folder, label: label.to_owned(), number, path, file }));
        }
    }
    Ok(None)
}

/// The numbers that have a file, with their labels.
fn used_numbers(folder: &Path) -> BTreeMap<u8, String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u8>().ok());
    numbers.map(|number| (number, read_text(&folder.join(number.to_string())))).collect()
}

/// Whether no process holds the number of this file.
fn is_lockable(path: &Path) -> bool {
    regular_file::open(path, Links::Refuse)
        .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

/// Whether the changes of an instance are in force, or to be reverted.
fn journal_exists(namespace: &Path, name: &str) -> bool {
    namespace.join(format!("{name}.json")).exists()
}

fn in_use(pool: &NumberPool, used: &BTreeMap<u8, String>) -> OsError {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    used.values().for_each(|label| *counts.entry(label).or_default() += 1);
    let holders = counts.iter().map(|(label, count)| format!("{label} ({count})")).collect::<Vec<_>>();
    OsError::NumbersInUse {
        count: u32::from(pool.last - pool.first) + 1,
        purpose: pool.purpose,
        holders: holders.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: NumberPool = NumberPool { folder: "pool", purpose: "numbers for tests", first: 3, last: 5 };

    fn names(namespace: &Path, names: &[&str]) {
        for name in names {
            fs::write(namespace.join(format!("{name}.json")), "").unwrap();
        }
    }

    #[test]
    fn each_has_a_number_of_its_own_until_it_ends_and_the_error_names_the_holders() {
        let folder = tempfile::tempdir().unwrap();
        let namespace = folder.path();
        names(namespace, &["a", "b"]);
        let take = |holder: &str, preferred| take(namespace, &POOL, holder, preferred);
        let [first, second, third] = [("a", Some(5)), ("a", Some(5)), ("b", None)]
            .map(|(holder, preferred)| take(holder, preferred).unwrap());
        assert_eq!([first.number, second.number, third.number], [5, 3, 4]);
        let error = take("c", None).unwrap_err().to_string();
        assert!(error.contains("3 numbers for tests") && error.contains("a (2), b (1)"), "{error}");
        drop(second);
        assert_eq!(take("c", Some(4)).unwrap().number, 3);
        drop((first, third));
        assert!(!namespace.join("pool").exists(), "nothing is left on disk");
    }

    #[test]
    fn what_a_killed_process_held_is_free_only_after_its_changes_are_reverted() {
        let folder = tempfile::tempdir().unwrap();
        let namespace = folder.path();
        names(namespace, &["killed"]);
        let leave = |number: u8, label: &str| {
            fs::create_dir_all(namespace.join("pool")).unwrap();
            fs::write(namespace.join("pool").join(number.to_string()), label).unwrap();
        };
        leave(3, "killed");
        leave(4, "reverted");
        assert_eq!(take(namespace, &POOL, "a", None).unwrap().number, 4);
        clean(namespace, &[&POOL]);
        assert_eq!(take(namespace, &POOL, "a", None).unwrap().number, 4);
        fs::remove_file(namespace.join("killed.json")).unwrap();
        clean(namespace, &[&POOL]);
        assert!(!namespace.join("pool").exists());
    }

    #[test]
    fn a_shared_number_means_the_same_for_all_and_for_those_that_come_later() {
        let folder = tempfile::tempdir().unwrap();
        let share = |label: &str| share(folder.path(), &POOL, label).unwrap();
        let (first, second, other) = (share("eth0"), share("eth0"), share("eth1"));
        assert_eq!([first.number, second.number, other.number], [3, 3, 4]);
        drop(first);
        assert_eq!(share("eth0").number, 3, "the second has it still");
        // A killed process leaves its file: the number keeps its meaning as long as others are free.
        let path = folder.path().join("pool/4");
        drop(other);
        fs::write(&path, "eth1").unwrap();
        let (third, fourth) = (share("eth2"), share("eth1"));
        assert_eq!([third.number, fourth.number], [5, 4]);
        drop(fourth);
        fs::write(&path, "eth1").unwrap();
        assert_eq!(share("eth3").number, 4, "one that nobody holds is taken if no other is left");
        drop((second, third));
    }
}
