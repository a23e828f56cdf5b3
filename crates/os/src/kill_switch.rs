//! The kill switch: a firewall table that lets no packet of this machine past its tunnels.
//!
//! In: the [`Exceptions`] of each client on this machine. Out: one nftables table, `inet mpvpn_kill_switch`,
//! that drops and rejects all other packets that this machine sends or forwards.
//! Always holds: the table is replaced in one transaction, so no packet passes in between; a client changes
//! its own exceptions only; the table stays when a client is killed or crashes, until an instance of the same
//! name starts again and lifts it, or [`reset`] removes what no living process holds.
//!
//! A [`hold`] is the same without exceptions: it blocks for an instance that does not run, from boot on and
//! across its restarts.
//!
//! The exceptions of a client are a file in `<base>/netns-<inode>/kill-switch/`, and the table is made from
//! all files there. The table stands as long as there is a file.

mod monitor;
mod record;
mod table;

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use ipnet::IpNet;
pub use monitor::TableMonitor;
pub(crate) use table::script;
pub use table::{Exceptions, TABLE};

use crate::{
    error::OsError,
    firewall,
    netlink::Netlink,
    tunnel_net::is_private,
    undo::{failed, file_name, namespace_folder},
};

/// The end of the names of records that are holds. Names of instances have no dot there.
const HOLD_SUFFIX: &str = ".hold";

/// The exceptions of one client, in force.
#[derive(Debug)]
pub struct KillSwitch {
    folder: PathBuf,
    /// The file's name without `.json`.
    name: String,
    exceptions: Exceptions,
}

impl KillSwitch {
    /// Blocks everything but `exceptions` and those of other clients. `name` identifies the instance: its
    /// exceptions of before, which a killed process has left, are replaced. `base` is the folder for
    /// state, [`DEFAULT_FOLDER`](crate::undo::DEFAULT_FOLDER) but in tests.
    ///
    /// # Errors
    /// If nft refuses the table, or the exceptions cannot be written. Then everything is as it was.
    pub fn arm(base: &Path, name: &str, exceptions: Exceptions) -> Result<Self, OsError> {
        let switch = Self { folder: folder(base)?, name: file_name(name), exceptions };
        switch.put_in_force(&switch.exceptions)?;
        Ok(switch)
    }

    /// Replaces this client's exceptions. Does nothing where they are the same.
    ///
    /// # Errors
    /// As [`Self::arm`]; the exceptions of before stay in force.
    pub fn change(&mut self, exceptions: Exceptions) -> Result<(), OsError> {
        if self.exceptions != exceptions {
            self.put_in_force(&exceptions)?;
            self.exceptions = exceptions;
        }
        Ok(())
    }

    /// The exceptions that are in force.
    pub fn exceptions(&self) -> &Exceptions {
        &self.exceptions
    }

    /// Removes this client's exceptions, and the table if no other client has any. This is the only way in
    /// which a client ends its blocking: dropping the value, as a panic does, leaves it in force. Returns
    /// whether a [`hold`] blocks on.
    ///
    /// # Errors
    /// If nft refuses, or a file cannot be removed.
    pub fn lift(self) -> Result<bool, OsError> {
        lift(&self.folder, std::slice::from_ref(&self.name))
    }

    /// Writes the exceptions down and installs the table.
    fn put_in_force(&self, exceptions: &Exceptions) -> Result<(), OsError> {
        let records = record::Records::lock(&self.folder)?;
        let before = records.read(&self.name);
        records.write(&self.name, exceptions)?;
        install(&records).inspect_err(|_| {
            let restored = match before {
                Some(before) => records.restore(&self.name, &before),
                None => records.remove(&self.name),
            };
            if let Err(error) = restored {
                tracing::warn!(%error, "the exceptions of the kill switch of before are not written down again");
            }
        })
    }
}

/// Removes what an earlier process left of the instance `name`, which now starts without a kill switch, and
/// its hold. Returns whether there was any.
///
/// # Errors
/// If nft refuses, or a file cannot be removed.
pub fn lift_left_over(base: &Path, name: &str) -> Result<bool, OsError> {
    let (folder, name) = (folder(base)?, file_name(name));
    let mut left = vec![format!("{name}{HOLD_SUFFIX}"), name];
    left.retain(|name| folder.join(format!("{name}.json")).exists());
    if !left.is_empty() {
        lift(&folder, &left)?;
    }
    Ok(!left.is_empty())
}

/// Blocks everything for these instances, also while they do not run, until the next call; the holds of
/// others end.
///
/// # Errors
/// If nft refuses the table, or a record cannot be changed.
pub fn hold(base: &Path, names: &[String]) -> Result<(), OsError> {
    let folder = folder(base)?;
    if names.is_empty() && !folder.exists() {
        return Ok(());
    }
    let records = record::Records::lock(&folder)?;
    let wanted: Vec<String> = names.iter().map(|name| format!("{}{HOLD_SUFFIX}", file_name(name))).collect();
    for held in holds(&records).iter().filter(|held| !wanted.contains(held)) {
        records.remove(held)?;
    }
    for name in &wanted {
        records.write(name, &Exceptions { is_hold: true, ..Exceptions::default() })?;
    }
    install(&records)
}

/// Ends the holds of all instances, and the blocks of those that do not run; the blocks of those that run
/// stay. Returns the names of the instances.
///
/// # Errors
/// If nft refuses, or a file cannot be removed.
pub fn release(base: &Path) -> Result<Vec<String>, OsError> {
    match exists(&folder(base)?)? {
        true => reset(base),
        false => Ok(Vec::new()),
    }
}

/// The block of an instance that does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// The instance.
    pub name: String,
    /// Whether it is a [`hold`]; otherwise its process has ended without lifting it.
    pub is_hold: bool,
    /// Since when the exceptions are in force that the block has now.
    pub since: Option<SystemTime>,
}

/// The blocks of instances that do not run.
///
/// # Errors
/// If the folder cannot be read.
pub fn blocked(base: &Path) -> Result<Vec<Blocked>, OsError> {
    let folder = folder(base)?;
    if !exists(&folder)? {
        return Ok(Vec::new());
    }
    let records = record::Records::look_at(&folder);
    let ended = records.all().into_iter().filter(|(_, record)| !record.is_in_use());
    let blocked = ended.map(|(name, record)| Blocked {
        since: records.changed(&name),
        is_hold: record.exceptions.is_hold,
        name: instance(&name),
    });
    Ok(blocked.collect())
}

fn exists(folder: &Path) -> Result<bool, OsError> {
    folder.try_exists().map_err(|error| failed("read", folder, error))
}

fn holds(records: &record::Records) -> Vec<String> {
    let all = records.all().into_iter();
    all.filter(|(_, record)| record.exceptions.is_hold).map(|(name, _)| name).collect()
}

/// The instance of a record.
fn instance(name: &str) -> String {
    name.strip_suffix(HOLD_SUFFIX).unwrap_or(name).to_owned()
}

/// Installs the table again if another program has changed or removed it; returns whether it had.
///
/// # Errors
/// If nft refuses the table.
pub fn repair(base: &Path) -> Result<bool, OsError> {
    let folder = folder(base)?;
    if !folder.exists() {
        return Ok(false);
    }
    let records = record::Records::lock(&folder)?;
    if records.all().is_empty() || records.installed() == listed()? {
        return Ok(false);
    }
    install(&records)?;
    Ok(true)
}

/// Networks that a link of this machine is in, and that are private (RFC 1918, RFC 4193) or link-local (RFC
/// 3927, RFC 4291): what other machines of a LAN have. Those of the interfaces `tunnels` are left out.
///
/// # Errors
/// If the kernel does not list its addresses.
pub fn connected_private_networks(tunnels: &[String]) -> Result<Vec<IpNet>, OsError> {
    let mut netlink = Netlink::open()?;
    let links = netlink.links()?;
    let is_tunnel = |index| links.iter().any(|link| link.index == index && tunnels.contains(&link.name));
    let networks = netlink.addresses()?.into_iter().filter(|info| !is_tunnel(info.index));
    let mut networks: Vec<IpNet> = networks.map(|info| info.address.trunc()).filter(is_private).collect();
    networks.sort_unstable();
    networks.dedup();
    Ok(networks)
}

/// Removes records. Returns whether a hold is left.
fn lift(folder: &Path, names: &[String]) -> Result<bool, OsError> {
    let records = record::Records::lock(folder)?;
    names.iter().try_for_each(|name| records.remove(name))?;
    install(&records)?;
    Ok(!holds(&records).is_empty())
}

/// Removes the exceptions of all instances that do not run, holds among them, and the table if none is left.
/// Returns their names.
///
/// # Errors
/// If nft refuses, or a file cannot be removed.
pub fn reset(base: &Path) -> Result<Vec<String>, OsError> {
    let records = record::Records::lock(&folder(base)?)?;
    let mut removed = Vec::new();
    for (name, record) in records.all() {
        if !record.is_in_use() {
            records.remove(&name)?;
            removed.push(instance(&name));
        }
    }
    if !removed.is_empty() || records.all().is_empty() {
        install(&records)?;
    }
    removed.dedup();
    Ok(removed)
}

fn folder(base: &Path) -> Result<PathBuf, OsError> {
    Ok(namespace_folder(base)?.join("kill-switch"))
}

/// Installs the table for all records, or removes it where there are none, and notes how nft shows it.
fn install(records: &record::Records) -> Result<(), OsError> {
    let exceptions: Vec<Exceptions> =
        records.all().into_iter().map(|(_, record)| record.exceptions).collect();
    firewall::apply(firewall::Change::KillSwitch(exceptions))?;
    records.note_installed(&listed()?)
}

/// How nft shows the table now; empty where there is none. What changes with each installation is left out.
fn listed() -> Result<String, OsError> {
    Ok(firewall::list(TABLE)?.map(|listing| table::without_handles(&listing).to_string()).unwrap_or_default())
}
