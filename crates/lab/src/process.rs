//! Programs that a lab starts; they end with it.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::LabError;

/// How often the end of a process is checked for. Longer delays the caller, shorter costs wake-ups.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running program; dropping it kills the program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    /// Starts `command` with its output going to `<base>.out` and `<base>.err`.
    pub(crate) fn spawn(mut command: Command, base: &Path) -> Result<Self, LabError> {
        let program = command.get_program().to_string_lossy().into_owned();
        let (stdout, stderr) = (base.with_extension("out"), base.with_extension("err"));
        let create =
            |path: &Path| File::create(path).map_err(LabError::io(format!("create {}", path.display())));
        let child = command
            .stdin(Stdio::null())
            .stdout(create(&stdout)?)
            .stderr(create(&stderr)?)
            .spawn()
            .map_err(LabError::io(format!("start {program}")))?;
        Ok(Self { child, stdout, stderr })
    }

    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, for example [`Signal::INT`]; a process that has ended already is no error.
    pub fn signal(&mut self, signal: Signal) -> Result<(), LabError> {
        let gone =
            |error| LabError::Io { operation: "read the state of a process".to_owned(), source: error };
        if self.child.try_wait().map_err(gone)?.is_some() {
            return Ok(());
        }
        kill_process(Pid::from_child(&self.child), signal)
            .map_err(LabError::sys(format!("send {signal:?} to {}", self.pid())))
    }

    /// The exit status, if the process has ended.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>, LabError> {
        self.child.try_wait().map_err(LabError::io("read the state of a process"))
    }

    /// Waits at most `limit` for the end of the process; `None` if it still runs.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>, LabError> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.exited()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(EXIT_POLL_INTERVAL);
        }
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The file with its stdout.
    pub fn stdout_path(&self) -> &Path {
        &self.stdout
    }

    /// Its stdout so far.
    pub fn stdout(&self) -> String {
        read_lossy(&self.stdout)
    }

    /// Its stderr so far.
    pub fn stderr(&self) -> String {
        read_lossy(&self.stderr)
    }

    /// The last `lines` lines of its stdout followed by its stderr.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = self.stdout() + &self.stderr();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a command to its end and returns its stdout, or an error with its stderr.
pub fn run(command: &mut Command) -> Result<String, LabError> {
    let line = || {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    };
    let line = line();
    let output = command.stdin(Stdio::null()).output().map_err(LabError::io(format!("run `{line}`")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(LabError::Command {
        program: line,
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Kills all processes whose network namespace is `namespace`, except this one.
pub(crate) fn kill_processes_in(namespace: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let wanted = std::fs::metadata(namespace)?;
    let own = std::process::id();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(found) = std::fs::metadata(entry.path().join("ns/net")) else { continue };
        if (found.ino(), found.dev()) != (wanted.ino(), wanted.dev()) || u32::try_from(pid) == Ok(own) {
            continue;
        }
        if let Some(pid) = Pid::from_raw(pid) {
            // The process may have ended by itself meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    Ok(())
}

fn read_lossy(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}
