//! The kill switch from the moment at which the network is there.

use std::{thread, time::Duration};

use crate::{
    report::step,
    site::{Site, wait_for_tunnel},
};

/// A service that sends to the internet all the time, from before the network is configured.
const SENDER: &str = "\
[Unit]
DefaultDependencies=no
After=systemd-journald.socket
Before=network-pre.target
Wants=network-pre.target

[Service]
ExecStart=/bin/sh -c 'while :; do ping -n -c 1 -W 0.1 198.51.100.1; curl -s -m 0.1 http://198.51.100.1/; sleep 0.01; done'
StandardOutput=null
StandardError=null

[Install]
WantedBy=sysinit.target
";

pub(super) fn run() {
    let mut site = Site::new("kill_switch", &[], &[]);
    site.set_up();
    for client in [&site.alpha, &site.beta] {
        client.write("etc/systemd/system/sender.service", SENDER);
        client.run(&["systemctl", "enable", "sender.service"]);
    }
    site.alpha.shell("echo 'kill-switch = true' >>/etc/mpvpn/client.toml");
    site.alpha.run(&["systemctl", "restart", "mpvpn-client"]);
    wait_for_tunnel(&site.alpha);

    let past = |site: &Site| site.network.count("past the tunnel");
    step("without the kill switch packets leave past the tunnel", || {
        let before = past(&site);
        site.beta.reboot();
        wait_for_tunnel(&site.beta);
        let leaked = past(&site) - before;
        println!("            {leaked} packets");
        assert!(leaked > 0, "the sender sends nothing before the client runs, so this test shows nothing");
    });
    site.beta.power_off();
    step("with it none leaves while the client boots", || {
        leaks_nothing(&mut site, |site| {
            site.alpha.reboot();
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the client boots after a power failure", || {
        leaks_nothing(&mut site, |site| {
            site.alpha.cut_power();
            site.alpha.boot();
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the service restarts and while it is stopped by a signal", || {
        leaks_nothing(&mut site, |site| {
            site.alpha.run(&["systemctl", "restart", "mpvpn-client"]);
            wait_for_tunnel(&site.alpha);
            site.alpha.run(&["systemctl", "kill", "--signal=KILL", "mpvpn-client"]);
            thread::sleep(Duration::from_millis(500));
            wait_for_tunnel(&site.alpha);
        });
    });
    step("with it none leaves while the server is off", || {
        site.server.power_off();
        leaks_nothing(&mut site, |site| {
            site.alpha.reboot();
            thread::sleep(Duration::from_secs(3));
        });
        site.server.boot();
        wait_for_tunnel(&site.alpha);
    });
    step("a shutdown lets nothing out either", || leaks_nothing(&mut site, |site| site.alpha.power_off()));
}

/// Runs `task`, and panics if a packet of a client has reached the router past the tunnel.
fn leaks_nothing(site: &mut Site, task: impl FnOnce(&mut Site)) {
    let counters = ["past the tunnel", "queries past the tunnel"];
    let before = counters.map(|comment| site.network.count(comment));
    task(site);
    let after = counters.map(|comment| site.network.count(comment));
    let leaked: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(leaked, [0, 0], "packets and queries past the tunnel");
}
