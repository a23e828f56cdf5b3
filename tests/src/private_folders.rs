//! The folders of the machine in which mpvpn keeps sockets, journals, state and configuration, for each stage its own.
//!
//! In: the directory of a lab. Out: mounts that a process makes for itself between fork and exec. What always holds: a
//! process of a stage finds in [`SOCKET_DIR`] what processes of the same stage have put there, and the lab's directory at
//! its usual path; in the folders for state and configuration it finds nothing of the machine's. The mounts go with the
//! process.

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::unix::{ffi::OsStrExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use mpvpn_control::{
    api::SOCKET_DIR,
    config::{SERVER_FILE, STATE_DIR},
};

/// The folders of one stage.
pub(crate) struct PrivateFolders {
    sockets: PathBuf,
    mounts: Arc<[Mount]>,
}

/// A folder, and where it appears.
struct Mount {
    from: CString,
    to: CString,
}

impl PrivateFolders {
    /// Makes the folders below `dir`, which is the directory of a lab below [`SOCKET_DIR`].
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let sockets = dir.join("private/sockets");
        // The lab's directory has to be found below the folder that takes the place of the one in which it lies.
        let inner = dir.strip_prefix(SOCKET_DIR).map_err(io::Error::other)?;
        let inner = sockets.join(inner);
        fs::create_dir_all(&inner)?;
        let mut mounts = vec![Mount::new(dir, &inner)?, Mount::new(&sockets, Path::new(SOCKET_DIR))?];
        let configuration = Path::new(SERVER_FILE).parent().unwrap_or(Path::new("/"));
        for (name, folder) in [("state", Path::new(STATE_DIR)), ("configuration", configuration)] {
            // Without mpvpn on the machine they are not there, and a mount needs a place.
            if folder.is_dir() {
                let own = dir.join("private").join(name);
                fs::create_dir_all(&own)?;
                mounts.push(Mount::new(&own, folder)?);
            }
        }
        Ok(Self { sockets, mounts: mounts.into() })
    }

    /// What processes of the stage find as [`SOCKET_DIR`], as others reach it.
    pub(crate) fn sockets(&self) -> &Path {
        &self.sockets
    }

    /// Makes `command` see these folders. It must enter a mount namespace of its own before.
    pub(crate) fn apply(&self, command: &mut Command) {
        let mounts = Arc::clone(&self.mounts);
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
