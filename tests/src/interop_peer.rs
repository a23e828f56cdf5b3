//! Peers with other implementations of MASQUE and ACME: starts the programs of `tests/interop` on the hosts
//! of a testbed.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use crate::{
    eventually, target_dir,
    testbed::{Host, Testbed},
};

/// How long a program may take to print an expected line: Python takes seconds to start on a busy machine.
const FIRST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(20);

/// The programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// quic-go/connect-ip-go.
    ConnectIp,
    /// quic-go/masque-go.
    Masque,
    /// The ACME CA letsencrypt/pebble, with this file as its `/etc/hosts`.
    Pebble(&'static str),
    /// The web server Caddy.
    Caddy,
    /// A Python script that uses aioquic or h2.
    Python(&'static str),
}

/// The folder of scripts and sources.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("interop")
}

/// The folder of the built programs; the first call builds them.
fn built_programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let dir = target_dir().join("interop");
        let setup = Command::new(sources().join("setup")).arg(&dir).stdin(Stdio::null()).output();
        let output = setup.expect("a shell runs tests/interop/setup");
        assert!(
            output.status.success(),
            "no peers to test with:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        dir.canonicalize().expect("setup made it")
    })
}

/// A running program, ended by its process id when dropped.
pub struct InteropPeer {
    child: Child,
    log: PathBuf,
    args: String,
}

impl InteropPeer {
    /// Starts the program on that host.
    pub fn start(testbed: &Testbed, host: Host, program: Program, args: &[&str]) -> Self {
        let mut command = match program {
            Program::ConnectIp => {
                testbed.command(host, &built_programs().join("connect-ip").to_string_lossy())
            }
            Program::Masque => testbed.command(host, &built_programs().join("masque").to_string_lossy()),
            Program::Pebble(hosts) => {
                let mut command = testbed.command(host, "unshare");
                let script = r#"mount --bind "$0" /etc/hosts && exec "$@""#;
                command.args(["--mount", "sh", "-c", script, hosts]).arg(built_programs().join("pebble"));
                // It waits for up to 15 s before it validates a name unless it is told not to.
                command.env("PEBBLE_VA_NOSLEEP", "1");
                command
            }
            Program::Caddy => {
                let mut command =
                    testbed.command(host, &built_programs().join("venv/bin/caddy").to_string_lossy());
                // It makes folders there.
                command.env("HOME", testbed.dir());
                command
            }
            Program::Python(script) => {
                let mut command =
                    testbed.command(host, &built_programs().join("venv/bin/python").to_string_lossy());
                command.arg("-u").arg(sources().join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
                command
            }
        };
        let log = testbed.file("foreign", host);
        let output = File::create(&log).unwrap_or_else(|error| panic!("{}: {error}", log.display()));
        command.args(args).stdout(output.try_clone().expect("a second handle")).stderr(output);
        let child = command.spawn().unwrap_or_else(|error| panic!("{program:?}: {error}"));
        Self { child, log, args: format!("{program:?} {}", args.join(" ")) }
    }

    /// Waits for a line that starts with `word`, and returns the rest of the line.
    pub fn wait_for_line(&mut self, word: &str) -> String {
        eventually(FIRST_OUTPUT_TIMEOUT, &format!("{} says `{word}`", self.args), || {
            let log = self.log();
            let line = log.lines().find_map(|line| line.strip_prefix(word));
            match (line, self.child.try_wait().expect("our own child")) {
                (Some(line), _) => Ok(line.trim().to_owned()),
                (None, None) => Err(log),
                (None, Some(status)) => panic!("{} ended with {status}:\n{log}", self.args),
            }
        })
    }

    /// Waits for the program to end.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "{} still runs after {limit:?}:\n{}", self.args, self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for exit status 0, and returns the output.
    pub fn wait_for_success(mut self, limit: Duration) -> String {
        let status = self.wait(limit);
        let log = self.log();
        assert!(status.success(), "{} ended with {status}:\n{log}", self.args);
        log
    }

    /// Waits for another exit status than 0, and returns the output.
    pub fn wait_for_failure(mut self, limit: Duration) -> String {
        let status = self.wait(limit);
        let log = self.log();
        assert!(!status.success(), "{} succeeded:\n{log}", self.args);
        log
    }

    /// Sends SIGTERM; the program must end within 5 s.
    pub fn terminate(mut self) {
        // SAFETY: plain system call; the child is not yet waited for, so its process id is still its own.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        self.wait(Duration::from_secs(5));
    }

    /// The output so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).expect("its own log")).into_owned()
    }
}

impl Drop for InteropPeer {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(40)..].join("\n");
            eprintln!("--- {} (end of {})\n{end}", self.args, self.log.display());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
