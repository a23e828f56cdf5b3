//! Folders for sockets and state: root's, or those of an ordinary user (XDG Base Directory Specification).

use std::{env, path::PathBuf, sync::LazyLock};

/// Folder of the API sockets of root's processes, unless `--api-socket` names another path.
pub const SOCKET_DIR: &str = "/run/mpvpn";
/// Default folder of root's processes for data that survive a restart: a server's certificate, users and
/// first token; how much of its quotas a client has used.
pub const STATE_DIR: &str = "/var/lib/mpvpn";

/// Whether this process was root's when this was asked first: it keeps its folders when it leaves root.
pub fn is_root() -> bool {
    static WAS_ROOT: LazyLock<bool> = LazyLock::new(|| rustix::process::geteuid().is_root());
    *WAS_ROOT
}

/// The absolute path in an environment variable; the specification says to ignore relative ones.
fn absolute_path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Folder for sockets; `None` if this user has none.
pub fn runtime_dir() -> Option<PathBuf> {
    if is_root() {
        return Some(SOCKET_DIR.into());
    }
    let session_dir = || {
        let dir = PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw()));
        dir.is_dir().then_some(dir)
    };
    absolute_path_in("XDG_RUNTIME_DIR").or_else(session_dir).map(|dir| dir.join("mpvpn"))
}

/// Folder for data that survive a restart.
pub fn state_dir() -> PathBuf {
    if is_root() {
        return STATE_DIR.into();
    }
    let below_home = || absolute_path_in("HOME").map(|home| home.join(".local/state"));
    absolute_path_in("XDG_STATE_HOME")
        .or_else(below_home)
        .map_or_else(|| STATE_DIR.into(), |dir| dir.join("mpvpn"))
}
