//! Settings of the machine that several instances change: kernel parameters, and the file with the name
//! servers.
//!
//! In: who changes a setting to what, and who ends. Out: the value to put back. Always holds: the value of
//! the instance that came last is in force; one that ends puts back that of the instance that came before it
//! and still runs, or what was there before all of them; one that ends while a later one runs changes
//! nothing. The record of a setting is on disk before the setting changes.
//!
//! A record is a file in `<folder of the network namespace>/settings/`.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{failed, open_locked, read_record, start_time, write_record};
use crate::error::OsError;

const GUARD: &str = "lock";

/// The records of settings, as one instance uses them.
#[derive(Debug)]
pub(crate) struct Owners {
    folder: PathBuf,
    name: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record<T> {
    /// The value before all of them.
    before: T,
    /// In the order in which they came: the value of the last is in force.
    owners: Vec<Owner<T>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Owner<T> {
    name: String,
    pid: u32,
    start_time: u64,
    set: T,
}

impl<T> Owner<T> {
    fn lives(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }
}

impl Owners {
    /// Those of the network namespace with this folder, for the instance `name`.
    pub(crate) fn new(namespace: &Path, name: &str) -> Self {
        Self { folder: namespace.join("settings"), name: name.to_owned() }
    }

    /// Records that this instance changes the setting `key` from `now` to `set`, and does it by `write`.
    pub(crate) fn claim<T: Clone + PartialEq + Serialize + DeserializeOwned>(
        &self,
        key: &str,
        now: &T,
        set: &T,
        write: impl FnOnce() -> Result<(), OsError>,
    ) -> Result<(), OsError> {
        let _guard = self.lock()?;
        let path = self.path(key);
        let is_of_owner = |record: &Record<T>| record.owners.iter().any(|owner| owner.set == *now);
        let known = read_record(&path).filter(is_of_owner);
        // The present value belongs to none of them: another program has changed it, and this is the value to
        // restore.
        let mut record = known.unwrap_or_else(|| Record { before: now.clone(), owners: Vec::new() });
        record.owners.retain(|owner| owner.name != self.name);
        let pid = std::process::id();
        let start_time = start_time(pid).unwrap_or(0);
        record.owners.push(Owner { name: self.name.clone(), pid, start_time, set: set.clone() });
        write_record(&path, &record)?;
        write()
    }

    /// Ends this instance's change of the setting `key` to `set`: calls `restore` with the value to put back,
    /// if there is any. `before` is what this instance found, for records of earlier versions.
    pub(crate) fn release<T: Clone + PartialEq + Serialize + DeserializeOwned>(
        &self,
        key: &str,
        before: &T,
        set: &T,
        restore: impl FnOnce(&T) -> Result<(), OsError>,
    ) -> Result<(), OsError> {
        let path = self.path(key);
        if !self.folder.exists() {
            return restore(before);
        }
        let _guard = self.lock()?;
        let result = match read_record::<Record<T>>(&path) {
            None => restore(before),
            Some(mut record) => {
                let is_own = |owner: &Owner<T>| owner.name == self.name && owner.set == *set;
                match record.owners.iter().position(is_own) {
                    // A later change by another program ended the record that this instance was in.
                    None => Ok(()),
                    Some(at) if at + 1 < record.owners.len() => {
                        record.owners.remove(at);
                        write_record(&path, &record)
                    }
                    Some(_) => {
                        record.owners.pop();
                        // The killed ones restore nothing when their changes are reverted.
                        while record.owners.pop_if(|owner| !owner.lives()).is_some() {}
                        let restored =
                            restore(record.owners.last().map_or(&record.before, |owner| &owner.set));
                        // Only now: a process killed in between must find the record.
                        let saved = match record.owners.is_empty() {
                            true => fs::remove_file(&path).map_err(|e| failed("remove", &path, e)),
                            false => write_record(&path, &record),
                        };
                        restored.and(saved)
                    }
                }
            }
        };
        let is_guard = |entry: fs::DirEntry| entry.file_name() == GUARD;
        if fs::read_dir(&self.folder).is_ok_and(|mut all| all.all(|entry| entry.is_ok_and(is_guard))) {
            let _ = fs::remove_file(self.folder.join(GUARD));
            let _ = fs::remove_dir(&self.folder);
        }
        result
    }

    /// Whether an instance has changed the setting `key`, this one or another.
    pub(crate) fn is_claimed(&self, key: &str) -> bool {
        self.path(key).exists()
    }

    fn lock(&self) -> Result<Option<File>, OsError> {
        let guard = self.folder.join(GUARD);
        open_locked(&guard, FlockOperation::LockExclusive).map_err(|e| failed("lock", &guard, e))
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{}.json", key.replace('%', "%25").replace('/', "%2F")))
    }
}

/// The value before all instances that have changed the setting `key`, in the network namespace with this
/// folder; `None` if no instance has changed it.
pub(crate) fn original<T: DeserializeOwned>(namespace: &Path, key: &str) -> Option<T> {
    read_record::<Record<T>>(&Owners::new(namespace, "").path(key)).map(|record| record.before)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A setting of a machine, and its records.
    struct Machine {
        folder: tempfile::TempDir,
        value: RefCell<String>,
    }

    impl Machine {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap(), value: RefCell::new("original".to_owned()) }
        }

        fn owners(&self, name: &str) -> Owners {
            Owners::new(self.folder.path(), name)
        }

        fn value(&self) -> String {
            self.value.borrow().clone()
        }

        /// Sets the value `NAME's`.
        fn claim(&self, name: &str) {
            let set = format!("{name}'s");
            let write = || {
                self.value.replace(set.clone());
                Ok(())
            };
            self.owners(name).claim("a/key", &self.value(), &set, write).unwrap();
        }

        fn release(&self, name: &str) -> String {
            let set = format!("{name}'s");
            let restore = |value: &String| {
                self.value.replace(value.clone());
                Ok(())
            };
            self.owners(name).release("a/key", &"unused".to_owned(), &set, restore).unwrap();
            self.value()
        }

        /// Makes the record say that the process of `name` has ended.
        fn kill(&self, name: &str) {
            let path = self.owners(name).path("a/key");
            let mut record: Record<String> = read_record(&path).unwrap();
            record
                .owners
                .iter_mut()
                .filter(|owner| owner.name == name)
                .for_each(|owner| owner.start_time += 1);
            write_record(&path, &record).unwrap();
        }
    }

    #[test]
    fn whoever_ends_puts_back_what_another_one_set_or_the_original() {
        for (ends, expected) in [
            (["a", "b", "c"], ["c's", "c's", "original"]),
            (["c", "b", "a"], ["b's", "a's", "original"]),
            (["b", "c", "a"], ["c's", "a's", "original"]),
            (["a", "c", "b"], ["c's", "b's", "original"]),
        ] {
            let machine = Machine::new();
            ["a", "b", "c"].iter().for_each(|name| machine.claim(name));
            assert_eq!(ends.map(|name| machine.release(name)), expected, "{ends:?}");
            assert!(!machine.folder.path().join("settings").exists(), "nothing is left on disk");
        }
    }

    #[test]
    fn what_a_killed_process_set_is_not_put_back_and_it_disturbs_nobody() {
        let machine = Machine::new();
        ["a", "b"].iter().for_each(|name| machine.claim(name));
        machine.kill("a");
        assert_eq!(machine.release("b"), "original");
        assert_eq!(machine.release("a"), "unused", "no record: what the journal says counts");

        let machine = Machine::new();
        ["a", "b"].iter().for_each(|name| machine.claim(name));
        machine.kill("b");
        assert_eq!(machine.release("a"), "b's", "b's changes are reverted when b starts again");
        assert_eq!(machine.release("b"), "original");
    }

    #[test]
    fn a_change_by_another_program_becomes_the_original() {
        let machine = Machine::new();
        machine.claim("a");
        machine.value.replace("foreign".to_owned());
        machine.claim("b");
        assert_eq!(machine.release("a"), "b's");
        assert_eq!(machine.release("b"), "foreign");
    }

    #[test]
    fn an_instance_that_starts_again_is_the_last_that_came() {
        let machine = Machine::new();
        ["a", "b", "a"].iter().for_each(|name| machine.claim(name));
        assert_eq!(machine.release("a"), "b's");
        assert_eq!(machine.release("b"), "original");
    }
}
