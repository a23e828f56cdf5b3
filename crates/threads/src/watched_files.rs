//! Files that a process reads again when they change.
//!
//! In: the files, readiness of the watch, time. Out: the files that have changed. Always holds: files that
//! are written one after the other, as a certificate and its key, are reported together; a file that does not
//! change is never reported.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use mpvpn_os::file_watch::FileWatch;

/// How long no file must change before the changes are reported. Shorter: of a certificate and its key, which
/// programs write one after the other, only one is new; longer: a change counts later. Chosen.
const SETTLING_TIME: Duration = Duration::from_millis(200);

/// The watch.
#[derive(Debug)]
pub struct WatchedFiles {
    watch: FileWatch,
    changed: BTreeSet<PathBuf>,
    due: Option<Instant>,
}

impl WatchedFiles {
    /// Watches these files.
    pub fn new(files: impl IntoIterator<Item = PathBuf>) -> io::Result<Self> {
        Ok(Self { watch: FileWatch::new(files)?, changed: BTreeSet::new(), due: None })
    }

    /// Watches these files instead.
    pub fn replace(&mut self, files: impl IntoIterator<Item = PathBuf>) -> io::Result<()> {
        self.watch.replace(files)
    }

    /// Must be called when the watch is readable.
    pub fn on_ready(&mut self, now: Instant) {
        self.changed.append(&mut self.watch.changed());
        if !self.changed.is_empty() {
            self.due = Some(now + SETTLING_TIME);
        }
    }

    /// When [`Self::take_changed`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }

    /// The files that have changed, once none changes any more.
    pub fn take_changed(&mut self, now: Instant) -> BTreeSet<PathBuf> {
        match self.due.filter(|due| *due <= now) {
            Some(_) => {
                self.due = None;
                std::mem::take(&mut self.changed)
            }
            None => BTreeSet::new(),
        }
    }
}

impl AsFd for WatchedFiles {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_certificate_and_its_key_are_reported_together() {
        let home = tempfile::tempdir().unwrap();
        let [cert, key] = ["server.crt", "server.key"].map(|name| home.path().join(name));
        let mut files = WatchedFiles::new([cert.clone(), key.clone()]).unwrap();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        files.on_ready(at(0));
        assert_eq!((files.poll_timeout(), files.take_changed(at(9000)).len()), (None, 0));
        fs::write(&cert, "1").unwrap();
        files.on_ready(at(0));
        assert_eq!(files.take_changed(at(150)).len(), 0);
        fs::write(&key, "1").unwrap();
        files.on_ready(at(150));
        assert_eq!((files.take_changed(at(200)).len(), files.poll_timeout()), (0, Some(at(350))));
        assert_eq!(files.take_changed(at(350)), BTreeSet::from([cert, key]));
        assert_eq!((files.poll_timeout(), files.take_changed(at(9000)).len()), (None, 0));
    }
}
