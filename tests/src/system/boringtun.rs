//! WireGuard in Rust.

use super::{Parts, installed, wireguard};
use crate::stage::Stage;

pub(super) const SETTINGS: &str = "defaults (4 threads, connected sockets, several TUN queues), MTU 1420";

pub(super) fn start(stage: &Stage) -> Result<Parts, String> {
    let (program, _) = installed("boringtun")?;
    let program = program.to_str().ok_or("its path is not UTF-8")?;
    wireguard::in_user_space(stage, |place, device| {
        let mut command = stage.command(place, program);
        command.args(["-f", "--disable-drop-privileges", "-v", "error", device]);
        command
    })
}
