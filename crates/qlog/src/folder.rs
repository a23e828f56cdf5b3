//! The folder with the qlog files of one process.
//!
//! In: records of traces. Out: files that only their owner may read, named `ROLE-NAME-TIME-CONNECTION.sqlog`
//! with the time of their creation in microseconds since 1970. Always holds: all files of this role and name,
//! also those of earlier processes, take at most `limit` bytes together; the newest are kept; other files
//! stay as they are.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use super::trace::Trace;

const SUFFIX: &str = ".sqlog";
/// One file may take this fraction (its inverse) of the limit. Larger files: more is lost when the oldest is
/// removed. Smaller files: a long trace is in more pieces.
const FILES_OF_FULL_SIZE: u64 = 16;
/// The number of files kept; short connections make small files. More: slow listings. Fewer: short
/// connections push out long ones. Chosen.
const MAX_FILES: usize = 1000;

#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    prefix: String,
    /// In bytes.
    limit: u64,
    /// The sizes of the files (bytes), by name and therefore by age.
    files: BTreeMap<String, u64>,
}

impl Folder {
    /// Opens the folder with the files that begin with `prefix`, and creates it if necessary. Fails if it is
    /// not writable.
    pub(super) fn open(path: PathBuf, prefix: &str, limit: u64) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let probe = path.join(format!("{prefix}probe"));
        create(&probe)?;
        fs::remove_file(&probe)?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&path)? {
            let entry = entry?;
            if let Some(name) = entry.file_name().to_str().filter(|name| is_ours(name, prefix)) {
                files.insert(name.to_owned(), entry.metadata()?.len());
            }
        }
        Ok(Self { path, prefix: prefix.to_owned(), limit, files })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the buffered records of a trace to its file, or to a new file if it has none or that file is
    /// full or was removed.
    pub(super) fn write(&mut self, trace: &mut Trace) -> io::Result<()> {
        let buffered = trace.buffered() as u64;
        if buffered == 0 {
            return Ok(());
        }
        let size = |name: &String| self.files.get(name).copied();
        let fits = |size: u64| size + buffered <= self.limit / FILES_OF_FULL_SIZE;
        if let Some(name) = trace.file.take().filter(|name| size(name).is_some_and(fits)) {
            match OpenOptions::new().append(true).open(self.path.join(&name)) {
                Ok(file) => {
                    trace.file = Some(name.clone());
                    return self.append(file, name, &trace.take());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => drop(self.files.remove(&name)),
                Err(error) => return Err(error),
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let name = format!("{}{now:016}-{:016x}{SUFFIX}", self.prefix, trace.connection());
        let file = create(&self.path.join(&name))?;
        self.files.insert(name.clone(), 0);
        trace.file = Some(name.clone());
        let mut bytes = trace.head();
        bytes.extend(trace.take());
        self.append(file, name, &bytes)
    }

    fn append(&mut self, mut file: File, name: String, bytes: &[u8]) -> io::Result<()> {
        self.delete_oldest(bytes.len() as u64, &name)?;
        file.write_all(bytes)?;
        *self.files.entry(name).or_default() += bytes.len() as u64;
        Ok(())
    }

    /// Removes the oldest files, except `kept`, until `bytes` more fit.
    fn delete_oldest(&mut self, bytes: u64, kept: &str) -> io::Result<()> {
        while self.files.values().sum::<u64>() + bytes > self.limit || self.files.len() > MAX_FILES {
            let Some(oldest) = self.files.keys().find(|name| *name != kept).cloned() else {
                return Ok(());
            };
            match fs::remove_file(self.path.join(&oldest)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.files.remove(&oldest),
            };
        }
        Ok(())
    }
}

/// Creates a file that only its owner may read.
fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

fn is_ours(name: &str, prefix: &str) -> bool {
    let middle = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SUFFIX));
    middle.and_then(|middle| middle.split_once('-')).is_some_and(|(time, connection)| {
        let is_time = time.len() == 16 && time.bytes().all(|byte| byte.is_ascii_digit());
        is_time && connection.len() == 16 && connection.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}
