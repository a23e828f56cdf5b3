//! Users of a server: who they are, how they are known, what they may use.
//!
//! In: the file `users.toml`, certificates and tokens, changes of `mpvpn user`. Out: the user of a request,
//! or why it is refused; join links; a copy of all for another machine. Always holds: files have only the
//! SHA-256 of tokens.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod auth;
pub mod backup;
pub mod check_file;
pub mod client_certificates;
pub mod credentials;
mod denied;
mod expiry;
mod file;
pub mod given_pins;
pub mod host;
pub mod join;
mod joining;
mod list;
mod options;
mod paths;
mod quotas;
mod text;
mod users;

pub use denied::{Denied, User};
pub use expiry::{Expiry, ExpiryOption};
pub use file::{LockedUsers, SettingsChange, UserCredential, UserSettings, unknown_user};
pub use joining::Joining;
pub use list::UserList;
pub use options::{ChangeOptions, LimitOptions, OrNone, site_network};
pub use paths::users_file;
pub use quotas::UserQuotas;
pub use text::{render_user, render_users};
pub use users::{
    MAX_USERS, SharedUsers, UsedUpQuotas, UserAddress, UserEntry, UserTables, Users, check_addresses,
};
