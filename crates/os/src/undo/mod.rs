//! The journal: what was changed, and how to take it back.
//!
//! In: [`Step`]s, each written to disk *before* it is made. Out: the machine as it was, when the owner
//! ends ([`UndoJournal::revert_all_steps`], or dropping), or when the next process of that name starts after one
//! that was killed ([`UndoJournal::open`]).
//!
//! What always holds:
//! - At most one living process owns a name in a network namespace: it holds a lock on
//!   `<name>.lock`, which the kernel releases however the process ends; `<name>.json` names it.
//! - The record on disk is whole: it is replaced by rename, after fsync.
//! - Taking back is idempotent: what is gone already, or was changed by somebody else since, is fine.
//!
//! The folder is `<base>/netns-<inode of the network namespace>`, because namespaces share `/run`.

mod lock;
mod step;

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use lock::Lock;
use serde::{Deserialize, Serialize};
pub use step::{Interface, Step};

use crate::{error::OsError, netlink::Netlink};

/// Where journals are kept unless told otherwise.
pub const DEFAULT_FOLDER: &str = "/run/mpvpn";

/// An open journal.
#[derive(Debug)]
pub struct UndoJournal {
    path: PathBuf,
    record: Record,
    netlink: Netlink,
    /// Released last.
    _lock: Lock,
}

/// What is on disk.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    pid: u32,
    /// In clock ticks since boot (proc(5), `starttime`): tells apart processes of the same number.
    start_time: u64,
    steps: Vec<Step>,
}

impl UndoJournal {
    /// Opens the journal `name` under `base` for this network namespace. If a process left one behind,
    /// its steps are taken back first; if that process is alive, it is an error.
    pub fn open(base: &Path, name: &str) -> Result<Self, OsError> {
        let folder = base.join(format!("netns-{}", namespace()?));
        let file = file_name(name);
        let path = folder.join(format!("{file}.json"));
        let owner =
            || OsError::AlreadyRunning { name: name.to_owned(), pid: load(&path).map_or(0, |r| r.pid) };
        let lock = Lock::take(&folder, &file).map_err(|e| failed("lock", &folder, e))?.ok_or_else(owner)?;
        let mut netlink = Netlink::open()?;
        if let Some(left) = load(&path) {
            if left.is_alive_elsewhere() {
                return Err(owner());
            }
            tracing::info!(
                pid = left.pid,
                steps = left.steps.len(),
                "cleaning up after a process that was killed"
            );
            for error in revert_all(&mut netlink, &left.steps) {
                tracing::warn!(%error, "could not clean up");
            }
        }
        let pid = std::process::id();
        let record = Record { pid, start_time: start_time(pid).unwrap_or(0), steps: Vec::new() };
        let undo = Self { path, record, netlink, _lock: lock };
        undo.save()?;
        Ok(undo)
    }

    /// Writes down a step that the caller is about to make by itself.
    pub fn record(&mut self, step: Step) -> Result<(), OsError> {
        self.record_all([step])
    }

    /// Writes down several steps at once.
    pub fn record_all(&mut self, steps: impl IntoIterator<Item = Step>) -> Result<(), OsError> {
        let before = self.record.steps.len();
        self.record.steps.extend(steps);
        self.save().inspect_err(|_| self.record.steps.truncate(before))
    }

    /// Writes down `steps` at once, then makes them in order. After an error the journal still has all
    /// of them, so that [`UndoJournal::revert_all_steps`] takes back those that were made.
    pub fn make(&mut self, steps: &[Step]) -> Result<(), OsError> {
        if steps.is_empty() {
            return Ok(());
        }
        self.record_all(steps.iter().cloned())?;
        steps.iter().try_for_each(|step| step.make(&mut self.netlink))
    }

    /// Takes back `steps`, the last first, and forgets them; returns what failed.
    pub fn revert(&mut self, steps: &[Step]) -> Vec<OsError> {
        if steps.is_empty() {
            return Vec::new();
        }
        let mut errors = revert_all(&mut self.netlink, steps);
        let reverted: BTreeSet<&Step> = steps.iter().collect();
        self.record.steps.retain(|step| !reverted.contains(step));
        errors.extend(self.save().err());
        errors
    }

    /// The steps that would be taken back, in the order they were made.
    pub fn steps(&self) -> &[Step] {
        &self.record.steps
    }

    /// Takes back everything, the last first, whatever fails on the way; returns what failed. The
    /// journal is empty afterwards and can be used again.
    pub fn revert_all_steps(&mut self) -> Vec<OsError> {
        let steps = std::mem::take(&mut self.record.steps);
        let mut errors = revert_all(&mut self.netlink, &steps);
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            errors.push(failed("remove", &self.path, error));
        }
        errors
    }

    fn save(&self) -> Result<(), OsError> {
        let bytes = serde_json::to_vec(&self.record).map_err(|e| failed("encode", &self.path, e.into()))?;
        replace(&self.path, &bytes).map_err(|e| failed("write", &self.path, e))
    }
}

impl Drop for UndoJournal {
    fn drop(&mut self) {
        for error in self.revert_all_steps() {
            tracing::warn!(%error, "could not put something back");
        }
    }
}

impl Record {
    /// A second opinion where locks do not work, as on some network file systems.
    fn is_alive_elsewhere(&self) -> bool {
        self.pid != std::process::id() && start_time(self.pid) == Some(self.start_time)
    }
}

fn revert_all(netlink: &mut Netlink, steps: &[Step]) -> Vec<OsError> {
    if steps.is_empty() {
        return Vec::new();
    }
    let mut errors = Vec::new();
    let links = netlink.links().unwrap_or_else(|error| {
        errors.push(error);
        Vec::new()
    });
    errors.extend(steps.iter().rev().filter_map(|step| step.revert(netlink, &links).err()));
    errors
}

/// Reads a record. One that cannot be understood (of another version) is set aside, not lost.
fn load(path: &Path) -> Option<Record> {
    let bytes = fs::read(path).ok()?;
    match serde_json::from_slice(&bytes) {
        Ok(record) => Some(record),
        Err(error) => {
            let aside = path.with_extension("unreadable");
            tracing::warn!(%error, kept = %aside.display(), "a journal cannot be understood, nothing was cleaned up");
            let _ = fs::rename(path, aside);
            None
        }
    }
}

/// Replaces a file such that either the old or the new one is there, whole, after a crash.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::File::open(folder)?.sync_all()
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> OsError {
    OsError::Journal { operation, path: path.to_owned(), source }
}

/// The inode of this thread's network namespace, which identifies it.
fn namespace() -> Result<u64, OsError> {
    let link = Path::new("/proc/thread-self/ns/net");
    Ok(fs::metadata(link).map_err(|e| failed("find the network namespace for", link, e))?.ino())
}

fn file_name(name: &str) -> String {
    let clean = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    name.chars().take(64).map(clean).collect()
}

/// When process `pid` started, in clock ticks since boot (proc(5), field 22); `None` if there is none.
fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The second field is a name in parentheses, which may hold anything.
fn parse_start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that goes when the test does.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("mpvpn-undo-{test}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str) -> Step {
            let path = self.0.join(name);
            fs::write(&path, name).unwrap();
            Step::File { path }
        }

        fn record(&self, name: &str) -> PathBuf {
            self.0.join(format!("netns-{}", namespace().unwrap())).join(format!("{name}.json"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn everything_is_put_back_and_the_journal_is_gone() {
        let folder = Folder::new("all");
        let mut undo = UndoJournal::open(&folder.0, "a").unwrap();
        undo.record(folder.file("one")).unwrap();
        undo.record(folder.file("two")).unwrap();
        assert!(folder.record("a").exists());
        assert_eq!(undo.revert_all_steps().len(), 0);
        drop(undo);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0, "something was left");
    }

    #[test]
    fn dropping_puts_back_too() {
        let folder = Folder::new("drop");
        let mut undo = UndoJournal::open(&folder.0, "a").unwrap();
        undo.record(folder.file("one")).unwrap();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _moved = undo;
            panic!("as an engine might");
        }));
        assert!(panic.is_err());
        assert!(!folder.0.join("one").exists());
    }

    #[test]
    fn a_second_owner_is_refused_and_told_the_first() {
        let folder = Folder::new("second");
        let first = UndoJournal::open(&folder.0, "a").unwrap();
        match UndoJournal::open(&folder.0, "a") {
            Err(OsError::AlreadyRunning { pid, .. }) => assert_eq!(pid, std::process::id()),
            other => panic!("{other:?}"),
        }
        let other = UndoJournal::open(&folder.0, "b").unwrap();
        drop(first);
        drop(UndoJournal::open(&folder.0, "a").unwrap());
        drop(other);
    }

    #[test]
    fn what_a_dead_process_left_is_cleaned_up_by_the_next() {
        let folder = Folder::new("dead");
        let step = folder.file("left");
        let path = folder.record("a");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let gone = Record { pid: u32::MAX, start_time: 1, steps: vec![step] };
        fs::write(&path, serde_json::to_vec(&gone).unwrap()).unwrap();
        let undo = UndoJournal::open(&folder.0, "a").unwrap();
        assert!(!folder.0.join("left").exists());
        assert!(undo.steps().is_empty());
    }

    #[test]
    fn a_process_number_used_again_is_not_taken_for_the_owner() {
        let parent = std::os::unix::process::parent_id();
        let mut record = Record { pid: parent, start_time: start_time(parent).unwrap(), steps: vec![] };
        assert!(record.is_alive_elsewhere());
        record.start_time += 1;
        assert!(!record.is_alive_elsewhere());
    }

    #[test]
    fn a_journal_that_cannot_be_understood_is_set_aside() {
        let folder = Folder::new("aside");
        let path = folder.record("a");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"{\"pid\":1,").unwrap();
        drop(UndoJournal::open(&folder.0, "a").unwrap());
        assert_eq!(fs::read(path.with_extension("unreadable")).unwrap(), b"{\"pid\":1,");
    }

    #[test]
    fn reverted_steps_are_forgotten() {
        let folder = Folder::new("revert");
        let mut undo = UndoJournal::open(&folder.0, "a").unwrap();
        let (one, two) = (folder.file("one"), folder.file("two"));
        undo.record_all([one.clone(), two.clone()]).unwrap();
        assert!(undo.revert(std::slice::from_ref(&one)).is_empty());
        assert_eq!(undo.steps(), [two]);
        assert!(!folder.0.join("one").exists() && folder.0.join("two").exists());
        let on_disk = load(&folder.record("a")).unwrap();
        assert_eq!(on_disk.steps, undo.steps());
    }

    #[test]
    fn a_process_name_may_hold_anything() {
        let tail = "S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 4242 1 1";
        assert_eq!(parse_start_time(&format!("7 (a) b (c)) {tail}")), Some(4242));
        assert_eq!(parse_start_time("7 (cut) S 1"), None);
        assert_eq!(parse_start_time(""), None);
    }
}
