//! mpvpn as one of the compared systems, with default settings except for the given arguments.

use std::net::Ipv4Addr;

use super::{Daemon, RunningSystem};
use crate::testbed::{Host, SERVER, SERVER_ARGS, Testbed, binary};

/// Over all links of the testbed; `more_args` are additional arguments of the client.
pub(super) fn start(testbed: &Testbed, more_args: &[&str]) -> Result<RunningSystem, String> {
    let program = binary();
    let program = program.to_str().ok_or("the path of mpvpn is not UTF-8")?;
    let run = |host, args: &[&str]| {
        let mut command = testbed.command(host, program);
        command.args(args).arg("--api-socket").arg(testbed.file("api", host));
        Daemon::start(testbed, host, command)
    };
    let server = run(Host::Server, &[&SERVER_ARGS[..], &["--subnet", "10.0.0.0/24"]].concat())?;
    let links = testbed.link_devices();
    let paths: Vec<&str> = links.iter().flat_map(|link| ["--path", link]).collect();
    let args = [&["client", "--server", SERVER, "--insecure"], &paths[..], more_args].concat();
    let client = run(Host::Client, &args)?;
    let address = Ipv4Addr::new(10, 0, 0, 1);
    Ok(RunningSystem::new(server, client, address, "mpvpn0"))
}
