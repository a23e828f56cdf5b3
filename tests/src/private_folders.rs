//! Gives each testbed its own copies of the system folders in which mpvpn keeps sockets, journals, state and
//! configuration.
//!
//! In: the directory of a lab. Out: bind mounts that a process makes between fork and exec. Always holds:
//! processes of one testbed share [`SOCKET_DIR`], and find the lab's directory at its usual path; the folders
//! for state and configuration contain no files of the machine, and each host has a folder for state of its
//! own. The mounts disappear with the process.

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::unix::{ffi::OsStrExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use mpvpn_config::SERVER_FILE;
use mpvpn_input::dirs::{SOCKET_DIR, STATE_DIR};

use crate::testbed::Host;

/// The folders of one testbed.
pub(crate) struct PrivateFolders {
    dir: PathBuf,
    sockets: PathBuf,
    mounts: Vec<Mount>,
}

/// A bind mount.
#[derive(Clone)]
struct Mount {
    from: CString,
    to: CString,
}

impl PrivateFolders {
    /// Makes the folders below `dir`, which is the directory of a lab below [`SOCKET_DIR`].
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let sockets = dir.join("private/sockets");
        // The lab's directory lies in the folder that is mounted over, so it is mounted again below the new
        // folder.
        let inner = dir.strip_prefix(SOCKET_DIR).map_err(io::Error::other)?;
        let inner = sockets.join(inner);
        fs::create_dir_all(&inner)?;
        let mut mounts = vec![Mount::new(dir, &inner)?, Mount::new(&sockets, Path::new(SOCKET_DIR))?];
        let configuration = Path::new(SERVER_FILE).parent().unwrap_or(Path::new("/"));
        // On a machine without mpvpn the folder does not exist, and a mount needs an existing target.
        if configuration.is_dir() {
            let own = dir.join("private/configuration");
            fs::create_dir_all(&own)?;
            mounts.push(Mount::new(&own, configuration)?);
        }
        Ok(Self { dir: dir.to_owned(), sockets, mounts })
    }

    /// The folder that processes of a host see as [`STATE_DIR`], by its path outside of them.
    pub(crate) fn state(&self, host: Host) -> PathBuf {
        let name = Path::new(STATE_DIR).file_name().unwrap_or_default();
        self.dir.join(format!("private/{host:?}-state").to_lowercase()).join(name)
    }

    /// The folder that processes of the testbed see as [`SOCKET_DIR`], by its path outside of them.
    pub(crate) fn sockets(&self) -> &Path {
        &self.sockets
    }

    /// Mounts the folders for `command` on a host, which must enter its own mount namespace before.
    pub(crate) fn apply(&self, host: Host, command: &mut Command) {
        let mut mounts = self.mounts.clone();
        // The folder of all programs' state, which exists on every machine.
        if let (Some(parent), Some(own)) = (Path::new(STATE_DIR).parent(), self.state(host).parent()) {
            fs::create_dir_all(own).expect("a folder in the lab's directory");
            mounts.push(Mount::new(own, parent).expect("paths without zeros"));
        }
        // SAFETY: between fork and exec the closure makes only system calls: no allocation, no lock.
        unsafe { command.pre_exec(move || mounts.iter().try_for_each(Mount::make)) };
    }
}

impl Mount {
    fn new(from: &Path, to: &Path) -> io::Result<Self> {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
        Ok(Self { from: text(from)?, to: text(to)? })
    }

    fn make(&self) -> io::Result<()> {
        const NONE: *const libc::c_void = std::ptr::null();
        const KIND: &CStr = c"none";
        let flags = libc::MS_BIND | libc::MS_REC;
        // SAFETY: plain system call; the strings live as long as `self`.
        match unsafe { libc::mount(self.from.as_ptr(), self.to.as_ptr(), KIND.as_ptr(), flags, NONE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
