//! WireGuard in the kernel, if available. Kernel threads do its work, so there is no process whose time could
//! be measured.

use std::{fs, process::Command};

use super::{RunningSystem, wireguard};
use crate::testbed::Testbed;

pub(super) const SETTINGS: &str = "defaults, MTU 1420";

/// Creates and deletes a device, which also loads the module.
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
