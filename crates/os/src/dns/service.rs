//! The service of root that changes the name servers of this machine for clients of an ordinary user: neither
//! `/etc/resolv.conf` nor systemd-resolved may be changed by that user.
//!
//! In: one request on a connection: name servers for the file, the end of them, or settings of a TUN device
//! for systemd-resolved. Out: whether it was done. Always holds: the file gets lines with at most three
//! addresses and nothing else, or back what root found in it, also after a power failure; systemd-resolved is
//! told about TUN devices only; a request is bounded in size and time.
//!
//! The service starts before the clients and ends after them, and listens itself: a service manager that
//! shuts down takes no connections for others.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use mpvpn_types::Domain;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::{
    HEADER, MAX_NAME_SERVERS, RESOLV_CONF,
    file::{self, FileRewrite, PreviousContent},
    resolved, text,
};
use crate::{
    confinement::{self, Needs},
    error::OsError,
    helper,
    service_manager::NotifySocket,
    undo::{namespace, open_locked, replace},
};

/// Where it listens, in a folder that is gone when it has ended.
const SOCKET: &str = "/run/mpvpn-dns/socket";
/// A file that says that it has changed the name servers since the machine has started.
const CHANGED: &str = "/run/mpvpn-dns/changed";
/// Where it keeps what root found in the file, which a power failure must not lose.
const STATE: &str = "/var/lib/mpvpn-dns/before.json";
/// The same for root's own clients, in a file for each network namespace; only root may write there.
pub(crate) const STATE_OF_ROOT: &str = "/run/mpvpn-resolv.conf";
/// How long either end waits for the other. Longer than two calls of resolvectl may take; a longer time keeps
/// a broken connection.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A change of the name servers of this machine: facts, never a path, a text or an argument of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The file names these servers.
    Write(Vec<IpAddr>),
    /// The file names these servers, of an instance that still runs; if none, it gets back what root found
    /// in it.
    Restore(Vec<IpAddr>),
    /// systemd-resolved asks these servers over this TUN device for all names, or for those below a domain.
    Resolved(String, Vec<IpAddr>, Option<Domain>),
    /// systemd-resolved forgets the settings of this TUN device.
    Forget(String),
}

/// The answer: done, or why not.
type Answer = Result<(), String>;

/// Makes this change in this process, or has the service of root make it.
pub(crate) fn carry_out(request: &Request) -> Answer {
    if !rustix::process::geteuid().is_root() && Path::new(SOCKET).exists() {
        return ask(request).unwrap_or_else(|error| Err(format!("{SOCKET}: {error}")));
    }
    let namespace = namespace().map_err(|error| error.to_string())?;
    perform(request, Path::new(RESOLV_CONF), &Path::new(STATE_OF_ROOT).join(format!("{namespace}.json")))
}

fn ask(request: &Request) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(SOCKET)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    helper::send(&mut stream, request)?;
    helper::receive(&mut stream)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// The life of the service. First it puts back what a process left that a power failure has ended.
///
/// # Errors
/// If it cannot be confined, or cannot listen.
pub fn serve() -> Result<(), OsError> {
    let failed = |error| OsError::kernel("listen at", SOCKET, error);
    let (resolv_conf, state) = (Path::new(RESOLV_CONF), Path::new(STATE));
    let manager = NotifySocket::from_environment().map_err(failed)?;
    confinement::confine(&Needs {
        programs: true,
        unix_sockets: true,
        writable: [Path::new("/etc"), folder_of(STATE), folder_of(SOCKET)].map(Path::to_owned).into(),
        ..Needs::default()
    })?;
    if !Path::new(CHANGED).exists() {
        restore(&[], resolv_conf, state)?;
    }
    let _ = fs::remove_file(SOCKET);
    let listener = UnixListener::bind(SOCKET).map_err(failed)?;
    // The group is that of the clients' user.
    fs::set_permissions(SOCKET, fs::Permissions::from_mode(0o660)).map_err(failed)?;
    if let Some(manager) = manager {
        manager.send("READY=1\n").map_err(|error| OsError::kernel("tell", "the service manager", error))?;
    }
    for stream in listener.incoming() {
        let served = stream.and_then(|stream| serve_one(stream, resolv_conf, state));
        if let Err(error) = served {
            tracing::warn!(%error, "a client's request about name servers was not answered");
        }
    }
    Ok(())
}

/// Puts back what root found in the file, if a client was killed and the service has ended since; it would do
/// that at its next start. For root.
///
/// # Errors
/// If the file cannot be written.
pub fn restore_after_service() -> Result<(), OsError> {
    match !Path::new(SOCKET).exists() && Path::new(STATE).exists() {
        true => restore(&[], Path::new(RESOLV_CONF), Path::new(STATE)),
        false => Ok(()),
    }
}

fn folder_of(path: &str) -> &Path {
    Path::new(path).parent().unwrap_or(Path::new("/"))
}

fn serve_one(mut stream: UnixStream, resolv_conf: &Path, state: &Path) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let Some(request) = helper::receive::<Request>(&mut stream)? else { return Ok(()) };
    if matches!(request, Request::Write(_)) {
        fs::write(CHANGED, "")?;
    }
    let answer = perform(&request, resolv_conf, state);
    match &answer {
        Ok(()) => tracing::info!(?request, "name servers of this machine changed for a client"),
        Err(why) => tracing::warn!(?request, why, "a request about name servers was refused"),
    }
    helper::send(&mut stream, &answer)
}

/// Carries out a request. `resolv_conf`: [`RESOLV_CONF`] but in tests. `state`: the file in which root
/// keeps the previous content.
pub(crate) fn perform(request: &Request, resolv_conf: &Path, state: &Path) -> Answer {
    let count = |servers: &[IpAddr]| match servers.len() {
        1..=MAX_NAME_SERVERS => Ok(()),
        other => Err(format!("{other} name servers; 1 to {MAX_NAME_SERVERS} are possible")),
    };
    let is_tun = |name: &str| if is_tun(name) { Ok(()) } else { Err(format!("{name:?} is no TUN device")) };
    match request {
        Request::Write(servers) => {
            count(servers)?;
            write(servers, resolv_conf, state).map_err(|error| error.to_string())
        }
        Request::Restore(servers) => {
            if !servers.is_empty() {
                count(servers)?;
            }
            restore(servers, resolv_conf, state).map_err(|error| error.to_string())
        }
        Request::Resolved(tun, servers, domain) => {
            is_tun(tun)?;
            count(servers)?;
            resolved::apply(resolved::resolvectl, tun, servers, domain.as_ref())
        }
        Request::Forget(tun) => {
            is_tun(tun)?;
            resolved::revert(resolved::resolvectl, tun);
            Ok(())
        }
    }
}

fn write(servers: &[IpAddr], resolv_conf: &Path, state: &Path) -> Result<(), OsError> {
    let _lock = lock(state)?;
    let rewrite = file::plan(resolv_conf, &text(servers))?;
    match rewrite.previous_text().filter(|text| text.starts_with(HEADER)) {
        None => save(state, &rewrite)?,
        Some(_) => saved(state).map_or(Ok(()), |known| save(state, &known.with_new_text(&text(servers))))?,
    }
    file::write(&rewrite)
}

fn restore(servers: &[IpAddr], resolv_conf: &Path, state: &Path) -> Result<(), OsError> {
    let _lock = lock(state)?;
    let Some(mut rewrite) = saved(state) else { return Ok(()) };
    // The name servers of the last client are taken back; text that another program has written is not.
    let now = file::plan(resolv_conf, "")?;
    if let Some(ours) = now.previous_text().filter(|text| text.starts_with(HEADER)) {
        rewrite = rewrite.with_new_text(ours);
    }
    if !servers.is_empty() {
        return file::restore(&rewrite, &PreviousContent::Text(text(servers)));
    }
    file::restore(&rewrite, rewrite.previous())?;
    let _ = fs::remove_file(state);
    let _ = fs::remove_file(lock_of(state));
    Ok(())
}

fn saved(state: &Path) -> Option<FileRewrite> {
    serde_json::from_slice(&fs::read(state).ok()?).ok()
}

fn lock_of(state: &Path) -> PathBuf {
    state.with_extension("lock")
}

fn lock(state: &Path) -> Result<Option<fs::File>, OsError> {
    open_locked(&lock_of(state), FlockOperation::LockExclusive)
        .map_err(|error| OsError::kernel("lock", state.display(), error))
}

fn save(state: &Path, rewrite: &FileRewrite) -> Result<(), OsError> {
    let bytes = serde_json::to_vec(rewrite).map_err(io::Error::from);
    bytes
        .and_then(|bytes| replace(state, &bytes))
        .map_err(|error| OsError::kernel("write", state.display(), error))
}

/// Whether an interface is a TUN device of this machine.
fn is_tun(interface: &str) -> bool {
    let is_name = !interface.starts_with('.') && !interface.contains('/') && !interface.is_empty();
    is_name && Path::new("/sys/class/net").join(interface).join("tun_flags").exists()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const OLD: &str = "nameserver 192.0.2.1\nsearch example\n";

    fn servers(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_file_gets_back_what_root_found_after_several_clients() {
        let home = tempfile::tempdir().unwrap();
        let (file, state) = (home.path().join("resolv.conf"), home.path().join("state.json"));
        let perform = |request: Request| perform(&request, &file, &state);
        let read = || fs::read_to_string(&file).unwrap();
        for is_link in [false, true] {
            fs::write(home.path().join("stub"), OLD).unwrap();
            let _ = fs::remove_file(&file);
            match is_link {
                true => symlink("stub", &file).unwrap(),
                false => fs::write(&file, OLD).unwrap(),
            }
            for list in [["10.0.0.1", "fd00::1"], ["10.1.0.1", "fd01::1"]] {
                perform(Request::Write(servers(&list))).unwrap();
                assert_eq!(read(), text(&servers(&list)));
            }
            // The second ends while the first still runs.
            perform(Request::Restore(servers(&["10.0.0.1"]))).unwrap();
            assert_eq!(read(), text(&servers(&["10.0.0.1"])));
            perform(Request::Restore(Vec::new())).unwrap();
            assert_eq!(read(), OLD);
            assert_eq!(file.is_symlink(), is_link);
            fs::write(&file, "nameserver 9.9.9.9\n").unwrap();
            perform(Request::Restore(Vec::new())).unwrap();
            assert_eq!(read(), "nameserver 9.9.9.9\n", "what another program has written stays");
            perform(Request::Write(servers(&["10.0.0.1"]))).unwrap();
            fs::write(&file, OLD).unwrap();
            perform(Request::Restore(servers(&["10.0.0.2"]))).unwrap();
            assert_eq!(read(), OLD, "also for an instance that still runs");
            perform(Request::Restore(Vec::new())).unwrap();
        }
    }

    #[test]
    fn only_addresses_come_into_the_file() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("resolv.conf");
        for list in [&[][..], &["10.0.0.1"; 4]] {
            for request in
                [Request::Write(servers(list)), Request::Resolved("lo".into(), servers(list), None)]
            {
                assert!(perform(&request, &file, &home.path().join("state.json")).is_err(), "{request:?}");
            }
        }
        assert!(!file.exists());
    }

    #[test]
    fn systemd_resolved_is_told_about_tun_devices_only() {
        for name in ["lo", "--help", "..", ""] {
            let all =
                [Request::Resolved(name.into(), servers(&["10.0.0.1"]), None), Request::Forget(name.into())];
            for request in all {
                let refused = perform(&request, Path::new("/x"), Path::new("/x")).unwrap_err();
                assert!(refused.contains("is no TUN device"), "{refused}");
            }
        }
        assert!(!is_tun("lo") && !is_tun("..") && !is_tun("../net/lo") && !is_tun(""));
    }
}
