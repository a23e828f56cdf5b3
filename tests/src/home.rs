//! An ordinary user of the machine, with a folder as a session has one.

use std::{
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use crate::stage::Stage;

/// `nobody`.
pub const USER: u32 = 65534;

/// The user's folder, for sockets and for what has to survive a restart. It goes with the stage.
pub struct Home(PathBuf);

impl Home {
    /// A new, empty one.
    pub fn new(stage: &Stage) -> Self {
        let dir = stage.public_folder("home");
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
