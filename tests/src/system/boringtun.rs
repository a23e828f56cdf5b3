//! WireGuard in Rust.

use super::{RunningSystem, installed, wireguard};
use crate::testbed::Testbed;

pub(super) const SETTINGS: &str = "defaults (4 threads, connected sockets, several TUN queues), MTU 1420";

pub(super) fn start(testbed: &Testbed) -> Result<RunningSystem, String> {
    let (program, _) = installed("boringtun")?;
    let program = program.to_str().ok_or("its path is not UTF-8")?;
    wireguard::in_user_space(testbed, |host, device| {
        let mut command = testbed.command(host, program);
        command.args(["-f", "--disable-drop-privileges", "-v", "error", device]);
        command
    })
}
