//! WireGuard in Go; it enables TUN and UDP offloads by default.

use super::{RunningSystem, installed, wireguard};
use crate::testbed::Testbed;

pub(super) const SETTINGS: &str = "defaults, MTU 1420";

pub(super) fn start(testbed: &Testbed) -> Result<RunningSystem, String> {
    let (program, _) = installed("wireguard-go")?;
    let program = program.to_str().ok_or("its path is not UTF-8")?;
    wireguard::in_user_space(testbed, |host, device| {
        let mut command = testbed.command(host, program);
        command.args(["-f", device]).env("WG_PROCESS_FOREGROUND", "1").env("LOG_LEVEL", "error");
        command
    })
}
