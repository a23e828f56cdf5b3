//! Folders for what a process keeps: root's, or those of an ordinary user (XDG Base Directory Specification).

use std::{env, path::PathBuf};

use crate::{api, config};

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An absolute path in the environment; others are to be ignored.
fn absolute_path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// For sockets; `None` where this user has no such folder.
pub(crate) fn runtime_dir() -> Option<PathBuf> {
    if is_root() {
        return Some(api::SOCKET_DIR.into());
    }
    let session_dir = || {
        let dir = PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw()));
        dir.is_dir().then_some(dir)
    };
    absolute_path_in("XDG_RUNTIME_DIR").or_else(session_dir).map(|dir| dir.join("mpvpn"))
}

/// For what has to survive a restart.
pub(crate) fn state_dir() -> PathBuf {
    if is_root() {
        return config::STATE_DIR.into();
    }
    let below_home = || absolute_path_in("HOME").map(|home| home.join(".local/state"));
    absolute_path_in("XDG_STATE_HOME")
        .or_else(below_home)
        .map_or_else(|| config::STATE_DIR.into(), |dir| dir.join("mpvpn"))
}
