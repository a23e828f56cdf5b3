//! systemd-resolved, by its program (resolvectl(1)).

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Where it listens for programs that know nothing of it (systemd-resolved.service(8)).
const STUBS: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(127, 0, 0, 54)];
/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether programs with these name servers ask it.
pub(super) fn is_asked(servers: &[IpAddr]) -> bool {
    servers.iter().any(|server| STUBS.iter().any(|stub| *server == IpAddr::V4(*stub)))
}

/// Has it ask these name servers, over this interface, for all names.
pub(super) fn apply(program: &Path, interface: &str, servers: &[IpAddr]) -> Result<(), String> {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut words = vec!["dns", interface];
    words.extend(servers.iter().map(String::as_str));
    run(program, &words)?;
    // The root is a routing domain that nothing of another link is as good as.
    run(program, &["domain", interface, "~."]).inspect_err(|_| revert(program, interface))
}

/// Has it forget all about this interface.
pub(super) fn revert(program: &Path, interface: &str) {
    if let Err(reason) = run(program, &["revert", interface]) {
        tracing::debug!(reason, "systemd-resolved keeps the name servers until the TUN is gone");
    }
}

fn run(program: &Path, words: &[&str]) -> Result<(), String> {
    let line = || format!("{} {}", program.display(), words.join(" "));
    let failed = |error: std::io::Error| format!("{}: {error}", line());
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{}: {status}", line())),
            None if Instant::now() >= deadline => {
                // Both fail only when it has ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{}: no answer within {PATIENCE:?}", line()));
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn it_is_told_what_to_ask_over_which_interface_and_to_forget_it() {
        let folder = std::env::temp_dir().join(format!("mpvpn-resolvectl-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (program, log) = (folder.join("resolvectl"), folder.join("log"));
        let script = format!("#!/bin/sh\necho \"$@\" >> {}\n[ \"$2\" != gone0 ]\n", log.display());
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let servers = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap());
        let told = apply(&program, "mpvpn0", &servers);
        revert(&program, "mpvpn0");
        let refused = apply(&program, "gone0", &servers);
        let said = fs::read_to_string(&log).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(told, Ok(()));
        assert!(refused.unwrap_err().contains("gone0"));
        assert_eq!(
            said,
            "dns mpvpn0 10.0.0.1 fd00::1\ndomain mpvpn0 ~.\nrevert mpvpn0\ndns gone0 10.0.0.1 fd00::1\n"
        );
        assert!(apply(&folder.join("nothing"), "mpvpn0", &servers).is_err());
    }

    #[test]
    fn only_its_own_addresses_are_its_own() {
        let is_asked = |ip: &str| is_asked(&[ip.parse().unwrap()]);
        assert!(is_asked("127.0.0.53") && is_asked("127.0.0.54"));
        assert!(!is_asked("127.0.0.1") && !is_asked("192.0.2.53"));
    }
}
