//! Where files of users are.

use std::path::PathBuf;

use mpvpn_config::ServerConfig;

/// The file that running servers hold locked, in the state folder.
pub(crate) const LOCK: &str = "running.lock";

/// The file with the users of a server.
pub fn users_file(config: &ServerConfig) -> PathBuf {
    config.users.clone().unwrap_or_else(|| config.state_dir.join("users.toml"))
}
