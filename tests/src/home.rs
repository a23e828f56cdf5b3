//! An ordinary user of the machine, with a folder as a session has one.

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

/// `nobody`.
pub const USER: u32 = 65534;

/// The user's folder, for sockets and for what has to survive a restart. It goes when this is dropped.
pub struct Home(PathBuf);

impl Home {
    /// A new, empty one.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("mpvpn-user-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
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

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
