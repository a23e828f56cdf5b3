//! Configures systemd-resolved by its program resolvectl(1).

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use mpvpn_types::Domain;

use crate::program::{self, Ended};

/// The addresses of its stub resolver (systemd-resolved.service(8)).
const STUB_ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(127, 0, 0, 54)];
/// Time that one call of resolvectl may take. Chosen: a longer one keeps the event loop waiting if the
/// service hangs, a shorter one makes a busy machine rewrite `/etc/resolv.conf` instead
/// (`docs/design/machine.md`, open questions).
const RESOLVECTL_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether programs that use these name servers ask systemd-resolved.
pub(super) fn is_listed(servers: &[IpAddr]) -> bool {
    servers.iter().any(|server| STUB_ADDRESSES.iter().any(|stub| *server == IpAddr::V4(*stub)))
}

/// Makes systemd-resolved ask `servers` over `interface` for all names, or for those below `domain`.
pub(super) fn apply(
    run: impl Fn(&[&str]) -> Result<(), String>,
    interface: &str,
    servers: &[IpAddr],
    domain: Option<&Domain>,
) -> Result<(), String> {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut args = vec!["dns", interface];
    args.extend(servers.iter().map(String::as_str));
    run(&args)?;
    // The routing-only domain `~.` takes precedence over the name servers of other links for all names.
    let routed = format!("~{}", domain.map_or(".", Domain::as_str));
    let mut set = run(&["domain", interface, &routed]);
    if domain.is_some() {
        // Other names stay with the other links.
        set = set.and_then(|()| run(&["default-route", interface, "no"]));
    }
    set.inspect_err(|_| revert(&run, interface))
}

/// Removes all settings of `interface` from systemd-resolved.
pub(super) fn revert(run: impl Fn(&[&str]) -> Result<(), String>, interface: &str) {
    if let Err(reason) = run(&["revert", interface]) {
        tracing::debug!(
            reason,
            "systemd-resolved keeps the tunnel's name servers until the TUN device disappears"
        );
    }
}

/// Runs the real resolvectl.
pub(super) fn resolvectl(args: &[&str]) -> Result<(), String> {
    let words: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let reason = match program::run("resolvectl", &words, String::new(), Some(RESOLVECTL_TIMEOUT)) {
        Ended::Well(_) => return Ok(()),
        Ended::Badly(said) => said,
        Ended::Missing => "it is not installed".to_owned(),
        Ended::Late => format!("no answer within {RESOLVECTL_TIMEOUT:?}"),
    };
    Err(format!("resolvectl {}: {reason}", args.join(" ")))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn name_servers_are_set_for_the_interface_and_reverted() {
        let calls = RefCell::new(Vec::new());
        let run = |args: &[&str]| {
            calls.borrow_mut().push(args.join(" "));
            if args[0] == "domain" && args[1] == "gone0" { Err("gone0 is gone".to_owned()) } else { Ok(()) }
        };
        let servers = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap());
        assert_eq!(apply(run, "mpvpn0", &servers, None), Ok(()));
        assert_eq!(apply(run, "mpvpn0", &servers, Some(&"vpn.internal".parse().unwrap())), Ok(()));
        revert(run, "mpvpn0");
        assert!(apply(run, "gone0", &servers, None).unwrap_err().contains("gone0"));
        assert_eq!(
            *calls.borrow(),
            [
                "dns mpvpn0 10.0.0.1 fd00::1",
                "domain mpvpn0 ~.",
                "dns mpvpn0 10.0.0.1 fd00::1",
                "domain mpvpn0 ~vpn.internal",
                "default-route mpvpn0 no",
                "revert mpvpn0",
                "dns gone0 10.0.0.1 fd00::1",
                "domain gone0 ~.",
                "revert gone0"
            ]
        );
    }

    #[test]
    fn only_the_stub_addresses_mean_systemd_resolved() {
        let is_listed = |ip: &str| is_listed(&[ip.parse().unwrap()]);
        assert!(is_listed("127.0.0.53") && is_listed("127.0.0.54"));
        assert!(!is_listed("127.0.0.1") && !is_listed("192.0.2.53"));
    }
}
