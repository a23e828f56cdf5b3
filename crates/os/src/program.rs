//! Runs other programs, with bounded time.
//!
//! In: a program with its arguments and input. Out: how it [`Ended`]. Always holds: a program that does not
//! end in time is killed; its messages are in English (`LC_ALL=C`), because some of them are parsed.

use std::{
    io::{self, Write},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

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
            let deadline = Instant::now() + timeout;
            // Both pipes are read meanwhile: a program that says more than they hold would not end.
            let readers = [
                child.stdout.take().map(|pipe| thread::spawn(move || read_all(pipe))),
                child.stderr.take().map(|pipe| thread::spawn(move || read_all(pipe))),
            ];
            let status = loop {
                match child.try_wait() {
                    Ok(Some(status)) => break Ok(status),
                    Ok(None) if Instant::now() >= deadline => {
                        // Both fail only if the process has ended meanwhile.
                        let _ = child.kill();
                        let _ = child.wait();
                        return Ended::Late;
                    }
                    Ok(None) => thread::sleep(EXIT_POLL_INTERVAL),
                    Err(error) => break Err(error),
                }
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
}
