//! The helper: a small process that does what the confined one may not. It runs nft and resolvectl, writes
//! the file with the name servers, and reads files that it was told at its start, whoever owns them.
//!
//! In: a task. Out: its result. Always holds: a task is one of a few kinds and has a bounded size; the helper
//! runs no other programs, reads and writes no other files, and ends with the process that started it. Where
//! no helper was started, tasks are done here.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, OnceLock},
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    confinement::{self, Needs},
    dns::{self, FileRewrite, PreviousContent, service},
    error::OsError,
    program,
};

pub(crate) use crate::program::Ended;

/// The largest message, in bytes. nft's rules for 10,000 sessions have 3 MB; more memory would serve nobody,
/// less refuses large servers.
const MAX_MESSAGE_BYTES: u32 = 16 << 20;
/// The largest part of a file that is read, in bytes: more than any configuration, so that its reader finds
/// it too long.
const MAX_FILE_BYTES: u64 = 5 << 20;
/// The command of `mpvpn` that is the helper.
pub const COMMAND: &str = "helper";

/// The connection to the helper, if one was started.
static HELPER: OnceLock<Mutex<UnixStream>> = OnceLock::new();

/// The programs that the helper runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Program {
    /// nft(8).
    Nft,
    /// resolvectl(1).
    Resolvectl,
}

impl Program {
    /// Where it is. The folders of nft are often missing from the PATH of users that may run it.
    fn path(self) -> &'static str {
        match self {
            Self::Nft => {
                let usual = ["/usr/sbin/nft", "/sbin/nft"].into_iter().find(|path| Path::new(path).exists());
                usual.unwrap_or("nft")
            }
            Self::Resolvectl => "resolvectl",
        }
    }
}

/// A program to be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) program: Program,
    pub(crate) args: Vec<String>,
    /// Its standard input.
    pub(crate) input: String,
    /// After which time it is ended; `None`: never.
    pub(crate) timeout: Option<Duration>,
}

/// A task of a helper.
#[derive(Debug, Serialize, Deserialize)]
enum Task {
    Run(Run),
    NameServers(FileRewrite, Change),
    Read(PathBuf),
}

/// A change to the file of name servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Change {
    /// It gets its new text.
    Write,
    /// It gets this back.
    Restore(PreviousContent),
}

/// Starts the helper, which is this program with the command [`COMMAND`]. From now on it does the tasks.
/// `readable` are the files that it reads.
///
/// # Errors
/// If the process cannot be started.
pub fn start(readable: &[PathBuf]) -> Result<(), OsError> {
    let failed = |error| OsError::kernel("start", "the helper process", error);
    let (own, other) = UnixStream::pair().map_err(failed)?;
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    command.arg(COMMAND).args(readable).stdin(Stdio::from(OwnedFd::from(other))).stdout(Stdio::null());
    command.spawn().map_err(failed)?;
    let _ = HELPER.set(Mutex::new(own));
    Ok(())
}

/// Runs a program, and waits until it has ended.
///
/// # Errors
/// If the helper is gone.
pub(crate) fn run(run: Run) -> Result<Ended, OsError> {
    match HELPER.get() {
        Some(helper) => ask(helper, &Task::Run(run)),
        None => Ok(run_here(&run)),
    }
}

/// Writes the file with the name servers, or puts back what was there.
///
/// # Errors
/// If it cannot be written, or the helper is gone.
pub(crate) fn write_name_servers(rewrite: &FileRewrite, change: Change) -> Result<(), OsError> {
    match HELPER.get() {
        Some(helper) => {
            let done: Result<(), String> = ask(helper, &Task::NameServers(rewrite.clone(), change))?;
            done.map_err(|why| OsError::kernel("change", "the name servers", io::Error::other(why)))
        }
        None => write_here(rewrite, change),
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
/// files that it reads.
///
/// # Errors
/// If it cannot be confined, or its input is no task.
pub fn serve(readable: &[PathBuf]) -> Result<(), OsError> {
    let failed = |error| OsError::kernel("serve as", "the helper process", error);
    let mut stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    if stream.local_addr().is_err() {
        return Err(failed(io::Error::other("standard input is no connection to a process of mpvpn")));
    }
    // Signals of a terminal or a service manager are for the process that it serves, which needs it until its
    // end.
    ignore_signals().map_err(failed)?;
    confinement::confine(&Needs {
        network: true,
        programs: true,
        any_file: true,
        // A file that is replaced is another one, in the same folder.
        readable: readable.iter().filter_map(|path| path.parent()).map(Path::to_owned).collect(),
        // The file with the name servers is replaced by a new one in its folder.
        writable: vec![PathBuf::from("/etc")],
        ..Needs::default()
    })?;
    while let Some(task) = receive(&mut stream).map_err(failed)? {
        match task {
            Task::Run(run) => send(&mut stream, &run_here(&run)),
            Task::NameServers(rewrite, change) => {
                send(&mut stream, &write_here(&rewrite, change).map_err(|error| error.to_string()))
            }
            Task::Read(path) => {
                send(&mut stream, &read_here(readable, &path).map_err(|error| error.to_string()))
            }
        }
        .map_err(failed)?;
    }
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

fn write_here(rewrite: &FileRewrite, change: Change) -> Result<(), OsError> {
    if service::is_needed() {
        return service::change(rewrite, &change);
    }
    match change {
        Change::Write => dns::write(rewrite),
        Change::Restore(before) => dns::restore(rewrite, &before),
    }
}

fn read_here(readable: &[PathBuf], path: &Path) -> io::Result<Vec<u8>> {
    // Those that are known are absolute; the process that asks has the same working directory.
    let path = std::path::absolute(path)?;
    if !readable.contains(&path) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Runs a program in this process, or has the service of root run it.
fn run_here(run: &Run) -> Ended {
    if run.program == Program::Resolvectl && service::is_needed() {
        return service::resolvectl(&run.args);
    }
    run_program(run)
}

/// Runs a program in this process.
pub(crate) fn run_program(run: &Run) -> Ended {
    program::run(run.program.path(), &run.args, run.input.clone(), run.timeout)
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
    use super::*;

    fn nft(args: &[&str], timeout: Option<Duration>) -> Run {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        Run { program: Program::Nft, args, input: String::new(), timeout }
    }

    #[test]
    fn messages_are_read_as_they_were_sent_and_long_ones_are_refused() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let task = nft(&["list"], Some(Duration::from_secs(1)));
        send(&mut one, &task).unwrap();
        assert_eq!(receive::<Run>(&mut other).unwrap(), Some(task));
        one.write_all(&(MAX_MESSAGE_BYTES + 1).to_le_bytes()).unwrap();
        assert!(receive::<Run>(&mut other).unwrap_err().to_string().contains("too long"));
        one.write_all(&3u32.to_le_bytes()).unwrap();
        one.write_all(b"{x}").unwrap();
        assert!(receive::<Run>(&mut other).is_err());
        drop(one);
        assert_eq!(receive::<Run>(&mut other).unwrap(), None);
    }

    #[test]
    fn only_known_files_are_read_also_by_a_relative_path() {
        let known = std::path::absolute("Cargo.toml").unwrap();
        let text = std::fs::read(&known).unwrap();
        let readable = [known.clone()];
        for path in [known.as_path(), Path::new("Cargo.toml")] {
            assert_eq!(read_here(&readable, path).unwrap(), text);
        }
        let error = read_here(&readable, Path::new("src/lib.rs")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn what_a_program_says_is_told() {
        match run_here(&nft(&["--no-such-option"], None)) {
            Ended::Badly(said) => assert!(said.contains("no-such-option"), "{said}"),
            Ended::Missing => eprintln!("skipped: nft is not installed"),
            other => panic!("{other:?}"),
        }
        if let Ended::Well(said) = run_here(&nft(&["--version"], Some(Duration::from_secs(10)))) {
            assert!(said.contains("nftables"), "{said}");
        }
    }
}
