//! WireGuard in the kernel, where that has it. Its work is done by kernel threads: no process can be charged with it.

use std::{fs, process::Command};

use super::{Parts, wireguard};
use crate::stage::Stage;

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

pub(super) fn start(stage: &Stage) -> Result<Parts, String> {
    for (place, device) in wireguard::DEVICES {
        stage.run(place, &["ip", "link", "add", device, "type", "wireguard"]);
    }
    wireguard::configure(stage)?;
    let address = "10.77.0.1".parse().expect("an address");
    Ok(Parts { server: None, client: None, address, device: "wgc" })
}
