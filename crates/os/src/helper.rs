//! The helper: a small process that does what the confined one may not. It changes the firewall and the name
//! servers. It also reads the files that were named at its start, whoever owns them.
//!
//! In: a task. Out: its result. Always holds: a task is one of a few kinds, has a bounded size, and consists
//! of facts that are checked like those of a stranger; the helper changes tables of mpvpn and the one file
//! with the name servers only, reads no other files, and ends with the process that started it. Where no
//! helper was started, tasks are done here.

use std::{
    fs::{self, DirBuilder},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{DirBuilderExt, MetadataExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, OnceLock},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    confinement::{self, Needs},
    dns,
    error::OsError,
    firewall,
    program::Ended,
    regular_file::{self, Links},
};

/// The largest message, in bytes. nft's rules for 10,000 sessions have 3 MB; more memory would serve nobody,
/// less refuses large servers.
pub(crate) const MAX_MESSAGE_BYTES: u32 = 16 << 20;
/// The largest part of a file that is read, in bytes: more than any configuration, so that its reader finds
/// it too long.
const MAX_FILE_BYTES: u64 = 5 << 20;
/// The command of `mpvpn` that is the helper.
pub const COMMAND: &str = "helper";
/// The option of that command for a helper that reads files and does nothing else.
const FILES_ONLY: &str = "--files-only";

/// The connection to the helper, if one was started.
static HELPER: OnceLock<Mutex<UnixStream>> = OnceLock::new();

/// A task of a helper: facts only. Neither a path, a text of a file nor an argument of a program is among
/// them, but the file to read, which is one of those that the helper was started for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    Firewall(firewall::Change),
    ShowTable(String),
    NameServers(dns::Request),
    Read(PathBuf),
}

/// Starts the helper, which is this program with the command [`COMMAND`]. From now on it does the tasks.
/// `readable` are the files that it reads; it only reads them unless this process configures the `network`.
///
/// # Errors
/// If the process cannot be started.
pub fn start(readable: &[PathBuf], network: bool) -> Result<(), OsError> {
    let failed = |error| OsError::kernel("start", "the helper process", error);
    let (own, other) = UnixStream::pair().map_err(failed)?;
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    let limit = (!network).then_some(FILES_ONLY);
    command
        .arg(COMMAND)
        .args(limit)
        .args(readable)
        .stdin(Stdio::from(OwnedFd::from(other)))
        .stdout(Stdio::null());
    command.spawn().map_err(failed)?;
    let _ = HELPER.set(Mutex::new(own));
    Ok(())
}

/// Makes a change of the firewall.
///
/// # Errors
/// If the helper is gone.
pub(crate) fn change_firewall(change: firewall::Change) -> Result<Ended, OsError> {
    match HELPER.get() {
        Some(helper) => ask(helper, &Task::Firewall(change)),
        None => Ok(change.carry_out()),
    }
}

/// Shows a table of the firewall as JSON.
///
/// # Errors
/// If the helper is gone.
pub(crate) fn show_table(table: &str) -> Result<Ended, OsError> {
    match HELPER.get() {
        Some(helper) => ask(helper, &Task::ShowTable(table.to_owned())),
        None => Ok(firewall::show(table)),
    }
}

/// Changes the name servers of this machine.
///
/// # Errors
/// Why that failed, or that the helper is gone.
pub(crate) fn change_name_servers(request: &dns::Request) -> Result<(), String> {
    match HELPER.get() {
        Some(helper) => {
            let task = Task::NameServers(request.clone());
            ask(helper, &task).unwrap_or_else(|error| Err(error.to_string()))
        }
        None => dns::carry_out(request),
    }
}

/// Reads a file that was named at the start of the helper.
///
/// # Errors
/// If there is no helper, or it cannot read the file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let helper = HELPER.get().ok_or(io::ErrorKind::PermissionDenied)?;
    let text: Result<Vec<u8>, String> =
        ask(helper, &Task::Read(path.to_owned())).map_err(io::Error::other)?;
    text.map_err(io::Error::other)
}

/// One question and its answer. Callers of several threads wait for each other.
fn ask<T: DeserializeOwned>(helper: &Mutex<UnixStream>, task: &Task) -> Result<T, OsError> {
    let mut stream = helper.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let answer = send(&mut *stream, task).and_then(|()| receive(&mut *stream));
    let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
    let answer = answer.and_then(|answer| answer.ok_or_else(gone));
    answer.map_err(|error| OsError::kernel("ask", "the helper process", error))
}

/// The life of the helper: does the tasks that come by standard input until it is closed. `readable` are the
/// files that it reads; without `network` it does nothing else.
///
/// # Errors
/// If it cannot be confined, or its input is no task.
pub fn serve(readable: &[PathBuf], network: bool) -> Result<(), OsError> {
    let failed = |error| OsError::kernel("serve as", "the helper process", error);
    let mut stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    if stream.local_addr().is_err() {
        return Err(failed(io::Error::other("standard input is no connection to a process of mpvpn")));
    }
    // Signals of a terminal or a service manager are for the process that it serves, which needs it until its
    // end.
    ignore_signals().map_err(failed)?;
    // An ordinary user has a service of root change the name servers.
    if network {
        let _ = DirBuilder::new().mode(0o700).create(dns::STATE_OF_ROOT);
    }
    // The file with the name servers is replaced by a new one in its folder.
    let changed: &[&str] = if network { &["/etc", dns::STATE_OF_ROOT] } else { &[] };
    confinement::confine(&Needs {
        network,
        programs: network,
        unix_sockets: network,
        any_file: true,
        // A file that is replaced is another one, in the same folder.
        readable: readable.iter().filter_map(|path| path.parent()).map(Path::to_owned).collect(),
        writable: changed.iter().map(PathBuf::from).collect(),
        ..Needs::default()
    })?;
    let mut bypass = None;
    while let Some(task) = receive(&mut stream).map_err(failed)? {
        match task {
            Task::Firewall(change) => {
                if let firewall::Change::Bypass(table) = &change {
                    bypass = Some(firewall::Change::Remove(table.name()));
                }
                send(&mut stream, &change.carry_out())
            }
            Task::ShowTable(table) => send(&mut stream, &firewall::show(&table)),
            Task::NameServers(request) => send(&mut stream, &dns::carry_out(&request)),
            Task::Read(path) => {
                send(&mut stream, &read_here(readable, &path).map_err(|error| error.to_string()))
            }
        }
        .map_err(failed)?;
    }
    // A process that was killed lets nothing past its tunnel any more: its kill switch blocks.
    bypass.map(|table| table.carry_out());
    Ok(())
}

fn ignore_signals() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: SIG_IGN is a valid disposition for these signals.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

pub(crate) fn read_here(readable: &[PathBuf], path: &Path) -> io::Result<Vec<u8>> {
    // Those that are known are absolute; the process that asks has the same working directory.
    let path = std::path::absolute(path)?;
    if !readable.contains(&path) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // The owner of the folder could put a link to a file of root there.
    let is_of_root = path.parent().map(fs::metadata).is_some_and(|found| found.is_ok_and(|it| it.uid() == 0));
    let links = if is_of_root { Links::Follow } else { Links::Refuse };
    regular_file::read(&path, links, MAX_FILE_BYTES)
}

pub(crate) fn send<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let too_long = || io::Error::other(format!("a message of {} bytes is too long", text.len()));
    let length =
        u32::try_from(text.len()).ok().filter(|length| *length <= MAX_MESSAGE_BYTES).ok_or_else(too_long)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&text)
}

/// The next message; `None` if the other end has closed the connection between two messages.
pub(crate) fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::other(format!("a message of {length} bytes is too long")));
    }
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::kill_switch;

    #[test]
    fn messages_are_read_as_they_were_sent_and_long_ones_are_refused() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let task = dns::Request::Forget("mpvpn0".to_owned());
        send(&mut one, &task).unwrap();
        assert_eq!(receive::<dns::Request>(&mut other).unwrap(), Some(task));
        one.write_all(&(MAX_MESSAGE_BYTES + 1).to_le_bytes()).unwrap();
        assert!(receive::<Task>(&mut other).unwrap_err().to_string().contains("too long"));
        one.write_all(&3u32.to_le_bytes()).unwrap();
        one.write_all(b"{x}").unwrap();
        assert!(receive::<Task>(&mut other).is_err());
        drop(one);
        assert!(receive::<Task>(&mut other).unwrap().is_none());
    }

    #[test]
    fn only_known_files_are_read_also_by_a_relative_path() {
        let known = std::path::absolute("Cargo.toml").unwrap();
        let text = fs::read(&known).unwrap();
        let readable = [known.clone()];
        for path in [known.as_path(), Path::new("Cargo.toml")] {
            assert_eq!(read_here(&readable, path).unwrap(), text);
        }
        let error = read_here(&readable, Path::new("src/lib.rs")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(read_here(&["/dev/null".into()], Path::new("/dev/null")).is_err(), "a device");
    }

    #[test]
    fn a_link_in_a_folder_of_another_user_is_not_followed() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: without root");
        }
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("users.toml");
        symlink("/etc/shadow", &link).unwrap();
        let readable = [link.clone()];
        assert!(read_here(&readable, &link).is_ok(), "root's own link");
        std::os::unix::fs::chown(folder.path(), Some(65_534), None).unwrap();
        assert!(read_here(&readable, &link).is_err());
    }

    #[test]
    fn a_table_of_others_and_a_name_that_ends_a_statement_are_refused() {
        let badly = |ended| match ended {
            Ended::Badly(said) => said,
            other => panic!("{other:?}"),
        };
        for table in ["filter", "mpvpn_x; flush ruleset", "mpvpn_\"", "--help", ""] {
            badly(firewall::show(table));
            badly(firewall::Change::Remove(table.to_owned()).carry_out());
        }
        for name in ["x\"; include \"/etc/shadow", "x\\", "x\n"] {
            let hostile = kill_switch::Exceptions { devices: vec![name.to_owned()], ..Default::default() };
            let said = badly(firewall::Change::KillSwitch(vec![hostile]).carry_out());
            assert!(said.contains("a name has"), "{said}");
        }
    }
}
