//! Keeps the logs of a failed test beyond the end of its testbed.
//!
//! In: the directory of a lab. Out: its files in `target/e2e-failures/TEST`, in place of those of the last
//! failure of the same test. Sockets, folders and files larger than [`MAX_FILE_BYTES`] are left out.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::target_dir;

/// Size of the largest file that is copied, bytes: logs have kilobytes, packet captures tens of megabytes.
/// Larger: a runaway log fills the disk. Smaller: captures are missing.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Copies the files of `dir`, and returns the folder with the copies.
pub(crate) fn copy_logs(dir: &Path, test: &str) -> io::Result<PathBuf> {
    copy_logs_to(&target_dir().join("e2e-failures"), dir, test)
}

fn copy_logs_to(failures: &Path, dir: &Path, test: &str) -> io::Result<PathBuf> {
    let folder = failures.join(test.replace("::", "."));
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let about = entry.metadata()?;
        if about.is_file() && about.len() <= MAX_FILE_BYTES {
            fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
    }
    folder.canonicalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_take_the_place_of_those_of_the_last_failure() {
        let (failures, dir) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        fs::create_dir(dir.path().join("state")).expect("a folder");
        let mut kept = PathBuf::new();
        for (name, text) in [("1-server.log", "first"), ("2-client.log", "second")] {
            fs::write(dir.path().join(name), text).expect("a file");
            kept = copy_logs_to(failures.path(), dir.path(), "cut::a_link").expect("files are kept");
            fs::remove_file(dir.path().join(name)).expect("our own file");
        }
        let found = fs::read_dir(&kept).expect("a folder").flatten().map(|entry| entry.path());
        assert_eq!(found.collect::<Vec<_>>(), [kept.join("2-client.log")]);
        assert_eq!(fs::read_to_string(kept.join("2-client.log")).expect("a file"), "second");
        assert!(kept.ends_with("cut.a_link"), "{}", kept.display());
    }
}
