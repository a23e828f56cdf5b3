//! A client that is set up over SSH: it stays if somebody confirms it, and is taken back otherwise.

use std::time::Duration;

use mpvpn_tests::eventually;

use crate::{
    machine::Machine,
    report::step,
    site::{Site, install, remove, set_up_server, wait_for_tunnel},
};

/// The longest that a terminal session may take.
const SESSION_TIMEOUT: Duration = Duration::from_secs(120);
/// Until when a setup that nobody confirmed is taken back: 60 s, and what that takes on a busy machine.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(90);

pub(super) fn run() {
    let site = Site::new("ssh", &[], &[]);
    let (server, client) = (&site.server, &site.alpha);
    let link = step("install, and set up the server", || {
        [server, client].into_iter().for_each(install);
        set_up_server(server)
    });
    step("a client that is confirmed stays", || {
        // The question, and, once the client runs, Enter.
        let said = over_ssh(client, &link, "sleep 1; echo y; sleep 5; echo; sleep 3");
        assert!(said.contains("confirmed: the client stays"), "{said}");
        wait_for_tunnel(client);
        assert!(is_enabled(client));
        let timers = client.run(&["systemctl", "list-timers", "--all", "--no-legend"]);
        assert!(!timers.contains("rollback"), "{timers}");
        remove(client);
    });
    let before = network(client);
    step("one that nobody confirms is taken back", || {
        // The terminal is gone at once, as when the connection is lost.
        let said = over_ssh(client, &link, "sleep 1; echo y; sleep 4");
        assert!(said.contains("press Enter within 60 s"), "{said}");
        wait_for_tunnel(client);
        assert!(!is_enabled(client), "a reboot would not take it back");
        eventually(ROLLBACK_TIMEOUT, "it is taken back", || match network(client) {
            now if now == before && !client.path("etc/mpvpn/client.toml").exists() => Ok(()),
            now => Err(now),
        });
        assert!(!client.succeeds(&["systemctl", "is-active", "mpvpn-client"]));
        assert!(!client.path("run/mpvpn-client-unconfirmed.json").exists());
    });
}

/// Runs setup in a terminal of somebody who came by SSH, and who types what `typing` prints.
fn over_ssh(client: &Machine, link: &str, typing: &str) -> String {
    let script = format!(
        "({typing}) | SSH_CONNECTION=192.0.2.9 timeout 30 script --quiet --return --command \"mpvpn setup client '$0'\" /dev/null; true"
    );
    let output = client.output(SESSION_TIMEOUT, &["sh", "-c", &script, link]);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn is_enabled(client: &Machine) -> bool {
    client.succeeds(&["systemctl", "is-enabled", "--quiet", "mpvpn-client"])
}

/// The network settings of its machine that a client changes.
fn network(client: &Machine) -> String {
    client
        .shell("ip -o link show | cut -d: -f2; ip rule; ip -6 rule; ip route show table all; nft list tables")
}
