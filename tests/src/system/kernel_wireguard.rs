//! WireGuard in the kernel, where that has it. Its work is done by kernel threads: no process can be charged with it.

use std::{fs, process::Command};

use super::{RunningSystem, wireguard};
use crate::testbed::Testbed;

pub(super) const SETTINGS: &str = "defaults, MTU 1420";

/// Asks for a device and takes it away again, which also loads the module where it is one.
pub(super) fn version() -> Result<String, String> {
    let name = "mpvpn-wg-probe";
    let add = Command::new("ip").args(["link", "add", name, "type", "wireguard"]).output();
    let add = add.map_err(|error| format!("ip: {error}"))?;
    if !add.status.success() {
        return Err(format!("not in this kernel ({})", String::from_utf8_lossy(&add.stderr).trim()));
    }
    let _ = Command::new("ip").args(["link", "del", name]).output();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Ok(format!("Linux {}", kernel.trim()))
}

pub(super) fn start(testbed: &Testbed) -> Result<RunningSystem, String> {
    for (host, device) in wireguard::DEVICES {
        testbed.run(host, &["ip", "link", "add", device, "type", "wireguard"]);
    }
    wireguard::configure(testbed)?;
    let address = "10.77.0.1".parse().expect("an address");
    Ok(RunningSystem { server: None, client: None, address, device: "wgc" })
}
