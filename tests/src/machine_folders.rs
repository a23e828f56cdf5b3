//! Folders of a whole machine for a host of a testbed: its own `/etc`, `/var/lib` and `/run/mpvpn`.
//!
//! In: an empty folder. Out: commands on that host that see its folders in the places of the machine's.
//! Always holds: commands of one host see what others of it have written; systemd is hidden from them, so
//! that no service of the machine is touched.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    testbed::{Host, Testbed},
    user_home::USER,
};

/// The folders of one host.
pub struct MachineFolders(PathBuf);

/// Each command has its own mount namespace, in which the folders are mounted. The stub of systemd-resolved
/// stays in place.
const ENTER: &str = r#"
    mount --bind "$0/etc" /etc && mount --bind "$0/lib" /var/lib && mount --bind "$0/run" /run/mpvpn || exit 125
    if [ -d /run/systemd ]; then
        mkdir -p /run/systemd/resolve "$0/resolve"
        mount --bind /run/systemd/resolve "$0/resolve" && mount -t tmpfs none /run/systemd || exit 125
        mkdir /run/systemd/resolve && mount --bind "$0/resolve" /run/systemd/resolve || exit 125
    fi
    cd "$0/$1" || exit 125
    shift
    unset XDG_STATE_HOME SSH_CONNECTION
    export HOME="$PWD" XDG_RUNTIME_DIR="$PWD" PATH="$0/../bin:$PATH"
    exec "$@" 2>&1"#;

impl MachineFolders {
    /// Makes them below `folder`: a copy of the machine's `/etc` without mpvpn's files, and empty folders.
    /// Programs in the folder `bin` beside it are found first.
    pub fn new(folder: PathBuf) -> Self {
        for inner in ["etc", "lib", "run", "home", "user"] {
            fs::create_dir_all(folder.join(inner)).expect("a folder");
        }
        chown(folder.join("user"), Some(USER), Some(USER)).expect("root may give it away");
        for folder in [&folder, &folder.join("home")] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("its owner may");
        }
        let copied =
            Command::new("cp").args(["-a", "/etc/."]).arg(folder.join("etc")).status().expect("cp runs");
        assert!(copied.success(), "/etc cannot be copied");
        let _ = fs::remove_dir_all(folder.join("etc/mpvpn"));
        Self(folder)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file by its path on the host, which is below `/etc` or `/var/lib`, or relative to the home folder.
    pub fn file(&self, path: &str) -> PathBuf {
        match (path.strip_prefix("/etc/"), path.strip_prefix("/var/lib/")) {
            (Some(rest), _) => self.0.join("etc").join(rest),
            (_, Some(rest)) => self.0.join("lib").join(rest),
            (None, None) => self.0.join("home").join(path),
        }
    }

    /// A command on that host, as root or as a user without privileges. Its standard error is its standard
    /// output.
    pub fn command(&self, testbed: &Testbed, host: Host, is_user: bool, args: &[&str]) -> Command {
        let mut command = testbed.command(host, "sh");
        command.args(["-c", ENTER]).arg(&self.0).arg(if is_user { "user" } else { "home" });
        if is_user {
            let user = USER.to_string();
            command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
        }
        command.args(args);
        command
    }
}
