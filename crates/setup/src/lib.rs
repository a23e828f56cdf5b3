//! `mpvpn setup` without its effects: what has to change so that a service of this machine runs a server or a
//! client.
//!
//! In: the facts of the machine ([`MachineFacts`]) and the wishes of the user. Out: a [`Plan`], or the reason
//! why there is none. Always holds: a plan that was carried out is empty the next time; each [`Step`] says
//! what it does, why, and how it is undone; no step enables a firewall, changes a policy, or rewrites a file
//! of another program.
#![forbid(unsafe_code)]
// This crate is at the edge: files, sockets and clocks are its business.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod client;
pub mod execution;
pub mod facts;
pub mod firewall;
mod instance;
mod machine;
mod plan;
mod record;
mod removal;
pub mod reset;
mod server;
mod site;
mod subnet;

use std::{fs, io::ErrorKind, path::Path};

use mpvpn_input::{Error, Result, files};

pub use client::{
    CONFIRM_SECONDS, ClientWishes, KILL_SWITCH_UNIT, plan_client, plan_confirmation, plan_rollback,
};
pub use instance::Instance;
pub use machine::{Interface, MachineFacts, UnitState, comes_over_network};
pub use plan::{Action, Audience, NftRule, Plan, Step};
pub use record::{Record, Rollback};
pub use removal::{KeptState, Removal, plan_removal};
pub use server::{ServerWishes, passing_firewall_steps, plan_server};
pub use site::SiteWish;

/// Writes a file of a plan, with its folder.
///
/// # Errors
/// If it cannot be written.
pub fn write_file(path: &Path, text: &str, audience: Audience) -> Result<()> {
    match audience {
        Audience::Service => files::write_config(path, text),
        Audience::Root => {
            files::create_private_dir(path.parent().unwrap_or(Path::new("/")))?;
            files::write_secret(path, text.as_bytes())
        }
        Audience::All => {
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))
                .map_err(Error::file("create", path))?;
            fs::write(path, text).map_err(Error::file("write", path))
        }
    }
}

/// Removes a file, and its folder if that is a drop-in folder and empty then; or an empty folder. It is fine
/// if there is none.
///
/// # Errors
/// If it cannot be removed.
pub fn remove_file(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    match removed {
        // Files of others may be in a folder.
        Err(error) if ![ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty].contains(&error.kind()) => {
            return Err(Error::file("remove", path)(error));
        }
        _ => {}
    }
    if let Some(folder) = path.parent().filter(|folder| folder.extension().is_some_and(|end| end == "d")) {
        // It stays if there are files of others in it.
        let _ = fs::remove_dir(folder);
    }
    Ok(())
}
