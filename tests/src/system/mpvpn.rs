//! mpvpn as a system among others: with its defaults, but for what it is told to do otherwise.

use std::net::Ipv4Addr;

use super::{Daemon, Parts};
use crate::stage::{Place, SERVER, Stage, binary};

/// `more` are words for the client.
pub(super) fn start(stage: &Stage, more: &[&str]) -> Result<Parts, String> {
    let program = binary();
    let program = program.to_str().ok_or("the path of mpvpn is not UTF-8")?;
    let run = |place, words: &[&str]| {
        let mut command = stage.command(place, program);
        command.args(words).arg("--api-socket").arg(stage.file("api", place));
        Daemon::start(stage, place, command)
    };
    let server = run(
        Place::Server,
        &[
            "server",
            "--listen",
            "0.0.0.0:4433",
            "--cert",
            "server.crt",
            "--key",
            "server.key",
            "--subnet",
            "10.0.0.0/24",
            "--auth",
            "none",
        ],
    )?;
    let words = [&["client", "--server", SERVER, "--insecure", "--path", "eth1"], more].concat();
    let client = run(Place::Client, &words)?;
    let address = Ipv4Addr::new(10, 0, 0, 1);
    Ok(Parts::new(server, client, address, "mpvpn0"))
}
