//! An unprivileged user of a testbed and the user's folder.

use std::{
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use crate::testbed::Testbed;

/// User ID of `nobody`.
pub const USER: u32 = 65534;

/// The user's folder for sockets and state (`XDG_RUNTIME_DIR`, `XDG_STATE_HOME`). Removed with the testbed.
pub struct UserHome(PathBuf);

impl UserHome {
    /// Creates an empty folder.
    pub fn new(testbed: &Testbed) -> Self {
        let dir = testbed.public_folder("home");
        chown(&dir, Some(USER), Some(USER)).expect("root may give it away");
        Self(dir)
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Path of a file or socket of mpvpn in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join("mpvpn").join(name)
    }
}
