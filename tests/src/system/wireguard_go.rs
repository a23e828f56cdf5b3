//! WireGuard in Go: TUN and UDP offloads are on by themselves.

use super::{Parts, installed, wireguard};
use crate::stage::Stage;

pub(super) const SETTINGS: &str = "defaults, MTU 1420";

pub(super) fn start(stage: &Stage) -> Result<Parts, String> {
    let (program, _) = installed("wireguard-go")?;
    let program = program.to_str().ok_or("its path is not UTF-8")?;
    wireguard::in_user_space(stage, |place, device| {
        let mut command = stage.command(place, program);
        command.args(["-f", device]).env("WG_PROCESS_FOREGROUND", "1").env("LOG_LEVEL", "error");
        command
    })
}
