//! Tasks and records of a process that somebody may have taken over, without their effects on the machine,
//! for the fuzzers (`fuzz/`).
//!
//! In: bytes, and a folder in place of `/etc` and `/run`. Out: what the helper and `mpvpn reset` make of
//! them. Nothing here is different from what they do; only nft, resolvectl and the kernel are missing.

use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use netlink_packet_core::{NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage as Message;

use crate::{
    OsError, dns,
    firewall::{Change, table_name},
    helper::{self, Task},
    netlink, sysctl,
    undo::{Owners, Record, Step},
};

/// The effect of a task of the helper.
#[derive(Debug)]
pub enum HelperAction {
    /// nft gets this script, or the task is refused.
    Firewall(Result<String, String>),
    /// nft shows this table, if it is one of mpvpn.
    ShowTable(String),
    /// The file with the name servers was changed, or not.
    NameServers(Result<(), String>),
    /// systemd-resolved gets these for the device with this name, if it is a TUN device.
    Resolved(String, Vec<IpAddr>),
    /// This was in a file.
    Read(io::Result<Vec<u8>>),
}

/// Takes the next task from messages to the helper; `None` at their end. `readable` are the files that it may
/// read. `folder` has the file with the name servers, `resolv.conf`.
///
/// # Errors
/// If the message is no task.
pub fn helper_task(
    messages: &mut &[u8],
    readable: &[PathBuf],
    folder: &Path,
) -> io::Result<Option<HelperAction>> {
    let Some(task) = helper::receive::<Task>(messages)? else { return Ok(None) };
    Ok(Some(match task {
        Task::Firewall(change) => HelperAction::Firewall(change.checked_script()),
        Task::ShowTable(table) => HelperAction::ShowTable(table),
        Task::NameServers(dns::Request::Resolved(tun, servers, _)) => HelperAction::Resolved(tun, servers),
        Task::NameServers(dns::Request::Forget(tun)) => HelperAction::Resolved(tun, Vec::new()),
        Task::NameServers(request) => {
            let (file, state) = (folder.join("resolv.conf"), folder.join("state.json"));
            HelperAction::NameServers(dns::perform(&request, &file, &state))
        }
        Task::Read(path) => HelperAction::Read(helper::read_here(readable, &path)),
    }))
}

/// A request to the machine that undoes a step.
#[derive(Debug)]
pub enum UndoAction {
    /// The kernel gets this message of rtnetlink.
    Kernel(io::Result<Vec<u8>>),
    /// nft gets this script.
    Firewall(Result<String, String>),
    /// This file of the kernel is written, in the end.
    Setting(io::Result<PathBuf>),
    /// The file with the name servers is restored.
    NameServers,
}

/// The requests to the machine that undo a journal with this content, and the content as it is written again;
/// `None` if it is no journal.
pub fn undo(content: &[u8]) -> Option<(Vec<UndoAction>, Vec<u8>)> {
    let record: Record = serde_json::from_slice(content).ok()?;
    let actions = record.steps.iter().map(undo_step).collect();
    Some((actions, serde_json::to_vec(&record).ok()?))
}

fn undo_step(step: &Step) -> UndoAction {
    let kernel = |message| {
        let payload = NetlinkPayload::InnerMessage(message);
        UndoAction::Kernel(netlink::encode(&mut NetlinkMessage::new(NetlinkHeader::default(), payload)))
    };
    match step {
        Step::Device { interface } => kernel(netlink::link::removal(interface.index)),
        Step::Address { interface, address } => {
            kernel(Message::DelAddress(netlink::address::message(interface.index, *address)))
        }
        Step::Answer { interface, address } => {
            kernel(Message::DelNeighbour(netlink::neighbour::proxy(interface.index, *address)))
        }
        Step::Route { route, .. } => kernel(Message::DelRoute(route.message())),
        Step::Rule { rule } => kernel(Message::DelRule(rule.message())),
        Step::Firewall { rules } => {
            UndoAction::Firewall(Change::Remove(table_name(&rules.name)).checked_script())
        }
        Step::ClientFilter(filter) => UndoAction::Firewall(Change::Remove(filter.table()).checked_script()),
        Step::Sysctl { key, .. } => UndoAction::Setting(sysctl::path(key)),
        Step::Resolver(_) => UndoAction::NameServers,
        #[cfg(test)]
        Step::File { .. } => UndoAction::NameServers,
    }
}

/// A change by an instance of a setting that several share.
#[derive(Debug)]
pub enum SettingChange {
    /// It sets this value.
    Claim(String),
    /// It ends, and had set this value.
    Release(String),
}

/// Changes the setting `key`, whose records are in `folder`, as the instance `name` does. Returns what is
/// written to the machine, if anything is.
///
/// # Errors
/// If the record cannot be written.
pub fn change_setting(
    folder: &Path,
    (name, key): (&str, &str),
    now: &str,
    change: &SettingChange,
) -> Result<Option<String>, OsError> {
    let owners = Owners::new(folder, name);
    let mut written = None;
    let now = now.to_owned();
    match change {
        SettingChange::Claim(set) => owners.claim(key, &now, set, || {
            written = Some(set.clone());
            Ok(())
        }),
        SettingChange::Release(set) => owners.release(key, &now, set, |value| {
            written = Some(value.clone());
            Ok(())
        }),
    }?;
    Ok(written)
}
