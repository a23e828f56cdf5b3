//! The two ends of a tunnel, and where the socket of an instance's local API is.

use std::path::PathBuf;

use mpvpn_types::word_enum;

use crate::{
    Error,
    dirs::{self, SOCKET_DIR},
    word_schemas,
};

word_enum! {
    /// The end of the tunnel that a process is.
    pub enum Role {
        /// A server.
        #[default]
        Server = "server",
        /// A client or a proxy.
        Client = "client",
    }
}

word_schemas!(Role);

/// Path of the API socket of root's instance `name`.
pub fn default_socket(role: Role, name: &str) -> PathBuf {
    PathBuf::from(SOCKET_DIR).join(format!("{role}-{name}.sock"))
}

/// Path of the API socket of the instance `name` in the runtime folder of the calling user.
pub fn user_socket(role: Role, name: &str) -> crate::Result<PathBuf> {
    let dir = dirs::runtime_dir().ok_or_else(|| {
        Error::usage(
            "there is no folder for the socket of the local API: XDG_RUNTIME_DIR is not set",
            "log in as this user, so that XDG_RUNTIME_DIR is set, or give --api-socket PATH",
        )
    })?;
    Ok(dir.join(format!("{role}-{name}.sock")))
}
