//! Several servers and clients on one machine, each a service of its own.

use mpvpn_tests::eventually;
use serde_json::Value;

use crate::{
    machine::Machine,
    report::step,
    site::{
        CONNECT_TIMEOUT, Site, install, join, remove, set_up_client, set_up_named_server, set_up_server,
        wait_for_tunnel,
    },
    snapshot::Snapshot,
};

pub(super) fn run() {
    let mut site = Site::new("instances", &[], &[]);
    let before = [&site.server, &site.alpha].map(Snapshot::take);
    let (first, second) = step("two servers on one machine", || {
        install(&site.server);
        (set_up_server(&site.server), set_up_named_server(&site.server, "second", 4433))
    });
    step("two clients on one machine", || {
        install(&site.alpha);
        set_up_client(&site.alpha, &first);
        wait_for_tunnel(&site.alpha);
        site.alpha.run(&["mpvpn", "join", &second, "--name", "work", "--start"]);
        both_are_up(&site);
    });
    step("another machine at the second server", || {
        install(&site.beta);
        join(&site.beta, &second);
        wait_for_tunnel(&site.beta);
    });
    step("all come back after reboots", || {
        site.server.reboot();
        site.alpha.reboot();
        both_are_up(&site);
        wait_for_tunnel(&site.beta);
    });
    step("each is stopped and started without the other", || {
        site.alpha.run(&["systemctl", "stop", "mpvpn-client@work"]);
        wait_for_tunnel(&site.alpha);
        site.alpha.run(&["systemctl", "start", "mpvpn-client@work"]);
        site.server.run(&["systemctl", "restart", "mpvpn-server"]);
        both_are_up(&site);
    });
    step("remove and purge", || {
        for (machine, before) in [&site.server, &site.alpha].into_iter().zip(&before) {
            remove(machine);
            machine.run(&["apt-get", "purge", "--yes", "mpvpn"]);
            let differences = before.differences(&Snapshot::take(machine));
            let name = machine.name();
            assert!(differences.is_empty(), "{name} is not as it was:\n{}", differences.join("\n"));
        }
    });
}

/// Waits until both clients of the machine have their tunnels, each with addresses of its own server.
fn both_are_up(site: &Site) {
    let addresses = |name: &str| {
        eventually(CONNECT_TIMEOUT, &format!("the client {name} connects"), || {
            let status = status(&site.alpha, name)?;
            match status["state"].as_str() {
                Some("up") => Ok(status["addresses"][0].as_str().unwrap_or_default().to_owned()),
                state => Err(format!("state {state:?}")),
            }
        })
    };
    let (one, other) = (addresses("mpvpn0"), addresses("work"));
    assert_ne!(one, other, "both clients have the same address");
}

fn status(machine: &Machine, name: &str) -> Result<Value, String> {
    let args = ["mpvpn", "status", "--json", "--name", name];
    let output = machine.output(std::time::Duration::from_secs(5), &args);
    serde_json::from_slice(&output.stdout).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
}
