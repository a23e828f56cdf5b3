//! Runs other programs, with bounded time.
//!
//! In: a program with its arguments and input. Out: how it [`Ended`]. Always holds: a program that does not
//! end in time is killed; its messages are in English (`LC_ALL=C`), because some of them are parsed.

use std::{
    io::{self, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};

/// How often the end of a program is checked for. Longer delays the start of the tunnel, shorter costs
/// wake-ups.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Folders of programs for administrators, which the PATH of some users lacks.
const ADMIN_FOLDERS: &str = "/usr/local/sbin:/usr/sbin:/sbin";

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// With success, and this standard output.
    Well(String),
    /// With a failure; this is what it said, or else how it ended.
    Badly(String),
    /// It is not installed.
    Missing,
    /// It did not end in time.
    Late,
}

/// Runs a program with this standard input, for at most `timeout` (`None`: without limit).
pub fn run(program: &str, args: &[String], input: String, timeout: Option<Duration>) -> Ended {
    let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".to_owned());
    let mut command = Command::new(program);
    command.args(args).env("LC_ALL", "C").env("PATH", format!("{path}:{ADMIN_FOLDERS}"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ended::Missing,
        Err(error) => return Ended::Badly(error.to_string()),
    };
    let mut stdin = child.stdin.take();
    // A program that says much before it has read all would wait for ever.
    let writer =
        thread::spawn(move || stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes())));
    let ended = match timeout {
        None => child.wait_with_output(),
        Some(timeout) => {
            // Both pipes are read meanwhile: a program that says more than they hold would not end.
            let readers = [
                child.stdout.take().map(|pipe| thread::spawn(move || read_all(pipe))),
                child.stderr.take().map(|pipe| thread::spawn(move || read_all(pipe))),
            ];
            let status = match wait(&mut child, timeout) {
                Ok(Some(status)) => Ok(status),
                Ok(None) => {
                    // Both fail only if the process has ended meanwhile.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Ended::Late;
                }
                Err(error) => Err(error),
            };
            let [stdout, stderr] =
                readers.map(|reader| reader.and_then(|reader| reader.join().ok()).unwrap_or_default());
            status.map(|status| std::process::Output { status, stdout, stderr })
        }
    };
    // The program may end without reading all of its input.
    let _ = writer.join();
    match ended {
        Ok(output) if output.status.success() => {
            Ended::Well(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => {
            let said =
                [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
            let said = said.join(" ").trim().to_owned();
            Ended::Badly(if said.is_empty() { output.status.to_string() } else { said })
        }
        Err(error) => Ended::Badly(error.to_string()),
    }
}

/// Runs a program of the user, with these variables added to its environment and without input, for at most
/// `timeout`; then it is killed with all that it started, but for what has left its process group.
///
/// # Errors
/// If it cannot be started, does not end in time, or fails: the reason.
pub fn run_with_facts(program: &Path, facts: Vec<(String, String)>, timeout: Duration) -> Result<(), String> {
    let mut command = Command::new(program);
    command.envs(facts).stdin(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    match wait(&mut child, timeout).map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(status.to_string()),
        None => {
            // Fails only if the group has ended meanwhile.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
            Err(format!("it was killed, as it did not end within {} s", timeout.as_secs()))
        }
    }
}

/// How a process ended; `None`: it did not within this time.
fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(EXIT_POLL_INTERVAL),
            ended => return Ok(ended),
        }
    }
}

fn read_all(mut pipe: impl io::Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Bytes read before an error count.
    let _ = pipe.read_to_end(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> Ended {
        run("sh", &["-c".to_owned(), script.to_owned()], "in\n".to_owned(), Some(timeout))
    }

    #[test]
    fn a_program_says_how_it_ended() {
        let long = Duration::from_secs(20);
        assert_eq!(shell("cat", long), Ended::Well("in\n".to_owned()));
        assert_eq!(shell("echo no >&2; exit 3", long), Ended::Badly("no".to_owned()));
        assert_eq!(shell("sleep 30", Duration::from_millis(20)), Ended::Late);
        assert_eq!(run("no-such-program", &[], String::new(), None), Ended::Missing);
        // More than a pipe holds.
        let Ended::Well(zeros) = shell("head -c 300000 /dev/zero", long) else { panic!("it failed") };
        assert_eq!(zeros.len(), 300_000);
    }

    #[test]
    fn a_program_of_the_user_is_ended_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        let (said, late) = (folder.path().join("said"), folder.path().join("late"));
        let text = format!(
            "#!/bin/sh\necho \"$MPVPN_TEXT\" > {}\n(sleep 0.6; touch {}) &\n[ \"$MPVPN_TEXT\" = stay ] && wait\n",
            said.display(),
            late.display()
        );
        std::fs::write(&script, text).unwrap();
        assert!(
            run_with_facts(&script, Vec::new(), Duration::from_secs(5)).is_err(),
            "it may not be executed"
        );
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let run = |text: &str, time| {
            run_with_facts(&script, vec![("MPVPN_TEXT".to_owned(), text.to_owned())], time)
        };
        let ended = run("stay", Duration::from_millis(200)).unwrap_err();
        assert!(ended.starts_with("it was killed"), "{ended}");
        thread::sleep(Duration::from_millis(800));
        assert!(!late.exists(), "what it started was killed, too");
        assert_eq!(std::fs::read_to_string(&said).unwrap(), "stay\n");
        assert!(run("go", Duration::from_secs(5)).unwrap_err().contains("exit status: 1"));
    }
}
