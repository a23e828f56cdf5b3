//! Configures systemd-resolved by its program resolvectl(1).

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The addresses of its stub resolver (systemd-resolved.service(8)).
const STUB_ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(127, 0, 0, 54)];
/// Time that one call of resolvectl may take. Chosen: a longer one keeps the event loop waiting if the service hangs, a shorter
/// one makes a busy machine rewrite `/etc/resolv.conf` instead (`docs/design/machine.md`, open questions).
const RESOLVECTL_TIMEOUT: Duration = Duration::from_secs(3);
/// How often the end of resolvectl is checked for. Longer delays the start of the tunnel, shorter costs wake-ups.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Whether programs that use these name servers ask systemd-resolved.
pub(super) fn is_asked(servers: &[IpAddr]) -> bool {
    servers.iter().any(|server| STUB_ADDRESSES.iter().any(|stub| *server == IpAddr::V4(*stub)))
}

/// Makes systemd-resolved ask `servers` over `interface` for all names.
pub(super) fn apply(program: &Path, interface: &str, servers: &[IpAddr]) -> Result<(), String> {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut args = vec!["dns", interface];
    args.extend(servers.iter().map(String::as_str));
    run(program, &args)?;
    // The routing-only domain `~.` takes precedence over the name servers of other links for all names.
    run(program, &["domain", interface, "~."]).inspect_err(|_| revert(program, interface))
}

/// Removes all settings of `interface` from systemd-resolved.
pub(super) fn revert(program: &Path, interface: &str) {
    if let Err(reason) = run(program, &["revert", interface]) {
        tracing::debug!(
            reason,
            "systemd-resolved keeps the tunnel's name servers until the TUN device disappears"
        );
    }
}

fn run(program: &Path, args: &[&str]) -> Result<(), String> {
    let line = || format!("{} {}", program.display(), args.join(" "));
    let failed = |error: std::io::Error| format!("{}: {error}", line());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let deadline = Instant::now() + RESOLVECTL_TIMEOUT;
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{}: {status}", line())),
            None if Instant::now() >= deadline => {
                // Both fail only if the process has ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{}: no answer within {RESOLVECTL_TIMEOUT:?}", line()));
            }
            None => thread::sleep(EXIT_POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn name_servers_are_set_for_the_interface_and_reverted() {
        let folder = std::env::temp_dir().join(format!("mpvpn-resolvectl-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (program, log) = (folder.join("resolvectl"), folder.join("log"));
        let script = format!("#!/bin/sh\necho \"$@\" >> {}\n[ \"$2\" != gone0 ]\n", log.display());
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let servers = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap());
        let applied = apply(&program, "mpvpn0", &servers);
        revert(&program, "mpvpn0");
        let refused = apply(&program, "gone0", &servers);
        let calls = fs::read_to_string(&log).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(applied, Ok(()));
        assert!(refused.unwrap_err().contains("gone0"));
        assert_eq!(
            calls,
            "dns mpvpn0 10.0.0.1 fd00::1\ndomain mpvpn0 ~.\nrevert mpvpn0\ndns gone0 10.0.0.1 fd00::1\n"
        );
        assert!(apply(&folder.join("nothing"), "mpvpn0", &servers).is_err());
    }

    #[test]
    fn only_the_stub_addresses_mean_systemd_resolved() {
        let is_asked = |ip: &str| is_asked(&[ip.parse().unwrap()]);
        assert!(is_asked("127.0.0.53") && is_asked("127.0.0.54"));
        assert!(!is_asked("127.0.0.1") && !is_asked("192.0.2.53"));
    }
}
