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
    fs,
    io::{self, Write},
    net::IpAddr,
    os::unix::{
        fs::{OpenOptionsExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::{
    HEADER, MAX_NAME_SERVERS, RESOLV_CONF,
    file::{self, FileRewrite, PreviousContent},
    parse, text,
};
use crate::{
    confinement::{self, Needs},
    error::OsError,
    helper::{self, Change, Ended, Program, Run},
    service_manager::NotifySocket,
    undo::open_locked,
};

/// Where it listens, in a folder that is gone when it has ended.
const SOCKET: &str = "/run/mpvpn-dns/socket";
/// A file that says that it has changed the name servers since the machine has started.
const CHANGED: &str = "/run/mpvpn-dns/changed";
/// Where it keeps what root found in the file, which a power failure must not lose.
const STATE: &str = "/var/lib/mpvpn-dns";
/// How long either end waits for the other. Longer than systemd-resolved may take; a longer time keeps a
/// broken connection.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long resolvectl may take, as the client itself would wait.
const RESOLVECTL_TIMEOUT: Duration = Duration::from_secs(3);

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Request {
    /// The file names these servers.
    Write(Vec<IpAddr>),
    /// The file gets back what was in it.
    Restore,
    /// A call of resolvectl.
    Resolvectl(Vec<String>),
}

/// The answer: done, or why not.
type Answer = Result<(), String>;

/// Whether this process needs the service, and the service is there.
pub(crate) fn is_needed() -> bool {
    !rustix::process::geteuid().is_root() && Path::new(SOCKET).exists()
}

/// Has the service make this change of the file.
pub(crate) fn change(rewrite: &FileRewrite, change: &Change) -> Result<(), OsError> {
    let request = match change {
        Change::Write => Request::Write(parse(rewrite.new_text())),
        Change::Restore(PreviousContent::Text(before)) if before.starts_with(HEADER) => {
            Request::Write(parse(before))
        }
        Change::Restore(_) => Request::Restore,
    };
    let answer = ask(&request).and_then(|answer| answer.map_err(io::Error::other));
    answer.map_err(|error| OsError::kernel("change", RESOLV_CONF, error))
}

/// Has the service run resolvectl.
pub(crate) fn resolvectl(args: &[String]) -> Ended {
    match ask(&Request::Resolvectl(args.to_vec())) {
        Ok(Ok(())) => Ended::Well(String::new()),
        Ok(Err(why)) => Ended::Badly(why),
        Err(error) => Ended::Badly(format!("{SOCKET}: {error}")),
    }
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
        writable: [Path::new("/etc"), state, folder_of(SOCKET)].map(Path::to_owned).into(),
        ..Needs::default()
    })?;
    if !Path::new(CHANGED).exists() {
        restore(resolv_conf, state)?;
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

/// Does what is asked for. `resolv_conf` and `state`: [`RESOLV_CONF`] and [`STATE`] but in tests.
fn perform(request: &Request, resolv_conf: &Path, state: &Path) -> Answer {
    match request {
        Request::Write(servers) if servers.is_empty() || servers.len() > MAX_NAME_SERVERS => {
            Err(format!("{} name servers; 1 to {MAX_NAME_SERVERS} are possible", servers.len()))
        }
        Request::Write(servers) => write(servers, resolv_conf, state).map_err(|error| error.to_string()),
        Request::Restore => restore(resolv_conf, state).map_err(|error| error.to_string()),
        Request::Resolvectl(args) => {
            check_resolvectl(args, is_tun)?;
            let (program, timeout) = (Program::Resolvectl, Some(RESOLVECTL_TIMEOUT));
            match helper::run_program(&Run { program, args: args.clone(), input: String::new(), timeout }) {
                Ended::Well(_) => Ok(()),
                Ended::Badly(said) => Err(said),
                Ended::Missing => Err("resolvectl is not installed".to_owned()),
                Ended::Late => Err(format!("resolvectl did not end within {RESOLVECTL_TIMEOUT:?}")),
            }
        }
    }
}

fn write(servers: &[IpAddr], resolv_conf: &Path, state: &Path) -> Result<(), OsError> {
    let _lock = lock(state)?;
    let rewrite = file::plan(resolv_conf, &text(servers))?;
    if !rewrite.previous_text().is_some_and(|text| text.starts_with(HEADER)) {
        save(&original(state), rewrite.previous())
            .map_err(|error| OsError::kernel("write", original(state).display(), error))?;
    }
    file::write(&rewrite)
}

fn restore(resolv_conf: &Path, state: &Path) -> Result<(), OsError> {
    let _lock = lock(state)?;
    let Some(before) = fs::read(original(state)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
    else {
        return Ok(());
    };
    // The name servers of the last client are taken back; text that another program has written is not.
    let rewrite = file::plan(resolv_conf, "")?;
    if let Some(ours) = rewrite.previous_text().filter(|text| text.starts_with(HEADER)) {
        file::restore(&rewrite.with_new_text(ours), &before)?;
    }
    let _ = fs::remove_file(original(state));
    Ok(())
}

fn original(state: &Path) -> PathBuf {
    state.join("before.json")
}

fn lock(state: &Path) -> Result<Option<fs::File>, OsError> {
    open_locked(&state.join("lock"), FlockOperation::LockExclusive)
        .map_err(|error| OsError::kernel("lock", state.display(), error))
}

fn save(path: &Path, before: &PreviousContent) -> io::Result<()> {
    let bytes = serde_json::to_vec(before)?;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(&bytes)?;
    file.sync_all()
}

/// Checks a call of resolvectl: `dns TUN ADDRESS...`, `domain TUN ~.` or `revert TUN`.
fn check_resolvectl(args: &[String], is_tun: impl Fn(&str) -> bool) -> Result<(), String> {
    let [command, interface, rest @ ..] = args else { return Err("a word is missing".to_owned()) };
    let is_known = match command.as_str() {
        "dns" => {
            (1..=MAX_NAME_SERVERS).contains(&rest.len())
                && rest.iter().all(|server| server.parse::<IpAddr>().is_ok())
        }
        "domain" => rest == ["~."],
        "revert" => rest.is_empty(),
        _ => false,
    };
    if !is_known {
        return Err(format!("resolvectl is not run with {args:?}"));
    }
    if !is_tun(interface) {
        return Err(format!("{interface:?} is no TUN device"));
    }
    Ok(())
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
        let (file, state) = (home.path().join("resolv.conf"), home.path().join("state"));
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
            perform(Request::Restore).unwrap();
            assert_eq!(read(), OLD);
            assert_eq!(file.is_symlink(), is_link);
            fs::write(&file, "nameserver 9.9.9.9\n").unwrap();
            perform(Request::Restore).unwrap();
            assert_eq!(read(), "nameserver 9.9.9.9\n", "what another program has written stays");
        }
    }

    #[test]
    fn only_addresses_come_into_the_file() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("resolv.conf");
        for list in [&[][..], &["10.0.0.1"; 4]] {
            let refused = perform(&Request::Write(servers(list)), &file, home.path()).unwrap_err();
            assert!(refused.contains("name servers; 1 to 3"), "{refused}");
        }
        assert!(!file.exists());
        // A text of the client is never written: its addresses are.
        let rewrite = FileRewrite::for_tests(&file, "nameserver 10.0.0.1\noptions evil\n");
        assert_eq!(parse(rewrite.new_text()), servers(&["10.0.0.1"]));
    }

    #[test]
    fn systemd_resolved_is_told_about_tun_devices_only() {
        let check = |line: &str| {
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            check_resolvectl(&args, |name| name == "mpvpn0")
        };
        for good in ["dns mpvpn0 10.0.0.1 fd00::1", "domain mpvpn0 ~.", "revert mpvpn0"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in [
            "dns eth0 10.0.0.1",
            "dns mpvpn0",
            "dns mpvpn0 name",
            "dns mpvpn0 --help",
            "domain mpvpn0 example.com",
            "revert mpvpn0 x",
            "flush-caches mpvpn0",
            "--help mpvpn0",
            "dns",
        ] {
            assert!(check(bad).is_err(), "{bad}");
        }
        assert!(!is_tun("lo") && !is_tun("..") && !is_tun("../net/lo") && !is_tun(""));
    }
}
