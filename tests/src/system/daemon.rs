//! One process of a system, with a log.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::testbed::{Host, Testbed};

/// How long a process may take to end after SIGTERM before SIGKILL.
const TERM_TIMEOUT: Duration = Duration::from_secs(4);

/// A running process; ended when dropped.
pub struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `command`, which is at `host` of `testbed`.
    pub fn start(testbed: &Testbed, host: Host, mut command: Command) -> Result<Self, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let log = testbed.file("log", host);
        let output = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let errors = output.try_clone().map_err(|error| error.to_string())?;
        let child =
            command.stdout(output).stderr(errors).spawn().map_err(|error| format!("{name}: {error}"))?;
        Ok(Self { name, child, log })
    }

    /// Process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails if the process has ended.
    pub fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("{} ended with {status}:\n{}", self.name, self.tail())),
            Err(error) => Err(format!("{}: {error}", self.name)),
        }
    }

    /// The last lines of the log.
    pub fn tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        format!("--- {} (end of its log)\n{}", self.name, lines[lines.len().saturating_sub(15)..].join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let (Ok(None), Some(pid)) = (self.child.try_wait(), Pid::from_raw(self.child.id().cast_signed())) {
            let _ = kill_process(pid, Signal::TERM);
            let deadline = Instant::now() + TERM_TIMEOUT;
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
