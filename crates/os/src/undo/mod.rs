//! The journal of changes to the system (an undo log).
//!
//! In: [`Step`]s, each written to disk *before* it is applied. Out: the previous state of the machine, when
//! the owner ends ([`UndoJournal::revert_all_steps`], or dropping), or after a kill when the next process
//! opens the journal of the same name ([`UndoJournal::open`]).
//!
//! Always holds:
//! - At most one living process owns a journal name in a network namespace: it holds a lock on `<name>.lock`,
//!   which the kernel releases however the process ends; `<name>.json` has its process ID and its steps.
//! - The record on disk is complete: it is replaced by rename, after fsync.
//! - Reverting is idempotent: objects that are gone already, or that another program has changed since, are
//!   left alone.
//!
//! The folder is `<base>/netns-<inode of the network namespace>`, because namespaces share `/run`.

mod lock;
mod numbers;
mod owners;
mod step;

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

pub use lock::Lock;
pub(crate) use lock::{give_to_owner_of_folder, open_locked};
use numbers::TakenNumber;
pub use numbers::{CLASS_MARKS, INSTANCE_NUMBERS, LINK_NUMBERS, NumberPool};
pub(crate) use owners::{Owners, original};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
pub use step::Step;

use crate::{
    error::OsError,
    helper::MAX_MESSAGE_BYTES,
    netlink::Netlink,
    regular_file::{self, Links},
    sysctl,
};

/// The folder of journals, unless a caller chooses another one.
pub const DEFAULT_FOLDER: &str = "/run/mpvpn";
/// The pools whose numbers have one holder each.
const EXCLUSIVE_POOLS: [&NumberPool; 2] = [&INSTANCE_NUMBERS, &CLASS_MARKS];

/// An open journal.
#[derive(Debug)]
pub struct UndoJournal {
    path: PathBuf,
    record: Record,
    netlink: Netlink,
    owners: Owners,
    /// Given back when all steps are reverted.
    numbers: Vec<TakenNumber>,
    /// Devices that stay when the owner ends, with their addresses and routes.
    kept: Vec<String>,
    /// Released last.
    _lock: Lock,
}

/// The state of one journal name that [`UndoJournal::reset_all`] found.
#[derive(Debug)]
pub enum Leftover {
    /// Its process runs: nothing was changed.
    Running,
    /// Its process has ended. Its steps were reverted, except those with these errors.
    Reverted(Vec<OsError>),
}

/// The content of the file on disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pid: u32,
    /// When the process started, in clock ticks since boot (proc(5), `starttime`): tells a reused process ID
    /// from the owner.
    start_time: u64,
    pub(crate) steps: Vec<Step>,
}

impl UndoJournal {
    /// Opens the journal `name` under `base` for this network namespace. The steps that a killed process left
    /// in it are reverted first.
    ///
    /// # Errors
    /// [`OsError::AlreadyRunning`] if the owner of the journal is alive, or why the journal cannot be
    /// written.
    pub fn open(base: &Path, name: &str) -> Result<Self, OsError> {
        Self::open_keeping(base, name, Vec::new())
    }

    /// Opens it as [`Self::open`] does. Steps for the devices `kept` that the owner before has left in
    /// force, and that still are, become steps of this journal ([`Self::steps`]); they stay in force when
    /// the owner ends, until it is opened without these devices, or reset.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_keeping(base: &Path, name: &str, kept: Vec<String>) -> Result<Self, OsError> {
        let folder = namespace_folder(base)?;
        let file = file_name(name);
        let path = folder.join(format!("{file}.json"));
        let owner =
            || OsError::AlreadyRunning { name: name.to_owned(), pid: load(&path).map_or(0, |r| r.pid) };
        let lock = Lock::take(&folder, &file).map_err(|e| failed("lock", &folder, e))?.ok_or_else(owner)?;
        let mut netlink = Netlink::open()?;
        let owners = Owners::new(&folder, &file);
        let mut adopted = Vec::new();
        if let Some(abandoned) = load(&path) {
            if abandoned.is_alive_elsewhere() {
                return Err(owner());
            }
            let (of_kept, others): (Vec<Step>, Vec<Step>) =
                abandoned.steps.into_iter().partition(|step| step.is_of_device(&kept));
            adopted = step::in_force(of_kept, &mut netlink)?;
            if !others.is_empty() {
                tracing::info!(
                    pid = abandoned.pid,
                    steps = others.len(),
                    "reverting the changes of a process that was killed"
                );
            }
            for error in revert_all(&mut netlink, &owners, &others) {
                tracing::warn!(%error, "cannot revert a change of a process that was killed");
            }
            // The locks of the killed process are free now.
            let _ = fs::remove_file(&path);
        }
        numbers::clean(&folder, &EXCLUSIVE_POOLS);
        let pid = std::process::id();
        let record = Record { pid, start_time: start_time(pid).unwrap_or(0), steps: adopted };
        let undo = Self { path, record, netlink, owners, numbers: Vec::new(), kept, _lock: lock };
        undo.save()?;
        Ok(undo)
    }

    /// Reverts the steps of all processes in this network namespace that have ended without doing it. Returns
    /// the names of the journals and what was found.
    ///
    /// # Errors
    /// If the folder cannot be read, or the kernel cannot be asked.
    pub fn reset_all(base: &Path) -> Result<Vec<(String, Leftover)>, OsError> {
        let folder = namespace_folder(base)?;
        let files = match fs::read_dir(&folder) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("list", &folder, error)),
        };
        let name_of = |file: fs::DirEntry| Some(file.file_name().to_str()?.strip_suffix(".json")?.to_owned());
        let mut names: Vec<String> = files.flatten().filter_map(name_of).collect();
        names.sort_unstable();
        let mut found = Vec::new();
        for name in names {
            let path = folder.join(format!("{name}.json"));
            let _lock = match Lock::take(&folder, &name) {
                Ok(Some(lock)) => lock,
                Ok(None) => {
                    found.push((name, Leftover::Running));
                    continue;
                }
                // The others are reverted all the same.
                Err(error) => {
                    found.push((name, Leftover::Reverted(vec![failed("lock", &path, error)])));
                    continue;
                }
            };
            let Some(abandoned) = load(&path) else { continue };
            if abandoned.is_alive_elsewhere() {
                found.push((name, Leftover::Running));
                continue;
            }
            let mut errors =
                revert_all(&mut Netlink::open()?, &Owners::new(&folder, &name), &abandoned.steps);
            errors.extend(fs::remove_file(&path).map_err(|error| failed("remove", &path, error)).err());
            found.push((name, Leftover::Reverted(errors)));
        }
        numbers::clean(&folder, &EXCLUSIVE_POOLS);
        numbers::clean(&folder, &[&LINK_NUMBERS]);
        Ok(found)
    }

    /// Records a step that the caller will apply by itself.
    pub fn record(&mut self, step: Step) -> Result<(), OsError> {
        self.record_all([step])
    }

    /// Records several steps with one write.
    pub fn record_all(&mut self, steps: impl IntoIterator<Item = Step>) -> Result<(), OsError> {
        let before = self.record.steps.len();
        self.record.steps.extend(steps);
        self.save().inspect_err(|_| self.record.steps.truncate(before))
    }

    /// Records `steps` with one write, then applies them in order.
    ///
    /// # Errors
    /// If a step cannot be applied: then those before it are reverted. What exists already belongs to another
    /// instance or program, and stays.
    pub fn apply(&mut self, steps: &[Step]) -> Result<(), OsError> {
        if steps.is_empty() {
            return Ok(());
        }
        self.record_all(steps.iter().cloned())?;
        for (at, step) in steps.iter().enumerate() {
            let Err(error) = step.apply(&mut self.netlink, &self.owners) else { continue };
            let begun = if error.is_present() { at } else { at + 1 };
            self.forget(&steps[begun..]);
            for error in self.revert(&steps[..begun]) {
                tracing::warn!(%error, "cannot revert a change of the system that was incomplete");
            }
            return Err(error);
        }
        Ok(())
    }

    /// Takes a number that no other instance of this network namespace has, `preferred` if it is free. It is
    /// given back when the journal ends; a killed process holds it until its steps are reverted.
    ///
    /// # Errors
    /// [`OsError::NumbersInUse`] if none is left.
    pub fn take_number(&mut self, pool: &'static NumberPool, preferred: Option<u8>) -> Result<u8, OsError> {
        let (folder, name) = self.folder_and_name();
        let taken = numbers::take(folder, pool, name, preferred)?;
        let number = taken.number;
        self.numbers.push(taken);
        Ok(number)
    }

    /// The number that stands for `label` at all instances of this network namespace, until the last that
    /// uses it ends.
    ///
    /// # Errors
    /// [`OsError::NumbersInUse`] if none is left.
    pub fn shared_number(&mut self, pool: &'static NumberPool, label: &str) -> Result<u8, OsError> {
        let is_it = |taken: &&TakenNumber| taken.pool == pool.folder && taken.label == label;
        if let Some(taken) = self.numbers.iter().find(is_it) {
            return Ok(taken.number);
        }
        let taken = numbers::share(self.folder_and_name().0, pool, label)?;
        let number = taken.number;
        self.numbers.push(taken);
        Ok(number)
    }

    /// Writes a kernel parameter; does nothing if it has that value already, unless another instance gave it
    /// the value: then it keeps the value until both have ended.
    pub fn set_sysctl(&mut self, key: &str, value: &str) -> Result<(), OsError> {
        let before = sysctl::read(key)?;
        if before == value && !self.owners.is_claimed(&step::sysctl_key(key)) {
            return Ok(());
        }
        self.apply(&[Step::Sysctl { key: key.to_owned(), before, set: value.to_owned() }])
    }

    fn folder_and_name(&self) -> (&Path, &str) {
        let name = self.path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        (self.path.parent().unwrap_or(Path::new("/")), name)
    }

    /// Removes steps from the record that were not applied.
    fn forget(&mut self, steps: &[Step]) {
        for step in steps {
            if let Some(at) = self.record.steps.iter().rposition(|known| known == step) {
                self.record.steps.remove(at);
            }
        }
    }

    /// Reverts `steps`, the last first, and removes them from the journal; returns the errors.
    pub fn revert(&mut self, steps: &[Step]) -> Vec<OsError> {
        if steps.is_empty() {
            return Vec::new();
        }
        let mut errors = revert_all(&mut self.netlink, &self.owners, steps);
        let reverted: BTreeSet<&Step> = steps.iter().collect();
        self.record.steps.retain(|step| !reverted.contains(step));
        errors.extend(self.save().err());
        errors
    }

    /// The recorded steps, in the order in which they were applied.
    pub fn steps(&self) -> &[Step] {
        &self.record.steps
    }

    /// Reverts all steps, the last first, and continues after errors; returns the errors. The journal is
    /// empty afterwards, but for steps of devices that stay, and can be used again.
    pub fn revert_all_steps(&mut self) -> Vec<OsError> {
        let kept = &self.kept;
        let steps: Vec<Step> = self.record.steps.extract_if(.., |step| !step.is_of_device(kept)).collect();
        let mut errors = revert_all(&mut self.netlink, &self.owners, &steps);
        if !self.record.steps.is_empty() {
            errors.extend(self.save().err());
            return errors;
        }
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            errors.push(failed("remove", &self.path, error));
        }
        errors
    }

    fn save(&self) -> Result<(), OsError> {
        write_record(&self.path, &self.record)
    }
}

impl Drop for UndoJournal {
    fn drop(&mut self) {
        for error in self.revert_all_steps() {
            tracing::warn!(%error, "cannot revert a change of the system");
        }
    }
}

impl Record {
    /// Whether another living process owns the journal. Needed where locks do not work, as on some network
    /// file systems.
    fn is_alive_elsewhere(&self) -> bool {
        self.pid != std::process::id() && start_time(self.pid) == Some(self.start_time)
    }
}

fn revert_all(netlink: &mut Netlink, owners: &Owners, steps: &[Step]) -> Vec<OsError> {
    if steps.is_empty() {
        return Vec::new();
    }
    let mut errors = Vec::new();
    let links = netlink.links().unwrap_or_else(|error| {
        errors.push(error);
        Vec::new()
    });
    errors.extend(steps.iter().rev().filter_map(|step| step.revert(netlink, owners, &links).err()));
    errors
}

/// Reads a record. A file that cannot be parsed (of another version) is renamed, not deleted.
fn load(path: &Path) -> Option<Record> {
    let bytes = read(path).ok()?;
    match serde_json::from_slice(&bytes) {
        Ok(record) => Some(record),
        Err(error) => {
            let aside = path.with_extension("unreadable");
            tracing::warn!(%error, kept = %aside.display(), "the journal of an earlier process cannot be parsed: its changes are not reverted");
            let _ = fs::rename(path, aside);
            None
        }
    }
}

/// Reads a file of a folder that may belong to a service's user, as far as a record can be long: the facts of
/// a change are no longer than a message to the helper.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let max = u64::from(MAX_MESSAGE_BYTES);
    let bytes = regular_file::read(path, Links::Refuse, max + 1)?;
    if bytes.len() as u64 > max { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
}

/// The text in such a file; empty if it cannot be read.
pub(crate) fn read_text(path: &Path) -> String {
    read(path).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
}

/// The record in such a file; `None` if there is none that this version can read.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read(path).ok()?).ok()
}

/// Replaces the record in such a file.
pub(crate) fn write_record<T: Serialize>(path: &Path, record: &T) -> Result<(), OsError> {
    let bytes = serde_json::to_vec(record).map_err(|error| failed("encode", path, error.into()))?;
    replace(path, &bytes).map_err(|error| failed("write", path, error))
}

/// Replaces a file such that after a crash either the old or the new one exists completely.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    // A draft, or a link that somebody put there.
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    give_to_owner_of_folder(&new);
    fs::rename(&new, path)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::File::open(folder)?.sync_all()
}

pub(crate) fn failed(operation: &'static str, path: &Path, source: io::Error) -> OsError {
    OsError::Journal { operation, path: path.to_owned(), source }
}

/// The folder below `base` for this thread's network namespace: namespaces share `/run`.
pub(crate) fn namespace_folder(base: &Path) -> Result<PathBuf, OsError> {
    Ok(base.join(format!("netns-{}", namespace()?)))
}

/// The inode of this thread's network namespace, which identifies the namespace.
pub(crate) fn namespace() -> Result<u64, OsError> {
    let link = Path::new("/proc/thread-self/ns/net");
    Ok(fs::metadata(link).map_err(|e| failed("find the network namespace for", link, e))?.ino())
}

pub(crate) fn file_name(name: &str) -> String {
    let clean = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    name.chars().take(64).map(clean).collect()
}

/// When process `pid` started, in clock ticks since boot (proc(5), field 22); `None` if it does not run: it
/// does not exist, or has ended and its parent has not asked for its exit status yet.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses field 22, unless field 3 says that the process has ended. The second field is a name in parentheses
/// that may contain any characters, so fields count from its end.
fn parse_start_time(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when the test ends.
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
    fn all_steps_are_reverted_and_the_journal_is_removed() {
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
    fn dropping_the_journal_reverts_too() {
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
    fn a_second_owner_is_refused_with_the_process_id_of_the_first() {
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
    fn a_reused_process_id_is_not_taken_for_the_owner() {
        let parent = std::os::unix::process::parent_id();
        let mut record = Record { pid: parent, start_time: start_time(parent).unwrap(), steps: vec![] };
        assert!(record.is_alive_elsewhere());
        record.start_time += 1;
        assert!(!record.is_alive_elsewhere());
    }

    #[test]
    fn a_journal_that_cannot_be_parsed_is_renamed() {
        let folder = Folder::new("aside");
        let path = folder.record("a");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"{\"pid\":1,").unwrap();
        drop(UndoJournal::open(&folder.0, "a").unwrap());
        assert_eq!(fs::read(path.with_extension("unreadable")).unwrap(), b"{\"pid\":1,");
    }

    #[test]
    fn reverted_steps_are_removed_from_the_journal() {
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
    fn a_process_name_may_contain_any_characters() {
        let tail = "S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 4242 1 1";
        assert_eq!(parse_start_time(&format!("7 (a) b (c)) {tail}")), Some(4242));
        assert_eq!(parse_start_time(&format!("7 (a) Z{}", &tail[1..])), None, "a zombie");
        assert_eq!(parse_start_time("7 (cut) S 1"), None);
        assert_eq!(parse_start_time(""), None);
    }
}
