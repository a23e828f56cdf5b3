//! An ordinary user of the machine, with a folder as a session has one.

use std::{
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use crate::testbed::Testbed;

/// `nobody`.
pub const USER: u32 = 65534;

/// The user's folder, for sockets and for what has to survive a restart. It goes with the stage.
pub struct UserHome(PathBuf);

impl UserHome {
    /// A new, empty one.
    pub fn new(testbed: &Testbed) -> Self {
        let dir = testbed.public_folder("home");
        chown(&dir, Some(USER), Some(USER)).expect("root may give it away");
        Self(dir)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file of mpvpn in it, or a socket.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join("mpvpn").join(name)
    }
}
