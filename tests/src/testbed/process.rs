//! A running `mpvpn`: its status, events, logs and end.
//!
//! In: a process that a testbed has started. Out: what it says, and its exit code. Always holds: every wait
//! is bounded; the process ends when it is dropped.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpvpn_os::usage::{processor_time, resident_memory};
use serde_json::Value;

use super::{Family, binary};
use crate::eventually;

/// How long a tunnel may take to come up on a busy machine before the test fails.
const UP_TIMEOUT: Duration = Duration::from_secs(15);

/// A running `mpvpn`; ended when dropped.
pub struct MpvpnProcess {
    pub(super) args: String,
    pub(super) child: Child,
    pub(super) log: PathBuf,
    pub(super) socket: PathBuf,
    pub(super) ended: Option<ExitStatus>,
}

impl MpvpnProcess {
    /// Waits until the status says `up`, or `degraded` as a link is down.
    pub fn wait_until_up(mut self) -> Self {
        self.wait_until_up_within(UP_TIMEOUT);
        self
    }

    /// Waits until the status says `up`, for at most `limit`. Returns the duration.
    pub fn wait_until_up_within(&mut self, limit: Duration) -> Duration {
        let began = Instant::now();
        loop {
            if let Some(status) = self.poll_exit() {
                panic!("`mpvpn {}` ended with {status} instead of coming up:\n{}", self.args, self.log());
            }
            let state = self.try_status().map(|status| status["state"].clone());
            if state.as_ref().is_ok_and(|state| state == "up" || state == "degraded") {
                return began.elapsed();
            }
            assert!(began.elapsed() < limit, "not up within {limit:?}: {state:?}\n{}", self.log_tail());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Path of the API socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The output of `mpvpn status --json`.
    pub fn status(&self) -> Value {
        self.query_status(&[]).unwrap_or_else(|error| panic!("no status: {error}\n{}", self.log_tail()))
    }

    /// The JSON of `mpvpn status --json`, fetched without starting a process.
    fn try_status(&self) -> Result<Value, String> {
        let status = mpvpn_api::fetch_status(&self.socket).map_err(|error| error.to_string())?;
        serde_json::to_value(status).map_err(|error| error.to_string())
    }

    /// The list of flows in the output of `mpvpn status --flows --json`.
    pub fn flows(&self) -> Vec<Value> {
        let answer = self
            .query_status(&["--flows"])
            .unwrap_or_else(|error| panic!("no flows: {error}\n{}", self.log_tail()));
        answer["flows"].as_array().expect("flows is a list").clone()
    }

    fn query_status(&self, more_args: &[&str]) -> Result<Value, String> {
        let answer = self.run("status", more_args)?;
        serde_json::from_str(&answer).map_err(|error| error.to_string())
    }

    /// The events in the output of `mpvpn events --json`, the newest last.
    pub fn events(&self) -> Vec<Value> {
        let lines =
            self.run("events", &[]).unwrap_or_else(|error| panic!("no events: {error}\n{}", self.log_tail()));
        let read = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        lines.lines().map(read).collect()
    }

    /// The output of an `mpvpn` command with `--json` for this process.
    fn run(&self, command: &str, more_args: &[&str]) -> Result<String, String> {
        let output = Command::new(binary())
            .args([command, "--json", "--api-socket"])
            .arg(&self.socket)
            .args(more_args)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits until `wanted` accepts the status; its error is part of the panic message.
    pub fn wait_for_status(
        &self,
        limit: Duration,
        what: &str,
        wanted: impl Fn(&Value) -> Result<(), String>,
    ) -> Value {
        eventually(limit, what, || {
            let status = self.try_status()?;
            wanted(&status).map(|()| status.clone()).map_err(|complaint| format!("{complaint}: {status:#}"))
        })
    }

    /// Waits until the path of the default class over `link` is in `state`.
    pub fn wait_for_path(&self, link: &str, state: &str, limit: Duration) -> Value {
        self.wait_for_status(limit, &format!("{link} {state}"), |status| {
            let found = path_of(status, link).map(|path| path["state"] == state);
            if found == Some(true) { Ok(()) } else { Err(format!("no {state} path over {link}")) }
        })
    }

    /// The first IPv4 or IPv6 address inside the tunnel, without its prefix length.
    pub fn address(&self, family: Family) -> String {
        let status = self.status();
        let all = status["addresses"].as_array().expect("addresses is a list");
        let mut texts = all.iter().filter_map(|address| address.as_str()?.split('/').next());
        let found = texts.find(|text| text.contains(':') == (family == Family::V6));
        found.unwrap_or_else(|| panic!("no {family:?} address in {all:?}")).to_owned()
    }

    /// Process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory, bytes.
    pub fn memory(&self) -> u64 {
        resident_memory(self.id()).expect("a running process has VmRSS")
    }

    /// Processor time used so far, user and system.
    pub fn processor_time(&self) -> Duration {
        processor_time(self.id()).expect("a running process has used time")
    }

    /// Waits until the client, which goes on, says that the server refuses it, and why.
    #[track_caller]
    pub fn wait_until_refused(&self, limit: Duration, said: &str) {
        self.wait_for_status(limit, said, |status| {
            let verdict = status["verdict"].as_str().unwrap_or_default();
            let is_said = status["state"] == "refused"
                && verdict.starts_with("refused: ")
                && verdict.contains(said)
                && verdict.ends_with("; ask who runs the server");
            if is_said { Ok(()) } else { Err(format!("{}: {verdict}", status["state"])) }
        });
        let log = self.log();
        assert!(log.contains(said), "{}", self.log_tail());
        // A server that says why it closes a connection has answered.
        let before = log.split_once(" connection lost: ").and_then(|(before, _)| before.lines().rev().nth(1));
        let is_silence = before.is_some_and(|line| line.contains("no answer from the server"));
        assert!(!is_silence, "{}", self.log_tail());
    }

    /// Sends SIGINT, and returns the exit status.
    pub fn interrupt(&mut self) -> ExitStatus {
        self.signal(libc::SIGINT);
        self.wait(Duration::from_secs(10))
    }

    /// Sends SIGTERM, and returns the exit status.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        self.wait(Duration::from_secs(10))
    }

    /// Sends SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        self.wait(Duration::from_secs(10));
    }

    /// Sends SIGHUP: the process reads its configuration again.
    pub fn reload(&self) {
        self.signal(libc::SIGHUP);
    }

    /// Stops the process (SIGSTOP), until [`Self::go_on`].
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Lets a stopped process go on.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: libc::c_int) {
        assert!(self.ended.is_none(), "`mpvpn {}` has ended already:\n{}", self.args, self.log());
        // SAFETY: plain system call; the child is not yet waited for, so its process id is still its own.
        unsafe { libc::kill(self.child.id().cast_signed(), signal) };
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.poll_exit() {
                return status;
            }
            assert!(Instant::now() < deadline, "still running after {limit:?}\n{}", self.log_tail());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn poll_exit(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("our own child");
        }
        self.ended
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.poll_exit().is_none()
    }

    /// The output so far.
    pub fn log(&self) -> String {
        let mut text = Vec::new();
        File::open(&self.log).and_then(|mut file| file.read_to_end(&mut text)).expect("its own log");
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The last lines of the output, with a heading.
    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let end = lines[lines.len().saturating_sub(40)..].join("\n");
        format!("--- mpvpn {} (end of {})\n{end}", self.args, self.log.display())
    }
}

impl Drop for MpvpnProcess {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
        // First a graceful end, so that failed tests also leave little behind.
        if self.poll_exit().is_none() {
            self.signal(libc::SIGINT);
            let deadline = Instant::now() + Duration::from_secs(3);
            while self.poll_exit().is_none() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // A system call that is missing in the list fails in ways that a test may not see.
        let denied = |line: &&str| line.contains("is not allowed to this process");
        if let Some(denied) = self.log().lines().find(denied)
            && !thread::panicking()
        {
            panic!("{denied}");
        }
    }
}
/// The paths of a class in a client's status, or in the entry of a client in a server's status.
pub fn paths_of<'a>(status: &'a Value, class: &str) -> Vec<&'a Value> {
    let all = status["paths"].as_array().into_iter().flatten();
    all.filter(|path| path["class"] == class).collect()
}

/// The path of the default class over that link.
pub fn path_of<'a>(status: &'a Value, link: &str) -> Option<&'a Value> {
    paths_of(status, "default").into_iter().find(|path| path["link"] == link)
}
